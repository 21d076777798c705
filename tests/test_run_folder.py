"""Run folders: one process at a time, one config each; and errors as one sentence."""

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import textwrap
import time

import ml_collections
import pytest
from ml_collections import config_dict

from mgrpo_jax import errors, run_folder
from mgrpo_jax.run_folder import RunFolder, config_difference, plain_config, write_json


def make_config(**changes):
  c = ml_collections.ConfigDict({"seed": 0, "run_dir": "/a", "train": {"steps": 60, "rates": (1e-3, 2e-3)}})
  c.limit = config_dict.placeholder(int)
  c.seed_again = c.get_ref("seed")
  with c.unlocked():
    c.update_from_flattened_dict(changes)
  return c


def begin(path, config):
  """A run that has saved something."""
  with RunFolder.open(path, config) as run:
    (run.checkpoints / "step_00000000").mkdir()


# ------------------------------------------------------------------------------------------------ config


def test_the_config_is_on_file_as_used(tmp_path):
  path = tmp_path / "deep" / "run"
  with RunFolder.open(path, make_config()) as run:
    assert not run.resumed and run.rollouts.is_dir() and run.checkpoints.is_dir()
    want = {"seed": 0, "run_dir": "/a", "train": {"steps": 60, "rates": [0.001, 0.002]}, "limit": None}
    assert json.loads((path / "config.json").read_text()) == want | {"seed_again": 0}
    names = (run.config, run.metrics, run.tensorboard, run.rollouts, run.checkpoints, run.curve, run.results)
    assert [p.name for p in names] == [
      "config.json", "metrics.jsonl", "tensorboard", "rollouts", "checkpoints", "curve.png", "results.json",
    ]  # fmt: skip
    (run.checkpoints / "step_00000000").mkdir()
  with RunFolder.open(path, make_config()) as run:
    assert run.resumed


def test_a_first_try_that_saved_nothing_does_not_bind_the_next_one(tmp_path):
  RunFolder.open(tmp_path, make_config()).close()
  (tmp_path / "checkpoints" / "step_00000000.orbax-checkpoint-tmp-7").mkdir()  # killed while it saved
  with RunFolder.open(tmp_path, make_config(**{"train.steps": 80})) as run:
    assert not run.resumed
  assert json.loads((tmp_path / "config.json").read_text())["train"]["steps"] == 80


def test_checkpoints_are_found_under_the_names_that_they_have(tmp_path):
  """What binds a folder to its config is what `Checkpoints` writes."""
  from mgrpo_jax.checkpoint import Checkpoints

  with RunFolder.open(tmp_path, make_config()) as run, Checkpoints(run.checkpoints) as c:
    c.save(20, {"main": {"w": 1.0}}, {})
  with pytest.raises(errors.UserError, match="another config"):
    RunFolder.open(tmp_path, make_config(seed=1))


def test_another_config_is_refused_with_the_difference(tmp_path):
  begin(tmp_path, make_config())
  other = make_config(**{"train.steps": 80, "run_dir": "/b"})
  other.limit = 5
  with pytest.raises(errors.UserError) as e:
    RunFolder.open(tmp_path, other, ignore=("run_dir",))
  assert "(limit: there null, now 5; train.steps: there 60, now 80)" in str(e.value)
  assert "run_dir:" not in str(e.value) and "\n" not in str(e.value)
  assert json.loads((tmp_path / "config.json").read_text())["train"]["steps"] == 60  # untouched
  RunFolder.open(tmp_path, make_config()).close()  # and the lock was given back


def test_keys_that_may_differ_take_the_new_value(tmp_path):
  begin(tmp_path, make_config())
  with RunFolder.open(tmp_path, make_config(**{"train.steps": 80}), ignore=("train.st*", "x")):
    assert json.loads((tmp_path / "config.json").read_text())["train"]["steps"] == 80


def test_differences_are_exact_about_kind_and_absence():
  old = {"a": 1, "b": {"c": True, "d": {}}, "e": [1], "same": None}
  new = {"a": 1.0, "b": {"c": 1, "f": 2}, "e": [1, 2], "same": None}
  missing = run_folder.MISSING
  found = config_difference(old, new)
  absent = {"b.d": ({}, missing), "b.f": (missing, 2)}
  assert found == {"a": (1, 1.0), "b.c": (True, 1), "e": ([1], [1, 2])} | absent
  assert config_difference(old, json.loads(json.dumps(old))) == {}


def test_many_differences_are_cut_short(tmp_path):
  begin(tmp_path, {f"k{i:02d}": i for i in range(30)})
  with pytest.raises(errors.UserError, match="k19: there 19, now 20; and 10 more"):
    RunFolder.open(tmp_path, {f"k{i:02d}": i + 1 for i in range(30)})


