"""LoRA: trained low-rank adapters beside frozen weights (Hu et al. 2021), as leaves of the same parameter tree.

Beside a weight W [in, out] stand `<name>_lora_a` [in, r] and `<name>_lora_b` [r, out] (`in` and `out` may be several
dimensions, and stacked layers come first); the layer uses W + alpha / r * A B. B starts at zero, so a fresh adapter
changes nothing. The base and the adapters are two trees that meet in `join`: agents that share a base hold it once.
"""

from __future__ import annotations

import jax.numpy as jnp

MLP = ("gate_proj", "up_proj", "down_proj")
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", *MLP)  # weights that may have adapters
A, B = "_lora_a", "_lora_b"


def split(params: dict) -> tuple[dict, dict]:
  """(base, adapters) of a tree of parameters; parts without leaves are left out."""
  base, adapters = {}, {}
  for name, value in params.items():
    if isinstance(value, dict):
      parts = split(value)
      base |= {name: parts[0]} if parts[0] else {}
      adapters |= {name: parts[1]} if parts[1] else {}
    else:
      (adapters if name.endswith((A, B)) else base)[name] = value
  return base, adapters


def join(base: dict | None, params: dict) -> dict:
  """The inverse of `split`, without a copy; without a base, `params` as they are."""
  if not base:
    return params
  out = dict(base)
  for name, value in params.items():
    out[name] = join(base.get(name), value) if isinstance(value, dict) else value
  return out


def merge(params: dict, scale: float) -> dict:
  """Every adapter worked into its weight, in float32: a tree as if there had never been adapters.

  Args:
    scale: alpha / r.
  """
  out = {}
  for name, value in params.items():
    if isinstance(value, dict):
      out[name] = merge(value, scale)
    elif name + A in params:
      a, b = params[name + A].astype(jnp.float32), params[name + B].astype(jnp.float32)
      stacked = a.shape[: a.ndim + b.ndim - 2 - value.ndim]
      rank = a.shape[-1]
      change = a.reshape(*stacked, -1, rank) @ b.reshape(*stacked, rank, -1)
      out[name] = (value.astype(jnp.float32) + scale * change.reshape(value.shape)).astype(value.dtype)
    elif not name.endswith((A, B)):
      out[name] = value
  return out
