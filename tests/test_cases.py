"""Users' cases that belong to the loop: steps in which nothing can be learned, and going on after a stop (O13..O15, O57..O60)."""

import types

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from mgrpo_jax import learner, loop
from mgrpo_jax.config import base_config
from mgrpo_jax.trajectory import Query, Rollout, Trajectory, Turn


class NoAgent:
  """What the loop asks of an agent, without a model."""

  def __init__(self):
    self.name, self.trainable, self.options, self.runtime = "main", True, learner.LossOptions(), None
    self.config = ConfigDict({"limits": {"tokens": 128, "calls": 1}})
    self.state, self.published, self.version = {"params": 0}, [], 7
    self.mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))

  def publish(self, version):
    self.published.append(version)


class OneCheckpoint:
  def save(self, step, states, host, score):
    self.saved = states, host

  def restore(self, step, abstract):
    return self.saved


def team(monkeypatch, solves, *, names="abcdef", queries=2, rollouts=4, attempts=3, mode="resample"):
  """A team of a main agent whose k-th attempt at a question is right where solves(id)[k] is; also the draws it was asked for."""
  config = base_config()
  config.method.update(dict(queries=queries, rollouts=rollouts, zero_variance=mode, resample_attempts=attempts))
  config.train.sample_rollouts = 0
  train = [Query(n, f"{n}?", "right") for n in names]
  surroundings = types.SimpleNamespace(train=train, correct=lambda text, query: text == query.answer, experts={})
  draws = []

  def run_rollouts(runtimes, jobs, **kwargs):
    assert jobs, "an empty batch was sent"
    draws.append(list(dict.fromkeys(j.query.id for j in jobs)))
    return [Rollout(j.query, j.index, main_answers(j, "right" if solves(j.query.id)[j.index] else "wrong")) for j in jobs]

  monkeypatch.setattr(loop.controller, "run_rollouts", run_rollouts)
  return loop.Team(config, surroundings, {"main": NoAgent()}, {}, {"main": 0}), draws


def main_answers(job, text):
  one = np.ones(1, np.int32)
  return Trajectory("main", job.query.id, job.index, turns=[Turn(one, one, np.zeros(1, np.float32), 0 * one)], result=text, format_ok=True)


def iterator(t):
  return loop.question_iterator(t.world.train, t.config.seed)


def asked(rollouts):
  return list(dict.fromkeys(r.query.id for r in rollouts))


def take(it, names, count):
  return [q.id for q in loop.draw(it, [Query(n, "?", "") for n in names], count, set())]


MIXED, ALL, NONE = (1, 0, 0, 0), (1, 1, 1, 1), (0, 0, 0, 0)


# ------------------------------------------------------------------------- steps in which nothing can be learned


@pytest.mark.parametrize("names, extra", [("abcdefghijkl", 3), ("abcdef", 2), ("abcde", 2), ("ab", 0)])
def test_O13_every_group_equal_ends_after_the_cap_or_the_last_question_with_a_whole_batch(monkeypatch, capsys, names, extra):
  t, draws = team(monkeypatch, lambda q: ALL if q < "c" else NONE, names=names)
  kept, values = loop.collect(t, iterator(t), 0)
  assert [len(d) for d in draws] == ([2, 2, 1] if len(names) == 5 else [2] * (1 + extra))
  assert len(set(sum(draws, []))) == len(sum(draws, [])), "a question was asked twice in one step"
  assert asked(kept) == sum(draws, [])[-2:] and len(kept) == 8  # Q questions, K rollouts each, the last ones drawn
  assert values["train/resample_attempts"] == extra and values["train/dead_queries_left"] == 2
  said = capsys.readouterr().err
  assert f"step 0: in none of the {len(sum(draws, []))} questions drawn ({extra} extra draws)" in said and said.count("\n") == 1


def test_O13_no_draw_is_repeated_without_leave(monkeypatch, capsys):
  for mode, attempts in (("resample", 0), ("keep", 3), ("drop", 3)):
    t, draws = team(monkeypatch, lambda q: NONE, attempts=attempts, mode=mode)
    kept, _ = loop.collect(t, iterator(t), 0)
    assert len(draws) == 1 and len(kept) == 8
    capsys.readouterr()


def test_O13_a_replacement_that_is_not_there_leaves_the_dead_question_in_the_step(monkeypatch, capsys):
  # three questions, the first two drawn are dead: one replacement is found, the second is not
  t, draws = team(monkeypatch, lambda q: NONE, names="abc")
  first = asked(loop.collect(t, iterator(t), 0)[0])
  third = ({"a", "b", "c"} - set(draws[0])).pop()
  assert third in first
  capsys.readouterr()
  t, draws = team(monkeypatch, lambda q: MIXED if q == third else NONE, names="abc")
  kept, values = loop.collect(t, iterator(t), 0)
  assert asked(kept) == [third, draws[0][1]] and values["train/dead_queries_left"] == 1
  assert capsys.readouterr().err == ""  # main learns from one of them


