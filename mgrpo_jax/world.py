"""What a run is about, as its config says: questions, scorer, tokenizer, tools and expert scores."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import pathlib
import random
import sys
import tempfile
from collections.abc import Callable

from mgrpo_jax import origin
from mgrpo_jax.config import MAIN
from mgrpo_jax.credit import Expert
from mgrpo_jax.errors import UserError, user_input
from mgrpo_jax.policy import tokenizer as tokenizer_lib
from mgrpo_jax.rollout import conversation, protocol
from mgrpo_jax.run_folder import write_bytes
from mgrpo_jax.tasks import atlas, gaia, webwalker, xbench
from mgrpo_jax.tools import web
from mgrpo_jax.trajectory import Query

# config.task.name -> (reader of its files, scorer); atlas writes and reads GAIA's format
SOURCES = {"atlas": (gaia.read, gaia.score_query), "gaia": (gaia.read, gaia.score_query), "xbench": (xbench.read, xbench.score_query),
           "webwalker": (webwalker.read, webwalker.score_query)}


@dataclasses.dataclass(frozen=True)
class World:
  """Questions and surroundings of a run.

  Attributes:
    train, validation, test: questions; no entity of one split is asked about in another (atlas).
    correct: (prediction, query) -> bool, the official scorer.
    tokenizers: by agent; agents whose models are made from nothing share one.
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
  tokenizers: dict
  tools: Callable
  random_tools: Callable
  experts: dict[str, Expert]
  oracle: Callable[[str], str | None]
  subquestions: Callable[[list[Query]], list[Query]]


def load(config, folder: pathlib.Path | None) -> World:
  """Build the world of a config; atlas questions are written to `folder`/questions in GAIA's format (None: nowhere).

  Raises:
    UserError: missing or broken files, too few questions, a context that they do not fit, a bad expert.
  """
  pages = atlas.Atlas.load()
  experts = _experts(config)
  with user_input("config.task"):
    train, validation, test = _file_questions(config) if config.task.path else _atlas_questions(config.task, folder)
  if len(train) < config.method.queries:
    raise UserError(f"there are {len(train)} training questions, fewer than config.method.queries={config.method.queries}")
  local = web.LocalWeb(pages.pages)
  tools = functools.partial(_session, local, config.rollout.random_search)
  own = build_tokenizer(config, pages)
  tokenizers = {n: origin.tokenizer(origin.find(a.init, n)) or own for n, a in config.agents.items()}
  _check_prompts(config, tokenizers, train, validation, test)
  return World(train, validation, test, SOURCES[config.task.name][1], tokenizers, tools, functools.partial(_session, local, True), experts,
               _oracle_answer, _gold_subquestions)


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
  """Each step of each question's evidence as a question of its own; nothing for questions without atlas's evidence."""
  pages, out = atlas.Atlas.load(), {}
  for q in queries:
    for step in q.metadata.get("evidence") or ():
      if not (isinstance(step, list | tuple) and len(step) == 3 and step[1] in atlas.PHRASES):
        continue  # a file may have another "Evidence" column
      task = atlas.render_chain((step[1],), str(step[0]))
      answers = pages.answer(task)
      if answers:
        out[task] = Query(task, task, answers[0], "1", tuple(answers[1:]))
  return list(out.values())


def _session(local: web.LocalWeb, random_search: bool, seed: int) -> web.Browser:
  return web.Browser(local, random_search_seed=seed if random_search else None)


def _atlas_questions(task, folder: pathlib.Path | None) -> tuple[list[Query], ...]:
  pages, out = atlas.Atlas.load(), []
  counts = {"train": task.train_questions, "validation": task.validation_questions, "test": task.test_questions}
  with tempfile.TemporaryDirectory() as scratch:
    for split, count in counts.items():
      path = pathlib.Path(scratch) / f"{split}.jsonl"
      atlas.write_gaia(path, pages.questions(split, count, seed=task.seed))
      out.append(gaia.read(path))
      if folder is not None:
        (folder / "questions").mkdir(parents=True, exist_ok=True)
        write_bytes(folder / "questions" / path.name, path.read_bytes())
  return tuple(out)


