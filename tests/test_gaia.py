"""GAIA: the official scorer's table, and a reader that says what is wrong with a file."""

import json
import math
import re
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mgrpo_jax.tasks import gaia
from mgrpo_jax.trajectory import Query

# Gold, prediction, right: rules of the leaderboard's scorer.py, worked out by hand.
TABLE = [
  # a number as gold: $ % , are dropped from the answer, anything else makes it no number
  ("17", "17", True),
  ("17", "17.0", True),
  ("1", "1.0", True),
  ("1.0", "1", True),
  ("17", " 17 ", True),
  ("17", "$17", True),
  ("17", "17%", True),
  ("17000", "17,000", True),
  ("17", "1,7", True),
  ("1e3", "1000", True),
  ("0.5", ".5", True),
  ("-5", "-5", True),
  ("17", "17 kg", False),
  ("17", "seventeen", False),
  ("17", "17.", True),
  ("17", "", False),
  ("17", None, False),
  ("50", "50%", True),
  ("0.5", "50%", False),
  ("3.14", "314", False),
  ("314", "3.14", False),
  ("3.14", "(3.14)", False),  # officially no number
  ("-5", "\u22125", False),  # a typographic minus is no number either
  ("1985", "5", False),
  ("3", "3.0000001", False),
  ("inf", "anything", True),  # official: what is no number counts as +inf
  ("nan", "nan", False),
  # commas or semicolons in the gold: a list in order, punctuation kept
  ("Paris, Rome", "Paris, Rome", True),
  ("Paris, Rome", "paris,rome", True),
  ("Paris; Rome", "Paris, Rome", True),
  ("Paris, Rome", "Rome, Paris", False),
  ("Paris, Rome", "Paris, Rome,", False),
  ("Paris, Rome", "Paris", False),
  ("Paris, Rome", "Paris and Rome", False),
  ("Paris, France", "a", False),
  ("Paris, Rome", "Paris., Rome", False),
  ("St. Paul, Rome", "St Paul, Rome", False),
  ("1, 2, 3", "1.0,2,3", True),
  ("1; b", "$1; B", True),
  ("1, 2", "1, 3", False),
  ("1, b", "x, b", False),
  ("March 5, 2021", "5 March 2021", False),
  ("March 5, 2021", "march5,2021", True),
  ("1,000", "1000", False),  # not a float for Python, so a list of two
  # anything else: no case, no white space, no punctuation
  ("Seagull", "sea gull", True),
  ("Louvre", "the Louvre", False),
  ("Louvre", "Louvre.", True),
  ("don't", "dont", True),
  ("rock-n-roll", "Rock n Roll!", True),
  ("Jos\u00e9", "Jose", False),
  ("Paris", "Paris, France", False),
  ("Paris", "", False),
  ("None", None, True),
  ("none", None, True),
  ("a\u00a0b", "ab", True),
  ("100 km", "100 km", True),
  ("100 km", "100", False),
  ("...", "", True),
]


@pytest.mark.parametrize("gold, prediction, right", TABLE)
def test_official_scores(gold, prediction, right):
  assert gaia.score(prediction, gold) is right


def by_the_book(prediction, gold):
  """The rules again, written another way, to compare on random texts."""
  prediction = str(prediction)

  def number(text):
    try:
      return float(text)
    except ValueError:
      return None

  def stripped(text, also=""):
    return "".join(c for c in text if not re.match(r"\s", c) and c not in also).lower()

  def same_number(text, value):
    found = number("".join(c for c in text if c not in "$%,"))
    return (math.inf if found is None else found) == value

  if number(gold) is not None:
    return same_number(prediction, number(gold))
  if set(gold) & set(",;"):
    golds, texts = gold.replace(";", ",").split(","), prediction.replace(";", ",").split(",")
    if len(golds) != len(texts):
      return False
    return all(
      same_number(t, number(g)) if number(g) is not None else stripped(t) == stripped(g)
      for g, t in zip(golds, texts, strict=True)
    )
  return stripped(prediction, string.punctuation) == stripped(gold, string.punctuation)


odd_texts = st.text(alphabet="aB1.5,; $%-()\u00e9\u2212\t", max_size=8)
answers = st.one_of(odd_texts, st.floats(width=16).map(str), st.integers(-9, 9999).map(str))


