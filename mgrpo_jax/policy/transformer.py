"""One decoder for the open families: Llama 2 and 3, SmolLM2, Qwen2, Qwen3 and Qwen3-MoE. Pure init and apply.

RoPE (also Llama 3's scaled one), RMSNorm, grouped-query attention, SwiGLU or a mixture of SwiGLU experts.
Shapes: B rows, T tokens, V vocabulary, E width, H heads, G key/value heads, D head size, F mlp width, X experts;
cached: R rows, P tokens of one chunk, T cache length.

Parameters are a nested dict: `embedding [V, E]`, `layer_<i>/{q_proj [E, H, D], k_proj, v_proj [E, G, D],
o_proj [H, D, E], gate_proj, up_proj [E, F], down_proj [F, E], attention_norm, mlp_norm [E]}`, `final_norm [E]`,
with `lm_head [E, V]` when embeddings are not tied, `shift [E, E]` with the token shift, `q_bias [H, D], k_bias, v_bias
[G, D]`, `q_norm, k_norm [D]`, and `router [E, X], gate_experts, up_experts [X, E, F], down_experts [X, F, E]` in the
place of the mlp. Layers are separate leaves, measured faster on CPU, or with `scan_layers` stacked under `layers/`,
each with a leading L: then compiling takes as long as for one layer.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from mgrpo_jax.policy import attention, lora, sharding

_ZEROS = nn.initializers.zeros

# One (k, v) pair per layer, each [R, G, T, D]: heads outside, so that CPU attention reads it without a transpose
# (measured 6 times faster than [R, T, G, D]). Of stacked layers one pair, each [L, R, G, T, D].
Cache = tuple

REMAT = {
  "none": None,
  "full": jax.checkpoint_policies.nothing_saveable,
  "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """The shape of one agent's model.

  Attributes:
    qkv_bias: a bias on queries, keys and values (Qwen2).
    qk_norm: RMSNorm on each head's query and key before they are rotated (Qwen3).
    rope_scaling: Llama 3's (factor, low_freq_factor, high_freq_factor, original length), or None.
    num_experts: X; 0 has the one mlp. Each token goes to `experts_per_token` of them, each `expert_dim` wide, weighted
      by the router's softmax, which with `norm_topk` sums to 1 over the chosen ones.
    token_shift: the input of token t is `E[t] + W E[t-1]`, the previous token of the same segment. Tiny models
      do not learn to copy without it; leave it off for checkpoints of others.
    dtype: what the matrix products are computed in, and the type of the cache; norms, softmax, router and
      log-probabilities are float32.
    param_dtype: what the parameters are kept in.
    scan_layers: stack the layers and compile one of them.
    remat: what the backward pass makes again: "none", of each layer "full", or all but its matrix products ("dots").
    attention: one of `attention.KINDS`, for training.
    lora_rank: rank of the adapters beside the weights `lora_layers` (policy/lora.py); 0 has none.
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
  init_std: float = 0.02
  qkv_bias: bool = False
  qk_norm: bool = False
  rope_scaling: tuple[float, ...] | None = None
  num_experts: int = 0
  experts_per_token: int = 0
  expert_dim: int = 0
  norm_topk: bool = True
  param_dtype: str = "float32"
  scan_layers: bool = False
  remat: str = "none"
  attention: str = "auto"
  lora_rank: int = 0
  lora_alpha: float = 16.0
  lora_layers: tuple[str, ...] = ()

  def __post_init__(self):
    positive = ["vocab_size", "num_layers", "embed_dim", "num_heads", "num_kv_heads", "head_dim"]
    positive += ["experts_per_token", "expert_dim"] if self.num_experts else ["mlp_dim"]
    for name in positive:
      if getattr(self, name) < 1:
        raise ValueError(f"model.{name} is {getattr(self, name)}; it must be at least 1.")
    if self.num_heads % self.num_kv_heads:
      raise ValueError(f"model.num_heads={self.num_heads} is no multiple of model.num_kv_heads="
                       f"{self.num_kv_heads}; every key/value head must serve equally many heads.")
    if self.head_dim % 2:
      raise ValueError(f"model.head_dim={self.head_dim} is odd; rotary positions need an even size.")
    if self.num_experts and self.experts_per_token > self.num_experts:
      raise ValueError(f"model.experts_per_token={self.experts_per_token} is more than num_experts={self.num_experts}.")
    for name, allowed in (("dtype", ("float32", "bfloat16")), ("param_dtype", ("float32", "bfloat16")), ("remat", tuple(REMAT)),
                          ("attention", attention.KINDS)):
      if getattr(self, name) not in allowed:
        raise ValueError(f"model.{name}={getattr(self, name)!r} is unknown; it is one of {', '.join(allowed)}.")
    there = [n for n in lora.LAYERS if not (self.num_experts and n in lora.MLP)]
    unknown = [n for n in self.lora_layers if n not in there]
    if unknown:
      raise ValueError(f"lora.layers names {unknown[0]!r}; this model can have adapters on {', '.join(there)}.")


