"""From a config to a finished run, and from a run folder back to its team."""

from __future__ import annotations

import json
import math
import pathlib
import sys

import jax
from absl import logging
from ml_collections import config_dict

from mgrpo_jax import checkpoint, evaluation, final, loop, metrics, run_folder, validation, warm_start
from mgrpo_jax import config as config_lib
from mgrpo_jax.errors import UserError, user_input


def prepare_process() -> None:
  """Quiet libraries, and compiled programs kept between runs (MGRPO_CACHE, else the user's cache) unless jax was told."""
  logging.set_verbosity(logging.WARNING)
  if jax.config.jax_compilation_cache_dir is None:
    jax.config.update("jax_compilation_cache_dir", str(warm_start.cache_root() / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def run(config) -> dict:
  """Run a config to its end and print the final table; returns the results.

  The same call goes on with an interrupted run; a finished one only shows its table again.
  """
  with user_input():
    validation.validate(config)
  prepare_process()
  with run_folder.RunFolder.open(config.run_dir, config, ignore=("run_dir",)) as folder:
    print(f"run folder {folder.path}{': going on where it stands' if folder.resumed else ''}", file=sys.stderr)
    result = loop.train(config, folder, finish=final.results if config.eval.final else None)
  return result


def load_team(path: str, step: str = "best") -> tuple[loop.Team, int]:
  """The team of a run folder with the weights of a checkpoint ("best", "last" or a number), ready to answer.

  Raises:
    UserError: not a run folder, no such checkpoint.
  """
  folder = pathlib.Path(path).expanduser()
  if not (folder / run_folder.CONFIG).is_file():
    raise UserError(f"{path!r} is no run folder: it has no {run_folder.CONFIG}; give the run_dir of a training run")
  config = saved_config(folder / run_folder.CONFIG)
  prepare_process()
  _fit_devices(config)
  with user_input(), checkpoint.Checkpoints(folder / run_folder.CHECKPOINTS, read_only=True) as checkpoints:
    number = {"best": checkpoints.best, "last": checkpoints.latest_step}.get(step, lambda: None)()
    if number is None and step in ("best", "last"):
      hint = f"; the kept steps {checkpoints.steps()} have no validation score, so name one" if checkpoints.steps() else ""
      raise UserError(f"run folder {path!r} has no {step} checkpoint yet{hint}")
    if number is None:
      if not step.isdigit() or int(step) not in checkpoints.steps():
        raise UserError(f"--step={step} is neither best, last nor one of the kept steps {checkpoints.steps()}")
      number = int(step)
    config.train.warm_start = "none"  # the weights come from the checkpoint
    team = loop.build_team(config, None)  # None: a reader writes nothing
    states, _ = checkpoints.restore(number, {n: {"params": a.state["params"]} for n, a in team.agents.items()})
  for n, agent in team.agents.items():
    agent.state["params"] = states[n]["params"]
    agent.publish(number)
  return team, number


def saved_config(path: pathlib.Path) -> config_dict.ConfigDict:
  """The config of a run folder, also of another version: what it lacks gets its default, and both ways it is said.

  Raises:
    UserError: not JSON, or values that this version refuses.
  """
  with user_input(str(path)):
    saved = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(saved, dict) or not isinstance(saved.get("agents"), dict):
      raise UserError(f"{path} is not the config of a run")
    config = config_lib.base_config()
    for name, agent in saved["agents"].items():
      shown = agent.get("warm_start", {}).get("demonstrations", "search")
      config.agents[name] = config_lib.agent_config(demonstrations=shown)
    known, there = validation.schema(config), validation.flat(saved)
    values = {k: tuple(v) if known[k][0] is tuple and v is not None else v for k, v in there.items() if k in known}
    config.update_from_flattened_dict(values)
    validation.validate(config)
  for keys, fault, remedy in ((there.keys() - known.keys(), "this version does not know", "ignored"),
                              (known.keys() - there.keys(), "it lacks", "the default is taken")):
    if keys:
      print(f"warning: {path} is of another version: {fault} {', '.join(sorted(keys)[:5])} ({remedy})", file=sys.stderr)
  return config


def _fit_devices(config) -> None:
  """Weights can be read onto any mesh: where there are fewer devices than the run had, every agent takes one."""
  if any(math.prod(a.mesh.values()) > jax.device_count() for a in config.agents.values()):
    print(f"the run's meshes need more than the {jax.device_count()} devices here: every agent is put on one", file=sys.stderr)
    for a in config.agents.values():
      a.mesh.update({axis: 1 for axis in a.mesh})


def evaluate_saved(path: str, *, split: str = "test", step: str = "best", control: str = "none", count: int | None = None,
                   temperature: float = 0.0, seed: int = 0) -> dict:
  """Ask a run's team the questions of a split, print and return the summary (controls: see launch/evaluate.py)."""
  team, number = load_team(path, step)
  if control == "perfect_sub" and len(team.agents) == 1:
    raise UserError(f"--control=perfect_sub: the run {path!r} has one agent, and no sub-agent to replace")
  queries = getattr(team.world, split)[:count]
  runtimes, stand_ins = final.control(team, control)
  with metrics.Progress(len(queries), split) as bar:
    result = evaluation.evaluate(runtimes, queries, team.world.correct, main=config_lib.MAIN, stand_ins=stand_ins,
                                 temperature=temperature, seed=seed, progress=lambda _: bar.update(1), **team.tool_options)
  summary = {"run": str(path), "step": number, "split": split, "control": control, "temperature": temperature, **result.summary()}
  print(json.dumps(summary, indent=1))
  return summary
