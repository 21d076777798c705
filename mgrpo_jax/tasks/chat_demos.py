"""One's own demonstrations for a supervised warm start: a JSONL file of chats.

Each row is one trajectory of one agent, in the roles that chat models use:

    {"agent": "search", "messages": [{"role": "user", "content": "What is the capital of Peru?"},
                                     {"role": "assistant", "content": "<tool_call>{...}</tool_call>"},
                                     {"role": "tool", "content": "found: ..."},
                                     {"role": "assistant", "content": "<result>Lima</result>"}]}

What the assistant writes is taught, token by token with its end; the rest is read. A system message may stand first
if it is the agent's own `config.agents.<name>.prompt`, which is what the agent gets in rollouts.
"""

from __future__ import annotations

import json
import pathlib

from mgrpo_jax.errors import UserError
from mgrpo_jax.tasks.atlas_demos import Demonstration


def read(path: str, prompts: dict[str, str]) -> dict[str, list[Demonstration]]:
  """The demonstrations of a file by agent.

  Args:
    prompts: system text of every agent of the team.

  Raises:
    UserError: no such file; a row that is no such chat (its number and what is wrong with it).
  """
  out: dict[str, list[Demonstration]] = {name: [] for name in prompts}
  try:
    text = pathlib.Path(path).expanduser().read_text(encoding="utf-8")
  except (OSError, UnicodeDecodeError) as error:
    raise UserError(f"demonstrations {path!r} cannot be read ({getattr(error, 'strerror', None) or 'not UTF-8'})") from error
  for number, line in enumerate(text.split("\n"), 1):
    if not line.strip():
      continue
    try:
      agent, demonstration = _chat(json.loads(line), prompts)
    except json.JSONDecodeError as error:
      raise UserError(f"{path}, row {number}: not JSON ({error.msg} at character {error.colno})") from error
    except (ValueError, TypeError, KeyError) as error:
      raise UserError(f"{path}, row {number}: {error.args[0] if error.args else error}") from error
    out[agent].append(demonstration)
  if not any(out.values()):
    raise UserError(f"{path} holds no demonstration")
  return out


def _chat(row, prompts: dict[str, str]) -> tuple[str, Demonstration]:
  if not isinstance(row, dict) or not isinstance(row.get("messages"), list):
    raise ValueError('a row is an object with "agent" and a list of "messages"')
  agent = row.get("agent")
  if agent not in prompts:
    raise ValueError(f'"agent" is {agent!r}, which is none of {", ".join(prompts)}')
  messages = row["messages"]
  for i, m in enumerate(messages):
    if not isinstance(m, dict) or not isinstance(m.get("role"), str) or not isinstance(m.get("content"), str):
      raise ValueError(f'message {i + 1} needs a text "role" and a text "content"')
  if messages and messages[0]["role"] == "system":
    if messages[0]["content"] != prompts[agent]:
      raise ValueError(f"its system text is not config.agents.{agent}.prompt, which the agent gets in rollouts; make them equal or leave it out")
    messages = messages[1:]
  expected = ["user"] + ["assistant" if i % 2 == 0 else "tool" for i in range(len(messages) - 1)]
  for i, (m, role) in enumerate(zip(messages, expected)):
    if m["role"] != role and not (role == "tool" and m["role"] == "user"):
      raise ValueError(f"message {i + 1} (without system) has the role {m['role']!r} where {role!r} is expected")
  if len(messages) < 2 or messages[-1]["role"] != "assistant":
    raise ValueError("it must end with what the assistant writes last")
  written, observed = messages[1::2], [m["content"] for m in messages[2::2]]
  turns = list(zip([m["content"] for m in written], [*observed, None]))
  return agent, Demonstration(messages[0]["content"], turns, "chat")
