"""Scripted demonstrations of the agents of atlas, good and bad, for the supervised warm start.

They teach the protocol and the skills, and on purpose not all of the judgement: part of them stop too
early, ask the wrong thing, or give up, so that both agents start with choices that reinforcement
learning can make better (a planner shown only good choices has nothing left to learn), and so that the
number of calls differs between the attempts at one question. Only pages of the training split are opened.

Kinds, and the knobs that mix them. `stop_early` is the share of the questions of two and three hops;
every other knob is the share of the rest (of all, for one hop and for the search agent).

| agent | kind | right | knob (default) |
| --- | --- | --- | --- |
| main | clean: one subquestion a hop, then the result | yes | what is left |
| main | stop_early: the answer of an inner subquestion as the result | no | stop_early .6 |
| main | too_much_right: two hops in one subquestion, answered | yes | ask_too_much .1 x too_much_right .3 |
| main | too_much_split: the same, answered none, then asked in steps | yes | the rest, half of it |
| main | too_much_give_up: the same, answered none, result none | no | the rest, half of it |
| main | wrong_ask: the last subquestion asks another relation, and ends with it | no | wrong_ask .06 x .5 |
| main | wrong_ask_fixed: the same, then the right one | yes | the other half |
| main | check: the last subquestion asked twice | yes | check .1 |
| main | asked_again: a subquestion answered none, asked again | yes | sub_none .12 x (1 - give_up) |
| main | give_up: a subquestion answered none, result none | no | sub_none .12 x give_up .5 |
| main | misled: a subquestion answered wrongly, used in good faith | no | sub_wrong .06 |
| search | clean: search the name, visit its page, read | yes | what is left |
| search | miss_again: a search that does not find the page, then a right one | yes | miss .08 x (1 - give_up) |
| search | miss_give_up: the same, result none | no | miss x give_up .4 |
| search | wrong_link_back: another page opened, then the right one | yes | wrong_link .08 x (1 - give_up) |
| search | wrong_link_give_up: another page opened, result none | no | wrong_link x give_up, half |
| search | wrong_page: another page opened and read as if it were the one | no | wrong_link x give_up, half |
| search | wrong_fact: the right page, another line of it | no | wrong_fact .04 |
| search | two_hops: a subquestion of two hops, its link followed | yes | two_hops .05, half |
| search | two_hops_none: a subquestion of two hops, result none | no | two_hops, half |
| single | all of search but two_hops, in front of a whole question, links followed | | as search |
| single | stop_early: the answer of an inner hop as the result | no | stop_early .6 |
| single | search_again: the next page searched instead of followed | yes | search_again .15 |

A name that its own search does not find (one country in 25) makes a clean demonstration miss_again.
A reader thinks before a result that it read: it quotes the line.
The search and single agents need the web's tools, which this module does not import: pass
`open_session`, e.g. `lambda: Browser(web)`, whose `call(name, arguments)` gives the observation.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator

from mgrpo_jax.tasks.atlas import FIELDS, HOPS, Atlas, facts, parse_chain, render_chain

MAIN_FLAWS = {
  "stop_early": 0.6,
  "ask_too_much": 0.1,
  "too_much_right": 0.3,
  "wrong_ask": 0.06,
  "check": 0.1,
  "sub_none": 0.12,
  "give_up": 0.5,
  "sub_wrong": 0.06,
}
SEARCH_FLAWS = {"miss": 0.08, "wrong_link": 0.08, "give_up": 0.4, "wrong_fact": 0.04, "two_hops": 0.05}
SINGLE_FLAWS = {
  "stop_early": 0.6,
  "miss": 0.08,
  "wrong_link": 0.08,
  "give_up": 0.4,
  "wrong_fact": 0.04,
  "search_again": 0.15,
}

# Kinds whose result is the right answer.
RIGHT_KINDS = frozenset(
  {
    "clean",
    "too_much_right",
    "too_much_split",
    "wrong_ask_fixed",
    "check",
    "asked_again",
    "miss_again",
    "wrong_link_back",
    "two_hops",
    "search_again",
  }
)

_GIVES_UP = "none"


@dataclasses.dataclass
class Demonstration:
  """One scripted trajectory as text.

  Attributes:
    task: the question, or the subquestion.
    turns: (what the agent writes, the raw observation that answers it); the last has None.
    kind: see the table of this module.
  """

  task: str
  turns: list[tuple[str, str | None]]
  kind: str

  @property
  def result(self) -> str:
    """The text of the final result."""
    return self.turns[-1][0].partition("<result>")[2].removesuffix("</result>")


def main_demonstrations(
  atlas: Atlas, n: int, seed: int, *, flaws: dict[str, float] | None = None, agent: str = "search"
) -> Iterator[Demonstration]:
  """`n` demonstrations of the main agent, who calls the sub-agent `agent`; its answers are simulated."""
  flaws = knobs(MAIN_FLAWS, flaws)
  rng = random.Random(f"main-demonstrations-{seed}")
  world = _World(atlas)
  for _ in range(n):
    yield _main(world, rng, flaws, agent)


def search_demonstrations(
  atlas: Atlas,
  open_session: Callable[[], object],
  n: int,
  seed: int,
  *,
  flaws: dict[str, float] | None = None,
) -> Iterator[Demonstration]:
  """`n` demonstrations of the sub-agent that searches and visits, balanced over relations."""
  flaws = knobs(SEARCH_FLAWS, flaws)
  rng = random.Random(f"search-demonstrations-{seed}")
  world = _World(atlas)
  for _ in range(n):
    hops = 2 if rng.random() < flaws["two_hops"] else 1
    relations, entity = world.draw(rng, hops) if hops == 2 else world.draw_fact(rng)
    yield _reader(
      world, open_session, rng, flaws, relations, entity, render_chain(relations, entity), sub=True
    )


def single_demonstrations(
  atlas: Atlas,
  open_session: Callable[[], object],
  n: int,
  seed: int,
  *,
  flaws: dict[str, float] | None = None,
) -> Iterator[Demonstration]:
  """`n` demonstrations of one agent that answers whole questions with search and visit."""
  flaws = knobs(SINGLE_FLAWS, flaws)
  rng = random.Random(f"single-demonstrations-{seed}")
  world = _World(atlas)
  for _ in range(n):
    relations, entity = world.draw(rng, rng.choice(HOPS))
    question = f"What is {render_chain(relations, entity)}?"
    yield _reader(world, open_session, rng, flaws, relations, entity, question, sub=False)


def demonstration_statistics(atlas: Atlas, demonstrations: Iterable[Demonstration]) -> dict:
  """Counts by kind and by hops, share of right results, and the mean number of turns."""
  demonstrations = list(demonstrations)
  chains = [parse_chain(d.task) for d in demonstrations]
  count = max(1, len(demonstrations))
  return {
    "count": len(demonstrations),
    "kinds": dict(collections.Counter(d.kind for d in demonstrations).most_common()),
    "hops": dict(sorted(collections.Counter(len(c[0]) for c in chains).items())),
    "relations": dict(sorted(collections.Counter(c[0][0] for c in chains).items())),
    "right": sum(d.result in (atlas.answer(d.task) or ()) for d in demonstrations) / count,
    "turns": sum(len(d.turns) for d in demonstrations) / count,
  }


# ------------------------------------------------------------------------------------- the drawing


class _World:
  """The training part of the atlas, arranged for drawing."""

  def __init__(self, atlas: Atlas):
    self.atlas = atlas
    self.chains = atlas.chains("train")
    self.pages = set(atlas.titles("train"))
    self.with_fact = {r: [t for t in sorted(self.pages) if r in atlas.facts(t)] for r in FIELDS}
    self.values = {
      r: sorted({atlas.facts(t)[r].value for t in titles}) for r, titles in self.with_fact.items()
    }

  def draw(self, rng: random.Random, hops: int) -> tuple[tuple[str, ...], str]:
    """A training question as a chain: uniform over outermost relations, then chains, then entities."""
    by_chain = rng.choice(list(self.chains[hops].values()))
    return parse_chain(rng.choice(rng.choice(list(by_chain.values()))).question)

  def draw_fact(self, rng: random.Random) -> tuple[tuple[str, ...], str]:
    """A subquestion of one hop: uniform over relations, then over pages that have it."""
    relation = rng.choice(FIELDS)
    return (relation,), rng.choice(self.with_fact[relation])

  def read(self, relation: str, title: str) -> str | None:
    """What a training page says of a relation; None for other pages and for missing lines."""
    fact = self.atlas.facts(title).get(relation) if title in self.pages else None
    return fact.value if fact else None

  def other_relation(self, rng: random.Random, relation: str, title: str) -> str | None:
    """Another line of the page whose value is another one."""
    answer = self.read(relation, title)
    others = [r for r, fact in self.atlas.facts(title).items() if fact.value != answer]
    return rng.choice(sorted(others)) if others else None

  def wrong(self, rng: random.Random, relation: str, answer: str) -> str:
    """A plausible wrong answer: a page of the same kind, or another value of the same relation."""
    page = self.atlas.pages.get(answer)
    same = self.atlas.titles("train", page.kind) if page else self.values[relation]
    return rng.choice([value for value in same if value != answer])


def knobs(defaults: dict[str, float], given: dict[str, float] | None) -> dict[str, float]:
  """The shares to mix by: `given` over `defaults`; ValueError for an unknown one or shares that do not add up."""
  unknown = sorted(set(given or {}) - set(defaults))
  if unknown:
    raise ValueError(f"unknown flaw {unknown[0]!r}; the knobs are {', '.join(defaults)}")
  knobs = {**defaults, **(given or {})}
  bad = [k for k, p in knobs.items() if not 0 <= p <= 1]
  inner = ("stop_early", "give_up", "too_much_right")  # shares of something else, not of the mixture
  if bad or sum(p for k, p in knobs.items() if k not in inner) > 1 + 1e-9:
    raise ValueError(
      f"flaw {(bad or ['shares'])[0]!r} out of range: each in [0, 1], all but {inner} at most 1 in sum"
    )
  return knobs


def _draw_flaw(rng: random.Random, flaws: dict[str, float], names: tuple[str, ...]) -> str:
  """One of `names` with its share, else "clean"."""
  u = rng.random()
  for name in names:
    u -= flaws[name]
    if u < 0:
      return name
  return "clean"


def _call(name: str, **arguments) -> str:
  return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def _quote(relation: str, value: str) -> str:
  """The line a reader's result is taken from: to write its field first makes the rest of it mere copying."""
  return f"<thinking>\n{relation}: {value}</thinking>"


