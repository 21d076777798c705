"""Log-probabilities and entropies of given tokens, without ever holding [B, T, V]."""

from __future__ import annotations

import jax
import jax.numpy as jnp

# The largest block of logits held at once, in numbers (64 MiB of float32).
MAX_LOGITS = 2**24
LARGE = 16  # a vocabulary of so many times the width is worth sorting positions for


def token_logprobs(model, params, tokens, positions, segment_ids, *, temperature=1.0, chunk: int | None = None, wanted=None):
  """log p(token | tokens before it in its segment) and the entropy of that prediction.

  The logits are computed `chunk` positions at a time and again in the backward pass.

  Args:
    model: a `transformer.Transformer`.
    tokens, positions, segment_ids: i32[B, T] as in `Transformer.forward`; segment -1 is padding.
    temperature: traced scalar, the sampler's; 0 (greedy) counts as 1, as it does in the sampler.
    chunk: positions per block; None takes the largest power of two whose logits stay below MAX_LOGITS numbers.
    wanted: bool[B, T], the tokens whose numbers will be used (those sampled); None: all. Where the vocabulary is a large
      part of the model, each row's wanted tokens are moved to its front and blocks that have none are left out: prompts,
      observations and padding cost nothing here, and come back as 0.

  Returns:
    (logprobs f32[B, T], entropy f32[B, T]), aligned to the predicted token; 0 at the first token of a segment
    and on padding.
  """
  rows, length = tokens.shape
  hidden = model.forward(params, tokens, positions, segment_ids)
  hidden, targets = hidden[:, :-1], tokens[:, 1:]
  chunk = chunk or block_size(rows, length, model.config.vocab_size)

  @jax.checkpoint
  def block(params, h, y):
    return logprobs_of(model.logits(params, h), y, temperature)

  known = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] >= 0)
  pieces = -(-(length - 1) // chunk)
  sparse = wanted is not None and pieces > 1 and model.config.vocab_size >= LARGE * model.config.embed_dim
  if sparse:
    known &= wanted[:, 1:]
    order = jnp.argsort(~known, axis=1, stable=True)
    targets, hidden = jnp.take_along_axis(targets, order, 1), jnp.take_along_axis(hidden, order[..., None], 1)

  if pieces <= 1:
    logprobs, entropy = block(params, hidden, targets)
  else:
    def split(x):  # [B, T-1, ...] -> [pieces, B, chunk, ...]
      x = jnp.pad(x, ((0, 0), (0, pieces * chunk - x.shape[1])) + ((0, 0),) * (x.ndim - 2))
      return jnp.moveaxis(x.reshape(rows, pieces, chunk, *x.shape[2:]), 1, 0)

    def join(x):
      return jnp.moveaxis(x, 0, 1).reshape(rows, pieces * chunk)[:, : length - 1]

    def piece(xs):
      at, h, y = xs
      if not sparse:
        return block(params, h, y)
      return jax.lax.cond(at * chunk < most, block, lambda *_: (jnp.zeros(y.shape),) * 2, params, h, y)

    most = jnp.max(jnp.sum(known, axis=1))
    outputs = jax.lax.map(piece, (jnp.arange(pieces), split(hidden), split(targets)))
    logprobs, entropy = map(join, outputs)
  if sparse:
    back = jnp.argsort(order, axis=1)
    logprobs, entropy = (jnp.take_along_axis(x, back, 1) for x in (logprobs, entropy))
  return tuple(jnp.pad(jnp.where(known, x, 0.0), ((0, 0), (1, 0))) for x in (logprobs, entropy))


def logprobs_of(logits, tokens, temperature):
  """logits f32[..., V], tokens i32[...], temperature scalar or [...] -> (log-prob, entropy), each f32[...].

  Shared by the sampler and the trainer, so that both mean the same distribution.
  """
  temperature = jnp.asarray(temperature, jnp.float32)
  scale = jnp.where(temperature > 0, temperature, 1.0)
  logits = logits / (scale[..., None] if scale.ndim else scale)
  logits = logits - jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
  exp = jnp.exp(logits)
  total = jnp.sum(exp, axis=-1)
  chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
  entropy = jnp.log(total) - jnp.sum(exp * logits, axis=-1) / total
  return chosen - jnp.log(total), entropy


def block_size(rows: int, length: int, vocab_size: int) -> int:
  """Positions per block so that [rows, positions, vocab_size] stays below MAX_LOGITS; all of them if they fit."""
  chunk = 1 << max(0, (MAX_LOGITS // (rows * vocab_size)).bit_length() - 1)
  return max(1, min(chunk, length))
