"""The host-side types that travel through the project: queries, turns, trajectories, rollouts.

Everything here is numpy and plain Python. A trajectory keeps exactly the token ids that were
sampled, with their log-probabilities and weight versions (DESIGN: tokens in, tokens out).
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from typing import Any

import numpy as np

# How a trajectory ended. "failed" is infrastructure, not the policy: it takes part in no statistic.
STATUSES = ("finished", "max_turns", "context_full", "tool_budget", "failed")


@dataclasses.dataclass(frozen=True)
class Query:
  """One question with its reference answer.

  Attributes:
    id: stable name of the question; randomness and grouping hang on it.
    question: the text put to the main agent.
    answer: the reference answer (never shown to an agent).
    level: difficulty label as text ("1", "2", "3" in GAIA; hops in atlas).
    aliases: other spellings that are as right as `answer`.
    metadata: whatever else the reader kept (evidence path, annotator notes).
  """

  id: str
  question: str
  answer: str
  level: str = "1"
  aliases: tuple[str, ...] = ()
  metadata: dict[str, Any] = dataclasses.field(default_factory=dict, compare=False)


@dataclasses.dataclass
class Turn:
  """What was put before the policy, then what it sampled.

  Attributes:
    prompt: i32[n] tokens appended before sampling (first prompt, or the observation). Loss mask 0.
    sampled: i32[m] tokens the policy sampled, its stop token included. Loss mask 1.
    logprobs: f32[m] log-probability of each sampled token at sampling time.
    versions: i32[m] weight version that sampled each token.
    finish: "stop" (sampled its stop token) or "length" (cut by a budget).
    restart: `prompt` is not appended to what stood before but is all that the policy saw: a new segment.
  """

  prompt: np.ndarray
  sampled: np.ndarray
  logprobs: np.ndarray
  versions: np.ndarray
  finish: str = "stop"
  restart: bool = False


@dataclasses.dataclass
class Trajectory:
  """The token sequence of ONE agent in one rollout.

  Attributes:
    agent: name of the agent that sampled it.
    query_id, rollout, invocation: where it stands; invocation is -1 for the main agent, else
      the index of the call within its rollout.
    turn_index: main-agent turn in which the call was made (-1 for the main agent).
    task: the text the agent was given (the question, or the subquestion).
    turns: the turns in order.
    status: one of STATUSES.
    result: text of the final `<result>`, or None.
    format_ok: whether every turn obeyed the protocol and the last one is a result.
    events: per turn, a small dict for people (call, observation, error); never used for training.
    reward: filled in when it is scored; None before.
    components: the terms of the reward by name.
    weight: 1.0 takes part in the statistics; 0.0 does not (failed, or no valid subquestion).
    share: what alignment made of the weight (1/d_k; copies/D; 0 where it was dropped); None before.
  """

  agent: str
  query_id: str
  rollout: int
  invocation: int = -1
  turn_index: int = -1
  task: str = ""
  turns: list[Turn] = dataclasses.field(default_factory=list)
  status: str = "finished"
  result: str | None = None
  format_ok: bool = False
  events: list[dict] = dataclasses.field(default_factory=list)
  reward: float | None = None
  components: dict[str, float] = dataclasses.field(default_factory=dict)
  weight: float = 1.0
  share: float | None = None

  @property
  def segments(self) -> list[Trajectory]:
    """Itself, cut before every turn that restarts: sequences that do not see each other, of one reward and weight."""
    cuts = [0, *(i for i, t in enumerate(self.turns) if t.restart), len(self.turns)]
    if len(cuts) == 2:
      return [self]
    return [dataclasses.replace(self, turns=self.turns[a:b]) for a, b in itertools.pairwise(cuts)]

  @property
  def tokens(self) -> np.ndarray:
    """i32[T]: prompt and sampled tokens of all turns in order."""
    return _cat([part for t in self.turns for part in (t.prompt, t.sampled)], np.int32)

  @property
  def mask(self) -> np.ndarray:
    """bool[T]: True exactly on sampled tokens."""
    parts = []
    for t in self.turns:
      parts += [np.zeros(len(t.prompt), bool), np.ones(len(t.sampled), bool)]
    return _cat(parts, bool)

  @property
  def logprobs(self) -> np.ndarray:
    """f32[T]: sampling-time log-probabilities; 0 where the mask is False."""
    parts = []
    for t in self.turns:
      parts += [np.zeros(len(t.prompt), np.float32), t.logprobs]
    return _cat(parts, np.float32)

  @property
  def versions(self) -> np.ndarray:
    """i32[T]: weight version of each sampled token; -1 where the mask is False."""
    parts = []
    for t in self.turns:
      parts += [np.full(len(t.prompt), -1, np.int32), t.versions]
    return _cat(parts, np.int32)

  @property
  def num_sampled(self) -> int:
    return sum(len(t.sampled) for t in self.turns)

  def __len__(self) -> int:
    return sum(len(t.prompt) + len(t.sampled) for t in self.turns)

  def oldest_version(self) -> int:
    """Smallest weight version among the trained tokens (staleness counts from it)."""
    return min((int(t.versions.min()) for t in self.turns if len(t.versions)), default=-1)


@dataclasses.dataclass
class Rollout:
  """One attempt of the whole system at a query: one main trajectory and its sub trajectories."""

  query: Query
  index: int
  main: Trajectory
  subs: list[Trajectory] = dataclasses.field(default_factory=list)
  correct: bool = False

  @property
  def trajectories(self) -> list[Trajectory]:
    return [self.main, *self.subs]


def stable_hash(text: str) -> int:
  """31-bit hash of a text, the same in every process and release (unlike `hash`)."""
  return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") & 0x7FFFFFFF


def _cat(parts: list[np.ndarray], dtype) -> np.ndarray:
  return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype)
