"""Causal attention: dense while it is small, in blocks where [T, T] would not fit, splash attention on TPUs.

Shapes: B rows, T tokens, H heads, G key/value heads, D head size; r = H / G heads share a key; cached: R rows,
P new tokens, T cache length. q [B, T, H, D]; k, v [B, G, T, D] (heads outside, as the cache keeps them).

Blocks: the softmax over keys is taken piece by piece with a running maximum and sum; the backward pass makes each
piece again from the log of that sum (Dao et al., FlashAttention, arXiv 2205.14135, algorithms 2 and 4).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from mgrpo_jax.policy import sharding

KINDS = ("auto", "dense", "blockwise", "splash")
DENSE_LENGTH = 1024  # up to here "auto" and the cache take the dense form, which small models run faster
BLOCK = 512

_LOWEST = float(jnp.finfo(jnp.float32).min)


def attend(q, k, v, *, segment_ids, kind: str = "auto", mesh=None, rules=sharding.DEFAULT_RULES) -> jax.Array:
  """Attention of packed rows, for training: a token sees the earlier tokens of its segment and itself.

  Args:
    segment_ids: i32[B, T]; -1 is padding, which sees padding.
    kind: one of KINDS; "auto" is dense up to DENSE_LENGTH, then splash on a TPU and blockwise elsewhere.
    mesh, rules: where the program will run. Splash needs them: the compiler cannot split a kernel by itself.

  Returns:
    [B, T, H, D] in v's type.
  """
  length = q.shape[1]
  if kind == "auto":
    kind = "dense" if length <= DENSE_LENGTH else "splash" if _platform(mesh) == "tpu" else "blockwise"
  if kind == "dense":
    index = jnp.arange(length)
    mask = (index[:, None] >= index) & (segment_ids[:, :, None] == segment_ids[:, None, :])
    return dense(q, k, v, mask)
  pad = -length % BLOCK
  q = jnp.pad(q, ((0, 0), (0, pad), (0, 0), (0, 0)))
  k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, pad), (0, 0))) for x in (k, v))
  segment_ids = jnp.pad(segment_ids, ((0, 0), (0, pad)), constant_values=-1)
  if kind == "splash":
    return splash(q, k, v, segment_ids, mesh=mesh, rules=rules)[:, :length]
  out, _ = _blockwise(_group(q, k), k, v, segment_ids)
  return _ungroup(out)[:, :length].astype(v.dtype)


def attend_cached(q, k, v, positions) -> jax.Array:
  """Attention of the next tokens to a cache. q [R, P, H, D], k, v [R, G, T, D], positions i32[R, P] -> [R, P, H, D].

  A token at position p sees the keys 0..p. A long cache is read only as far as the longest row has come; what a row
  gets does not depend on that, bit for bit: a block without a visible key multiplies by one and adds zero.
  """
  length = k.shape[2]
  if length <= DENSE_LENGTH:
    return dense(q, k, v, jnp.arange(length) <= positions[:, :, None])
  grouped = _group(q, k)

  def step(i, carry):
    start = jnp.minimum(i * BLOCK, length - BLOCK)  # the last block overlaps the one before, and leaves its keys out
    index = start + jnp.arange(BLOCK)
    mask = (index <= positions[:, :, None]) & (index >= i * BLOCK)
    return _accumulate(carry, grouped, _slice(k, start), _slice(v, start), mask)

  blocks = jnp.minimum(jnp.max(positions) // BLOCK + 1, -(-length // BLOCK))
  _, total, out = jax.lax.fori_loop(0, blocks, step, _empty(grouped))
  return _ungroup(out / total[..., None]).astype(v.dtype)


def dense(q, k, v, mask):
  """q [B, P, H, D], k and v [B, G, T, D], mask bool[B, P, T] -> [B, P, H, D]; H = G * heads per key head."""
  b, p, h, d = q.shape
  q = q.reshape(b, p, k.shape[1], -1, d)
  scores = jnp.einsum("bpgqd,bgtd->bgqpt", q, k, preferred_element_type=jnp.float32) * d**-0.5
  scores = jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min)
  weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
  return jnp.einsum("bgqpt,bgtd->bpgqd", weights, v).reshape(b, p, h, d)


def splash(q, k, v, segment_ids, *, mesh=None, rules=sharding.DEFAULT_RULES, interpret: bool = False):
  """`attend` by JAX's own TPU kernel; T must be a multiple of BLOCK. `interpret` runs it anywhere, slowly."""
  # imported where it is needed: other machines start without it
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash_kernel
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask

  def local(q, k, v, segment_ids):
    heads, length = q.shape[2], q.shape[1]
    causal = splash_mask.MultiHeadMask([splash_mask.CausalMask((length, length))] * heads)
    sizes = splash_kernel.BlockSizes(**dict.fromkeys(
      ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"), BLOCK))
    kernel = splash_kernel.make_splash_mha_single_device(causal, block_sizes=sizes, interpret=interpret)
    scaled = (q * q.shape[-1] ** -0.5).swapaxes(1, 2)  # the kernel does not scale
    out = jax.vmap(kernel)(scaled, k, v, splash_kernel.SegmentIds(segment_ids, segment_ids))
    return out.swapaxes(1, 2)

  if mesh is None or mesh.size == 1:
    return local(q, k, v, segment_ids)
  place = functools.partial(sharding.array_sharding, mesh=mesh, rules=rules)
  outer = place(("batch", None, "heads", None), q.shape).spec
  keys = place(("batch", "kv_heads", None, None), k.shape).spec
  rows = place(("batch", None), segment_ids.shape).spec
  return jax.shard_map(local, mesh=mesh, in_specs=(outer, keys, keys, rows), out_specs=outer,
                       check_vma=False)(q, k, v, segment_ids)


def _platform(mesh) -> str:
  return jax.default_backend() if mesh is None else mesh.devices.flat[0].platform


# ---- blocks; q here is [B, G, r, T, D]


@jax.custom_vjp
def _blockwise(q, k, v, segment_ids):
  """(attention f32[B, G, r, T, D], log of the sum of its exponentials f32[B, G, r, T]); T a multiple of BLOCK."""

  def step(carry, pair):
    i, j = pair * BLOCK
    part = _accumulate(tuple(_slice(x, i, 3) for x in carry), _slice(q, i, 3), _slice(k, j), _slice(v, j),
                       _pair_mask(segment_ids, i, j))
    return tuple(_update(x, new, i, 3) for x, new in zip(carry, part, strict=True)), None

  (top, total, out), _ = jax.lax.scan(step, _empty(q), _pairs(q.shape[3]))
  return out / total[..., None], top + jnp.log(total)


def _blockwise_forward(q, k, v, segment_ids):
  out, log_total = _blockwise(q, k, v, segment_ids)
  return (out, log_total), (q, k, v, segment_ids, out.astype(v.dtype), log_total)


def _blockwise_backward(saved, cotangents):
  q, k, v, segment_ids, out, log_total = saved
  d_out = cotangents[0].astype(jnp.float32)
  inner = jnp.sum(d_out * out, axis=-1)  # what the normalisation of the softmax takes off every score
  d_out = d_out.astype(v.dtype)
  scale = q.shape[-1] ** -0.5
  product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

  def step(carry, pair):
    d_q, d_k, d_v = carry
    i, j = pair * BLOCK
    q_i, d_i, k_j, v_j = _slice(q, i, 3), _slice(d_out, i, 3), _slice(k, j), _slice(v, j)
    weights = jnp.exp(_scores(q_i, k_j, _pair_mask(segment_ids, i, j)) - _slice(log_total, i, 3)[..., None])
    d_scores = weights * (product("bgrqd,bgkd->bgrqk", d_i, v_j) - _slice(inner, i, 3)[..., None]) * scale
    weights, d_scores = weights.astype(v.dtype), d_scores.astype(q.dtype)
    d_q = _update(d_q, _slice(d_q, i, 3) + product("bgrqk,bgkd->bgrqd", d_scores, k_j), i, 3)
    d_k = _update(d_k, _slice(d_k, j) + product("bgrqk,bgrqd->bgkd", d_scores, q_i), j, 2)
    d_v = _update(d_v, _slice(d_v, j) + product("bgrqk,bgrqd->bgkd", weights, d_i), j, 2)
    return (d_q, d_k, d_v), None

  zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))
  grads, _ = jax.lax.scan(step, zeros, _pairs(q.shape[3]))
  return *(g.astype(x.dtype) for g, x in zip(grads, (q, k, v), strict=True)), None


