"""From finished rollouts to what one agent trains on: rewards, advantages and alignment weights.

The numbers come from `method`; here stands only who is compared with whom. A group is the trajectories of
one agent for one query, a unit is a rollout, and a rollout in which anything failed for reasons that are
not the policy's takes part in nothing (DESIGN decision 8).
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from mgrpo_jax.method import advantages as adv
from mgrpo_jax.method import alignment, rewards
from mgrpo_jax.trajectory import Rollout, Trajectory, stable_hash

# A sub-agent's expert score: (task text, result or None) -> score in [0, 1], or None when the task has no answer.
Expert = Callable[[str, str | None], float | None]


@dataclasses.dataclass
class Group:
  """What one agent has from one step, row by row.

  Attributes:
    trajectories: all of them, also those that take no part.
    weights: f32[N] alignment weight (0 = takes no part in statistics or loss).
    loss_weights: f32[N] weight in the loss and its divisor (0 also where a status is masked).
    advantages: f32[N].
    stats: plain numbers about the groups.
    dead_queries: questions of which no group can teach anything (equal rewards, or nothing that takes part).
  """

  trajectories: list[Trajectory]
  weights: np.ndarray
  loss_weights: np.ndarray
  advantages: np.ndarray
  stats: dict[str, float]
  dead_queries: list[str]


def score_rollouts(rollouts: Sequence[Rollout], *, correct: Callable[[str | None, object], bool],
                   experts: dict[str, Expert], main_weights: dict, sub_weights: dict, overlong: dict) -> None:
  """Fill in `correct`, rewards, components and weights of every trajectory, in place.

  Args:
    correct: (prediction, query) -> bool, the task's scorer.
    experts: expert score by sub-agent name; a sub-agent without one gets the term 0.
    main_weights: keyword weights of `rewards.main_reward`; sub_weights: of `rewards.sub_reward`.
    overlong: {"mode", "statuses", "penalty", "buffer", "max_tokens" by agent}: "penalise" subtracts `penalty` from those that
      ended in one of the statuses, "penalise_length" the soft penalty for sampled tokens, whatever the status.
  """
  for rollout in rollouts:
    main, failed = rollout.main, any(t.status == "failed" for t in rollout.trajectories)
    rollout.correct = main.result is not None and bool(correct(main.result, rollout.query))
    main.components = {"format": float(main.format_ok), "correct": float(rollout.correct)}
    main.reward = rewards.main_reward(main.format_ok, rollout.correct, **main_weights)
    # the credit that flows down is the answer's correctness, as the paper has it: 0 if main's format is invalid
    credit = float(rollout.correct and main.format_ok)
    for sub in rollout.subs:
      expert = experts[sub.agent](sub.task, sub.result) if sub.agent in experts else 0.0
      sub.components = {"format": float(sub.format_ok), "main_correct": credit,
                        "expert": float("nan") if expert is None else float(expert)}
      if expert is None:  # no answer exists: nothing to be right or wrong about
        sub.weight = 0.0
      sub.reward = rewards.sub_reward(sub.format_ok, credit, expert or 0.0, **sub_weights)
    for t in rollout.trajectories:
      if failed:
        t.weight = 0.0
      elif overlong["mode"] == "exclude" and t.status in overlong["statuses"]:
        t.weight = 0.0
      elif overlong["mode"].startswith("penalise"):
        t.components["overlong"] = _overlong_penalty(t, overlong)
        t.reward += t.components["overlong"]


def _overlong_penalty(t: Trajectory, overlong: dict) -> float:
  if overlong["mode"] == "penalise":
    return -overlong["penalty"] * (t.status in overlong["statuses"])
  return rewards.overlong_penalty(t.num_sampled, overlong["max_tokens"][t.agent], overlong["buffer"], overlong["penalty"])


def agent_group(rollouts: Sequence[Rollout], agent: str, *, main: str, mode: str, advantage: dict,
                group_by: str, zero_variance: str, overlong: dict, target: int, seed: int, size: int) -> Group:
  """Advantages and weights of one agent's trajectories of one step.

  Args:
    mode, target: of `alignment.align`, D already chosen.
    advantage: scale, baseline, ddof, tol of `group_advantages`.
    group_by: "query" (the paper), "position" (query and which call of this agent), "turn" (query and main turn), "pooled".
    zero_variance: "keep" lets dead groups count in the divisor; "drop" and "resample" leave them out.
    seed: of this step, for the draws of mode "duplicate".
    size: rows are padded to this many, so that the statistics are compiled once.
  """
  rows = [(r, t) for r in rollouts for t in r.trajectories if t.agent == agent]
  trajectories = [t for _, t in rows]
  weights, dropped = _alignment_weights(rollouts, agent, main, mode, target, seed)
  for t, w in zip(trajectories, weights):
    t.share = float(w)
  n = len(rows)
  groups = _index([_group_key(t, nth, group_by) for t, nth in zip(trajectories, _positions(trajectories))])
  units = _index([(t.query_id, t.rollout) for t in trajectories])
  values = np.array([np.nan if t.reward is None else t.reward for t in trajectories], np.float32)
  size = max(size, n)
  padded = dict(rewards=_pad(values, size), group_ids=_pad(groups, size, dtype=np.int32),
                weights=_pad(weights, size), unit_ids=_pad(units, size, fill=size, dtype=np.int32))
  advantages = np.asarray(adv.group_advantages(
    padded["rewards"], padded["group_ids"], padded["weights"], num_groups=size,
    unit_ids=padded["unit_ids"], scale=advantage["scale"], baseline=advantage["baseline"],
    ddof=advantage["ddof"], tol=advantage["tol"]))[:n]
  dead = adv.zero_variance(padded["rewards"], padded["group_ids"], padded["weights"], num_groups=size,
                           unit_ids=padded["unit_ids"], tol=advantage["tol"])
  flat, high, low = np.asarray(dead.dead), np.asarray(dead.high), np.asarray(dead.low)
  live_groups = sorted({g for g, w in zip(groups, weights) if w > 0})
  loss_weights = weights.copy()
  if zero_variance != "keep":
    loss_weights *= ~flat[np.asarray(groups, int)] if n else 1
  if overlong["mode"] == "mask":  # kept in the baseline, left out of the loss
    loss_weights *= np.array([t.status not in overlong["statuses"] for t in trajectories], np.float32)
  stats = {
    "groups": len(live_groups),
    "zero_variance": _share(flat, live_groups), "all_high": _share(high, live_groups), "all_low": _share(low, live_groups),
    "dropped": float(dropped), "weightless": float(sum(t.weight == 0 for t in trajectories)),
    "failed": float(sum(t.status == "failed" for t in trajectories)),
  }
  teaching = {t.query_id for t, g, w in zip(trajectories, groups, weights) if w > 0 and not flat[g]}
  dead_queries = sorted({t.query_id for t in trajectories} - teaching)
  return Group(trajectories, weights, loss_weights.astype(np.float32), advantages, stats, dead_queries)


def calls_per_rollout(rollouts: Sequence[Rollout], agent: str) -> list[int]:
  """d_k: how many trajectories of a sub-agent take part, by rollout; those in which something failed say nothing of it."""
  whole = [r for r in rollouts if not any(t.status == "failed" for t in r.trajectories)]
  return [sum(t.agent == agent and t.weight > 0 for t in r.subs) for r in whole]


def _alignment_weights(rollouts, agent, main, mode, target, seed) -> tuple[np.ndarray, int]:
  """f32[N] weight of each trajectory of the agent in rollout order, and how many were dropped."""
  if agent == main:
    return np.array([r.main.weight for r in rollouts], np.float32), 0
  by_query: dict[str, list[Rollout]] = {}
  for r in rollouts:
    by_query.setdefault(r.query.id, []).append(r)
  weight: dict[int, float] = {}
  dropped = 0
  for query_id, group in by_query.items():
    group = sorted(group, key=lambda r: r.index)  # so that the draws do not hang on the order of the list
    calls = [[t for t in r.subs if t.agent == agent and t.weight > 0] for r in group]
    aligned = alignment.align([len(c) for c in calls], target=target, mode=mode,
                              seed=(seed + stable_hash(query_id)) & 0x7FFFFFFF)
    merged = alignment.merge_copies(aligned)
    for c, row in zip(calls, merged):
      for t, w in zip(c, row):
        weight[id(t)] = float(w)
        dropped += w == 0
  return np.array([weight.get(id(t), 0.0) for r in rollouts for t in r.subs if t.agent == agent], np.float32), dropped


def _positions(trajectories: Sequence[Trajectory]) -> list[int]:
  """Which call of its agent each trajectory is within its rollout (0 is the first)."""
  seen: collections.Counter = collections.Counter()
  out = []
  for t in trajectories:
    out.append(seen[t.query_id, t.rollout])
    seen[t.query_id, t.rollout] += 1
  return out


def _group_key(t: Trajectory, position: int, group_by: str):
  if group_by == "pooled":
    return ()
  return {"query": (t.query_id,), "position": (t.query_id, position), "turn": (t.query_id, t.turn_index)}[group_by]


def _index(keys: Sequence) -> list[int]:
  seen: dict = {}
  return [seen.setdefault(k, len(seen)) for k in keys]


def _pad(values, size, *, fill=0, dtype=np.float32) -> np.ndarray:
  out = np.full(size, fill, dtype)
  out[: len(values)] = values
  return out


def _share(flags: np.ndarray, groups: list[int]) -> float:
  return float(np.mean(flags[groups])) if groups else 0.0
