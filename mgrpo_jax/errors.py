"""What the person at the terminal sees when something is wrong: one sentence, an exit code, no traceback.

A launcher ends with `errors.run(main)`. Mistakes of the user (`UserError`, flags, missing files, a full
disk) become `error: <sentence>` on stderr and exit code 2; anything else is a fault of the program and keeps
its traceback. `MGRPO_TRACEBACK=1` shows the traceback of every error. SIGTERM (a machine that is taken away)
ends a run as Ctrl-C does.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import functools
import os
import re
import shutil
import signal
import sys
import threading
import traceback

STOPPED = "stopped; run the same command to continue"


class UserError(ValueError):
  """One clear sentence for the person at the terminal: what is wrong, where, and what to do."""


class _Terminated(BaseException):
  """SIGTERM came. Not an Exception, so that nothing on the way takes it for a failure to deal with."""


@contextlib.contextmanager
def user_input(what: str = ""):
  """Bad values found inside (ValueError, KeyError) are the user's: they leave as `UserError`.

  Put it around checking a config or reading the user's files, not around the program's own work, where a
  ValueError is a fault that deserves its traceback.
  """
  try:
    yield
  except UserError:
    raise
  except (ValueError, KeyError) as e:
    text = one_line(e.args[0] if isinstance(e, KeyError) and e.args else e)
    raise UserError(f"{what}: {text}" if what else text) from e


def report(main):
  """Wraps `main` so that its errors end the process with one sentence: see the module's docstring.

  Exit codes: 2 for the user's mistakes, 130 after Ctrl-C, 143 after SIGTERM, 1 when the reader of our output
  went away.
  """

  @functools.wraps(main)
  def wrapped(*args, **kwargs):
    try:
      if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminate)
      return main(*args, **kwargs)
    except KeyboardInterrupt as e:
      _leave(STOPPED, 130, e, prefix="")
    except _Terminated as e:
      _leave(STOPPED, 143, e, prefix="")
    except BrokenPipeError as e:
      # Python would complain once more while flushing stdout at exit.
      os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
      raise SystemExit(1) from e
    except Exception as e:
      sentence = explain(e)
      if sentence is None:
        raise
      _leave(sentence, 2, e)

  return wrapped


def run(main):
  """`absl.app.run(main)` with every error reported as `report` does, those in the flags included."""
  from absl import app

  report(lambda: app.run(main, flags_parser=_parse_flags))()


def explain(e: BaseException) -> str | None:
  """The sentence for an error that is the user's to mend, or None for a fault of the program."""
  if isinstance(e, UserError):
    return one_line(e)
  for cause in _chain(e):
    if is_disk_full(cause):
      return _disk_full_sentence(cause)
  if isinstance(e, MemoryError) or "RESOURCE_EXHAUSTED" in str(e):
    return f"out of memory ({one_line(e)[:160]}); lower config.train.rows, config.rollout.slots or the size of the models"
  if "Unable to initialize backend" in str(e):  # jax, where JAX_PLATFORMS asks for a device that is not there
    return f"{one_line(e)[:200]}; check JAX_PLATFORMS and the installed jax"
  if isinstance(e, OSError) and e.filename is not None:
    return f"{e.strerror or type(e).__name__}: {e.filename!r}"
  if type(e).__module__.startswith("absl.flags"):
    return one_line(e)
  return None


def _terminate(number, frame):
  raise _Terminated


def one_line(text) -> str:
  return " ".join(str(text).split())


def _leave(sentence: str, code: int, e: BaseException, prefix: str = "error: "):
  with contextlib.suppress(OSError):
    sys.stdout.flush()
  if os.environ.get("MGRPO_TRACEBACK") not in (None, "", "0"):
    traceback.print_exception(e)
  print(prefix + sentence, file=sys.stderr, flush=True)
  raise SystemExit(code) from e


def _chain(e: BaseException | None):
  seen = set()
  while e is not None and id(e) not in seen:
    seen.add(id(e))
    yield e
    e = e.__cause__ or e.__context__


_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the last: files may not be so large (ulimit -f)


def is_disk_full(e: BaseException) -> bool:
  """Whether an error says that nothing more can be written."""
  if isinstance(e, OSError) and e.errno in _DISK_FULL:
    return True
  # tensorstore (under orbax) reports it as a ValueError with the system's words.
  return any(os.strerror(number) in str(e) for number in _DISK_FULL)


