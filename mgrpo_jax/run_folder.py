"""One run = one folder: its layout, its lock, and the config it was started with.

    config.json        the config as used; another config in the same folder is refused once it has a checkpoint
    metrics.jsonl      one JSON object a line (see metrics.py)
    tensorboard/       the same numbers for TensorBoard
    rollouts/          sampled rollouts as readable text
    checkpoints/       everything that the same command needs to go on (see checkpoint.py)
    curve.png          the learning curve
    results.json       the final table
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import pathlib
import re
import socket
import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from mgrpo_jax.errors import UserError, free_mb, is_disk_full

try:
  import fcntl
except ImportError:  # Windows: no lock there; two runs in one folder are then the user's care
  fcntl = None

CONFIG = "config.json"
METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"
ROLLOUTS = "rollouts"
CHECKPOINTS = "checkpoints"
CURVE = "curve.png"
RESULTS = "results.json"
LOCK = "lock"

MISSING = "<not there>"


class RunFolder:
  """A run's folder, held by this process until `close()` or its death. Make one with `RunFolder.open`."""

  def __init__(self, path: pathlib.Path, config: dict, lock: int | None, resumed: bool):
    self.path = path
    self.config_dict = config
    self.resumed = resumed  # a checkpoint is there already: this is a continuation
    self._lock = lock
    _OPEN.add(self)

  @classmethod
  def open(
    cls,
    path: str | os.PathLike,
    config: Mapping[str, Any],
    *,
    may_exist: bool = True,
    ignore: Sequence[str] = (),
    min_free_mb: float = 200.0,
  ) -> RunFolder:
    """Creates or re-enters the folder, takes its lock and writes `config.json`.

    Args:
      path: the folder; created with its parents.
      config: dict or ConfigDict of JSON-able values (tuples are kept as lists).
      may_exist: False refuses a folder that already holds a run.
      ignore: globs of dotted keys that may differ from the config in the folder ("run_dir", "eval.*");
        the file then takes the new values.
      min_free_mb: refuse to start with less free disk than this (in units of 1e6 bytes).

    Raises:
      UserError: folder in use, another config in it, no disk space, not a folder, or a run there already.
    """
    path = pathlib.Path(path).expanduser()
    config = plain_config(config)
    try:
      path.mkdir(parents=True, exist_ok=True)
      lock = _take_lock(path)
    except (FileExistsError, NotADirectoryError) as e:
      raise UserError(f"run folder {str(path)!r} cannot be made: a file of that name is in the way") from e
    except OSError as e:
      raise UserError(f"run folder {str(path)!r} cannot be used ({e.strerror}); choose another run_dir") from e
    try:
      if (path / CONFIG).exists() and not may_exist:
        raise UserError(f"run folder {str(path)!r} already holds a run; choose another run_dir")
      # without a checkpoint nothing can be lost: a first try that failed does not bind the next one
      resumed = (path / CONFIG).exists() and _holds_checkpoint(path)
      if resumed:
        _compare(path, config, ignore)
      if (free := free_mb(path)) < min_free_mb:
        raise UserError(
          f"only {free:.0f} MB free for run folder {str(path)!r}, at least {min_free_mb:.0f} MB are needed"
        )
      try:
        write_json(path / CONFIG, config)
        for name in (ROLLOUTS, CHECKPOINTS):
          (path / name).mkdir(exist_ok=True)
      except OSError as e:
        if is_disk_full(e):
          raise
        raise UserError(f"run folder {str(path)!r} cannot be used ({e.strerror}: '{e.filename}'); choose another run_dir") from e
    except BaseException:
      _release(lock)
      raise
    return cls(path, config, lock, resumed)

  def close(self) -> None:
    """Gives the lock back; may be called twice."""
    _release(self._lock)
    self._lock = None

  def __enter__(self) -> RunFolder:
    return self

  def __exit__(self, kind, error, traceback) -> None:
    if isinstance(error, OSError) and error.filename is None and is_disk_full(error):
      error.filename = str(self.path)  # a write that fails does not say where; it is most likely here
    self.close()

  @property
  def config(self) -> pathlib.Path:
    return self.path / CONFIG

  @property
  def metrics(self) -> pathlib.Path:
    return self.path / METRICS

  @property
  def tensorboard(self) -> pathlib.Path:
    return self.path / TENSORBOARD

  @property
  def rollouts(self) -> pathlib.Path:
    return self.path / ROLLOUTS

  @property
  def checkpoints(self) -> pathlib.Path:
    return self.path / CHECKPOINTS

  @property
  def curve(self) -> pathlib.Path:
    return self.path / CURVE

  @property
  def results(self) -> pathlib.Path:
    return self.path / RESULTS

  def warm(self, agent: str) -> pathlib.Path:
    """Where the parameters lie that an agent began the run with."""
    return self.path / "warm" / f"{agent}.safetensors"


