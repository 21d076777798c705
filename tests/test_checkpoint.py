"""Checkpoints: bit-exact, whole or absent, the right ones kept, wrong trees refused by name."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mgrpo_jax import errors, metrics
from mgrpo_jax.checkpoint import Checkpoints, flatten, load_weights, save_weights, tree_fingerprint

MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tp"))


def make_agent(seed=0):
  """A train state with every kind of leaf that must survive: bf16, int counts, uint32 keys, odd floats."""
  rng = np.random.default_rng(seed)
  odd = rng.normal(size=(8, 4)).astype(np.float32)
  odd[0] = [np.nan, -0.0, np.inf, np.float32(1e-42)]  # a denormal, too
  params = {
    "layers/0": {"w": jax.device_put(odd, NamedSharding(MESH, P("fsdp", "tp")))},
    "embed": jnp.asarray(rng.normal(size=(16, 8)), jnp.bfloat16),
    "empty": jnp.zeros((0, 4)),
  }
  opt = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, weight_decay=0.1))
  opt_state = jax.tree.map(lambda x: x + jnp.asarray(3, x.dtype) if x.size else x, opt.init(params))
  key = np.array([1, 2**32 - 1], np.uint32)
  return {"params": params, "opt_state": opt_state, "step": np.int32(7), "key": key, "flag": np.array([True])}


def abstract(tree, sharding=None):
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def assert_same_bits(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for (name, x), y in zip(flatten(a).items(), jax.tree.leaves(b)):
    x, y = np.asarray(x), np.asarray(y)
    assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes()), name


def small(step):
  return {"main": {"params": {"w": np.full((4,), step, np.float32)}, "step": np.int32(step)}}


# ------------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("target", ["two_other_devices", "transposed_mesh", "unstated"])
def test_state_comes_back_bit_for_bit_on_any_mesh(tmp_path, target):
  state = {"main": make_agent(0), "search": make_agent(1)}
  with Checkpoints(tmp_path) as c:
    assert c.save(7, state, {"cursor": 5})
  sharding = {
    "two_other_devices": NamedSharding(Mesh(np.array(jax.devices()[5:7]), ("x",)), P()),
    "transposed_mesh": NamedSharding(Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b")), P()),
    "unstated": None,
  }[target]
  with Checkpoints(tmp_path) as c:
    restored, host = c.restore(None, {k: abstract(v, sharding) for k, v in state.items()})
  assert host == {"cursor": 5}
  for name in state:
    assert_same_bits(state[name], restored[name])
  for x in jax.tree.leaves(restored):
    if sharding is not None:
      assert x.sharding == sharding
    else:  # uncommitted: it may meet an array on any device
      assert (x == jax.device_put(x, jax.devices()[3])).shape == x.shape


def test_leaves_are_split_over_the_new_mesh(tmp_path):
  with Checkpoints(tmp_path) as c:
    c.save(0, {"main": make_agent()}, {})
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("x",)), P("x"))
    want = {"params": {"layers/0": {"w": jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=sharding)}}}
    full = {"params": abstract(make_agent()["params"]) | want["params"]}
    restored, _ = c.restore(0, {"main": full})
  w = restored["main"]["params"]["layers/0"]["w"]
  assert w.sharding == sharding and w.addressable_shards[0].data.shape == (4, 4)
  np.testing.assert_array_equal(np.asarray(w), np.asarray(make_agent()["params"]["layers/0"]["w"]))


def test_a_reader_may_take_one_agent_and_only_its_params(tmp_path):
  state = {"main": make_agent(0), "search": make_agent(1)}
  with Checkpoints(tmp_path) as c:
    c.save(1, state, {})
    restored, _ = c.restore(1, {"search": {"params": abstract(state["search"]["params"])}})
  assert list(restored) == ["search"] and list(restored["search"]) == ["params"]
  assert_same_bits(restored["search"]["params"], state["search"]["params"])


def test_plain_numbers_come_back_as_jax_would_make_them(tmp_path):
  with Checkpoints(tmp_path) as c:
    c.save(1, {"main": {"step": 3, "rate": 0.1, "on": True, "items": [1, None, (2.5,)]}}, {})
    restored, _ = c.restore(1, {"main": {"step": 0, "rate": 0.0, "on": False, "items": [0, None, (0.0,)]}})
  want = {"step": jnp.int32(3), "rate": jnp.float32(0.1), "on": jnp.bool_(True)}
  assert_same_bits(restored["main"], want | {"items": [jnp.int32(1), None, (jnp.float32(2.5),)]})


def test_a_tree_of_live_arrays_serves_as_the_shape(tmp_path):
  state = make_agent(0)
  with Checkpoints(tmp_path) as c:
    c.save(1, {"main": state}, {})
    restored, _ = c.restore(1, {"main": make_agent(5)})
  assert_same_bits(restored["main"], state)
  assert restored["main"]["params"]["layers/0"]["w"].sharding == state["params"]["layers/0"]["w"].sharding


def test_host_state_comes_back_as_it_was(tmp_path):
  rng = np.random.default_rng(3)
  rng.random(5)
  host = {
    "rng": rng.bit_generator.state,  # holds integers of 128 bits
    "window": [0, 3, 60],
    "x": 0.1 + 0.2,
    "nan": float("nan"),
    "bytes": b"\x00\xff",
    "array": np.arange(6, dtype=np.int64).reshape(2, 3),
    "text": "Zürich \u2028",
    "count": np.int64(5),
    "none": None,
    "nested": {"versions": {"main": 3, "search": 2}},
  }
  with Checkpoints(tmp_path) as c:
    c.save(0, small(0), host)
  with Checkpoints(tmp_path) as c:
    back = c.restore_host()
  assert np.isnan(back.pop("nan")) and np.isnan(host.pop("nan"))
  array = back.pop("array")
  assert array.dtype == np.int64 and (array == host.pop("array")).all()
  assert back == host
  again = np.random.default_rng(0)
  again.bit_generator.state = back["rng"]
  assert again.random() == rng.random()


def test_a_resumed_data_iterator_goes_on_with_the_next_batch(tmp_path):  # O58
  grain = pytest.importorskip("grain")

  def source():
    return iter(grain.MapDataset.source(list("abcdef")).seed(1).shuffle().batch(2).to_iter_dataset())

  whole = [list(b) for b in source()]
  it = source()
  next(it)
  with Checkpoints(tmp_path) as c:
    c.save(1, small(1), {"data": it.get_state()})
    fresh = source()
    fresh.set_state(c.restore_host()["data"])
  assert [list(b) for b in fresh] == whole[1:]


# ---------------------------------------------------------------------------------------- which are kept


def test_newest_and_best_are_kept_and_ties_go_to_the_earliest(tmp_path):
  scores = {0: 0.5, 1: 0.9, 2: 0.9, 3: None, 4: 0.7, 5: float("nan"), 6: 0.1}
  with Checkpoints(tmp_path, keep_last=2, keep_best=2) as c:
    kept = []
    for step, score in scores.items():
      assert c.save(step, small(step), {}, score)
      kept.append(c.steps())
    assert kept == [[0], [0, 1], [1, 2], [1, 2, 3], [1, 2, 3, 4], [1, 2, 4, 5], [1, 2, 5, 6]]
    assert c.latest_step() == 6 and c.best() == 1
    assert [c.score(s) for s in c.steps()] == [0.9, 0.9, None, 0.1]
  with Checkpoints(tmp_path, keep_last=1, keep_best=1) as c:  # scores are read again from the files
    assert c.best() == 1
    c.save(7, small(7), {}, 0.95)
    assert c.steps() == [7] and c.best() == 7


def test_without_scores_nothing_is_best(tmp_path):
  with Checkpoints(tmp_path, keep_last=1, keep_best=3) as c:
    assert c.latest_step() is None and c.best() is None and c.steps() == []
    for step in range(3):
      c.save(step, small(step), {})
    assert c.steps() == [2] and c.best() is None


def test_a_step_saved_twice_keeps_the_first(tmp_path):
  with Checkpoints(tmp_path) as c:
    assert c.save(3, small(3), {"n": 1})
    assert not c.save(3, small(99), {"n": 2})
    restored, host = c.restore(3, small(0))
  assert host == {"n": 1} and restored["main"]["params"]["w"][0] == 3


def test_going_on_from_an_older_step(tmp_path):
  with Checkpoints(tmp_path, keep_last=9) as c:
    for step in (1, 2, 3, 4):
      c.save(step, small(step), {})
    assert c.drop_after(2) == [3, 4] and c.steps() == [1, 2]
    assert c.save(3, small(30), {})
    assert c.restore(None, small(0))[0]["main"]["params"]["w"][0] == 30
  assert sorted(os.listdir(tmp_path)) == ["step_00000001", "step_00000002", "step_00000003"]


def test_a_step_older_than_the_latest_is_saved_too(tmp_path):
  with Checkpoints(tmp_path, keep_last=9) as c:
    c.save(10, small(10), {})
    assert c.save(4, small(4), {})  # orbax's own rule would skip it in silence
    assert c.steps() == [4, 10]


def test_a_reader_of_a_living_run_changes_nothing_and_sees_new_steps(tmp_path):
  with pytest.raises(ValueError, match="no such folder"):
    Checkpoints(tmp_path / "none", read_only=True)
  with Checkpoints(tmp_path, keep_last=1, keep_best=0) as writer:
    writer.save(1, small(1), {})
    half = tmp_path / "step_00000002.orbax-checkpoint-tmp"
    half.mkdir()
    with Checkpoints(tmp_path, read_only=True) as reader:
      assert half.exists() and reader.latest_step() == 1
      writer.save(3, small(3), {"n": 3})
      reader.refresh()
      assert reader.steps() == [3] and reader.restore_host() == {"n": 3}


# ------------------------------------------------------------------------------------ killed and damaged

CHILD = textwrap.dedent("""
  import sys
  import numpy as np
  from mgrpo_jax.checkpoint import Checkpoints
  c = Checkpoints(sys.argv[1], keep_last=2, keep_best=1)
  step = -1 if c.latest_step() is None else c.latest_step()
  print("ready", flush=True)
  while True:
    step += 1
    w = np.full((64, 64), step, np.float32)
    agents = {a: {"params": {"w": w, "b": w[0]}, "step": np.int32(step)} for a in ("main", "search")}
    c.save(step, agents, {"step": step}, score=float(step % 5))
    print(step, flush=True)
