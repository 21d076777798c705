"""Numbers of a run: JSONL always, TensorBoard beside it; phase times, compilations, progress.

A row of `metrics.jsonl` is one flat JSON object with slash names:
{"step": 3, "time": 1234.5, "train/loss": 0.2}. A value that is not finite is written as null with a note
{"nan/train/loss": "nan"}, so every line is valid JSON.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
import sys
import threading
import time
from collections.abc import Iterable, Mapping

from mgrpo_jax.errors import UserError
from mgrpo_jax.run_folder import METRICS, TENSORBOARD, write_bytes

START = -1  # resume_step of a run that begins again from nothing


class Metrics:
  """Writes the metrics of one run folder.

  Args:
    folder: the run folder.
    tensorboard: also write event files to `tensorboard/`.
    resume_step: the step of the checkpoint that the run goes on from; rows of later steps, which a killed
      run wrote before its next checkpoint, are dropped, so that no step is there twice. `START` (-1) drops
      all rows; None drops nothing. A torn last line is repaired in every case.
  """

  def __init__(
    self, folder: str | os.PathLike, *, tensorboard: bool = True, resume_step: int | None = None
  ):
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    self.path = folder / METRICS
    _repair(self.path, math.inf if resume_step is None else resume_step)
    self._file = open(self.path, "a", encoding="utf-8")
    self._board = _Board(folder / TENSORBOARD, resume_step) if tensorboard else None

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Appends one row and flushes it. Values: anything that `float()` takes, None for a missing one."""
    row: dict = {"step": int(step), "time": round(time.time(), 3)}
    for name, value in values.items():
      if name in row or name.startswith("nan/"):
        raise ValueError(f"metrics: the name {name!r} is taken by the row itself; choose another")
      x = _number(name, value)
      if isinstance(x, float) and not math.isfinite(x):
        row[name], row[f"nan/{name}"] = None, str(x)
      else:
        row[name] = x
    self._file.write(json.dumps(row, allow_nan=False) + "\n")
    self._file.flush()
    if self._board is not None:
      self._board.write(int(step), row["time"], {name: row[name] for name in values if row[name] is not None})

  def close(self) -> None:
    self._file.close()
    if self._board is not None:
      self._board.close()

  def __enter__(self) -> Metrics:
    return self

  def __exit__(self, *exc) -> None:
    self.close()


class _Board:
  """Event files for TensorBoard, written by this thread: a writer in the background would wait for ever on a full disk."""

  def __init__(self, folder: pathlib.Path, resume_step: int | None):
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto import event_pb2, summary_pb2

    folder.mkdir(exist_ok=True)
    self._event, self._summary = event_pb2.Event, summary_pb2.Summary
    self._file = EventsWriter(str(folder / "events"))
    if resume_step is not None:  # hides the later steps of older event files
      self._file.write_event(self._event(step=resume_step + 1, file_version="brain.Event:2"))
      start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
      self._file.write_event(self._event(step=resume_step + 1, session_log=start))

  def write(self, step: int, time: float, values: Mapping[str, float]) -> None:
    scalars = [self._summary.Value(tag=name, simple_value=float(x)) for name, x in values.items()]
    self._file.write_event(self._event(step=step, wall_time=time, summary=self._summary(value=scalars)))
    self._file.flush()

  def close(self) -> None:
    self._file.close()


def read_metrics(path: str | os.PathLike) -> list[dict]:
  """The rows of a metrics.jsonl, in order; [] without the file. A torn last line is left out.

  Raises:
    UserError: a line before the last one is no JSON object (names the line).
  """
  path = pathlib.Path(path)
  if path.is_dir():
    path = path / METRICS
  return [row for row, _ in _lines(path)]