@dataclasses.dataclass(frozen=True)
class Transformer:
  """The model as pure functions of its parameters. Hashable, so it may be a static argument of jit.

  Attributes:
    mesh: where it will be trained, for kernels that the compiler cannot split; the numbers do not depend on it.
    rules: how its parameters, its batches and its cache are split over a mesh.
  """

  config: ModelConfig
  mesh: jax.sharding.Mesh | None = None
  rules: sharding.Rules = sharding.DEFAULT_RULES

  @functools.partial(jax.jit, static_argnums=0)
  def init(self, key: jax.Array) -> dict:
    """Fresh parameters (see the module's docstring for their names and shapes), the same stacked and not.

    The weights of one name are drawn for all layers at once: compiling does not grow with the number of layers.
    """
    c = self.config
    one = jnp.zeros((1, 1), jnp.int32)
    plain = _Decoder(dataclasses.replace(c, scan_layers=False, num_layers=1))
    shapes = jax.eval_shape(lambda k: plain.init(k, one, one, one)["params"], key)

    def draw(name, shape, fan_in):
      if name.endswith("norm"):
        x = jnp.ones(shape)
      elif name.endswith(("bias", lora.B)):
        x = jnp.zeros(shape)
      else:
        std = c.init_std / (2 * c.num_layers) ** 0.5 if name in ("o_proj", "down_proj", "down_experts") else c.init_std
        std = (3 * fan_in) ** -0.5 if name.endswith(lora.A) else std
        x = std * jax.random.normal(jax.random.fold_in(key, zlib.crc32(name.encode())), shape)
      return x.astype(c.param_dtype)

    size = lambda leaf: leaf.size // leaf.shape[-1]  # noqa: E731
    stacks = {name: draw(name, (c.num_layers, *leaf.shape), size(leaf)) for name, leaf in shapes["layer_0"].items()}
    params = {name: draw(name, leaf.shape, size(leaf)) for name, leaf in shapes.items() if name != "layer_0"}
    return params | ({"layers": stacks} if c.scan_layers else unstack(stacks, c.num_layers))

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
    """A cache of zeros in the compute type: pairs (k, v), with the rows on axis `cache_axis`."""
    c = self.config
    shape = (rows, c.num_kv_heads, length, c.head_dim)
    if c.scan_layers:
      return jnp.zeros((c.num_layers, *shape), c.dtype), jnp.zeros((c.num_layers, *shape), c.dtype)
    return tuple((jnp.zeros(shape, c.dtype), jnp.zeros(shape, c.dtype)) for _ in range(c.num_layers))

  @property
  def cache_axis(self) -> int:
    """Which axis of the cache's arrays is the row."""
    return 1 if self.config.scan_layers else 0

  @property
  def _decoder(self) -> _Decoder:
    return _Decoder(self.config, self.mesh, self.rules)


def unstack(stacks: dict, count: int) -> dict:
  """{name: [L, ...]} -> {"layer_<i>": {name: [...]}}."""
  return {f"layer_{i}": {n: w[i] for n, w in stacks.items()} for i in range(count)}


