"""The decoder and its log-probabilities against float64 numpy written here."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mgrpo_jax.policy import logprobs, transformer

CONFIG = transformer.ModelConfig(vocab_size=29, num_layers=2, embed_dim=24, num_heads=6, num_kv_heads=2, head_dim=4,
                                 mlp_dim=20, token_shift=True, init_std=0.3, rope_theta=100.0, norm_eps=1e-3)
MODEL = transformer.Transformer(CONFIG)
FORWARD = jax.jit(lambda model, *args: model.forward(*args), static_argnums=0)
LOGPROBS = jax.jit(lambda *args: logprobs.token_logprobs(MODEL, *args[:-1], temperature=args[-1]))
CACHED = jax.jit(lambda *args: MODEL.forward_cached(*args))
SEGMENTS = np.array([[0] * 5 + [1] * 4 + [-1] * 2, [2] * 1 + [3] * 7 + [4] * 3])
POSITIONS = np.array([[*range(5), *range(4), 0, 1], [0, *range(7), *range(3)]])


def make_params(config=CONFIG, seed=0):
  """Random weights, norms away from 1 so that a forgotten one shows."""
  params = transformer.Transformer(config).init(jax.random.key(seed))
  rng = np.random.default_rng(seed)

  def one(path, x):
    return x + rng.normal(size=x.shape).astype(np.float32) * 0.2 if "norm" in str(path[-1]) else x

  return jax.tree_util.tree_map_with_path(one, params)


def random_tokens(shape, seed=0, vocab=29):
  return np.random.default_rng(seed).integers(0, vocab, shape).astype(np.int32)


def reference(params, config, tokens):
  """One sequence, token by token, head by head, in float64: f64[T, E]."""
  p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  c, d = config, config.head_dim

  def norm(x, scale):
    return x / np.sqrt((x**2).mean() + c.norm_eps) * scale

  def rotate(x, position):
    out = x.copy()
    for j in range(d // 2):
      a = position * c.rope_theta ** (-2 * j / d)
      out[j] = x[j] * np.cos(a) - x[j + d // 2] * np.sin(a)
      out[j + d // 2] = x[j + d // 2] * np.cos(a) + x[j] * np.sin(a)
    return out

  xs = [p["embedding"][t] for t in tokens]
  if c.token_shift:
    xs = [x + (p["embedding"][tokens[t - 1]] @ p["shift"] if t else 0) for t, x in enumerate(xs)]
  for i in range(c.num_layers):
    w = p[f"layer_{i}"]
    ys = [norm(x, w["attention_norm"]) for x in xs]
    keys = [[rotate(y @ w["k_proj"][:, g], t) for g in range(c.num_kv_heads)] for t, y in enumerate(ys)]
    values = [[y @ w["v_proj"][:, g] for g in range(c.num_kv_heads)] for y in ys]
    for t, y in enumerate(ys):
      for h in range(c.num_heads):
        g = h // (c.num_heads // c.num_kv_heads)
        q = rotate(y @ w["q_proj"][:, h], t)
        weights = np.exp([q @ keys[u][g] / np.sqrt(d) for u in range(t + 1)])
        mixed = sum(a * values[u][g] for u, a in enumerate(weights / weights.sum()))
        xs[t] = xs[t] + mixed @ w["o_proj"][h]
    for t, x in enumerate(xs):
      y = norm(x, w["mlp_norm"])
      gate = y @ w["gate_proj"]
      xs[t] = x + (gate / (1 + np.exp(-gate)) * (y @ w["up_proj"])) @ w["down_proj"]
  return np.stack([norm(x, p["final_norm"]) for x in xs])


def reference_logits(params, hidden):
  head = params["lm_head"] if "lm_head" in params else np.asarray(params["embedding"]).T
  return hidden @ np.asarray(head, np.float64)


@pytest.mark.parametrize("changes", [{}, {"token_shift": False, "tie_embeddings": False, "num_kv_heads": 6}])
def test_packed_segments_equal_the_reference_run_one_by_one(changes):
  config = dataclasses.replace(CONFIG, **changes)
  model, params, tokens = transformer.Transformer(config), make_params(config), random_tokens(SEGMENTS.shape)
  hidden = np.asarray(FORWARD(model, params, tokens, POSITIONS, SEGMENTS))
  assert hidden.dtype == np.float32
  logits = np.asarray(model.logits(params, hidden))
  for row in range(2):
    for segment in set(SEGMENTS[row]) - {-1}:
      at = SEGMENTS[row] == segment
      expected = reference(params, config, tokens[row, at])
      np.testing.assert_allclose(hidden[row, at], expected, atol=2e-5)
      np.testing.assert_allclose(logits[row, at], reference_logits(params, expected), atol=1e-4)


def test_a_token_reaches_only_itself_and_later_tokens_of_its_segment():
  params, tokens = make_params(), random_tokens(SEGMENTS.shape)
  before = np.asarray(FORWARD(MODEL, params, tokens, POSITIONS, SEGMENTS))
  changed = tokens.copy()
  changed[0, 2] = (tokens[0, 2] + 1) % 29
  moved = np.abs(np.asarray(FORWARD(MODEL, params, changed, POSITIONS, SEGMENTS)) - before).max(-1) > 0
  assert moved.tolist() == [[False, False, True, True, True] + [False] * 6, [False] * 11]


def test_cached_chunks_of_any_size_equal_the_whole_sequence():
  params, tokens = make_params(), random_tokens((3, 14), seed=1)
  zeros = np.zeros_like(tokens)
  whole = np.asarray(FORWARD(MODEL, params, tokens, np.arange(14) + zeros, zeros))
  cache, start, prev = MODEL.empty_cache(3, 14), np.zeros(3, np.int32), np.full(3, -1, np.int32)
  # Rows advance by different amounts, one row pauses, and the last chunk's padding would run over the cache's end.
  for valid in ([3, 4, 1], [4, 2, 4], [1, 0, 4]):
    chunk = np.zeros((3, 4), np.int32)
    for r in range(3):
      chunk[r, : valid[r]] = tokens[r, start[r] : start[r] + valid[r]]
    hidden, cache = CACHED(params, chunk, prev, start, np.array(valid, np.int32), cache)
    for r in range(3):
      np.testing.assert_allclose(hidden[r, : valid[r]], whole[r, start[r] : start[r] + valid[r]], atol=2e-5)
      start[r] += valid[r]
      prev[r] = tokens[r, start[r] - 1]
  assert start.tolist() == [8, 6, 9]
  while (start < 14).any():
    valid = (start < 14).astype(np.int32)
    chunk = np.take_along_axis(tokens, np.minimum(start, 13)[:, None], 1)
    hidden, cache = CACHED(params, chunk, prev, start, valid, cache)
    for r in np.flatnonzero(valid):
      np.testing.assert_allclose(hidden[r, 0], whole[r, start[r]], atol=2e-5)
    prev, start = np.where(valid, chunk[:, 0], prev).astype(np.int32), start + valid


@pytest.mark.parametrize("chunk", [1, 4])
def test_the_cache_changes_at_the_valid_positions_and_nowhere_else(chunk):
  cache = jax.tree.map(lambda x: x + 7.0, MODEL.empty_cache(3, 14))
  start, valid = np.array([13, 14, 2], np.int32), np.array([1, 0, min(chunk, 3)], np.int32)
  prev = np.array([1, 2, 3], np.int32)
  _, new = CACHED(make_params(), random_tokens((3, chunk)), prev, start, valid, cache)
  for leaf in jax.tree.leaves(new):
    touched = (np.asarray(leaf) != 7.0).any(axis=(1, 3))
    assert touched.tolist() == [[s <= t < s + v for t in range(14)] for s, v in zip(start, valid)]


@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.0])
def test_logprobs_and_entropy_equal_the_reference(temperature):
  params, tokens = make_params(), random_tokens(SEGMENTS.shape)
  got, entropy = LOGPROBS(params, tokens, POSITIONS, SEGMENTS, temperature)
  want, want_entropy = np.zeros(tokens.shape), np.zeros(tokens.shape)
  for row in range(2):
    for segment in set(SEGMENTS[row]) - {-1}:
      at = np.flatnonzero(SEGMENTS[row] == segment)
      logits = reference_logits(params, reference(params, CONFIG, tokens[row, at])) / (temperature or 1.0)
      logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
      for before, t in zip(logp, at[1:]):
        want[row, t] = before[tokens[row, t]]
        want_entropy[row, t] = -(np.exp(before) * before).sum()
  np.testing.assert_allclose(got, want, atol=5e-5)
  np.testing.assert_allclose(entropy, want_entropy, atol=5e-5)
  assert got[0, 0] == got[0, 5] == got[0, 9] == got[0, 10] == 0  # segment starts and padding
  assert entropy[0, 10] == 0


def test_value_and_gradient_do_not_depend_on_the_block_size():
  params, tokens = make_params(), random_tokens(SEGMENTS.shape)

  @jax.jit
  def both(params):
    def loss(p, chunk):
      lp, entropy = logprobs.token_logprobs(MODEL, p, tokens, POSITIONS, SEGMENTS, temperature=0.7, chunk=chunk)
      return jnp.sum(lp * jnp.cos(jnp.arange(11.0))) + 0.1 * jnp.sum(entropy)
    return [jax.value_and_grad(loss)(params, chunk) for chunk in (None, 3)]

  (a, grad_a), (b, grad_b) = both(params)
  np.testing.assert_allclose(a, b, rtol=1e-5)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-4), grad_a, grad_b)
  assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(grad_a))


@pytest.mark.parametrize("chunk", [2, 3, 11])
def test_what_is_wanted_decides_what_is_computed_and_not_its_value_or_gradient(chunk):
  """A vocabulary of 16 times the width: blocks without a wanted token are left out."""
  config = dataclasses.replace(CONFIG, vocab_size=16 * CONFIG.embed_dim)
  model, params, tokens = transformer.Transformer(config), make_params(config), random_tokens(SEGMENTS.shape)
  rng = np.random.default_rng(4)

  @jax.jit
  def run(params, weigh, wanted):
    def loss(p, **options):
      lp, entropy = logprobs.token_logprobs(model, p, tokens, POSITIONS, SEGMENTS, temperature=0.7, chunk=chunk, **options)
      return jnp.sum(weigh * (lp * jnp.cos(jnp.arange(11.0)) + 0.1 * entropy)), (lp, entropy)
    return [jax.value_and_grad(loss, has_aux=True)(params, **options) for options in ({}, {"wanted": wanted})]

  for share in (0.0, 0.2, 0.6, 1.0):
    wanted = rng.random(SEGMENTS.shape) < share
    ((_, outs), grads), ((_, got_outs), got_grads) = run(params, wanted.astype(np.float32), wanted)
    for x, y in zip(got_outs, outs):
      np.testing.assert_allclose(x, np.where(wanted, y, 0) if chunk < 10 else y, atol=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-4), got_grads, grads)
    assert (max(np.abs(x).max() for x in jax.tree.leaves(got_grads)) > 0) == bool((wanted & (POSITIONS > 0) & (SEGMENTS >= 0)).any())


def test_blocks_without_a_wanted_token_are_not_computed():
  """Counted by what each logits call sees: a callback in the model's place."""
  seen = []

  class Counting(transformer.Transformer):
    def logits(self, params, hidden):
      jax.debug.callback(lambda: seen.append(1))
      return super().logits(params, hidden)

  config = dataclasses.replace(CONFIG, vocab_size=16 * CONFIG.embed_dim)
  model, params, tokens = Counting(config), make_params(config), random_tokens(SEGMENTS.shape)
  wanted = np.zeros(SEGMENTS.shape, bool)
  wanted[0, [3, 7, 8]] = wanted[1, 2] = True
  jax.block_until_ready(jax.jit(lambda p: logprobs.token_logprobs(model, p, tokens, POSITIONS, SEGMENTS, chunk=2, wanted=wanted))(params))
  jax.effects_barrier()
  assert len(seen) == 2  # row 0 has three: two blocks of two, of five


