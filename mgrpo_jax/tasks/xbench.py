"""XBench-DeepSearch: its encrypted CSV files, and the part of its grading that needs no judge.

The files come from https://github.com/xbench-ai/xbench-evals (`DeepSearch-2505.csv` and `DeepSearch-2510.csv` are
different sets of questions). Question and answer are encrypted so that crawlers do not learn them: each is base64 of
its UTF-8 bytes, XORed with the row's canary. No message of this file quotes what it decrypts.
"""

from __future__ import annotations

import base64
import csv
import io
import os
import pathlib
import re

from mgrpo_jax.tasks.gaia import Questions
from mgrpo_jax.trajectory import Query

_COLUMNS = ("id", "prompt", "answer", "canary")


def read(path: str | os.PathLike) -> Questions:
  """The questions of a file in its order; `level` is the file's name, as there are no levels.

  Raises:
    ValueError: one sentence for a missing file, a missing column, an id that comes twice, or a row that its canary
      does not decrypt. It names file and row.
  """
  file, queries, seen = pathlib.Path(path), Questions(), {}
  try:
    text = file.read_text(encoding="utf-8-sig")
  except (OSError, UnicodeDecodeError) as error:
    raise ValueError(f"no XBench file at {file} ({getattr(error, 'strerror', None) or 'it is not UTF-8'}); give its CSV, such as "
                     "DeepSearch-2505.csv") from None
  rows = csv.DictReader(io.StringIO(text, newline=""))
  missing = [c for c in _COLUMNS if c not in (rows.fieldnames or ())]
  if missing:
    raise ValueError(f"{file} has no column {missing[0]!r}; XBench's files have {', '.join(_COLUMNS)}")
  for number, row in enumerate(rows, 1):
    where = f"{file}, row {number}"
    for column in _COLUMNS:
      if not (row[column] or "").strip():
        raise ValueError(f"{where}: {column!r} is empty; download the file again")
    if row["id"] in seen:
      raise ValueError(f"{where}: id {row['id']!r} already stands in row {seen[row['id']]}; keep one")
    seen[row["id"]] = number
    question, answer = (decrypt(row[column], row["canary"], f"{where}: {column!r}") for column in ("prompt", "answer"))
    queries.append(Query(f"{file.stem}-{row['id']}", question, answer, file.stem))
  if not queries:
    raise ValueError(f"{file} holds no rows; download it again")
  return queries


def decrypt(text: str, canary: str, where: str = "a text") -> str:
  """The plain text of an encrypted one; ValueError if the canary is not its key."""
  try:
    data, key = base64.b64decode(text, validate=True), canary.encode()
    return bytes(b ^ key[i % len(key)] for i, b in enumerate(data)).decode("utf-8")
  except ValueError:
    raise ValueError(f"{where} cannot be decrypted with the row's canary; download the file again") from None


def score_query(prediction: str | None, query: Query) -> bool:
  """Whether the text after the last "final answer" label (or all of it) is literally the answer.

  XBench's grader asks a judge where this fails; here a right answer in other words counts as wrong.
  """
  if prediction is None:
    return False
  given = re.split(r"最终答案\s*[:：]*|final answer\s*[:：]+", prediction, flags=re.IGNORECASE)[-1]
  return given.strip() == query.answer.strip()
