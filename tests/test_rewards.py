"""Rewards of main and sub (paper eq. 4 and 5) and the overlong penalty."""

import math

import pytest

from mgrpo_jax.method.rewards import main_reward, overlong_penalty, sub_reward


@pytest.mark.parametrize(
  "format_ok, correct, expected",
  [(True, True, 1.0), (True, False, 0.1), (True, 0.5, 0.55), (False, True, 0.0), (False, False, 0.0)],
)
def test_main_reward_is_a_tenth_for_the_format_and_the_rest_for_the_answer(format_ok, correct, expected):
  assert main_reward(format_ok, correct) == pytest.approx(expected)


@pytest.mark.parametrize(
  "format_ok, main_correct, expert, expected",
  [
    (True, 1, 1, 1.0),
    (True, 1, 0, 0.5),
    (True, 0, 1, 0.6),
    (True, 0, 0, 0.1),
    (True, 0.5, 0.25, 0.425),  # the main agent's score comes as a float, not by equality with 1
    (False, 1, 1, 0.0),
  ],
)
def test_sub_reward_adds_format_outcome_and_expert(format_ok, main_correct, expert, expected):
  assert sub_reward(format_ok, main_correct, expert) == pytest.approx(expected)


def test_terms_are_added_and_not_averaged():
  # O8: weights .5 and .5, local 1, team 0 -> .5, and with weight 1 on each term the sum, not a mean.
  assert sub_reward(True, 0, 1, format_weight=0, main_weight=0.5, expert_weight=0.5) == pytest.approx(0.5)
  assert sub_reward(True, 1, 1, format_weight=1, main_weight=1, expert_weight=1) == pytest.approx(3.0)
  assert main_reward(True, 1, format_weight=0.5, correct_weight=2) == pytest.approx(2.5)


def test_rewards_are_plain_floats():
  values = [
    main_reward(True, True),
    main_reward(False, True),
    sub_reward(True, True, True),
    sub_reward(False, 0, 0),
  ]
  assert all(type(x) is float for x in values)


def test_a_score_that_is_missing_is_refused_only_where_it_counts():
  assert sub_reward(False, 1, None) == 0.0  # the expert is not asked about an invalid trajectory
  with pytest.raises(ValueError, match="expert is None .* weight 0"):
    sub_reward(True, 1, None)
  with pytest.raises(ValueError, match="main_correct is nan"):
    sub_reward(True, math.nan, 1)
  with pytest.raises(ValueError, match="correct is None"):
    main_reward(True, None)


@pytest.mark.parametrize(
  "length, expected", [(0, 0), (80, 0), (85, -0.25), (90, -0.5), (100, -1), (101, -1), (900, -1)]
)
def test_overlong_penalty_falls_over_the_last_tokens(length, expected):
  assert overlong_penalty(length, 100, 20) == pytest.approx(expected)  # O49
  assert overlong_penalty(length, 100, 20, factor=0.5) == pytest.approx(expected / 2)


def test_overlong_penalty_without_buffer_is_a_step():
  assert [overlong_penalty(n, 100, 0) for n in (99, 100, 101)] == [0, 0, -1]


@pytest.mark.parametrize("buffer", [-1, 101])
def test_overlong_buffer_out_of_range_is_refused(buffer):
  with pytest.raises(ValueError, match="buffer"):
    overlong_penalty(50, 100, buffer)
