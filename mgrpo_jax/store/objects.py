"""Objects of the shared store: each written once, whole or not at all, in a folder, on GCS or in memory.

    store = Objects("gs://bucket/run")      # or a folder, or "memory://name"
    store.create("outcomes/000017", data)   # Exists, if another writer was first; the same call again is fine
    store.swap("version", data, token)      # Changed, if the pointer is not what `token` stood for

What is atomic differs: on GCS a one-shot upload on the condition of a generation, in a folder a link to a file that is
whole already (and a lock file for pointers), in memory a lock. Every object stands behind a header with a checksum and
the name of its writing, so that one that is torn, or none of ours, is told; nothing read is ever unpickled or executed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
import re
import threading
import time
import uuid
from collections.abc import Iterator

SCHEMA = "mgrpo-1"
ASIDE = "aside"  # where `set_aside` puts what cannot be used
LONGEST_NAME = 400
# parts that sort and that every file system takes; a leading dot is the store's own
_NAME = re.compile(r"[A-Za-z0-9_=@-][A-Za-z0-9._=@-]*(/[A-Za-z0-9_=@-][A-Za-z0-9._=@-]*)*")


class StoreError(Exception):
  """What went wrong with an object, which it names."""


class Exists(StoreError):
  """The object is there, and another writing made it. `content` is what it holds."""

  def __init__(self, text: str, content: bytes):
    super().__init__(text)
    self.content = content


class Missing(StoreError):
  """No such object."""


class Changed(StoreError):
  """A pointer is no longer what the writer had read."""


class Broken(StoreError):
  """An object is torn, changed on its way, or not of this program."""


class Objects:
  """The objects under one URL.

  Args:
    url: "gs://bucket/prefix", "memory://name" (this process only), or a folder.
    options: for gcsfs, such as endpoint_url and token.

  Raises:
    ValueError: an URL of another kind.
  """

  def __init__(self, url: str, **options):
    scheme, there, rest = str(url).partition("://")
    self.url = str(url).rstrip("/")
    if there and scheme in ("gs", "gcs"):
      self._back = _Gcs(rest.strip("/"), options)
    elif there and scheme == "memory":
      self._back = _Memory(rest)
    elif there and scheme != "file":
      raise ValueError(f"store {url!r} is none of gs://bucket/prefix, a folder and memory://name")
    else:
      self._back = _Folder(pathlib.Path(rest if there else url).expanduser().absolute())

  def create(self, name: str, content: bytes, *, writing: str | None = None) -> None:
    """Writes an object that is not there yet.

    Args:
      writing: names this attempt for a caller who may come again after a crash and must find its own object; by default a
        new one. The answer to a write can be lost: an object with this name is a success.

    Raises:
      Exists: another writing made it.
    """
    writing = writing or uuid.uuid4().hex
    data = _pack(content, writing)
    if self._back.put_new(_checked(name), data):
      return
    found = self._back.get(name)
    if found is None:  # removed in between
      raise Missing(f"{self.url}/{name} was there and is gone: is another run being cleaned up in this store?")
    other, there = _unpack(found[0], f"{self.url}/{name}")
    if other != writing:
      raise Exists(f"{self.url}/{name} is there already, by another writer", there)

  def read(self, name: str) -> bytes:
    """The content of an object; Missing, or Broken with what is wrong."""
    return self.read_pointer(name)[0]

  def read_pointer(self, name: str) -> tuple[bytes, str]:
    """(content, token for `swap`) of an object."""
    found = self._back.get(_checked(name))
    if found is None:
      raise Missing(f"{self.url}/{name} is not there")
    return _unpack(found[0], f"{self.url}/{name}")[1], found[1]

  def swap(self, name: str, content: bytes, token: str | None) -> str:
    """Replaces a small object if it is still what `token` stands for (None: not there). Returns its new token.

    Raises:
      Changed: it is not.
    """
    writing = uuid.uuid4().hex
    new = self._back.put_if(_checked(name), _pack(content, writing), token)
    if new is None:  # refused; or done, and only the answer was lost
      found = self._back.get(name)
      if found is None or _unpack(found[0], f"{self.url}/{name}")[0] != writing:
        raise Changed(f"{self.url}/{name} has been changed by another writer")
      new = found[1]
    return new

  def list(self, prefix: str = "") -> list[str]:
    """Names under a prefix (whole parts), sorted."""
    return sorted(n for n in self._back.names(_checked(prefix) if prefix else "") if _NAME.fullmatch(n))

  def delete(self, name: str) -> None:
    """Removes an object; one that is not there is fine."""
    self._back.remove(_checked(name))

  def set_aside(self, name: str) -> str:
    """Moves an object that cannot be used out of the way, as it is; its new name."""
    found = self._back.get(_checked(name))
    if found is None:
      raise Missing(f"{self.url}/{name} is not there")
    new = f"{ASIDE}/{name}@{hashlib.sha256(found[0]).hexdigest()[:12]}"
    self._back.put_new(new, found[0])  # there already: the same bytes, from an attempt that was interrupted
    self._back.remove(name)
    return new


def _checked(name: str) -> str:
  if len(name) > LONGEST_NAME or not _NAME.fullmatch(name):
    raise ValueError(f"object name {name[:80]!r} must be parts of letters, digits, '._=@-' between slashes, {LONGEST_NAME} at most")
  return name


def _pack(content: bytes, writing: str) -> bytes:
  if not re.fullmatch(r"[\w.@=-]{1,200}", writing):
    raise ValueError(f"writing {writing[:80]!r} must be of letters, digits and '_.@=-'")
  return f"{SCHEMA} {len(content)} {hashlib.sha256(content).hexdigest()} {writing}\n".encode() + content


def _unpack(data: bytes, what: str) -> tuple[str, bytes]:
  """(writing, content)."""
  head, _, content = data.partition(b"\n")
  try:
    schema, length, checksum, writing = head[:400].decode("ascii").split(" ")
  except ValueError:
    raise Broken(f"{what} is no object of this program") from None
  if schema != SCHEMA:
    raise Broken(f"{what} is of the schema {schema[:40]!r}, this program reads {SCHEMA!r}; use the version that wrote it")
  if str(len(content)) != length or hashlib.sha256(content).hexdigest() != checksum:
    raise Broken(f"{what} is torn: {len(content)} bytes of {length}, or others than were written")
  return writing, content


# ---- back ends: put_new(name, data) -> whether it was new; get(name) -> (data, token) or None;
#      put_if(name, data, token) -> new token or None; names(prefix); remove(name)


class _Folder:
  """Files. A name appears by a link to a file that is whole; pointers are replaced under a lock."""

  def __init__(self, root: pathlib.Path):
    self.root = root

  def put_new(self, name, data) -> bool:
    with self._whole(name, data) as part:
      try:
        os.link(part, self.root / name)
      except FileExistsError:
        return False
      return True

  def get(self, name):
    try:
      data = (self.root / name).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
      return None
    return data, hashlib.sha256(data).hexdigest()

  def put_if(self, name, data, token):
    with self._whole(name, data) as part, open(part.with_name(f".{part.name.split('.')[1]}.lock"), "wb") as lock:
      fcntl.flock(lock, fcntl.LOCK_EX)
      found = self.get(name)
      if (found and found[1]) != token:
        return None
      os.replace(part, self.root / name)
    return hashlib.sha256(data).hexdigest()

  def names(self, prefix):
    start = self.root / prefix
    if start.is_file():
      yield prefix
    for folder, _, files in os.walk(start):
      for file in files:
        if not file.startswith("."):
          yield str(pathlib.Path(folder, file).relative_to(self.root))

  def remove(self, name) -> None:
    (self.root / name).unlink(missing_ok=True)

  @contextlib.contextmanager
  def _whole(self, name, data) -> Iterator[pathlib.Path]:
    """A file with the data beside the place of its name, safe from a crash of the machine; gone afterwards."""
    path = self.root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
      with part.open("xb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())
      yield part
    finally:
      part.unlink(missing_ok=True)


class _Memory:
  """A dictionary of this process."""

  _all: dict[str, dict[str, bytes]] = {}
  _lock = threading.Lock()

  def __init__(self, name: str):
    self.objects = self._all.setdefault(name, {})

  def put_new(self, name, data) -> bool:
    with self._lock:
      return self.objects.setdefault(name, data) is data

  def get(self, name):
    data = self.objects.get(name)
    return None if data is None else (data, hashlib.sha256(data).hexdigest())

  def put_if(self, name, data, token):
    with self._lock:
      found = self.get(name)
      if (found and found[1]) != token:
        return None
      self.objects[name] = data
    return hashlib.sha256(data).hexdigest()

  def names(self, prefix):
    return [n for n in list(self.objects) if not prefix or n == prefix or n.startswith(prefix + "/")]

  def remove(self, name) -> None:
    self.objects.pop(name, None)


class _Gcs:
  """Google Cloud Storage (or its emulator): uploads on the condition of a generation, 0 for what is not there."""

  def __init__(self, root: str, options: dict):
    # read when gcsfs is imported: without it every bucket's kind is asked over gRPC first, which an emulator does not answer
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    import gcsfs

    self.bucket, _, self.prefix = root.partition("/")
    self.fs = gcsfs.GCSFileSystem(use_listings_cache=False, **options)

  def put_new(self, name, data) -> bool:
    return self.put_if(name, data, None) is not None

  def get(self, name):
    for _ in range(20):  # until content and generation are of one state
      before = self._generation(name)
      if before is None:
        return None
      try:
        data = self.fs.cat_file(self._path(name))
      except FileNotFoundError:
        continue
      if self._generation(name) == before:
        return data, before
      time.sleep(0.05)
    raise StoreError(f"gs://{self._path(name)} changes faster than it can be read")

  def put_if(self, name, data, token):
    boundary = uuid.uuid4().hex
    parts = (("application/json; charset=UTF-8", json.dumps({"name": self._path(name).partition("/")[2]}).encode()), ("application/octet-stream", data))
    body = b"".join(f"--{boundary}\r\nContent-Type: {kind}\r\n\r\n".encode() + part + b"\r\n" for kind, part in parts) + f"--{boundary}--".encode()
    try:
      out = self.fs.call("POST", f"{self.fs._location}/upload/storage/v1/b/{self.bucket}/o", uploadType="multipart", ifGenerationMatch=token or "0",
                         headers={"Content-Type": f'multipart/related; boundary="{boundary}"'}, data=body, json_out=True)
    except FileExistsError:  # 412: the condition does not hold
      return None
    return str(out["generation"])

  def names(self, prefix):
    root = self._path(prefix) if prefix else f"{self.bucket}/{self.prefix}".rstrip("/")
    start = f"{self.bucket}/{self.prefix}".rstrip("/") + "/"
    return [p[len(start):] for p in self.fs.find(root) if p == root or p.startswith(root + "/")]

  def remove(self, name) -> None:
    with contextlib.suppress(FileNotFoundError):
      self.fs.rm_file(self._path(name))

  def _path(self, name: str) -> str:
    return "/".join(p for p in (self.bucket, self.prefix, name) if p)

  def _generation(self, name) -> str | None:
    try:
      return str(self.fs.info(self._path(name))["generation"])
    except FileNotFoundError:
      return None