def _file_questions(config) -> tuple[list[Query], ...]:
  """The file's questions in a seeded order: validation and test are taken off first, the rest is for training."""
  task = config.task
  queries = _read_scorable(task.name, task.path)
  test = _read_scorable(task.name, task.test_path) if task.test_path else []
  ids, texts = {q.id for q in queries}, {q.question for q in queries}
  both = [q.id for q in test if q.id in ids or q.question in texts]
  if both:
    raise UserError(f"config.task.test_path={task.test_path!r} holds {len(both)} questions of config.task.path, such as "
                    f"{min(both)!r}: what is trained on cannot test; remove them from one of the files")
  left_out = queries.attachments_left_out + (test.attachments_left_out if task.test_path else 0)
  random.Random(task.seed).shuffle(queries)
  n_test = 0 if task.test_path else min(task.test_questions, len(queries) // 3)
  n_validation = min(task.validation_questions, (len(queries) - n_test) // 3)
  test, rest = test or queries[:n_test], queries[n_test:]
  validation, train = rest[:n_validation], rest[n_validation:][: task.train_questions]
  if not (test and validation):
    raise UserError(f"{task.path} holds {len(queries)} text questions, too few to split into training, validation and test")
  print(f"questions of {task.path}: {len(train)} train, {len(validation)} validation, {len(test)} test"
        + (f"; {left_out} with an attached file are left out" if left_out else ""), file=sys.stderr)
  blind = [n for n, a in config.agents.items() if a.expert == "atlas_oracle"]
  if blind and not any(atlas.parse_chain(q.question) for q in train):
    print(f"warning: config.agents.{blind[0]}.expert='atlas_oracle' can judge no subquestion of these questions, so {blind[0]} gets "
          "no reward; give your own module:function, or an empty text to go by the main agent's answer alone", file=sys.stderr)
  return train, validation, test


def _read_scorable(name: str, path: str) -> gaia.Questions:
  """The questions of a file, all with an answer to score by."""
  queries = SOURCES[name][0](pathlib.Path(path).expanduser())
  if queries.hidden:
    raise UserError(f"{path}: {queries.hidden} of {len(queries)} questions have a hidden answer ('?'), which can neither be trained on "
                    "nor scored here; give GAIA's validation split")
  for q in queries:
    try:
      "".join((q.id, q.question, q.answer, *q.aliases)).encode()
    except UnicodeEncodeError as error:
      raise UserError(f"{path}: the row of task_id {q.id!r} holds half a character ({error.reason}); repair it") from error
  return queries


def _check_prompts(config, tokenizers, train: list[Query], validation: list[Query], test: list[Query]) -> None:
  """Every question must leave room for an answer; a file's longest ones may fail, which is said."""
  subquestions = _gold_subquestions(train[:64]) or [Query("", "", "")]
  for name, agent in config.agents.items():
    queries = [*train, *validation, *test] if name == MAIN else subquestions
    room = agent.limits.context - agent.limits.answer_reserve
    lengths = [len(conversation.first_prompt(tokenizers[name], q.question, system=agent.prompt)) for q in queries]
    over = sum(n > room for n in lengths)
    longest, which = max(zip(lengths, (q.id for q in queries)))
    if not over:
      continue
    kind = "question" if name == MAIN else "subquestion"
    text = (f"the {kind} {which!r} takes {longest} tokens of config.agents.{name}.limits.context="
            f"{agent.limits.context}, of which answer_reserve={agent.limits.answer_reserve} must stay free")
    if name != MAIN or not config.task.path or all(n > room for n in lengths[: len(train)]):
      raise UserError(f"{text}; raise the context (and config.train.length)")
    print(f"warning: {over} of {len(queries)} questions are too long, end as context_full and count as wrong: {text}", file=sys.stderr)


def _experts(config) -> dict[str, Expert]:
  experts = {}
  for name, agent in config.agents.items():
    key = f"config.agents.{name}.expert={agent.expert!r}"
    if agent.expert == "atlas_oracle":
      experts[name] = atlas_oracle
    elif agent.expert:
      module, _, function = agent.expert.partition(":")
      try:
        found = getattr(importlib.import_module(module), function)
        inspect.signature(found).bind("a task", "a result")
      except Exception as error:  # the user's module may raise anything
        raise UserError(f"{key} is neither 'atlas_oracle' nor a 'module:function' that can be imported and takes (task, result): "
                        f"{type(error).__name__}: {error}; modules are found in the folders of PYTHONPATH") from error
      experts[name] = functools.partial(_expert_score, found, key)
  return experts


def _expert_score(function: Callable, key: str, task: str, result: str | None) -> float | None:
  """The score that the user's function gives, checked."""
  try:
    score = function(task, result)
  except Exception as error:  # the user's function may raise anything
    raise UserError(f"{key} failed on the task {task[:80]!r}: {type(error).__name__}: {error}") from error
  if score is None:
    return None
  if not hasattr(score, "__float__") or not 0 <= float(score) <= 1:
    raise UserError(f"{key} gave {score!r} for the task {task[:80]!r}; it must give a number from 0 to 1, or None")
  return float(score)
