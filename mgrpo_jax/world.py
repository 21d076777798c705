"""What a run is about, as its config says: questions, scorer, tokenizer, tools and expert scores."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pathlib
import random
from collections.abc import Callable

from mgrpo_jax.config import MAIN
from mgrpo_jax.credit import Expert
from mgrpo_jax.errors import UserError, user_input
from mgrpo_jax.policy import tokenizer as tokenizer_lib
from mgrpo_jax.rollout import protocol
from mgrpo_jax.tasks import atlas, gaia
from mgrpo_jax.tools import web
from mgrpo_jax.trajectory import Query


@dataclasses.dataclass(frozen=True)
class World:
  """Questions and surroundings of a run.

  Attributes:
    train, validation, test: questions; no entity of one split is asked about in another (atlas).
    correct: (prediction, query) -> bool, the official scorer.
    tokenizer: of all agents.
    tools: makes a tool session from a trajectory's seed.
    random_tools: the same with a search that shows random pages (a control).
    experts: score of a sub-agent's own work, by agent.
    oracle: (subquestion) -> its answer or None: a perfect sub-agent, for headroom.
    subquestions: the gold subquestions of given questions, as queries for a sub-agent alone.
  """

  train: list[Query]
  validation: list[Query]
  test: list[Query]
  correct: Callable
  tokenizer: tokenizer_lib.Tokenizer
  tools: Callable
  random_tools: Callable
  experts: dict[str, Expert]
  oracle: Callable[[str], str | None]
  subquestions: Callable[[list[Query]], list[Query]]


def load(config, folder: pathlib.Path) -> World:
  """Build the world of a config; atlas questions are written to `folder`/questions in GAIA's format and read back.

  Raises:
    UserError: missing or broken files, too few questions, an expert that cannot be imported.
  """
  pages = atlas.Atlas.load()
  with user_input("config.task"):
    train, validation, test = _gaia_questions(config.task) if config.task.path else _atlas_questions(config.task, folder)
  if len(train) < config.method.queries:
    raise UserError(f"there are {len(train)} training questions, fewer than config.method.queries={config.method.queries}")
  local = web.LocalWeb(pages.pages)
  tools = functools.partial(_session, local, config.rollout.random_search)
  return World(train, validation, test, gaia.score_query, build_tokenizer(config, pages), tools,
               functools.partial(_session, local, True), _experts(config), _oracle_answer, _gold_subquestions)


def build_tokenizer(config, pages: atlas.Atlas) -> tokenizer_lib.Tokenizer:
  """Tags, call skeletons and page fields as whole tokens; byte-pair pieces from the training pages' names."""
  calls = [protocol.call_prefix("search", "query")]
  calls += [protocol.render_call("visit", {"link": n}) for n in range(1, 10)]
  calls += [protocol.call_prefix(name, "task") for name in config.agents if name != MAIN]
  templates = [*protocol.TEMPLATE_TOKENS, *protocol.CALL_SUFFIXES, *calls, *atlas.TEMPLATE_TOKENS, *web.WEB_TEMPLATE_TOKENS]
  return tokenizer_lib.build_tokenizer(templates, pages.names("train"), merges=config.tokenizer.merges)


def atlas_oracle(task: str, result: str | None) -> float | None:
  """1 if the result is the subquestion's answer, 0 if not, None if the subquestion has no answer."""
  answers = atlas.Atlas.load().answer(task)
  if answers is None:
    return None
  return float(result is not None and any(gaia.score(result, a) for a in answers))


def _oracle_answer(task: str) -> str | None:
  answers = atlas.Atlas.load().answer(task)
  return answers[0] if answers else None


def _gold_subquestions(queries: list[Query]) -> list[Query]:
  """Each step of each question's evidence as a question of its own; nothing for questions without evidence."""
  pages, out = atlas.Atlas.load(), {}
  for q in queries:
    for title, relation, _ in q.metadata.get("evidence", ()):
      task = atlas.render_chain((relation,), title)
      answers = pages.answer(task)
      if answers:
        out[task] = Query(task, task, answers[0], "1", tuple(answers[1:]))
  return list(out.values())


def _session(local: web.LocalWeb, random_search: bool, seed: int) -> web.Browser:
  return web.Browser(local, random_search_seed=seed if random_search else None)


def _atlas_questions(task, folder: pathlib.Path) -> tuple[list[Query], ...]:
  pages, out = atlas.Atlas.load(), []
  (folder / "questions").mkdir(parents=True, exist_ok=True)
  counts = {"train": task.train_questions, "validation": task.validation_questions, "test": task.test_questions}
  for split, count in counts.items():
    path = folder / "questions" / f"{split}.jsonl"
    atlas.write_gaia(path, pages.questions(split, count, seed=task.seed))
    out.append(gaia.read(path))
  return tuple(out)


def _gaia_questions(task) -> tuple[list[Query], ...]:
  """The file's questions in a seeded order: validation and test are taken off first, the rest is for training."""
  queries = gaia.read(task.path)
  random.Random(task.seed).shuffle(queries)
  test = gaia.read(task.test_path) if task.test_path else []
  n_test = 0 if task.test_path else min(task.test_questions, len(queries) // 3)
  n_validation = min(task.validation_questions, (len(queries) - n_test) // 3)
  return queries[n_test + n_validation:], queries[n_test: n_test + n_validation], test or queries[:n_test]


def _experts(config) -> dict[str, Expert]:
  experts = {}
  for name, agent in config.agents.items():
    if agent.expert == "atlas_oracle":
      experts[name] = atlas_oracle
    elif agent.expert:
      module, _, function = agent.expert.partition(":")
      try:
        experts[name] = getattr(importlib.import_module(module), function)
      except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"config.agents.{name}.expert={agent.expert!r} is neither 'atlas_oracle' nor an importable "
                        f"'module:function' ({error})") from error
  return experts
