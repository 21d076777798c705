"""Open models: the same logits as transformers gives (stored fixtures, tests/fixtures/make_families.py), in and out."""

import dataclasses
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mgrpo_jax import checkpoint
from mgrpo_jax.errors import UserError
from mgrpo_jax.policy import families, logprobs, lora, sharding, weights
from mgrpo_jax.policy.transformer import Transformer, num_parameters

FOLDER = pathlib.Path(__file__).parent / "fixtures" / "families"
NAMES = sorted(f.name for f in FOLDER.iterdir())
ONE = sharding.make_mesh({"data": 1})


def load(name, mesh=ONE, **overrides):
  model = Transformer(families.read_config(FOLDER / name, **overrides))
  return model, weights.read(FOLDER / name, model, mesh)


def expected(name):
  with np.load(FOLDER / name / "logits.npz") as f:
    return f["tokens"], f["logits"]


def logits(model, params, tokens):
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  run = jax.jit(lambda p: model.logits(p, model.forward(p, tokens, positions, jnp.zeros_like(positions))))
  return np.asarray(run(params))


def test_every_family_has_a_fixture():
  assert NAMES == ["llama2", "llama3", "qwen2", "qwen3", "qwen3_moe", "smollm2"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scan", [False, True])
def test_logits_are_those_of_transformers(name, scan):
  tokens, right = expected(name)
  model, params = load(name, scan_layers=scan)
  got = logits(model, params, tokens)
  assert np.abs(got - right).max() < 2e-4 and (got.argmax(-1) == right.argmax(-1)).all()


@pytest.mark.parametrize("name, scan", [*[(n, True) for n in NAMES], ("llama3", False), ("qwen3_moe", False)])
def test_cached_logits_chunk_by_chunk_are_those_of_transformers(name, scan):
  tokens, right = expected(name)
  model, params = load(name, scan_layers=scan)
  rows, chunks, got, start = len(tokens), (16, 1, 1, 16), [], 0
  cache = model.empty_cache(rows, 64)
  run = jax.jit(model.forward_cached)
  for n in chunks:
    part = tokens[:, start:start + n]
    prev = tokens[:, start - 1] if start else np.full(rows, -1, np.int32)
    hidden, cache = run(params, part, prev, jnp.full(rows, start, jnp.int32), jnp.full(rows, n, jnp.int32), cache)
    got.append(np.asarray(model.logits(params, hidden)))
    start += n
  np.testing.assert_allclose(np.concatenate(got, 1), right[:, :start], atol=2e-4)


@pytest.mark.parametrize("name, without", [
  ("llama3", dict(rope_scaling=None)), ("llama3", dict(rope_theta=10_000.0)), ("llama2", dict(norm_eps=1e-2)),
  ("qwen3_moe", dict(norm_topk=False)), ("qwen3_moe", dict(experts_per_token=1))])
def test_the_fixtures_see_a_setting_that_is_left_out(name, without):
  tokens, right = expected(name)
  model, params = load(name)
  other = Transformer(dataclasses.replace(model.config, **without))
  assert np.abs(logits(other, params, tokens) - right).max() > 1e-2


@pytest.mark.parametrize("remat", ["full", "dots"])
def test_what_is_made_again_in_the_backward_pass_changes_nothing(remat):
  scan = remat == "dots"
  grads = [gradient(*load("qwen3", scan_layers=scan, remat=r)) for r in ("none", remat)]
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), *grads)


def gradient(model, params, mesh=ONE):
  tokens = np.random.default_rng(0).integers(0, 96, (8, 24)).astype(np.int32)
  batch = sharding.shard_batch({"t": tokens, "p": np.tile(np.arange(24, dtype=np.int32), (8, 1)), "s": np.zeros((8, 24), np.int32)}, mesh)

  def loss(p):
    lp, entropy = logprobs.token_logprobs(model, p, batch["t"], batch["p"], batch["s"], chunk=8)
    return jnp.mean(lp) + 0.1 * jnp.mean(entropy)

  return jax.device_get(jax.jit(jax.grad(loss))(params))


@pytest.mark.parametrize("name, shape", [
  ("llama2", dict(data=2, fsdp=2, tensor=2)), ("llama3", dict(data=2, fsdp=2, tensor=2)), ("smollm2", dict(data=1, fsdp=4, tensor=2)),
  ("qwen2", dict(data=2, fsdp=2, tensor=2)), ("qwen3", dict(data=4, fsdp=1, tensor=2)), ("qwen3_moe", dict(data=1, fsdp=2, tensor=2, expert=2))])
