"""The warm start: what is shipped is what the settings make, and it is made the same way every time."""

import importlib.util
import pathlib

import jax
import numpy as np
import pytest

from mgrpo_jax import agent, checkpoint, warm_start, world
from mgrpo_jax.policy import sharding
from mgrpo_jax.rollout import conversation
from mgrpo_jax.tasks import atlas

ROOT = pathlib.Path(__file__).resolve().parents[1]
AGENTS = [("gaia", "main"), ("gaia", "search"), ("gaia_single", "main")]


def config_of(name, arg=None):
  spec = importlib.util.spec_from_file_location(name, ROOT / "configs" / f"{name}.py")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module.get_config(arg)


def parts(name, agent_name, arg=None):
  """(config, tokenizer, model, settings, content hash) of an agent's warm start."""
  config = config_of(name, arg)
  tokenizer = world.build_tokenizer(config, atlas.Atlas.load())
  model = agent.build_model(agent_name, config, tokenizer)
  settings, key = agent.warm_start_key(agent_name, config, model, tokenizer)
  return config, tokenizer, model, settings, key


@pytest.mark.parametrize("name, agent_name", AGENTS)
def test_the_defaults_start_from_shipped_weights_that_fit(name, agent_name):
  *_, model, _, key = parts(name, agent_name)
  path = warm_start.SHIPPED / f"{key}.safetensors"
  assert path.is_file(), f"settings of {name}/{agent_name} changed: make {key} again with --config.train.warm_start=rebuild"
  params, metadata = checkpoint.load_weights(path, jax.eval_shape(model.init, jax.random.key(0)))
  assert metadata["agent"] == agent_name and all(np.isfinite(x).all() for x in jax.tree.leaves(params))


@pytest.mark.slow
@pytest.mark.parametrize("name, agent_name", AGENTS)
def test_the_shipped_weights_are_what_rebuilding_makes(name, agent_name, tmp_path, monkeypatch):
  config, tokenizer, model, settings, key = parts(name, agent_name)
  monkeypatch.setenv("MGRPO_CACHE", str(tmp_path))
  config.train.warm_start = "rebuild"
  mesh = sharding.make_mesh({"data": 1})
  made, _ = agent.initial_params(agent_name, config, model, mesh, tokenizer)
  shipped, metadata = checkpoint.load_weights(warm_start.SHIPPED / f"{key}.safetensors")
  if checkpoint.tree_fingerprint(made) == checkpoint.tree_fingerprint(shipped):
    return
  # another processor rounds differently, and training amplifies it: the loss must still be the same
  _, again = checkpoint.load_weights(warm_start.cache_folder() / f"{key}.safetensors")
  assert abs(float(again["loss"]) - float(metadata["loss"])) < 0.1 * float(metadata["loss"])


def test_a_warm_start_is_made_once_and_then_found(tmp_path, monkeypatch):
  monkeypatch.setenv("MGRPO_CACHE", str(tmp_path))
  config, tokenizer, model, _, key = parts("gaia", "main", "smoke")
  mesh, seen = sharding.make_mesh({"data": 1}), []

  def progress(total, text):
    seen.append((total, text))
    return lambda step, loss: None

  made, _ = agent.initial_params("main", config, model, mesh, tokenizer, progress=progress)
  assert warm_start.find(key) == tmp_path / "warm_start" / f"{key}.safetensors"
  found, _ = agent.initial_params("main", config, model, mesh, tokenizer, progress=progress)
  assert seen == [(4, "warm start of main")]
  assert checkpoint.tree_fingerprint(made) == checkpoint.tree_fingerprint(found)
  config.train.warm_start = "rebuild"
  rebuilt, _ = agent.initial_params("main", config, model, mesh, tokenizer, progress=progress)
  assert len(seen) == 2 and checkpoint.tree_fingerprint(made) == checkpoint.tree_fingerprint(rebuilt)


@pytest.mark.parametrize("change", [("steps", 5), ("learning_rate", 1e-3), ("seed", 1), ("permute", 0.5), ("flaws.stop_early", 0.1)])
def test_every_setting_has_its_own_weights(change):
  config = config_of("gaia", "smoke")
  tokenizer = world.build_tokenizer(config, atlas.Atlas.load())
  model = agent.build_model("main", config, tokenizer)
  _, before = agent.warm_start_key("main", config, model, tokenizer)
  node = config.agents.main.warm_start
  *inner, last = change[0].split(".")
  for part in inner:
    node = node[part]
  node[last] = change[1]
  assert agent.warm_start_key("main", config, model, tokenizer)[1] != before


def test_invented_names_keep_the_template_and_are_consistent():
  config, tokenizer, *_ = parts("gaia", "search", "smoke")
  rng = np.random.default_rng(0)
  for d in agent.demonstrations("search", config, 20):
    (t,) = warm_start.tokenize([d], tokenizer)
    changed = warm_start.permute_names(t.tokens, tokenizer.piece_classes(), tokenizer.vocab_size, rng)
    pairs = dict(zip(t.tokens.tolist(), changed.tolist()))
    assert all(pairs[a] == b for a, b in zip(t.tokens.tolist(), changed.tolist()))  # one name, one new name
    assert len(set(pairs.values())) == len(pairs)  # different names stay different
    templates = ~np.isin(t.tokens, tokenizer.name_ids)
    np.testing.assert_array_equal(t.tokens[templates], changed[templates])


@pytest.mark.parametrize("name, agent_name", AGENTS)
def test_demonstrations_fit_the_context_and_the_turn_budget(name, agent_name):
  config, tokenizer, *_ = parts(name, agent_name)
  limits = config.agents[agent_name].limits
  trajectories = warm_start.tokenize(agent.demonstrations(agent_name, config, 300), tokenizer)
  assert max(len(t) for t in trajectories) <= limits.context
  assert max(len(turn.sampled) for t in trajectories for turn in t.turns) <= limits.turn_tokens
  assert max(len(t.turns) for t in trajectories) <= limits.turns


def test_what_is_taught_is_exactly_what_the_agent_writes():
  config, tokenizer, *_ = parts("gaia", "search", "smoke")
  d = agent.demonstrations("search", config, 1)[0]
  (t,) = warm_start.tokenize([d], tokenizer)
  assert [conversation.sampled_text(tokenizer, turn) for turn in t.turns] == [text for text, _ in d.turns]
  assert t.mask.sum() == sum(len(tokenizer.encode(text)) + 1 for text, _ in d.turns)