def test_an_existing_run_and_a_file_in_the_way_are_refused(tmp_path):
  RunFolder.open(tmp_path / "run", {}).close()
  with pytest.raises(errors.UserError, match="already holds a run"):
    RunFolder.open(tmp_path / "run", {}, may_exist=False)
  (tmp_path / "file").write_text("")
  with pytest.raises(errors.UserError, match="in the way"):
    RunFolder.open(tmp_path / "file" / "run", {})
  begin(tmp_path / "run", {})
  (tmp_path / "run" / "config.json").write_text("{")
  with pytest.raises(errors.UserError, match="not readable as JSON"):
    RunFolder.open(tmp_path / "run", {})
  (tmp_path / "run" / "config.json").write_text("[]")
  with pytest.raises(errors.UserError, match="not a config"):
    RunFolder.open(tmp_path / "run", {})


@pytest.mark.parametrize("path", ["/proc/x/run", "/sys/kernel/run"])
def test_a_folder_that_cannot_be_made_is_one_sentence(path):
  if not os.path.isdir(os.path.dirname(os.path.dirname(path))):
    pytest.skip("another system")
  with pytest.raises(errors.UserError, match=rf"run folder '{path}' cannot be used \(.+\); choose another run_dir"):
    RunFolder.open(path, {})


def test_what_stands_in_the_place_of_the_folders_own_files_is_one_sentence(tmp_path):
  (tmp_path / "checkpoints").write_text("")
  with pytest.raises(errors.UserError, match=r"cannot be used \(File exists: '.*checkpoints'\)"):
    RunFolder.open(tmp_path, {})
  (tmp_path / "other" / "config.json").mkdir(parents=True)
  with pytest.raises(errors.UserError, match="cannot be used"):
    RunFolder.open(tmp_path / "other", {})


def test_the_home_folder_may_be_written_as_a_tilde(tmp_path, monkeypatch):
  monkeypatch.setenv("HOME", str(tmp_path))
  with RunFolder.open("~/runs/x", {}) as run:
    assert run.path == tmp_path / "runs" / "x"


def test_values_that_json_cannot_hold_are_named():
  with pytest.raises(errors.UserError, match=r"'model.layers\[1\].f' holds a function"):
    plain_config({"model": {"layers": [1, {"f": make_config}]}})
  with pytest.raises(errors.UserError, match="no text: 3"):
    plain_config({"a": {3: 1}})


def test_nothing_of_the_environment_is_written(tmp_path, monkeypatch):
  monkeypatch.setenv("SERPER_API_KEY", "sk-very-secret")
  with RunFolder.open(tmp_path, make_config()):
    for f in tmp_path.rglob("*"):
      assert f.is_dir() or b"very-secret" not in f.read_bytes()


def test_too_little_disk_is_said_before_anything_starts(tmp_path):
  with pytest.raises(errors.UserError, match=r"only \d+ MB free .* at least 1000000000000 MB"):
    RunFolder.open(tmp_path / "run", {}, min_free_mb=1e12)
  assert not (tmp_path / "run" / "config.json").exists()


def test_a_failed_write_leaves_the_old_file_whole(tmp_path, monkeypatch):
  write_json(tmp_path / "f.json", {"a": 1})

  def full(fd):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(os, "fsync", full)
  with pytest.raises(OSError):
    write_json(tmp_path / "f.json", {"a": 2})
  assert os.listdir(tmp_path) == ["f.json"] and json.loads((tmp_path / "f.json").read_text()) == {"a": 1}


# -------------------------------------------------------------------------------------------------- lock


def test_a_folder_in_use_is_refused_with_its_holder(tmp_path):
  with RunFolder.open(tmp_path, {}):
    holder = f"in use by process {os.getpid()} on host {os.uname().nodename}"
    with pytest.raises(errors.UserError, match=holder):
      RunFolder.open(tmp_path, {})
  RunFolder.open(tmp_path, {}).close()


HOLD = "import sys, time; from mgrpo_jax.run_folder import RunFolder; r = RunFolder.open(sys.argv[1], {}); "


