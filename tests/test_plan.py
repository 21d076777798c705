"""The plan against hand-computed numbers, against the compiler's, and as a command."""

import dataclasses
import math
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from mgrpo_jax import agent, learner, plan, validation
from mgrpo_jax.config import agent_config, base_config
from mgrpo_jax.policy import sharding
from mgrpo_jax.rollout import engine

ROOT = pathlib.Path(__file__).resolve().parents[1]
MESH = {"data": 2, "fsdp": 2, "tensor": 2}


def config(mesh=MESH, length=64, **model):
  """One agent: V = 40, L = 3, E = 16, H = 4, G = 2, D = 8, F = 24."""
  c = base_config()
  c.agents.main = agent_config(tools=("search",), demonstrations="single")
  m = c.agents.main
  m.model.update(dict(vocab_size=40, num_layers=3, embed_dim=16, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=24,
                      token_shift=False, tie_embeddings=False) | model)
  m.mesh.update(mesh)
  m.limits.update(context=64, answer_reserve=8)
  c.train.update(rows=8, length=length)
  c.rollout.update(slots=8, prefill_rows=2, prefill_buckets=(8, 16))
  validation.validate(c)
  return c


def planned(c, mesh):
  return plan.plan_agent("main", c, agent.build_model("main", c, None, mesh), mesh)


