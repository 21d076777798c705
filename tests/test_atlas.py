"""The atlas: pages, grammar, answers from served bytes, split and questions."""

import collections
import hashlib
import json
import os
import re
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mgrpo_jax.tasks import atlas as atlas_module
from mgrpo_jax.tasks import atlas_pages, gaia
from mgrpo_jax.tasks.atlas import (
  PHRASES,
  SPLITS,
  TEMPLATE_TOKENS,
  Atlas,
  parse_chain,
  render_chain,
  write_gaia,
)

ATLAS = Atlas.load()
QUESTIONS = {split: ATLAS.questions(split) for split in SPLITS}
ALL = [q for questions in QUESTIONS.values() for q in questions]


# ------------------------------------------------------- an independent reading of the served bytes


def read_line(title, field):
  """What the page's bytes say of a field, and the title its link leads to, read without atlas.py."""
  page = ATLAS.pages[title]
  line = next((x for x in page.text.splitlines()[1:] if x.startswith(field + ": ")), None)
  if line is None:
    return None, None
  rest, link = line[len(field) + 2 :], None
  if "[" in rest:
    rest, _, number = rest.partition(" [")
    link = page.links[int(number[0]) - 1]
  return rest, link


def walk(question):
  """(pages opened, answer) of "What is the A of the B of e?", innermost first, by string splitting alone."""
  inner = question.removeprefix("What is ").removesuffix("?")
  fields = {"longest-border neighbour": "borders"}
  parts = inner.split(" of ")
  names = []
  while parts[0].startswith("the ") and len(parts) > 1:
    word = parts[0][4:]
    names.append(fields.get(word, word))
    parts = parts[1:]
  title, opened, answer = " of ".join(parts), [], None
  for field in reversed(names):
    opened.append(title)
    answer, title = read_line(title, field)
  return opened, answer


def test_answers_and_evidence_are_what_the_served_bytes_say():
  for q in ALL:
    opened, answer = walk(q.question)
    assert q.answer == answer
    assert [step[0] for step in q.metadata["evidence"]] == opened
    assert q.metadata["evidence"][-1][2] == answer
    assert str(len(opened)) == q.level


def test_changing_a_served_byte_changes_the_answer():
  page = ATLAS.pages["algeria"]
  assert atlas_module.facts(page.text)["currency"].value == "dzd"
  assert atlas_module.facts(page.text.replace("dzd", "abc"))["currency"].value == "abc"


# ---------------------------------------------------------------------------------------- pages


def test_known_facts_stand_on_their_pages():
  assert ATLAS.pages["algeria"].text == (
    "algeria\ncapital: algiers [1]\nborders: morocco [2] 1941 mali [3] 1359\ncurrency: dzd\n"
    "language: arabic\nregion: africa\nhighest point: tahat [4]\ndomain: dz"
  )
  assert ATLAS.pages["algeria"].links == ("algiers", "morocco", "mali", "tahat")
  assert ATLAS.pages["oran"].text == "oran\ncountry: algeria [1]"
  assert ATLAS.pages["tahat"].text == "tahat\ncountry: algeria [1]\nheight: 2908"
  assert read_line("united states", "capital")[0] == "washington dc"
  assert read_line("russia", "borders")[0] == "kazakhstan"
  assert read_line("france", "domain")[0] == "fr"


@pytest.mark.parametrize(
  "title, field",
  [
    ("bolivia", "capital"),  # two capitals
    ("south africa", "capital"),  # three
    ("israel", "borders"),  # its longest border is with a territory that has no page
    ("cuba", "borders"),  # a naval base
    ("gambia", "highest point"),  # unnamed
    ("cameroon", "language"),  # "24 major language groups"
    ("japan", "borders"),  # an island
  ],
)
def test_a_fact_without_one_clear_answer_has_no_line(title, field):
  assert read_line(title, field) == (None, None)
  assert ATLAS.answer(render_chain((field,), title)) is None


