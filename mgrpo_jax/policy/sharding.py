"""Meshes and shardings of one agent: logical axis names on parameters, one table from those to mesh axes.

A mesh shape is a dict, `{"data": 2, "fsdp": 1, "tensor": 4}`, and a rule table a dict from logical axis to the
name of a mesh axis, a tuple of names, or None. Both are data and belong to an agent (its model carries them); nothing
reads a global mesh. A rule that names an axis which the mesh lacks means: not split.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

# What each dimension of a parameter is, by the end of its path. Optimizer moments end in the same names.
PARAM_AXES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
  (r"embedding", ("vocab", "embed")),
  (r"lm_head", ("embed", "vocab")),
  (r"shift", ("embed", None)),
  (r"q_proj", ("embed", "heads", "head_dim")),
  (r"[kv]_proj", ("embed", "kv_heads", "head_dim")),
  (r"o_proj", ("heads", "head_dim", "embed")),
  (r"gate_proj|up_proj", ("embed", "mlp")),
  (r"down_proj", ("mlp", "embed")),
  (r"\w*norm", (None,)),
  (r"q_bias", ("heads", "head_dim")),
  (r"[kv]_bias", ("kv_heads", "head_dim")),
  (r"router", ("embed", None)),
  (r"(gate|up)_experts", ("experts", "embed", "mlp")),
  (r"down_experts", ("experts", "mlp", "embed")),
  # adapters (policy/lora.py): their own dimension, the rank, is never split
  (r"([qkv]|gate|up)_proj_lora_a", ("embed", None)),
  (r"o_proj_lora_a", ("heads", "head_dim", None)),
  (r"down_proj_lora_a", ("mlp", None)),
  (r"q_proj_lora_b", (None, "heads", "head_dim")),
  (r"[kv]_proj_lora_b", (None, "kv_heads", "head_dim")),
  (r"(o|down)_proj_lora_b", (None, "embed")),
  (r"(gate|up)_proj_lora_b", (None, "mlp")),
)

class Rules(dict):
  """A rule table, which nobody changes: hashable, as part of a model's description."""

  def __hash__(self):
    return hash(frozenset(self.items()))

  def but(self, changes: Sequence[tuple[str, str | tuple[str, ...] | None]]) -> Rules:
    """The same table with some rules replaced.

    Raises:
      ValueError: no such logical axis, or no name of a mesh axis.
    """
    for change in changes:
      if not isinstance(change, Sequence) or isinstance(change, str) or len(change) != 2 or change[0] not in self:
        raise ValueError(f"{change!r} is no pair of a logical axis and a mesh axis; logical axes are {', '.join(self)}.")
      names = (change[1],) if isinstance(change[1], str) else change[1] or ()
      unknown = [n for n in names if n not in MESH_AXES]
      if unknown:
        raise ValueError(f"{change!r} names the mesh axis {unknown[0]!r}; there are {', '.join(MESH_AXES)}.")
    return Rules(self | {a: tuple(x) if isinstance(x, list) else x for a, x in changes})


MESH_AXES = ("data", "fsdp", "expert", "tensor")  # of an agent's config
# Batch rows and cache slots over "data", "fsdp" and "expert", weights over "fsdp" and "tensor", experts over "expert" too.
DEFAULT_RULES = Rules({
  "batch": ("data", "fsdp", "expert"),
  "slots": ("data", "fsdp", "expert"),
  "vocab": "tensor",
  "embed": "fsdp",
  "heads": "tensor",
  "kv_heads": "tensor",
  "head_dim": None,
  "mlp": "tensor",
  "experts": "expert",
})


