"""Metrics: valid JSON whatever the values, no doubled rows after a resume, compilations counted apart."""

import io
import json
import math
import re
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mgrpo_jax.metrics import (
  START,
  CompileCounter,
  Metrics,
  Progress,
  Timer,
  mean_valid,
  peak_memory_mb,
  read_metrics,
)


def rows_of(folder):
  def refuse(text):
    raise AssertionError(f"{text} is not JSON")

  text = (folder / "metrics.jsonl").read_text()
  return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def write_steps(folder, steps, **kwargs):
  with Metrics(folder, tensorboard=False, **kwargs) as m:
    for s in steps:
      m.write(s, {"train/loss": 1.0 / (s + 1)})


def test_rows_are_plain_json_whatever_the_numbers(tmp_path):
  before = time.time()
  with Metrics(tmp_path, tensorboard=False) as m:
    m.write(np.int64(3), {"a/b": jnp.float32(0.5), "n": 7, "ok": True, "bf": jnp.bfloat16(1.5), "none": None})
    m.write(4, {"x": math.nan, "y": np.float32(np.inf), "z": -math.inf})
  first, second = rows_of(tmp_path)
  assert before - 1 < first.pop("time") < time.time() + 1
  assert first == {"step": 3, "a/b": 0.5, "n": 7, "ok": True, "bf": 1.5, "none": None}
  del second["time"]
  notes = {"nan/x": "nan", "nan/y": "inf", "nan/z": "-inf"}
  assert second == {"step": 4, "x": None, "y": None, "z": None} | notes