def test_the_gradient_on_eight_devices_is_that_on_one(name, shape):
  mesh = sharding.make_mesh(shape)
  one, many = gradient(*load(name, scan_layers=True)), gradient(*load(name, mesh, scan_layers=True), mesh)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6), one, many)


def test_parameters_are_loaded_where_the_table_says():
  mesh = sharding.make_mesh(dict(fsdp=2, tensor=2, expert=2))
  model, params = load("qwen3_moe", mesh, scan_layers=True)
  expected = sharding.param_shardings(jax.eval_shape(model.init, jax.random.key(0)), mesh)
  assert jax.tree.all(jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), params, expected))
  assert params["layers"]["gate_experts"].addressable_shards[0].data.shape == (2, 4, 16, 12)  # L, X / 2, E / 2, F / 2


# ---- in and out


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scan", [False, True])
def test_what_is_written_is_what_was_read_bit_for_bit(name, scan, tmp_path):
  model, params = load(name, scan_layers=scan)
  files = weights.write(tmp_path, params, model, FOLDER / name, shard_bytes=40_000)
  assert len(files) > 1
  old, new = weights.Headers(FOLDER / name), weights.Headers(tmp_path)
  assert old.tensors.keys() == new.tensors.keys()
  assert all(np.array_equal(old.read(n), new.read(n)) for n in old.tensors)
  again = Transformer(families.read_config(tmp_path, scan_layers=scan))
  assert again == model
  assert checkpoint.tree_fingerprint(weights.read(tmp_path, again, ONE)) == checkpoint.tree_fingerprint(params)
  assert (tmp_path / "generation_config.json").read_bytes() == (FOLDER / name / "generation_config.json").read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_transformers_loads_an_export_and_gives_the_same_logits(name, tmp_path):
  transformers = pytest.importorskip("transformers", reason="needs pip install torch==2.13.0 transformers")
  torch = pytest.importorskip("torch")
  tokens, right = expected(name)
  model, params = load(name)
  weights.write(tmp_path, params, model, FOLDER / name, shard_bytes=40_000)
  loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).float()
  with torch.no_grad():
    got = loaded(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
  np.testing.assert_allclose(got, right, atol=1e-5)


def test_bfloat16_parameters_are_half_as_large_and_nearly_the_same(tmp_path):
  tokens, right = expected("qwen3")
  model, params = load("qwen3", param_dtype="bfloat16")
  assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
  assert 1e-4 < np.abs(logits(model, params, tokens) - right).max() < 0.2
  weights.write(tmp_path, params, model, FOLDER / "qwen3")
  assert weights.Headers(tmp_path).tensors["model.norm.weight"][1] == jnp.dtype("bfloat16")
  assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
  half = weights.read(tmp_path, model, ONE)
  assert checkpoint.tree_fingerprint(half) == checkpoint.tree_fingerprint(params)


@pytest.fixture
def copy(tmp_path):
  shutil.copytree(FOLDER / "qwen3", tmp_path / "m")
  return tmp_path / "m"


def change_config(folder, **values):
  path = folder / "config.json"
  path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize("values, fault", [
  (dict(architectures=["GPT2LMHeadModel"]), "the architecture GPT2LMHeadModel is not supported; there are Llama"), (dict(architectures=None), "architecture none"),
  (dict(hidden_act="gelu"), "hidden_act='gelu' is not supported"), (dict(attention_bias=True), "attention_bias=True is not supported"),
  (dict(use_sliding_window=True), "use_sliding_window=True"), (dict(quantization_config={"bits": 4}), "quantization_config="),
  (dict(rope_parameters={"rope_type": "yarn", "factor": 4.0}), "rope scaling of type 'yarn' is not supported"),
  (dict(rope_parameters={"factor": 4.0, "rope_theta": 1e4}), "the rope setting 'factor' is not supported"),
  (dict(rope_parameters={"full_attention": {}, "sliding_attention": {}}), "the rope setting 'full_attention'"),
  (dict(rope_parameters="default"), "config.json: "), (dict(head_dim=None, num_attention_heads=0), "config.json: "),
  (dict(rope_parameters=None, rope_scaling={"type": "linear"}), "'linear'"),
  (dict(layer_types=["full_attention", "sliding_attention"]), "layer_types"), (dict(mlp_only_layers=[1]), "mlp_only_layers=\\[1\\]"),
  (dict(num_key_value_heads=3), "num_heads=4 is no multiple"), (dict(hidden_size="x"), "config.json: ")])
def test_a_setting_that_is_not_supported_is_refused_by_name(copy, values, fault):
  change_config(copy, **values)
  with pytest.raises(UserError, match=fault):
    families.read_config(copy)


LLAMA = dict(architectures=["LlamaForCausalLM"], hidden_act="silu", attention_bias=False, rms_norm_eps=1e-5, rope_scaling=None)
QWEN = dict(hidden_act="silu", rms_norm_eps=1e-6, rope_theta=1e6, sliding_window=32768, use_sliding_window=False, max_window_layers=21)


@pytest.mark.parametrize("content, size", [  # what their makers say each has
  (LLAMA | dict(vocab_size=49152, num_hidden_layers=30, hidden_size=576, num_attention_heads=9, num_key_value_heads=3, intermediate_size=1536,
                tie_word_embeddings=True), 134_515_008),  # SmolLM2-135M
  (LLAMA | dict(vocab_size=32000, num_hidden_layers=32, hidden_size=4096, num_attention_heads=32, intermediate_size=11008), 6_738_415_616),  # Llama 2 7B
  (LLAMA | dict(vocab_size=128256, num_hidden_layers=32, hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, intermediate_size=14336,
                mlp_bias=False, pretraining_tp=1, rope_theta=5e5, rope_scaling=dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                original_max_position_embeddings=8192, rope_type="llama3")), 8_030_261_248),  # Llama 3.1 8B
  (QWEN | dict(architectures=["Qwen2ForCausalLM"], vocab_size=151936, num_hidden_layers=24, hidden_size=896, num_attention_heads=14,
               num_key_value_heads=2, intermediate_size=4864, tie_word_embeddings=True), 494_032_768),  # Qwen2.5 0.5B
  (QWEN | dict(architectures=["Qwen3ForCausalLM"], attention_bias=False, vocab_size=151936, num_hidden_layers=28, hidden_size=1024, head_dim=128,
               num_attention_heads=16, num_key_value_heads=8, intermediate_size=3072, tie_word_embeddings=True), 596_049_920),  # Qwen3 0.6B
  (QWEN | dict(architectures=["Qwen3MoeForCausalLM"], attention_bias=False, vocab_size=151936, num_hidden_layers=48, hidden_size=2048, head_dim=128,
               num_attention_heads=32, num_key_value_heads=4, intermediate_size=6144, moe_intermediate_size=768, num_experts=128,
               num_experts_per_tok=8, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[]), 30_532_122_624)])  # Qwen3 30B-A3B
