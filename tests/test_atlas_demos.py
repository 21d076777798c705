"""Demonstrations: valid protocol, replayable, right where they say so, from training pages only."""

import collections
import hashlib
import json
import os
import re
import subprocess
import sys

import pytest

from mgrpo_jax.rollout.protocol import parse_turn
from mgrpo_jax.tasks import atlas_demos
from mgrpo_jax.tasks.atlas import FIELDS, Atlas, parse_chain
from mgrpo_jax.tasks.atlas_demos import (
  RIGHT_KINDS,
  demonstration_statistics,
  main_demonstrations,
  search_demonstrations,
  single_demonstrations,
)
from mgrpo_jax.tools.web import Browser, LocalWeb

ATLAS = Atlas.load()
WEB = LocalWeb(ATLAS.pages)
TRAIN = set(ATLAS.titles("train"))
N = 3000


def open_session():
  return Browser(WEB)


DEMOS = {
  "main": list(main_demonstrations(ATLAS, N, 0)),
  "search": list(search_demonstrations(ATLAS, open_session, N, 0)),
  "single": list(single_demonstrations(ATLAS, open_session, N, 0)),
}
EVERY = [(agent, d) for agent, demos in DEMOS.items() for d in demos]


def documented_kinds():
  rows = re.findall(r"^\| (main|search|single) \| (\w+):", atlas_demos.__doc__, re.MULTILINE)
  kinds = {agent: {kind for a, kind in rows if a == agent} for agent in DEMOS}
  kinds["single"] |= {k for k in kinds["search"] if not k.startswith("two_hops")} | {"clean"}
  return kinds


def test_the_table_of_the_module_names_every_kind_and_no_other():
  assert {agent: {d.kind for d in demos} for agent, demos in DEMOS.items()} == documented_kinds()
  assert RIGHT_KINDS <= set().union(*documented_kinds().values())


def test_every_sampled_turn_is_valid_protocol_in_canonical_json():
  for agent, demo in EVERY:
    for text, observation in demo.turns[:-1]:
      turn = parse_turn(text)
      assert turn.error is None and turn.call is not None and isinstance(observation, str) and observation
      payload = {"name": turn.call.name, "arguments": turn.call.arguments}
      assert text == f"<tool_call>{json.dumps(payload)}</tool_call>"
      assert turn.call.name in (("search",) if agent == "main" else ("search", "visit"))
      argument = "task" if agent == "main" else {"search": "query", "visit": "link"}[turn.call.name]
      assert list(turn.call.arguments) == [argument]
    text, observation = demo.turns[-1]
    assert observation is None and parse_turn(text).result == demo.result and demo.result


def test_kinds_that_say_right_are_right_and_the_others_wrong():
  lucky = collections.Counter()
  for _, demo in EVERY:
    right = demo.result in ATLAS.answer(demo.task)
    if demo.kind in RIGHT_KINDS:
      assert right, demo
    lucky[demo.kind] += right and demo.kind not in RIGHT_KINDS
  assert set(+lucky) <= {"misled", "wrong_page"}  # a wrong page of the same continent, say, can say the same
  assert all(sum(d.kind == kind for _, d in EVERY) > 2 * n for kind, n in lucky.items() if n)


def test_readers_observations_are_what_the_web_answers_when_replayed():
  for agent in ("search", "single"):
    for demo in DEMOS[agent]:
      browser = Browser(WEB)
      for text, observation in demo.turns[:-1]:
        call = parse_turn(text).call
        assert browser.call(call.name, call.arguments) == observation


def test_answers_of_readers_stand_in_what_they_were_shown():
  for agent in ("search", "single"):
    for demo in DEMOS[agent]:
      shown = " ".join(observation for _, observation in demo.turns[:-1])
      assert demo.result == "none" or demo.result in shown


def test_mains_answers_are_the_oracles_except_where_the_kind_says_so():
  for demo in DEMOS["main"]:
    wrong = [
      (task, reply)
      for task, reply in ((parse_turn(text).call.arguments["task"], reply) for text, reply in demo.turns[:-1])
      if reply not in (ATLAS.answer(task) or ())
    ]
    if demo.kind in ("clean", "check", "stop_early", "wrong_ask", "wrong_ask_fixed", "too_much_right"):
      assert not wrong
    elif demo.kind != "misled":
      assert len(wrong) == 1 and wrong[0][1] == "none"
    else:
      assert wrong[0][1] != "none"


def test_a_clean_main_asks_one_subquestion_a_hop_each_about_the_answer_before():
  for demo in DEMOS["main"]:
    if demo.kind == "clean":
      relations, entity = parse_chain(demo.task)
      asked = [parse_chain(parse_turn(text).call.arguments["task"]) for text, _ in demo.turns[:-1]]
      assert [r for (r,), _ in asked] == list(reversed(relations))
      assert [e for _, e in asked] == [entity, *(reply for _, reply in demo.turns[:-2])]


def test_stopping_early_gives_the_answer_of_an_inner_hop():
  seen = collections.Counter()
  for agent in ("main", "single"):
    for demo in DEMOS[agent]:
      if demo.kind == "stop_early":
        inner = [step.answer for step in ATLAS.evidence(demo.task)[:-1]]
        assert demo.result in inner
        seen[agent, len(inner), inner.index(demo.result)] += 1
  assert {(a, n, i) for a in ("main", "single") for n, i in ((1, 0), (2, 0), (2, 1))} == set(seen)