def _result(text: str) -> str:
  return f"<result>{text}</result>"


# ------------------------------------------------------------------------------------- main agent


class _Asker:
  """The main agent's turns so far, and the chain it works on."""

  def __init__(self, world: _World, agent: str, relations: tuple[str, ...], entity: str):
    self.world, self.agent, self.turns = world, agent, []
    self.steps, self.entity = tuple(reversed(relations)), entity  # innermost relation first
    self.task = f"What is {render_chain(relations, entity)}?"

  def ask(self, relations: tuple[str, ...], entity: str, reply: str | None = None) -> str:
    """Asks a subquestion (relations outermost first); the sub answers `reply`, or truly, or none."""
    subquestion = render_chain(relations, entity)
    if reply is None:
      answer = entity
      for relation in reversed(relations):
        answer = answer and self.world.read(relation, answer)
      reply = answer or _GIVES_UP
    self.turns.append((_call(self.agent, task=subquestion), reply))
    return reply

  def walk(self, start: int, stop: int, entity: str) -> str:
    """Asks steps start..stop-1 one by one, each of the answer before; none ends it."""
    for relation in self.steps[start:stop]:
      if entity == _GIVES_UP:
        break
      entity = self.ask((relation,), entity)
    return entity

  def finish(self, result: str, kind: str) -> Demonstration:
    self.turns.append((_result(result), None))
    return Demonstration(self.task, self.turns, kind)


