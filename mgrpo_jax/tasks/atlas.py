"""Atlas: the embedded world. A small web about real places, and questions that must be read from it.

A question nests relations around one entity, "What is the capital of the country of oran?"; its level
is the number of relations (1 to 3). The answer is found by walking the same page text that a visit
serves, so a question, its answer and its evidence cannot disagree with the web. Countries are split by
clusters that their longest borders connect: every page that a test question needs belongs to a test
country, which no training question and no demonstration ever opens. Synthetic, and never called GAIA,
though `write_gaia` writes its columns.

    python -m mgrpo_jax.tasks.atlas          # counts, a sample page, sample questions with evidence
"""

from __future__ import annotations

import collections
import functools
import json
import os
import random
import re
from typing import NamedTuple

from mgrpo_jax.tasks.atlas_pages import VALUE_ALIASES, Page, build_pages, normalize
from mgrpo_jax.trajectory import Query

__all__ = [
  "Atlas",
  "Evidence",
  "FIELDS",
  "PHRASES",
  "Page",
  "SPLITS",
  "TEMPLATE_TOKENS",
  "facts",
  "parse_chain",
  "render_chain",
  "write_gaia",
]

# Relation -> how a question words it. A relation is also the field of the page it is read from.
PHRASES = {
  "capital": "the capital of ",
  "borders": "the longest-border neighbour of ",
  "currency": "the currency of ",
  "language": "the language of ",
  "region": "the region of ",
  "highest point": "the highest point of ",
  "domain": "the domain of ",
  "country": "the country of ",
  "height": "the height of ",
}
FIELDS = tuple(PHRASES)
_LINKED = ("capital", "borders", "highest point", "country")  # their value is followed by a link to its page

# Fixed strings of pages, questions and subquestions; a tokenizer makes each a whole token.
TEMPLATE_TOKENS: list[str] = [
  *(f"\n{field}: " for field in FIELDS),
  *(f" [{n}]" for n in range(1, 10)),
  *PHRASES.values(),
  "What is ",
  "?",
  "none",
]

SPLITS = {"train": 0.58, "validation": 0.14, "test": 0.28}  # shares of the countries
HOPS = (1, 2, 3)

# Chains, innermost relation first: what leads on to another page, and what may be asked of the last one.
_COUNTRY_FACTS = ("capital", "borders", "currency", "language", "region", "highest point", "domain")
_PLACE_FACTS = {"country": _COUNTRY_FACTS, "city": ("country",), "peak": ("country", "height")}
_STEPS = ("borders", "highest point", "country")


class Fact(NamedTuple):
  """One line of a page: its value, and the number of the link after it (None if it has none)."""

  value: str
  link: int | None


class Evidence(NamedTuple):
  """One step of an answer: on the page `title`, `relation` is `answer`."""

  title: str
  relation: str
  answer: str


def facts(text: str) -> dict[str, Fact]:
  """The facts of a page's text by field; of `borders` the first, the longest."""
  found = {}
  for line in text.split("\n")[1:]:
    field, _, rest = line.partition(":")
    match = re.match(r" ([a-z0-9 ]+?)(?: \[(\d)\]|$)", rest)
    if field in PHRASES and match:
      found[field] = Fact(match[1], int(match[2]) if match[2] else None)
  return found


def parse_chain(text: str) -> tuple[tuple[str, ...], str] | None:
  """A question or subquestion -> (relations, outermost first; entity), or None if it is neither.

  "What is the capital of the country of oran?" -> (("capital", "country"), "oran"). The words "What is"
  and the question mark may be missing; case and spaces do not matter.
  """
  text = re.sub(r"^what is |\?$", "", " ".join(text.lower().split())).strip() + " "
  relations = []
  while True:
    relation = next((r for r, phrase in PHRASES.items() if text.startswith(phrase)), None)
    if relation is None:
      break
    relations.append(relation)
    text = text[len(PHRASES[relation]) :]
  entity = text.strip()
  if not relations or not entity or entity != normalize(entity):
    return None
  return tuple(relations), entity


def render_chain(relations: tuple[str, ...], entity: str) -> str:
  """(("capital", "country"), "oran") -> "the capital of the country of oran": a subquestion's text."""
  return "".join(PHRASES[r] for r in relations) + entity


