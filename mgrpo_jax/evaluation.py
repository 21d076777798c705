"""Accuracy with honest denominators: every question asked stays in, whatever happened to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from mgrpo_jax import statistics
from mgrpo_jax.rollout import controller
from mgrpo_jax.trajectory import Query, Rollout


@dataclasses.dataclass
class Evaluation:
  """One pass over a fixed list of questions.

  Attributes:
    ids: question ids in order; correct: bool[n] in the same order (a failure is a wrong answer).
    levels: level of each question.
    rollouts: what was rolled out (for people; not needed for the numbers).
  """

  ids: list[str]
  correct: np.ndarray
  levels: list[str]
  rollouts: list[Rollout] = dataclasses.field(repr=False, default_factory=list)

  @property
  def accuracy(self) -> float:
    return float(np.mean(self.correct)) if len(self.correct) else 0.0

  def summary(self) -> dict:
    """Plain numbers: accuracy with a 95 % Wilson interval, overall and by level; statuses; calls; format."""
    n = len(self.correct)
    out: dict = {"accuracy": self.accuracy, "count": n,
                 "interval": list(statistics.wilson_interval(int(self.correct.sum()), n))}
    for level in sorted(set(self.levels)):
      picked = self.correct[[x == level for x in self.levels]]
      out[f"level_{level}"] = {"accuracy": float(picked.mean()), "count": len(picked),
                               "interval": list(statistics.wilson_interval(int(picked.sum()), len(picked)))}
    out["format"] = float(np.mean([r.main.format_ok for r in self.rollouts])) if self.rollouts else 0.0
    out["calls"] = float(np.mean([len(r.subs) for r in self.rollouts])) if self.rollouts else 0.0
    for r in self.rollouts:
      key = f"status_{r.main.status}"
      out[key] = out.get(key, 0) + 1
    return out


def evaluate(agents: dict[str, controller.AgentRuntime], queries: Sequence[Query], correct: Callable, *,
             main: str = "main", stand_ins: dict | None = None, temperature: float = 0.0, seed: int = 0,
             progress: Callable | None = None, **tools) -> Evaluation:
  """Ask every question once (greedy by default).

  Args:
    agents: runtimes by name. To evaluate an agent alone, pass it as `main`.
    correct: (prediction, query) -> bool.
    stand_ins: functions that answer in place of a sub-agent (headroom and controls).
    tools: tool_threads and tool_deadline of `run_rollouts`.
  """
  jobs = [controller.Job(q, 0, seed=seed, step=-1, temperature=temperature) for q in queries]
  rollouts = controller.run_rollouts(agents, jobs, main=main, stand_ins=stand_ins, progress=progress, **tools)
  for r in rollouts:
    r.correct = r.main.result is not None and bool(correct(r.main.result, r.query))
  return Evaluation([q.id for q in queries], np.array([r.correct for r in rollouts], bool),
                    [q.level for q in queries], rollouts)


def flat(summary: dict, prefix: str) -> dict[str, float]:
  """A summary as flat slash names for the metrics."""
  out: dict[str, float] = {}
  for key, value in summary.items():
    if isinstance(value, dict):
      out |= flat(value, f"{prefix}/{key}")
    elif key == "interval":
      out |= {f"{prefix}/low": value[0], f"{prefix}/high": value[1]}
    else:
      out[f"{prefix}/{key}"] = value
  return out
