"""From rollouts to advantages and weights: users' cases (O1..O10, O49, O61..O63) on hand-made rollouts, and properties."""

import numpy as np
import pytest

from mgrpo_jax import credit, rendering
from mgrpo_jax.trajectory import Query, Rollout, Trajectory, Turn

STD1 = dict(scale="std", baseline="mean", ddof=1, tol=1e-6)
STD0 = dict(scale="std", baseline="mean", ddof=0, tol=1e-6)
PLAIN = dict(scale="none", baseline="mean", ddof=0, tol=1e-6)
SIZE = 64  # one size, one compilation
ROOT = 3**0.5 / 2  # 0.866


def turn(sampled):
  return Turn(np.zeros(2, np.int32), np.ones(sampled, np.int32), np.zeros(sampled, np.float32), np.zeros(sampled, np.int32))


def tree(query, index, reward=None, subs=(), *, weight=1.0):
  """A rollout with rewards already given; `subs` are (agent, reward) or (agent, reward, turn_index)."""
  main = Trajectory("main", query, index, reward=reward, weight=weight)
  made = [Trajectory(agent, query, index, i, *(turn_index or [i]), reward=r, weight=weight) for i, (agent, r, *turn_index) in enumerate(subs)]
  return Rollout(Query(query, "?", ""), index, main, made)


def trees(rewards, subs=None, query="q"):
  """One query: main rewards, and the rewards of the search calls of each rollout."""
  subs = subs or [()] * len(rewards)
  return [tree(query, k, r, [("search", s) for s in calls]) for k, (r, calls) in enumerate(zip(rewards, subs))]


def group(rollouts, agent="main", advantage=STD1, *, mode="weighted", group_by="query", zero_variance="keep", overlong=None, target=8, seed=0, size=SIZE):
  return credit.agent_group(
    rollouts, agent, main="main", mode=mode, advantage=advantage, group_by=group_by, zero_variance=zero_variance,
    overlong=overlong or {"mode": "keep"}, target=target, seed=seed, size=size)


def near(got, expected):
  np.testing.assert_allclose(got, expected, atol=2e-6)


# ---------------------------------------------------------------------------------- users' cases


def test_O1_uneven_groups_have_their_own_baselines():
  rollouts = trees([1, 0, 1, 0], query="a") + trees([5, 5, 5], query="b") + trees([0, 1, 0, 1], query="c")
  near(group(rollouts, advantage=PLAIN).advantages, [0.5, -0.5, 0.5, -0.5, 0, 0, 0, -0.5, 0.5, -0.5, 0.5])


def test_O2_a_rollout_with_more_calls_has_no_more_say_in_the_baseline():
  g = group(trees([0, 0], [(1, 1, 1), (0,)]), "search", PLAIN)
  near(g.advantages, [0.5, 0.5, 0.5, -0.5])
  near(g.weights, [1 / 3, 1 / 3, 1 / 3, 1])
  near(group(trees([0, 0], [(1, 1, 1), (0,)]), "search", PLAIN, mode="per_call").advantages, [0.25, 0.25, 0.25, -0.75])


def test_O3_talkative_rollouts_do_not_bend_the_advantages():
  calls = [(1, 1), (0,), (1, 1), (0,)]
  near(group(trees([0] * 4, calls), "search").advantages, [ROOT, ROOT, -ROOT, ROOT, ROOT, -ROOT])
  # semantics C10: rewards 1,0,0,0 with d=3,1,1,1
  near(group(trees([0] * 4, [(1, 1, 1), (0,), (0,), (0,)]), "search").advantages, [1.5] * 3 + [-0.5] * 3)


def test_O4_the_rollouts_of_one_query_are_one_group():
  near(group(trees([1, 0, 1, 0])).advantages, [ROOT, -ROOT, ROOT, -ROOT])


