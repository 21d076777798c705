"""Open model families: what a Hugging Face `config.json` means here, and which tensor of theirs is which leaf of ours.

Their matrices are [out, in], ours [in, out] with heads and head size apart. An architecture or a setting that the
decoder does not have is refused by name: a model that runs a little differently writes fluent text all the same.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import re

from mgrpo_jax.errors import UserError
from mgrpo_jax.policy.transformer import ModelConfig

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")

# Settings that must have one of these values, if they are there at all.
_ONLY = {
  "hidden_act": ("silu",), "attention_bias": (False, None), "mlp_bias": (False, None), "use_sliding_window": (False, None),
  "mlp_only_layers": ([], None), "decoder_sparse_step": (1, None), "quantization_config": (None,), "pretraining_tp": (1, None),
  "partial_rotary_factor": (1.0, None), "shared_expert_intermediate_size": (0, None), "is_decoder": (True, False, None),
}

_LAYER = {
  "attention_norm": "input_layernorm.weight", "mlp_norm": "post_attention_layernorm.weight", "router": "mlp.gate.weight",
  **{f"{n}_proj": f"self_attn.{n}_proj.weight" for n in "qkvo"}, **{f"{n}_bias": f"self_attn.{n}_proj.bias" for n in "qkv"},
  **{f"{n}_norm": f"self_attn.{n}_norm.weight" for n in "qk"}, **{f"{n}_proj": f"mlp.{n}_proj.weight" for n in ("gate", "up", "down")},
}
_TOP = {"embedding": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "lm_head": "lm_head.weight"}


def read_config(folder: pathlib.Path, **overrides) -> ModelConfig:
  """The model of a Hugging Face folder.

  Args:
    overrides: fields of `ModelConfig` that are a choice of whoever runs it (dtype, remat, scan_layers, ...).

  Raises:
    UserError: no config.json, another architecture, a setting that is not supported.
  """
  path = pathlib.Path(folder) / "config.json"
  try:
    there = json.loads(path.read_text(encoding="utf-8"))
  except (OSError, ValueError) as error:
    raise UserError(f"{path} cannot be read as a model's config ({getattr(error, 'strerror', None) or error})") from error
  try:
    return ModelConfig(**_fields(there) | overrides)
  except UserError as error:
    raise UserError(f"{path}: {error}") from error
  except KeyError as error:
    raise UserError(f"{path}: the setting {error.args[0]!r} is missing") from error
  except (AttributeError, TypeError, ValueError, ZeroDivisionError) as error:
    raise UserError(f"{path}: {error}") from error


def _fields(there: dict) -> dict:
  names = there.get("architectures") or ["none"]
  if names[0] not in ARCHITECTURES:
    raise UserError(f"the architecture {names[0]} is not supported; there are {', '.join(ARCHITECTURES)}")
  name = names[0]
  for key, allowed in _ONLY.items():
    if key in there and there[key] not in allowed:
      raise UserError(f"{key}={there[key]!r} is not supported (only {allowed[0]!r})")
  if there.get("sliding_window") and name == "LlamaForCausalLM":
    raise UserError(f"sliding_window={there['sliding_window']} is not supported")
  if "full_attention" not in (there.get("layer_types") or ["full_attention"]) or len(set(there.get("layer_types") or [0])) > 1:
    raise UserError("layer_types with other than full attention is not supported")
  heads, width = there["num_attention_heads"], there["hidden_size"]
  theta, scaling = _rope(there)
  fields = dict(
    vocab_size=there["vocab_size"], num_layers=there["num_hidden_layers"], embed_dim=width, num_heads=heads,
    num_kv_heads=there.get("num_key_value_heads") or heads, head_dim=there.get("head_dim") or width // heads,
    mlp_dim=there["intermediate_size"], rope_theta=theta, rope_scaling=scaling, norm_eps=there["rms_norm_eps"],
    tie_embeddings=bool(there.get("tie_word_embeddings", False)), qkv_bias=name == "Qwen2ForCausalLM", qk_norm=name.startswith("Qwen3"))
  if name == "Qwen3MoeForCausalLM":
    experts = there["num_local_experts"] if "num_local_experts" in there else there["num_experts"]  # the name in new files, in old ones
    fields |= dict(num_experts=experts, experts_per_token=there["num_experts_per_tok"],
                   expert_dim=there["moe_intermediate_size"], norm_topk=bool(there.get("norm_topk_prob", False)))
  return fields


def _rope(there: dict) -> tuple[float, tuple[float, ...] | None]:
  """(theta, Llama 3's scaling or None), in the old layout of the file or the new one (`rope_parameters`)."""
  rope = there.get("rope_parameters") or there.get("rope_scaling") or {}
  kind = rope.get("rope_type", rope.get("type", "default"))
  theta = float(rope.get("rope_theta", there.get("rope_theta", 10_000.0)))
  if kind == "default":
    if unknown := set(rope) - {"rope_type", "type", "rope_theta"}:
      raise UserError(f"the rope setting {min(unknown)!r} is not supported without the type 'llama3'")
    return theta, None
  if kind != "llama3":
    raise UserError(f"rope scaling of type {kind!r} is not supported (only 'llama3')")
  keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
  return theta, tuple(float(rope[k]) for k in keys)


@dataclasses.dataclass(frozen=True)
class Piece:
  """One tensor of theirs and its place in a leaf of ours: at `index` along the leaf's first dimensions."""

  tensor: str
  shape: tuple[int, ...]
  index: tuple[int, ...]


def pieces(path: str, shape: tuple[int, ...]) -> list[Piece]:
  """The tensors that make the leaf at `path` ("layers/q_proj"), with their shapes in the file."""
  *parents, name = path.split("/")
  if not parents:
    return [Piece(_TOP[name], shape[::-1] if name == "lm_head" else shape, ())]
  stacked = parents[0] == "layers"
  layers = range(shape[0]) if stacked else [int(parents[0].removeprefix("layer_"))]
  shape = shape[1:] if stacked else shape
  out = []
  for layer in layers:
    place = (layer,) if stacked else ()
    if expert := re.fullmatch(r"(gate|up|down)_experts", name):
      out += [Piece(f"model.layers.{layer}.mlp.experts.{x}.{expert[1]}_proj.weight", shape[:0:-1], (*place, x)) for x in range(shape[0])]
    else:
      out.append(Piece(f"model.layers.{layer}.{_LAYER[name]}", _file_shape(name, shape), place))
  return out


def _file_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
  """The shape in the file of one layer's leaf of ours."""
  if name.endswith(("norm", "bias")):
    return (math.prod(shape),)
  inputs = 2 if name == "o_proj" else 1
  return (math.prod(shape[inputs:]), math.prod(shape[:inputs]))


def is_transposed(path: str) -> bool:
  """Whether the file keeps the leaf at `path` as [out, in]."""
  name = path.rsplit("/", 1)[-1]
  return name != "embedding" and not name.endswith(("norm", "bias"))
