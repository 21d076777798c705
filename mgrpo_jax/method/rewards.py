"""Composite rewards of the main agent and of its sub-agents (paper eq. 4 and 5).

Both are plain sums of their terms (additive, not convex): with other weights the largest reward is the
sum of the weights. A trajectory whose format is invalid scores 0 whatever else is true of it. These are
scores of what the *policy* did; a trajectory that died of infrastructure has no reward but weight 0.
"""

from __future__ import annotations

import math


def main_reward(
  format_ok: bool, correct: float, *, format_weight: float = 0.1, correct_weight: float = 0.9
) -> float:
  """Reward of a main trajectory (eq. 4): format_weight + correct_weight * correct, 0 if the format is invalid.

  Args:
    format_ok: whether every turn obeyed the protocol.
    correct: score of the final answer in 0..1 (a bool does). Not looked at when the format is invalid.
    format_weight, correct_weight: the paper's a1 and a2.

  Raises:
    ValueError: `correct` is missing or not finite although the format is valid.
  """
  if not format_ok:
    return 0.0
  return float(format_weight + correct_weight * _score("correct", correct))


def sub_reward(
  format_ok: bool,
  main_correct: float,
  expert: float,
  *,
  format_weight: float = 0.1,
  main_weight: float = 0.4,
  expert_weight: float = 0.5,
) -> float:
  """Reward of a sub trajectory (eq. 5): the main agent's outcome and an expert's score of this subtask.

  Args:
    format_ok: whether every turn of the sub trajectory obeyed the protocol; if not, the reward is 0.
    main_correct: the main agent's score in 0..1, the same for all sub trajectories of the rollout.
    expert: score of this subtask in 0..1. Not looked at when the format is invalid.
    format_weight, main_weight, expert_weight: the paper's b1, b2 and b3.

  Raises:
    ValueError: a score is missing or not finite although the format is valid.
  """
  if not format_ok:
    return 0.0
  outcome = main_weight * _score("main_correct", main_correct)
  return float(format_weight + outcome + expert_weight * _score("expert", expert))


def overlong_penalty(length: int, max_length: int, buffer: int, factor: float = 1.0) -> float:
  """DAPO's soft penalty for long answers: 0, then falling linearly over the last `buffer` tokens, then -factor.

  Args:
    length: sampled TOKENS of the trajectory (not characters).
    max_length: tokens at which the penalty reaches -factor.
    buffer: width in tokens of the linear part; 0 makes it a step just beyond `max_length`.
    factor: the largest penalty.

  Returns:
    A number in [-factor, 0], to be added to the reward.

  Raises:
    ValueError: a buffer outside 0..max_length.
  """
  if not 0 <= buffer <= max_length:
    raise ValueError(f"overlong buffer is {buffer} tokens; it must lie in 0..max_length={max_length}")
  if length > max_length:
    return -float(factor)
  excess = length - (max_length - buffer)
  return -float(factor) * excess / buffer if excess > 0 else 0.0


def _score(name: str, value: float) -> float:
  if value is None or not math.isfinite(value):
    raise ValueError(
      f"{name} is {value} for a trajectory with a valid format; give a trajectory that cannot be scored "
      "weight 0 instead of a reward"
    )
  return float(value)