def test_O5_agents_are_never_compared_with_each_other():
  rollouts = [tree("t", k, r, [("search", 0.2), ("reason", r)]) for k, r in enumerate([1, 0])]
  near(group(rollouts).advantages, [0.5**0.5, -(0.5**0.5)])
  near(group(rollouts, "search").advantages, [0, 0])
  near(group(rollouts, "reason").advantages, [0.5**0.5, -(0.5**0.5)])


@pytest.mark.parametrize("size", [0, 6])
def test_O6_padding_pollutes_nothing(size):
  g = group(trees([1, 0, 0, 0]), size=size)
  near(g.advantages, [1.5, -0.5, -0.5, -0.5])
  near(g.weights, [1] * 4)
  assert g.stats["groups"] == 1 and g.stats["zero_variance"] == g.stats["weightless"] == 0


def test_O10_a_missing_score_is_left_out_and_counted_never_nan():
  rollouts = trees([0] * 4, [(1,), (None,), (0,), (1,)])
  with pytest.raises(ValueError, match="give a row without a reward weight 0"):
    group(rollouts, "search")
  rollouts[1].subs[0].weight = 0.0
  g = group(rollouts, "search")
  near(g.advantages, [3**-0.5, 0, -2 * 3**-0.5, 3**-0.5])  # [1, 0, 1]: mean 2/3, sample std 3^-0.5
  assert g.weights.tolist() == [1, 0, 1, 1] and g.stats["weightless"] == 1


def test_O12_a_group_of_one_rollout_is_zero():
  near(group(trees([0.7])).advantages, [0])
  near(group(trees([0.7, 0.2], [(1, 0, 0.5), ()]), "search").advantages, [0, 0, 0])


def scored(specs, *, sub_weights=None, main_weights=None, experts=None, overlong=None):
  """Rollouts scored by the room itself; `specs` are (result, main format, [(agent, result, format, status)])."""
  rollouts = []
  for k, (result, ok, subs) in enumerate(specs):
    r = tree("q", k, None, [(agent, None) for agent, *_ in subs])
    r.main.result, r.main.format_ok, r.main.turns = result, ok, [turn(4)]
    for t, (_, sub_result, sub_ok, status) in zip(r.subs, subs):
      t.task, t.result, t.format_ok, t.status, t.turns = "task", sub_result, sub_ok, status, [turn(4)]
    rollouts.append(r)
  credit.score_rollouts(
    rollouts, correct=lambda result, query: result == "right", experts=experts or {}, main_weights=main_weights or {},
    sub_weights=sub_weights or {}, overlong=overlong or {"mode": "keep"})
  return rollouts


def fine(result="s"):
  return ("search", result, True, "finished")


FAILED = ("search", None, False, "failed")


def test_calls_of_a_rollout_in_which_something_failed_say_nothing_of_how_many_calls_there_are():
  rollouts = scored([("right", True, [fine(), fine()]), ("right", True, [fine(), FAILED, fine()]), ("right", True, [])])
  assert credit.calls_per_rollout(rollouts, "search") == [2, 0]


def test_the_draws_of_an_alignment_can_be_read_off_the_trajectories():
  rollouts = trees([1, 0, 0], [[1, 0, 1], [1], []])
  group(rollouts, "search", mode="duplicate", target=2)
  shares = [[t.share for t in r.subs] for r in rollouts]
  assert sorted(shares[0]) == [0, 0.5, 0.5] and shares[1:] == [[1], []]  # one dropped, one copied
  assert "share 0.5" in rendering.rollout_text(Rollout(rollouts[1].query, 0, next(t for t in rollouts[0].subs if t.share)))
  group(rollouts, "search", mode="weighted")
  near([t.share for r in rollouts for t in r.subs], [1 / 3] * 3 + [1])


