"""Open weights in and out: safetensors in Hugging Face's layout, tensor by tensor, straight into sharded arrays.

The headers are checked first, all of them, so that nothing else starts with a file that does not fit. Then one tensor
at a time is read and put in its place: the host never holds more than one of theirs.
"""

from __future__ import annotations

import functools
import json
import math
import pathlib
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors.numpy

from mgrpo_jax.errors import UserError
from mgrpo_jax.policy import families, sharding
from mgrpo_jax.policy.transformer import Transformer

_TYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
_INDEX = "model.safetensors.index.json"
SHARD_BYTES = 4 * 2**30  # a file of an export is not larger, unless one tensor is
# Files beside the weights that an export takes over.
COMPANIONS = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "generation_config.json")


class Headers:
  """Where every tensor of a folder lies: {name: (file, type, shape, first byte)}.

  Raises:
    UserError: no weights, a missing or damaged file, a tensor of a type that is no float.
  """

  def __init__(self, folder: pathlib.Path):
    folder = pathlib.Path(folder)
    self.folder, self.tensors = folder, {}
    if (folder / _INDEX).is_file():
      try:
        listed = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
        files = sorted(set(listed.values()))
      except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder / _INDEX} is no index of weights ({error})") from error
    elif (folder / "model.safetensors").is_file():
      listed, files = {}, ["model.safetensors"]
    else:
      raise UserError(f"{folder} has neither model.safetensors nor {_INDEX}")
    for name in files:
      self._add(folder / name)
    lost = [n for n in listed if n not in self.tensors]
    if lost:
      raise UserError(f"{folder / _INDEX} names the tensor {lost[0]!r}, which {listed[lost[0]]} does not hold")

  def _add(self, path: pathlib.Path) -> None:
    try:
      size = path.stat().st_size
      with path.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        head = json.loads(f.read(length)) if length <= size - 8 else None
    except OSError as error:
      raise UserError(f"weights {path} cannot be read ({error.strerror}); the index names it") from error
    except ValueError:
      head = None
    if not isinstance(head, dict):
      raise UserError(f"{path} is no whole .safetensors file; download it again")
    for name, t in head.items():
      if name == "__metadata__":
        continue
      try:
        kind, shape, (first, last) = t["dtype"], tuple(t["shape"]), (8 + length + o for o in t["data_offsets"])
        count = math.prod(shape)
      except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} says of the tensor {name!r} only {t!r}; download it again") from error
      if kind not in _TYPES:
        raise UserError(f"{path}: the tensor {name!r} is of type {kind}; only {', '.join(_TYPES)} can be read")
      if last > size:
        raise UserError(f"{path} is cut off: the tensor {name!r} ends at byte {last} of {size}; download it again")
      if count * _TYPES[kind].itemsize != last - first:
        raise UserError(f"{path}: the tensor {name!r} has {last - first} bytes, which its type {kind} and shape {shape} do not need; download it again")
      self.tensors[name] = (path, _TYPES[kind], shape, first)

  def read(self, name: str) -> np.ndarray:
    """The tensor, mapped from its file."""
    path, dtype, shape, first = self.tensors[name]
    return np.memmap(path, dtype, "r", first, shape)


def check(folder: pathlib.Path, model: Transformer) -> Headers:
  """Whether a folder holds exactly this model's tensors; reads headers only.

  Raises:
    UserError: names the first tensors that are missing, too many, or of another shape.
  """
  headers = Headers(folder)
  wanted = {p.tensor: p.shape for leaf in _leaves(model).items() for p in families.pieces(leaf[0], leaf[1].shape)}
  extra = [n for n in headers.tensors if n not in wanted and not n.endswith("rotary_emb.inv_freq")]
  if model.config.tie_embeddings:
    extra = [n for n in extra if n != "lm_head.weight"]  # a copy of the embedding
  faults = [f"{n} is missing" for n in wanted if n not in headers.tensors] + [f"{n} is not part of this model" for n in extra]
  faults += [f"{n} has shape {headers.tensors[n][2]}, its config.json says {s}" for n, s in wanted.items()
             if n in headers.tensors and headers.tensors[n][2] != s]
  if faults:
    more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
    raise UserError(f"the weights in {folder} do not fit: {'; '.join(faults[:3])}{more}")
  return headers


