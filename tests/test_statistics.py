"""Intervals, paired tests and pass@k against hand numbers and independent computations."""

import itertools
import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from mgrpo_jax.statistics import (
  avg_at_k,
  paired_difference,
  paired_exact,
  pass_at_k,
  pooled_seeds,
  wilson_interval,
)


@pytest.mark.parametrize("k, n", [(15, 50), (0, 10), (10, 10), (1, 1), (383, 384), (120, 384)])
def test_wilson_against_scipy(k, n):
  want = scipy.stats.binomtest(k, n).proportion_ci(0.95, method="wilson")
  assert wilson_interval(k, n, z=scipy.stats.norm.ppf(0.975)) == pytest.approx(tuple(want), abs=1e-12)


@given(st.integers(1, 500), st.data())
@settings(max_examples=60, deadline=None)
def test_wilson_bounds_are_where_the_score_test_just_rejects(n, data):
  k = data.draw(st.integers(0, n))
  lo, hi = wilson_interval(k, n)
  assert 0 <= lo <= k / n <= hi <= 1
  for p in (lo, hi):
    if 0 < p < 1:
      assert abs(k / n - p) == pytest.approx(1.96 * math.sqrt(p * (1 - p) / n), rel=1e-6, abs=1e-9)


def test_wilson_edges():
  assert wilson_interval(0, 0) == (0.0, 1.0)
  for k, n in [(-1, 3), (4, 3)]:
    with pytest.raises(ValueError, match="successes"):
      wilson_interval(k, n)


def test_paired_difference_is_the_first_minus_the_second_with_a_bootstrap_of_questions():
  rng = np.random.default_rng(0)
  a, b = rng.random(384) < 0.55, rng.random(384) < 0.4
  mean, lo, hi = paired_difference(a, b)
  assert mean == pytest.approx(a.mean() - b.mean())
  # The bootstrap of a mean of n differences in {-1, 0, 1} is close to its normal interval at n = 384.
  d = a.astype(float) - b
  half = 1.96 * d.std() / math.sqrt(len(d))
  assert (lo, hi) == pytest.approx((mean - half, mean + half), abs=0.006)
  assert paired_difference(b, a)[0] == -mean


def test_paired_difference_uses_the_pairing():
  a = np.arange(400) % 2 == 0
  b = a.copy()
  b[:4] = ~b[:4]  # almost the same answers: unpaired, the interval would be +-0.07
  mean, lo, hi = paired_difference(a, b)
  assert mean == 0 and hi - lo < 0.025


def test_paired_difference_by_full_enumeration_of_a_small_bootstrap():
  a, b = np.array([1, 1, 0, 1.0]), np.array([0, 1, 1, 0.0])
  d = a - b
  means = sorted(np.mean([d[i] for i in pick]) for pick in itertools.product(range(4), repeat=4))
  want = np.percentile(means, [2.5, 97.5])
  assert paired_difference(a, b, samples=40000)[1:] == pytest.approx(want)


def test_paired_difference_repeats_with_its_seed():
  a, b = np.array([1, 0, 1, 1, 0, 1, 1]), np.array([0, 0, 1, 0, 1, 0.5, 0.25])
  assert paired_difference(a, b, seed=1, samples=300) == paired_difference(a, b, seed=1, samples=300)
  assert paired_difference([True], [True]) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
  "wins, losses, p",
  [(0, 0, 1.0), (5, 0, 2 / 32), (0, 5, 2 / 32), (8, 1, 20 / 512), (3, 3, 1.0), (10, 2, 2 * 79 / 4096)],
)
def test_mcnemar_against_hand_counts(wins, losses, p):
  a = np.array([1] * wins + [0] * losses + [1, 0, 1], bool)
  b = np.array([0] * wins + [1] * losses + [1, 0, 1], bool)
  assert paired_exact(a, b) == pytest.approx(p)


def test_mcnemar_stays_exact_for_thousands_of_questions():
  a = np.ones(4000, bool)
  assert 0 < paired_exact(a, np.arange(4000) >= 1000) < 1e-290


def test_pooled_gain_covers_seeds_and_questions():
  rng = np.random.default_rng(1)
  gains, n = [0.1, 0.3, 0.2], 400
  pairs = [(rng.random(n) < 0.4 + g, rng.random(n) < 0.4) for g in gains]
  mean, lo, hi = pooled_seeds(pairs)
  each = [a.mean() - b.mean() for a, b in pairs]
  assert mean == pytest.approx(np.mean(each))
  d = np.stack([a.astype(float) - b for a, b in pairs])
  # independent: variance of the two-way bootstrap mean, by direct resampling of rows and columns
  means = [d[rng.integers(0, 3, 3)][:, rng.integers(0, n, n)].mean() for _ in range(4000)]
  assert (lo, hi) == pytest.approx(tuple(np.percentile(means, [2.5, 97.5])), abs=0.01)
  assert hi - lo > np.ptp(paired_difference(d.mean(0), np.zeros(n))[1:])  # seeds add to the width


def test_pooled_gain_of_one_seed_is_the_paired_difference():
  rng = np.random.default_rng(2)
  a, b = rng.random(300) < 0.6, rng.random(300) < 0.5
  assert pooled_seeds([(a, b)]) == pytest.approx(paired_difference(a, b), abs=0.006)


def test_unusable_pairs_are_refused():
  for call in (lambda: paired_difference([1, 0], [1]), lambda: paired_difference([], []),
               lambda: paired_difference([[1]], [[0]])):  # fmt: skip
    with pytest.raises(ValueError, match="vectors of one length"):
      call()
  with pytest.raises(ValueError, match="finite"):
    paired_difference([1, np.nan], [1, 0])
  with pytest.raises(ValueError, match="same questions"):
    pooled_seeds([([1, 0], [0, 0]), ([1], [0])])
  with pytest.raises(ValueError, match="no seeds"):
    pooled_seeds([])


def test_one_right_of_four():  # O64
  assert pass_at_k(1, 4, 4) == 1.0
  assert pass_at_k(1, 4, 2) == pytest.approx(0.5)
  assert pass_at_k(1, 4, 1) == pytest.approx(0.25)
  assert avg_at_k(1, 4, 4) == avg_at_k(1, 4, 1) == 0.25


@given(st.integers(1, 7), st.data())
@settings(max_examples=60, deadline=None)
def test_pass_and_avg_at_k_are_means_over_all_choices_of_k_attempts(total, data):
  correct, k = data.draw(st.integers(0, total)), data.draw(st.integers(1, total))
  outcomes = [1] * correct + [0] * (total - correct)
  choices = list(itertools.combinations(outcomes, k))
  assert pass_at_k(correct, total, k) == pytest.approx(np.mean([max(c) for c in choices]))
  assert avg_at_k(correct, total, k) == pytest.approx(np.mean([np.mean(c) for c in choices]))


def test_at_k_takes_vectors_and_refuses_too_few_attempts():
  np.testing.assert_allclose(pass_at_k([0, 1, 2], 2, 2), [0, 1, 1])
  np.testing.assert_allclose(avg_at_k([0, 1, 2], [2, 2, 4], 2), [0, 0.5, 0.5])
  assert pass_at_k(1, 10**6, 100) == pytest.approx(1e-4)
  for call in (lambda: pass_at_k(1, 3, 4), lambda: pass_at_k(1, 3, 0), lambda: avg_at_k(4, 3, 1)):
    with pytest.raises(ValueError):
      call()