def make_mesh(shape: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
  """A mesh of the first prod(shape) devices, with axes left to the compiler (AxisType.Auto).

  Devices of several TPU slices: the first axis goes across the slices, all others stay inside one.

  Raises:
    ValueError: too few devices, a size below 1, or a first axis that is no multiple of the slices.
  """
  devices = list(jax.devices() if devices is None else devices)
  need = _size(shape)
  if need > len(devices):
    raise ValueError(f"mesh {dict(shape)} needs {need} devices, there are {len(devices)}; make an axis smaller.")
  devices, sizes, auto = devices[:need], tuple(shape.values()), (AxisType.Auto,) * len(shape)
  slices = len({getattr(d, "slice_index", 0) for d in devices})
  if slices == 1:
    return jax.make_mesh(sizes, tuple(shape), axis_types=auto, devices=devices)
  if sizes[0] % slices:
    raise ValueError(f"mesh {dict(shape)} lies on {slices} slices: make its first axis a multiple of {slices}.")
  across = (slices,) + (1,) * (len(sizes) - 1)
  grid = mesh_utils.create_hybrid_device_mesh((sizes[0] // slices, *sizes[1:]), across, devices)
  return Mesh(grid, tuple(shape), axis_types=auto)


def partition_devices(devices: Sequence[jax.Device], shapes: Mapping[str, Mapping[str, int]]) -> dict[str, Mesh]:
  """One mesh per agent: on devices of its own, in the order given, if there are enough; else all begin at the first.

  Args:
    shapes: agent name -> mesh shape.

  Raises:
    ValueError: one agent alone needs more devices than there are.
  """
  devices = list(devices)
  enough = sum(_size(s) for s in shapes.values()) <= len(devices)
  meshes, first = {}, 0
  for agent, shape in shapes.items():
    try:
      meshes[agent] = make_mesh(shape, devices[first:])
    except ValueError as error:
      raise ValueError(f"agent {agent!r}: {error}") from None
    first += _size(shape) if enough else 0
  return meshes


def param_shardings(tree, mesh: Mesh, rules: Mapping = DEFAULT_RULES):
  """A NamedSharding for every leaf of a tree of parameters, or of optimizer state built on them.

  Args:
    tree: arrays or ShapeDtypeStructs, usually from `jax.eval_shape`. Scalars are replicated; every other leaf
      must end in a name that PARAM_AXES knows.

  Raises:
    ValueError: a mesh axis does not divide a dimension, an unknown leaf, or rules that do not fit the mesh.
  """
  _check_rules(mesh, rules)

  def one(path, leaf):
    if leaf.ndim == 0:
      return NamedSharding(mesh, PartitionSpec())
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    axes = logical_axes(name)
    if len(axes) != leaf.ndim:
      raise ValueError(f"parameter {name!r} has shape {leaf.shape}, but its axes are {axes}; fix PARAM_AXES.")
    return NamedSharding(mesh, _spec(axes, leaf.shape, mesh, rules, f"parameter {name!r}"))

  return jax.tree_util.tree_map_with_path(one, tree)


def logical_axes(path: str) -> tuple[str | None, ...]:
  """The logical axes of the parameter at "layer_0/q_proj"; stacked layers come first and are never split."""
  *parents, last = path.split("/")
  for pattern, axes in PARAM_AXES:
    if re.fullmatch(pattern, last):
      return (None,) * ("layers" in parents) + axes
  raise ValueError(f"parameter {path!r} has no logical axes; add its name to PARAM_AXES in policy/sharding.py.")


def init_sharded(model, key: jax.Array, mesh: Mesh, rules: Mapping = DEFAULT_RULES):
  """`model.init(key)`, each parameter created in its place; no device ever holds a whole one that is split.

  The numbers do not depend on the mesh.
  """
  shardings = param_shardings(jax.eval_shape(model.init, key), mesh, rules)
  return jax.jit(model.init, out_shardings=shardings)(key)


def abstract(tree, shardings):
  """ShapeDtypeStructs of a tree's leaves in their places, from which a program can be compiled without any array."""
  return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)


def place(tree, mesh: Mesh, rules: Mapping = DEFAULT_RULES, *, copy: bool = True):
  """Parameters on a mesh. The result shares no buffer with `tree`, which may be donated afterwards, unless `copy` is False."""
  if not copy:
    return jax.device_put(tree, param_shardings(tree, mesh, rules))

  def one(x, sharding):
    moved = jax.device_put(x, sharding, may_alias=False)
    if isinstance(x, jax.Array) and not x.sharding.is_equivalent_to(sharding, x.ndim):
      return jnp.copy(moved)  # between shardings of overlapping devices jax takes over the shards that fit, alias or not
    return moved

  return jax.tree.map(one, tree, param_shardings(tree, mesh, rules))


def array_sharding(axes: Sequence[str | None], shape: Sequence[int], mesh: Mesh, rules: Mapping = DEFAULT_RULES,
                   what: str = "array") -> NamedSharding:
  """Sharding of one array whose dimensions have the given logical names; ValueError as in `param_shardings`."""
  return NamedSharding(mesh, _spec(axes, shape, mesh, rules, what))


def shard_batch(batch, mesh: Mesh, rules: Mapping = DEFAULT_RULES):
  """Puts a tree of host arrays on the mesh, the first dimension of each split as "batch" says (scalars copied)."""
  batch = jax.tree.map(lambda x: x if isinstance(x, jax.Array) else np.asarray(x), batch)
  return jax.device_put(batch, batch_shardings(batch, mesh, rules))


def batch_shardings(batch, mesh: Mesh, rules: Mapping = DEFAULT_RULES):
  """Where `shard_batch` puts a tree of arrays."""
  def one(x):
    axes = ("batch",) + (None,) * (x.ndim - 1) if x.ndim else ()
    return array_sharding(axes, x.shape, mesh, rules, "batch")

  return jax.tree.map(one, batch)


def axis_size(logical: str, mesh: Mesh, rules: Mapping = DEFAULT_RULES) -> int:
  """Into how many parts the table splits a logical axis on this mesh."""
  return int(np.prod([mesh.shape[a] for a in mesh_axes(logical, mesh, rules)], dtype=int))


def mesh_axes(logical: str | None, mesh: Mesh, rules: Mapping = DEFAULT_RULES) -> tuple[str, ...]:
  """The axes of this mesh over which the table splits a logical axis."""
  rule = rules.get(logical) if logical is not None else None
  names = (rule,) if isinstance(rule, str) else (rule or ())
  return tuple(n for n in names if n in mesh.shape)


def _spec(axes, shape, mesh, rules, what):
  entries, taken = [], set()
  for i, (logical, size) in enumerate(zip(axes, shape, strict=True)):
    names = mesh_axes(logical, mesh, rules)
    twice = taken.intersection(names)
    if twice:
      raise ValueError(f"{what}: the rules split two of its dimensions over mesh axis {twice.pop()!r}; "
                       f"set one of {[a for a in axes if a]} to None.")
    taken.update(names)
    parts = axis_size(logical, mesh, rules)
    if size % parts:
      raise ValueError(f"{what} has shape {tuple(shape)}: its dimension {i} ({logical!r}, size {size}) does not "
                       f"split over mesh axis {'x'.join(names)} of size {parts}; make the axis a divisor of "
                       f"{size}, or set the rule {logical!r} to None.")
    entries.append(names[0] if len(names) == 1 else (names or None))
  while entries and entries[-1] is None:
    entries.pop()
  return PartitionSpec(*entries)


def _check_rules(mesh, rules):
  known = set(DEFAULT_RULES)
  unknown = set(rules) - known
  if unknown:
    raise ValueError(f"sharding rules {sorted(unknown)} name no logical axis; there are {sorted(known)}.")
  used = {a for logical in rules for a in mesh_axes(logical, mesh, rules)}
  idle = [a for a, n in mesh.shape.items() if n > 1 and a not in used]
  if idle:
    raise ValueError(f"no sharding rule uses mesh axis {idle[0]!r} of size {mesh.shape[idle[0]]}; "
                     f"rename it to one of those in the rules {dict(rules)}, or add a rule.")


def _size(shape: Mapping[str, int]) -> int:
  if not shape or any(int(n) != n or n < 1 for n in shape.values()):
    raise ValueError(f"mesh shape {dict(shape)} must name at least one axis, each of size 1 or more.")
  return int(np.prod(list(shape.values())))