def _main(world: _World, rng: random.Random, flaws: dict[str, float], agent: str) -> Demonstration:
  hops = rng.choice(HOPS)
  asker = _Asker(world, agent, *world.draw(rng, hops))
  if hops > 1 and rng.random() < flaws["stop_early"]:
    return asker.finish(asker.walk(0, rng.randrange(1, hops), asker.entity), "stop_early")
  plan = _draw_flaw(rng, flaws, ("ask_too_much", "wrong_ask", "check", "sub_none", "sub_wrong"))
  if plan == "ask_too_much" and hops > 1:
    return _ask_too_much(asker, rng, flaws)
  if plan == "wrong_ask":
    return _wrong_ask(asker, rng)
  if plan == "check":
    before = asker.walk(0, hops - 1, asker.entity)
    asker.ask(asker.steps[-1:], before)
    return asker.finish(asker.ask(asker.steps[-1:], before), "check")
  if plan == "sub_none":
    at = rng.randrange(hops)
    before = asker.walk(0, at, asker.entity)
    asker.ask((asker.steps[at],), before, _GIVES_UP)
    if rng.random() < flaws["give_up"]:
      return asker.finish(_GIVES_UP, "give_up")
    return asker.finish(asker.walk(at, hops, before), "asked_again")
  if plan == "sub_wrong":
    return _misled(asker, rng)
  return asker.finish(asker.walk(0, hops, asker.entity), "clean")


