"""Train a team of agents.

    python launch/train.py --config=configs/gaia.py
    python launch/train.py --config=configs/gaia.py --config.seed=1 --config.run_dir=runs/gaia-s1

The same command goes on with an interrupted run. Any key of the config can be set with --config.KEY=VALUE.
"""

import pathlib
import sys

from ml_collections import config_flags

from mgrpo_jax import errors
from mgrpo_jax.config import find_config

ROOT = pathlib.Path(__file__).resolve().parents[1]
# no default here: it would be parsed at once, and what is wrong with its overrides would be a traceback
CONFIG = config_flags.DEFINE_config_file("config", None, "Experiment file (configs/gaia.py); `file.py:argument` passes an argument.")


def main(argv):
  if len(argv) > 1:
    raise errors.UserError(f"unknown argument {argv[1]!r}; settings are written --config.KEY=VALUE")
  from mgrpo_jax import validation

  validation.validate(CONFIG.value)
  from mgrpo_jax import run  # imports jax, which a wrong setting need not wait for

  run.run(CONFIG.value)


if __name__ == "__main__":
  sys.argv = find_config(sys.argv, ROOT)
  errors.run(main)
