"""WebWalkerQA: both spellings of its records, questions that repeat, bad records, its scorer."""

import json

import pytest

from mgrpo_jax import world
from mgrpo_jax.tasks import webwalker
from mgrpo_jax.trajectory import Query

LOWER = {"question": "Who chairs it?", "answer": "Ana Dias", "root_url": "https://a.org/",
         "info": {"type": "single_source", "difficulty_level": "easy", "lang": "en", "golden_path": ["root->x"]}}
UPPER = {"Question": "哪一年？", "Answer": "1998年", "Root-Url": "https://b.cn/",
         "Info": {"Type": "Multi-Source", "Difficulty-Level": "Medium", "Language": "zh", "Source_Website": ["https://b.cn/c"]}}


def write(path, records, *, as_list=False):
  text = json.dumps(records, ensure_ascii=False) if as_list else "\n".join(json.dumps(r, ensure_ascii=False) for r in records) + "\n"
  path.write_text(text, encoding="utf-8")
  return path


@pytest.mark.parametrize("as_list", [False, True])
def test_records_of_either_spelling_are_read(tmp_path, as_list):
  a, b = webwalker.read(write(tmp_path / "q.json", [LOWER, UPPER], as_list=as_list))
  assert (a.question, a.answer, a.level, b.question, b.answer, b.level) == (
    "Who chairs it?", "Ana Dias", "easy_single_source", "哪一年？", "1998年", "medium_multi_source")
  assert a.metadata["root_url"] == "https://a.org/" and a.metadata["golden_path"] == ["root->x"] and b.metadata["root_url"] == "https://b.cn/"


def test_questions_of_the_same_words_stay_apart_under_stable_ids(tmp_path):
  records = [LOWER, LOWER | {"root_url": "https://other.org/"}, LOWER, {"question": "?", "answer": "!"}]
  queries = webwalker.read(write(tmp_path / "q.jsonl", records))
  assert len({q.id for q in queries}) == 4 and queries[2].id == queries[0].id + "-2" and queries[3].level == "unknown"
  assert [q.id for q in webwalker.read(write(tmp_path / "again.json", records, as_list=True))] == [q.id for q in queries]


@pytest.mark.parametrize("text, words", [
  ('{"question": "a", "answer": "b"}\n{"question": 3, "answer": "b"}', "line 2: 'question' must be text that is not empty; it is 3"),
  ('{"question": "a"}', "line 1: 'answer' must be text that is not empty; it is None"),
  ('{"question": "a", "answer": " "}', "line 1: 'answer' must be text"), ("\n{nope}", "line 2: not JSON"), ("[1]", "record 1: a record must be a JSON object"),
  ("[" * 9999, "not JSON"), ("", "holds no records"), ("[]", "holds no records")])
def test_a_bad_record_is_named(tmp_path, text, words):
  (tmp_path / "q.jsonl").write_text(text)
  with pytest.raises(ValueError) as error:
    webwalker.read(tmp_path / "q.jsonl")
  assert words in str(error.value) and "\n" not in str(error.value)


def test_a_missing_file_is_said(tmp_path):
  with pytest.raises(ValueError, match="no WebWalkerQA file"):
    webwalker.read(tmp_path / "none")


@pytest.mark.parametrize("prediction, right", [("Ana Dias", True), ("ana dias.", True), ("Ana  Dias!", True), ("Ana", False), ("Dr Ana Dias", False), (None, False), ("", False)])
def test_case_space_and_punctuation_do_not_matter(prediction, right):
  assert webwalker.score_query(prediction, Query("1", "?", "Ana Dias")) is right
  assert world.SOURCES["webwalker"] == (webwalker.read, webwalker.score_query)