def _ask_too_much(asker: _Asker, rng: random.Random, flaws: dict[str, float]) -> Demonstration:
  hops = len(asker.steps)
  at = rng.randrange(hops - 1)
  before = asker.walk(0, at, asker.entity)
  both = tuple(reversed(asker.steps[at : at + 2]))
  if rng.random() < flaws["too_much_right"]:
    return asker.finish(asker.walk(at + 2, hops, asker.ask(both, before)), "too_much_right")
  asker.ask(both, before, _GIVES_UP)
  if rng.random() < 0.5:
    return asker.finish(_GIVES_UP, "too_much_give_up")
  return asker.finish(asker.walk(at, hops, before), "too_much_split")


def _wrong_ask(asker: _Asker, rng: random.Random) -> Demonstration:
  before = asker.walk(0, len(asker.steps) - 1, asker.entity)
  other = asker.world.other_relation(rng, asker.steps[-1], before)
  if other is None:  # a page of one line has nothing else to ask
    return asker.finish(asker.ask(asker.steps[-1:], before), "clean")
  answer = asker.ask((other,), before)
  if rng.random() < 0.5:
    return asker.finish(answer, "wrong_ask")
  return asker.finish(asker.ask(asker.steps[-1:], before), "wrong_ask_fixed")


def _misled(asker: _Asker, rng: random.Random) -> Demonstration:
  at = rng.randrange(len(asker.steps))
  before = asker.walk(0, at, asker.entity)
  relation = asker.steps[at]
  wrong = asker.world.wrong(rng, relation, asker.world.read(relation, before))
  asker.ask((relation,), before, wrong)
  return asker.finish(asker.walk(at + 1, len(asker.steps), wrong), "misled")


# --------------------------------------------------------------- agents that search and visit


class _Session:
  """A reader's turns so far, and what it was shown last."""

  def __init__(self, session):
    self.session, self.turns, self.shown, self.text = session, [], [], ""

  def search(self, query: str) -> list[str]:
    self._call("search", query=query)
    return self.shown

  def open(self, title: str) -> None:
    """Visits the page of `title` through the link that is shown for it."""
    self._call("visit", link=self.shown.index(title) + 1)

  def read(self, relation: str) -> str | None:
    fact = facts(self.text).get(relation)
    return fact.value if fact else None

  def _call(self, name: str, **arguments) -> None:
    self.text = self.session.call(name, arguments)
    hit = r"\[\d\] ([a-z0-9 ]+?)(?= \[|$)" if name == "search" else r"(?:: | \d+ )([a-z0-9 ]+?) \[\d\]"
    self.shown = re.findall(hit, self.text)
    self.turns.append((_call(name, **arguments), self.text))