class _Decoder(nn.Module):
  """The linen module behind `Transformer`, which draws the initial weights; here they only have shapes."""

  config: ModelConfig
  mesh: jax.sharding.Mesh | None = None
  rules: sharding.Rules = sharding.DEFAULT_RULES

  def setup(self):
    c = self.config
    layer = _Layer
    if c.remat != "none":
      # within a scan nothing can be merged with what is made again, so nothing need forbid it
      layer = nn.remat(_Layer, policy=REMAT[c.remat], prevent_cse=not c.scan_layers)
    self.embedding = self.param("embedding", _ZEROS, (c.vocab_size, c.embed_dim), c.param_dtype)
    if c.token_shift:
      self.shift = self.param("shift", _ZEROS, (c.embed_dim, c.embed_dim), c.param_dtype)
    if c.scan_layers:
      self.layers = nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=c.num_layers,
                            in_axes=(nn.broadcast, nn.broadcast, nn.broadcast))(c, self.mesh, self.rules)
    else:
      self.layers = [layer(c, self.mesh, self.rules, name=f"layer_{i}") for i in range(c.num_layers)]
    self.final_norm = self.param("final_norm", _ZEROS, (c.embed_dim,), c.param_dtype)
    if not c.tie_embeddings:
      self.lm_head = self.param("lm_head", _ZEROS, (c.embed_dim, c.vocab_size), c.param_dtype)

  def __call__(self, tokens, positions, segment_ids):
    same = segment_ids[:, 1:] == segment_ids[:, :-1]
    prev = jnp.pad(jnp.where(same, tokens[:, :-1], -1), ((0, 0), (1, 0)), constant_values=-1)
    x = self._embed(tokens, prev)
    rope = _rope_table(positions, self.config)
    if self.config.scan_layers:
      (x, _, _), _ = self.layers((x, None, None), rope, segment_ids, None)
    else:
      for layer in self.layers:
        (x, _, _), _ = layer((x, None, None), rope, segment_ids, None)
    return _rms_norm(x, self.final_norm, self.config.norm_eps)

  def forward_cached(self, tokens, prev_token, start, valid, cache):
    prev = jnp.concatenate([prev_token[:, None], tokens[:, :-1]], axis=1)
    x = self._embed(tokens, prev)
    positions = start[:, None] + jnp.arange(tokens.shape[1])
    rope = _rope_table(positions, self.config)
    if self.config.scan_layers:
      (x, cache, _), _ = self.layers((x, cache, jnp.int32(0)), rope, positions, valid)
    else:
      new_cache = []
      for layer, kv in zip(self.layers, cache, strict=True):
        (x, kv, _), _ = layer((x, kv, None), rope, positions, valid)
        new_cache.append(kv)
      cache = tuple(new_cache)
    return _rms_norm(x, self.final_norm, self.config.norm_eps), cache

  def logits(self, hidden):
    dtype = self.config.dtype
    hidden = hidden.astype(dtype)
    if self.config.tie_embeddings:
      return jnp.einsum("...e,ve->...v", hidden, self.embedding.astype(dtype), preferred_element_type=jnp.float32)
    return jnp.einsum("...e,ev->...v", hidden, self.lm_head.astype(dtype), preferred_element_type=jnp.float32)

  def _embed(self, tokens, prev):
    """prev -1 means: no token before, so nothing is shifted in."""
    dtype, table = self.config.dtype, self.embedding
    if self.mesh is not None and self.mesh.size > 1:
      # gather the table, not what every device looks up in it
      place = sharding.array_sharding(("vocab", None), table.shape, self.mesh, self.rules)
      table = jax.lax.with_sharding_constraint(table, place)
    x = table[tokens].astype(dtype)
    if self.config.token_shift:
      before = jnp.where(prev[..., None] >= 0, table[jnp.maximum(prev, 0)], 0).astype(dtype)
      x = x + before @ self.shift.astype(dtype)
    return x