def test_a_row_is_on_file_as_soon_as_it_is_written(tmp_path):
  with Metrics(tmp_path, tensorboard=False) as m:
    m.write(0, {"a": 1})
    assert [r["a"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [1]


def test_values_that_are_no_numbers_and_taken_names_are_refused(tmp_path):
  with Metrics(tmp_path, tensorboard=False) as m:
    for bad, message in [({"a": "text"}, "'a' is a str"), ({"a": np.zeros(2)}, "not a number"),
                         ({"step": 1}, "'step' is taken"), ({"nan/a": 1}, "taken")]:  # fmt: skip
      with pytest.raises(ValueError, match=message):
        m.write(0, bad)
  assert rows_of(tmp_path) == []


def test_resuming_drops_the_rows_after_the_checkpoint(tmp_path):
  write_steps(tmp_path, range(6))
  write_steps(tmp_path, range(4, 8), resume_step=3)
  assert [r["step"] for r in rows_of(tmp_path)] == list(range(8))
  write_steps(tmp_path, [8])  # without a resume step nothing is dropped
  assert [r["step"] for r in rows_of(tmp_path)] == list(range(9))
  write_steps(tmp_path, [0], resume_step=START)
  assert [r["step"] for r in rows_of(tmp_path)] == [0]


@pytest.mark.parametrize(
  "torn, kept",
  [(b'{"step": 9, "time', [0, 1]), (b'{"step": 9, "a": "\xc3', [0, 1]), (b"\0\0\0", [0, 1]), (b"12", [0, 1]),
   (b'{"step": 2, "time": 1.0}', [0, 1, 2]), (b"", [0, 1])],
)  # fmt: skip
@pytest.mark.parametrize("resume_step", [None, 5])
def test_a_torn_last_line_is_repaired(tmp_path, torn, kept, resume_step):
  write_steps(tmp_path, range(2))
  with open(tmp_path / "metrics.jsonl", "ab") as f:
    f.write(torn)
  assert [r["step"] for r in read_metrics(tmp_path)] == kept  # a reader of a living run is not stopped by it
  write_steps(tmp_path, [3], resume_step=resume_step)
  assert [r["step"] for r in rows_of(tmp_path)] == [*kept, 3]


def test_a_broken_line_in_the_middle_is_an_error_with_its_number(tmp_path):
  write_steps(tmp_path, range(3))
  lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
  (tmp_path / "metrics.jsonl").write_text("\n".join([lines[0], lines[1][:9], lines[2]]) + "\n")
  with pytest.raises(ValueError, match="line 2 is not a row"):
    read_metrics(tmp_path)
  assert read_metrics(tmp_path / "none.jsonl") == []


def board_events(folder):
  from tensorboardX.event_file_writer import EventFileWriter  # noqa: F401 (the same protocol buffers)
  from tensorboardX.proto.event_pb2 import Event

  events = []
  for path in sorted((folder / "tensorboard").iterdir()):
    data, at = path.read_bytes(), 0
    while at < len(data):  # TFRecord: length u64, its checksum u32, bytes, their checksum u32
      n = int.from_bytes(data[at : at + 8], "little")
      events.append(Event.FromString(data[at + 12 : at + 12 + n]))
      at += 16 + n
  return events


def test_tensorboard_gets_the_same_numbers_and_hides_the_dropped_ones(tmp_path):
  with Metrics(tmp_path) as m:
    for s in range(3):
      m.write(s, {"train/main/reward": s / 4, "bad": math.nan})
  time.sleep(1.05)  # event files are named by the second
  with Metrics(tmp_path, resume_step=1) as m:
    m.write(2, {"train/main/reward": 0.75})
  events = board_events(tmp_path)
  seen = [(e.step, v.tag, v.simple_value) for e in events for v in e.summary.value]
  assert seen == [(s, "train/main/reward", s / 4) for s in range(3)] + [(2, "train/main/reward", 0.75)]
  assert any(e.session_log.status == 1 and e.step == 2 for e in events)  # START: later steps are purged


def test_nan_does_not_wipe_a_mean_and_is_counted():  # O11
  assert mean_valid([0.5, math.nan, math.nan, 0.8]) == (pytest.approx(0.65), 2, 2)
  assert mean_valid([1, None, 0, 1]) == (pytest.approx(2 / 3), 3, 1)  # O10
  assert mean_valid(np.array([1.0, np.inf])) == (1.0, 1, 1)
  mean, n, missing = mean_valid([])
  assert math.isnan(mean) and (n, missing) == (0, 0)


def test_phases_add_up_and_start_anew():
  now, cpu = [0.0], [10.0]
  timer = Timer(clock=lambda: now[0], cpu_clock=lambda: cpu[0])
  for seconds in (1.0, 2.0):
    with timer("rollout"):
      now[0] += seconds
      with timer("tools"):
        now[0] += 0.25
  with pytest.raises(RuntimeError), timer("update"):
    now[0] += 4
    raise RuntimeError("counted all the same")
  now[0] += 0.5
  cpu[0] += 3
  phases = {"time/rollout": 3.5, "time/tools": 0.5, "time/update": 4}
  assert timer.pop() == phases | {"time/total": 8, "time/cpu": 3}
  now[0] += 1
  assert timer.pop("t/") == {"t/total": 1, "t/cpu": 0}


def test_compilations_and_cache_hits_are_counted_apart(tmp_path):
  kept = {k: getattr(jax.config, k) for k in (
    "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes", "jax_enable_compilation_cache")}  # fmt: skip
  from jax.experimental.compilation_cache import compilation_cache

  def program(x):
    return jnp.tanh(x) @ x * 1.23456

  x, y = np.ones((3, 3), np.float32), np.ones((5, 5), np.float32)
  try:
    jax.config.update("jax_enable_compilation_cache", False)
    with CompileCounter() as counter:
      f = jax.jit(program)
      f(x), f(x)
      assert (counter.count, counter.cache_hits, counter.programs) == (1, 0, 1)  # the second call is warm
      f(y)  # another shape is another program
      assert (counter.count, counter.cache_hits) == (2, 0) and counter.seconds > 0

    compilation_cache.reset_cache()
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    with CompileCounter() as later:
      jax.jit(lambda x: program(x) + 1)(x)
      assert (later.count, later.cache_hits) == (1, 0)
      jax.clear_caches()  # as a new process would find it
      jax.jit(lambda x: program(x) + 1)(x)
      assert (later.count, later.cache_hits, later.programs) == (1, 1, 2)
    jax.jit(lambda x: program(x) + 2)(x)
    assert counter.programs == 2 and later.programs == 2  # closed counters stand still
  finally:
    for k, v in kept.items():
      jax.config.update(k, v)
    compilation_cache.reset_cache()


class Terminal(io.StringIO):
  def isatty(self):
    return True


def test_without_a_terminal_progress_is_a_few_plain_lines():
  now, out = [0.0], io.StringIO()
  every = {"every_seconds": 10, "every_percent": 5}
  with Progress(200, "train", initial=50, stream=out, clock=lambda: now[0], **every) as p:
    for i in range(150):
      now[0] += 1.0
      p.update(accuracy=i / 150, step=i)
      if i == 3:
        p.write("a word")
  lines = out.getvalue().splitlines()
  assert "\r" not in out.getvalue() and lines[0] == "a word"
  assert [int(re.match(r"train: (\d+)/200", l).group(1)) for l in lines[1:]] == list(range(60, 201, 10))
  assert lines[1] == "train: 60/200 (30 %) 10s, 2m20s left accuracy=0.06 step=9"
  assert lines[-1] == "train: 200/200 (100 %) 2m30s accuracy=0.993 step=149"


def test_quick_work_without_a_terminal_is_one_line():
  out = io.StringIO()
  with Progress(5000, stream=out) as p:
    for _ in range(5000):
      p.update()
  assert out.getvalue().count("\n") == 1 and out.getvalue().startswith("5000/5000 (100 %)")


def test_on_a_terminal_there_is_a_bar():
  out = Terminal()
  with Progress(4, "warm start", initial=1, stream=out) as p:
    p.update(loss=0.25)
    p.write("a word")
    p.update(2)
  text = out.getvalue()
  for part in ("warm start", "\r", "4/4", "loss=0.25", "a word\n"):
    assert part in text


def test_peak_memory_is_in_megabytes_and_grows():
  before = peak_memory_mb()
  assert 20 < before < 1e6
  block = np.ones(int(before * 1e6 / 8) + 10_000_000)  # larger than all there was
  assert peak_memory_mb() > before + 50
  del block


def test_importing_the_bookkeeping_needs_no_jax():
  code = (
    "import sys; from mgrpo_jax import errors, metrics, run_folder, statistics; "
    "from mgrpo_jax.report import curves; "
    "sys.exit('jax' in sys.modules)"
  )
  assert subprocess.run([sys.executable, "-c", code]).returncode == 0
