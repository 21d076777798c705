"""Train a team of agents.

    python launch/train.py --config=configs/gaia.py
    python launch/train.py --config=configs/gaia.py --config.seed=1 --config.run_dir=runs/gaia-s1

The same command goes on with an interrupted run. Any key of the config can be set with --config.KEY=VALUE.
"""

from absl import flags
from ml_collections import config_flags

from mgrpo_jax import errors

CONFIG = config_flags.DEFINE_config_file("config", "configs/gaia.py", "Experiment file; `file.py:argument` passes an argument.")
FLAGS = flags.FLAGS


def main(argv):
  if len(argv) > 1:
    raise errors.UserError(f"unknown argument {argv[1]!r}; settings are written --config.KEY=VALUE")
  from mgrpo_jax import run  # imports jax, which a wrong flag need not wait for

  run.run(CONFIG.value)


if __name__ == "__main__":
  errors.run(main)
