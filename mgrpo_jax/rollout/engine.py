"""The sampling engine of ONE agent: slots with a KV cache, fixed prefill shapes, decoding in a compiled loop.

A conversation takes a slot at its first turn and keeps it, with its cache, until it is closed. A turn appends
tokens (prompt or observation), then samples until the stop token or a budget. What a turn gives depends on its own
conversation alone, bit for bit: not on the slot, the neighbours, the order of submission or the decode chunk. So
every shape is fixed beforehand, and a turn's prefill is cut by its own length only. Conversations that begin with the
same prompt (the K rollouts of a question) prefill it once: the others get a copy of its cache.

Letters: S cache slots, R rows of one prefill call, P tokens of one bucket, C iterations of one decode call.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from mgrpo_jax.policy import logprobs, lora, sharding
from mgrpo_jax.policy.transformer import Transformer


@dataclasses.dataclass(frozen=True)
class TurnRequest:
  """One turn to be sampled.

  Attributes:
    conversation: name of the trajectory; the engine keeps its tokens and cache between turns.
    key: uint32[2], the trajectory's key data. The token at position p of the trajectory, sampled in turn n, uses
      fold_in(fold_in(key, n), p), and nothing else is random.
    turn: index of the turn in its trajectory.
    tokens: i32[n], what was appended to the conversation since its last sampled token.
    max_new_tokens: most tokens to sample, the stop token included.
    temperature: 0 takes the most likely token.
  """

  conversation: str
  key: np.ndarray
  turn: int
  tokens: np.ndarray
  max_new_tokens: int
  temperature: float = 1.0


@dataclasses.dataclass(frozen=True)
class FinishedTurn:
  """A sampled turn.

  Attributes:
    tokens: i32[m] sampled tokens, the stop token included if it was sampled.
    logprobs: f32[m], of the temperature-scaled distribution (at temperature 0: of the unscaled one).
    versions: i32[m] weight version that sampled each token.
    finish: "stop"; "length": cut by max_new_tokens or by the end of the context; "context": the appended tokens
      leave no room for even one more, nothing was sampled, and the conversation stands as before the request.
  """

  id: int
  conversation: str
  tokens: np.ndarray
  logprobs: np.ndarray
  versions: np.ndarray
  finish: str


class Engine(Protocol):
  """What a driver may expect of any engine; tests/test_engine.py holds the conformance test."""

  version: int

  def submit(self, request: TurnRequest) -> int:
    """Queues a turn and returns its id; ids count up. ValueError for a request that can never be served."""

  def dispatch(self) -> None:
    """Starts the next piece of work on the device without waiting for it."""

  def fetch(self) -> list[FinishedTurn]:
    """Waits for what `dispatch` started; the turns that ended, by id."""

  def step(self) -> list[FinishedTurn]:
    """`dispatch` and `fetch`. Waits for its own device only, never for another agent."""

  def close(self, conversation: str) -> None:
    """Forgets a conversation and frees its slot; a turn of it in flight is dropped. Unknown names are fine."""

  def set_weights(self, params, version: int) -> None:
    """New weights from the next turn on. Turns being sampled end on the old ones, and no turn starts before."""

  @property
  def pending(self) -> int:
    """Turns submitted and not yet returned."""


@dataclasses.dataclass(frozen=True)
class EngineConfig:
  """The fixed shapes.

  Attributes:
    stop_tokens: each of them ends a turn.
    slots: S, conversations that are held at once; more wait in the order of submission.
    max_length: T, tokens of a conversation at most, sampled ones included.
    prefill_rows: R.
    buckets: the sizes P of a prefill chunk, ascending. A turn longer than the last takes several chunks.
    decode_chunk: C; a longer one saves trips to the host, a shorter one lets finished turns out sooner.
  """

  stop_tokens: tuple[int, ...]
  slots: int = 64
  max_length: int = 256
  prefill_rows: int = 8
  buckets: tuple[int, ...] = (16, 32, 64, 128)
  decode_chunk: int = 8

  def __post_init__(self):
    for name in ("slots", "max_length", "prefill_rows", "decode_chunk"):
      if getattr(self, name) < 1:
        raise ValueError(f"engine.{name} is {getattr(self, name)}; it must be at least 1.")
    if not self.buckets or list(self.buckets) != sorted(set(self.buckets)) or self.buckets[0] < 1:
      raise ValueError(f"engine.buckets {self.buckets} must be ascending sizes of at least 1.")


@dataclasses.dataclass
class EngineStats:
  """Counters since the engine was made (`decode_iterations` x slots is the room for `sampled_tokens`)."""

  turns: int = 0
  sampled_tokens: int = 0
  prefill_tokens: int = 0
  prefill_padded: int = 0
  copied_tokens: int = 0
  decode_iterations: int = 0
  steps: int = 0
  slots_used: int = 0


@dataclasses.dataclass
class _Conversation:
  tokens: list[int]  # all of them; the cache holds the first `cached`
  cached: int = 0
  prompt: bytes | None = None  # its first turn's tokens, while the cache holds them as their prefill wrote them
  slot: int | None = None
  turn: _Turn | None = None


@dataclasses.dataclass
class _Turn:
  id: int
  request: TurnRequest
  conversation: _Conversation
  appended: np.ndarray
  dropped: bool = False
  tokens: list[int] = dataclasses.field(default_factory=list)
  logprobs: list[float] = dataclasses.field(default_factory=list)


class LocalEngine:
  """The engine on this process's devices.

  Args:
    model: what to sample from.
    params: its weights; copied onto `mesh`, so the caller may donate them at any time.
    copy: False uses weights that lie right as they are: no second copy beside the learner's. The caller may donate them
      only while no turn is being sampled, and then hands over new ones before the next.
    frozen: weights beside them that never change (the base of adapters): on `mesh` already, and not copied.
    config: the fixed shapes.
    mesh: the agent's mesh (default: the first device). Slots are split over it where the number divides.
    version: weight version of `params`.
  """

  def __init__(self, model: Transformer, params, config: EngineConfig, *, mesh=None, version: int = 0, frozen=None,
               copy: bool = True):
    if not config.stop_tokens or not all(0 <= t < model.config.vocab_size for t in config.stop_tokens):
      raise ValueError(f"engine.stop_tokens {config.stop_tokens} must be ids of the vocabulary of {model.config.vocab_size} tokens.")
    self.config, self.stats, self.version = config, EngineStats(), version
    self._model = model
    self._mesh = mesh if mesh is not None else sharding.make_mesh({"data": 1})
    self._frozen, self._copy = frozen, copy
    self._params = self._placed(params)
    places = _state_shardings(model, config, self._mesh)
    self._prefill, self._copy_prompt, self._begin, self._decode, new_state = _programs(model, config, places)
    self._state = new_state()
    self._queue: collections.deque[_Turn] = collections.deque()
    self._running: dict[int, _Turn] = {}  # by slot
    self._free = list(range(config.slots))
    self._conversations: dict[str, _Conversation] = {}
    self._prompts: dict[bytes, _Conversation] = {}  # who holds a prompt that others may copy
    self._done: list[FinishedTurn] = []
    self._in_flight = None
    self._next_weights = None
    self._next_id = 0

  # ---- the interface

  def submit(self, request: TurnRequest) -> int:
    """See `Engine`; ValueError says what is wrong with the request."""
    conversation = self._conversations.get(request.conversation)
    appended = self._checked(request, conversation)
    if conversation is None:
      conversation = self._conversations[request.conversation] = _Conversation([])
    turn = conversation.turn = _Turn(self._next_id, request, conversation, appended)
    self._next_id += 1
    self._queue.append(turn)
    return turn.id

  def dispatch(self) -> None:
    if self._in_flight is not None:
      raise RuntimeError("dispatch was called twice; fetch what the first one started.")
    if self._next_weights is not None and not self._running:
      self._swap_weights()
    started = self._start_turns() if self._next_weights is None else []
    own, followers = self._share_prompts(started)
    self._prefill_turns(own)
    for part in _parts(followers, self.config.prefill_rows):
      self._run_copy(part)
    begun = self._begin_turns(started)
    decoded = None
    if self._running:
      self._state, decoded = self._decode(self._params, self._state)
    self._in_flight = (begun, decoded)
    self.stats.steps += 1
    self.stats.slots_used = max(self.stats.slots_used, self.config.slots - len(self._free))

  def fetch(self) -> list[FinishedTurn]:
    if self._in_flight is None:
      raise RuntimeError("fetch was called before dispatch.")
    (begun, decoded), self._in_flight = self._in_flight, None
    outputs, decoded = jax.device_get(([out for _, out in begun], decoded))
    for (turns, _), (tokens, probs) in zip(begun, outputs, strict=True):
      for row, turn in enumerate(turns):
        turn.tokens.append(int(tokens[row]))
        turn.logprobs.append(float(probs[row]))
    if decoded is not None:
      self._collect(*decoded)
    done, self._done = sorted(self._done, key=lambda t: t.id), []
    return done

  def step(self) -> list[FinishedTurn]:
    self.dispatch()
    return self.fetch()

  def close(self, conversation: str) -> None:
    found = self._conversations.pop(conversation, None)
    if found is None:
      return
    if found.turn is None:
      self._release(found)
    elif found.turn in self._queue:
      self._queue.remove(found.turn)
      self._release(found)
    else:
      found.turn.dropped = True  # the slot is freed when the loop on the device has let go of it

  def set_weights(self, params, version: int) -> None:
    self._next_weights = (self._placed(params), version)
    if not self._running:
      self._swap_weights()

  def _placed(self, params):
    return lora.join(self._frozen, sharding.place(params, self._mesh, self._model.rules, copy=self._copy))

  @property
  def pending(self) -> int:
    return len(self._queue) + sum(not t.dropped for t in self._running.values()) + len(self._done)

  def warm_up(self) -> None:
    """Compiles every program; afterwards no request, temperature or length compiles anything."""
    for bucket in self.config.buckets:
      self._run_prefill([], bucket)
    self._run_copy([])
    self._run_begin([])
    self._state, out = self._decode(self._params, self._state)
    jax.block_until_ready(out)

  # ---- inside

  def _checked(self, request, conversation) -> np.ndarray:
    name = request.conversation
    tokens = np.asarray(request.tokens, np.int32)
    if conversation is not None and conversation.turn is not None:
      raise ValueError(f"conversation {name!r} has a turn in flight; wait for it before the next.")
    if tokens.ndim != 1 or (not len(tokens) and conversation is None):
      raise ValueError(f"conversation {name!r}: a first turn needs a list of at least one token.")
    vocab = self._model.config.vocab_size
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab:
      raise ValueError(f"conversation {name!r}: tokens must be in 0..{vocab - 1}; was it another tokenizer?")
    if request.max_new_tokens < 1:
      raise ValueError(f"conversation {name!r}: max_new_tokens is {request.max_new_tokens}; ask for 1 or more.")
    if not (np.isfinite(request.temperature) and request.temperature >= 0):
      raise ValueError(f"conversation {name!r}: temperature {request.temperature} must be 0 or a positive number.")
    if np.shape(request.key) != (2,):
      raise ValueError(f"conversation {name!r}: key must be two uint32 numbers (jax.random.key_data).")
    return tokens

  def _start_turns(self) -> list[_Turn]:
    """Takes turns off the queue in order; one that has no slot waits, and those behind it that hold one go on."""
    started, waiting = [], collections.deque()
    for turn in self._queue:
      conversation = turn.conversation
      if len(conversation.tokens) + len(turn.appended) >= self.config.max_length:
        self._finish(turn, "context")
      elif conversation.slot is None and not self._free:
        waiting.append(turn)
      else:
        if conversation.slot is None:
          conversation.slot = self._free.pop(0)
        conversation.tokens.extend(turn.appended.tolist())
        self._running[conversation.slot] = turn
        started.append(turn)
    self._queue = waiting
    return started

  def _share_prompts(self, turns: list[_Turn]) -> tuple[list[_Turn], list[tuple[_Conversation, _Conversation]]]:
    """(turns that must be prefilled, pairs of a conversation and the one whose prompt it can copy)."""
    own, followers = [], []
    for turn in turns:
      conversation = turn.conversation
      if conversation.cached or len(conversation.tokens) > len(turn.appended):  # no first turn, or after a change of weights
        own.append(turn)
        continue
      conversation.prompt = turn.appended.tobytes()
      donor = self._prompts.setdefault(conversation.prompt, conversation)
      if donor is conversation:
        own.append(turn)
      else:
        followers.append((conversation, donor))
    return own, followers

  def _prefill_turns(self, turns: list[_Turn]) -> None:
    """Brings the caches of started turns up to their last token."""
    todo = [(turn, self._chunks(turn.conversation)) for turn in turns]
    while todo:
      by_bucket = collections.defaultdict(list)
      for turn, chunks in todo:
        start, stop, bucket = chunks.pop(0)
        by_bucket[bucket].append((turn.conversation, start, stop))
      todo = [(turn, chunks) for turn, chunks in todo if chunks]
      for bucket, rows in sorted(by_bucket.items()):
        for part in _parts(rows, self.config.prefill_rows):
          self._run_prefill(part, bucket)

  def _begin_turns(self, turns: list[_Turn]):
    """Samples the first token of started turns: [(turns, (tokens, logprobs))]."""
    for turn in turns:
      turn.conversation.cached = len(turn.conversation.tokens)
    return [(part, self._run_begin(part)) for part in _parts(turns, self.config.prefill_rows)]

  def _chunks(self, conversation) -> list[tuple[int, int, int]]:
    """(start, stop, bucket) of what the cache lacks: whole largest buckets, then the smallest that holds the rest."""
    start, end, largest = conversation.cached, len(conversation.tokens), self.config.buckets[-1]
    chunks = []
    while end - start > largest:
      chunks.append((start, start + largest, largest))
      start += largest
    return chunks + [(start, end, next(b for b in self.config.buckets if b >= end - start))]

  def _run_prefill(self, rows, bucket: int) -> None:
    """rows: (conversation, start, stop); the other rows of the call are empty."""
    host = _prefill_rows(self.config, bucket)
    for i, (conversation, start, stop) in enumerate(rows):
      tokens = conversation.tokens
      host["slot"][i], host["start"][i], host["valid"][i] = conversation.slot, start, stop - start
      host["tokens"][i, : stop - start] = tokens[start:stop]
      host["prev"][i] = tokens[start - 1] if start else -1
      host["prompt"][i] = conversation.prompt is not None and not conversation.cached
    self.stats.prefill_tokens += int(host["valid"].sum())
    self.stats.prefill_padded += host["tokens"].size if rows else 0
    self._state = self._prefill(self._params, self._state, host)

  def _run_copy(self, rows) -> None:
    """rows: (conversation, the one that holds its prompt)."""
    to, source = np.full(self.config.prefill_rows, self.config.slots, np.int32), np.zeros(self.config.prefill_rows, np.int32)
    for i, (conversation, donor) in enumerate(rows):
      to[i], source[i] = conversation.slot, donor.slot
      self.stats.copied_tokens += len(conversation.tokens)
    self._state = self._copy_prompt(self._state, to, source)

  def _run_begin(self, turns: Sequence[_Turn]):
    host = _begin_rows(self.config)
    for i, turn in enumerate(turns):
      tokens, request = turn.conversation.tokens, turn.request
      host["slot"][i], host["length"][i], host["before"][i] = turn.conversation.slot, len(tokens), tokens[-1]
      host["key"][i], host["turn"][i], host["temperature"][i] = request.key, request.turn, request.temperature
      host["budget"][i] = min(request.max_new_tokens, self.config.max_length - len(tokens))
    self._state, out = self._begin(self._params, self._state, host)
    return out

  def _collect(self, tokens, probs, emitted, active, iterations) -> None:
    """Takes in one decode call: tokens i32[C, S], log-probs f32[C, S], emitted i32[S], active bool[S]."""
    self.stats.decode_iterations += int(iterations)
    for slot, turn in list(self._running.items()):
      n = int(emitted[slot])
      turn.tokens.extend(tokens[:n, slot].tolist())
      turn.logprobs.extend(probs[:n, slot].tolist())
      # Each iteration writes the token before the one it samples, so the last sampled one is not cached yet.
      turn.conversation.cached += n
      if not active[slot]:
        del self._running[slot]
        turn.conversation.tokens.extend(turn.tokens)
        self._finish(turn, "stop" if turn.tokens[-1] in self.config.stop_tokens else "length")

  def _finish(self, turn: _Turn, finish: str) -> None:
    turn.conversation.turn = None
    self.stats.turns += 1
    self.stats.sampled_tokens += len(turn.tokens)
    if turn.dropped:
      self._release(turn.conversation)
      return
    n = len(turn.tokens)
    self._done.append(FinishedTurn(
      turn.id, turn.request.conversation, np.asarray(turn.tokens, np.int32),
      np.asarray(turn.logprobs, np.float32), np.full(n, self.version, np.int32), finish))

  def _release(self, conversation) -> None:
    if conversation.slot is not None:
      self._free.append(conversation.slot)
      conversation.slot = None
    if self._prompts.get(conversation.prompt) is conversation:
      del self._prompts[conversation.prompt]

  def _swap_weights(self) -> None:
    (self._params, self.version), self._next_weights = self._next_weights, None
    self._prompts.clear()
    for conversation in self._conversations.values():
      conversation.cached, conversation.prompt = 0, None  # what old weights wrote is worth nothing: prefill everything at the next turn


# ---- the compiled programs


def abstract_state(model: Transformer, config: EngineConfig, mesh) -> dict:
  """The shapes and places of an engine's device state; `mesh` may be an AbstractMesh."""
  return _programs(model, config, _state_shardings(model, config, mesh))[-1].trace().out_info