def test_O61_O62_a_failure_leaves_its_whole_rollout_out_and_is_no_zero():
  rollouts = scored([("right", True, [fine()]), ("wrong", True, [fine()]), ("right", True, [FAILED, fine()]), ("right", True, [fine()])])
  main, sub = group(rollouts, advantage=PLAIN), group(rollouts, "search", PLAIN)
  near(main.advantages, [0.3, -0.6, 0, 0.3])  # over [1, 0.1, 1]
  near(sub.advantages, np.array([1, -2, 0, 0, 1]) * 0.4 / 3)
  assert main.weights.tolist() == [1, 1, 0, 1] and sub.weights.tolist() == sub.loss_weights.tolist() == [1, 1, 0, 0, 1]
  assert main.stats["weightless"] == 1 and main.stats["failed"] == 0  # main itself did not fail
  assert sub.stats["weightless"] == 2 and sub.stats["failed"] == 1


def test_O62_subs_of_a_failed_main_are_not_credited():
  rollouts = scored([("right", True, [fine()]), (None, False, [fine()]), ("wrong", True, [fine()])])
  rollouts[1].main.status = "failed"
  credit.score_rollouts(rollouts, correct=lambda result, query: result == "right", experts={}, main_weights={}, sub_weights={}, overlong={"mode": "keep"})
  near(group(rollouts, "search", PLAIN).advantages, [0.2, 0, -0.2])
  assert [t.weight for t in rollouts[1].trajectories] == [0, 0]


def test_O63_a_rollout_without_calls_adds_nothing_to_the_sub_and_counts_for_main():
  rollouts = trees([1, 0, 1], [(1, 0.5), (0,), (0.5,)])
  more = trees([1, 0, 1, 0], [(1, 0.5), (0,), (0.5,), ()])
  for mode in ("weighted", "duplicate", "per_call"):
    a, b = group(rollouts, "search", mode=mode, seed=3), group(more, "search", mode=mode, seed=3)
    np.testing.assert_array_equal(a.advantages, b.advantages)
    np.testing.assert_array_equal(a.weights, b.weights)
  assert len(group(more).advantages) == 4 and not np.allclose(group(more).advantages[:3], group(rollouts).advantages)
  assert credit.calls_per_rollout(more, "search") == [2, 1, 1, 0]


def test_O63_a_step_in_which_an_agent_was_never_called():
  g = group(trees([1, 0]), "search")
  assert g.trajectories == [] and len(g.advantages) == len(g.weights) == len(g.loss_weights) == 0 and g.dead_queries == []
  assert g.stats["groups"] == g.stats["zero_variance"] == 0
  assert group([], "search", zero_variance="drop", overlong={"mode": "mask", "statuses": ()}).trajectories == []


# --------------------------------------------------------------------------------------- rewards


def test_rewards_are_sums_of_their_components():
  experts = {"search": lambda task, result: {"good": 1.0, "half": 0.5}.get(result, 0.0)}
  reason = ("reason", "good", True, "finished")  # has no expert: the term is 0
  rollouts = scored([("right", True, [fine("good"), fine("half"), reason]), ("wrong", True, [fine("good")]), (None, False, [fine()])], experts=experts)
  near([r.main.reward for r in rollouts], [1, 0.1, 0])
  near([t.reward for t in rollouts[0].subs], [1, 0.75, 0.5])
  near([t.reward for r in rollouts[1:] for t in r.subs], [0.6, 0.1])
  assert rollouts[0].main.components == {"format": 1, "correct": 1} and rollouts[0].subs[1].components == {"format": 1, "main_correct": 1, "expert": 0.5}
  assert [r.correct for r in rollouts] == [True, False, False]
  weights = dict(main_weights=dict(format_weight=0.0, correct_weight=2.0), sub_weights=dict(format_weight=0.25, main_weight=0.5, expert_weight=0.0))
  rollouts = scored([("right", True, [fine("good")])], experts=experts, **weights)
  near([rollouts[0].main.reward, rollouts[0].subs[0].reward], [2, 0.75])


def test_an_invalid_format_scores_nothing_whatever_else_is_right():
  rollouts = scored([("right", True, [("search", "s", False, "finished")])], experts={"search": lambda task, result: 1.0})
  assert rollouts[0].subs[0].reward == 0 and rollouts[0].subs[0].components["expert"] == 1