class _Layer(nn.Module):
  """Attention and mlp. With a cache, keys and values are written into it and all of it is attended to."""

  config: ModelConfig
  mesh: jax.sharding.Mesh | None = None
  rules: sharding.Rules = sharding.DEFAULT_RULES

  @nn.compact
  def __call__(self, carry, rope, where, valid):
    """(x, cache or None, index of the layer in a stacked cache or None) in and out; as a body of a scan.

    Args:
      where: segment ids i32[B, T] in training; positions i32[R, P] with a cache, of which the first `valid[r]` are real.
    """
    x, cache, index = carry
    c = self.config
    e, h, g, d = c.embed_dim, c.num_heads, c.num_kv_heads, c.head_dim

    y = _rms_norm(x, self._norm("attention_norm", e), c.norm_eps).astype(c.dtype)
    q = self._project("q", "bpe,ehd->bphd", y, (e, h, d))
    k = self._project("k", "bpe,egd->bpgd", y, (e, g, d))
    v = self._project("v", "bpe,egd->bpgd", y, (e, g, d)).swapaxes(1, 2)
    if c.qk_norm:
      q = _rms_norm(q, self._norm("q_norm", d), c.norm_eps).astype(c.dtype)
      k = _rms_norm(k, self._norm("k_norm", d), c.norm_eps).astype(c.dtype)
    q, k = _rotate(q, rope), _rotate(k, rope).swapaxes(1, 2)
    if cache is None:
      y = attention.attend(q, k, v, segment_ids=where, kind=c.attention, mesh=self.mesh, rules=self.rules)
    else:
      (k, v), cache = _write_all(cache, (k, v), where[:, 0], valid, index)
      y = attention.attend_cached(q, k, v, where)
    x = x + self._project("o", "bphd,hde->bpe", y, (h, d, e))

    y = _rms_norm(x, self._norm("mlp_norm", e), c.norm_eps)
    x = x + (self._experts(y, training=cache is None) if c.num_experts else self._mlp(y.astype(c.dtype)))
    return (x, cache, None if index is None else index + 1), None

  def _norm(self, name, size):
    return self.param(name, _ZEROS, (size,), self.config.param_dtype)

  def _weight(self, name, shape):
    return self.param(name, _ZEROS, shape, self.config.param_dtype).astype(self.config.dtype)

  def _project(self, name, equation, y, shape):
    """einsum of `y` with the weight `<name>_proj`, with its bias and its adapter where it has them."""
    c, full = self.config, f"{name}_proj"
    out = jnp.einsum(equation, y, self._weight(full, shape))
    if c.qkv_bias and name in ("q", "k", "v"):
      out = out + self._weight(f"{name}_bias", shape[1:])
    if c.lora_rank and full in c.lora_layers:
      given, weight, result = equation.replace("->", ",").split(",")
      inner = [x for x in weight if x in given]
      a = self._weight(full + lora.A, (*shape[: len(inner)], c.lora_rank))
      b = self._weight(full + lora.B, (c.lora_rank, *shape[len(inner):]))
      low = jnp.einsum(f"{given},{''.join(inner)}r->bpr", y, a)
      out = out + c.lora_alpha / c.lora_rank * jnp.einsum(f"bpr,r{weight[len(inner):]}->{result}", low, b)
    return out

  def _mlp(self, y):
    e, f = self.config.embed_dim, self.config.mlp_dim
    y = nn.silu(self._project("gate", "bpe,ef->bpf", y, (e, f))) * self._project("up", "bpe,ef->bpf", y, (e, f))
    return self._project("down", "bpf,fe->bpe", y, (f, e))

  def _experts(self, y, training):
    """A mixture of mlps. Training on a mesh, every device routes its own rows: else the sort would gather all of them."""
    c, mesh = self.config, self.mesh
    x, e, f = c.num_experts, c.embed_dim, c.expert_dim
    router = self.param("router", _ZEROS, (e, x), c.param_dtype).astype(jnp.float32)
    weights = [self._weight("gate_experts", (x, e, f)), self._weight("up_experts", (x, e, f)), self._weight("down_experts", (x, f, e))]
    mix = functools.partial(_mixture, c)
    if not training or mesh is None or mesh.size == 1:
      return mix(y, router, *weights)
    rows = sharding.array_sharding(("batch", None, None), y.shape, mesh, self.rules).spec
    # devices with rows of their own each need the whole width; the others share it
    shared = tuple(a for a in sharding.mesh_axes("mlp", mesh, self.rules) if a not in sharding.mesh_axes("batch", mesh, self.rules))
    none, wide, high = PartitionSpec(), PartitionSpec(None, None, shared), PartitionSpec(None, shared)
    specs = (rows, none, wide, wide, high)
    parts = lambda *args: jax.lax.psum(mix(*args), shared)  # noqa: E731
    return jax.shard_map(parts, mesh=mesh, in_specs=specs, out_specs=rows, check_vma=False)(y, router, *weights)


