"""The final results of a run: what was learned, by whom, and what it is worth against the controls.

Everything is asked greedily of the same test questions, so every comparison is paired by question. The trained
weights are those of the checkpoint that was best on validation; the test questions choose nothing.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mgrpo_jax import checkpoint, evaluation, metrics, statistics
from mgrpo_jax.config import MAIN
from mgrpo_jax.report import curves
from mgrpo_jax.run_folder import RunFolder, write_json
from mgrpo_jax.trajectory import Query


class _NothingFound:
  """The tools of the closed-book control: whatever is asked, nothing is there."""

  def call(self, name: str, arguments: dict) -> str:
    return "nothing found"


def results(team, checkpoints: checkpoint.Checkpoints, folder: RunFolder) -> dict:
  """Evaluate a finished run on its test questions, draw its curve, print its table.

  Each evaluation is kept in evaluations/, so one that was interrupted goes on where it was.

  Returns:
    JSON-able dict: the best step, fingerprints of the final parameters, evaluations, gains with 95 % intervals.
  """
  last = {n: checkpoint.tree_fingerprint(a.state["params"]) for n, a in team.agents.items()}
  best = checkpoints.best()
  states, _ = checkpoints.restore(best, {n: {"params": a.state["params"]} for n, a in team.agents.items()})
  trained = {n: states[n]["params"] for n in team.agents}
  warm = {n: checkpoint.load_weights(folder.warm(n), a.state["params"])[0] for n, a in team.agents.items()}
  asked = _Asker(team, folder, best)
  asked.all(warm, trained)
  done = asked.done
  experts = {n: a.config.expert for n, a in team.agents.items() if a.config.expert}
  out = {"best_step": best, "experts": experts, "steps": team.config.train.steps, "fingerprints": last,
         "evaluations": {k: v["summary"] for k, v in done.items()}, "gains": _gains(done, asked.baseline_of)}
  curves.learning_curve({"this run": [folder.metrics]}, folder.curve, title=f"{folder.path.name}: validation accuracy and rewards")
  table = render(out)
  (folder.path / "results.txt").write_text(table + "\n", encoding="utf-8")
  print("\n" + table)
  print(f"\nlearning curve: {folder.curve}\nsampled rollouts: {folder.rollouts}\nall numbers: {folder.results}")
  return out


def evaluation_file(folder: pathlib.Path, name: str) -> pathlib.Path:
  """Where the evaluation of this name is kept: {"step", "ids", "correct", "levels", "summary"}."""
  return folder / (name.replace(":", "").replace(",", "").replace(" ", "-") + ".json")


class _Asker:
  """Runs the named evaluations of a run, each once."""

  def __init__(self, team, folder: RunFolder, step: int):
    self.team, self.step = team, step
    self.folder = folder.path / "evaluations"
    self.folder.mkdir(exist_ok=True)
    self.done: dict[str, dict] = {}
    self.baseline_of: dict[str, str] = {}  # trained evaluation -> what it is compared with

  def all(self, warm: dict, trained: dict) -> None:
    team = self.team
    lost, _ = control(team, "random_search")
    opened = all(a.frozen is not None for a in team.agents.values())
    if opened:  # adapters of zero are the open models as they came
      self.ask("as it came", jax.tree.map(jnp.zeros_like, warm))
    self.ask("warm start", warm, baseline="as it came" if opened else None)
    self.ask("trained", trained, baseline="warm start")
    self.ask("trained, random search", trained, runtimes=lost)
    if team.config.eval.parts:
      self.parts(warm, trained)
    for agent in team.agents.values():
      agent.publish(agent.version)

  def parts(self, warm: dict, trained: dict) -> None:
    """Whose learning it was, and how much each agent could still learn."""
    team, world = self.team, self.team.world
    subs = [n for n in team.agents if n != MAIN]
    blind, _ = control(team, "closed_book")
    _, oracle = control(team, "perfect_sub")
    gold = world.subquestions(world.test)[: len(world.test)]  # as many as there are questions, at most
    trainable = [n for n in team.agents if team.agents[n].trainable]
    for name in trainable if len(trainable) > 1 else ():
      self.ask(f"only {name} trained", {**warm, name: trained[name]}, baseline="warm start")
    self.ask("trained, closed book", trained, runtimes=blind)
    if subs:
      self.ask("headroom: main with a perfect sub, warm", warm, stand_ins=oracle)
      self.ask("headroom: main with a perfect sub, trained", trained, stand_ins=oracle,
               baseline="headroom: main with a perfect sub, warm")
    for name in subs if gold else ():
      self.ask(f"headroom: {name} on gold subquestions, warm", warm, queries=gold, main=name)
      self.ask(f"headroom: {name} on gold subquestions, trained", trained, queries=gold, main=name,
               baseline=f"headroom: {name} on gold subquestions, warm")

  def ask(self, name: str, weights: dict, *, queries: Sequence[Query] | None = None, main: str = MAIN, runtimes=None,
          stand_ins=None, baseline: str | None = None) -> None:
    queries = self.team.world.test if queries is None else queries
    path = evaluation_file(self.folder, name)
    if baseline:
      self.baseline_of[name] = baseline
    step = self.step if "trained" in name else 0  # what a run began with is the same whatever was learned
    kept = json.loads(path.read_text()) if path.exists() else {}
    if kept.get("step") == step and kept.get("ids") == [q.id for q in queries]:
      self.done[name] = kept
      return
    for n, agent in self.team.agents.items():
      agent.with_weights(weights[n])
    with metrics.Progress(len(queries), f"test: {name}") as bar:
      result = evaluation.evaluate(runtimes or self.team.runtimes, queries, self.team.world.correct, main=main,
                                   stand_ins=stand_ins, progress=lambda _: bar.update(1), **self.team.tool_options)
    self.done[name] = {"step": step, "ids": result.ids, "correct": [int(c) for c in result.correct],
                       "levels": result.levels, "summary": result.summary()}
    write_json(path, self.done[name])


def control(team, name: str) -> tuple[dict, dict | None]:
  """(runtimes, stand-ins) of a control: "none", "closed_book", "random_search" or "perfect_sub"."""
  if name == "perfect_sub":
    return team.runtimes, {n: team.world.oracle for n in team.agents if n != MAIN}
  tools = {"closed_book": lambda seed: _NothingFound(), "random_search": team.world.random_tools}.get(name)
  if tools is None:
    return team.runtimes, None
  return {n: dataclasses.replace(r, tools=tools if r.tools else None) for n, r in team.runtimes.items()}, None


def _gains(done: dict[str, dict], baseline_of: dict[str, str]) -> dict:
  out = {}
  for name, base in baseline_of.items():
    a, b = (np.array(done[n]["correct"], bool) for n in (name, base))
    mean, low, high = statistics.paired_difference(a, b)
    out[name] = {"over": base, "gain": mean, "interval": [low, high], "p": float(statistics.paired_exact(a, b)), "count": len(a)}
  return out


def render(result: dict) -> str:
  """The final table as text."""
  rows = []
  for name, s in result["evaluations"].items():
    levels = " / ".join(f"{s[k]['accuracy']:.3f}" for k in sorted(s) if k.startswith("level_"))
    gain = result["gains"].get(name)
    shown = f"{gain['gain']:+.3f} [{gain['interval'][0]:+.3f}, {gain['interval'][1]:+.3f}]" if gain else ""
    rows.append([name, s["count"], f"{s['accuracy']:.3f} [{s['interval'][0]:.3f}, {s['interval'][1]:.3f}]", levels, shown])
  table = curves.table(rows, ["greedy, held-out questions", "n", "accuracy [95 %]", "by level", "gain over its start [95 %, paired]"])
  notes = [f"trained = step {result['best_step']} of {result['steps']}, best on validation"]
  if "atlas_oracle" in result["experts"].values():
    notes.append("a part of the sub-agents' reward in training is an oracle: the world itself knows each subquestion's answer")
  return "\n".join([table, "", *notes])