def test_a_right_answer_in_an_invalid_format_credits_neither_main_nor_its_subs():
  rollout, = scored([("right", False, [fine()])])
  near([rollout.main.reward, rollout.subs[0].reward], [0, 0.1])
  assert rollout.correct and rollout.subs[0].components["main_correct"] == 0  # accuracy is the scorer's alone


def test_a_task_without_an_answer_has_no_weight_and_its_siblings_keep_theirs():
  experts = {"search": lambda task, result: None if result == "?" else 1.0}
  rollouts = scored([("right", True, [fine("?"), fine()]), ("wrong", True, [fine(), fine()])], experts=experts)
  assert [t.weight for t in rollouts[0].trajectories] == [1, 0, 1]
  g = group(rollouts, "search", STD0)
  near(g.weights, [0, 1, 0.5, 0.5])  # d_k counts those that take part
  near(g.advantages, [0, 1, -1, -1])
  assert credit.calls_per_rollout(rollouts, "search") == [1, 2] and g.stats["weightless"] == 1
  assert np.isnan(rollouts[0].subs[0].components["expert"])


def test_a_result_that_is_missing_is_wrong_without_asking_the_scorer():
  rollout, = scored([(None, False, [])])
  assert rollout.correct is False and rollout.main.reward == 0


# ------------------------------------------------------------------------- alignment, by its modes


def test_modes_give_each_call_its_share():
  rollouts = trees([0] * 3, [(1, 0, 0, 0), (), (1,)])
  near(group(rollouts, "search").weights, [0.25] * 4 + [1])
  near(group(rollouts, "search", mode="per_call").weights, [2 / 5] * 5)
  drawn = [group(rollouts, "search", STD0, mode="duplicate", target=2, seed=s) for s in range(20)]
  for g in drawn:  # two of four calls are kept, the single one stands twice
    assert sorted(g.weights.tolist()) == [0, 0, 0.5, 0.5, 1] and g.weights[4] == 1 and g.stats["dropped"] == 2
    assert (g.advantages[g.weights == 0] == 0).all()
  assert len({tuple(g.weights) for g in drawn}) > 2
  mean = np.mean([group(rollouts, "search", mode="duplicate", target=3, seed=s).weights for s in range(400)], axis=0)
  np.testing.assert_allclose(mean, [0.25] * 4 + [1], atol=0.06)  # the expectation is that of "weighted"


def test_duplicate_is_the_papers_statistic_with_copies_counted():
  rollouts = trees([0] * 3, [(1, 0.5), (0,), (0.25, 0.75, 0.5)])
  g = group(rollouts, "search", STD0, mode="duplicate", target=8, seed=5)
  copies = np.rint(g.weights * 8).astype(int)
  assert [copies[:2].sum(), copies[2], copies[3:].sum()] == [8, 8, 8] and (copies > 0).all()
  rewards = np.array([1, 0.5, 0, 0.25, 0.75, 0.5])
  slots = np.repeat(rewards, copies)
  near(g.advantages, (rewards - slots.mean()) / slots.std())


def test_draws_hang_on_seed_and_query_and_not_on_the_order_of_rollouts():
  rollouts = trees([0] * 4, [(1, 0, 1), (0, 1), (1,), (0, 1, 1, 0)])
  a = group(rollouts, "search", mode="duplicate", target=2, seed=1)
  b = group(rollouts[::-1], "search", mode="duplicate", target=2, seed=1)
  weights = {id(t): w for t, w in zip(a.trajectories, a.weights)}
  assert [weights[id(t)] for t in b.trajectories] == b.weights.tolist()
  other = trees([0] * 4, [(1, 0, 1), (0, 1), (1,), (0, 1, 1, 0)], query="r")
  seeds = [tuple(group(r, "search", mode="duplicate", target=2, seed=s).weights) for r in (rollouts, other) for s in range(4)]
  assert len(set(seeds)) > 4


