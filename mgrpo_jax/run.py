"""From a config to a finished run: folder, training, final table."""

from __future__ import annotations

import os
import pathlib
import sys

import jax

from mgrpo_jax import config as config_lib
from mgrpo_jax import final, loop
from mgrpo_jax.errors import user_input
from mgrpo_jax.run_folder import RunFolder


def use_compilation_cache() -> None:
  """Keep compiled programs between runs (MGRPO_CACHE, else the user's cache), unless jax was told already."""
  if jax.config.jax_compilation_cache_dir is None:
    base = os.environ.get("MGRPO_CACHE") or os.path.expanduser("~/.cache/mgrpo_jax")
    jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(base) / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def run(config) -> dict:
  """Run a config to its end and print the final table; returns the results."""
  with user_input():
    config_lib.validate(config)
  use_compilation_cache()
  with RunFolder.open(config.run_dir, config, ignore=("run_dir",)) as folder:
    print(f"run folder {folder.path}{' (going on)' if folder.resumed else ''}", file=sys.stderr)
    return loop.train(config, folder, finish=final.results if config.eval.final else None)