def mean_valid(values: Iterable[float | None]) -> tuple[float, int, int]:
  """(mean of the finite values, how many they are, how many were None, NaN or infinite).

  One NaN must not wipe a mean, nor be hidden: write the count beside it. The mean of nothing is NaN.
  """
  values = [math.nan if v is None else float(v) for v in values]
  valid = [v for v in values if math.isfinite(v)]
  mean = math.fsum(valid) / len(valid) if valid else math.nan
  return mean, len(valid), len(values) - len(valid)


class Timer:
  """Wall seconds by phase, and the process's CPU seconds, of a step.

      timer = Timer()
      with timer("rollout"): ...
      metrics.write(step, timer.pop())  # {"time/rollout": s, "time/total": s, "time/cpu": s}; counts anew

  Phases add up over repeats; a phase inside another counts in both. JAX returns before the work is done: end
  a phase with a fetch of its result. On several cores `time/cpu` can exceed `time/total`.
  """

  def __init__(self, *, clock=time.perf_counter, cpu_clock=time.process_time):
    self._clock, self._cpu_clock = clock, cpu_clock
    self._phases: dict[str, float] = {}
    self._start, self._cpu_start = clock(), cpu_clock()

  @contextlib.contextmanager
  def __call__(self, phase: str):
    start = self._clock()
    try:
      yield
    finally:
      self._phases[phase] = self._phases.get(phase, 0.0) + self._clock() - start

  def pop(self, prefix: str = "time/") -> dict[str, float]:
    """The seconds since the last `pop` (or the making), which it forgets."""
    now, cpu = self._clock(), self._cpu_clock()
    out = {prefix + k: v for k, v in self._phases.items()}
    out |= {f"{prefix}total": now - self._start, f"{prefix}cpu": cpu - self._cpu_start}
    self._phases, self._start, self._cpu_start = {}, now, cpu
    return out


class CompileCounter:
  """Counts XLA compilations from its making to `close()`.

  `count` are programs truly compiled, `cache_hits` those read from the persistent cache (jax reports both as
  a backend compilation, and a hit once more as a hit), `seconds` the time of both. After warm-up `count +
  cache_hits` must stay flat: a hit, too, means that a new program was needed.
  """

  _COMPILE = "/jax/core/compile/backend_compile_duration"
  _HIT = "/jax/compilation_cache/cache_hits"

  def __init__(self):
    import jax

    self._lock = threading.Lock()
    self._backend, self._seen, self.cache_hits, self.seconds = 0, 0, 0, 0.0
    self._open = True
    jax.monitoring.register_event_duration_secs_listener(self._on_duration)
    jax.monitoring.register_event_listener(self._on_event)

  @property
  def count(self) -> int:
    return self._backend - self.cache_hits

  @property
  def programs(self) -> int:
    """Compiled or read from the cache: new programs in this process."""
    return self._backend

  def pop(self) -> int:
    """`programs` since the last call."""
    new, self._seen = self._backend - self._seen, self._backend
    return new

  def close(self) -> None:
    import jax

    if self._open:
      self._open = False
      jax.monitoring.unregister_event_duration_listener(self._on_duration)
      jax.monitoring.unregister_event_listener(self._on_event)

  def __enter__(self) -> CompileCounter:
    return self

  def __exit__(self, *exc) -> None:
    self.close()

  def _on_duration(self, event: str, seconds: float, **kwargs) -> None:
    if event == self._COMPILE:
      with self._lock:
        self._backend += 1
        self.seconds += seconds

  def _on_event(self, event: str, **kwargs) -> None:
    if event == self._HIT:
      with self._lock:
        self.cache_hits += 1