# ------------------------------------------------------------------------------ groups and options


def test_group_by_decides_who_is_compared_with_whom():
  rollouts = [tree("a", 0, 1, [("search", 1, 0), ("search", 0, 2)]), tree("a", 1, 0, [("search", 0, 0), ("search", 1, 1)]),
              tree("b", 0, 0, [("search", 0, 0)]), tree("b", 1, 0, [("search", 1, 2)])]
  plain = {by: group(rollouts, "search", PLAIN, group_by=by).advantages for by in ("query", "position", "turn", "pooled")}
  near(plain["query"], [0.5, -0.5, -0.5, 0.5, -0.5, 0.5])
  near(plain["position"], [0.5, -0.5, -0.5, 0.5, -0.5, 0.5])
  near(plain["turn"], [0.5, 0, -0.5, 0, 0, 0])  # only turn 0 of query a was seen by two rollouts
  near(plain["pooled"], [0.5, -0.5, -0.5, 0.5, -0.5, 0.5])
  rollouts[0].subs[1].reward = 1
  near(group(rollouts, "search", PLAIN, group_by="query").advantages, [0.25, 0.25, -0.75, 0.25, -0.5, 0.5])
  near(group(rollouts, "search", PLAIN, group_by="position").advantages, [0.5, 0, -0.5, 0, -0.5, 0.5])
  pooled = (2 * 0.5 + 0.5 + 0 + 1) / 4  # weights 1/2 in query a, 1 in query b
  near(group(rollouts, "search", PLAIN, group_by="pooled").advantages, np.array([1, 1, 0, 1, 0, 1]) - pooled)
  near(group(rollouts, "main", PLAIN, group_by="position").advantages, [0.5, -0.5, 0, 0])
  near(group(rollouts, "main", PLAIN, group_by="pooled").advantages, [0.75, -0.25, -0.25, -0.25])


@pytest.mark.parametrize("zero_variance, counted", [("keep", 1), ("drop", 0), ("resample", 0)])
def test_groups_without_variance_stay_in_the_divisor_or_not(zero_variance, counted):
  rollouts = trees([1, 1], query="high") + trees([0, 1], query="live") + trees([0, 0], query="low") + trees([0.7], query="single")
  g = group(rollouts, zero_variance=zero_variance)
  assert g.loss_weights.tolist() == [counted, counted, 1, 1, counted, counted, counted]
  assert g.weights.tolist() == [1] * 7 and g.loss_weights.dtype == np.float32
  assert g.dead_queries == ["high", "low", "single"] and (g.advantages[[0, 1, 4, 5, 6]] == 0).all()
  assert g.stats["groups"] == 4
  near([g.stats["zero_variance"], g.stats["all_high"], g.stats["all_low"]], [3 / 4, 2 / 4, 1 / 4])


def test_a_question_whose_rollouts_all_failed_is_no_group_and_is_asked_anew_by_resampling():
  rollouts = trees([1, 0], query="live") + [tree("gone", k, None, weight=0.0) for k in range(2)]
  g = group(rollouts, zero_variance="drop")
  assert g.dead_queries == ["gone"] and g.stats["groups"] == 1 and g.loss_weights.tolist() == [1, 1, 0, 0]


