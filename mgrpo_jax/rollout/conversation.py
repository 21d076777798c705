"""Tokens in, tokens out: what was sampled is what is trained.

A conversation is a list of turns; text is only ever turned into tokens for what the policy did NOT
write (prompts and observations). What it sampled is kept as ids and never encoded again.

The world's own tokenizer lays turns out by itself. A chat model's template is rendered anew before every turn, and
what is new at its end is appended. Where the new text does not begin with what the policy has seen and written so
far (templates that drop earlier thoughts, or trim), nothing can be appended: the whole new text begins a segment of
its own, and what was sampled before is trained where it was sampled.
"""

from __future__ import annotations

import dataclasses
import re

import numpy as np

from mgrpo_jax.policy.chat import ChatTokenizer
from mgrpo_jax.trajectory import Turn


@dataclasses.dataclass(frozen=True)
class Conversation:
  """Where a conversation stands before a turn of the policy. Made by `begin` and by `observe`.

  Attributes:
    prompt: i32[n], the new tokens.
    restart: the prompt is all that the policy sees: a new segment begins with it.
    messages, shown: of a chat template: the messages so far and their rendered text.
  """

  tokenizer: object
  prompt: np.ndarray
  restart: bool = False
  messages: tuple[dict, ...] = ()
  shown: str = ""

  def observe(self, turn: Turn, text: str) -> Conversation:
    """After a turn and the observation that answers it. The end token of a turn that was cut off is forced (loss mask 0)."""
    tok, stopped = self.tokenizer, turn.finish == "stop"
    if not isinstance(tok, ChatTokenizer):
      return dataclasses.replace(self, prompt=observation_prompt(tok, text, close_turn=not stopped))
    written = sampled_text(tok, turn)
    messages = (*self.messages, {"role": "assistant", "content": written}, tok.observation(text))
    shown = tok.render(messages)
    before = self.shown + tok.mask(written.removeprefix(tok.lead)) + (tok.decode(turn.sampled[-1:]) if stopped else "")
    restart = not shown.startswith(before)
    prompt = tok.encode_rendered(shown if restart else shown[len(before):])
    return Conversation(tok, prompt, restart, messages, shown)


def begin(tokenizer, task: str, *, system: str = "") -> Conversation:
  """Before the first turn: system text (if any), the task, then the header after which the policy writes."""
  if isinstance(tokenizer, ChatTokenizer):
    messages = tokenizer.opening(task, system)
    shown = tokenizer.render(messages)
    return Conversation(tokenizer, tokenizer.encode_rendered(shown), messages=messages, shown=shown)
  ids: list[int] = []
  if system:
    ids += [tokenizer.control("<|system|>"), *tokenizer.encode(system), tokenizer.control("<|end|>")]
  ids += [tokenizer.control("<|user|>"), *tokenizer.encode(task), tokenizer.control("<|end|>")]
  return Conversation(tokenizer, np.asarray([*ids, tokenizer.control("<|assistant|>")], np.int32))


def first_prompt(tokenizer, task: str, *, system: str = "") -> np.ndarray:
  """i32[n]: the prompt of `begin`."""
  return begin(tokenizer, task, system=system).prompt


def observation_prompt(tokenizer, text: str, *, close_turn: bool = False) -> np.ndarray:
  """i32[n]: an observation in the world's own layout, then the header after which the policy writes.

  Args:
    close_turn: the turn before was cut off, so its end token stands here (forced: loss mask 0).
  """
  end = tokenizer.control("<|end|>")
  body = tokenizer.encode(f"<tool_response>{text}</tool_response>")
  ids = [tokenizer.control("<|tool|>"), *body, end, tokenizer.control("<|assistant|>")]
  return np.asarray([end, *ids] if close_turn else ids, np.int32)


def sampled_text(tokenizer, turn: Turn) -> str:
  """The text of a sampled turn, without its stop token, after the thought's tag that a template may have opened for it."""
  ids = turn.sampled[:-1] if turn.finish == "stop" else turn.sampled
  return _lead(tokenizer) + tokenizer.decode([int(i) for i in ids])


def _lead(tokenizer) -> str:
  return tokenizer.lead if isinstance(tokenizer, ChatTokenizer) else ""


def demonstration_turns(tokenizer, task: str, turns, *, system: str = "") -> list[Turn]:
  """Turns of a scripted demonstration, laid out exactly as a rollout lays them out.

  Args:
    turns: pairs (text written, observation or None after the last).
  """
  end = tokenizer.end_of_turn
  now, out = begin(tokenizer, task, system=system), []
  for written, observation in turns:
    if lead := _lead(tokenizer):  # the template has opened the thought, so the policy writes the rest of it
      thought = re.match(r"\s*<(thinking|think)>(.*?)</\1>\s*", written, re.DOTALL)
      written = f"{thought[2].strip() if thought else ''}\n</{lead.strip()[1:]}\n\n{written[thought.end() if thought else 0:]}"
    ids = np.asarray([*tokenizer.encode(written), end], np.int32)
    out.append(Turn(now.prompt, ids, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32), restart=now.restart))
    if observation is not None:
      now = now.observe(out[-1], observation)
  return out
