"""The text protocol of one turn: parse what a policy wrote, without ever raising.

A turn is an optional `<thinking>...</thinking>` followed by exactly one of

    <tool_call>{"name": NAME, "arguments": {...}}</tool_call>
    <result>TEXT</result>

and nothing else (M-GRPO's protocol, where the thinking block is required; tiny vocabularies do
without it: `thinking="optional"`; `<think>`, which open models are taught, is the same). Only text that the policy sampled is ever parsed: prompts, pages
and answers of others are not, so a tag inside them means nothing.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re

# What a policy is told when its turn cannot be used. Few and fixed, so that a small tokenizer can
# hold each of them as one token.
TWO_CALLS = "error: one call at a time"
BAD_JSON = "error: the call is not valid json"
BAD_CALL = "error: a call needs a name and arguments"
BAD_TAGS = "error: write one tool_call or one result"
NO_THINKING = "error: think first"
NOT_FINISHED = "error: the turn was cut off"
UNKNOWN_TOOL = "error: no such tool"
ERRORS = (TWO_CALLS, BAD_JSON, BAD_CALL, BAD_TAGS, NO_THINKING, NOT_FINISHED, UNKNOWN_TOOL)

# What the controller says about itself.
ANSWER_NOW = "answer now"
NO_RESULT = "no result"

TAGS = tuple(f"<{slash}{name}>" for name in ("thinking", "tool_call", "result") for slash in ("", "/"))
TEMPLATE_TOKENS = (*TAGS, "</thinking><result>", "<tool_response>", "</tool_response>", *ERRORS, ANSWER_NOW, NO_RESULT)


def call_prefix(name: str, argument: str, *, text: bool = True) -> str:
  """The fixed beginning of a one-argument call, for tokenizers that hold it as one token."""
  return f'<tool_call>{{"name": "{name}", "arguments": {{"{argument}": ' + ('"' if text else "")


CALL_SUFFIXES = ('"}}</tool_call>', "}}</tool_call>")


@dataclasses.dataclass(frozen=True)
class Call:
  name: str
  arguments: dict


@dataclasses.dataclass(frozen=True)
class ParsedTurn:
  """One parsed turn. Exactly one of `call`, `result`, `error` is not None."""

  thinking: str | None = None
  call: Call | None = None
  result: str | None = None
  error: str | None = None


def render_call(name: str, arguments: dict) -> str:
  """The canonical text of a call (what `parse_turn` reads back)."""
  return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def render_result(text: str) -> str:
  return f"<result>{text}</result>"


def parse_turn(text: str, *, thinking: str = "optional") -> ParsedTurn:
  """Parse one sampled turn; never raises.

  Args:
    text: what the policy sampled, without its stop token.
    thinking: "optional" or "required" (the paper's format).

  Returns:
    A ParsedTurn. Two calls in one turn give `call=None` and an error for the model; so does JSON
    that does not parse (a broken call is never run with guessed arguments), and any text outside
    the tags.
  """
  rest = text.strip()
  thought = None
  if opened := re.match("<(thinking|think)>", rest):
    body, closed, rest = rest[opened.end():].partition(f"</{opened[1]}>")
    if not closed or any(tag in body for tag in (*TAGS, "<think>", "</think>")):
      return ParsedTurn(error=BAD_TAGS)
    thought, rest = body.strip(), rest.strip()
  elif thinking == "required":
    return ParsedTurn(error=NO_THINKING)
  if rest.startswith("<tool_call>"):
    return _parse_call(rest[len("<tool_call>"):], thought)
  if rest.startswith("<result>"):
    body, closed, tail = rest[len("<result>"):].partition("</result>")
    if not closed or tail.strip() or any(tag in body for tag in TAGS):
      return ParsedTurn(thought, error=BAD_TAGS)
    return ParsedTurn(thought, result=body.strip())
  return ParsedTurn(thought, error=BAD_TAGS)


def _parse_call(text: str, thought: str | None) -> ParsedTurn:
  # raw_decode finds the end of the JSON itself, so a closing tag or a fence inside a string is data.
  start = len(text) - len(text.lstrip())
  try:
    value, end = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite).raw_decode(text, start)
  except (ValueError, RecursionError):
    return ParsedTurn(thought, error=BAD_JSON)
  tail = text[end:].lstrip()
  if tail.startswith("{") or "<tool_call>" in tail:
    return ParsedTurn(thought, error=TWO_CALLS)
  if not tail.startswith("</tool_call>"):
    return ParsedTurn(thought, error=BAD_TAGS if not tail or tail.startswith("<") else BAD_JSON)
  if tail[len("</tool_call>"):].strip():
    return ParsedTurn(thought, error=BAD_TAGS)
  if isinstance(value, list):
    return ParsedTurn(thought, error=TWO_CALLS if len(value) > 1 else BAD_CALL)
  if not isinstance(value, dict) or not isinstance(value.get("name"), str):
    return ParsedTurn(thought, error=BAD_CALL)
  arguments = value.get("arguments")
  if not isinstance(arguments, dict) or set(value) != {"name", "arguments"}:
    return ParsedTurn(thought, error=BAD_CALL)
  return ParsedTurn(thought, call=Call(value["name"], arguments))


def _finite(text: str) -> float:
  value = float(text)
  return _refuse(text) if math.isinf(value) else value  # 1e999 would come back as Infinity, which is not JSON


def _refuse(name: str):
  raise ValueError(f"{name} is not JSON")