def test_overlong_keep_mask_and_exclude_by_status():
  statuses = ("max_turns", "context_full")

  def step(mode):
    overlong = {"mode": mode, "statuses": statuses, "buffer": 2, "max_tokens": {"main": 10}}
    rollouts = scored([("right", True, []), ("wrong", True, []), (None, False, []), (None, False, [])])
    rollouts[2].main.status, rollouts[3].main.status = "max_turns", "tool_budget"
    credit.score_rollouts(rollouts, correct=lambda result, query: result == "right", experts={}, main_weights={}, sub_weights={}, overlong=overlong)
    return group(rollouts, advantage=PLAIN, overlong=overlong)

  keep, mask, exclude = step("keep"), step("mask"), step("exclude")
  near(keep.advantages, np.array([1, 0.1, 0, 0]) - 0.275)
  near(mask.advantages, keep.advantages)  # it still counts in the baseline
  assert mask.weights.tolist() == keep.weights.tolist() == keep.loss_weights.tolist() == [1] * 4
  assert mask.loss_weights.tolist() == [1, 1, 0, 1]
  near(exclude.advantages, [1 - 1.1 / 3, 0.1 - 1.1 / 3, 0, -1.1 / 3])  # in neither
  assert exclude.weights.tolist() == exclude.loss_weights.tolist() == [1, 1, 0, 1]


def test_penalise_takes_the_penalty_from_those_that_ended_in_a_listed_status_and_names_it():
  overlong = {"mode": "penalise", "statuses": ("max_turns", "tool_budget"), "penalty": 0.3}
  rollouts = scored([("right", True, [fine()]), (None, False, [fine()]), (None, False, [fine()])])
  rollouts[1].main.status, rollouts[2].main.status = "max_turns", "context_full"
  rollouts[0].subs[0].status = "tool_budget"
  before = [t.reward for r in rollouts for t in r.trajectories]
  for _ in range(2):  # scoring again changes nothing
    credit.score_rollouts(rollouts, correct=lambda result, query: result == "right", experts={}, main_weights={}, sub_weights={}, overlong=overlong)
    taken = [t.components["overlong"] for r in rollouts for t in r.trajectories]
    near(taken, [0, -0.3, -0.3, 0, 0, 0])
    near([t.reward for r in rollouts for t in r.trajectories], np.add(before, taken))


def test_O49_penalise_length_is_by_sampled_tokens_whatever_the_status():
  overlong = {"mode": "penalise_length", "statuses": ("max_turns",), "penalty": 1.0, "buffer": 20, "max_tokens": {"main": 100, "search": 10**6}}
  rollouts = scored([("right", True, [fine()])] * 4 + [("right", True, [FAILED])])
  for r, n in zip(rollouts, (80, 90, 100, 101, 101)):
    r.main.turns = [turn(n - 30), turn(30)]
  for _ in range(2):  # scoring again changes nothing
    credit.score_rollouts(rollouts, correct=lambda result, query: result == "right", experts={}, main_weights={}, sub_weights={}, overlong=overlong)
    near([r.main.reward for r in rollouts[:4]], [1, 0.5, 0, 0])
    near([r.subs[0].reward for r in rollouts[:4]], [0.5] * 4)
  assert rollouts[4].main.weight == 0
  near(group(rollouts, advantage=PLAIN).advantages, [0.625, 0.125, -0.375, -0.375, 0])


# ------------------------------------------------------------------------------------- properties


def random_step(seed):
  """Trees of random shape with rewards of few values, some rows and rollouts without weight."""
  rng, rollouts = np.random.default_rng(seed), []
  for query in "abc"[: rng.integers(1, 4)]:
    for k in range(rng.integers(1, 5)):
      subs = [(rng.choice(["search", "reason"]), rng.choice([0, 0.1, 0.6, 1]), int(rng.integers(0, 3))) for _ in range(rng.integers(0, 5))]
      r = tree(query, k, rng.choice([0, 0.1, 1]), subs)
      for t in r.trajectories:
        if rng.random() < 0.15:
          t.weight, t.reward = 0.0, rng.choice([None, np.nan, 7.0])
      rollouts.append(r)
  return rollouts


