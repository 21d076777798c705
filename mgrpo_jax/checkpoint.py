"""Checkpoints: everything a resumed run needs, saved whole or not at all; and small weight files.

A checkpoint holds, per agent, any pytree of arrays (`{"params", "opt_state", "step"}`) and one JSON-able
dict of host state (data iterator, random state, counters, windows, weight versions). Trees are stored flat
by the path of each leaf, beside a manifest of shapes and dtypes, so that a wrong tree is refused by the name
of the leaf, and one saved on a mesh can be read onto any other.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import json
import logging
import math
import os
import pathlib
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from mgrpo_jax.errors import UserError, free_mb, one_line

HOST = "host"  # the item of a checkpoint that holds the JSON part
_RESERVED = (HOST, "metrics", "default")


class Checkpoints:
  """The checkpoints of one run, newest and best kept. Saves are synchronous: once `save` returns, it stands.

  Orbax writes into a temporary folder and renames it, so a process killed at any instant leaves either the
  whole new checkpoint or only the older ones; leftovers are gone by the next save.

  Args:
    folder: where step folders are kept (a local path, or gs://).
    keep_last: how many of the newest to keep (at least 1).
    keep_best: how many of the best by score to keep beside them; equal scores keep the earliest.
    read_only: for readers of a run that may be alive: nothing is created, removed or cleaned up.
  """

  def __init__(
    self, folder: str | os.PathLike, keep_last: int = 2, keep_best: int = 1, *, read_only: bool = False
  ):
    import orbax.checkpoint as ocp

    if keep_last < 1 or keep_best < 0:
      raise ValueError(f"checkpoints: need keep_last >= 1, keep_best >= 0, got {keep_last} and {keep_best}")
    folder = os.fspath(folder)
    self.folder = folder if "://" in folder else os.path.abspath(folder)
    self.keep_last, self.keep_best, self.read_only = keep_last, keep_best, read_only
    if read_only and "://" not in folder and not os.path.isdir(folder):
      raise ValueError(f"no checkpoints at {folder!r}: there is no such folder")
    self._ocp = ocp
    self._records: dict[int, dict] = {}
    with _quiet_orbax():
      options = ocp.CheckpointManagerOptions(
        max_to_keep=None,  # `_prune` decides: orbax has no "newest and best, ties to the earliest"
        enable_async_checkpointing=False,
        cleanup_tmp_directories=not read_only,
        create=not read_only,
        read_only=read_only,
        step_prefix="step",
        step_format_fixed_length=8,
        # a removal is a rename first, so that a half-removed checkpoint is never taken for a whole one
        todelete_subdir=None if "://" in folder else ".removed",
      )
      self._manager = ocp.CheckpointManager(self.folder, options=options)
    if not read_only:
      self._empty_trash()

  def save(self, step: int, agents: Mapping[str, Any], host: Mapping, score: float | None = None) -> bool:
    """Saves one checkpoint and drops those that need not be kept.

    Args:
      step: finished steps, >= 0.
      agents: per agent name, a pytree of jax or numpy arrays and numbers.
      host: JSON-able dict; bytes and numpy arrays inside are kept too, tuples come back as lists.
      score: validation score, higher is better; None or NaN is never best.

    Returns:
      True if it was written, False if a checkpoint of this step stood already (it is left as it is).

    Raises:
      ValueError: an agent name or a host value that cannot be kept.
      OSError: no room on the disk, said before anything is written where that can be known.
    """
    ocp = self._ocp
    if step in self._manager.all_steps():
      return False
    record = {"score": _score(score), "host": _encode(host, "host"), "manifest": {}, "agents": sorted(agents)}
    items = {}
    for name, tree in agents.items():
      if name in _RESERVED or not name or "/" in name:
        raise ValueError(f"checkpoint: an agent cannot be called {name!r}")
      leaves = flatten(tree)
      record["manifest"][name] = {k: [list(np.shape(v)), _dtype_name(v)] for k, v in leaves.items()}
      # arrays without elements carry nothing but their shape, and orbax refuses them
      kept = {k: _array(v, f"{name}: {k}") for k, v in leaves.items() if np.size(v)}
      if kept:
        items[name] = ocp.args.PyTreeSave(kept)
    self._check_room(sum(np.size(v) * jax.numpy.dtype(_dtype_name(v)).itemsize for t in agents.values() for v in jax.tree.leaves(t)))
    try:
      with _quiet_orbax():
        # force: after going back to an older step, orbax would silently skip every step up to the latest
        saved = self._manager.save(
          step, args=ocp.args.Composite(**items, **{HOST: ocp.args.JsonSave(record)}), force=True
        )
    except Exception:
      # else each of its unfinished writes says the same again, and those that never began say so at the process's end
      logging.getLogger("asyncio").setLevel(logging.CRITICAL)
      warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
      raise
    if not saved:
      raise RuntimeError(f"orbax did not save step {step} in {self.folder}")
    self._records[step] = record
    self._prune()
    return True

  def steps(self) -> list[int]:
    """Steps of all whole checkpoints, ascending."""
    return sorted(self._manager.all_steps())

  def latest_step(self) -> int | None:
    """The newest step, or None when there is no checkpoint."""
    return max(self._manager.all_steps(), default=None)

  def best(self) -> int | None:
    """The kept step with the highest score (equal scores: the earliest), or None when none has a score."""
    return next(iter(self._by_score()), None)

  def score(self, step: int) -> float | None:
    """The validation score that the checkpoint was saved with."""
    return self._record(step)["score"]

  def refresh(self) -> None:
    """For readers: look again what a living run has saved or dropped meanwhile."""
    self._records.clear()
    self._manager.reload()

  def restore(self, step: int | None, abstract: Mapping[str, Any]) -> tuple[dict[str, Any], dict]:
    """Reads a checkpoint onto the devices that `abstract` names.

    Args:
      step: which one; None is the latest.
      abstract: per agent, the tree's shape: leaves are ShapeDtypeStruct (with `sharding`; without one the
        leaf is uncommitted on the default device) or arrays, whose shape, dtype and sharding are taken. It
        may name fewer agents than were saved, and only some of an agent's top-level keys (`{"params": ...}`).

    Returns:
      ({name: tree of jax arrays}, host).

    Raises:
      ValueError: nothing saved, no such step, or a tree that differs (names the agent, the leaf, the shapes).
    """
    ocp = self._ocp
    step = self._existing(step)
    record = self._record(step)
    wanted, items = {}, {}
    for name, tree in abstract.items():
      if name not in record["manifest"]:
        there = ", ".join(record["agents"])
        raise ValueError(f"checkpoint of step {step} in {self.folder} has no agent {name!r}, only {there}")
      # a single reader of one part (say, evaluation reading params) need not build the optimizer's tree
      saved = _only_parts(record["manifest"][name], tree)
      wanted[name] = {k: _abstract_leaf(v) for k, v in flatten(tree).items()}
      check_manifest(f"checkpoint of step {step}, agent {name!r}", saved, wanted[name])
      # without a stated sharding the first device reads it, and `_place` makes it uncommitted afterwards
      first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
      kept = {
        k: v if v.sharding else jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=first)
        for k, v in wanted[name].items()
        if v.size
      }
      if kept:
        partial = len(saved) < len(record["manifest"][name])
        items[name] = ocp.args.PyTreeRestore(
          kept, restore_args=ocp.checkpoint_utils.construct_restore_args(kept), partial_restore=partial
        )
    try:
      with _quiet_orbax():
        restored = self._manager.restore(step, args=ocp.args.Composite(**items)) if items else {}
    except Exception as e:
      raise self._unreadable(step, e) from e
    agents = {}
    for name, tree in abstract.items():
      leaves = dict(restored[name]) if name in items else {}
      filled = [_place(leaves.get(k), v) for k, v in wanted[name].items()]
      agents[name] = jax.tree.unflatten(jax.tree.structure(tree), filled)
    return agents, self.restore_host(step)

  def restore_host(self, step: int | None = None) -> dict:
    """Only the host part of a checkpoint (None: the latest)."""
    return _decode(self._record(self._existing(step))["host"])

  def drop_after(self, step: int) -> list[int]:
    """Removes checkpoints later than `step` (going on from an older one makes them another history)."""
    later = [s for s in self.steps() if s > step]
    for s in reversed(later):  # newest first: killed half-way, what is left is still one history
      self._delete(s)
    self._empty_trash()
    return later

  def close(self) -> None:
    self._manager.close()

  def __enter__(self) -> Checkpoints:
    return self

  def __exit__(self, *exc) -> None:
    self.close()

  def _check_room(self, size: int) -> None:
    # orbax's threads would fill the terminal with tracebacks, each of one array that it could not write
    if "://" not in self.folder and free_mb(self.folder) * 1e6 < 1.1 * size + 1e6:
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.folder)

  def _existing(self, step: int | None) -> int:
    found = self.latest_step() if step is None else step
    if found is None:
      raise ValueError(f"no checkpoint in {self.folder}")
    if found not in self._manager.all_steps():
      raise ValueError(f"no checkpoint of step {found} in {self.folder}; there are: {self.steps()}")
    return found

  def _record(self, step: int) -> dict:
    if step not in self._records:
      try:
        with _quiet_orbax():
          args = self._ocp.args.Composite(**{HOST: self._ocp.args.JsonRestore()})
          record = self._manager.restore(step, args=args)[HOST]
        if not {"score", "host", "manifest", "agents"} <= record.keys():
          raise ValueError("its host part is not whole")
      except Exception as e:
        raise self._unreadable(step, e) from e
      self._records[step] = record
    return self._records[step]

  def _unreadable(self, step: int, e: Exception) -> UserError:
    others = [s for s in self.steps() if s != step]
    return UserError(
      f"checkpoint of step {step} in {self.folder} cannot be read ({type(e).__name__}: {one_line(e)[:200]}); "
      f"remove its folder to use another (there are: {others})"
    )

  def _by_score(self) -> list[int]:
    scored = [(s, self._record(s)["score"]) for s in self.steps()]
    return [s for s, x in sorted(((s, x) for s, x in scored if x is not None), key=lambda p: (-p[1], p[0]))]

  def _prune(self) -> None:
    steps = self.steps()
    keep = set(steps[-self.keep_last :]) | set(self._by_score()[: self.keep_best])
    for s in steps:
      if s not in keep:
        self._delete(s)
    self._empty_trash()

  def _delete(self, step: int) -> None:
    with _quiet_orbax():
      self._manager.delete(step)
    self._records.pop(step, None)

  def _empty_trash(self) -> None:
    if "://" not in self.folder and jax.process_index() == 0:
      import shutil

      shutil.rmtree(os.path.join(self.folder, ".removed"), ignore_errors=True)


# --------------------------------------------------------------------------------------------- weight files


def save_weights(path: str | os.PathLike, params: Any, metadata: Mapping | None = None) -> None:
  """Writes a nested dict of arrays as .safetensors: flat names joined by "/", metadata as JSON.

  The same params and metadata give the same bytes. The file appears whole or not at all.

  Raises:
    ValueError: a tree that is not nested dicts of float32, float16 or bfloat16 arrays.
  """
  import safetensors.numpy

  from mgrpo_jax.run_folder import write_bytes

  arrays = {}
  for name, value in _nested_items(params):
    if _dtype_name(value) not in ("float32", "float16", "bfloat16"):
      raise ValueError(f"weights: {name} is {_dtype_name(value)}; only float32, float16, bfloat16 are kept")
    # safetensors writes the memory as it lies: another layout would be saved scrambled, without an error
    arrays[name] = np.asarray(jax.device_get(value)).copy(order="C")
  text = json.dumps(metadata or {}, sort_keys=True)
  write_bytes(path, safetensors.numpy.save(arrays, metadata={"metadata": text}))


def load_weights(path: str | os.PathLike, abstract: Any = None) -> tuple[dict, dict]:
  """Reads what `save_weights` wrote.

  Args:
    path: the .safetensors file.
    abstract: a nested dict to verify against; its leaves say shape, dtype and sharding, and the arrays come
      back as jax arrays placed so (uncommitted where no sharding is stated). None: numpy arrays.

  Returns:
    (params, metadata).

  Raises:
    ValueError: no such file, a damaged file, or a tree that differs (names the leaf, the shapes).
  """
  from safetensors import safe_open

  path = pathlib.Path(path)
  if not path.is_file():
    raise ValueError(f"no weights at {str(path)!r}")
  try:
    with safe_open(path, framework="np") as f:
      arrays = {k: f.get_tensor(k) for k in f.keys()}  # noqa: SIM118 (not a dict)
      metadata = json.loads((f.metadata() or {}).get("metadata", "{}"))
  except Exception as e:
    raise UserError(f"{str(path)!r} is not a whole .safetensors file ({str(e)[:200]})") from e
  if abstract is not None:
    wanted = {k: _abstract_leaf(v) for k, v in _nested_items(abstract)}
    check_manifest(
      f"weights {str(path)!r}", {k: [list(v.shape), v.dtype.name] for k, v in arrays.items()}, wanted
    )
    arrays = {k: jax.device_put(v, wanted[k].sharding) for k, v in arrays.items()}
  params: dict = {}
  for name, value in sorted(arrays.items()):
    *parents, last = name.split("/")
    at = params
    for p in parents:
      at = at.setdefault(p, {})
    at[last] = value
  return params, metadata


def tree_fingerprint(tree: Any) -> str:
  """Hash of a tree's contents, bit for bit: names, shapes, dtypes, values. Equal trees, equal text.

  The order in which dicts were filled, the devices and the shardings do not matter.
  """
  h = hashlib.sha256()
  for name, value in sorted(flatten(tree).items()):
    x = np.asarray(jax.device_get(value))
    head = json.dumps([name, list(x.shape), x.dtype.name]).encode()
    h.update(len(head).to_bytes(8, "big") + head + x.tobytes())  # tobytes is in C order whatever the layout
  return h.hexdigest()


# --------------------------------------------------------------------------------------------------- trees


def flatten(tree: Any) -> dict[str, Any]:
  """{path of each leaf, parts joined by "/": leaf}, in the tree's own order."""
  out = {}
  for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    if name in out:
      raise ValueError(f"two leaves of the tree have the same path {name!r}; rename one")
    out[name] = leaf
  return out