def test_the_configs_of_published_models_give_as_many_parameters_as_published(tmp_path, content, size):
  (tmp_path / "config.json").write_text(json.dumps(content))
  assert num_parameters(families.read_config(tmp_path, scan_layers=True)) == size


def test_a_config_that_is_missing_or_broken_or_not_whole_is_said(copy):
  content = json.loads((copy / "config.json").read_text())
  del content["rms_norm_eps"]
  (copy / "config.json").write_text(json.dumps(content))
  with pytest.raises(UserError, match="the setting 'rms_norm_eps' is missing"):
    families.read_config(copy)
  (copy / "config.json").write_text("{")
  with pytest.raises(UserError, match="config.json cannot be read as a model's config"):
    families.read_config(copy)
  (copy / "config.json").unlink()
  with pytest.raises(UserError, match="No such file"):
    families.read_config(copy)


def rewrite(folder, edit):
  """Applies `edit` to the tensors of the first file."""
  import safetensors.numpy
  path = sorted(folder.glob("*.safetensors"))[0]
  tensors = safetensors.numpy.load_file(path)
  edit(tensors)
  safetensors.numpy.save_file(tensors, path)
  return path


@pytest.mark.parametrize("edit, fault", [
  (lambda t: t.pop("model.embed_tokens.weight"), "names the tensor 'model.embed_tokens.weight', which .* does not hold"),
  (lambda t: t.update({"model.embed_tokens.weight": np.zeros((95, 32), np.float32)}), r"embed_tokens.weight has shape \(95, 32\), its config.json says \(96, 32\)"),
  (lambda t: t.update(extra=np.zeros(3, np.float32)), "extra is not part of this model"),
  (lambda t: t.update({"model.embed_tokens.weight": np.zeros((96, 32), np.int8)}), "of type I8; only F32, F16, BF16")])
def test_a_tensor_that_is_missing_extra_misshapen_or_no_float_is_named(copy, edit, fault):
  rewrite(copy, edit)
  model = Transformer(families.read_config(copy))
  with pytest.raises(UserError, match=fault):
    weights.check(copy, model)


@pytest.mark.parametrize("change, fault", [
  (dict(shape=[96, 31]), r"'model.embed_tokens.weight' has 12288 bytes, which its type F32 and shape \(96, 31\) do not need"),
  (dict(shape=7), "says of the tensor 'model.embed_tokens.weight' only"), (dict(data_offsets=[0]), "says of the tensor")])