def loops(rollouts, agent, *, mode, group_by, ddof):
  """{id(trajectory): (weight, advantage)} by plain loops in float64."""
  live = [(r, t) for r in rollouts for t in r.trajectories if t.agent == agent and t.weight > 0]
  weight = {}
  for r, t in live:
    same_query = [(s, u) for s, u in live if s.query.id == r.query.id]
    calls = sum(s is r for s, _ in same_query)
    share = {"weighted": 1 / calls, "per_call": len({id(s) for s, _ in same_query}) / len(same_query)}[mode]
    weight[id(t)] = 1.0 if agent == "main" else share
  nth = {id(t): i for r in rollouts for i, t in enumerate([t for t in r.trajectories if t.agent == agent])}
  key = {"query": lambda t: t.query_id, "position": lambda t: (t.query_id, nth[id(t)]), "turn": lambda t: (t.query_id, t.turn_index), "pooled": lambda t: 0}[group_by]
  out = {}
  for _, t in live:
    peers = [(s, u) for s, u in live if key(u) == key(t)]
    total = sum(weight[id(u)] for _, u in peers)
    mean = sum(weight[id(u)] * u.reward for _, u in peers) / total
    spread = max(u.reward for _, u in peers) - min(u.reward for _, u in peers)
    if len({id(s) for s, _ in peers}) < 2 or spread < 1e-6 or total - ddof < 1e-5 * total:
      out[id(t)] = (weight[id(t)], 0.0)
    else:
      std = (sum(weight[id(u)] * (u.reward - mean) ** 2 for _, u in peers) / (total - ddof)) ** 0.5
      out[id(t)] = (weight[id(t)], (t.reward - mean) / std)
  return out


@pytest.mark.parametrize("group_by", ["query", "position", "turn", "pooled"])
@pytest.mark.parametrize("mode", ["weighted", "per_call"])
def test_weights_and_advantages_are_those_of_plain_loops(mode, group_by):
  for seed in range(25):
    rollouts = random_step(seed)
    for agent in ("main", "search", "reason"):
      g = group(rollouts, agent, STD1 if seed % 2 else STD0, mode=mode, group_by=group_by)
      expected = loops(rollouts, agent, mode=mode, group_by=group_by, ddof=seed % 2)
      np.testing.assert_allclose(g.weights, [expected.get(id(t), (0, 0))[0] for t in g.trajectories], atol=1e-6)
      np.testing.assert_allclose(g.advantages, [expected.get(id(t), (0, 0))[1] for t in g.trajectories], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["weighted", "duplicate", "per_call"])
def test_the_order_of_rollouts_and_the_padding_change_nothing(mode):
  rng = np.random.default_rng(0)
  for seed in range(15):
    rollouts = random_step(100 + seed)
    shuffled = [rollouts[i] for i in rng.permutation(len(rollouts))]
    for agent in ("main", "search"):
      options = dict(mode=mode, target=2, seed=seed, zero_variance="drop")
      a, b, c = group(rollouts, agent, **options), group(shuffled, agent, **options), group(rollouts, agent, size=96, **options)
      place = {id(t): i for i, t in enumerate(a.trajectories)}
      order = [place[id(t)] for t in b.trajectories]
      for field in ("weights", "loss_weights", "advantages"):
        np.testing.assert_allclose(getattr(a, field)[order], getattr(b, field), atol=2e-6)
        np.testing.assert_allclose(getattr(a, field), getattr(c, field), atol=2e-6)
      assert a.dead_queries == b.dead_queries == c.dead_queries
      assert a.stats == pytest.approx(b.stats) and a.stats == pytest.approx(c.stats)


def test_the_papers_batch_has_8_main_and_64_sub_slots():
  rng = np.random.default_rng(0)
  calls = [tuple(rng.random(d)) for d in (8, 3, 1, 9, 2, 8, 5, 12)]
  rollouts = trees(list(rng.random(8)), calls)
  g = group(rollouts, "search", STD0, mode="duplicate", target=8)
  assert len(group(rollouts).advantages) == 8 and np.rint(8 * g.weights).sum() == 64
  slots = np.repeat(g.advantages, np.rint(8 * g.weights).astype(int))
  near([slots.mean(), slots.std()], [0, 1])
  assert g.stats["dropped"] == (9 - 8) + (12 - 8)