def check_manifest(where: str, saved: Mapping[str, list], wanted: Mapping[str, Any]) -> None:
  """ValueError, in one sentence, when the saved leaves ([shape, dtype] by name) are not the wanted ones."""
  faults = [f"{k} is missing from it" for k in wanted if k not in saved]
  faults += [f"{k} is in it but not in this model" for k in saved if k not in wanted]
  for k in wanted:
    if k in saved:
      shape, dtype = tuple(saved[k][0]), saved[k][1]
      if shape != tuple(wanted[k].shape):
        faults.append(f"{k} has shape {shape} in it, this model needs {tuple(wanted[k].shape)}")
      elif dtype != _dtype_name(wanted[k]):
        faults.append(f"{k} is {dtype} in it, this model needs {_dtype_name(wanted[k])}")
  if faults:
    more = f"; and {len(faults) - 4} more" if len(faults) > 4 else ""
    raise UserError(f"{where} does not fit: {'; '.join(faults[:4])}{more}")


def _only_parts(manifest: Mapping[str, list], tree: Any) -> dict[str, list]:
  """The saved leaves under those top-level keys that `tree` has; all of them if it is no dict or empty."""
  if not isinstance(tree, Mapping) or not tree:
    return dict(manifest)
  return {k: v for k, v in manifest.items() if k.split("/")[0] in tree}