def test_what_is_held_is_what_a_hand_computes():
  got = planned(config(dtype="bfloat16"), plan.abstract_mesh(MESH))
  layer = 16 * 4 * 8 + 2 * 16 * 2 * 8 + 4 * 8 * 16 + 3 * 16 * 24  # q, k and v, o, mlp: all split over fsdp and tensor
  norms = 3 * 2 * 16 + 16
  assert got.parameters == 2 * 40 * 16 + 3 * layer + norms
  assert got.active == got.parameters - 40 * 16  # the embedding is looked up, the head multiplied
  weights = 4 * ((2 * 40 * 16 + 3 * layer) // 4 + norms)
  cache = 3 * 2 * (8 // 4) * (2 // 2) * 64 * 8 * 2  # layers, k and v, slots, heads, length, size, bytes
  per_slot = (8 // 4) * (4 * 5 + 8 + 1 + 2 * 4 * 16)  # five numbers, a key, a flag, two hidden states
  # Adam and the warm-up count the updates
  assert got.held == {"parameters": weights, "optimizer": 2 * weights + 2 * 4, "KV cache": cache + per_slot}
  assert got.flops["sampled"] == 2 * got.active + 4 * 3 * 4 * 8 * 32
  assert got.flops["trained"] == 3 * (2 * got.active + 4 * 3 * 4 * 8 * 32)
  assert (got.seconds, got.tokens) == (None, 8 * 64)


@pytest.fixture(scope="module")
def compiled():
  """One layer on two devices, for rows of 256."""
  c = config({"data": 1, "fsdp": 1, "tensor": 2}, length=256, num_layers=1)
  return c, planned(c, sharding.make_mesh(c.agents.main.mesh.to_dict()))


def test_what_is_held_is_what_arrays_take_and_the_planned_programs_run_on_them(compiled):
  c, got = compiled
  mesh = sharding.make_mesh(c.agents.main.mesh.to_dict())
  model = agent.build_model("main", c, None, mesh)
  optimizer, _, fns = agent.build_update("main", c, model)
  params = sharding.init_sharded(model, jax.random.key(0), mesh)
  state = learner.init_state(params, optimizer)
  sampler = engine.LocalEngine(model, state["params"], agent.engine_shapes("main", c, (0,)), mesh=mesh, copy=False)
  assert all(a is b for a, b in zip(jax.tree.leaves(sampler._params), jax.tree.leaves(state["params"]), strict=True))  # counted once
  real = lambda tree: sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))  # noqa: E731
  assert got.held == {"parameters": real(state["params"]), "optimizer": real(state["opt_state"]), "KV cache": real(sampler._state)}
  like = lambda tree: sharding.abstract(tree, jax.tree.map(lambda x: x.sharding, tree))  # noqa: E731
  batch = sharding.shard_batch(agent.blank_batch(8, 256), mesh)
  programs = learner.lower(fns, like(state), like(batch))
  total, _ = programs["gradients"].compile()(state["params"], fns.zeros(state["params"]), batch, jnp.float32(1), None)
  after, info = programs["apply"].compile()(state, total)
  assert bool(info["finite"]) and int(after["step"]) == 1


def test_compiled_for_these_devices_the_plan_counts_gradients_and_scores(compiled):
  c, got = compiled
  assert not got.refusals and got.seconds > 0
  assert got.held == planned(c, plan.abstract_mesh(c.agents.main.mesh.to_dict())).held
  scores = 8 * (4 // 2) * 256**2 * 4  # rows, heads, pairs, bytes
  sums = 2 * got.held["parameters"]  # of the update, and of a micro-batch
  assert sums + scores < got.programs["gradients"] < sums + 8 * scores
  assert got.held["parameters"] <= got.programs["apply"] < 3 * got.held["parameters"]
  assert got.peak == sum(got.held.values()) + got.programs["gradients"]


def test_an_estimate_is_of_the_size_of_what_the_compiler_says(compiled):
  c, real = compiled
  guess = planned(c, plan.abstract_mesh(c.agents.main.mesh.to_dict()))
  assert guess.seconds is None and guess.programs.keys() == real.programs.keys()
  assert 0.5 < guess.programs["gradients"] / real.programs["gradients"] < 2, (guess.programs, real.programs)


def test_it_fits_only_with_room_to_spare():
  base = planned(config(), plan.abstract_mesh(MESH))
  chip = plan.Chip(hbm=base.peak / plan.GIB, tflops=1)
  assert not base.fits(chip)
  assert base.fits(plan.Chip(hbm=chip.hbm / plan.USABLE * 1.001, tflops=1))
  refused = dataclasses.replace(base, refusals={"gradients": "too much"}, programs=base.programs | {"gradients": None})
  assert refused.peak == math.inf and "DOES NOT FIT" in plan.describe([refused], "v5p")


def launch(*flags):
  done = subprocess.run([sys.executable, str(ROOT / "launch/plan.py"), *flags], capture_output=True, text=True, timeout=600,
                        env={**os.environ, "XLA_FLAGS": ""})
  assert "Traceback" not in done.stderr, done.stderr
  return done.returncode, done.stdout, done.stderr


def test_the_command_prints_a_line_of_each_kind_per_agent():
  code, out, err = launch("--config=configs/gaia.py", "--chip=h100")
  assert code == 0, err
  for name in ("main", "search"):
    text = re.search(rf"^{name}: (?:.*\n)(?:  .*\n?)+", out, re.MULTILINE).group()
    for word in ("491136 parameters", "1 x h100", "an estimate", "optimizer", "KV cache", "gradients", "peak", "of 80 GiB", ": fits", "FLOPs"):
      assert word in text, (word, text)


@pytest.mark.parametrize("flags, said", [
  (["--chip=tpu9"], "--chip=tpu9"),
  (["--chip=h100", "--slices=2"], "--slices=2 is for TPUs; h100 is none"),
  (["--chip=h100", "--config.agents.main.model.vocab_size=10"], "config.agents.main.model.vocab_size=10 is less than the"),
  (["--chip=h100", "--config.agents.main.mesh.tensor=3"], "config.agents.main.mesh.tensor=3 does not divide"),
])
def test_what_cannot_be_planned_is_one_sentence(flags, said):
  code, out, err = launch("--config=configs/gaia.py", *flags)
  assert code == 2 and out == "" and said in err.splitlines()[-1], err


# ---- the TPU's compiler


def needs_libtpu():
  pytest.importorskip("libtpu", reason="the TPU's compiler: pip install 'mgrpo_jax[tpu-plan]'")


@pytest.mark.slow
def test_a_mesh_that_no_slice_has_is_refused():
  needs_libtpu()
  code, _, err = launch("--config=configs/gaia.py", "--chip=v5e", "--config.agents.main.mesh.data=3", "--config.train.rows=48")
  assert code == 2 and "needs 3 chips, but 1 slice(s) of v5e have 1 x one of 1, 4, 8" in err


FAMILIES = {
  "llama": dict(rope_scaling=(8.0, 1.0, 4.0, 8192.0)), "qwen2": dict(qkv_bias=True, tie_embeddings=True), "qwen3": dict(qk_norm=True),
  "qwen3_moe": dict(qk_norm=True, num_experts=8, experts_per_token=2, expert_dim=16)}


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["v5e", "v5p", "v6e"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tpus_compile_update_and_sampling_of_every_family_without_a_square_of_scores(chip, family):
  needs_libtpu()
  c = config({"data": 2, "fsdp": 1, "tensor": 2}, length=4096, dtype="bfloat16", scan_layers=True, remat="full",
             vocab_size=512, **FAMILIES[family])  # large enough that blocks of positions are left out
  got = planned(c, plan.topology_mesh(chip, c.agents.main.mesh.to_dict()))
  assert not got.refusals and set(got.programs) == {"gradients", "apply", "prefill", "decode"}
  assert got.programs["gradients"] < (8 // 2) * (4 // 2) * 4096**2 * 4 / 2
  assert got.peak < plan.GIB


@pytest.mark.slow
def test_what_is_too_large_is_refused_by_the_compiler_and_said():
  needs_libtpu()
  c = config({"data": 1, "fsdp": 1, "tensor": 1}, vocab_size=2**28)
  got = planned(c, plan.topology_mesh("v5e", c.agents.main.mesh.to_dict()))
  assert "gradients" in got.refusals and got.peak == math.inf
  text = plan.describe([got], "v5e")
  assert "refused by the compiler" in text and "DOES NOT FIT" in text


@pytest.mark.slow
def test_the_command_asks_the_tpus_compiler_also_for_two_slices():
  needs_libtpu()
  flags = [f"--config.agents.{n}.mesh.data=2" for n in ("main", "search")]
  code, out, err = launch("--config=configs/gaia.py", "--chip=v6e", "--slices=2", *flags)
  assert code == 0, err
  assert len(re.findall(r"on 2 x v6e \(data=2, .*\); compiled for it in", out)) == 2 and out.count(": fits") == 2
  assert "compiling the programs of main for 2 x v6e" in err


@pytest.mark.slow
def test_an_agent_over_two_slices_splits_only_its_data_axis_between_them():
  needs_libtpu()
  mesh = plan.topology_mesh("v5e", {"data": 2, "fsdp": 2, "tensor": 2}, slices=2)
  assert [[d.slice_index for d in half.flat] for half in mesh.devices] == [[0] * 4, [1] * 4]
  got = planned(config(dtype="bfloat16"), mesh)
  assert not got.refusals
  with pytest.raises(ValueError, match="make its first axis a multiple of 2"):
    sharding.make_mesh({"data": 1, "fsdp": 4, "tensor": 2}, list(mesh.devices.flat))