def test_gradient_at_a_vocabulary_of_49152_never_holds_all_logits():
  config = transformer.ModelConfig(vocab_size=49152, num_layers=1, embed_dim=16, num_heads=1, num_kv_heads=1,
                                   head_dim=16, mlp_dim=16)
  model = transformer.Transformer(config)
  tokens = jax.ShapeDtypeStruct((16, 256), jnp.int32)
  params = jax.eval_shape(model.init, jax.random.key(0))

  def loss(p, t):
    lp, entropy = logprobs.token_logprobs(model, p, t, t, t)
    return lp.sum() + entropy.sum()

  memory = jax.jit(jax.grad(loss)).lower(params, tokens).compile().memory_analysis()
  everything = 16 * 256 * 49152 * 4  # 805 MB
  assert memory.temp_size_in_bytes < everything / 2
  assert logprobs.block_size(16, 256, 49152) == 16
  assert logprobs.block_size(16, 256, 600) == 256


def test_fresh_parameters_have_the_documented_names_shapes_and_scales():
  config = transformer.ModelConfig(vocab_size=500, num_layers=2, embed_dim=64, num_heads=4, num_kv_heads=2,
                                   head_dim=16, mlp_dim=96, tie_embeddings=False, token_shift=True)
  params = transformer.Transformer(config).init(jax.random.key(0))
  assert sorted(params) == sorted(["embedding", "final_norm", "lm_head", "shift", *(f"layer_{i}" for i in range(2))])
  assert {k: v.shape for k, v in params["layer_1"].items()} == {
    "attention_norm": (64,), "q_proj": (64, 4, 16), "k_proj": (64, 2, 16), "v_proj": (64, 2, 16),
    "o_proj": (4, 16, 64), "mlp_norm": (64,), "gate_proj": (64, 96), "up_proj": (64, 96), "down_proj": (96, 64)}
  per_layer = 2 * 64 + 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 96
  assert transformer.num_parameters(config) == 2 * 500 * 64 + 64 + 64 * 64 + 2 * per_layer
  np.testing.assert_allclose(np.std(params["layer_0"]["gate_proj"]), 0.02, rtol=0.05)
  np.testing.assert_allclose(np.std(params["layer_0"]["down_proj"]), 0.02 / 2, rtol=0.05)
  logits = transformer.Transformer(config).logits(params, np.ones((1, 64), np.float32))
  assert logits.shape == (1, 500)


