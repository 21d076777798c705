"""GAIA: read its metadata JSONL and score answers by the official rules, to the letter.

The data is gated and not shipped (https://huggingface.co/datasets/gaia-benchmark/GAIA; its terms forbid
sharing it where crawlers read). Point `read` at your copy: a JSONL file, or the folder of the data set
with `2023/<split>/metadata.jsonl`. The rules are those of the leaderboard's `scorer.py`, with their
oddities: the gold decides how an answer is read, "17 kg" is not 17, and the order of a list matters.
"""

from __future__ import annotations

import collections
import json
import os
import pathlib
import re
import string
from collections.abc import Iterable

from mgrpo_jax.trajectory import Query

HIDDEN = "?"  # the answer column of the test split
_COLUMNS = ("task_id", "Question", "Level", "Final answer")


class Questions(list):
  """A list of Query that knows what was left out.

  Attributes:
    attachments_left_out: rows that need an attached file, dropped because of `text_only`.
    levels_left_out: rows of other levels than asked for.
    hidden: rows kept whose answer is hidden (`answer` is "").
  """

  attachments_left_out: int = 0
  levels_left_out: int = 0
  hidden: int = 0


def read(
  path: str | os.PathLike,
  *,
  split: str | None = None,
  levels: Iterable[int | str] | None = None,
  text_only: bool = True,
) -> Questions:
  """Questions of a GAIA metadata file, in its order.

  Args:
    path: a JSONL file, or a folder: its own `metadata.jsonl`, `<split>/metadata.jsonl` or
      `2023/<split>/metadata.jsonl`.
    split: "validation" or "test"; needed where a folder holds more than one.
    levels: keep these levels only (1 or "1" ...).
    text_only: leave out rows with an attachment; their number is `attachments_left_out`.

  Returns:
    Questions. `level` is text. A hidden answer ("?") becomes "" with metadata["hidden"] True, and
    scoring it raises. "Annotator Metadata" is kept as metadata["annotator"]; its keys "Aliases" and
    "Evidence", which `atlas.write_gaia` adds, become `aliases` and metadata["evidence"].

  Raises:
    ValueError: one sentence for a missing file, a broken row, a missing column, a wrong type, a task_id
      that comes twice, or nothing left to ask. It names file and line.
  """
  file = _find(pathlib.Path(path), split)
  wanted = (
    None if levels is None else {str(level) for level in ([levels] if isinstance(levels, str) else levels)}
  )
  queries, seen, found = Questions(), {}, collections.Counter()
  for line, row in _rows(file):
    query, attachment = _query(row, f"{file}, line {line}")
    if query.id in seen:
      raise ValueError(
        f"{file}, line {line}: task_id {query.id!r} already stands in line {seen[query.id]}; keep one"
      )
    seen[query.id] = line
    found[query.level] += 1
    if wanted is not None and query.level not in wanted:
      queries.levels_left_out += 1
    elif text_only and attachment:
      queries.attachments_left_out += 1
    else:
      queries.append(query)
      queries.hidden += query.metadata.get("hidden", False)
  if not queries:
    raise ValueError(_nothing_left(file, found, wanted))
  return queries


def score(prediction: str | None, answer: str) -> bool:
  """Whether `prediction` is `answer` by GAIA's official rules. None counts as the text "None".

  The gold decides: a number is compared as a number ($ % , dropped from the prediction); a gold with a
  comma or semicolon is compared element by element, in order, punctuation kept; any other gold without
  case, white space and punctuation.
  """
  prediction = "None" if prediction is None else prediction
  if _is_float(answer):
    return _number(prediction) == float(answer)
  if "," in answer or ";" in answer:
    golds, given = re.split("[,;]", answer), re.split("[,;]", prediction)
    return len(golds) == len(given) and all(_same_element(p, g) for p, g in zip(given, golds, strict=True))
  return plain(prediction) == plain(answer)


def score_query(prediction: str | None, query: Query) -> bool:
  """Whether `prediction` is the query's answer or one of its aliases. ValueError if its answer is hidden."""
  if query.metadata.get("hidden"):
    raise ValueError(
      f"question {query.id!r} has a hidden answer, so it cannot be scored here; use the validation split, "
      "or submit the answers to the leaderboard"
    )
  return any(score(prediction, answer) for answer in (query.answer, *query.aliases))


# ------------------------------------------------------------------------------------ the scorer


def _is_float(text: str) -> bool:
  try:
    float(text)
  except ValueError:
    return False
  return True


def _number(text: str) -> float:
  """The number, $ % , dropped; +inf if it is none, as the official scorer has it."""
  text = text.replace("$", "").replace("%", "").replace(",", "")
  return float(text) if _is_float(text) else float("inf")