@dataclasses.dataclass
class _Reading:
  """What one reader is to do: the world, its dice and flaws, and the steps, innermost relation first."""

  world: _World
  open_session: Callable[[], object]
  rng: random.Random
  flaws: dict[str, float]
  steps: tuple[str, ...]
  entity: str


def _reader(world, open_session, rng, flaws, relations, entity, task, *, sub: bool) -> Demonstration:
  """One demonstration of an agent with search and visit: the sub-agent, or the single agent."""
  r = _Reading(world, open_session, rng, flaws, tuple(reversed(relations)), entity)
  s = _Session(open_session())
  multi = len(r.steps) > 1
  early = multi and not sub and rng.random() < flaws["stop_early"]
  names = ("miss", "wrong_link", "wrong_fact") + (() if sub else ("search_again",))
  plan = "clean" if early or (sub and multi) else _draw_flaw(rng, flaws, names)
  kind, result = _reach(s, r, plan)
  read = r.steps[0] if kind == "wrong_page" else None
  if result is None and sub and multi:
    kind, result = ("two_hops_none", _GIVES_UP) if rng.random() < 0.5 else ("two_hops", None)
  if result is None:
    stop = rng.randrange(1, len(r.steps)) if early else len(r.steps)
    for at in range(1, stop):
      entity = s.read(r.steps[at - 1])
      if plan == "search_again":
        _find(s, entity, r.steps[at])
        kind = plan
      s.open(entity)
    other = world.other_relation(rng, r.steps[-1], entity) if plan == "wrong_fact" else None
    kind = "stop_early" if early else "wrong_fact" if other else kind
    read = other or r.steps[stop - 1]
    result = s.read(read)
  last = _quote(read, result) + _result(result) if read else _result(result)
  return Demonstration(task, [*s.turns, (last, None)], kind)


def _reach(s: _Session, r: _Reading, plan: str) -> tuple[str, str | None]:
  """Brings the session to the page of the entity, with the flaw of `plan` on the way if it can be had.

  Returns (kind, None) with the page open, or (kind, the result that ends it before).
  """
  kind = "clean"
  query = _missing_query(r) if plan == "miss" else None
  if query is not None:
    s.search(query)
    kind = "miss_again"
    if r.rng.random() < r.flaws["give_up"]:
      return "miss_give_up", _GIVES_UP
  if not _find(s, r.entity, r.steps[0]):
    kind = "miss_again"
  others = [t for t in s.shown if t != r.entity and t in r.world.pages] if plan == "wrong_link" else []
  if others:
    kind = "wrong_link_back"
    s.open(r.rng.choice(others))
    if r.rng.random() < r.flaws["give_up"]:
      wrong = s.read(r.steps[0])
      if wrong is None or r.rng.random() < 0.5:
        return "wrong_link_give_up", _GIVES_UP
      return "wrong_page", wrong
    if r.entity not in s.shown:
      _find(s, r.entity, r.steps[0])
  s.open(r.entity)
  return kind, None


def _find(s: _Session, title: str, relation: str) -> bool:
  """Searches a name, then name and field, until its page is shown; False if the name alone did not do."""
  if title in s.search(title):
    return True
  if title not in s.search(f"{title} {relation}"):
    raise ValueError(f"no search finds the page {title!r}; the web of the session is not the atlas's")
  return False


def _missing_query(r: _Reading) -> str | None:
  """A query a careless agent might write that does not find the page: a slip, a part, the wrong words."""
  words = r.entity.split()
  tries = [r.entity[:-1], r.entity[1:], r.steps[0], *(w for w in words if len(words) > 1)]
  tries.append(r.rng.choice(sorted(r.world.pages)))
  for query in r.rng.sample(tries, len(tries)):
    if query and r.entity not in _Session(r.open_session()).search(query):
      return query
  return None