def test_bfloat16_and_remat_change_the_numbers_little_and_not_at_all():
  params, tokens = make_params(), random_tokens(SEGMENTS.shape)
  exact = FORWARD(MODEL, params, tokens, POSITIONS, SEGMENTS)
  half = transformer.Transformer(dataclasses.replace(CONFIG, dtype="bfloat16"))
  hidden = FORWARD(half, params, tokens, POSITIONS, SEGMENTS)
  assert hidden.dtype == jnp.float32 and half.empty_cache(1, 2)[0][0].dtype == jnp.bfloat16
  assert half.logits(params, hidden).dtype == jnp.float32
  difference = np.abs(hidden - exact)
  assert 0 < difference.max() and difference.mean() < 0.03

  remat = transformer.Transformer(dataclasses.replace(CONFIG, remat="full"))
  loss = lambda p, model: jnp.sum(model.forward(p, tokens, POSITIONS, SEGMENTS) ** 3)  # noqa: E731
  pair = jax.jit(lambda p: (jax.grad(loss)(p, MODEL), jax.grad(loss)(p, remat)))(params)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4), *pair)


@pytest.mark.parametrize("change, words", [
  ({"num_kv_heads": 4}, "num_heads=6 is no multiple of model.num_kv_heads=4"),
  ({"head_dim": 3}, "head_dim=3 is odd"),
  ({"dtype": "float16"}, "dtype='float16' is unknown"),
  ({"num_layers": 0}, "num_layers is 0"),
])
def test_impossible_shapes_are_refused_in_a_sentence(change, words):
  with pytest.raises(ValueError, match=words):
    dataclasses.replace(CONFIG, **change)
