"""One main agent with two different sub-agents, through training steps and the final table."""

import importlib.util
import json
import pathlib

import jax
import numpy as np
import pytest

from mgrpo_jax import agent, checkpoint, final, loop, metrics, validation, warm_start, world
from mgrpo_jax.policy import sharding
from mgrpo_jax.run_folder import RunFolder
from mgrpo_jax.tasks import atlas, atlas_demos
from mgrpo_jax.tools import web

HERE = pathlib.Path(__file__).resolve().parent
AGENTS = ("main", "search", "reader")


def config_of(folder, weights):
  spec = importlib.util.spec_from_file_location("two_subs", HERE / "configs/two_subs.py")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  c = module.get_config()
  c.run_dir, c.train.warm_start = str(folder), str(weights)
  validation.validate(c)
  return c


def demonstrations(count):
  """Main asks one or the other; the search agent searches and the reader tries a link, and both give up."""
  pages = atlas.Atlas.load()
  local = web.LocalWeb(pages.pages)
  asks = [list(atlas_demos.main_demonstrations(pages, count // 2, seed, agent=a)) for seed, a in enumerate(("search", "reader"))]
  tasks = [f"the capital of {title}" for title in pages.titles("train", "country")][: count // 2]
  search = '<tool_call>{"name": "search", "arguments": {"query": "rome"}}</tool_call>'
  visit = '<tool_call>{"name": "visit", "arguments": {"link": 1}}</tool_call>'
  found = web.Browser(local).call("search", {"query": "rome"})
  subs = {"search": (search, found), "reader": (visit, "no such link")}
  end = ("<result>none</result>", None)
  return {"main": sum(asks, [])} | {n: [atlas_demos.Demonstration(t, [turn, end], "gives_up") for t in tasks] for n, turn in subs.items()}


def liked(task, result):
  """An expert in place of the oracle: these models are too small to ask for anything that the oracle knows."""
  return len(task) % 5 / 4


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  """A run of two steps that starts from weights which write the protocol most of the time."""
  folder, weights = tmp_path_factory.mktemp("runs") / "two", tmp_path_factory.mktemp("weights")
  c = config_of(folder, weights)
  tokenizer = world.build_tokenizer(c, atlas.Atlas.load())
  shown = demonstrations(256)
  settings = warm_start.Settings(steps=100, batch=8, learning_rate=1e-2, warmup_updates=5, permute=0.0, count=256, seed=0,
                                 rows=8, length=256)
  for name in AGENTS:
    fresh = sharding.init_sharded(agent.build_model(name, c, tokenizer), jax.random.key(0), sharding.make_mesh({"data": 1}))
    params, _ = warm_start.train(agent.build_model(name, c, tokenizer), fresh, tokenizer, shown[name], settings)
    checkpoint.save_weights(weights / f"{name}.safetensors", jax.device_get(params))
  with RunFolder.open(folder, c) as run:
    return c, loop.train(c, run, finish=final.results), weights


def test_both_sub_agents_are_called_scored_and_trained(finished):
  c, results, weights = finished
  rows = [r for r in metrics.read_metrics(c.run_dir) if r["step"] > 0]
  assert len(rows) == 2
  for name in ("search", "reader"):
    assert all(r[f"train/{name}/trajectories"] > 0 for r in rows), name
    assert any(r.get(f"train/{name}/grad_norm", 0) > 0 for r in rows), name
    start = checkpoint.load_weights(weights / f"{name}.safetensors")[0]
    assert results["fingerprints"][name] != checkpoint.tree_fingerprint(start), name
  calls = sum(r["train/calls"] * r["train/rollouts"] for r in rows)
  assert calls == sum(r[f"train/{name}/trajectories"] for r in rows for name in ("search", "reader"))
  assert [r["compile/programs"] for r in rows] == [0, 0]


def test_each_has_its_own_tools_and_the_delegations_are_readable(finished):
  text = "".join(p.read_text() for p in sorted((pathlib.Path(finished[0].run_dir) / "rollouts").iterdir()))
  called = {name: set() for name in ("search", "reader")}
  speaker = None
  for line in text.splitlines():
    speaker = next((n for n in called if line.startswith(f"    {n}: ")), None if line.startswith("main: ") else speaker)
    if speaker and line.startswith("      > <tool_call>"):
      called[speaker].add(line.split('"name": "')[1].split('"')[0])
    elif speaker == "reader" and line.startswith("      < "):
      assert "found" not in line  # it has no search, whatever it asks for
  assert "search" in called["search"] and "visit" in called["reader"]


def test_the_final_table_has_every_agent_and_the_checkpoint_all_of_them(finished):
  c, results, _ = finished
  for name in AGENTS:
    assert results["evaluations"][f"only {name} trained"]["count"] == 6
  for name in ("search", "reader"):
    assert results["evaluations"][f"headroom: {name} on gold subquestions, trained"]["count"] > 0
  with checkpoint.Checkpoints(pathlib.Path(c.run_dir) / "checkpoints", read_only=True) as saved:
    shapes = {n: {"params": jax.eval_shape(lambda n=n: _model(c, n).init(jax.random.key(0)))} for n in AGENTS}
    states, _ = saved.restore(2, shapes)
  assert {n: checkpoint.tree_fingerprint(states[n]["params"]) for n in AGENTS} == results["fingerprints"]
  layers = {n: sum(k.startswith("layer_") for k in states[n]["params"]) for n in AGENTS}
  assert layers == {"main": 1, "search": 1, "reader": 2}


def _model(c, name):
  return agent.build_model(name, c, world.build_tokenizer(c, atlas.Atlas.load()))


@pytest.mark.slow
def test_a_run_of_two_sub_agents_goes_on_where_it_stood(finished, tmp_path):
  """The same config continued from its first checkpoint ends with the same parameters."""
  c, results, weights = finished
  again = config_of(tmp_path / "again", weights)
  again.checkpoint.every = 1
  with RunFolder.open(again.run_dir, again) as run:
    loop.train(again, run)
    with checkpoint.Checkpoints(run.checkpoints) as saved:
      saved.drop_after(1)
    loop.train(again, run)
    last = (run.path / "checkpoints").glob("step_*")
    assert sorted(p.name for p in last)[-1] == "step_00000002"
    with checkpoint.Checkpoints(run.checkpoints, read_only=True) as saved:
      states, _ = saved.restore(2, {n: {"params": jax.eval_shape(lambda n=n: _model(c, n).init(jax.random.key(0)))} for n in AGENTS})
  assert {n: checkpoint.tree_fingerprint(states[n]["params"]) for n in AGENTS} == results["fingerprints"]
  rows = [r["step"] for r in metrics.read_metrics(run.path)]
  assert rows == [0, 1, 2] and np.isfinite(json.loads(json.dumps(results["best_step"])))