def _abstract_leaf(x: Any) -> jax.ShapeDtypeStruct:
  dtype = x.dtype if hasattr(x, "dtype") else jax.dtypes.canonicalize_dtype(np.asarray(x).dtype)
  return jax.ShapeDtypeStruct(np.shape(x), dtype, sharding=getattr(x, "sharding", None))


def _place(x: Any, wanted: jax.ShapeDtypeStruct) -> jax.Array:
  """`x` (None: an array without elements) as jax wants it; already on its devices if they were stated."""
  if x is not None and wanted.sharding is not None:
    return x
  x = np.zeros(wanted.shape, wanted.dtype) if x is None else np.asarray(x)
  return jax.device_put(x, wanted.sharding)


def _array(x: Any, where: str) -> Any:
  if isinstance(x, jax.Array):
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
      raise ValueError(f"checkpoint: {where} is a typed random key; keep jax.random.key_data of it")
    return x
  try:
    a = np.asarray(x)
  except Exception as e:
    raise ValueError(f"checkpoint: {where} is a {type(x).__name__}, not an array") from e
  if a.dtype == object or a.dtype.kind in "USMm":
    raise ValueError(f"checkpoint: {where} is a {type(x).__name__}, not an array of numbers")
  return a.astype(_dtype_name(x)) if isinstance(x, (bool, int, float)) else a


