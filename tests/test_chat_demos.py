"""One's own demonstrations: what is read, and that a bad row is named."""

import json

import pytest

from mgrpo_jax.errors import UserError
from mgrpo_jax.tasks import chat_demos

PROMPTS = {"main": "", "search": "You search."}


def message(role, content):
  return {"role": role, "content": content}


def write(path, *rows):
  path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r, ensure_ascii=False) for r in rows), encoding="utf-8")
  return str(path)


ROW = {"agent": "search", "messages": [message("user", "capital of Peru?"), message("assistant", "call"), message("tool", "found"),
                                       message("assistant", "<result>Lima</result>")]}


def test_a_chat_becomes_a_task_and_turns_for_its_agent(tmp_path):
  system = {**ROW, "messages": [message("system", "You search."), *ROW["messages"]]}
  short = {"agent": "main", "messages": [message("user", "q\u2028\u00e9"), message("assistant", "a")]}  # a separator that is no new row
  got = chat_demos.read(write(tmp_path / "d.jsonl", ROW, "", system, short), PROMPTS)
  assert [(d.task, d.turns) for d in got["search"]] == [("capital of Peru?", [("call", "found"), ("<result>Lima</result>", None)])] * 2
  assert [(d.task, d.turns) for d in got["main"]] == [("q\u2028\u00e9", [("a", None)])]


@pytest.mark.parametrize("row, fault", [
  ("{", "not JSON"), ("[1]", 'a list of "messages"'), ({**ROW, "agent": "sarch"}, "'sarch', which is none of main, search"),
  ({"messages": []}, "None, which is none of"), ({**ROW, "messages": []}, "must end with what the assistant writes last"),
  ({**ROW, "messages": ROW["messages"][:3]}, "must end with"), ({**ROW, "messages": ROW["messages"][1:]}, "message 1 .* 'assistant' where 'user'"),
  ({**ROW, "messages": [ROW["messages"][0]] * 2}, "message 2 .* 'user' where 'assistant'"),
  ({**ROW, "messages": [message("user", 3)]}, "message 1 needs a text"), ({**ROW, "messages": ["hello"]}, "message 1 needs"),
  ({**ROW, "messages": [message("system", "Other."), *ROW["messages"]]}, "not config.agents.search.prompt"),
])
def test_a_bad_row_is_named_with_its_number_and_fault(tmp_path, row, fault):
  with pytest.raises(UserError, match=f"row 3: .*{fault}"):
    chat_demos.read(write(tmp_path / "d.jsonl", ROW, "", row), PROMPTS)


def test_a_file_that_is_not_there_or_empty_or_no_text_is_said(tmp_path):
  with pytest.raises(UserError, match="cannot be read"):
    chat_demos.read(str(tmp_path / "none.jsonl"), PROMPTS)
  with pytest.raises(UserError, match="holds no demonstration"):
    chat_demos.read(write(tmp_path / "d.jsonl", "", "  "), PROMPTS)
  (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe")
  with pytest.raises(UserError, match="not UTF-8"):
    chat_demos.read(str(tmp_path / "b.jsonl"), PROMPTS)
