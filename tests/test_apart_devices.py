"""Agents on devices of their own update at the same time; in a process of its own, as a deadlock would be an abort."""

import os
import subprocess
import sys
import types

import jax
import numpy as np
import pytest

from mgrpo_jax import loop

CHILD = """
import jax, numpy as np
from mgrpo_jax import agent, learner
from mgrpo_jax.policy import sharding
from mgrpo_jax.policy.transformer import ModelConfig, Transformer

optimizer, rng = learner.make_optimizer(learning_rate=1e-2), np.random.default_rng(0)
# XLA's CPU runtime itself lets programs that communicate wait for each other, so the short one does not
meshes = sharding.partition_devices(jax.devices(), {"long": {"data": 1, "fsdp": 2, "tensor": 2}, "short": {"data": 1, "fsdp": 1, "tensor": 1}})


def start(mesh, work, length):
  model = Transformer(ModelConfig(vocab_size=32, num_layers=2, embed_dim=64, num_heads=4, num_kv_heads=2, head_dim=16, mlp_dim=128), mesh)
  fns = learner.make_update(model, optimizer, learner.LossOptions())
  state = learner.init_state(sharding.init_sharded(model, jax.random.key(0), mesh), optimizer)
  rows = 4
  batch = agent.blank_batch(rows, length)
  batch["tokens"] = rng.integers(0, 32, (rows, length)).astype(np.int32)
  batch["positions"], batch["segment_ids"] = np.tile(np.arange(length, dtype=np.int32), (rows, 1)), np.repeat(np.arange(rows, dtype=np.int32)[:, None], length, 1)
  batch["mask"] = batch["positions"] > 0
  batch["weights"], batch["advantages"] = (np.resize(x, batch["weights"].shape).astype(np.float32) for x in ([1.0], [1.0, -1.0]))
  placed = [sharding.shard_batch(batch, mesh)] * work
  return lambda: learner.dispatch(jax.tree.map(lambda x: x.copy(), state), placed, fns, float(rows))


prints = lambda state: [np.asarray(x).sum() for x in jax.tree.leaves(state["params"])]
long, short = start(meshes["long"], 16, 256), start(meshes["short"], 1, 16)  # a CPU device queues no more than 32 programs
alone = []
for each in (long, short):  # compiles, and is what must come out
  state, out = each()
  learner.fetch(out)
  alone.append(prints(state))
for _ in range(3):
  first, out = long()
  second, out2 = short()
  assert learner.fetch(out2)["finite"]
  print("the long update is", "done" if first["step"].is_ready() else "still running")
  assert learner.fetch(out)["finite"]
  for state, expected in zip((first, second), alone):
    np.testing.assert_array_equal(prints(state), expected)
"""


def test_a_short_update_does_not_wait_for_a_long_one_on_other_devices():
  env = {**os.environ, "NPROC": "16", "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
  done = subprocess.run([sys.executable, "-c", CHILD], env=env, capture_output=True, text=True, timeout=300)
  assert done.returncode == 0, done.stderr[-2000:]
  assert done.stdout.splitlines() == ["the long update is still running"] * 3


@pytest.mark.parametrize("devices, order", [
  ([[0], [1]], ["start main", "start search", "finish main", "finish search"]),
  ([[0], [0]], ["start main", "finish main", "start search", "finish search"]),
])
def test_a_step_starts_every_update_before_it_waits_unless_agents_share_devices(devices, order, monkeypatch):
  seen = []

  def update_agent(team, name, *_):
    seen.append(f"start {name}")
    return lambda: seen.append(f"finish {name}") or {name: 1.0}

  monkeypatch.setattr(loop, "update_agent", update_agent)
  agents = {n: types.SimpleNamespace(mesh=jax.sharding.Mesh(np.array([jax.devices()[i] for i in d]), ("data",)))
            for n, d in zip(("main", "search"), devices)}
  values = loop.update_agents(types.SimpleNamespace(agents=agents), [], 0, None)
  assert seen == order and values == {"main": 1.0, "search": 1.0}