def test_the_lock_dies_with_its_process(tmp_path):
  code = HOLD + "print('held', flush=True); time.sleep(60)"
  child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
  try:
    assert child.stdout.readline() == "held\n"
    with pytest.raises(errors.UserError, match=f"in use by process {child.pid} "):
      RunFolder.open(tmp_path, {})
  finally:
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
  RunFolder.open(tmp_path, {}).close()


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork here")
def test_a_forked_worker_that_outlives_its_parent_does_not_hold_the_folder(tmp_path):
  code = HOLD + textwrap.dedent("""
    import os
    if os.fork() == 0:
      print(os.getpid(), flush=True)
      time.sleep(60)
    time.sleep(60)
  """)
  child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
  worker = int(child.stdout.readline())
  try:
    with pytest.raises(errors.UserError, match=f"in use by process {child.pid} "):
      RunFolder.open(tmp_path, {})  # the worker closed its copy, which must not free the parent's
    child.send_signal(signal.SIGKILL)
    child.wait()
    os.kill(worker, 0)  # alive
    RunFolder.open(tmp_path, {}).close()
  finally:
    os.kill(worker, signal.SIGKILL)
    child.kill()
    child.wait()
    child.stdout.close()


# ------------------------------------------------------------------------------------------------ errors

CONFIG_FILE = """
import ml_collections
def get_config(arg=None):
  c = ml_collections.ConfigDict({"seed": 0, "train": {"steps": 60, "rate": 1e-3}})
  c.limit = ml_collections.config_dict.placeholder(int)
  return c
"""
LAUNCHER = """
import os, sys, time
from ml_collections import config_flags
from mgrpo_jax import errors
CONFIG = config_flags.DEFINE_config_file("config")

def main(argv):
  c = CONFIG.value
  what = os.environ.get("WHAT")
  if what == "user":
    raise errors.UserError("the file is\\n  missing")
  if what == "fault":
    raise KeyError("a fault of the program")
  if what == "full":
    with open("/dev/full", "w") as f:
      f.write("x" * 100000)
  if what == "open":
    open("/no/such/file")
  if what == "wait":
    print("waiting", flush=True)
    time.sleep(60)
  print("steps", c.train.steps)

if __name__ == "__main__":
  errors.run(main)
"""


@pytest.fixture
def launch(tmp_path):
  (tmp_path / "config.py").write_text(CONFIG_FILE)
  (tmp_path / "launch.py").write_text(LAUNCHER)

  def run(*flags, config="config.py", **env):
    command = [sys.executable, str(tmp_path / "launch.py"), f"--config={tmp_path / config}", *flags]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | env)
    return done.returncode, done.stdout, done.stderr

  return run


def test_a_good_command_runs(launch):
  assert launch("--config.train.steps=5", "--config.limit=3") == (0, "steps 5\n", "")


@pytest.mark.parametrize(
  "flags, sentence",
  [
    (["--config.train.step=5"], "the config has no key 'train.step'; did you mean --config.train.steps?"),
    (["--config.zzz=5"], "the config has no key 'zzz'; its keys are: limit, seed, train, train.rate, "),
    (["--config.train.steps.x=5"], "the config has no key 'train.steps.x'; did you mean "),
    (["--config.seed=1", "--config.train.steps=many"], "flag --config.train.steps=many: invalid literal"),
    (["--config.limit=many"], "flag --config.limit=many: invalid literal"),
    (["--config.train=1"], "flag --config.train=1: "),
    (["--config.seed"], "Missing value for flag --config.seed"),
    (["--sead=3"], "Unknown command line flag 'sead'"),
  ],
)
def test_mistakes_in_flags_are_one_sentence(launch, flags, sentence):
  code, out, err = launch(*flags)
  assert code == 2 and out == ""
  assert err.startswith("error: " + sentence) and err.count("\n") == 1, err


@pytest.mark.parametrize("flags", [[], ["--config.seed=1"]])
def test_a_config_file_that_is_not_there_is_one_sentence(tmp_path, launch, flags):
  code, out, err = launch(*flags, config="nope.py")
  assert (code, out, err) == (2, "", f"error: no config file at {str(tmp_path / 'nope.py')!r}\n")


@pytest.mark.parametrize(
  "what, sentence",
  [
    ("user", "error: the file is missing\n"),
    ("open", "error: No such file or directory: '/no/such/file'\n"),
    ("full", "error: no disk space left for"),
  ],
)
def test_errors_of_the_user_are_one_sentence(launch, what, sentence):
  if what == "full" and not os.path.exists("/dev/full"):
    pytest.skip("no /dev/full here")
  code, out, err = launch(WHAT=what)
  assert code == 2 and err.startswith(sentence) and err.count("\n") == 1, err


def test_a_fault_of_the_program_keeps_its_traceback(launch):
  code, _, err = launch(WHAT="fault")
  assert code == 1 and "Traceback" in err and "a fault of the program" in err