def _disk_full_sentence(e: BaseException) -> str:
  path = getattr(e, "filename", None)
  if path is None:
    quoted = re.search(r"[\"'`](/[^\"'`]+)[\"'`]", str(e))
    path = quoted.group(1) if quoted else os.getcwd()
  path = os.fsdecode(path)
  if os.strerror(errno.EFBIG) in str(e):
    return f"{path!r} cannot grow: files may not be so large here; lift the limit (ulimit -f) and run the same command again"
  free = f"{free_mb(path):.0f} MB free"
  return f"no disk space left for {path!r} ({free}); free some and run the same command again"


def free_mb(path: str | os.PathLike) -> float:
  """Megabytes (1e6 bytes) that may still be written where `path` is, or would be once it is made."""
  path = os.path.abspath(path)
  while not os.path.exists(path) and os.path.dirname(path) != path:
    path = os.path.dirname(path)
  return shutil.disk_usage(path).free / 1e6


def _parse_flags(argv):
  """Parses absl flags; what is wrong with them is a `UserError` that names the flag."""
  from absl import flags

  try:
    rest = flags.FLAGS(argv)
    for name in flags.FLAGS:
      getattr(flags.FLAGS[name].value, "keys", None)  # a config file that failed to load says so only now
    return rest
  except OSError as e:
    absent = re.search(r"\[Errno 2\][^\n]*: '([^'\n]*)'", str(e))
    raise UserError(f"no config file at {absent.group(1)!r}" if absent else one_line(e)) from e
  except flags.Error as e:
    raise UserError(_config_file_sentence(e) or one_line(e)) from e
  except (AttributeError, KeyError, TypeError, ValueError) as e:
    # ml_collections raises these for an override of a key that the config lacks, naming only its last part.
    sentence = _config_file_sentence(e) or _unknown_key_sentence(argv) or f"{type(e).__name__} in the flags: {one_line(e)}"
    raise UserError(sentence) from e
  except Exception as e:  # the code of a config file may raise anything
    if sentence := _config_file_sentence(e):
      raise UserError(sentence) from e
    raise


def _config_file_sentence(e: BaseException) -> str | None:
  """The sentence for an error in the code of a config file, with the line; None if `e` comes from elsewhere."""
  if isinstance(e, SyntaxError):
    return f"config file {e.filename!r}, line {e.lineno}: {e.msg}"
  inside = "Error whilst parsing config file"  # ml_collections puts the traceback into the message
  if inside in str(e):
    text = str(e).rstrip()
    frames, last = re.findall(r'File "([^"]+)", line (\d+)', text), text.splitlines()[-1].strip()
  else:
    frames = [(f.filename, f.lineno) for f in traceback.extract_tb(e.__traceback__)]
    last = f"{type(e).__name__}: {one_line(e)}"
    loader = [i for i, (name, _) in enumerate(frames) if "config_flags" in name]
    frames = frames[loader[-1] + 1:] if loader else []
  frames = [f for f in frames if not f[0].startswith("<") and not {"ml_collections", "absl"} & set(re.split(r"[\\/]", f[0]))]
  if not frames:
    return None
  # what a config file refuses on purpose speaks for itself
  return f"config file {frames[0][0]!r}, line {frames[0][1]}: {last.removeprefix('ValueError: ')}"


def _unknown_key_sentence(argv) -> str | None:
  """Finds the first `--config.some.key` in argv that the config has not, and the nearest that it has."""
  from absl import flags

  names = [m.group(1) for m in (re.match(r"--?(?:no)?([\w-]+)\.", a) for a in argv[1:]) if m]
  if not names:
    return None
  name = names[0]
  plain = [a for a in argv if not re.match(rf"--?(?:no)?{name}\.", a)]
  kept, sys.argv = sys.argv, plain  # config_flags looks for overrides in sys.argv itself
  try:
    flags.FLAGS.unparse_flags()
    flags.FLAGS(plain)
    known = list(_keys(flags.FLAGS[name].value))
  except Exception:  # the first error is the one to report, whatever happens here
    return None
  finally:
    sys.argv = kept
  for arg in argv[1:]:
    m = re.match(rf"--?{name}\.([^=\[]+)", arg)
    if m and m.group(1) not in known:
      near = difflib.get_close_matches(m.group(1), known, n=1, cutoff=0.6)
      hint = f"did you mean --{name}.{near[0]}?" if near else "its keys are: " + ", ".join(known[:40])
      return f"the config has no key {m.group(1)!r}; {hint}"
  return None


def _keys(config, prefix: str = ""):
  for key in config:
    value = config.get_ref(key).get() if hasattr(config, "get_ref") else config[key]
    yield prefix + key
    if hasattr(value, "keys"):
      yield from _keys(value, f"{prefix}{key}.")