def lower(model: Transformer, config: EngineConfig, params, mesh) -> dict[str, jax.stages.Lowered]:
  """The programs of an engine (prefill: of the largest bucket) for abstract weights."""
  prefill, _, _, decode, _ = _programs(model, config, _state_shardings(model, config, mesh))
  state = abstract_state(model, config, mesh)
  return {"prefill": prefill.lower(params, state, _prefill_rows(config, config.buckets[-1])), "decode": decode.lower(params, state)}


def _parts(rows: list, size: int) -> list[list]:
  return [rows[i : i + size] for i in range(0, len(rows), size)]


def _prefill_rows(config: EngineConfig, bucket: int) -> dict[str, np.ndarray]:
  """The host's part of a prefill call in which no row is used."""
  r = config.prefill_rows
  return {
    "slot": np.full(r, config.slots, np.int32), "tokens": np.zeros((r, bucket), np.int32), "prev": np.full(r, -1, np.int32),
    "start": np.zeros(r, np.int32), "valid": np.zeros(r, np.int32), "prompt": np.zeros(r, bool),
  }


def _begin_rows(config: EngineConfig) -> dict[str, np.ndarray]:
  """The host's part of a call that begins no turn."""
  r = config.prefill_rows
  return {
    "slot": np.full(r, config.slots, np.int32), "length": np.zeros(r, np.int32), "before": np.zeros(r, np.int32),
    "key": np.zeros((r, 2), np.uint32), "turn": np.zeros(r, np.int32), "temperature": np.ones(r, np.float32),
    "budget": np.ones(r, np.int32),
  }