class Progress:
  """One progress bar; without a terminal, plain lines instead, so that a log file stays readable.

      with Progress(60, "train", initial=12) as bar:
        bar.update(1, accuracy=0.31)

  Args:
    total, initial: steps in all, and done already.
    every_seconds, every_percent: a plain line comes when both that many seconds and that many percent of
      `total` have passed since the last one, and at the end.
  """

  def __init__(
    self,
    total: int,
    description: str = "",
    *,
    initial: int = 0,
    stream=None,
    every_seconds: float = 10.0,
    every_percent: float = 1.0,
    clock=time.monotonic,
  ):
    self.total, self.n, self.description = total, initial, description
    self._stream = sys.stderr if stream is None else stream
    self._every_seconds, self._every = every_seconds, every_percent / 100 * total
    self._clock = clock
    self._start = self._last_time = clock()
    self._last_n, self._initial, self._values = initial, initial, {}
    self._bar = None
    if getattr(self._stream, "isatty", lambda: False)():
      import tqdm

      self._bar = tqdm.tqdm(
        total=total, initial=initial, desc=description or None, file=self._stream, dynamic_ncols=True
      )

  def update(self, n: int = 1, **values) -> None:
    """n more steps are done; `values` are shown beside the bar."""
    self.n += n
    self._values.update(values)
    if self._bar is not None:
      self._bar.set_postfix(_shown(self._values), refresh=False)
      self._bar.update(n)
    elif self._clock() - self._last_time >= self._every_seconds and self.n - self._last_n >= self._every:
      self._line()

  def write(self, text: str) -> None:
    """A line of its own, above the bar."""
    if self._bar is not None:
      self._bar.write(text, file=self._stream)
    else:
      print(text, file=self._stream, flush=True)

  def close(self) -> None:
    if self._bar is not None:
      self._bar.close()
    elif self.n != self._last_n:
      self._line()

  def __enter__(self) -> Progress:
    return self

  def __exit__(self, *exc) -> None:
    self.close()

  def _line(self) -> None:
    now = self._clock()
    done, spent = self.n - self._initial, now - self._start
    text = f"{self.description}: " if self.description else ""
    text += f"{self.n}/{self.total}"
    text += f" ({100 * self.n / self.total:.0f} %)" if self.total else ""
    text += f" {_duration(spent)}"
    if 0 < done and self.n < self.total:
      text += f", {_duration((self.total - self.n) * spent / done)} left"
    text += "".join(f" {k}={v}" for k, v in _shown(self._values).items())
    print(text, file=self._stream, flush=True)
    self._last_n, self._last_time = self.n, now


def peak_memory_mb() -> float:
  """The largest resident memory of this process so far, in units of 1e6 bytes; NaN where unknown."""
  try:
    import resource
  except ImportError:  # Windows
    return math.nan
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6  # bytes there, KiB on Linux


def _shown(values: Mapping) -> dict[str, str]:
  return {k: f"{v:.3g}" if isinstance(v, float) else str(v) for k, v in values.items()}


def _duration(seconds: float) -> str:
  m, s = divmod(int(seconds + 0.5), 60)
  h, m = divmod(m, 60)
  return f"{h}h{m:02d}m" if h else f"{m}m{s:02d}s" if m else f"{s}s"


def _number(name: str, value) -> float | int | bool | None:
  if value is None or isinstance(value, (bool, int)):
    return value
  try:
    x = float(value)
  except (TypeError, ValueError) as e:
    raise ValueError(f"metrics: {name!r} is a {type(value).__name__}, not a number") from e
  return x


def _lines(path: pathlib.Path):
  """(row, line as it stands with its newline) for each whole line; a torn last one is left out."""
  try:
    lines = path.read_bytes().splitlines(keepends=True)
  except FileNotFoundError:
    return
  for i, line in enumerate(lines, 1):
    try:
      row = json.loads(line)
      if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        raise ValueError("not an object with a step")
    except ValueError as e:  # UnicodeDecodeError is one
      if i == len(lines):
        return
      raise UserError(f"{str(path)!r} line {i} is not a row of metrics ({str(e)[:100]}); remove that line") from e
    if i == len(lines) and not line.endswith(b"\n"):
      line += b"\n"  # whole but for its end
    yield row, line


def _repair(path: pathlib.Path, last_step: float) -> None:
  if not path.exists():
    return
  kept = b"".join(line for row, line in _lines(path) if row["step"] <= last_step)
  if kept != path.read_bytes():
    write_bytes(path, kept)
