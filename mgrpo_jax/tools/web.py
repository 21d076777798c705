"""Search and visit over a set of local pages: the tools of the sub-agent that reads the web.

The search is a ranked index (BM25, tantivy). A query is taken apart into plain words here and never
given to a query parser, so no text of a model can be a syntax error. Everything that goes wrong in a
call is a short sentence for the model, never an exception: observations are tokens of its context.
"""

from __future__ import annotations

import random
import re
import unicodedata
from collections.abc import Mapping
from typing import Any, Protocol

import tantivy

# Fixed strings of observations; a tokenizer makes each a whole token. Links are " [1] ", " [2] ", ...
WEB_TEMPLATE_TOKENS: list[str] = [
  "found:",
  *(f" [{n}] " for n in range(1, 10)),
  "nothing found",
  "no such link",
  "unknown tool",
  "missing query",
  "missing link",
]

# A page that mentions a name may rank above the page of that name, as on the real web: hits must be read, and
# the bare name of one country in 25 does not find it (a fuller query does).
_WEIGHTS = {"title": 0.4, "aliases": 0.5, "text": 1.0}
_MAX_QUERY_WORDS = 16
_CANDIDATES = 64  # more than are shown, so that ties at the cut are broken by title, not by the index


class WebPage(Protocol):
  """What a page must have: its text, the titles its links [1], [2], ... lead to, its other names."""

  text: str
  links: tuple[str, ...]
  aliases: tuple[str, ...]


class LocalWeb:
  """Pages by title, with a search index. Read only after it is made, so many sessions may share one."""

  def __init__(self, pages: Mapping[str, WebPage]):
    """Raises ValueError if a link leads to a page that is not there."""
    self.pages = dict(sorted(pages.items()))
    self.titles = list(self.pages)
    for title, page in self.pages.items():
      lost = [link for link in page.links if link not in self.pages]
      if lost:
        raise ValueError(
          f"page {title!r} links to {lost[0]!r}, which is not among the pages; add it or drop the link"
        )
    self._schema, self._searcher = self._index()

  def page(self, title: str) -> WebPage:
    """The page of this title; KeyError if there is none."""
    return self.pages[title]

  def search(self, query: str, limit: int = 3) -> list[str]:
    """Titles of the at most `limit` best pages for the words of `query`, best first, ties by title."""
    words = list(dict.fromkeys(_words(query)))[:_MAX_QUERY_WORDS]
    if not words or limit < 1:
      return []
    terms = [
      (
        tantivy.Occur.Should,
        tantivy.Query.boost_query(tantivy.Query.term_query(self._schema, field, word), weight),
      )
      for word in words
      for field, weight in _WEIGHTS.items()
    ]
    hits = self._searcher.search(tantivy.Query.boolean_query(terms), max(limit, _CANDIDATES)).hits
    ranked = sorted((-round(score, 4), self._searcher.doc(address)["key"][0]) for score, address in hits)
    return [self.titles[key] for _, key in ranked[:limit]]

  def _index(self):
    builder = tantivy.SchemaBuilder()
    builder.add_integer_field("key", stored=True)  # position in the sorted titles: its order is theirs
    for field in _WEIGHTS:
      builder.add_text_field(field, tokenizer_name="whitespace")
    schema = builder.build()
    index = tantivy.Index(schema)
    writer = index.writer(num_threads=1)  # one thread, one commit: one segment, so scores repeat
    for key, (title, page) in enumerate(self.pages.items()):
      texts = {"title": title, "aliases": " ".join(page.aliases), "text": page.text}
      writer.add_document(tantivy.Document(key=key, **{f: " ".join(_words(t)) for f, t in texts.items()}))
    writer.commit()
    writer.wait_merging_threads()
    index.reload()
    return schema, index.searcher()


class Browser:
  """The tool session of ONE trajectory: what it was shown last decides where a link leads.

  Tools: search {"query": text}, visit {"link": number}. With `random_search_seed` a search shows random
  pages instead, whatever the query (a control: an agent that reads its answers falls to nothing).
  """

  def __init__(self, web: LocalWeb, random_search_seed: int | None = None, limit: int = 3):
    self.web = web
    self.random_search_seed = random_search_seed
    self.limit = limit
    self.shown: tuple[str, ...] = ()
    self.searches = 0

  @property
  def state(self) -> dict[str, Any]:
    """All that the next call depends on, as plain data; assign it back to continue elsewhere."""
    return {"shown": list(self.shown), "searches": self.searches}

  @state.setter
  def state(self, state: dict[str, Any]) -> None:
    self.shown, self.searches = tuple(state["shown"]), state["searches"]

  def call(self, name: str, arguments: Any) -> str:
    """The observation of one tool call; wrong calls give one short sentence. Never raises."""
    arguments = arguments if isinstance(arguments, dict) else {}
    if name == "search":
      return self._search(arguments.get("query"))
    if name == "visit":
      return self._visit(arguments.get("link"))
    return "unknown tool"

  def _search(self, query: Any) -> str:
    if not isinstance(query, str):
      return "missing query"
    self.searches += 1
    if self.random_search_seed is None:
      titles = self.web.search(query, self.limit)
    else:
      rng = random.Random(f"random-search-{self.random_search_seed}-{self.searches}")
      titles = rng.sample(self.web.titles, min(self.limit, len(self.web.titles)))
    self.shown = tuple(titles)
    if not titles:
      return "nothing found"
    return "found:" + "".join(f" [{n}] {title}" for n, title in enumerate(titles, 1))

  def _visit(self, link: Any) -> str:
    if link is None:
      return "missing link"
    digits = re.fullmatch(r"\[?([0-9]{1,3})\]?", link.strip()) if isinstance(link, str) else None
    number = int(digits[1]) if digits else link
    if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= len(self.shown):
      return "no such link"
    page = self.web.page(self.shown[number - 1])
    self.shown = tuple(page.links)
    return page.text


def _words(text: str) -> list[str]:
  text = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
  return re.findall(r"[a-z0-9]+", re.sub(r"['`.]", "", text))
