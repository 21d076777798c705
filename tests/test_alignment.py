"""The aligner: any d_k to fixed shapes, the paper's batch, copies as weights, packing into batches."""

import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mgrpo_jax.method.advantages import group_advantages
from mgrpo_jax.method.alignment import (
  BUCKETS,
  MODES,
  AutoTarget,
  align,
  choose_target,
  emit_batches,
  merge_copies,
)

call_counts = st.lists(st.integers(0, 40), min_size=0, max_size=8)


# ------------------------------------------------------------------------------------- all modes


@given(calls=call_counts, target=st.integers(1, 12), mode=st.sampled_from(MODES), seed=st.integers(0, 5))
def test_slots_name_invocations_and_empty_slots_weigh_nothing(calls, target, mode, seed):
  a = align(calls, target=target, mode=mode, seed=seed)
  assert a.indices.dtype == np.int32 and a.weights.dtype == np.float32
  assert a.indices.shape == a.weights.shape and a.indices.shape[0] == len(calls)
  assert ((a.indices >= 0) == (a.weights > 0)).all()
  for k, d in enumerate(calls):
    filled = a.indices[k][a.indices[k] >= 0]
    assert set(filled) | set(a.dropped[k]) == set(range(d)) and not set(filled) & set(a.dropped[k])
    if mode != "per_call":
      assert a.weights[k].sum() == pytest.approx(1.0 if d else 0.0, abs=1e-5)
    if mode != "duplicate":
      assert sorted(filled) == list(range(d))


@given(calls=call_counts, target=st.integers(1, 12), seed=st.integers(0, 5))
def test_duplicate_fills_exactly_the_target_and_keeps_all_it_can(calls, target, seed):
  a = align(calls, target=target, mode="duplicate", seed=seed)
  assert a.indices.shape == (len(calls), target)
  for k, d in enumerate(calls):
    assert (a.indices[k] >= 0).sum() == (target if d else 0)
    assert len(set(a.indices[k]) - {-1}) == min(d, target)
    assert len(a.dropped[k]) == max(d - target, 0)
  np.testing.assert_array_equal(a.weights, np.where(a.indices >= 0, np.float32(1 / target), 0))


@given(calls=call_counts, target=st.integers(1, 40), mode=st.sampled_from(["weighted", "per_call"]))
def test_every_invocation_is_weighed_once(calls, target, mode):
  a = align(calls, target=target, mode=mode, seed=0)
  with_calls = sum(d > 0 for d in calls)
  for k, d in enumerate(calls):
    expected = 0 if d == 0 else 1 / d if mode == "weighted" else with_calls / sum(calls)
    np.testing.assert_allclose(a.weights[k, :d], np.full(d, expected), rtol=1e-6)
  need = max([target, *calls])
  size = a.indices.shape[1]
  assert size >= need and (size == 1 or size // 2 < need)  # the smallest power of two
  assert a.doublings == (1 if need > 32 else 0)


def test_past_the_last_bucket_the_size_doubles_and_is_counted():
  a = align([200, 1], target=8, mode="weighted", seed=0)
  assert a.indices.shape == (2, 256) and a.doublings == 3
  assert align([5], target=1, mode="per_call", seed=0, buckets=(3,)).indices.shape == (1, 6)


@pytest.mark.parametrize("mode", MODES)
def test_nobody_called(mode):
  a = align([0, 0, 0], target=4, mode=mode, seed=0)
  assert a.indices.shape == (3, 4) and (a.indices == -1).all() and (a.weights == 0).all()


def test_the_draw_hangs_on_the_seed_alone():
  def draw(seed, calls=(2, 9, 3, 1, 12)):
    return align(calls, target=5, mode="duplicate", seed=seed)

  np.testing.assert_array_equal(draw(3).indices, draw(3).indices)
  np.testing.assert_array_equal(draw((3, 7)).indices, draw((3, 7)).indices)
  assert any((draw(3).indices != draw(seed).indices).any() for seed in (4, 5))


def test_a_rollout_without_calls_leaves_the_others_draws_alone():
  with_zero = align([2, 0, 9, 3, 0], target=5, mode="duplicate", seed=1)
  without = align([2, 9, 3], target=5, mode="duplicate", seed=1)
  np.testing.assert_array_equal(with_zero.indices[[0, 2, 3]], without.indices)


@pytest.mark.parametrize("d", [1, 3, 5, 8, 11])
def test_duplicate_weighs_each_invocation_one_over_d_on_average(d):
  # 20,000 rollouts in one call: the standard error of a mean is under 0.0015
  merged = merge_copies(align([d] * 20_000, target=8, mode="duplicate", seed=0))
  np.testing.assert_allclose(merged.mean(0), np.full(d, 1 / d), atol=0.006)
  if d < 8:
    assert merged.min() >= 1 / 8 - 1e-6  # the originals are all kept


# ------------------------------------------------------------------------------- the paper's batch


@settings(max_examples=30, deadline=None)
@given(
  calls=st.lists(st.integers(1, 20), min_size=8, max_size=8),
  seed=st.integers(0, 99),
  right=st.lists(st.booleans(), min_size=8, max_size=8),
)
def test_the_papers_batch_has_64_sub_slots_with_one_population_std(calls, seed, right):
  """K = 8, D = 8 (eq. 12, 13): copies counted; merged weights give the same numbers as physical copies."""
  a = align(calls, target=8, mode="duplicate", seed=seed)
  assert (a.indices >= 0).sum() == 64
  assert a.weights.sum() == pytest.approx(8)
  rng = np.random.default_rng(seed)
  rewards = 0.1 + 0.4 * np.array(right)[:, None] + 0.5 * rng.integers(0, 2, (8, 20))
  copies = np.take_along_axis(rewards, a.indices, 1).ravel()  # 64 physical rows
  spread = copies.std()
  expected = (copies - copies.mean()) / spread if np.ptp(copies) > 1e-6 else 0 * copies
  k = np.repeat(np.arange(8), 8)
  got = group_advantages(copies, np.zeros(64), np.ones(64), num_groups=1, unit_ids=k)
  np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6)

  merged = np.zeros((8, 20), np.float32)
  weights = merge_copies(a)
  merged[:, : weights.shape[1]] = weights
  k = np.repeat(np.arange(8), 20)
  rows = group_advantages(rewards.ravel(), np.zeros(160), merged.ravel(), num_groups=1, unit_ids=k)
  rows = np.asarray(rows).reshape(8, 20)
  np.testing.assert_allclose(np.take_along_axis(rows, a.indices, 1).ravel(), expected, rtol=2e-5, atol=2e-6)