def read(folder: pathlib.Path, model: Transformer, mesh) -> dict:
  """The parameters of a Hugging Face folder, each on its devices.

  Args:
    model: of `families.read_config`; without adapters.

  Raises:
    UserError: as `check`.
  """
  headers = check(folder, model)
  abstract = jax.eval_shape(model.init, jax.random.key(0))
  places = sharding.param_shardings(abstract, mesh, model.rules)

  def one(path, leaf, place):
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    parts = families.pieces(name, leaf.shape)
    if not parts[0].index:
      return _put(headers, name, parts[0], leaf.shape, leaf.dtype, place)
    whole = jax.jit(functools.partial(jnp.zeros, leaf.shape, leaf.dtype), out_shardings=place)()
    depth = len(parts[0].index)
    piece_place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*place.spec[depth:]))
    put = _filler(place)
    for p in parts:
      piece = _put(headers, name, p, leaf.shape[depth:], leaf.dtype, piece_place)
      whole = put(whole, piece, np.asarray(p.index, np.int32))
      whole.block_until_ready()  # else the host runs ahead, holding every piece
    return whole

  return jax.tree_util.tree_map_with_path(one, abstract, places)


@functools.cache
def _filler(place):
  """(leaf, piece, index) -> the leaf with the piece in it, in place."""
  def put(whole, piece, index):
    start = [*index, *[jnp.int32(0)] * piece.ndim]
    return jax.lax.dynamic_update_slice(whole, piece[(None,) * index.shape[0]], start)

  return jax.jit(put, donate_argnums=0, out_shardings=place)


def _put(headers: Headers, leaf: str, piece: families.Piece, shape, dtype, place) -> jax.Array:
  """One tensor as ours, on its devices; each process reads only what its own devices keep."""
  x = headers.read(piece.tensor)
  x = (x.T if families.is_transposed(leaf) else x).reshape(shape)  # splits dimensions only: a view of the file
  return jax.make_array_from_callback(shape, place, lambda index: np.ascontiguousarray(x[index], dtype))


def _leaves(model: Transformer) -> dict:
  abstract = jax.eval_shape(model.init, jax.random.key(0))
  return {jax.tree_util.keystr(k, simple=True, separator="/"): v for k, v in jax.tree_util.tree_leaves_with_path(abstract)}


def write(folder: pathlib.Path, params: dict, model: Transformer, source: pathlib.Path, *, dtype: str | None = None,
          shard_bytes: int = SHARD_BYTES) -> list[pathlib.Path]:
  """Writes a Hugging Face folder: these weights, and everything else as it stands in the folder that they began in.

  Args:
    params: without adapters (`lora.merge`).
    source: where config.json and the tokenizer's files are taken from.
    dtype: of the file ("float32", "bfloat16", "float16"); None keeps that of the parameters.

  Returns:
    The files of the weights.
  """
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  leaves = {jax.tree_util.keystr(k, simple=True, separator="/"): v for k, v in jax.tree_util.tree_leaves_with_path(params)}
  want = jnp.dtype(dtype or model.config.param_dtype)
  sizes = [(name, p, math.prod(p.shape) * want.itemsize) for name, leaf in leaves.items() for p in families.pieces(name, leaf.shape)]
  shards: list[list] = [[]]
  room = shard_bytes
  for item in sizes:
    if item[2] > room and shards[-1]:
      shards.append([])
      room = shard_bytes
    shards[-1].append(item)
    room -= item[2]
  files, where = [], {}
  for i, shard in enumerate(shards, 1):
    name = "model.safetensors" if len(shards) == 1 else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
    tensors = {p.tensor: _theirs(leaves[leaf], leaf, p, want) for leaf, p, _ in shard}
    safetensors.numpy.save_file(tensors, folder / f".{name}", metadata={"format": "pt"})
    (folder / f".{name}").replace(folder / name)
    files.append(folder / name)
    where |= dict.fromkeys(tensors, name)
  if len(shards) > 1:
    _write_json(folder / _INDEX, {"metadata": {"total_size": sum(s for *_, s in sizes)}, "weight_map": where})
  for name in COMPANIONS:
    if (pathlib.Path(source) / name).is_file():
      shutil.copyfile(pathlib.Path(source) / name, folder / f".{name}")
      (folder / f".{name}").replace(folder / name)
  config = json.loads((pathlib.Path(source) / "config.json").read_text(encoding="utf-8"))
  _write_json(folder / "config.json", config | {"torch_dtype": want.name, "dtype": want.name})
  return files


def _theirs(leaf, name: str, piece: families.Piece, dtype) -> np.ndarray:
  x = np.asarray(leaf[piece.index]).astype(dtype)
  x = x.reshape(piece.shape[::-1]).T if families.is_transposed(name) else x.reshape(piece.shape)
  return np.ascontiguousarray(x)


def _write_json(path: pathlib.Path, content: dict) -> None:
  part = path.with_name(f".{path.name}")
  part.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
  part.replace(path)
