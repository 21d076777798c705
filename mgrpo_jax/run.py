"""From a config to a finished run, and from a run folder back to its team."""

from __future__ import annotations

import json
import os
import pathlib
import sys

import jax
from ml_collections import config_dict

from mgrpo_jax import checkpoint, evaluation, final, loop, metrics, run_folder
from mgrpo_jax import config as config_lib
from mgrpo_jax.errors import UserError, user_input


def use_compilation_cache() -> None:
  """Keep compiled programs between runs (MGRPO_CACHE, else the user's cache), unless jax was told already."""
  if jax.config.jax_compilation_cache_dir is None:
    base = os.environ.get("MGRPO_CACHE") or os.path.expanduser("~/.cache/mgrpo_jax")
    jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(base) / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def run(config) -> dict:
  """Run a config to its end and print the final table; returns the results.

  The same call goes on with an interrupted run; a finished one only shows its table again.
  """
  with user_input():
    config_lib.validate(config)
  use_compilation_cache()
  with run_folder.RunFolder.open(config.run_dir, config, ignore=("run_dir",)) as folder:
    print(f"run folder {folder.path}{': going on where it stands' if folder.resumed else ''}", file=sys.stderr)
    result = loop.train(config, folder, finish=final.results if config.eval.final else None)
  return result


def load_team(path: str, step: str = "best") -> tuple[loop.Team, int]:
  """The team of a run folder with the weights of a checkpoint ("best", "last" or a number), ready to answer.

  Raises:
    UserError: not a run folder, no such checkpoint.
  """
  folder = pathlib.Path(path)
  if not (folder / run_folder.CONFIG).is_file():
    raise UserError(f"{path!r} is no run folder: it has no {run_folder.CONFIG}; give the run_dir of a training run")
  config = config_dict.ConfigDict(json.loads((folder / run_folder.CONFIG).read_text()))
  use_compilation_cache()
  with user_input(), checkpoint.Checkpoints(folder / run_folder.CHECKPOINTS, read_only=True) as checkpoints:
    number = {"best": checkpoints.best, "last": checkpoints.latest_step}.get(step, lambda: None)()
    if number is None and step in ("best", "last"):
      raise UserError(f"run folder {path!r} has no checkpoint yet")
    if number is None:
      if not step.isdigit() or int(step) not in checkpoints.steps():
        raise UserError(f"--step={step} is neither best, last nor one of the kept steps {checkpoints.steps()}")
      number = int(step)
    config.train.warm_start = "none"  # the weights come from the checkpoint
    team = loop.build_team(config, folder)
    states, _ = checkpoints.restore(number, {n: {"params": a.state["params"]} for n, a in team.agents.items()})
  for n, agent in team.agents.items():
    agent.state["params"] = states[n]["params"]
    agent.publish(number)
  return team, number


def evaluate_saved(path: str, *, split: str = "test", step: str = "best", control: str = "none", count: int | None = None,
                   temperature: float = 0.0, seed: int = 0) -> dict:
  """Ask a run's team the questions of a split, print and return the summary (controls: see launch/evaluate.py)."""
  team, number = load_team(path, step)
  queries = getattr(team.world, split)[:count]
  runtimes, stand_ins = final.control(team, control)
  with metrics.Progress(len(queries), split) as bar:
    result = evaluation.evaluate(runtimes, queries, team.world.correct, main=config_lib.MAIN, stand_ins=stand_ins,
                                 temperature=temperature, seed=seed, progress=lambda _: bar.update(1))
  summary = {"run": str(path), "step": number, "split": split, "control": control, "temperature": temperature, **result.summary()}
  print(json.dumps(summary, indent=1))
  return summary