def _dtype_name(x: Any) -> str:
  # plain Python numbers are kept as the type that jax would give them
  dtype = x.dtype if hasattr(x, "dtype") else jax.dtypes.canonicalize_dtype(np.asarray(x).dtype)
  return str(dtype)


def _nested_items(tree: Any, prefix: str = ""):
  if not isinstance(tree, Mapping):
    if not prefix or not hasattr(tree, "shape"):
      where = prefix[:-1] or "the tree"
      raise ValueError(f"weights: {where} is a {type(tree).__name__}, not an array or a dict")
    yield prefix[:-1], tree
    return
  for key in sorted(tree):
    if not isinstance(key, str) or not key or "/" in key:
      raise ValueError(f"weights: a name must be a text without '/', got {key!r} under {prefix[:-1]!r}")
    yield from _nested_items(tree[key], f"{prefix}{key}/")


def _score(score: float | None) -> float | None:
  return None if score is None or math.isnan(score) else float(score)


_BYTES, _ARRAY = "__bytes__", "__array__"


def _encode(x: Any, where: str) -> Any:
  """JSON values; bytes and numpy arrays as marked dicts. Refuses what would come back as something else."""
  if x is None or isinstance(x, (bool, str)):
    return x
  if isinstance(x, (int, float)) and not isinstance(x, np.generic):
    return x
  if isinstance(x, np.generic):
    return x.item()
  if isinstance(x, Mapping):
    bad = [k for k in x if not isinstance(k, str) or k in (_BYTES, _ARRAY)]
    if bad:
      raise ValueError(f"checkpoint: {where} has the key {bad[0]!r}; keys must be texts")
    return {k: _encode(v, f"{where}.{k}") for k, v in x.items()}
  if isinstance(x, (list, tuple)):
    return [_encode(v, f"{where}[{i}]") for i, v in enumerate(x)]
  if isinstance(x, bytes):
    return {_BYTES: base64.b64encode(x).decode()}
  if isinstance(x, (np.ndarray, jax.Array)) and np.asarray(x).dtype != object:
    x = np.asarray(x)
    return {_ARRAY: [x.dtype.name, list(x.shape), base64.b64encode(x.tobytes()).decode()]}
  raise ValueError(f"checkpoint: {where} is a {type(x).__name__}, which JSON cannot hold")


def _decode(x: Any) -> Any:
  if isinstance(x, list):
    return [_decode(v) for v in x]
  if not isinstance(x, dict):
    return x
  if _BYTES in x:
    return base64.b64decode(x[_BYTES])
  if _ARRAY in x:
    dtype, shape, data = x[_ARRAY]
    return np.frombuffer(base64.b64decode(data), np.dtype(dtype)).reshape(shape).copy()
  return {k: _decode(v) for k, v in x.items()}


@contextlib.contextmanager
def _quiet_orbax():
  """Orbax logs a page per save, and from its threads every error that it then raises as well."""
  log, hook = logging.getLogger("absl"), sys.unraisablehook
  level = log.level
  log.setLevel(logging.CRITICAL)
  sys.unraisablehook = lambda _: None  # tensorstore reports there what its callbacks cannot deliver
  try:
    yield
  finally:
    log.setLevel(level)
    sys.unraisablehook = hook
