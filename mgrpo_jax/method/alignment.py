"""The host-side aligner: any number of invocations per rollout -> arrays of a few fixed shapes.

The paper (section 4.1) forces every rollout to exactly D sub trajectories by copying and dropping at
random. In expectation that weighs each invocation 1/d_k inside its rollout, which "weighted" does exactly
and "duplicate" does as the paper does; copies never become rows that are computed twice but weights of
one row (`merge_copies`), which is the same gradient. `emit_batches` packs what is left into rows.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

MODES = ("weighted", "duplicate", "per_call")
BUCKETS = (1, 2, 4, 8, 16, 32)


class Alignment(NamedTuple):
  """Which invocation stands in which slot.

  Attributes:
    indices: i32[K, S] invocation of rollout k, -1 for an empty slot.
    weights: f32[K, S], 0 for an empty slot.
    dropped: per rollout, the invocations that got no slot (only "duplicate" drops), for the log.
    doublings: how often S was doubled past the last bucket; each new value is a new compiled shape.
  """

  indices: np.ndarray
  weights: np.ndarray
  dropped: tuple[tuple[int, ...], ...] = ()
  doublings: int = 0


# ------------------------------------------------------------------------------------ alignment


def align(
  calls: Sequence[int],
  *,
  target: int,
  mode: str = "weighted",
  seed: int | Sequence[int] = 0,
  buckets: Sequence[int] = BUCKETS,
) -> Alignment:
  """Gives the invocations of K rollouts of one query their slots and weights.

  Modes:
    "duplicate": the paper. S = target; a rollout with fewer calls keeps all and adds copies drawn
      uniformly, one with more drops at random; each slot weighs 1/target.
    "weighted": every invocation once, 1/d_k each: the same expectation, no draw, nothing dropped.
    "per_call": every invocation once, K'/sum(d) each, with K' = rollouts that made a call.

  A rollout without calls fills no slot. In "duplicate" and "weighted" every other rollout sums to 1. For
  the last two modes S is the smallest bucket that holds both target and max(d), doubled past the last.

  Args:
    calls: d_k >= 0 of each rollout.
    target: D >= 1.
    mode: one of MODES.
    seed: an int, or ints such as (seed, step, query hash); only "duplicate" draws. Rollouts without
      calls use up no draw, so that adding one changes nothing for the others.
    buckets: rising sizes S may take.

  Raises:
    ValueError: unknown mode, target < 1, negative calls.
  """
  calls = _check_calls(calls)
  if mode not in MODES:
    raise ValueError(f"alignment mode is {mode!r}; it must be one of {MODES}")
  if target < 1:
    raise ValueError(f"alignment target is {target}; it must be at least 1")
  if mode == "duplicate":
    return _duplicate(calls, int(target), np.random.default_rng(seed))
  size, doublings = _bucket(max(int(target), int(calls.max(initial=0))), buckets)
  slots = np.arange(size, dtype=np.int32)[None, :]
  filled = slots < calls[:, None]
  if mode == "weighted":
    weight = 1.0 / np.maximum(calls, 1)[:, None]
  else:
    weight = np.count_nonzero(calls) / max(int(calls.sum()), 1)
  indices = np.where(filled, slots, -1).astype(np.int32)
  return Alignment(indices, np.where(filled, weight, 0.0).astype(np.float32), ((),) * len(calls), doublings)


def merge_copies(alignment: Alignment) -> np.ndarray:
  """f32[K, max d]: the weight of each invocation, its copies added up (0: dropped, or there is none)."""
  indices = np.asarray(alignment.indices)
  width = 1 + max([int(indices.max(initial=-1)), *(i for ids in alignment.dropped for i in ids)])
  merged = np.zeros((indices.shape[0], width), np.float64)
  rollout, slot = np.nonzero(indices >= 0)
  np.add.at(
    merged, (rollout, indices[rollout, slot]), np.asarray(alignment.weights, np.float64)[rollout, slot]
  )
  return merged.astype(np.float32)


def choose_target(calls: Sequence[int], *, quantile: float = 0.99, buckets: Sequence[int] = BUCKETS) -> int:
  """The paper's rule: the smallest bucket D with P(d_k <= D) >= quantile (doubling past the last bucket).

  Args:
    calls: d_k of the rollouts looked at, those without calls included.
    quantile: in (0, 1].

  Raises:
    ValueError: no calls to look at, or a quantile out of range.
  """
  calls = _check_calls(calls)
  if not calls.size:
    raise ValueError("choose_target needs the call counts of at least one rollout, got none")
  if not 0 < quantile <= 1:
    raise ValueError(f"quantile is {quantile}; it must lie in (0, 1]")
  rank = max(math.ceil(quantile * calls.size - 1e-9), 1)  # 0.99 * 100 must be 99, not 100
  return _bucket(int(np.sort(calls)[rank - 1]), buckets)[0]


class AutoTarget:
  """`target="auto"`: `choose_target` over a running window of call counts, kept in checkpoints.

  The target is always a bucket (or the last one doubled), so d_k may drift while the shapes stay few.

  Args:
    window: number of most recent rollouts looked at.
    initial: the target before anything was observed (raised to a bucket).
    quantile, buckets: as in `choose_target`.
  """

  def __init__(
    self,
    *,
    window: int = 1024,
    initial: int = 8,
    quantile: float = 0.99,
    buckets: Sequence[int] = BUCKETS,
  ):
    if window < 1 or initial < 1:
      raise ValueError(f"window is {window} and initial is {initial}; both must be at least 1")
    self.quantile, self.buckets, self.initial = quantile, tuple(buckets), initial
    self.doublings = 0  # the most doublings past the last bucket that a target or a d_k asked for
    self._calls: collections.deque[int] = collections.deque(maxlen=window)

  def observe(self, calls: Sequence[int]) -> None:
    """Adds the call counts d_k of finished rollouts, in order."""
    calls = _check_calls(calls)
    self._calls.extend(int(d) for d in calls)
    self.doublings = max(self.doublings, _bucket(int(calls.max(initial=0)), self.buckets)[1])

  @property
  def target(self) -> int:
    if not self._calls:
      return _bucket(self.initial, self.buckets)[0]
    return choose_target(self._calls, quantile=self.quantile, buckets=self.buckets)

  def state_dict(self) -> dict[str, Any]:
    """What a checkpoint keeps: plain ints and lists, ready for JSON."""
    return {"calls": list(self._calls), "doublings": self.doublings}

  def load_state_dict(self, state: dict[str, Any]) -> None:
    self._calls.clear()
    self._calls.extend(int(d) for d in state["calls"])
    self.doublings = int(state["doublings"])


def _duplicate(calls: np.ndarray, target: int, rng: np.random.Generator) -> Alignment:
  indices = np.full((len(calls), target), -1, np.int32)
  dropped = []
  for k, d in enumerate(calls):
    kept = np.arange(d)
    if d > target:
      kept = np.sort(rng.permutation(d)[:target])
    elif 0 < d < target:
      kept = np.concatenate([kept, rng.integers(0, d, target - d)])
    indices[k, : len(kept)] = kept
    dropped.append(tuple(int(i) for i in np.setdiff1d(np.arange(d), kept)))
  weights = np.where(indices >= 0, 1.0 / target, 0.0).astype(np.float32)
  return Alignment(indices, weights, tuple(dropped), 0)


def _bucket(size: int, buckets: Sequence[int]) -> tuple[int, int]:
  """-> (smallest bucket >= size, doublings past the last one)."""
  if not buckets or buckets[0] < 1 or any(b <= a for a, b in zip(buckets, buckets[1:])):
    raise ValueError(f"buckets are {tuple(buckets)}; they must be positive and rising")
  for bucket in buckets:
    if bucket >= size:
      return int(bucket), 0
  bucket, doublings = int(buckets[-1]), 0
  while bucket < size:
    bucket, doublings = 2 * bucket, doublings + 1
  return bucket, doublings


def _check_calls(calls) -> np.ndarray:
  calls = np.asarray(calls if isinstance(calls, np.ndarray) else list(calls))
  calls = calls.astype(np.int64) if calls.size == 0 else calls
  if calls.ndim != 1 or calls.dtype.kind not in "iu" or (calls < 0).any():
    raise ValueError(f"calls must be a list of whole numbers >= 0, one per rollout; got {calls.tolist()}")
  return calls


# ------------------------------------------------------------------------------------- batches


def emit_batches(
  trajectories: Sequence[Any],
  advantages: Sequence[float],
  weights: Sequence[float],
  *,
  rows: int,
  length: int,
  max_segments: int | None = None,
  drop_zero: bool = False,
  aggregate: str = "seq-mean-token-mean",
) -> Iterator[dict[str, np.ndarray]]:
  """Packs trajectories into batches of ONE fixed shape, several to a row, as many batches as needed.

  First fit, longest first, over all batches, in a fixed order: every trajectory of positive weight
  stands in exactly one batch, whole. The divisor of the loss is global (`loss.loss_normalizer` over all
  batches, added up), so how they fall does not matter.

  Args:
    trajectories: objects with .tokens i32[T], .mask bool[T], .logprobs f32[T], .versions i32[T]; distinct
      ones (copies are weights, see `merge_copies`). One with several .segments (each such an object) is
      emitted as that many sequences that do not see each other, of the same advantage.
    advantages: f32[number of trajectories].
    weights: f32[number of trajectories]; rows of weight 0 are left out.
    rows, length: B and T of every batch.
    max_segments: N, sequences a batch can hold; default 8 * rows.
    drop_zero: also leave out rows whose advantage is exactly 0, which have no gradient when no KL or
      entropy term acts; the caller's normalizer still counts them.
    aggregate: of the loss. With the normalizer of whole trajectories (`loss.normalizer_from_counts`), segments add
      up to what one sequence of their sampled tokens gives: each takes its share of the tokens of the weight in
      "seq-mean-token-mean", where tokens are divided by their segment's number, and the whole weight otherwise.
      A sequence ratio (`ratio` not "token") is each segment's own: the mean or product over its tokens only.

  Returns:
    An iterator (empty without rows) of dicts:
      tokens, positions, segment_ids, versions: i32[B, T]; positions restart at 0 in each segment;
        segment_ids point into the arrays of N, -1 is padding; versions are -1 where nothing was sampled.
      mask: bool[B, T]. behavior_logprobs: f32[B, T], 0 where the mask is False.
      advantages, weights: f32[N], 0 for an empty slot. trajectory: i32[N], the place in the given list
        (the same for all segments of one), -1 for an empty slot.

  Raises:
    ValueError (at the call, before anything is emitted): a trajectory longer than `length` (nothing is
      ever cut silently), arrays that do not match, a weight < 0, an advantage or weight that is not finite.
  """
  n = 8 * rows if max_segments is None else max_segments
  if rows < 1 or length < 1 or n < 1:
    raise ValueError(f"rows={rows}, length={length}, max_segments={n}: each must be at least 1")
  advantages, weights = np.asarray(advantages, np.float32), np.asarray(weights, np.float32)
  for name, values in (("advantages", advantages), ("weights", weights)):
    if values.shape != (len(trajectories),):
      raise ValueError(
        f"{name} has shape {values.shape} for {len(trajectories)} trajectories; give one number each"
      )
  if not np.isfinite(weights).all() or (weights < 0).any():
    raise ValueError(f"weights must be finite and not negative, got {weights.tolist()}")
  kept = (weights > 0) & ((advantages != 0) if drop_zero else True)
  pieces: list[_Piece] = []
  for i in map(int, np.flatnonzero(kept)):
    arrays = [_arrays(i, s, length) for s in getattr(trajectories[i], "segments", [trajectories[i]])]
    tokens = [int(a[1].sum()) for a in arrays]
    split = len(arrays) > 1 and aggregate == "seq-mean-token-mean"
    shares = np.float32([n / sum(tokens) for n in tokens] if split else [1.0] * len(arrays))
    pieces += [_Piece(i, a, advantages[i], weights[i] * share) for a, share in zip(arrays, shares)]
    if not np.isfinite(advantages[i]):
      raise ValueError(
        f"trajectory {i} has advantage {advantages[i]} and weight {weights[i]}; check its reward"
      )
  plan = _pack([len(p.arrays[0]) for p in pieces], rows, length, n)
  return (_batch(b, pieces, rows, length, n) for b in plan)


class _Piece(NamedTuple):
  """One sequence: a trajectory, or a segment of one."""

  trajectory: int
  arrays: tuple[np.ndarray, ...]
  advantage: np.float32
  weight: np.float32


def _arrays(i: int, trajectory: Any, length: int) -> tuple[np.ndarray, ...]:
  tokens, mask = np.asarray(trajectory.tokens, np.int32), np.asarray(trajectory.mask, bool)
  logprobs, versions = np.asarray(trajectory.logprobs, np.float32), np.asarray(trajectory.versions, np.int32)
  lengths = [len(x) for x in (tokens, mask, logprobs, versions)]
  if len(set(lengths)) != 1:
    raise ValueError(
      f"trajectory {i} has tokens, mask, logprobs, versions of lengths {lengths}; they must agree"
    )
  if len(tokens) > length:
    raise ValueError(
      f"trajectory {i} has {len(tokens)} tokens but a row holds {length}: raise the row length or lower the "
      "context budget of the rollout"
    )
  return tokens, mask, np.where(mask, logprobs, 0.0), np.where(mask, versions, -1)


def _pack(lengths: list[int], rows: int, length: int, n: int) -> list[list[list[int]]]:
  """First fit, longest first -> per batch, per row, the sequences in it."""
  batches: list[list[list[int]]] = []
  room: list[int] = []  # free tokens of every row of every batch
  slots: list[int] = []  # free segments of every batch
  for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):  # a stable sort: ties keep the given order
    need = lengths[i]
    row = next((r for r, free in enumerate(room) if free >= need and slots[r // rows]), None)
    if row is None:
      row = len(room)
      batches.append([[] for _ in range(rows)])
      room += [length] * rows
      slots.append(n)
    batches[row // rows][row % rows].append(i)
    room[row] -= need
    slots[row // rows] -= 1
  return batches


def _batch(plan, pieces, rows, length, n) -> dict[str, np.ndarray]:
  batch = {
    "tokens": np.zeros((rows, length), np.int32),
    "positions": np.zeros((rows, length), np.int32),
    "segment_ids": np.full((rows, length), -1, np.int32),
    "mask": np.zeros((rows, length), bool),
    "behavior_logprobs": np.zeros((rows, length), np.float32),
    "versions": np.full((rows, length), -1, np.int32),
    "advantages": np.zeros(n, np.float32),
    "weights": np.zeros(n, np.float32),
    "trajectory": np.full(n, -1, np.int32),
  }
  segment = 0
  for row, members in enumerate(plan):
    start = 0
    for i in members:
      tokens, mask, logprobs, versions = pieces[i].arrays
      span = (row, slice(start, start + len(tokens)))
      batch["tokens"][span], batch["mask"][span] = tokens, mask
      batch["behavior_logprobs"][span], batch["versions"][span] = logprobs, versions
      batch["positions"][span] = np.arange(len(tokens))
      batch["segment_ids"][span] = segment
      batch["advantages"][segment], batch["weights"][segment] = pieces[i].advantage, pieces[i].weight
      batch["trajectory"][segment] = pieces[i].trajectory
      segment += 1
      start += len(tokens)
  return batch