_blockwise.defvjp(_blockwise_forward, _blockwise_backward)


def _accumulate(carry, q, k, v, mask):
  """Takes the keys of one block into (maximum, sum, weighted values) of the softmax."""
  top, total, out = carry
  scores = _scores(q, k, mask)
  new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
  weights, shrink = jnp.exp(scores - new_top[..., None]), jnp.exp(top - new_top)
  # a row that has seen only masked keys so far holds garbage, which the first visible key shrinks to 0
  out = out * shrink[..., None] + jnp.einsum("bgrqk,bgkd->bgrqd", weights.astype(v.dtype), v,
                                             preferred_element_type=jnp.float32)
  return new_top, total * shrink + jnp.sum(weights, axis=-1), out


def _empty(q):
  """(maximum, sum, weighted values) of no keys."""
  return jnp.full(q.shape[:-1], _LOWEST), jnp.zeros(q.shape[:-1]), jnp.zeros(q.shape, jnp.float32)


def _scores(q, k, mask):
  scores = jnp.einsum("bgrqd,bgkd->bgrqk", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
  return jnp.where(mask[:, None, None], scores, _LOWEST)


def _pairs(length: int):
  """i32[N, 2]: the blocks (queries i, keys j <= i), row by row."""
  return jnp.asarray(np.stack(np.tril_indices(length // BLOCK), axis=1), jnp.int32)


def _pair_mask(segment_ids, i, j):
  index = jnp.arange(BLOCK)
  queries, keys = (jax.lax.dynamic_slice_in_dim(segment_ids, at, BLOCK, 1) for at in (i, j))
  return (i + index[:, None] >= j + index) & (queries[:, :, None] == keys[:, None, :])


def _slice(x, start, axis=2):
  return jax.lax.dynamic_slice_in_dim(x, start, BLOCK, axis)


def _update(x, new, start, axis):
  return jax.lax.dynamic_update_slice_in_dim(x, new, start, axis)


def _group(q, k):
  """[B, T, H, D] -> [B, G, r, T, D]."""
  b, t, _, d = q.shape
  return q.reshape(b, t, k.shape[1], -1, d).transpose(0, 2, 3, 1, 4)


def _ungroup(x):
  """[B, G, r, T, D] -> [B, T, H, D]."""
  b, g, r, t, d = x.shape
  return x.transpose(0, 3, 1, 2, 4).reshape(b, t, g * r, d)
