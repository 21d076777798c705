"""Group-relative advantages against a float64 loop, users' cases (O1..O12, O61) and properties."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mgrpo_jax.method.advantages import group_advantages, zero_variance

N, G = 24, 5  # one shape for all drawn cases: one compilation per option
OPTIONS = [
  dict(scale=scale, baseline=baseline, ddof=ddof)
  for scale, baseline, ddof in [
    ("std", "mean", 0),
    ("std", "mean", 1),
    ("none", "mean", 0),
    ("none", "leave_one_out", 0),
    ("std", "leave_one_out", 1),
  ]
]


def reference(rewards, groups, weights, units, *, scale, baseline, ddof, tol=1e-6):
  """The same numbers by plain loops in float64."""
  out = np.zeros(len(rewards))
  for group in set(g for g, w in zip(groups, weights) if w > 0):
    rows = [i for i in range(len(rewards)) if groups[i] == group and weights[i] > 0]
    values = [float(rewards[i]) for i in rows]
    if len({units[i] for i in rows}) < 2 or max(values) - min(values) <= tol:
      continue
    total = sum(float(weights[i]) for i in rows)
    mean = sum(float(weights[i]) * float(rewards[i]) for i in rows) / total
    divisor = 1.0
    if scale == "std":
      if total <= ddof:
        continue
      squares = sum(float(weights[i]) * (float(rewards[i]) - mean) ** 2 for i in rows)
      divisor = np.sqrt(squares / (total - ddof))
    for i in rows:
      base = mean
      if baseline == "leave_one_out":
        others = [j for j in rows if units[j] != units[i]]
        base = sum(float(weights[j]) * float(rewards[j]) for j in others) / sum(
          float(weights[j]) for j in others
        )
      out[i] = (float(rewards[i]) - base) / divisor
  return out


@st.composite
def cases(draw):
  def rows(values):
    return draw(st.lists(st.sampled_from(values), min_size=N, max_size=N))

  rewards = np.array(rows([0.0, 0.1, 0.5, 0.6, 1.0]), np.float32)
  weights = np.array(rows([0.0, 0.5, 1.0, 1.0, 2.0]), np.float32)
  groups = np.array(rows(list(range(G))), np.int32)
  units = np.array(rows([0, 1, 2, 7]), np.int32)
  rewards = np.where(weights > 0, rewards, draw(st.sampled_from([np.nan, np.inf, -np.inf, 3.0])))
  return rewards.astype(np.float32), groups, weights, units


# ------------------------------------------------------------------------- against float64 loops


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@settings(max_examples=40, deadline=None)
@given(case=cases())
def test_advantages_are_those_of_plain_loops(options, case):
  rewards, groups, weights, units = case
  got = np.asarray(group_advantages(rewards, groups, weights, num_groups=G, unit_ids=units, **options))
  expected = reference(rewards, groups, weights, units, **options)
  np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6)
  assert (got[weights == 0] == 0).all()


@settings(max_examples=25, deadline=None)
@given(case=cases(), seed=st.integers(0, 99))
def test_row_order_padding_rows_and_empty_groups_change_nothing(case, seed):
  rewards, groups, weights, units = case
  options = dict(scale="std", baseline="leave_one_out", ddof=1)
  plain = np.asarray(group_advantages(rewards, groups, weights, num_groups=G, unit_ids=units, **options))
  order = np.random.default_rng(seed).permutation(N)

  def pad(x, value):
    return np.concatenate([x[order], np.full(8, value, x.dtype)])

  padded = group_advantages(
    pad(rewards, np.nan), pad(groups, -1), pad(weights, 0), num_groups=8, unit_ids=pad(units, 5), **options
  )
  np.testing.assert_allclose(np.asarray(padded)[:N], plain[order], rtol=1e-5, atol=1e-6)
  assert (np.asarray(padded)[N:] == 0).all()


# ------------------------------------------------------------------------------- hand-made numbers


def advantages(rewards, groups=None, weights=None, num_groups=1, **options):
  groups = [0] * len(rewards) if groups is None else groups
  weights = [1.0] * len(rewards) if weights is None else weights
  return np.asarray(group_advantages(rewards, groups, weights, num_groups=num_groups, **options))


def test_one_right_of_four_in_every_scale():
  np.testing.assert_allclose(advantages([1, 0, 0, 0]), [3**0.5, *[-(3**-0.5)] * 3], rtol=1e-6)  # paper
  np.testing.assert_allclose(advantages([1, 0, 0, 0], ddof=1), [1.5, -0.5, -0.5, -0.5], rtol=1e-6)
  np.testing.assert_allclose(advantages([1, 0, 0, 0], scale="none"), [0.75, -0.25, -0.25, -0.25], rtol=1e-6)
  # leave-one-out is K/(K-1) (r - mu)
  got = advantages([1, 0, 0, 0], scale="none", baseline="leave_one_out")
  np.testing.assert_allclose(got, [1, -1 / 3, -1 / 3, -1 / 3], rtol=1e-6)


def test_groups_of_different_size_keep_their_own_baseline():  # O1
  got = advantages([1, 0, 1, 0, 5, 5, 5, 0, 1, 0, 1], [0] * 4 + [1] * 3 + [2] * 4, num_groups=3, scale="none")
  np.testing.assert_array_equal(got, [0.5, -0.5, 0.5, -0.5, 0, 0, 0, -0.5, 0.5, -0.5, 0.5])


def test_rows_of_one_rollout_count_as_one_in_the_baseline():  # O2
  got = advantages([1, 1, 1, 0], weights=[1 / 3] * 3 + [1], unit_ids=[0, 0, 0, 1], scale="none")
  np.testing.assert_allclose(got, [0.5, 0.5, 0.5, -0.5], rtol=1e-6)


def test_turns_do_not_bias_the_baseline_of_rollouts():  # O3: turns 2, 1, 2, 1; rewards 1, 0, 1, 0
  got = advantages(
    [1, 1, 0, 1, 1, 0], weights=[0.5, 0.5, 1, 0.5, 0.5, 1], unit_ids=[0, 0, 1, 2, 2, 3], ddof=1
  )
  np.testing.assert_allclose(got, 0.8660254 * np.array([1, 1, -1, 1, 1, -1]), rtol=1e-6)


def test_rollouts_of_a_group_are_compared_though_each_has_its_own_id():  # O4
  got = advantages([1, 0, 1, 0], unit_ids=[11, 12, 13, 14], ddof=1)
  np.testing.assert_allclose(got, [0.8660254, -0.8660254] * 2, rtol=1e-6)


def test_roles_are_groups_of_their_own():  # O5
  got = advantages([1, 0, 0.2, 0.2], [0, 0, 1, 1], num_groups=2, ddof=1)
  np.testing.assert_allclose(got, [0.70710678, -0.70710678, 0, 0], rtol=1e-6)


def test_padding_rows_stay_out_of_the_statistics():  # O6
  got = advantages([1, 0, 0, 0, 0, 0], weights=[1, 1, 1, 1, 0, 0], ddof=1)
  np.testing.assert_allclose(got, [1.5, -0.5, -0.5, -0.5, 0, 0], rtol=1e-6)


@pytest.mark.parametrize("missing", [None, np.nan, np.inf, 0.0])
def test_a_failed_rollout_is_left_out_and_not_scored_zero(missing):  # O10, O61
  got = advantages([1, missing, 0, 1], weights=[1, 0, 1, 1], ddof=1)
  np.testing.assert_allclose(got, [0.57735027, 0, -1.1547005, 0.57735027], rtol=1e-6)


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["std", "none"])
def test_a_group_that_compares_nothing_gives_exactly_zero(scale, baseline, ddof):  # O12
  # alone; equal; equal up to rounding; one rollout with two different rows; empty (group 4)
  rewards = [0.7, 0.3, 0.3, 1.0, np.float32(0.1) + np.float32(0.9) - np.float32(6e-8), 1.0, 0.0]
  got = advantages(
    rewards,
    [0, 1, 1, 2, 2, 3, 3],
    num_groups=5,
    unit_ids=[0, 1, 2, 3, 4, 5, 5],
    scale=scale,
    baseline=baseline,
    ddof=ddof,
  )
  assert (got == 0).all()


def test_weights_that_do_not_exceed_ddof_give_zero():
  assert (advantages([1] + [0] * 9, weights=[0.1] * 10, ddof=1) == 0).all()  # they sum to 1.0000001 in f32
  assert (advantages([1, 0], weights=[0.25, 0.25], ddof=1) == 0).all()
  np.testing.assert_allclose(advantages([1, 0], weights=[0.25, 0.25]), [1, -1], rtol=1e-6)


def test_tolerance_decides_what_is_equal():
  assert (advantages([0.5, 0.51], tol=0.02) == 0).all()
  np.testing.assert_allclose(advantages([0.5, 0.51], tol=0.005), [-1, 1], rtol=1e-4)


def test_a_large_common_offset_costs_no_digits():
  np.testing.assert_allclose(advantages([1e6 + 1, 1e6, 1e6, 1e6], ddof=1), [1.5, -0.5, -0.5, -0.5], rtol=1e-6)


def test_a_rollout_without_calls_changes_nothing_for_the_subs():  # O63
  calls = [3, 1, 1]
  rewards = np.concatenate([np.full(d, float(k == 0)) for k, d in enumerate(calls)])
  weights = np.concatenate([np.full(d, 1 / d) for d in calls])
  units = np.repeat(np.arange(3), calls)
  before = advantages(rewards, weights=weights, unit_ids=units, ddof=1)
  after = advantages([*rewards, np.nan], weights=[*weights, 0], unit_ids=[*units, 3], ddof=1)
  np.testing.assert_allclose(after, [*before, 0], rtol=1e-6)
  np.testing.assert_allclose(before, [1.1547005] * 3 + [-0.57735027] * 2, rtol=1e-6)


def test_no_rows_give_no_advantages():
  assert advantages([]).shape == (0,)


# -------------------------------------------------------------------------------- dead groups


def test_dead_groups_are_told_apart_into_right_and_wrong():
  # right, wrong, alive, alone and right, padding rows only, nothing at all
  rewards = [1, 1, 0.1, 0.1, 0.1, 1, 1, np.nan, np.nan]
  result = zero_variance(rewards, [0, 0, 1, 1, 2, 2, 3, 3, 4], [1, 1, 1, 1, 1, 1, 1, 0, 0], num_groups=6)
  assert result.present.tolist() == [True, True, True, True, False, False]
  assert result.dead.tolist() == [True, True, False, True, False, False]
  assert result.high.tolist() == [True, False, False, True, False, False]
  assert result.low.tolist() == [False, True, False, False, False, False]


@settings(max_examples=25, deadline=None)
@given(case=cases())
def test_dead_is_where_all_advantages_are_zero(case):
  rewards, groups, weights, units = case
  dead = zero_variance(rewards, groups, weights, num_groups=G, unit_ids=units)
  got = np.asarray(group_advantages(rewards, groups, weights, num_groups=G, unit_ids=units))
  for g in range(G):
    live = (groups == g) & (weights > 0)
    assert bool(dead.present[g]) == live.any()
    assert bool(dead.dead[g]) == (live.any() and (got[live] == 0).all())
    assert bool(dead.dead[g]) == bool(dead.high[g]) + bool(dead.low[g])


# --------------------------------------------------------------------------------- refused input


@pytest.mark.parametrize(
  "change, words",
  [
    (dict(scale="batch"), "scale is 'batch'"),
    (dict(baseline="median"), "baseline is 'median'"),
    (dict(weights=[1.0, 1.0]), "shapes"),
    (dict(group_ids=[0, 1, 0]), "row 1 has group id 1, outside 0..0"),
    (dict(rewards=[1, None, 0]), "row 1 has reward nan and weight 1.0"),
  ],
)
def test_bad_input_is_refused_with_a_reason(change, words):
  arguments = (
    dict(rewards=[1.0, 0.0, 1.0], group_ids=[0, 0, 0], weights=[1.0, 1.0, 1.0], num_groups=1) | change
  )
  with pytest.raises(ValueError, match=words):
    group_advantages(**arguments)


def test_works_inside_jit_and_makes_a_bad_reward_visible():
  run = jax.jit(lambda r, w: group_advantages(r, np.zeros(4, np.int32), w, num_groups=1))
  ones = np.ones(4, np.float32)
  np.testing.assert_allclose(
    run(np.array([1, 0, 0, 0], np.float32), ones), advantages([1, 0, 0, 0]), rtol=1e-6
  )
  assert not np.isfinite(run(np.array([1, np.nan, 0, 0], np.float32), ones)).any()
