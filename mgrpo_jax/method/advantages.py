"""Group-relative advantages (paper eq. 9-13), jitted, over distinct trajectories with weights.

A group is the trajectories of one agent for one query. The paper's numbers are scale "std" with ddof 0
and copies counted (weights that are multiples, see `alignment`); "none" is Dr. GRPO; baseline
"leave_one_out" is RLOO. Statistics never see a row of weight 0, whatever its reward.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

SCALES = ("std", "none")
BASELINES = ("mean", "leave_one_out")


class ZeroVariance(NamedTuple):
  """Which groups can teach nothing; each field is bool[num_groups].

  Attributes:
    present: the group has a row of positive weight (False for the padding of `num_groups`).
    dead: present, but fewer than two units or rewards that differ by <= tol: all its advantages are 0.
    high: dead, with rewards of at least `threshold` (all right).
    low: dead, with rewards under it (all wrong).
  """

  present: jax.Array
  dead: jax.Array
  high: jax.Array
  low: jax.Array


class _Groups(NamedTuple):
  """Per row: live, w, g, r (above the group's smallest). Per group, one spare at the end: the rest."""

  live: jax.Array
  w: jax.Array
  g: jax.Array
  r: jax.Array
  total: jax.Array
  low: jax.Array
  present: jax.Array
  dead: jax.Array


def group_advantages(
  rewards: Any,
  group_ids: Any,
  weights: Any,
  *,
  num_groups: int,
  unit_ids: Any = None,
  scale: str = "std",
  baseline: str = "mean",
  ddof: float = 0,
  tol: float = 1e-6,
) -> jax.Array:
  """Advantage of each row against its group: (r - baseline) / scale.

  mu = sum(w r) / sum(w) and var = sum(w (r - mu)^2) / (sum(w) - ddof), in two passes, weights as they
  come (pass 1/d_k, or copies). Exactly 0 for: rows of weight 0; groups with fewer than two units of
  positive weight; groups whose rewards differ by <= tol; and, with scale "std", sum(w) <= ddof.

  Args:
    rewards: f32[N]; under weight 0 it may be NaN or inf.
    group_ids: i32[N] in 0..num_groups-1; under weight 0 anything.
    weights: f32[N]; 0 means padding or failed: in no statistic.
    num_groups: static; pad it (and N) to a few sizes so that the function compiles a few times only.
    unit_ids: i32[N], the rollout of each row; only equality inside a group matters. Default: each row
      is its own unit.
    scale: "std" or "none". Static.
    baseline: "mean", or "leave_one_out": the weighted mean of the OTHER units of the group. Static.
    ddof: 0 is the paper's population std, 1 the sample std.
    tol: rewards this near to each other count as equal.

  Returns:
    f32[N].

  Raises:
    ValueError: unknown option, shapes that differ; and for arrays of the host (numpy, lists) a group id
      out of range or a reward that is not finite under positive weight. Under `jit` such a group id
      gives advantage 0 and such a reward makes its whole group not finite.
  """
  if scale not in SCALES:
    raise ValueError(f"scale is {scale!r}; it must be one of {SCALES}")
  if baseline not in BASELINES:
    raise ValueError(f"baseline is {baseline!r}; it must be one of {BASELINES}")
  rows = _check_rows(rewards, group_ids, weights, unit_ids, num_groups)
  return _advantages(*rows, float(ddof), float(tol), num_groups=num_groups, scale=scale, baseline=baseline)


def zero_variance(
  rewards: Any,
  group_ids: Any,
  weights: Any,
  *,
  num_groups: int,
  unit_ids: Any = None,
  tol: float = 1e-6,
  threshold: float = 0.5,
) -> ZeroVariance:
  """Says which groups give only zero advantages, and whether they are all right or all wrong.

  For dropping or resampling (DAPO) and for metrics. Whether it is asked with the outcome reward or with
  the shaped one is the caller's choice: pass the rewards that shall decide.

  Args:
    rewards, group_ids, weights, num_groups, unit_ids, tol: as in `group_advantages`.
    threshold: a dead group whose largest reward reaches it counts as all right.
  """
  rows = _check_rows(rewards, group_ids, weights, unit_ids, num_groups)
  return _zero_variance(*rows, float(tol), float(threshold), num_groups=num_groups)


@functools.partial(jax.jit, static_argnames=("num_groups", "scale", "baseline"))
def _advantages(rewards, group_ids, weights, unit_ids, ddof, tol, *, num_groups, scale, baseline):
  s = _groups(rewards, group_ids, weights, unit_ids, num_groups, tol)
  total = jnp.where(s.present, s.total, 1.0)
  mean = _sum(s.w * s.r, s.g, num_groups) / total
  delta = s.r - mean[s.g]
  alive = s.present & ~s.dead
  if scale == "std":
    freedom = total - ddof
    enough = freedom > 1e-5 * total  # ten weights of 0.1 add up to 1 only nearly
    variance = _sum(s.w * delta**2, s.g, num_groups) / jnp.where(enough, freedom, 1.0)
    alive &= enough & (variance != 0)
    divisor = jnp.sqrt(jnp.where(alive, variance, 1.0))[s.g]
  else:
    divisor = 1.0
  if baseline == "leave_one_out":
    delta = delta - _mean_of_others(s, delta, unit_ids, num_groups)
  return jnp.where(s.live & alive[s.g], delta / divisor, 0.0)


@functools.partial(jax.jit, static_argnames=("num_groups",))
def _zero_variance(rewards, group_ids, weights, unit_ids, tol, threshold, *, num_groups):
  s = _groups(rewards, group_ids, weights, unit_ids, num_groups, tol)
  top = s.low + jax.ops.segment_max(s.r, s.g, num_groups + 1)
  dead = s.dead & s.present
  high = dead & (top >= threshold)
  return ZeroVariance(*(x[:num_groups] for x in (s.present, dead, high, dead & ~high)))


def _groups(rewards, group_ids, weights, unit_ids, num_groups, tol) -> _Groups:
  live = (weights > 0) & (group_ids >= 0) & (group_ids < num_groups)
  g = jnp.where(live, group_ids, num_groups)  # the spare group takes what takes part in nothing
  w = jnp.where(live, weights, 0.0).astype(jnp.float32)
  r = jnp.where(live, rewards, 0.0).astype(jnp.float32)
  n = num_groups + 1
  low = jax.ops.segment_min(r, g, n)
  r = r - low[g]  # exact for near rewards, so that a large common offset costs no digits
  spread = jax.ops.segment_max(r, g, n)
  several = jax.ops.segment_max(unit_ids, g, n) > jax.ops.segment_min(unit_ids, g, n)
  total = _sum(w, g, num_groups)
  present = total > 0
  return _Groups(live, w, g, r, total, low, present, ~several | (spread <= tol))


def _mean_of_others(s: _Groups, delta, unit_ids, num_groups):
  """f32[N]: weighted mean of `delta` over the rows of the group that belong to another unit."""
  n = s.g.shape[0]
  order = jnp.lexsort((unit_ids, s.g))
  g, u = s.g[order], unit_ids[order]
  starts = (g != jnp.roll(g, 1)) | (u != jnp.roll(u, 1))
  pair = jnp.zeros(n, jnp.int32).at[order].set(jnp.cumsum(starts, dtype=jnp.int32))  # dense (group, unit)
  own_weight = jax.ops.segment_sum(s.w, pair, n + 1)[pair]
  own = jax.ops.segment_sum(s.w * delta, pair, n + 1)[pair]
  others = s.total[s.g] - own_weight
  return (_sum(s.w * delta, s.g, num_groups)[s.g] - own) / jnp.where(others > 0, others, 1.0)


def _sum(values, g, num_groups):
  return jax.ops.segment_sum(values, g, num_groups + 1)


def _check_rows(rewards, group_ids, weights, unit_ids, num_groups):
  """Arrays for the jitted functions; what lies on the host is looked at, what is on a device is not."""
  rewards, weights = _array(rewards, np.float32), _array(weights, np.float32)
  group_ids = _array(group_ids, np.int32)
  unit_ids = np.arange(rewards.size, dtype=np.int32) if unit_ids is None else _array(unit_ids, np.int32)
  shapes = [x.shape for x in (rewards, group_ids, weights, unit_ids)]
  if rewards.ndim != 1 or len(set(shapes)) != 1:
    raise ValueError(
      f"rewards, group_ids, weights and unit_ids have shapes {shapes}; all must be [N] with the same N"
    )
  if all(isinstance(x, np.ndarray) for x in (rewards, group_ids, weights)):
    live = weights > 0
    wrong = live & ((group_ids < 0) | (group_ids >= num_groups))
    if wrong.any():
      i = int(np.argmax(wrong))
      raise ValueError(
        f"row {i} has group id {group_ids[i]}, outside 0..{num_groups - 1}: raise num_groups or give it weight 0"
      )
    wrong = live & ~np.isfinite(rewards)
    if wrong.any():
      i = int(np.argmax(wrong))
      raise ValueError(
        f"row {i} has reward {rewards[i]} and weight {weights[i]}: give a row without a reward weight 0"
      )
  return rewards, group_ids, weights, unit_ids


def _array(x, dtype):
  return x.astype(dtype) if isinstance(x, jax.Array) else np.asarray(x, dtype)  # tracers are jax.Arrays too
