"""Say whether a config fits the devices, before any is rented: memory and FLOPs of every agent.

    python launch/plan.py --config=configs/gaia.py:paper --chip=v5p
    python launch/plan.py --config=configs/gaia.py --chip=v5e --config.agents.main.model.embed_dim=1024
    python launch/plan.py --config=configs/gaia.py:paper --chip=v6e --slices=2

Nothing is allocated, so a laptop plans for a pod. With `pip install libtpu` the TPU's own compiler is asked; without
it, and for GPUs, the activations are estimates.
"""

import os
import pathlib
import sys

from absl import flags
from ml_collections import config_flags

from mgrpo_jax import errors
from mgrpo_jax.config import find_config

ROOT = pathlib.Path(__file__).resolve().parents[1]
CONFIG = config_flags.DEFINE_config_file("config", None, "Experiment file, as for launch/train.py.")
CHIP = flags.DEFINE_enum("chip", "v5p", ["v5e", "v5p", "v6e", "a100", "h100", "h200"], "What the devices are.")
SLICES = flags.DEFINE_integer("slices", 1, "TPU slices per agent; its data axis goes across them.", lower_bound=1)


def main(argv):
  if len(argv) > 1:
    raise errors.UserError(f"unknown argument {argv[1]!r}; settings are written --config.KEY=VALUE")
  from mgrpo_jax import validation

  validation.validate(CONFIG.value, planned=True)
  os.environ["JAX_PLATFORMS"] = "cpu"  # a plan takes no device, not even one that is there
  from mgrpo_jax import plan

  print(plan.describe(plan.plan(CONFIG.value, CHIP.value, slices=SLICES.value), CHIP.value))


if __name__ == "__main__":
  sys.argv = find_config(sys.argv, ROOT)
  errors.run(main)