def test_the_example_of_three_calls_and_one():
  # rewards 1,0,0,0 with d = 3,1,1,1: per rollout +1.5/-.5 (sample std of four rollouts), pooled +-.913
  calls, reward = [3, 1, 1, 1], np.array([1.0, 0, 0, 0])
  for mode, expected in (("weighted", (1.5, -0.5)), ("duplicate", (1.5, -0.5)), ("per_call", (1.0, -1.0))):
    w = merge_copies(align(calls, target=2, mode=mode, seed=0))
    r = np.repeat(reward, 3)
    units = np.repeat(np.arange(4), 3)
    ddof = 0 if mode == "per_call" else 1
    got = np.asarray(group_advantages(r, np.zeros(12), w.ravel(), num_groups=1, unit_ids=units, ddof=ddof))
    np.testing.assert_allclose(got[w.ravel() > 0][[0, -1]], expected, rtol=1e-5)


# ------------------------------------------------------------------------------------ the target


def test_choose_target_is_the_smallest_bucket_that_holds_the_quantile():
  calls = [3] * 99 + [30]
  assert choose_target(calls) == 4
  assert choose_target(calls, quantile=0.995) == 32
  assert choose_target([3] * 98 + [30] * 2) == 32
  assert choose_target([0, 0]) == 1
  assert choose_target([33], quantile=1.0) == 64
  assert choose_target([5, 5], buckets=(3, 6)) == 6
  assert choose_target([0] * 60 + [8] * 40, quantile=0.5) == 1  # rollouts without calls count