def _mixture(c, y, router, gate, up, down):
  """y f32[B, P, E] -> [B, P, E]: each token is sorted to its experts, whose products are ragged (static shapes, none dropped).

  router f32[E, X]; gate, up [X, E, F]; down [X, F, E].
  """
  k, tokens = c.experts_per_token, y.reshape(-1, c.embed_dim)
  share, chosen = jax.lax.top_k(jax.nn.softmax(tokens @ router, axis=-1), k)
  if c.norm_topk:
    share = share / jnp.sum(share, axis=-1, keepdims=True)
  order = jnp.argsort(chosen.reshape(-1))  # stable: pairs of (token, expert), expert by expert
  sizes = jnp.bincount(chosen.reshape(-1), length=c.num_experts).astype(jnp.int32)
  given = tokens.astype(c.dtype)[order // k]
  out = nn.silu(jax.lax.ragged_dot(given, gate, sizes)) * jax.lax.ragged_dot(given, up, sizes)
  out = jax.lax.ragged_dot(out, down, sizes)
  out = jnp.zeros_like(out).at[order].set(out, unique_indices=True).reshape(-1, k, c.embed_dim)
  return jnp.einsum("nke,nk->ne", out, share.astype(c.dtype)).reshape(y.shape)


def _rms_norm(x, scale, eps):
  x = x.astype(jnp.float32)
  return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps) * scale


def _rope_table(positions, config):
  """cos and sin f32[B, P, 1, D/2] of the rotary angles."""
  half = config.head_dim // 2
  frequency = config.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
  if config.rope_scaling:
    frequency = _scaled_frequency(frequency, *config.rope_scaling)
  angle = positions[..., None, None].astype(jnp.float32) * frequency
  return jnp.cos(angle), jnp.sin(angle)


def _scaled_frequency(frequency, factor, low, high, original):
  """Llama 3's longer context: waves longer than `original / low` are slowed by `factor`, those shorter than
  `original / high` are not, and between them it changes smoothly."""
  turns = original * frequency / (2 * jnp.pi)
  keep = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
  return keep * frequency + (1 - keep) * frequency / factor


def _rotate(x, rope):
  """Rotary position embedding, halves rotated against each other (the convention of HF checkpoints)."""
  cos, sin = rope
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def _write_all(cache, new, start, valid, index):
  """((k, v) of this layer with the new ones in them, the cache). `index`: the layer's in a stacked cache, or None."""
  if index is None:
    written = tuple(_write(old, x, start, valid) for old, x in zip(cache, new, strict=True))
    return written, written
  if new[0].shape[2] == 1:  # in place: one position per row; what is written past the end is dropped
    rows, at = jnp.arange(start.shape[0]), jnp.where(valid > 0, start, cache[0].shape[3])
    cache = tuple(old.at[index, rows, :, at].set(x[:, :, 0], mode="drop") for old, x in zip(cache, new, strict=True))
    return tuple(x[index] for x in cache), cache
  written = tuple(_write(old[index], x, start, valid) for old, x in zip(cache, new, strict=True))
  return written, tuple(old.at[index].set(x) for old, x in zip(cache, written, strict=True))


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