def test_a_header_that_contradicts_itself_is_refused_before_anything_is_read(copy, change, fault):
  path = sorted(copy.glob("*.safetensors"))[0]
  content = path.read_bytes()
  length = int.from_bytes(content[:8], "little")
  head = json.loads(content[8:8 + length])
  head["model.embed_tokens.weight"] |= change
  text = json.dumps(head).encode().ljust(length)
  path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length:])
  with pytest.raises(UserError, match=fault):
    weights.check(copy, Transformer(families.read_config(copy)))


def test_a_file_that_is_missing_cut_off_or_no_safetensors_is_named(copy):
  model = Transformer(families.read_config(copy))
  path = sorted(copy.glob("*.safetensors"))[2]
  whole = path.read_bytes()
  path.write_bytes(whole[:-5])
  with pytest.raises(UserError, match=f"{path.name} is cut off: the tensor '.*' ends at byte {len(whole)} of {len(whole) - 5}"):
    weights.check(copy, model)
  for content in (b"", b"nonsense nonsense", whole[:20]):
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"{path.name} is no whole .safetensors file"):
      weights.check(copy, model)
  path.unlink()
  with pytest.raises(UserError, match=f"{path.name} cannot be read .*the index names it"):
    weights.check(copy, model)
  (copy / "model.safetensors.index.json").write_text("{}")
  with pytest.raises(UserError, match="is no index of weights"):
    weights.check(copy, model)
  (copy / "model.safetensors.index.json").unlink()
  with pytest.raises(UserError, match="has neither model.safetensors nor"):
    weights.check(copy, model)


# ---- adapters


EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize("scan", [False, True])
def test_a_fresh_adapter_changes_nothing_and_a_merged_one_is_the_same_model(scan):
  tokens, right = expected("qwen2")
  base_model, base = load("qwen2", scan_layers=scan)
  model = Transformer(dataclasses.replace(base_model.config, lora_rank=3, lora_alpha=6.0, lora_layers=EVERY))
  _, adapters = lora.split(model.init(jax.random.key(0)))
  assert len(jax.tree.leaves(adapters)) == 2 * 7 * (1 if scan else 2)
  np.testing.assert_array_equal(logits(model, lora.join(base, adapters), tokens), logits(base_model, base, tokens))
  adapters = jax.tree.map(lambda x: x + 0.05 * np.random.default_rng(x.size).normal(size=x.shape), adapters)
  joined = lora.join(base, adapters)
  assert lora.split(joined)[0].keys() == base.keys()
  apart, merged = logits(model, joined, tokens), logits(base_model, lora.merge(joined, 2.0), tokens)
  np.testing.assert_allclose(apart, merged, atol=2e-5)
  assert np.abs(apart - right).max() > 0.05
  w, a, b = (np.asarray(x, np.float64) for x in pick(joined, scan, "o_proj"))
  change = np.einsum("hdr,re->hde", a, b) * 2.0
  np.testing.assert_allclose(pick(lora.merge(joined, 2.0), scan, "o_proj")[0], w + change, atol=1e-5)


def pick(params, scan, name):
  layer = {k: v[1] for k, v in params["layers"].items()} if scan else params["layer_1"]
  return [layer[k] for k in (name, name + lora.A, name + lora.B) if k in layer]


def test_adapters_lie_on_a_mesh_as_their_weights_do():
  mesh = sharding.make_mesh(dict(data=2, fsdp=2, tensor=2))
  one = gradient_of_adapters(ONE)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6), one, gradient_of_adapters(mesh))


def gradient_of_adapters(mesh):
  base_model, base = load("qwen2", mesh, scan_layers=True)
  model = Transformer(dataclasses.replace(base_model.config, lora_rank=4, lora_layers=EVERY))
  _, adapters = lora.split(model.init(jax.random.key(0)))
  adapters = sharding.place(jax.tree.map(lambda x: x + 0.1, adapters), mesh)
  tokens = sharding.shard_batch(np.random.default_rng(0).integers(0, 96, (8, 24)).astype(np.int32), mesh)
  at = jnp.broadcast_to(jnp.arange(24), tokens.shape)
  loss = lambda p: jnp.mean(logprobs.token_logprobs(model, lora.join(base, p), tokens, at, at * 0, chunk=8)[0])  # noqa: E731
  return jax.device_get(jax.jit(jax.grad(loss))(adapters))


def test_adapters_on_what_has_none_are_refused():
  for layers, fault in ((("experts",), "names 'experts'"), (("up_proj",), "names 'up_proj'; this model can have adapters on q_proj, k_proj, v_proj, o_proj")):
    with pytest.raises(ValueError, match=fault):
      families.read_config(FOLDER / "qwen3_moe", lora_rank=2, lora_layers=layers)
