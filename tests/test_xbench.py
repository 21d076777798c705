"""XBench-DeepSearch: files encrypted here by another hand are read back, bad ones are named, and no plain text leaks."""

import base64
import csv
import io
import itertools

import pytest

from mgrpo_jax import world
from mgrpo_jax.tasks import xbench
from mgrpo_jax.trajectory import Query

COLUMNS = ["id", "prompt", "answer", "reference_steps", "canary"]
ROWS = [("1", "北京有多少个区？", "16", "数一数", "canary A"), ("7", 'What, "exactly",\nis a quine?', "a program", "", "ключ B"), ("9", "x" * 300, "Paris", "s", "k")]


def encrypt(text, canary):
  return base64.b64encode(bytes(a ^ b for a, b in zip(text.encode(), itertools.cycle(canary.encode())))).decode()


def write(path, rows=ROWS, columns=COLUMNS, **changes):
  """A file as it is downloaded; `changes` are put in the last row's columns as they are."""
  out = io.StringIO(newline="")
  writer = csv.DictWriter(out, columns, extrasaction="ignore")
  writer.writeheader()
  for i, (name, prompt, answer, steps, canary) in enumerate(rows):
    row = dict(id=name, prompt=encrypt(prompt, canary), answer=encrypt(answer, canary), reference_steps=encrypt(steps, canary), canary=canary)
    writer.writerow(row | (changes if i == len(rows) - 1 else {}))
  path.write_bytes(b"\xef\xbb\xbf" + out.getvalue().encode())
  return path


@pytest.mark.parametrize("plain, key, cipher", [("42", "K1", "fwM="), ("北京", "ab", "hO72htvO"), ("Paris", "canary GUID demo", "MwAcCAE=")])
def test_published_vectors(plain, key, cipher):
  assert xbench.decrypt(cipher, key) == plain and encrypt(plain, key) == cipher


def test_a_file_is_read_with_the_key_of_each_row(tmp_path):
  queries = xbench.read(write(tmp_path / "DeepSearch-2505.csv"))
  assert [(q.id, q.question, q.answer, q.level) for q in queries] == [
    (f"DeepSearch-2505-{r[0]}", r[1], r[2], "DeepSearch-2505") for r in ROWS]


@pytest.mark.parametrize("changes, words", [
  (dict(canary="another"), "row 3: 'prompt' cannot be decrypted with the row's canary"),
  (dict(prompt="not base64!"), "row 3: 'prompt' cannot be decrypted"),
  (dict(answer=base64.b64encode(b"\xff\xfe\x80").decode()), "row 3: 'answer' cannot be decrypted"),
  (dict(canary=""), "row 3: 'canary' is empty"),
  (dict(id="1"), "row 3: id '1' already stands in row 1"),
])
def test_a_bad_row_is_named_and_no_plain_text_with_it(tmp_path, changes, words):
  rows = [("1", "Сколько районов?", "шестнадцать", "", "canary A"), ("7", "Quelle œuvre?", "Éloge", "", "b"), ("9", "ƒüñ" * 40, "Ünsæglich", "s", "schlüssel")]
  with pytest.raises(ValueError) as error:
    xbench.read(write(tmp_path / "x.csv", rows, **changes))
  assert words in str(error.value) and "\n" not in str(error.value)
  assert not any(r[1][:8] in str(error.value) or r[2] in str(error.value) for r in rows)


def test_no_file_and_no_column_and_no_row_are_said(tmp_path):
  for path, words in ((tmp_path / "none.csv", "no XBench file"), (write(tmp_path / "c.csv", columns=COLUMNS[:-1]), "no column 'canary'"),
                      (write(tmp_path / "empty.csv", rows=()), "holds no rows")):
    with pytest.raises(ValueError, match=words):
      xbench.read(path)
  (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
  with pytest.raises(ValueError, match="not UTF-8"):
    xbench.read(tmp_path / "binary.csv")


@pytest.mark.parametrize("prediction, right", [
  ("16", True), (" 16\n", True), ("最终答案: 16", True), ("step 1 is 3\n最终答案：16", True), ("Final answer: 16", True),
  ("1", False), ("16 districts", False), ("最终答案: 3\n最终答案: 16", True), ("16 最终答案: 3", False), ("", False), (None, False)])
def test_what_follows_the_last_label_must_be_the_answer(prediction, right):
  assert xbench.score_query(prediction, Query("1", "?", "16")) is right
  assert world.SOURCES["xbench"] == (xbench.read, xbench.score_query)
