"""Meshes, rule tables and placements on eight fake devices."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

from mgrpo_jax.policy import logprobs, sharding, transformer

CONFIG = transformer.ModelConfig(vocab_size=32, num_layers=1, embed_dim=16, num_heads=4, num_kv_heads=2, head_dim=4,
                                 mlp_dim=24, token_shift=True, init_std=0.3)
MODEL = transformer.Transformer(CONFIG)
RNG = np.random.default_rng(0)
BATCH = {"tokens": RNG.integers(0, 32, (8, 6)).astype(np.int32),
         "positions": np.tile(np.arange(6, dtype=np.int32), (8, 1)),
         "segment_ids": np.repeat(np.arange(8, dtype=np.int32)[:, None], 6, axis=1)}


@jax.jit
def loss_and_grad(params, batch):
  def loss(params):
    lp, entropy = logprobs.token_logprobs(MODEL, params, batch["tokens"], batch["positions"], batch["segment_ids"],
                                          chunk=2)
    return jnp.mean(lp) + 0.1 * jnp.mean(entropy)
  return jax.value_and_grad(loss)(params)


@pytest.fixture(scope="module")
def one_device():
  mesh = sharding.make_mesh({"data": 1})
  params = sharding.init_sharded(MODEL, jax.random.key(3), mesh)
  return params, *loss_and_grad(params, sharding.shard_batch(BATCH, mesh))


@pytest.mark.parametrize("shape", [{"fsdp": 4, "data": 1}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_weights_loss_and_gradient_are_the_same_on_any_mesh(shape, one_device):
  want, loss, grad = one_device
  mesh = sharding.make_mesh(shape)
  params = sharding.init_sharded(MODEL, jax.random.key(3), mesh)
  jax.tree.map(np.testing.assert_array_equal, params, want)
  got_loss, got_grad = loss_and_grad(params, sharding.shard_batch(BATCH, mesh))
  np.testing.assert_allclose(got_loss, loss, rtol=1e-5)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), got_grad, grad)


def test_parameters_and_optimizer_moments_lie_where_the_table_says():
  mesh = sharding.make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
  params = sharding.init_sharded(MODEL, jax.random.key(3), mesh)
  specs = jax.tree.map(lambda x: x.sharding.spec, params)
  layer = specs["layer_0"]
  assert specs["embedding"] == PartitionSpec("tensor", "fsdp")
  assert layer["q_proj"] == layer["k_proj"] == PartitionSpec("fsdp", "tensor")
  assert layer["o_proj"] == PartitionSpec("tensor", None, "fsdp")
  assert layer["down_proj"] == PartitionSpec("tensor", "fsdp")
  assert layer["mlp_norm"] == PartitionSpec()
  assert params["embedding"].addressable_shards[0].data.shape == (16, 8)
  state = jax.eval_shape(optax.adamw(1e-3).init, params)
  places = sharding.param_shardings(state, mesh)
  assert places[0].mu["layer_0"]["q_proj"].spec == layer["q_proj"]
  assert places[0].count.spec == PartitionSpec()
  own = sharding.DEFAULT_RULES | {"vocab": None, "embed": ("fsdp", "tensor"), "heads": None, "kv_heads": None, "mlp": None}
  assert sharding.param_shardings(params, mesh, own)["embedding"].spec == PartitionSpec(None, ("fsdp", "tensor"))


def test_an_agents_own_rules_place_its_parameters_and_bad_ones_are_named():
  rules = sharding.DEFAULT_RULES.but((("vocab", ["fsdp", "tensor"]), ("embed", None)))
  assert (rules["vocab"], rules["embed"], rules["mlp"]) == (("fsdp", "tensor"), None, "tensor")
  assert hash(rules) == hash(sharding.DEFAULT_RULES.but(rules.items())) and rules != sharding.DEFAULT_RULES
  model = transformer.Transformer(CONFIG, None, rules)
  mesh = sharding.make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
  params = sharding.init_sharded(model, jax.random.key(3), mesh, model.rules)
  assert params["embedding"].sharding.spec == PartitionSpec(("fsdp", "tensor"))
  assert params["layer_0"]["q_proj"].sharding.spec == PartitionSpec(None, "tensor")
  for bad in (("width", "fsdp"), ("vocab",), "vocab", ("vocab", "fdsp"), ("vocab", ("fsdp", "model"))):
    with pytest.raises(ValueError, match="logical axis|names the mesh axis"):
      sharding.DEFAULT_RULES.but((bad,))


def test_a_mesh_that_does_not_divide_a_dimension_is_refused_with_the_fix():
  abstract = jax.eval_shape(MODEL.init, jax.random.key(0))
  with pytest.raises(ValueError) as error:
    sharding.param_shardings(abstract, sharding.make_mesh({"tensor": 4}))
  for word in ("layer_0/k_proj", "'kv_heads', size 2", "mesh axis tensor of size 4", "set the rule 'kv_heads' to None"):
    assert word in str(error.value)
  with pytest.raises(ValueError, match="'embed', size 16"):
    sharding.param_shardings(abstract, sharding.make_mesh({"fsdp": 3}))
  # Replicated key/value heads are the fix that the message names.
  rules = sharding.DEFAULT_RULES | {"kv_heads": None}
  sharding.param_shardings(abstract, sharding.make_mesh({"tensor": 4}), rules)


def test_typing_errors_in_rules_and_mesh_are_refused():
  abstract = jax.eval_shape(MODEL.init, jax.random.key(0))
  with pytest.raises(ValueError, match="no sharding rule uses mesh axis 'tensr' of size 2"):
    sharding.param_shardings(abstract, sharding.make_mesh({"tensr": 2}))
  with pytest.raises(ValueError, match=r"rules \['vocabs'\] name no logical axis"):
    sharding.param_shardings(abstract, sharding.make_mesh({"data": 1}), {"vocabs": "tensor"})
  with pytest.raises(ValueError, match="two of its dimensions over mesh axis 'tensor'"):
    sharding.param_shardings(abstract, sharding.make_mesh({"tensor": 2}), sharding.DEFAULT_RULES | {"embed": "tensor"})
  with pytest.raises(ValueError, match="'layer_0/adapter' has no logical axes"):
    sharding.logical_axes("layer_0/adapter")


def test_meshes_name_auto_axes_and_need_their_devices():
  mesh = sharding.make_mesh({"data": 2, "tensor": 4})
  assert mesh.axis_types == (AxisType.Auto,) * 2 and dict(mesh.shape) == {"data": 2, "tensor": 4}
  with pytest.raises(ValueError, match="needs 16 devices, there are 8"):
    sharding.make_mesh({"data": 16})
  for bad in ({}, {"data": 0}):
    with pytest.raises(ValueError, match="at least one axis, each of size 1"):
      sharding.make_mesh(bad)


def test_agents_get_disjoint_devices_or_share_the_first():
  devices = jax.devices()
  meshes = sharding.partition_devices(devices, {"main": {"data": 2, "tensor": 2}, "search": {"fsdp": 3}})
  ids = {name: {d.id for d in mesh.devices.flat} for name, mesh in meshes.items()}
  assert ids == {"main": {d.id for d in devices[:4]}, "search": {d.id for d in devices[4:7]}}
  shared = sharding.partition_devices(devices[:1], {"main": {"data": 1}, "search": {"data": 1}})
  assert shared["main"].devices.flat[0] == shared["search"].devices.flat[0] == devices[0]
  shared = sharding.partition_devices(devices[:4], {"main": {"data": 4}, "search": {"data": 2}})
  assert [len(m.devices.flat) for m in shared.values()] == [4, 2]
  assert shared["search"].devices.flat[0] == devices[0]
  with pytest.raises(ValueError, match="agent 'search': mesh {'data': 4} needs 4 devices, there are 2"):
    sharding.partition_devices(devices[:2], {"main": {"data": 1}, "search": {"data": 4}})


def test_batches_are_split_by_rows_over_data_and_fsdp():
  mesh = sharding.make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
  batch = sharding.shard_batch({"tokens": np.zeros((8, 6)), "weights": np.zeros(8), "normalizer": np.float32(3)}, mesh)
  assert batch["tokens"].addressable_shards[0].data.shape == (2, 6)
  assert batch["weights"].sharding.spec == PartitionSpec(("data", "fsdp"))
  assert batch["normalizer"].sharding.spec == PartitionSpec()
  with pytest.raises(ValueError, match="'batch', size 6.*dataxfsdp of size 4"):
    sharding.shard_batch(np.zeros((6, 2)), mesh)


def test_placed_weights_outlive_the_donated_original():
  mesh = sharding.make_mesh({"data": 1})
  params = sharding.init_sharded(MODEL, jax.random.key(5), mesh)
  kept = float(jnp.sum(params["embedding"]))  # a numpy view would keep the buffer from being donated
  copy = sharding.place(params, mesh)
  jax.jit(lambda p: jax.tree.map(lambda x: x + 1, p), donate_argnums=0)(params)
  assert params["embedding"].is_deleted()
  assert float(jnp.sum(copy["embedding"])) == kept


@pytest.mark.parametrize("source, target", [(1, dict(data=2)), (1, dict(tensor=2)), (2, dict(data=1)), (2, dict(fsdp=2)), (2, dict(data=4))])
def test_weights_placed_on_another_mesh_share_no_buffer_with_the_original(source, target):
  original = sharding.place(MODEL.init(jax.random.key(0)), sharding.make_mesh({"data": source}))
  placed = sharding.place(original, sharding.make_mesh(target))
  pointers = lambda tree: {s.data.unsafe_buffer_pointer() for x in jax.tree.leaves(tree) for s in x.addressable_shards}  # noqa: E731
  assert not pointers(original) & pointers(placed)
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(original), jax.device_get(placed))
  expected = sharding.param_shardings(original, sharding.make_mesh(target))
  assert all(x.sharding.is_equivalent_to(s, x.ndim) for x, s in zip(jax.tree.leaves(placed), jax.tree.leaves(expected)))


@pytest.mark.parametrize("shape, rules", [
  ({"data": 2, "fsdp": 2, "tensor": 2}, ()), ({"fsdp": 2, "expert": 2, "tensor": 2}, ()),
  ({"data": 2, "fsdp": 2, "tensor": 2}, (("mlp", ("fsdp", "tensor")), ("experts", None), ("embed", None), ("vocab", "fsdp")))])
def test_experts_routed_on_every_device_for_itself_give_the_value_and_gradient_of_one_device(shape, rules):
  config = dataclasses.replace(CONFIG, num_experts=4, experts_per_token=2, expert_dim=8, scan_layers=True, num_layers=2, remat="full")

  @functools.partial(jax.jit, static_argnums=0)
  def value_and_grad(model, params, batch):
    loss = lambda p: jnp.mean(jnp.sin(model.forward(p, **batch)) * jnp.arange(16.0))  # noqa: E731
    return jax.value_and_grad(loss)(params)

  params = transformer.Transformer(config).init(jax.random.key(3))
  value, grad = value_and_grad(transformer.Transformer(config), params, BATCH)
  mesh = sharding.make_mesh(shape)
  model = transformer.Transformer(config, mesh, sharding.DEFAULT_RULES.but(rules))
  inputs = sharding.place(params, mesh, model.rules), sharding.shard_batch(BATCH, mesh, model.rules)
  program = value_and_grad.lower(model, *inputs).compile()
  got, got_grad = program(*inputs)
  np.testing.assert_allclose(got, value, rtol=1e-5)
  for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got_grad), jax.tree.leaves(grad), strict=True):
    assert np.abs(b).max() > 0, path
    np.testing.assert_allclose(a, b, atol=2e-5 * float(np.abs(b).max()), err_msg=str(path))
  # no sort, which routing is, has the tokens of more than one device
  sorted_shapes = [int(n) for n in re.findall(r"s32\[(\d+)\][^=]*sort\(", program.as_text())]
  assert sorted_shapes and max(sorted_shapes) <= 8 * 6 * 2 // 4, sorted_shapes