class Atlas:
  """The web, its split and its questions. `Atlas.load()` builds it once per process.

  Attributes:
    pages: title -> Page.
    split_of: title -> "train", "validation" or "test".
    regions: country title -> region.
  """

  def __init__(self):
    self.pages, self.regions = build_pages()
    self.split_of = _split(self.pages, self.regions)
    self._facts = {title: facts(page.text) for title, page in self.pages.items()}
    names = collections.defaultdict(set)
    for title, page in self.pages.items():
      for name in (title, *page.aliases):
        names[name].add(title)
    self._titles = {name: min(titles) for name, titles in names.items() if len(titles) == 1}

  @staticmethod
  @functools.cache
  def load() -> Atlas:
    return Atlas()

  def facts(self, title: str) -> dict[str, Fact]:
    """Facts of the page `title`, read from its text."""
    return self._facts[title]

  def titles(self, split: str, kind: str | None = None) -> list[str]:
    """Titles of a split's pages, sorted; of one kind if given."""
    _check_split(split)
    return [t for t in sorted(self.pages) if self.split_of[t] == split and kind in (None, self.pages[t].kind)]

  def answer(self, text: str) -> tuple[str, ...] | None:
    """The answer of a question or subquestion, then its aliases; None if garbled or without an answer."""
    path = self.evidence(text)
    if path is None:
      return None
    answer = path[-1].answer
    page = self.pages.get(answer)
    linked = page is not None and path[-1].relation in _LINKED
    return (answer, *(page.aliases if linked else VALUE_ALIASES.get(answer, ())))

  def evidence(self, text: str) -> list[Evidence] | None:
    """The pages to read for a question, in order, each with what it says; None as in `answer`."""
    chain = parse_chain(text)
    if chain is None:
      return None
    relations, entity = chain
    title, path = self._titles.get(entity), []
    for relation in reversed(relations):
      fact = self._facts[title].get(relation) if title in self._facts else None
      if fact is None:
        return None
      path.append(Evidence(title, relation, fact.value))
      title = self.pages[title].links[fact.link - 1] if fact.link else None
    return path

  def chains(self, split: str) -> dict[int, dict[str, dict[tuple[str, ...], list[Query]]]]:
    """All questions of a split: hops -> outermost relation -> relations -> questions, sorted by id.

    Left out: a question whose answer stands in its text, that comes back to a page it has been to, or
    whose answer one would also get by leaving out a hop (so that reading every page is needed).
    """
    _check_split(split)
    return self._chains(split)

  @functools.cache  # noqa: B019 (one Atlas per process)
  def _chains(self, split):
    found = {hops: collections.defaultdict(lambda: collections.defaultdict(list)) for hops in HOPS}
    for title in self.titles(split):
      for relations in _relation_chains(self.pages[title].kind):
        query = self._query(split, relations, title)
        if query is not None:
          found[len(relations)][relations[0]][relations].append(query)
    return {
      hops: {r: {c: by_chain[c] for c in sorted(by_chain)} for r, by_chain in sorted(by_relation.items())}
      for hops, by_relation in found.items()
    }

  def _query(self, split: str, relations: tuple[str, ...], entity: str) -> Query | None:
    question = f"What is {render_chain(relations, entity)}?"
    path, answers = self.evidence(question), self.answer(question)
    if path is None or any(f" {a} " in f" {question[:-1].lower()} " for a in answers):
      return None
    visited = [step.title for step in path]
    if len({*visited, answers[0]}) != len(visited) + 1 or any(self.split_of[t] != split for t in visited):
      return None
    earlier = [self._facts[title].get(relations[0]) for title in visited[:-1]]
    if any(fact and fact.value in answers for fact in earlier):
      return None
    name = "-".join(("atlas", str(len(relations)), *relations, entity)).replace(" ", "-")
    evidence = [list(step) for step in path]
    metadata = {"evidence": evidence, "split": split}
    return Query(name, question, answers[0], str(len(relations)), tuple(answers[1:]), metadata)

  def questions(self, split: str, count: int | None = None, seed: int = 0) -> list[Query]:
    """`count` questions of a split: a third of each hop in turn, within a hop balanced over relations.

    Without a count, as many as there are with equal hops. The order is drawn from `seed`, the same in
    every process, and a shorter list is the beginning of a longer one. Raises ValueError for a split
    that does not exist or a count that it cannot offer.
    """
    rng = random.Random(f"atlas-{split}-{seed}")
    by_hop = {hops: _balanced(tree, rng) for hops, tree in self.chains(split).items()}
    most = len(HOPS) * min(map(len, by_hop.values()))
    count = most if count is None else count
    if not 0 <= count <= most:
      raise ValueError(f"atlas has at most {most} balanced {split} questions; asked for {count}")
    return [by_hop[HOPS[i % len(HOPS)]][i // len(HOPS)] for i in range(count)]

  def names(self, split: str = "train") -> list[str]:
    """Every name and value on a split's pages, as often as it stands there: what to train a BPE on."""
    texts = []
    for title in self.titles(split):
      lines = self.pages[title].text.split("\n")
      texts.append(lines[0])
      for line in lines[1:]:
        texts += [part.strip() for part in re.split(r" \[\d\]", line.partition(":")[2]) if part.strip()]
    return texts


def write_gaia(path: str | os.PathLike, queries: list[Query]) -> None:
  """Writes questions as GAIA's metadata JSONL (one row each), so that `gaia.read` reads them like GAIA's.

  "Annotator Metadata" has GAIA's keys and two more, "Aliases" and "Evidence".
  """
  with open(path, "w", encoding="utf-8") as file:
    for query in queries:
      evidence = query.metadata.get("evidence", [])
      steps = [f"{i}. On the page {t}, {r} is {a}." for i, (t, r, a) in enumerate(evidence, 1)]
      annotator = {
        "Steps": "\n".join(steps),
        "Number of steps": str(len(steps)),
        "How long did this take?": "",
        "Tools": "1. Search engine\n2. Web browser",
        "Number of tools": "2",
        "Aliases": list(query.aliases),
        "Evidence": evidence,
      }
      row = {
        "task_id": query.id,
        "Question": query.question,
        "Level": query.level,
        "Final answer": query.answer,
        "file_name": "",
        "Annotator Metadata": annotator,
      }
      file.write(json.dumps(row) + "\n")


def _relation_chains(kind: str) -> list[tuple[str, ...]]:
  """All chains of relations (outermost first) that may start from a page of this kind."""
  leads_to = {"borders": "country", "country": "country", "highest point": "peak"}
  chains, starts = [], [((), kind)]
  for _ in HOPS:
    chains += [(fact, *inner) for inner, at in starts for fact in _PLACE_FACTS[at]]
    starts = [
      ((step, *inner), leads_to[step]) for inner, at in starts for step in _STEPS if step in _PLACE_FACTS[at]
    ]
  return chains


def _balanced(tree: dict[str, dict[tuple[str, ...], list[Query]]], rng: random.Random) -> list[Query]:
  """Round robin over outermost relations, and within each over its chains, each chain shuffled."""
  lanes = []
  for by_chain in tree.values():
    shuffled = [rng.sample(queries, len(queries)) for queries in by_chain.values()]
    lanes.append(_round_robin(rng.sample(shuffled, len(shuffled))))
  return _round_robin(rng.sample(lanes, len(lanes)))


def _round_robin(lanes: list[list]) -> list:
  return [lane[i] for i in range(max(map(len, lanes), default=0)) for lane in lanes if i < len(lane)]


def _split(pages: dict[str, Page], regions: dict[str, str], seed: int = 0) -> dict[str, str]:
  """title -> split, by whole clusters of countries, each region in about the shares of SPLITS."""
  clusters: dict[str, set[str]] = {title: {title} for title in regions}
  for title in sorted(regions):
    fact = facts(pages[title].text).get("borders")
    if fact:
      union = clusters[title] | clusters[fact.value]
      clusters.update((member, union) for member in union)
  order = sorted({min(c): sorted(c) for c in clusters.values()}.values())
  random.Random(f"atlas-split-{seed}").shuffle(order)
  order.sort(key=len, reverse=True)  # big clusters first: small ones can still even out the shares
  totals = collections.Counter(regions.values())
  missing = {(s, r): share * n for s, share in SPLITS.items() for r, n in totals.items()}
  split_of = {}
  for cluster in order:
    split = max(SPLITS, key=lambda s: sum(missing[s, regions[c]] for c in cluster) / SPLITS[s] ** 0.5)
    for country in cluster:
      missing[split, regions[country]] -= 1
      split_of[country] = split
  return {title: split_of[page.country] for title, page in pages.items()}


def _check_split(split: str) -> None:
  if split not in SPLITS:
    raise ValueError(f"atlas has no split {split!r}; use one of {', '.join(SPLITS)}")


def main() -> None:
  """Prints how many pages and questions there are, a page, and a question of each level with its evidence."""
  atlas = Atlas.load()
  for split in SPLITS:
    kinds = collections.Counter(atlas.pages[t].kind for t in atlas.titles(split))
    print(f"{split}: pages {dict(kinds)}, {len(atlas.questions(split))} balanced questions")
    for hops, tree in atlas.chains(split).items():
      counts = {relation: sum(map(len, by_chain.values())) for relation, by_chain in tree.items()}
      print(f"  {hops} hops: {sum(counts.values())} {counts}")
  print("\n" + atlas.pages["algeria"].text)
  for query in atlas.questions("test", 3):
    print(f"\n{query.question} {query.answer} {list(query.aliases)}")
    for step in query.metadata["evidence"]:
      print("   on page {}, {} is {}".format(*step))


if __name__ == "__main__":
  main()