def test_the_traceback_is_there_for_those_who_ask(launch):
  code, _, err = launch(WHAT="user", MGRPO_TRACEBACK="1")
  assert code == 2 and "Traceback" in err and err.endswith("error: the file is missing\n")


def test_ctrl_c_says_how_to_go_on(tmp_path, launch):
  command = [sys.executable, str(tmp_path / "launch.py"), f"--config={tmp_path / 'config.py'}"]
  child = subprocess.Popen(
    command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"WHAT": "wait"},
    preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests started in the background ignore it
  )
  assert child.stdout.readline() == "waiting\n"
  time.sleep(0.1)
  child.send_signal(signal.SIGINT)
  _, err = child.communicate(timeout=20)
  assert (child.returncode, err) == (130, "stopped; run the same command to continue\n")


def test_a_full_disk_is_found_under_other_errors(tmp_path):
  try:
    try:
      raise ValueError(f"RESOURCE_EXHAUSTED: Error writing \"{tmp_path}/x/data\": No space left on device")
    except ValueError as inner:
      raise RuntimeError("saving failed") from inner
  except RuntimeError as e:
    sentence = errors.explain(e)
  assert sentence.startswith(f"no disk space left for '{tmp_path}/x/data' (") and " MB free)" in sentence
  assert errors.explain(RuntimeError("other")) is None and errors.explain(ValueError("other")) is None


def test_a_full_disk_that_does_not_say_where_is_told_as_the_run_folder(tmp_path):
  with pytest.raises(OSError) as caught, RunFolder.open(tmp_path / "run", {}):
    raise OSError(28, "No space left on device")
  assert errors.explain(caught.value).startswith(f"no disk space left for '{tmp_path / 'run'}'")
  with pytest.raises(TimeoutError) as caught, RunFolder.open(tmp_path / "run", {}):
    raise TimeoutError("of something else")
  assert errors.explain(caught.value) is None


def test_limits_of_files_memory_and_devices_are_one_sentence():
  assert errors.explain(OSError(27, "File too large", "/x")).startswith("'/x' cannot grow: files may not be so large here")
  assert errors.explain(RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes")).startswith("out of memory")
  assert errors.explain(MemoryError()).startswith("out of memory")
  assert "JAX_PLATFORMS" in errors.explain(RuntimeError("Unable to initialize backend 'tpu': none"))


def test_sigterm_ends_as_ctrl_c_does(tmp_path, launch):
  command = [sys.executable, str(tmp_path / "launch.py"), f"--config={tmp_path / 'config.py'}"]
  child = subprocess.Popen(
    command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"WHAT": "wait"}
  )
  assert child.stdout.readline() == "waiting\n"
  child.send_signal(signal.SIGTERM)
  _, err = child.communicate(timeout=20)
  assert (child.returncode, err) == (143, "stopped; run the same command to continue\n")


BROKEN_CONFIGS = {
  "def get_config(arg=None)\n  return 1\n": r"config file '.*broken.py', line 1: expected ':'",
  "import nothing_of_this_name\n": r"config file '.*broken.py', line 1: ModuleNotFoundError: No module named",
  "def get_config(arg=None):\n  x = 1\n  return undefined\n": r"config file '.*broken.py', line 3: NameError: name 'undefined'",
  "def get_config(arg=None):\n  raise ValueError(f'only :a, not {arg}')\n": r"config file '.*broken.py', line 2: only :a, not None",
  "from ml_collections import ConfigDict\ndef get_config(arg=None):\n  c = ConfigDict({'a': 1})\n  c.a = 'x'\n  return c\n":
    r"config file '.*broken.py', line 4: TypeError: .*'a'",
  "x = 1\n": r".*get_config",
}


@pytest.mark.parametrize("code", BROKEN_CONFIGS)
def test_a_fault_in_a_config_file_is_told_with_its_line(tmp_path, launch, code):
  (tmp_path / "broken.py").write_text(code)
  status, out, err = launch("--config.seed=1", config="broken.py")
  assert status == 2 and out == "" and err.count("\n") == 1, err
  assert re.match("error: " + BROKEN_CONFIGS[code], err), err


def test_bad_input_becomes_a_users_error_only_where_it_is_read():
  cases = [(ValueError("bad\nrow"), "data.jsonl: bad row"), (KeyError("Level"), "data.jsonl: Level")]
  for inner, sentence in [*cases, (errors.UserError("as it is"), "as it is")]:
    with pytest.raises(errors.UserError) as e, errors.user_input("data.jsonl"):
      raise inner
    assert str(e.value) == sentence
  with pytest.raises(RuntimeError), errors.user_input("data.jsonl"):
    raise RuntimeError("a fault")