def _same_element(given: str, gold: str) -> bool:
  if _is_float(gold):
    return _number(given) == float(gold)
  return re.sub(r"\s", "", given).lower() == re.sub(r"\s", "", gold).lower()


def plain(text: str) -> str:
  return re.sub(r"\s", "", text).lower().translate(str.maketrans("", "", string.punctuation))


# ------------------------------------------------------------------------------------ the reader


def _find(path: pathlib.Path, split: str | None) -> pathlib.Path:
  if path.is_file():
    if path.suffix == ".parquet":
      raise ValueError(f"{path} is parquet, which is not read here; {_CONVERT}")
    return path
  if not path.exists():
    raise ValueError(
      f"no GAIA file at {path}; download the data set (it is gated) and give its metadata.jsonl or folder"
    )
  names = (split,) if split else ("validation", "test")
  options = [path / "2023" / name for name in names] + [path / name for name in names] + [path]
  found = [folder / "metadata.jsonl" for folder in options if (folder / "metadata.jsonl").is_file()]
  if len(found) > 1 and not split:
    splits = ", ".join(file.parent.name for file in found)
    raise ValueError(f"{path} holds {splits}; say which split to read, such as {found[0]}")
  if not found:
    parquet = [folder for folder in options if any(folder.glob("metadata*.parquet"))]
    if parquet:
      raise ValueError(f"{parquet[0]} holds parquet only, which is not read here; {_CONVERT}")
    raise ValueError(
      f"no metadata.jsonl in {path}{f' for split {split!r}' if split else ''}; looked for "
      f"{', '.join(str(folder.relative_to(path) / 'metadata.jsonl') for folder in options)}"
    )
  return found[0]


_CONVERT = (
  "write it as JSONL first: python -c \"import pandas; pandas.read_parquet('metadata.parquet')"
  ".to_json('metadata.jsonl', orient='records', lines=True)\""
)


def _rows(file: pathlib.Path):
  try:
    text = file.read_text(encoding="utf-8-sig")
  except UnicodeDecodeError as error:
    raise ValueError(
      f"{file} is not UTF-8 text ({error.reason} at byte {error.start}); download it again"
    ) from None
  for number, line in enumerate(text.split("\n"), 1):
    if line.strip():
      try:
        row = json.loads(line)
      except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}, line {number}: not JSON ({error}); repair or remove this row") from None
      yield number, row


def _query(row, where: str) -> tuple[Query, bool]:
  """The Query of a row, and whether it needs an attached file."""
  if not isinstance(row, dict):
    raise ValueError(
      f"{where}: a row must be a JSON object with the columns {', '.join(_COLUMNS)}; it is {row!r:.40}"
    )
  missing = [column for column in _COLUMNS if column not in row]
  if missing:
    raise ValueError(f"{where}: no column {missing[0]!r}; GAIA's rows have {', '.join(_COLUMNS)}")
  for column in ("task_id", "Question", "Final answer"):
    if not isinstance(row[column], str) or not row[column].strip():
      raise ValueError(f"{where}: {column!r} must be text that is not empty; it is {row[column]!r:.40}")
  level = row["Level"]
  if isinstance(level, bool) or not isinstance(level, int | str) or not re.fullmatch("[1-9]", str(level)):
    raise ValueError(f"{where}: 'Level' must be 1, 2 or 3; it is {level!r:.40}")
  attachment, annotator = row.get("file_name") or "", row.get("Annotator Metadata") or {}
  if not isinstance(attachment, str):
    raise ValueError(
      f"{where}: 'file_name' must be text, empty if there is no attachment; it is {attachment!r:.40}"
    )
  if not isinstance(annotator, dict):
    raise ValueError(f"{where}: 'Annotator Metadata' must be an object; it is {annotator!r:.40}")
  aliases = annotator.get("Aliases") or []
  if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
    raise ValueError(f"{where}: 'Aliases' must be a list of texts; it is {aliases!r:.40}")
  hidden = row["Final answer"].strip() == HIDDEN
  metadata = {"annotator": annotator, "file_name": attachment}
  if "Evidence" in annotator:
    metadata["evidence"] = annotator["Evidence"]
  if hidden:
    metadata["hidden"] = True
  answer = "" if hidden else row["Final answer"]
  return Query(row["task_id"], row["Question"], answer, str(level), tuple(aliases), metadata), bool(
    attachment
  )


def _nothing_left(file: pathlib.Path, found: collections.Counter, wanted: set[str] | None) -> str:
  if not found:
    return f"{file} holds no rows; download it again"
  if wanted is not None and not wanted & set(found):
    asked, there = (", ".join(sorted(names)) for names in (wanted, found))
    return f"{file} has no question of level {asked}; its levels are {there}"
  return f"{file} has only questions with an attached file; read it with text_only=False"
