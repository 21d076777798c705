"""Ask a finished (or running) run's team the held-out questions, or run a control.

    python launch/evaluate.py --run=runs/gaia                             # best checkpoint, test questions
    python launch/evaluate.py --run=runs/gaia --control=closed_book       # no page can be read
    python launch/evaluate.py --run=runs/gaia --control=random_search     # search shows random pages
    python launch/evaluate.py --run=runs/gaia --split=validation --step=0
"""

from absl import flags

from mgrpo_jax import errors

RUN = flags.DEFINE_string("run", None, "Run folder.", required=True)
SPLIT = flags.DEFINE_enum("split", "test", ["train", "validation", "test"], "Which questions.")
STEP = flags.DEFINE_string("step", "best", "Checkpoint: best, last, or a step (0 is the warm start, while it is kept).")
CONTROL = flags.DEFINE_enum("control", "none", ["none", "closed_book", "random_search", "perfect_sub"],
                            "none: as trained; closed_book: tools find nothing; random_search: pages at random; "
                            "perfect_sub: an oracle answers in place of the sub-agents.")
COUNT = flags.DEFINE_integer("count", None, "Ask only the first so many.", lower_bound=1)
TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 is greedy.", lower_bound=0.0)
SEED = flags.DEFINE_integer("seed", 0, "Of the sampling, when the temperature is not 0.")


def main(argv):
  if len(argv) > 1:
    raise errors.UserError(f"unknown argument {argv[1]!r}")
  from mgrpo_jax import run

  run.evaluate_saved(RUN.value, split=SPLIT.value, step=STEP.value, control=CONTROL.value, count=COUNT.value,
                     temperature=TEMPERATURE.value, seed=SEED.value)


if __name__ == "__main__":
  errors.run(main)
