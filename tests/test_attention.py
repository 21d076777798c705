"""Attention in blocks, and by the TPU kernel, against the dense form; and how much memory each holds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mgrpo_jax.policy import attention, sharding

BLOCK = 32


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
  monkeypatch.setattr(attention, "BLOCK", BLOCK)


def inputs(length, rows=2, heads=6, kv_heads=2, size=8, seed=0, dtype="float32"):
  """q, k, v and segments of uneven lengths that end in padding."""
  rng = np.random.default_rng(seed)
  q = rng.normal(size=(rows, length, heads, size)) * 2
  k, v = rng.normal(size=(2, rows, kv_heads, length, size)) * 2
  cuts = np.sort(rng.choice(np.arange(1, length), (rows, 4)), axis=1)
  segments = np.sum(np.arange(length)[None, :, None] >= cuts[:, None, :], axis=-1)
  segments = np.where(segments == 4, -1, segments).astype(np.int32)
  return *(jnp.asarray(x, dtype) for x in (q, k, v)), segments


def value_and_gradients(attend, q, k, v, segments):
  probe = jnp.asarray(np.random.default_rng(9).normal(size=q.shape), jnp.float32)

  def loss(q, k, v):
    out = attend(q, k, v, segment_ids=segments)
    return jnp.sum(jnp.sin(out) * probe), out

  gradients, out = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(q, k, v)
  return out, *gradients


def of_kind(kind, *arrays):
  return value_and_gradients(lambda *a, **s: attention.attend(*a, kind=kind, **s), *arrays)


@pytest.mark.parametrize("length, kv_heads", [(3 * BLOCK, 2), (3 * BLOCK - 7, 6), (5, 1)])
def test_blocks_give_the_dense_values_and_gradients(length, kv_heads):
  arrays = inputs(length, kv_heads=kv_heads, seed=length)
  for got, expected in zip(of_kind("blockwise", *arrays), of_kind("dense", *arrays), strict=True):
    assert float(jnp.abs(expected).max()) > 0.1
    np.testing.assert_allclose(got, expected, atol=3e-5, rtol=3e-5)


def test_blocks_in_bfloat16_are_as_near_to_float32_as_the_dense_form_is():
  arrays = inputs(3 * BLOCK)
  exact = of_kind("dense", *arrays)
  low = (*(x.astype(jnp.bfloat16) for x in arrays[:3]), arrays[3])
  for kind in ("dense", "blockwise"):
    for got, expected in zip(of_kind(kind, *low), exact, strict=True):
      assert got.dtype == jnp.bfloat16
      assert float(jnp.linalg.norm(got.astype(jnp.float32) - expected) / jnp.linalg.norm(expected)) < 0.02, kind


def test_large_scores_and_blocks_without_a_visible_key_leave_no_nan():
  q, k, v, _ = inputs(4 * BLOCK)
  segments = np.repeat(np.arange(4), BLOCK)[None].repeat(2, 0).astype(np.int32)  # every off-diagonal block is hidden
  arrays = (q * 300, k, v, segments)
  for got, expected in zip(of_kind("blockwise", *arrays), of_kind("dense", *arrays), strict=True):
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, expected, atol=2e-2, rtol=1e-3)


def test_auto_is_dense_below_the_threshold_to_the_bit_and_blocks_above(monkeypatch):
  monkeypatch.setattr(attention, "DENSE_LENGTH", 2 * BLOCK)
  for length, same in ((2 * BLOCK, "dense"), (2 * BLOCK + 1, "blockwise")):
    q, k, v, segments = inputs(length)
    auto, kind = (attention.attend(q, k, v, segment_ids=segments, kind=kind) for kind in ("auto", same))
    assert (auto == kind).all()


def test_the_tpu_kernel_gives_the_dense_values_and_gradients(monkeypatch):
  monkeypatch.setattr(attention, "BLOCK", 128)
  arrays = inputs(256, heads=4, size=64)
  kernel = lambda q, k, v, segment_ids: attention.splash(q, k, v, segment_ids, interpret=True)  # noqa: E731
  for got, want in zip(value_and_gradients(kernel, *arrays), of_kind("dense", *arrays), strict=True):
    np.testing.assert_allclose(got, want, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("kind", ["blockwise", "splash"])
def test_rows_and_heads_split_over_a_mesh_change_neither_values_nor_gradients(kind, monkeypatch):
  monkeypatch.setattr(attention, "BLOCK", 128)
  mesh = sharding.make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
  q, k, v, segments = inputs(128, rows=4, heads=4, size=16)
  axes = (("batch", None, "heads", None), *[("batch", "kv_heads", None, None)] * 2, ("batch", None))
  placed = [jax.device_put(x, sharding.array_sharding(names, x.shape, mesh)) for names, x in zip(axes, (q, k, v, segments))]
  kernel = lambda q, k, v, segment_ids: attention.splash(q, k, v, segment_ids, mesh=mesh, interpret=True)  # noqa: E731
  split = value_and_gradients(kernel, *placed) if kind == "splash" else of_kind(kind, *placed)
  for got, want in zip(split, of_kind("dense", q, k, v, segments), strict=True):
    np.testing.assert_allclose(got, want, atol=2e-4, rtol=2e-4)


# ---- the cache


def cached(q, k, v, positions):
  return jax.jit(lambda *a: attention.attend_cached(*a))(q, k, v, positions)  # compiled anew each time


@pytest.mark.parametrize("length, chunk", [(4 * BLOCK, 1), (4 * BLOCK - 11, 7)])
def test_a_long_cache_read_in_blocks_gives_the_dense_values(length, chunk, monkeypatch):
  q, k, v, _ = inputs(length, rows=3)
  q = q[:, :chunk]
  positions = np.array([0, 2 * BLOCK - 3, length - chunk])[:, None] + np.arange(chunk)
  expected = cached(q, k, v, positions)  # shorter than DENSE_LENGTH
  monkeypatch.setattr(attention, "DENSE_LENGTH", 0)
  np.testing.assert_allclose(cached(q, k, v, positions), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("chunk", [1, 7])
def test_what_a_row_reads_of_its_cache_depends_on_no_other_row_bit_for_bit(chunk, monkeypatch):
  monkeypatch.setattr(attention, "DENSE_LENGTH", 0)
  q, k, v, _ = inputs(6 * BLOCK, rows=3)
  alone = np.array([5, 40, 70])[:, None] + np.arange(chunk)
  beside = np.array([5, 40, 5 * BLOCK])[:, None] + np.arange(chunk)  # makes all rows read to the end
  a, b = (np.asarray(cached(q[:, :chunk], k, v, p)) for p in (alone, beside))
  assert (a[:2] == b[:2]).all() and (a[2] != b[2]).any()


# ---- memory


def test_the_gradient_of_long_rows_holds_no_square_of_scores(monkeypatch):
  monkeypatch.undo()  # the real block size
  length, heads = 8192, 4
  shapes = (jax.ShapeDtypeStruct((1, length, heads, 16), jnp.float32), *[jax.ShapeDtypeStruct((1, 2, length, 16), jnp.float32)] * 2,
            jax.ShapeDtypeStruct((1, length), jnp.int32))

  def temporary(kind):
    loss = lambda q, k, v, s: jnp.sum(attention.attend(q, k, v, segment_ids=s, kind=kind) ** 2)  # noqa: E731
    return jax.jit(jax.grad(loss, (0, 1, 2))).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

  square = 4 * heads * length**2
  assert temporary("dense") > square
  assert temporary("auto") < square / 20