def test_pages_are_lower_case_ascii_titles_are_unique_and_links_resolve_in_order():
  assert len(ATLAS.pages) > 700
  names = collections.Counter()
  for title, page in ATLAS.pages.items():
    assert page.title == title and page.text.split("\n")[0] == title
    assert re.fullmatch(r"[a-z0-9 ]+(\n[a-z ]+: [a-z0-9 ]+( \[[1-9]\]( \d+)?( [a-z ]+ \[[1-9]\] \d+)?)?)*", page.text), page.text
    assert atlas_pages.normalize(title) == title
    marks = re.findall(r"(?:: | \d+ )([a-z0-9 ]+?) \[(\d)\]", page.text)
    assert [int(n) for _, n in marks] == list(range(1, len(page.links) + 1))
    assert [name for name, _ in marks] == list(page.links)
    assert all(link in ATLAS.pages for link in page.links)
    assert len(page.text) <= 230
    names.update({title, *page.aliases})
  assert max(names.values()) == 1, "a name that two pages carry"


def test_a_mountain_of_two_countries_has_no_page():
  for shared in ("mount everest", "mont nimba", "monts nimba", "golem korab", "mount olympus"):
    assert shared not in ATLAS.pages
  assert read_line("nepal", "highest point") == ("mount everest", None)


def test_normalize_makes_plain_words():
  assert atlas_pages.normalize("Côte d&rsquo;Ivoire (<em>Ivory</em> Coast)") == "cote divoire"
  assert atlas_pages.normalize("Washington, D.C.") == "washington dc"
  assert atlas_pages.normalize("Saint-Pierre (x (y) z) et") == "saint pierre et"


def test_template_tokens_and_names_make_up_every_page_and_question():
  pattern = re.compile("|".join(re.escape(t) for t in sorted(TEMPLATE_TOKENS, key=len, reverse=True)))
  assert len(TEMPLATE_TOKENS) == len(set(TEMPLATE_TOKENS))
  for page in ATLAS.pages.values():
    assert re.fullmatch("[a-z0-9 ]*", pattern.sub("", page.text))
  for q in ALL:
    assert pattern.sub("", q.question) == parse_chain(q.question)[1]


def test_names_for_the_tokenizer_come_from_the_pages_of_one_split():
  texts = {split: " ".join(ATLAS.pages[t].text for t in ATLAS.titles(split)) for split in SPLITS}
  for split in SPLITS:
    names = ATLAS.names(split)
    assert all(name in texts[split] and re.fullmatch("[a-z0-9 ]+", name) for name in names)
    assert set(ATLAS.titles(split)) <= set(names)
  unseen = [t for t in ATLAS.titles("test") if t not in ATLAS.names("train")]
  assert len(unseen) > 0.9 * len(ATLAS.titles("test"))


# -------------------------------------------------------------------------------------- grammar


@pytest.mark.parametrize(
  "text, chain",
  [
    ("What is the capital of algeria?", (("capital",), "algeria")),
    ("the capital of algeria", (("capital",), "algeria")),
    ("  THE  Capital of ALGERIA ? ", (("capital",), "algeria")),
    (
      "the domain of the longest-border neighbour of the country of oran",
      (("domain", "borders", "country"), "oran"),
    ),
    ("the height of the highest point of chad", (("height", "highest point"), "chad")),
    ("algeria", None),
    ("the capital of ", None),
    ("the capital of", None),
    ("", None),
    ("?", None),
    ("the capitol of algeria", None),
    ("capital of algeria", None),
    ("the capital of algeria!", None),
    ("the capital of cote d'ivoire", None),
  ],
)
def test_parse_chain(text, chain):
  assert parse_chain(text) == chain


chains = st.tuples(
  st.lists(st.sampled_from(sorted(PHRASES)), min_size=1, max_size=4).map(tuple),
  st.sampled_from(sorted(ATLAS.pages)),
)


