"""WebWalkerQA: its JSON records, and a scorer that needs no judge.

The data set is https://huggingface.co/datasets/callanwu/WebWalkerQA (split main: 680 questions). Its papers and its
evaluator spell the fields differently; case, hyphens and blanks do not matter here.
"""

from __future__ import annotations

import collections
import hashlib
import json
import os
import pathlib

from mgrpo_jax.tasks import gaia
from mgrpo_jax.trajectory import Query


def read(path: str | os.PathLike) -> gaia.Questions:
  """The questions of a JSONL file, or of a JSON list, in its order.

  Returns:
    Questions; `level` is difficulty and type, such as "easy_single_source", "unknown" where a record has neither. Ids are
    made from the content, so that questions of the same words stay apart.

  Raises:
    ValueError: one sentence for a missing file, a broken record, or a field that is missing; it names file and record.
  """
  file, queries, copies = pathlib.Path(path), gaia.Questions(), collections.Counter()
  for where, record in _records(file):
    record = _plain_keys(record)
    info = record.get("info")
    info = _plain_keys(info) if isinstance(info, dict) else {}
    for key in ("question", "answer"):
      if not isinstance(record.get(key), str) or not record[key].strip():
        raise ValueError(f"{where}: {key!r} must be text that is not empty; it is {record.get(key)!r:.40}")
    kind = [str(info[k]).strip().lower().replace("-", "_") for k in ("difficulty_level", "type") if info.get(k)]
    content = "\n".join((record["question"], record["answer"], str(record.get("root_url", ""))))
    name = hashlib.blake2b(content.encode(errors="replace"), digest_size=6).hexdigest()
    copies[name] += 1
    name += f"-{copies[name]}" if copies[name] > 1 else ""
    queries.append(Query(f"webwalker-{name}", record["question"], record["answer"], "_".join(kind) or "unknown",
                         metadata={**info, "root_url": record.get("root_url")}))
  if not queries:
    raise ValueError(f"{file} holds no records; download it again")
  return queries


def score_query(prediction: str | None, query: Query) -> bool:
  """Whether the prediction is the answer but for case, white space and punctuation.

  WebWalkerQA asks a judge; here a right answer in other words counts as wrong.
  """
  return prediction is not None and gaia.plain(prediction) == gaia.plain(query.answer)


def _records(file: pathlib.Path):
  try:
    text = file.read_text(encoding="utf-8-sig")
  except (OSError, UnicodeDecodeError) as error:
    raise ValueError(f"no WebWalkerQA file at {file} ({getattr(error, 'strerror', None) or 'it is not UTF-8'}); give its JSON or JSONL") from None
  whole = text.lstrip().startswith("[")
  for number, part in enumerate([text] if whole else text.split("\n"), 1):
    if not part.strip():
      continue
    try:
      value = json.loads(part)
    except (ValueError, RecursionError) as error:
      raise ValueError(f"{file}{'' if whole else f', line {number}'}: not JSON ({error}); download it again") from None
    for i, record in enumerate(value if whole else [value], number):
      where = f"{file}, {'record' if whole else 'line'} {i}"
      if not isinstance(record, dict):
        raise ValueError(f"{where}: a record must be a JSON object; it is {record!r:.40}")
      yield where, record


def _plain_keys(record: dict) -> dict:
  return {str(k).strip().lower().replace("-", "_").replace(" ", "_"): v for k, v in record.items()}