""")


def kill_while_saving(folder, rng) -> int:
  """Runs a process that saves as fast as it can, kills it at a random instant; its last finished step."""
  child = subprocess.Popen([sys.executable, "-c", CHILD, str(folder)], stdout=subprocess.PIPE, text=True)
  try:
    assert child.stdout.readline() == "ready\n"
    last = -1
    for _ in range(rng.randrange(1, 4)):
      last = int(child.stdout.readline())
    try:
      child.wait(rng.random() * 0.15)  # somewhere within the next save, or the removal of an old one
    except subprocess.TimeoutExpired:
      pass
    child.send_signal(signal.SIGKILL)
    rest = child.stdout.read().split()
    return int(rest[-1]) if rest else last
  finally:
    child.kill()
    child.wait()
    child.stdout.close()


def check_after_kills(folder, kills, seed):
  rng = random.Random(seed)
  for _ in range(kills):
    printed = kill_while_saving(folder, rng)
    with Checkpoints(folder, keep_last=2, keep_best=1) as c:
      assert c.latest_step() >= printed  # what was reported as saved stands
      assert len(c.steps()) <= 5
      for step in c.steps():  # every one that is listed is whole, not only the latest
        params = {"w": np.zeros((64, 64), np.float32), "b": np.zeros(64, np.float32)}
        shape = {"params": params, "step": np.int32(0)}
        agents, host = c.restore(step, {"main": shape, "search": shape})
        assert host == {"step": step}
        for leaf in jax.tree.leaves(agents):
          assert (np.asarray(leaf) == step).all()
      next_step = c.latest_step() + 1
      arrays = jax.tree.map(lambda x, n=next_step: np.full_like(x, n), shape)
      c.save(next_step, {"main": arrays, "search": arrays}, {"step": next_step})
      assert all(n.startswith("step_") and "tmp" not in n for n in os.listdir(folder))  # swept by then


def test_a_save_killed_at_any_instant_leaves_only_whole_checkpoints(tmp_path):
  check_after_kills(tmp_path, kills=2, seed=1)


@pytest.mark.slow
def test_many_killed_saves_leave_only_whole_checkpoints(tmp_path):
  check_after_kills(tmp_path, kills=25, seed=2)


def test_a_removal_killed_half_way_leaves_no_half_checkpoint(tmp_path):
  code = textwrap.dedent("""
    import os, signal, sys
    import numpy as np
    from mgrpo_jax.checkpoint import Checkpoints
    c = Checkpoints(sys.argv[1], keep_last=1, keep_best=0)
    tree = {"main": {"params": {"w": np.zeros(4, np.float32)}, "step": np.int32(0)}}
    c.save(0, tree, {})
    unlink, count = os.unlink, [0]
    def unlink_then_die(path, *args, **kwargs):
      unlink(path, *args, **kwargs)
      count[0] += 1
      if count[0] == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    os.unlink = unlink_then_die
    c.save(1, tree, {})
  """)
  child = subprocess.run([sys.executable, "-c", code, str(tmp_path)])
  assert child.returncode == -signal.SIGKILL
  with Checkpoints(tmp_path) as c:
    assert c.latest_step() == 1
    for step in c.steps():
      c.restore(step, small(0))
    assert c.steps() == [1] and not (tmp_path / ".removed").exists()


def test_half_written_and_half_removed_checkpoints_are_never_the_latest(tmp_path):
  with Checkpoints(tmp_path) as c:
    c.save(1, small(1), {})
  for name in ("step_00000002.orbax-checkpoint-tmp", ".removed"):
    (tmp_path / name / "main").mkdir(parents=True)
    (tmp_path / name / "main" / "data").write_text("half")
  with Checkpoints(tmp_path) as c:
    assert c.steps() == [1] and c.latest_step() == 1
    c.save(2, small(2), {})
    assert sorted(os.listdir(tmp_path)) == ["step_00000001", "step_00000002"]
    assert c.restore(2, small(0))[0]["main"]["params"]["w"][0] == 2


def test_a_damaged_checkpoint_is_named_with_what_else_there_is(tmp_path):
  with Checkpoints(tmp_path) as c:
    c.save(1, small(1), {})
    c.save(2, small(2), {})
  for root, _, files in os.walk(tmp_path / "step_00000002" / "main"):
    for f in files:
      os.truncate(os.path.join(root, f), 0)
  with Checkpoints(tmp_path) as c:
    with pytest.raises(ValueError, match=r"step 2 .* cannot be read .*\[1\]"):
      c.restore(None, small(0))
    assert c.restore(1, small(0))[0]["main"]["params"]["w"][0] == 1


# ---------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
  "change, message",
  [
    (lambda t: t["params"].update(w=jax.ShapeDtypeStruct((5,), jnp.float32)),
     r"agent 'main' .*params/w has shape \(4,\) in it, this model needs \(5,\)"),
    (lambda t: t["params"].update(w=jax.ShapeDtypeStruct((4,), jnp.bfloat16)),
     r"params/w is float32 in it, this model needs bfloat16"),
    (lambda t: t["params"].update(b=jax.ShapeDtypeStruct((4,), jnp.float32)), r"params/b is missing from it"),
    (lambda t: t["params"].pop("w"), r"params/w is in it but not in this model"),
    (lambda t: t.update(ema=jax.ShapeDtypeStruct((4,), jnp.float32)), r"ema is missing from it"),
  ],
)  # fmt: skip
def test_another_tree_is_refused_by_leaf(tmp_path, change, message):
  with Checkpoints(tmp_path) as c:
    c.save(0, {"main": {"params": {"w": np.zeros(4, np.float32), "v": np.zeros(2)}}}, {})
    tree = {"params": {"w": np.zeros(4, np.float32), "v": np.zeros(2)}}
    c.restore(0, {"main": tree})
    change(tree)
    with pytest.raises(ValueError, match=message) as e:
      c.restore(0, {"main": tree})
    assert "\n" not in str(e.value)


def test_missing_agents_and_steps_are_named(tmp_path):
  with Checkpoints(tmp_path) as c:
    with pytest.raises(ValueError, match="no checkpoint in"):
      c.restore(None, small(0))
    c.save(4, small(4), {})
    with pytest.raises(ValueError, match=r"no checkpoint of step 3 .*\[4\]"):
      c.restore(3, small(0))
    with pytest.raises(ValueError, match="no agent 'search', only main"):
      c.restore(4, {"search": small(0)["main"]})


@pytest.mark.parametrize(
  "agents, host, message",
  [
    ({"host": {}}, {}, "cannot be called 'host'"),
    ({"a": {"x": "text"}}, {}, "a: x is a str"),
    ({"a": {"x": jax.random.key(0)}}, {}, "key_data"),
    ({}, {"counts": {3: 1}}, "host.counts has the key 3"),
    ({}, {"a": [1, {"f": object()}]}, r"host.a\[1\].f is a object"),
  ],
)
def test_what_cannot_be_kept_is_refused_before_anything_is_written(tmp_path, agents, host, message):
  with Checkpoints(tmp_path) as c:
    with pytest.raises(ValueError, match=message):
      c.save(0, agents, host)
    assert c.steps() == [] and os.listdir(tmp_path) == []


# ------------------------------------------------------------------------------------------ weight files


def weights():
  rng = np.random.default_rng(0)
  return {
    "layer_0": {"kernel": np.asfortranarray(rng.normal(size=(3, 5)).astype(np.float32))},
    "embed": jnp.asarray(rng.normal(size=(4, 2)), jnp.bfloat16),
    "scale": rng.normal(size=(3, 5)).astype(np.float16)[:, ::2],  # not contiguous
  }


def test_weight_files_come_back_bit_for_bit(tmp_path):
  path = tmp_path / "main.safetensors"
  save_weights(path, weights(), {"steps": 3, "of": ["atlas", None]})
  numpy, metadata = load_weights(path)
  assert metadata == {"steps": 3, "of": ["atlas", None]}
  assert numpy["embed"].dtype == ml_dtypes.bfloat16 and isinstance(numpy["embed"], np.ndarray)
  assert tree_fingerprint(numpy) == tree_fingerprint(weights())
  sharding = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("x",)), P())
  placed, _ = load_weights(path, abstract(weights(), sharding))
  assert placed["scale"].sharding == sharding
  assert_same_bits(jax.tree.map(np.ascontiguousarray, weights()), placed)
  assert os.listdir(tmp_path) == ["main.safetensors"]


def test_the_same_weights_give_the_same_bytes(tmp_path):
  save_weights(tmp_path / "a", weights(), {"x": 1, "y": 2})
  save_weights(tmp_path / "b", dict(reversed(weights().items())), {"y": 2, "x": 1})
  assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_weight_files_that_do_not_fit_are_refused(tmp_path):
  path = tmp_path / "w.safetensors"
  save_weights(path, weights())
  shape = abstract(weights())
  shape["embed"] = jax.ShapeDtypeStruct((4, 3), jnp.bfloat16)
  with pytest.raises(ValueError, match=r"embed has shape \(4, 2\) in it, this model needs \(4, 3\)"):
    load_weights(path, shape)
  with pytest.raises(ValueError, match="layer_1/kernel is missing from it"):
    load_weights(path, abstract(weights()) | {"layer_1": {"kernel": jax.ShapeDtypeStruct((1,), jnp.float32)}})
  with pytest.raises(ValueError, match="no weights at"):
    load_weights(tmp_path / "none")
  path.write_bytes(path.read_bytes()[:-7])
  with pytest.raises(ValueError, match="not a whole .safetensors file"):
    load_weights(path)
  for bad, message in [({"n": np.zeros(3, np.int32)}, "n is int32"), ({"a/b": np.zeros(3)}, "without '/'"),
                       ({"a": [np.zeros(3)]}, "a is a list")]:  # fmt: skip
    with pytest.raises(ValueError, match=message):
      save_weights(path, bad)


# ------------------------------------------------------------------------------------------ fingerprints


def test_fingerprint_sees_every_bit_and_nothing_else():
  a = {"x": np.array([1.0, 2.0], np.float32), "y": {"z": np.array([3], np.int32)}}
  base = tree_fingerprint(a)
  sharded = jax.device_put(np.array([1.0, 2.0], np.float32), NamedSharding(MESH, P("tp")))
  assert base == tree_fingerprint({"y": a["y"], "x": sharded})
  changed = [
    a | {"x": np.array([1.0, np.nextafter(np.float32(2), np.float32(3))], np.float32)},
    a | {"x": np.array([2.0, 1.0], np.float32)},
    a | {"x": np.array([[1.0, 2.0]], np.float32)},
    a | {"x": np.array([1.0, 2.0], np.float64)},
    a | {"x": np.array([1.0, 2.0], np.float32).view(np.int32)},
    {"x2": a["x"], "y": a["y"]},
    {"x": a["x"], "y": {}},
  ]
  prints = {base, *map(tree_fingerprint, changed)}
  assert len(prints) == 1 + len(changed)
  assert tree_fingerprint({"x": np.float32(0.0)}) != tree_fingerprint({"x": np.float32(-0.0)})
  grid = np.arange(6.0).reshape(2, 3)
  assert tree_fingerprint({"x": np.asfortranarray(grid)}) == tree_fingerprint({"x": grid})


# ------------------------------------------------------------------------------------------- a full disk


@pytest.fixture
def small_files():
  """A context in which no file may grow beyond 60 kB: to a program, a disk that is full."""
  resource = pytest.importorskip("resource")
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

  @contextlib.contextmanager
  def limit():
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))
    try:
      yield
    finally:
      resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

  return limit


def test_a_checkpoint_that_does_not_fit_the_disk_is_not_even_begun(tmp_path, monkeypatch):
  with Checkpoints(tmp_path) as c:
    c.save(0, small(0), {})
    monkeypatch.setattr("mgrpo_jax.checkpoint.free_mb", lambda path: 1.0)
    with pytest.raises(OSError) as caught:
      c.save(1, small(1), {})
    assert errors.explain(caught.value).startswith(f"no disk space left for '{tmp_path}'")
    assert os.listdir(tmp_path) == ["step_00000000"]
    monkeypatch.undo()
    assert c.save(1, small(1), {})


def test_a_checkpoint_for_which_there_is_no_room_leaves_the_earlier_ones_usable(tmp_path, small_files):
  def state(seed):  # noise, which does not compress
    rng = np.random.default_rng(seed)
    return {"main": {"params": {f"w{i}": jnp.asarray(rng.normal(size=20_000), jnp.float32) for i in range(12)}}}

  with Checkpoints(tmp_path) as c:
    c.save(0, state(0), {"data": "x"}, 0.5)
    with small_files(), pytest.raises(Exception) as caught:
      c.save(1, state(1), {"data": "y"}, 0.6)
    sentence = errors.explain(caught.value)
    assert "cannot grow: files may not be so large here" in sentence and "\n" not in sentence
  with Checkpoints(tmp_path) as c:  # the next process
    assert c.steps() == [0] and c.best() == 0
    states, host = c.restore(None, state(5))
    assert np.array_equal(states["main"]["params"]["w3"], state(0)["main"]["params"]["w3"]) and host == {"data": "x"}
    assert c.save(1, state(1), {"data": "y"}, 0.6) and c.steps() == [0, 1]


FULL = """
import resource, sys
import jax.numpy as jnp, numpy as np
from absl import logging
from mgrpo_jax import errors
from mgrpo_jax.checkpoint import Checkpoints

