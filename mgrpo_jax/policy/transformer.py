"""A Llama-shaped decoder: RoPE, RMSNorm, grouped-query attention, SwiGLU. Pure init and apply.

Shapes: B rows, T tokens, V vocabulary, E width, H heads, G key/value heads, D head size, F mlp width;
cached: R rows, P tokens of one chunk, T cache length.

Parameters are a nested dict: `embedding [V, E]`, `layer_<i>/{q_proj [E, H, D], k_proj, v_proj [E, G, D],
o_proj [H, D, E], gate_proj, up_proj [E, F], down_proj [F, E], attention_norm, mlp_norm [E]}`, `final_norm [E]`,
with `lm_head [E, V]` when embeddings are not tied and `shift [E, E]` with the token shift. Layers are separate
leaves, not stacked: measured faster on CPU.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib

import flax.linen as nn
import jax
import jax.numpy as jnp

_ZEROS = nn.initializers.zeros

# One (k, v) pair per layer, each [R, G, T, D]: heads outside, so that CPU attention reads it without a transpose
# (measured 6 times faster than [R, T, G, D]).
Cache = tuple[tuple[jax.Array, jax.Array], ...]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """The shape of one agent's model.

  Attributes:
    token_shift: the input of token t is `E[t] + W E[t-1]`, the previous token of the same segment. Tiny models
      do not learn to copy without it; leave it off for checkpoints of others.
    dtype: what the matrix products are computed in, and the type of the cache; parameters, norms, softmax and
      log-probabilities are float32.
    remat: recompute each layer in the backward pass (saves the [B, H, T, T] attention of all layers but one).
    init_std: standard deviation of the initial weights; what writes into the residual stream is divided by
      sqrt(2 num_layers).
  """

  vocab_size: int
  num_layers: int = 2
  embed_dim: int = 128
  num_heads: int = 4
  num_kv_heads: int = 4
  head_dim: int = 32
  mlp_dim: int = 256
  rope_theta: float = 10_000.0
  norm_eps: float = 1e-5
  tie_embeddings: bool = True
  token_shift: bool = False
  dtype: str = "float32"
  remat: bool = False
  init_std: float = 0.02

  def __post_init__(self):
    for name in ("vocab_size", "num_layers", "embed_dim", "num_heads", "num_kv_heads", "head_dim", "mlp_dim"):
      if getattr(self, name) < 1:
        raise ValueError(f"model.{name} is {getattr(self, name)}; it must be at least 1.")
    if self.num_heads % self.num_kv_heads:
      raise ValueError(f"model.num_heads={self.num_heads} is no multiple of model.num_kv_heads="
                       f"{self.num_kv_heads}; every key/value head must serve equally many heads.")
    if self.head_dim % 2:
      raise ValueError(f"model.head_dim={self.head_dim} is odd; rotary positions need an even size.")
    if self.dtype not in ("float32", "bfloat16"):
      raise ValueError(f"model.dtype={self.dtype!r} is unknown; use 'float32' or 'bfloat16'.")


@dataclasses.dataclass(frozen=True)
class Transformer:
  """The model as pure functions of its parameters. Hashable, so it may be a static argument of jit."""

  config: ModelConfig

  @functools.partial(jax.jit, static_argnums=0)
  def init(self, key: jax.Array) -> dict:
    """Fresh float32 parameters (see the module's docstring for their names and shapes).

    The weights of one name are drawn for all layers at once: compiling does not grow with the number of layers.
    """
    c = self.config
    one = jnp.zeros((1, 1), jnp.int32)
    shapes = jax.eval_shape(lambda k: self._decoder.init(k, one, one, one)["params"], key)

    def draw(name, shape):
      if name.endswith("norm"):
        return jnp.ones(shape)
      std = c.init_std / (2 * c.num_layers) ** 0.5 if name in ("o_proj", "down_proj") else c.init_std
      return std * jax.random.normal(jax.random.fold_in(key, zlib.crc32(name.encode())), shape)

    stacks = {name: draw(name, (c.num_layers, *leaf.shape)) for name, leaf in shapes["layer_0"].items()}
    params = {name: draw(name, leaf.shape) for name, leaf in shapes.items() if not name.startswith("layer_")}
    return params | {f"layer_{i}": {n: w[i] for n, w in stacks.items()} for i in range(c.num_layers)}

  def forward(self, params: dict, tokens, positions, segment_ids) -> jax.Array:
    """Last hidden states of packed rows, for training.

    Args:
      tokens, positions, segment_ids: i32[B, T]. A token sees the earlier tokens of its own segment. Positions
        count from 0 within each segment (they only turn the rotary embedding).

    Returns:
      f32[B, T, E], normed: what `logits` takes.
    """
    return self._decoder.apply({"params": params}, tokens, positions, segment_ids)

  def forward_cached(self, params: dict, tokens, prev_token, start, valid, cache: Cache):
    """The next P tokens of R conversations, with what came before in the cache.

    Args:
      tokens: i32[R, P]; only the first `valid[r]` of row r are real.
      prev_token: i32[R], the token before tokens[r, 0]; -1 at the beginning of a conversation.
      start: i32[R], how many tokens the cache holds.
      valid: i32[R], in 0..P. The cache is written at start..start+valid-1 and nowhere else.
      cache: from `empty_cache`, or as returned by an earlier call.

    Returns:
      (hidden f32[R, P, E], cache). Rows past `valid` hold numbers without meaning.
    """
    return self._decoder.apply({"params": params}, tokens, prev_token, start, valid, cache,
                               method="forward_cached")

  def logits(self, params: dict, hidden: jax.Array) -> jax.Array:
    """f32[..., E] hidden states -> f32[..., V] unscaled scores of the next token."""
    return self._decoder.apply({"params": params}, hidden, method="logits")

  def empty_cache(self, rows: int, length: int) -> Cache:
    """A cache of zeros: per layer (k, v), each [rows, G, length, D] in the compute type."""
    c = self.config
    shape = (rows, c.num_kv_heads, length, c.head_dim)
    return tuple((jnp.zeros(shape, c.dtype), jnp.zeros(shape, c.dtype)) for _ in range(c.num_layers))

  @property
  def _decoder(self) -> _Decoder:
    return _Decoder(self.config)


class _Decoder(nn.Module):
  """The linen module behind `Transformer`, which draws the initial weights; here they only have shapes."""

  config: ModelConfig

  def setup(self):
    c = self.config
    layer = nn.remat(_Layer) if c.remat else _Layer
    self.embedding = self.param("embedding", _ZEROS, (c.vocab_size, c.embed_dim))
    if c.token_shift:
      self.shift = self.param("shift", _ZEROS, (c.embed_dim, c.embed_dim))
    self.layers = [layer(c, name=f"layer_{i}") for i in range(c.num_layers)]
    self.final_norm = self.param("final_norm", _ZEROS, (c.embed_dim,))
    if not c.tie_embeddings:
      self.lm_head = self.param("lm_head", _ZEROS, (c.embed_dim, c.vocab_size))

  def __call__(self, tokens, positions, segment_ids):
    same = segment_ids[:, 1:] == segment_ids[:, :-1]
    prev = jnp.pad(jnp.where(same, tokens[:, :-1], -1), ((0, 0), (1, 0)), constant_values=-1)
    x = self._embed(tokens, prev)
    index = jnp.arange(tokens.shape[1])
    mask = (index[:, None] >= index) & (segment_ids[:, :, None] == segment_ids[:, None, :])
    rope = _rope_table(positions, self.config)
    for layer in self.layers:
      x, _ = layer(x, rope, mask, None, None, None)
    return _rms_norm(x, self.final_norm, self.config.norm_eps)

  def forward_cached(self, tokens, prev_token, start, valid, cache):
    prev = jnp.concatenate([prev_token[:, None], tokens[:, :-1]], axis=1)
    x = self._embed(tokens, prev)
    positions = start[:, None] + jnp.arange(tokens.shape[1])
    mask = jnp.arange(cache[0][0].shape[2]) <= positions[:, :, None]
    rope = _rope_table(positions, self.config)
    new_cache = []
    for layer, kv in zip(self.layers, cache, strict=True):
      x, kv = layer(x, rope, mask, kv, start, valid)
      new_cache.append(kv)
    return _rms_norm(x, self.final_norm, self.config.norm_eps), tuple(new_cache)

  def logits(self, hidden):
    dtype = self.config.dtype
    hidden = hidden.astype(dtype)
    if self.config.tie_embeddings:
      return jnp.einsum("...e,ve->...v", hidden, self.embedding.astype(dtype), preferred_element_type=jnp.float32)
    return jnp.einsum("...e,ev->...v", hidden, self.lm_head.astype(dtype), preferred_element_type=jnp.float32)

  def _embed(self, tokens, prev):
    """prev -1 means: no token before, so nothing is shifted in."""
    dtype = self.config.dtype
    x = self.embedding[tokens].astype(dtype)
    if self.config.token_shift:
      before = jnp.where(prev[..., None] >= 0, self.embedding[jnp.maximum(prev, 0)], 0).astype(dtype)
      x = x + before @ self.shift.astype(dtype)
    return x


class _Layer(nn.Module):
  """Attention and mlp. With a cache, keys and values are written into it and all of it is attended to."""

  config: ModelConfig

  @nn.compact
  def __call__(self, x, rope, mask, cache, start, valid):
    c = self.config
    e, h, g, d, f = c.embed_dim, c.num_heads, c.num_kv_heads, c.head_dim, c.mlp_dim

    def weight(name, *shape):
      return self.param(name, _ZEROS, shape).astype(c.dtype)

    y = _rms_norm(x, self.param("attention_norm", _ZEROS, (e,)), c.norm_eps).astype(c.dtype)
    q = _rotate(jnp.einsum("bpe,ehd->bphd", y, weight("q_proj", e, h, d)), rope)
    k = _rotate(jnp.einsum("bpe,egd->bpgd", y, weight("k_proj", e, g, d)), rope).swapaxes(1, 2)
    v = jnp.einsum("bpe,egd->bpgd", y, weight("v_proj", e, g, d)).swapaxes(1, 2)
    if cache is not None:
      k, v = cache = tuple(_write(old, new, start, valid) for old, new in zip(cache, (k, v), strict=True))
    y = _attend(q, k, v, mask)
    x = x + jnp.einsum("bphd,hde->bpe", y, weight("o_proj", h, d, e))

    y = _rms_norm(x, self.param("mlp_norm", _ZEROS, (e,)), c.norm_eps).astype(c.dtype)
    y = nn.silu(y @ weight("gate_proj", e, f)) * (y @ weight("up_proj", e, f))
    return x + y @ weight("down_proj", f, e), cache


def _rms_norm(x, scale, eps):
  x = x.astype(jnp.float32)
  return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps) * scale


def _rope_table(positions, config):
  """cos and sin f32[B, P, 1, D/2] of the rotary angles."""
  half = config.head_dim // 2
  frequency = config.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
  angle = positions[..., None, None].astype(jnp.float32) * frequency
  return jnp.cos(angle), jnp.sin(angle)


def _rotate(x, rope):
  """Rotary position embedding, halves rotated against each other (the convention of HF checkpoints)."""
  cos, sin = rope
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def _attend(q, k, v, mask):
  """q [B, P, H, D], k and v [B, G, T, D], mask bool[B, P, T] -> [B, P, H, D]; H = G * heads per key head."""
  b, p, h, d = q.shape
  q = q.reshape(b, p, k.shape[1], -1, d)
  scores = jnp.einsum("bpgqd,bgtd->bgqpt", q, k, preferred_element_type=jnp.float32) * d**-0.5
  scores = jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min)
  weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
  return jnp.einsum("bgqpt,bgtd->bpgqd", weights, v).reshape(b, p, h, d)


def _write(cache, new, start, valid):
  """Puts new[r, :, :valid[r]] at cache[r, :, start[r]:]; nothing else changes, also at the cache's end.

  cache [R, G, T, D], new [R, G, P, D], start and valid i32[R].
  """
  length, chunk = cache.shape[2], new.shape[2]
  if chunk == 1:
    # One position per row: a batched scatter touches only that position; an index past the end drops the row.
    at = jnp.where(valid > 0, start, length)
    return jax.vmap(lambda row, i, x: row.at[:, i].set(x, mode="drop"))(cache, at, new[:, :, 0])
  source = jnp.arange(length) - start[:, None]
  moved = jnp.take_along_axis(new, jnp.clip(source, 0, chunk - 1)[:, None, :, None], axis=2)
  inside = (source >= 0) & (source < valid[:, None])
  return jnp.where(inside[:, None, :, None], moved, cache)


@functools.cache
def num_parameters(config: ModelConfig) -> int:
  """How many numbers a model of this shape has."""
  shapes = jax.eval_shape(Transformer(config).init, jax.random.key(0))
  return sum(leaf.size for leaf in jax.tree.leaves(shapes))
