"""Write a trained agent as a Hugging Face folder: weights (adapters merged), config and tokenizer, ready to be served.

    python launch/export.py --run=runs/smollm2 --agent=search --out=exported/search
    python launch/export.py --run=runs/smollm2 --agent=main --step=last --dtype=bfloat16 --out=exported/main
"""

from absl import flags

from mgrpo_jax import errors

RUN = flags.DEFINE_string("run", None, "Run folder.", required=True)
OUT = flags.DEFINE_string("out", None, "Folder to write; new or empty.", required=True)
AGENT = flags.DEFINE_string("agent", "main", "Which agent.")
STEP = flags.DEFINE_string("step", "best", "Checkpoint: best (on validation), last, or a number.")
DTYPE = flags.DEFINE_enum("dtype", None, ["float32", "bfloat16", "float16"], "Type of the numbers in the file (default: as trained).")


def main(argv):
  if len(argv) > 1:
    raise errors.UserError(f"unknown argument {argv[1]!r}")
  from mgrpo_jax import export

  print(export.export(RUN.value, OUT.value, agent=AGENT.value, step=STEP.value, dtype=DTYPE.value))


if __name__ == "__main__":
  errors.run(main)