@given(chains)
@settings(max_examples=200, deadline=None)
def test_parse_chain_reads_back_what_render_chain_writes(chain):
  assert parse_chain(render_chain(*chain)) == chain
  assert parse_chain(f"What is {render_chain(*chain)}?") == chain


@given(
  st.one_of(
    st.text(), st.lists(st.sampled_from([*PHRASES.values(), "algeria", "oran", "?", " "])).map("".join)
  )
)
@settings(max_examples=300, deadline=None)
def test_answer_never_raises_and_is_none_or_texts(text):
  answer = ATLAS.answer(text)
  assert answer is None or (answer and all(isinstance(a, str) and a for a in answer))
  assert (answer is None) == (ATLAS.evidence(text) is None)


def test_answers_of_subquestions():
  assert ATLAS.answer("the capital of algeria") == ("algiers",)
  assert ATLAS.answer("the country of istanbul") == ("turkey", "turkiye", "republic of turkey")
  assert ATLAS.answer("the capital of turkiye") == ("ankara",)
  assert ATLAS.answer("the capital of ukraine") == ("kyiv", "kiev")
  assert ATLAS.answer("the language of spain") == ("castilian spanish", "spanish")
  for garbled in (
    "the capital of oran",
    "the country of algeria",
    "the height of oran",
    "the capital of atlantis",
    "the capital of the currency of algeria",
    "the capital of the capital of algeria",
  ):
    assert ATLAS.answer(garbled) is None


# ------------------------------------------------------------------------------ split, questions


def test_every_page_of_a_question_belongs_to_its_split():
  for split, questions in QUESTIONS.items():
    for q in questions:
      for title in walk(q.question)[0]:
        assert ATLAS.split_of[title] == split
        assert ATLAS.split_of[ATLAS.pages[title].country] == split


def test_splits_share_no_page_no_question_and_no_longest_border():
  opened = {s: {t for q in qs for t in walk(q.question)[0]} for s, qs in QUESTIONS.items()}
  assert not opened["train"] & opened["test"]
  assert not opened["train"] & opened["validation"]
  assert not opened["validation"] & opened["test"]
  assert len({q.id for q in ALL}) == len({q.question for q in ALL}) == len(ALL)
  for title in ATLAS.regions:
    neighbour = read_line(title, "borders")[0]
    assert neighbour is None or ATLAS.split_of[neighbour] == ATLAS.split_of[title]


def test_countries_are_split_in_the_stated_shares_over_regions():
  total = len(ATLAS.regions)
  assert 190 <= total <= 200
  for split, share in SPLITS.items():
    countries = ATLAS.titles(split, "country")
    assert abs(len(countries) / total - share) < 0.03
    assert len({ATLAS.regions[c] for c in countries}) >= 7
    for region in ("africa", "europe"):  # the two big ones
      of_region = sum(ATLAS.regions[c] == region for c in countries) / list(ATLAS.regions.values()).count(
        region
      )
      assert abs(of_region - share) < 0.12


def test_there_are_enough_questions_a_third_of_each_hop():
  assert (
    len(QUESTIONS["test"]) >= 384 and len(QUESTIONS["validation"]) >= 192 and len(QUESTIONS["train"]) >= 3000
  )
  for questions in QUESTIONS.values():
    levels = collections.Counter(q.level for q in questions)
    assert levels["1"] == levels["2"] == levels["3"] == len(questions) // 3
  assert collections.Counter(q.level for q in ATLAS.questions("test", 385)) == {"1": 129, "2": 128, "3": 128}


def test_questions_are_balanced_over_relations_within_a_hop():
  counts = collections.Counter((q.level, parse_chain(q.question)[0][0]) for q in ATLAS.questions("test", 384))
  for hops, relations in (("1", 9), ("2", 8), ("3", 7)):
    of_hop = [n for (level, _), n in counts.items() if level == hops]
    assert len(of_hop) == relations and max(of_hop) - min(of_hop) <= 1