@given(answers, st.one_of(answers, st.none()))
@settings(max_examples=1500, deadline=None)
def test_scores_agree_with_an_independent_writing_of_the_rules(gold, prediction):
  assert gaia.score(prediction, gold) is by_the_book(prediction, gold)
  assert gaia.score(gold, gold) is by_the_book(gold, gold)


def test_any_alias_is_right_and_a_hidden_answer_cannot_be_scored():
  query = Query("q", "?", "kyiv", aliases=("kiev",))
  assert gaia.score_query("Kiev", query) and gaia.score_query("KYIV", query)
  assert not gaia.score_query("kharkiv", query) and not gaia.score_query(None, query)
  hidden = Query("h", "?", "", metadata={"hidden": True})
  with pytest.raises(ValueError, match="'h' has a hidden answer.*validation split"):
    gaia.score_query("", hidden)


# --------------------------------------------------------------------------------------- reader


def row(task_id="a", **changes):
  annotator = {"Steps": "1. look", "Number of steps": "1", "Tools": "1. None", "Number of tools": "0"}
  base = {
    "task_id": task_id,
    "Question": f"Q {task_id}?",
    "Level": 1,
    "Final answer": "42",
    "file_name": "",
    "Annotator Metadata": annotator,
  }
  return {**base, **changes}


def write(path, *rows, newline="\n"):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(
    "".join((r if isinstance(r, str) else json.dumps(r)) + newline for r in rows), encoding="utf-8"
  )
  return path


def test_reads_a_metadata_file(tmp_path):
  rows = [row("a"), row("b", Level="2", **{"Final answer": "Paris, Rome"}), row("c", Level=3)]
  file = write(tmp_path / "metadata.jsonl", *rows)
  questions = gaia.read(file)
  assert [(q.id, q.question, q.answer, q.level, q.aliases) for q in questions] == [
    ("a", "Q a?", "42", "1", ()),
    ("b", "Q b?", "Paris, Rome", "2", ()),
    ("c", "Q c?", "42", "3", ()),
  ]
  assert questions[0].metadata["annotator"]["Steps"] == "1. look"
  assert questions.attachments_left_out == questions.levels_left_out == questions.hidden == 0


def test_reads_the_folder_of_the_data_set(tmp_path):
  write(tmp_path / "2023" / "validation" / "metadata.jsonl", row("v"))
  assert [q.id for q in gaia.read(tmp_path)] == ["v"]
  write(tmp_path / "2023" / "test" / "metadata.jsonl", row("t", **{"Final answer": "?"}))
  assert [q.id for q in gaia.read(tmp_path, split="validation")] == ["v"]
  assert [q.id for q in gaia.read(str(tmp_path), split="test")] == ["t"]
  assert [q.id for q in gaia.read(tmp_path / "2023", split="test")] == ["t"]
  with pytest.raises(ValueError, match="holds validation, test; say which split"):
    gaia.read(tmp_path)


def test_keeps_levels_and_leaves_out_attachments_and_counts_them(tmp_path):
  file = write(
    tmp_path / "m.jsonl", row("a"), row("b", file_name="x.png"), row("c", Level="2"), row("d", Level=3)
  )
  questions = gaia.read(file)
  assert [q.id for q in questions] == ["a", "c", "d"] and questions.attachments_left_out == 1
  assert [q.id for q in gaia.read(file, text_only=False)] == ["a", "b", "c", "d"]
  questions = gaia.read(file, levels=[1, "2"])
  assert [q.id for q in questions] == ["a", "c"] and questions.levels_left_out == 1
  assert [q.id for q in gaia.read(file, levels="3")] == ["d"]


def test_a_hidden_answer_is_empty_and_marked(tmp_path):
  questions = gaia.read(write(tmp_path / "m.jsonl", row("a"), row("b", **{"Final answer": "?"})))
  assert [(q.answer, q.metadata.get("hidden", False)) for q in questions] == [("42", False), ("", True)]
  assert questions.hidden == 1
  with pytest.raises(ValueError, match="hidden answer"):
    gaia.score_query("42", questions[1])


def test_tolerates_blank_lines_windows_newlines_a_byte_order_mark_and_line_separators_in_texts(tmp_path):
  file = tmp_path / "m.jsonl"
  text = "\ufeff" + json.dumps(row("a")) + "\r\n\r\n"
  text += json.dumps(row("b", Question="one\u2028two\x85?"), ensure_ascii=False) + "\n\n"
  file.write_bytes(text.encode("utf-8"))
  assert [q.question for q in gaia.read(file)] == ["Q a?", "one\u2028two\x85?"]