def main():
  logging.use_absl_handler()  # as launchers have it
  rng = np.random.default_rng(0)
  state = {"main": {f"w{i}": jnp.asarray(rng.normal(size=20_000), jnp.float32) for i in range(20)}}
  with Checkpoints(sys.argv[1]) as c:
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))
    c.save(1, state, {})

errors.report(main)()
"""


def test_a_save_that_fails_half_way_is_one_sentence_and_not_a_traceback_for_every_array(tmp_path):
  pytest.importorskip("resource")
  done = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True)
  assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr[:3000]


def test_metrics_that_cannot_be_written_are_an_error_at_once_and_not_a_wait(tmp_path, small_files):
  log = metrics.Metrics(tmp_path)
  with small_files(), pytest.raises(OSError) as caught:
    for step in range(1000):
      log.write(step, {f"train/number_{i}": float(i) for i in range(50)})
  assert errors.explain(caught.value) is not None
  with contextlib.suppress(OSError):
    log.close()
  rows = [r["step"] for r in metrics.read_metrics(tmp_path)]
  assert rows == list(range(len(rows))) and 5 < len(rows) < 100
  with metrics.Metrics(tmp_path, resume_step=rows[-1]) as log:
    log.write(rows[-1] + 1, {"train/number_0": 0.0})
  assert [r["step"] for r in metrics.read_metrics(tmp_path)] == [*rows, rows[-1] + 1]
