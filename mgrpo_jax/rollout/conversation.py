"""Tokens in, tokens out: what was sampled is what is trained.

A conversation is a list of turns; text is only ever turned into tokens for what the policy did NOT
write (prompts and observations). What it sampled is kept as ids and never encoded again.
"""

from __future__ import annotations

import numpy as np

from mgrpo_jax.trajectory import Turn


def first_prompt(tokenizer, task: str, *, system: str = "") -> np.ndarray:
  """i32[n]: system text (if any), the task, then the header after which the policy writes."""
  ids: list[int] = []
  if system:
    ids += [tokenizer.control("<|system|>"), *tokenizer.encode(system), tokenizer.control("<|end|>")]
  ids += [tokenizer.control("<|user|>"), *tokenizer.encode(task), tokenizer.control("<|end|>")]
  return np.asarray([*ids, tokenizer.control("<|assistant|>")], np.int32)


def observation_prompt(tokenizer, text: str, *, close_turn: bool = False) -> np.ndarray:
  """i32[n]: an observation, then the header after which the policy writes.

  Args:
    close_turn: the turn before was cut off, so its end token stands here (forced: loss mask 0).
  """
  end = tokenizer.control("<|end|>")
  body = tokenizer.encode(f"<tool_response>{text}</tool_response>")
  ids = [tokenizer.control("<|tool|>"), *body, end, tokenizer.control("<|assistant|>")]
  return np.asarray([end, *ids] if close_turn else ids, np.int32)


def sampled_text(tokenizer, turn: Turn) -> str:
  """The text of a sampled turn, without its stop token."""
  ids = turn.sampled[:-1] if turn.finish == "stop" else turn.sampled
  return tokenizer.decode([int(i) for i in ids])


def demonstration_turns(tokenizer, task: str, turns, *, system: str = "") -> list[Turn]:
  """Turns of a scripted demonstration, laid out exactly as a rollout lays them out.

  Args:
    turns: pairs (text written, observation or None after the last).
  """
  end = tokenizer.control("<|end|>")
  prompt, out = first_prompt(tokenizer, task, system=system), []
  for written, observation in turns:
    ids = np.asarray([*tokenizer.encode(written), end], np.int32)
    out.append(Turn(prompt, ids, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32)))
    if observation is not None:
      prompt = observation_prompt(tokenizer, observation)
  return out