def test_only_training_pages_are_asked_about_or_opened():
  for agent, demo in EVERY:
    assert {step.title for step in ATLAS.evidence(demo.task)} <= TRAIN
    for text, observation in demo.turns[:-1]:
      call = parse_turn(text).call
      if agent == "main":
        assert parse_chain(call.arguments["task"])[1] in TRAIN
      elif call.name == "visit":
        assert observation.split("\n")[0] in TRAIN


def test_the_number_of_calls_varies_for_one_question():
  calls = collections.defaultdict(set)
  for demo in main_demonstrations(ATLAS, 12_000, 5):
    calls[demo.task].add(len(demo.turns) - 1)
  often = [n for n in calls.values() if len(n) > 1]
  assert len(often) > 500 and max(map(len, often)) >= 3


def test_hops_and_relations_are_balanced():
  for agent in ("main", "single"):
    hops = demonstration_statistics(ATLAS, DEMOS[agent])["hops"]
    assert all(abs(n / N - 1 / 3) < 0.04 for n in hops.values())
  search = [d for d in DEMOS["search"] if not d.kind.startswith("two_hops")]
  relations = collections.Counter(parse_chain(d.task)[0][0] for d in search)
  assert set(relations) == set(FIELDS)
  assert all(abs(n / len(search) - 1 / len(FIELDS)) < 0.025 for n in relations.values())


def test_the_mixture_is_what_the_knobs_say():
  multi = [d for d in DEMOS["main"] if len(parse_chain(d.task)[0]) > 1]
  assert abs(sum(d.kind == "stop_early" for d in multi) / len(multi) - 0.6) < 0.04
  rest = [d for d in DEMOS["main"] if d.kind != "stop_early"]
  assert abs(sum(d.kind == "check" for d in rest) / len(rest) - 0.1) < 0.03
  assert abs(sum(d.kind in ("asked_again", "give_up") for d in rest) / len(rest) - 0.12) < 0.03
  assert abs(sum(d.kind == "misled" for d in rest) / len(rest) - 0.06) < 0.02
  off = {knob: 0.0 for knob in atlas_demos.MAIN_FLAWS}
  assert {d.kind for d in main_demonstrations(ATLAS, 300, 0, flaws=off)} == {"clean"}
  only = {**off, "stop_early": 1.0}
  kinds = {(d.kind, len(parse_chain(d.task)[0]) > 1) for d in main_demonstrations(ATLAS, 300, 0, flaws=only)}
  assert kinds == {("stop_early", True), ("clean", False)}
  off = {knob: 0.0 for knob in atlas_demos.SEARCH_FLAWS}
  kinds = collections.Counter(d.kind for d in search_demonstrations(ATLAS, open_session, 500, 0, flaws=off))
  assert set(kinds) == {"clean", "miss_again"} and kinds["miss_again"] < 50  # names that miss by themselves


def test_wrong_knobs_are_one_clear_error():
  with pytest.raises(ValueError, match="unknown flaw 'stop'; the knobs are stop_early"):
    next(main_demonstrations(ATLAS, 1, 0, flaws={"stop": 1}))
  with pytest.raises(ValueError, match="'check' out of range"):
    next(main_demonstrations(ATLAS, 1, 0, flaws={"check": 1.5}))
  with pytest.raises(ValueError, match="at most 1 in sum"):
    next(search_demonstrations(ATLAS, open_session, 1, 0, flaws={"miss": 0.7, "wrong_link": 0.7}))


def test_statistics_count_kinds_hops_and_right_results():
  stats = demonstration_statistics(ATLAS, DEMOS["main"])
  assert stats["count"] == sum(stats["kinds"].values()) == sum(stats["hops"].values()) == N
  assert stats["right"] == sum(d.result in ATLAS.answer(d.task) for d in DEMOS["main"]) / N
  assert 0.35 < stats["right"] < 0.65  # as much to learn as there is to imitate
  assert 0.6 < demonstration_statistics(ATLAS, DEMOS["search"])["right"] < 0.9
  assert demonstration_statistics(ATLAS, [])["count"] == 0


def test_the_agents_name_in_the_call_is_the_one_given():
  demo = next(d for d in main_demonstrations(ATLAS, 5, 0, agent="reader"))
  assert parse_turn(demo.turns[0][0]).call.name == "reader"


FINGERPRINT = """
import hashlib
from mgrpo_jax.tasks.atlas import Atlas
from mgrpo_jax.tasks.atlas_demos import *
from mgrpo_jax.tools.web import Browser, LocalWeb
a = Atlas.load(); w = LocalWeb(a.pages)
demos = [*main_demonstrations(a, 200, 3), *search_demonstrations(a, lambda: Browser(w), 200, 3),
         *single_demonstrations(a, lambda: Browser(w), 200, 3)]
print(hashlib.sha256(repr(demos).encode()).hexdigest())
"""


def test_demonstrations_are_the_same_in_every_process_and_differ_by_seed():
  demos = [
    *main_demonstrations(ATLAS, 200, 3),
    *search_demonstrations(ATLAS, open_session, 200, 3),
    *single_demonstrations(ATLAS, open_session, 200, 3),
  ]
  here = hashlib.sha256(repr(demos).encode()).hexdigest()
  for seed in ("1", "2"):
    env = {**os.environ, "PYTHONHASHSEED": seed}
    there = subprocess.run(
      [sys.executable, "-c", FINGERPRINT], env=env, capture_output=True, text=True, check=True
    )
    assert there.stdout.strip() == here
  assert list(main_demonstrations(ATLAS, 200, 4)) != demos[:200]
  assert list(main_demonstrations(ATLAS, 50, 3)) == demos[:50]