def test_no_question_gives_its_answer_away_loops_or_can_skip_a_hop():
  for q in ALL:
    opened, answer = walk(q.question)
    for text in (answer, *q.aliases):
      assert f" {text}?" not in q.question and f" {text} " not in q.question
    assert len({*opened, answer}) == len(opened) + 1
    last = parse_chain(q.question)[0][0]
    assert answer not in [read_line(title, last)[0] for title in opened[:-1]]


def test_guessing_by_relation_without_reading_is_mostly_wrong():
  train = collections.defaultdict(collections.Counter)
  for q in QUESTIONS["train"]:
    train[parse_chain(q.question)[0]][q.answer] += 1
  guesses = {chain: answers.most_common(1)[0][0] for chain, answers in train.items()}
  test = ATLAS.questions("test", 384)
  right = sum(guesses.get(parse_chain(q.question)[0]) == q.answer for q in test)
  assert right / len(test) < 0.12


def test_fewer_questions_are_the_beginning_of_more_and_a_seed_changes_them():
  assert ATLAS.questions("test", 10) == QUESTIONS["test"][:10]
  assert ATLAS.questions("test", 100, seed=1) != ATLAS.questions("test", 100)
  assert ATLAS.questions("test", 100, seed=1) == ATLAS.questions("test", 100, seed=1)
  assert ATLAS.questions("test", 0) == []


def test_wrong_split_or_count_is_one_clear_error():
  with pytest.raises(ValueError, match="no split 'dev'; use one of train, validation, test"):
    ATLAS.questions("dev")
  with pytest.raises(ValueError, match="at most .* test questions; asked for 100000"):
    ATLAS.questions("test", 100_000)
  with pytest.raises(ValueError, match="asked for -1"):
    ATLAS.questions("test", -1)


FINGERPRINT = """
import hashlib, json
from mgrpo_jax.tasks.atlas import Atlas
a = Atlas()
texts = [p.text for p in a.pages.values()] + [json.dumps(sorted(a.split_of.items()))]
texts += [q.question + q.id + q.answer for s in ("train", "validation", "test") for q in a.questions(s)]
print(hashlib.sha256("\\n".join(texts).encode()).hexdigest())
"""


def test_the_world_is_the_same_in_another_process():
  texts = [p.text for p in ATLAS.pages.values()] + [json.dumps(sorted(ATLAS.split_of.items()))]
  texts += [q.question + q.id + q.answer for q in ALL]
  here = hashlib.sha256("\n".join(texts).encode()).hexdigest()
  for seed in ("1", "2"):
    env = {**os.environ, "PYTHONHASHSEED": seed}
    there = subprocess.run(
      [sys.executable, "-c", FINGERPRINT], env=env, capture_output=True, text=True, check=True
    )
    assert there.stdout.strip() == here


# ------------------------------------------------------------------------------------- as GAIA


def test_questions_written_in_gaias_columns_are_read_back_by_gaias_reader(tmp_path):
  questions = ATLAS.questions("test", 384)
  write_gaia(tmp_path / "metadata.jsonl", questions)
  read = gaia.read(tmp_path / "metadata.jsonl")
  assert read == questions  # Query compares all but metadata
  assert [q.metadata["evidence"] for q in read] == [q.metadata["evidence"] for q in questions]
  row = json.loads((tmp_path / "metadata.jsonl").read_text().splitlines()[2])
  assert list(row) == ["task_id", "Question", "Level", "Final answer", "file_name", "Annotator Metadata"]
  assert row["Level"] == "3" and row["Annotator Metadata"]["Number of steps"] == "3"
  assert gaia.score_query(read[0].answer.upper(), read[0])


def test_the_command_prints_counts_a_page_and_evidence(capsys):
  atlas_module.main()
  out = capsys.readouterr().out
  assert "test: pages" in out and "3 hops:" in out and "capital: algiers [1]" in out and "on page" in out