@given(
  calls=st.lists(st.integers(0, 100), min_size=1, max_size=200),
  quantile=st.sampled_from([0.5, 0.9, 0.99, 1.0]),
)
def test_choose_target_holds_its_promise(calls, quantile):
  target = choose_target(calls, quantile=quantile)
  calls = np.array(calls)
  assert np.mean(calls <= target) >= quantile - 1e-9
  assert target == 1 or np.mean(calls <= target // 2) < quantile


def test_auto_target_follows_its_window_and_survives_a_checkpoint():
  auto = AutoTarget(window=16, initial=3)
  assert auto.target == 4
  auto.observe([1] * 16)
  assert auto.target == 1
  auto.observe([6] * 16)
  assert auto.target == 8 and auto.doublings == 0
  auto.observe([70])
  assert auto.target == 128 and auto.doublings == 2
  again = AutoTarget(window=16, initial=3)
  again.load_state_dict(json.loads(json.dumps(auto.state_dict())))
  for t in (auto, again):
    t.observe([2] * 8)
  assert again.target == auto.target and again.state_dict() == auto.state_dict()
  auto.observe([2] * 8)
  assert auto.target == 2 and auto.doublings == 2  # the window forgot 70, the count did not


def test_calls_that_drift_from_0_to_60_compile_nothing_after_every_bucket_is_warm():
  queries, rollouts = 2, 8
  allowed = {*BUCKETS, 64}

  def step(calls, auto):
    auto.observe(calls.ravel())
    aligned = [align(c, target=auto.target, mode="weighted", seed=0) for c in calls]
    size = max(a.indices.shape[1] for a in aligned)
    weights = np.zeros((queries, rollouts, size), np.float32)
    for q, a in enumerate(aligned):
      weights[q, :, : a.weights.shape[1]] = a.weights
    rewards = np.random.default_rng(0).random(weights.shape)
    group = np.broadcast_to(np.arange(queries)[:, None, None], weights.shape)
    unit = np.broadcast_to(np.arange(rollouts)[None, :, None], weights.shape)
    a = group_advantages(
      rewards.ravel(), group.ravel(), weights.ravel(), num_groups=queries, unit_ids=unit.ravel()
    )
    a.block_until_ready()
    return size

  for size in sorted(allowed):
    step(np.full((queries, rollouts), size), AutoTarget(initial=1))
  compiled = []

  def listener(name, duration, **kw):
    return compiled.append(name) if "backend_compile" in name else None

  jax.monitoring.register_event_duration_secs_listener(listener)
  try:
    rng, auto, seen = np.random.default_rng(0), AutoTarget(window=64), set()
    for mean in np.linspace(0, 60, 40):
      seen.add(step(np.clip(rng.poisson(mean, (queries, rollouts)), 0, 60), auto))
    assert not compiled
    # the listener does hear a compilation
    step(np.full((queries + 1, rollouts), 1)[:queries], auto)
    jax.jit(lambda x: x * 3 + len(seen))(np.ones(7)).block_until_ready()
    assert compiled
  finally:
    jax.monitoring.unregister_event_duration_listener(listener)
  assert seen <= allowed and len(seen) >= 4


# --------------------------------------------------------------------------------------- batches


def trajectory(length, seed=0):
  rng = np.random.default_rng(seed)
  mask = rng.random(length) < 0.6
  return SimpleNamespace(
    tokens=rng.integers(1, 99, length).astype(np.int32),
    mask=mask,
    logprobs=np.where(mask, -rng.random(length), np.nan).astype(np.float32),
    versions=np.where(mask, rng.integers(0, 9, length), 77).astype(np.int32),
  )


@settings(deadline=None)
@given(
  lengths=st.lists(st.integers(0, 10), min_size=0, max_size=20),
  rows=st.integers(1, 4),
  max_segments=st.sampled_from([1, 3, None]),
  zero=st.integers(1, 5),
)
def test_every_weighted_trajectory_stands_whole_in_exactly_one_batch(lengths, rows, max_segments, zero):  # O7
  trajectories = [trajectory(n, i) for i, n in enumerate(lengths)]
  n = len(lengths)
  weights = np.array([0.0 if i % zero == 1 else 0.5 + i for i in range(n)], np.float32)
  advantages = np.arange(n, dtype=np.float32) - 2
  batches = list(
    emit_batches(trajectories, advantages, weights, rows=rows, length=10, max_segments=max_segments)
  )
  seen = []
  slots = 8 * rows if max_segments is None else max_segments
  for b in batches:
    assert {k: v.shape for k, v in b.items()} == {
      **dict.fromkeys(
        ("tokens", "positions", "segment_ids", "mask", "behavior_logprobs", "versions"), (rows, 10)
      ),
      **dict.fromkeys(("advantages", "weights", "trajectory"), (slots,)),
    }
    for segment, i in enumerate(b["trajectory"]):
      at = b["segment_ids"] == segment
      if i < 0:
        assert not at.any() and b["weights"][segment] == 0 and b["advantages"][segment] == 0
        continue
      seen.append(i)
      t = trajectories[i]
      assert at.any(1).sum() == (lengths[i] > 0)  # in one row
      np.testing.assert_array_equal(b["tokens"][at], t.tokens)
      np.testing.assert_array_equal(b["positions"][at], np.arange(lengths[i]))
      np.testing.assert_array_equal(b["mask"][at], t.mask)
      np.testing.assert_array_equal(b["behavior_logprobs"][at], np.where(t.mask, t.logprobs, 0))
      np.testing.assert_array_equal(b["versions"][at], np.where(t.mask, t.versions, -1))
      assert b["weights"][segment] == weights[i] and b["advantages"][segment] == advantages[i]
    empty = b["segment_ids"] == -1
    assert (
      not b["mask"][empty].any() and (b["versions"][empty] == -1).all() and (b["tokens"][empty] == 0).all()
    )
  assert sorted(seen) == list(np.flatnonzero(weights > 0))


def test_no_rows_make_no_batch():
  assert list(emit_batches([], [], [], rows=2, length=8)) == []
  assert list(emit_batches([trajectory(4)], [1.0], [0.0], rows=2, length=8)) == []
  assert list(emit_batches([trajectory(4)], [0.0], [1.0], rows=2, length=8, drop_zero=True)) == []


def test_rows_of_zero_advantage_are_left_out_only_when_asked():
  ts = [trajectory(4, i) for i in range(3)]

  def kept(**o):
    return [
      b["trajectory"].tolist()
      for b in emit_batches(ts, [1, 0, -1], [1, 1, 1], rows=1, length=12, max_segments=3, **o)
    ]

  assert kept() == [[0, 1, 2]]
  assert kept(drop_zero=True) == [[0, 2, -1]]


def test_short_trajectories_share_rows():
  ts = [trajectory(n, n) for n in (3, 7, 5, 5, 2, 8)]  # 30 tokens: three full rows of 10
  (b,) = emit_batches(ts, np.ones(6), np.ones(6), rows=3, length=10)
  assert (b["segment_ids"] >= 0).all()


def test_the_same_input_gives_the_same_batches():
  ts = [trajectory(n, n) for n in (3, 7, 5, 5, 2, 8, 1, 9)]
  first, second = (list(emit_batches(ts, np.ones(8), np.ones(8), rows=2, length=10)) for _ in range(2))
  assert len(first) == len(second) == 2
  for a, b in zip(first, second):
    for name in a:
      np.testing.assert_array_equal(a[name], b[name])


def test_1032_rows_fill_batches_of_512():  # O7
  ts = [trajectory(2)] * 1032
  batches = list(emit_batches(ts, np.ones(1032), np.ones(1032), rows=512, length=2))
  assert [int((b["trajectory"] >= 0).sum()) for b in batches] == [512, 512, 8]


def test_a_trajectory_that_does_not_fit_is_named_and_never_cut():
  with pytest.raises(ValueError, match="trajectory 1 has 11 tokens but a row holds 10"):
    emit_batches([trajectory(3), trajectory(11)], [1, 1], [1, 1], rows=2, length=10)
  assert len(list(emit_batches([trajectory(3), trajectory(11)], [1, 1], [1, 0], rows=2, length=10))) == 1


@pytest.mark.parametrize(
  "change, words",
  [
    (dict(rows=0), "rows=0"),
    (dict(weights=[1]), r"weights has shape \(1,\) for 2 trajectories"),
    (dict(weights=[1, -1]), "weights must be finite and not negative"),
    (dict(weights=[1, np.nan]), "weights must be finite and not negative"),
    (dict(advantages=[1, np.nan]), "trajectory 1 has advantage nan"),
  ],
)
def test_bad_batches_are_refused(change, words):
  arguments = dict(advantages=[1, 1], weights=[1, 1], rows=2, length=10) | change
  with pytest.raises(ValueError, match=words):
    emit_batches([trajectory(3), trajectory(4)], **arguments)


def test_arrays_of_a_trajectory_must_agree():
  t = trajectory(4)
  t.versions = t.versions[:3]
  with pytest.raises(ValueError, match=r"trajectory 0 has .* lengths \[4, 4, 4, 3\]"):
    emit_batches([t], [1], [1], rows=1, length=8)


@pytest.mark.parametrize(
  "call, words",
  [
    (lambda: align([1], target=0, mode="weighted", seed=0), "target is 0"),
    (lambda: align([1], target=1, mode="copies", seed=0), "mode is 'copies'"),
    (lambda: align([1, -1], target=1, mode="weighted", seed=0), r"got \[1, -1\]"),
    (lambda: align([1.5], target=1, mode="weighted", seed=0), "whole numbers"),
    (lambda: align([1], target=1, mode="weighted", seed=0, buckets=(2, 2)), "buckets"),
    (lambda: choose_target([]), "at least one rollout"),
    (lambda: choose_target([1], quantile=0), "quantile is 0"),
    (lambda: AutoTarget(window=0), "window is 0"),
  ],
)
def test_bad_alignment_is_refused(call, words):
  with pytest.raises(ValueError, match=words):
    call()