def write_json(path: str | os.PathLike, value: Any) -> None:
  """Writes a JSON file whole or not at all, and on the disk before it returns."""
  write_bytes(path, (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode())


def write_bytes(path: str | os.PathLike, data: bytes) -> None:
  """Writes a file whole or not at all (temp + fsync + rename), and on the disk before it returns."""
  path = pathlib.Path(path)
  temp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
  try:
    with open(temp, "wb") as f:
      f.write(data)
      f.flush()
      os.fsync(f.fileno())
    os.replace(temp, path)
  except BaseException:
    with contextlib.suppress(OSError):
      temp.unlink()
    raise
  with contextlib.suppress(OSError):  # some file systems cannot sync a folder
    fd = os.open(path.parent, os.O_RDONLY)
    try:
      os.fsync(fd)
    finally:
      os.close(fd)


def plain_config(config: Mapping[str, Any]) -> dict:
  """A dict of JSON values only, as it will read back from the file; names the key of a value that is not.

  Only what the config holds is kept: nothing is read from the environment, so no secret of it can appear.
  """
  if hasattr(config, "to_dict"):
    config = config.to_dict()
  return _plain(config, "")


def config_difference(old: Mapping, new: Mapping) -> dict[str, tuple[Any, Any]]:
  """Dotted keys whose values differ, with (old, new); a key on one side only has MISSING on the other."""
  a, b = _flat(old), _flat(new)
  return {k: (a.get(k, MISSING), b.get(k, MISSING)) for k in sorted(a.keys() | b.keys()) if _differs(a, b, k)}


def _differs(a: dict, b: dict, key: str) -> bool:
  # as JSON texts: 1 and 1.0, or 1 and true, are different settings
  return (key in a) != (key in b) or json.dumps(a[key], sort_keys=True) != json.dumps(b[key], sort_keys=True)


def _plain(value, key: str):
  if isinstance(value, Mapping):
    bad = [k for k in value if not isinstance(k, str)]
    if bad:
      raise UserError(f"config key {key or '(top)'!r} has a name that is no text: {bad[0]!r}")
    return {k: _plain(v, f"{key}.{k}" if key else k) for k, v in value.items()}
  if isinstance(value, (list, tuple)):
    return [_plain(v, f"{key}[{i}]") for i, v in enumerate(value)]
  if value is None or isinstance(value, (bool, int, float, str)):
    return value
  if isinstance(value, os.PathLike):
    return os.fspath(value)
  if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a numpy scalar
    return value.item()
  kind = type(value).__name__
  raise UserError(f"config key {key!r} holds a {kind}, which JSON cannot keep; use a number, text or list")


def _flat(config: Mapping, prefix: str = "") -> dict:
  out = {}
  for k, v in config.items():
    if isinstance(v, Mapping) and v:
      out.update(_flat(v, f"{prefix}{k}."))
    else:
      out[prefix + k] = v
  return out


def _holds_checkpoint(path: pathlib.Path) -> bool:
  return any(re.fullmatch(r"step_\d+", p.name) for p in (path / CHECKPOINTS).glob("step_*"))


def _compare(path: pathlib.Path, config: dict, ignore: Sequence[str]) -> None:
  try:
    old = json.loads((path / CONFIG).read_text())
    if not isinstance(old, dict):
      raise ValueError("not a config")
  except ValueError as e:
    raise UserError(f"{str(path / CONFIG)!r} is not readable as JSON ({e}); choose another run_dir") from e
  found = config_difference(old, config)
  found = {k: v for k, v in found.items() if not any(fnmatch.fnmatchcase(k, g) for g in ignore)}
  if found:
    shown = [f"{k}: there {json.dumps(a)}, now {json.dumps(b)}" for k, (a, b) in list(found.items())[:20]]
    more = f"; and {len(found) - 20} more" if len(found) > 20 else ""
    raise UserError(
      f"run folder {str(path)!r} was started with another config ({'; '.join(shown)}{more}); "
      "use the same settings to continue it, or another run_dir"
    )


# ---------------------------------------------------------------------------------------------------- lock

_OPEN: weakref.WeakSet[RunFolder] = weakref.WeakSet()


def _take_lock(path: pathlib.Path) -> int | None:
  """flock: the kernel gives it back when the process dies, however it dies."""
  if fcntl is None:
    return None
  fd = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
  try:
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError as e:
    with open(fd) as f:  # closes fd
      holder = f.read().split()
    pid, host = holder if len(holder) == 2 else ("?", "?")
    raise UserError(
      f"run folder {str(path)!r} is in use by process {pid} on host {host}; "
      "wait for it, stop it, or choose another run_dir"
    ) from e
  except OSError as e:
    os.close(fd)
    note = f"warning: {str(path)!r} cannot be locked ({e.strerror}); see that no other run uses it"
    print(note, file=sys.stderr)
    return None
  os.ftruncate(fd, 0)
  os.pwrite(fd, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
  return fd


def _release(fd: int | None) -> None:
  if fd is None:
    return
  with contextlib.suppress(OSError):
    os.ftruncate(fd, 0)
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def _forget_locks_in_child() -> None:
  # A forked worker shares the lock; if it outlived its parent the folder would stay locked.
  for folder in list(_OPEN):
    if folder._lock is not None:
      os.close(folder._lock)
      folder._lock = None


if hasattr(os, "register_at_fork"):
  os.register_at_fork(after_in_child=_forget_locks_in_child)