def test_rows_without_optional_columns_are_read(tmp_path):
  bare = {k: v for k, v in row("a").items() if k not in ("file_name", "Annotator Metadata")}
  null = row("b", **{"file_name": None, "Annotator Metadata": None})
  assert [q.id for q in gaia.read(write(tmp_path / "m.jsonl", bare, null))] == ["a", "b"]


def without(column):
  return {k: v for k, v in row("b").items() if k != column}


@pytest.mark.parametrize(
  "bad, message",
  [
    ('{"task_id": "b", "Question"', "line 2: not JSON .*; repair or remove this row"),
    ("[" * 100_000, "line 2: not JSON"),
    ("[1, 2]", "line 2: a row must be a JSON object with the columns task_id"),
    ("null", "line 2: a row must be a JSON object"),
    (without("Final answer"), "line 2: no column 'Final answer'"),
    (without("Question"), "line 2: no column 'Question'"),
    (without("task_id"), "line 2: no column 'task_id'"),
    (without("Level"), "line 2: no column 'Level'"),
    (row("a"), "line 2: task_id 'a' already stands in line 1"),
    (row("b", Question=7), "line 2: 'Question' must be text that is not empty; it is 7"),
    (row("b", Question="  "), "line 2: 'Question' must be text that is not empty"),
    (row(7), "line 2: 'task_id' must be text"),
    (row("b", **{"Final answer": 42}), "line 2: 'Final answer' must be text"),
    (row("b", **{"Final answer": None}), "line 2: 'Final answer' must be text"),
    (row("b", Level="hard"), "line 2: 'Level' must be 1, 2 or 3; it is 'hard'"),
    (row("b", Level=True), "line 2: 'Level' must be 1, 2 or 3"),
    (row("b", Level=1.0), "line 2: 'Level' must be 1, 2 or 3"),
    (row("b", Level=None), "line 2: 'Level' must be 1, 2 or 3"),
    (row("b", file_name=["x"]), "line 2: 'file_name' must be text"),
    (row("b", **{"Annotator Metadata": "x"}), "line 2: 'Annotator Metadata' must be an object"),
    (row("b", **{"Annotator Metadata": {"Aliases": "x"}}), "line 2: 'Aliases' must be a list of texts"),
  ],
)
def test_a_broken_row_is_one_sentence_with_file_and_line(tmp_path, bad, message):
  file = write(tmp_path / "metadata.jsonl", row("a"), bad)
  with pytest.raises(ValueError, match=message) as error:
    gaia.read(file)
  assert str(file) in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 500


def test_files_that_are_missing_empty_or_of_another_kind_are_one_sentence(tmp_path):
  with pytest.raises(ValueError, match="no GAIA file at .*nowhere; download"):
    gaia.read(tmp_path / "nowhere")
  (tmp_path / "folder").mkdir()
  with pytest.raises(
    ValueError, match="no metadata.jsonl in .*folder for split 'test'; looked for 2023/test/metadata"
  ):
    gaia.read(tmp_path / "folder", split="test")
  with pytest.raises(ValueError, match="holds no rows"):
    gaia.read(write(tmp_path / "empty.jsonl", ""))
  (tmp_path / "bytes.jsonl").write_bytes(b'{"task_id": "\xff\xfe"}')
  with pytest.raises(ValueError, match="not UTF-8"):
    gaia.read(tmp_path / "bytes.jsonl")
  (tmp_path / "new" / "2023" / "test").mkdir(parents=True)
  (tmp_path / "new" / "2023" / "test" / "metadata.parquet").write_bytes(b"PAR1")
  with pytest.raises(ValueError, match="parquet only.*write it as JSONL first"):
    gaia.read(tmp_path / "new", split="test")
  with pytest.raises(ValueError, match="is parquet.*write it as JSONL first"):
    gaia.read(tmp_path / "new" / "2023" / "test" / "metadata.parquet")


def test_a_choice_that_leaves_nothing_says_so(tmp_path):
  file = write(tmp_path / "m.jsonl", row("a", file_name="x.png"))
  with pytest.raises(ValueError, match="only questions with an attached file; read it with text_only=False"):
    gaia.read(file)
  with pytest.raises(ValueError, match="no question of level 2; its levels are 1"):
    gaia.read(file, levels=[2])