def test_O14_a_step_without_a_trainable_group_moves_version_and_data_as_any_other(monkeypatch, tmp_path, capsys):
  folder = types.SimpleNamespace(path=tmp_path, rollouts=tmp_path)
  compiled = types.SimpleNamespace(pop=lambda: 0)
  t, draws = team(monkeypatch, lambda q: NONE, names="abcdefghijklmnop")
  it, disk = iterator(t), OneCheckpoint()
  values = loop.run_step(t, it, 7, folder, compiled)
  assert t.agents["main"].published == [8]
  assert values["train/main/updates"] == 0 and values["train/main/zero_variance"] == 1 and values["train/rollouts"] == 8
  assert not [k for k, v in values.items() if k.startswith("train/") and np.isnan(v)]
  loop.save(t, disk, it, 8, None)
  loop.run_step(t, it, 8, folder, compiled)

  again, draws_again = team(monkeypatch, lambda q: NONE, names="abcdefghijklmnop")
  it = iterator(again)
  loop.restore(again, disk, it, 8)
  loop.run_step(again, it, 8, folder, compiled)
  assert again.agents["main"].published == [8, 9] and t.agents["main"].published == [8, 9]
  assert draws_again == draws[4:] and not set(sum(draws[:4], [])) & set(sum(draws_again, []))


def test_O15_the_groups_kept_have_their_own_rewards_and_their_accuracy_is_told_apart(monkeypatch):
  t, _ = team(monkeypatch, lambda q: MIXED, names="abcdefgh", queries=4, attempts=1)
  order = asked(loop.collect(t, iterator(t), 0)[0])
  outcomes = {order[0]: ALL, order[1]: MIXED, order[2]: NONE, order[3]: (1, 1, 0, 1)}
  t, draws = team(monkeypatch, lambda q: outcomes.get(q, (0, 0, 1, 1)), names="abcdefgh", queries=4, attempts=1)
  kept, values = loop.collect(t, iterator(t), 0)
  assert draws[0] == order and asked(kept) == [order[1], order[3], *draws[1]] and len(draws[1]) == 2
  rights = {q: sum(r.correct for r in kept if r.query.id == q) for q in asked(kept)}
  assert rights == {order[1]: 1, order[3]: 3, draws[1][0]: 2, draws[1][1]: 2}
  for r in kept:
    assert r.main.reward == pytest.approx(0.1 + 0.9 * r.correct)
  assert np.mean([r.correct for r in kept]) == 8 / 16
  assert values["train/accuracy_drawn"] == 12 / 24  # 4 + 1 + 0 + 3 + 2 + 2 of six questions
  outcomes[order[2]] = ALL
  kept, values = loop.collect(t, iterator(t), 0)
  assert np.mean([r.correct for r in kept]) == 8 / 16 and values["train/accuracy_drawn"] == 16 / 24


# ------------------------------------------------------------------------------------- going on after a stop


@pytest.mark.parametrize("stop", [1, 3, 4])  # 3 batches of 2 are a whole pass (O57): the next pass begins
def test_O57_O58_O59_questions_go_on_where_they_stood(monkeypatch, stop):
  t, _ = team(monkeypatch, lambda q: MIXED)
  it, disk = iterator(t), OneCheckpoint()
  whole = [take(it, "abcdef", 2) for _ in range(9)]
  assert all(sorted(sum(whole[i : i + 3], [])) == list("abcdef") for i in (0, 3, 6)), "each pass asks every question once"
  it = iterator(t)
  for _ in range(stop):
    take(it, "abcdef", 2)
  loop.save(t, disk, it, stop, None)
  it = iterator(t)
  loop.restore(t, disk, it, stop)
  assert [take(it, "abcdef", 2) for _ in range(9 - stop)] == whole[stop:]


@pytest.mark.parametrize("names", ["abc", "abcdefghi", "abcxyz", "fedcba"])
def test_O60_another_list_of_questions_is_read_from_its_start_with_a_warning(monkeypatch, capsys, names):
  t, _ = team(monkeypatch, lambda q: MIXED)
  it, disk = iterator(t), OneCheckpoint()
  take(it, "abcdef", 5)
  loop.save(t, disk, it, 5, None)
  other, _ = team(monkeypatch, lambda q: MIXED, names=names)
  it = iterator(other)
  loop.restore(other, disk, it, 5)
  assert f"the {len(names)} training questions are not the 6 that step 5 was saved with" in capsys.readouterr().err
  assert [take(it, names, 1) for _ in names] == [take(fresh, names, 1) for fresh in [iterator(other)] for _ in names]
  assert other.agents["main"].published == [5]


def test_a_checkpoint_that_does_not_say_its_questions_is_gone_on_with(monkeypatch, capsys):
  t, _ = team(monkeypatch, lambda q: MIXED)
  it, disk = iterator(t), OneCheckpoint()
  take(it, "abcdef", 2)
  loop.save(t, disk, it, 1, None)
  disk.saved[1].pop("questions")
  rest, it = take(it, "abcdef", 4), iterator(t)
  loop.restore(t, disk, it, 1)
  assert take(it, "abcdef", 4) == rest and capsys.readouterr().err == ""