def _state_shardings(model, config: EngineConfig, mesh):
  """Where the device state lies: slots over the data axes if they divide, key/value heads as the weights are."""
  rules = model.rules
  split = config.slots % sharding.axis_size("slots", mesh, rules) == 0
  slots = "slots" if split else None
  c = model.config
  stacked = model.cache_axis  # then layers come first
  cache_shape = (c.num_layers,) * stacked + (config.slots, c.num_kv_heads, config.max_length, c.head_dim)
  cache = sharding.array_sharding((None,) * stacked + (slots, "kv_heads", None, None), cache_shape, mesh, rules, "the cache")
  per_slot = sharding.array_sharding((slots,), (config.slots,), mesh, rules)
  return cache, per_slot, sharding.array_sharding((), (), mesh, rules)


@functools.lru_cache(maxsize=16)
def _programs(model: Transformer, config: EngineConfig, places):
  """(prefill, copy_prompt, begin, decode, new_state), jitted once for all engines of the same shapes on the same mesh.

  The device state: cache; per slot `hidden` and `prompt_hidden` (the model's output at the last token prefilled, and at
  the last one of the first turn's prompt), `last` (sampled, not yet in the cache), `before` (the token before it),
  `length` (tokens in the cache), `key`, `temperature`, `left` (tokens that may still be sampled), `active`.
  """
  slots, chunk, width = config.slots, config.decode_chunk, model.config.embed_dim
  cache_place, slot_place, replicated = places
  names = ("hidden", "prompt_hidden", "last", "before", "length", "key", "temperature", "left", "active")
  state_places = {n: slot_place for n in names} | {"cache": cache_place}

  def stops(token):
    return functools.reduce(jnp.logical_or, [token == t for t in config.stop_tokens])

  def new_state():
    return {
      "cache": model.empty_cache(slots, config.max_length),
      "hidden": jnp.zeros((slots, width)), "prompt_hidden": jnp.zeros((slots, width)),
      "last": jnp.zeros(slots, jnp.int32), "before": jnp.zeros(slots, jnp.int32),
      "length": jnp.zeros(slots, jnp.int32), "key": jnp.zeros((slots, 2), jnp.uint32),
      "temperature": jnp.ones(slots), "left": jnp.zeros(slots, jnp.int32), "active": jnp.zeros(slots, bool),
    }

  def rows_of(cache, slot):
    at = (slice(None),) * model.cache_axis + (slot,)
    return jax.tree.map(lambda x: x.at[at].get(mode="clip"), cache)

  def with_rows(cache, slot, new):
    at = (slice(None),) * model.cache_axis + (slot,)
    return jax.tree.map(lambda old, x: old.at[at].set(x, mode="drop"), cache, new)

  def prefill(params, state, rows):
    slot, valid = rows["slot"], rows["valid"]
    hidden, cache = model.forward_cached(params, rows["tokens"], rows["prev"], rows["start"], valid, rows_of(state["cache"], slot))
    hidden = jnp.take_along_axis(hidden, jnp.maximum(valid - 1, 0)[:, None, None], axis=1)[:, 0]
    prompt = jnp.where(rows["prompt"], slot, slots)
    return state | {"cache": with_rows(state["cache"], slot, cache), "hidden": state["hidden"].at[slot].set(hidden, mode="drop"),
                    "prompt_hidden": state["prompt_hidden"].at[prompt].set(hidden, mode="drop")}

  def copy_prompt(state, to, source):
    hidden = state["prompt_hidden"].at[source].get(mode="clip")
    same = {n: state[n].at[to].set(hidden, mode="drop") for n in ("hidden", "prompt_hidden")}
    return state | same | {"cache": with_rows(state["cache"], to, rows_of(state["cache"], source))}

  def begin(params, state, rows):
    key = jax.vmap(lambda k, n: jax.random.key_data(jax.random.fold_in(_key(k), n)))(rows["key"], rows["turn"])
    hidden = state["hidden"].at[rows["slot"]].get(mode="clip")
    token, logprob = _sample(model.logits(params, hidden), key, rows["length"], rows["temperature"])
    left = rows["budget"] - 1
    new = {n: rows[n] for n in ("before", "length", "temperature")}
    new |= {"last": token, "key": key, "left": left, "active": ~stops(token) & (left > 0)}
    return state | {n: state[n].at[rows["slot"]].set(x, mode="drop") for n, x in new.items()}, (token, logprob)

  def one_token(params, carry):
    i, state, tokens, logprobs_, emitted = carry
    active = state["active"]
    hidden, cache = model.forward_cached(
      params, state["last"][:, None], state["before"], state["length"], active.astype(jnp.int32), state["cache"])
    length = state["length"] + active
    token, logprob = _sample(model.logits(params, hidden[:, 0]), state["key"], length, state["temperature"])
    left = state["left"] - active
    state = state | {
      "cache": cache, "length": length, "left": left,
      "last": jnp.where(active, token, state["last"]), "before": jnp.where(active, state["last"], state["before"]),
      "active": active & ~stops(token) & (left > 0),
    }
    return i + 1, state, tokens.at[i].set(token), logprobs_.at[i].set(logprob), emitted + active

  def decode(params, state):
    carry = (jnp.int32(0), state, jnp.zeros((chunk, slots), jnp.int32), jnp.zeros((chunk, slots)),
             jnp.zeros(slots, jnp.int32))
    more = lambda c: (c[0] < chunk) & jnp.any(c[1]["active"])  # noqa: E731
    i, state, tokens, logprobs_, emitted = jax.lax.while_loop(more, functools.partial(one_token, params), carry)
    return state, (tokens, logprobs_, emitted, state["active"], i)

  jit = functools.partial(jax.jit, donate_argnums=1, out_shardings=(state_places, replicated))
  return (jax.jit(prefill, donate_argnums=1, out_shardings=state_places), jax.jit(copy_prompt, donate_argnums=0, out_shardings=state_places),
          jit(begin), jit(decode), jax.jit(new_state, out_shardings=state_places))


def _key(data):
  return jax.random.wrap_key_data(data, impl="threefry2x32")


def _sample(logits, key, position, temperature):
  """logits f32[N, V], key u32[N, 2], position i32[N], temperature f32[N] -> token i32[N], its log-prob f32[N]."""
  draw = lambda k, p: jax.random.gumbel(jax.random.fold_in(_key(k), p), logits.shape[-1:])  # noqa: E731
  noise = jax.vmap(draw)(key, position) * temperature[:, None]
  token = jnp.argmax(logits + noise, axis=-1).astype(jnp.int32)
  return token, logprobs.logprobs_of(logits, token, temperature)[0]
