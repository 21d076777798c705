"""The launchers in the hands of someone in a hurry: one sentence, an exit code, no traceback, nothing broken behind it."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest

from mgrpo_jax import metrics
from mgrpo_jax.run_folder import RunFolder

ROOT = pathlib.Path(__file__).resolve().parents[1]
TINY = ("--config=configs/gaia.py:smoke", "--config.train.warm_start=none", "--config.eval.final=False", "--config.train.steps=1")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
  return tmp_path_factory.mktemp("cache")


def environment(cache):
  return {**os.environ, "MGRPO_CACHE": str(cache), "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}


def launch(cache, *arguments, script="train.py"):
  """(exit code, stdout, stderr) of a launcher, called from a folder that is not the repository."""
  done = subprocess.run([sys.executable, str(ROOT / "launch" / script), *map(str, arguments)], cwd=cache, env=environment(cache),
                        capture_output=True, text=True, timeout=300)
  return done.returncode, done.stdout, done.stderr


def sentence(result, before=()):
  """The one sentence of a refused command; `before`: how the lines before it may begin."""
  code, out, err = result
  *first, last = err.splitlines()
  assert code == 2 and out == "" and last.startswith("error: ") and "Traceback" not in err, err
  assert all(line.startswith(("run folder ", *before)) for line in first), err
  return last.removeprefix("error: ")


@pytest.mark.parametrize("flags, said", [
  (["--config.agents.serch.trainable=False"], "the config has no key 'agents.serch.trainable'; did you mean --config.agents.search.trainable?"),
  (["--config.method.queries=eight"], "flag --config.method.queries=eight: invalid literal"),
  (["--config.train.steps=-1"], "config.train.steps=-1 must not be negative"),
  (["--config.seed=1", "--config=configs/gaia_single.py", "--config.agents.search.trainable=False"], "has no key 'agents.search.trainable'"),
  (["--config=configs/gaya.py"], "no config file at 'configs/gaya.py'"),
  (["--config=configs/gaia.py:smok"], "configs/gaia.py knows :smoke, :long and :paper, not 'smok'"),
  (["--cofnig.seed=1"], "Unknown command line flag 'cofnig.seed'"),
  (["train"], "unknown argument 'train'; settings are written --config.KEY=VALUE"),
])
def test_mistakes_in_a_command_are_one_sentence_before_jax_is_even_loaded(cache, flags, said):
  text = sentence(launch(cache, *flags))
  assert said in text and len(text) < 400
  assert not (cache / "runs").exists()


def rows_of_gaia(path, count=12):
  """A file in GAIA's columns of which every fourth question is far too long for the tiny context."""
  rows = [{"task_id": f"id-{i}", "Question": f"Qué es {i}?\n作家" if i % 4 else f"{i} " + "a long story, " * 60, "Level": 1,
           "Final answer": str(i), "file_name": "", "Annotator Metadata": {"Steps": "", "Number of steps": "1"}} for i in range(count)]
  path.write_text("".join(json.dumps(r) + "\n" for r in rows))
  return path


@pytest.fixture(scope="module")
def gaia_run(cache, tmp_path_factory):
  """A run on a GAIA file, whose first try had the wrong file name."""
  folder = tmp_path_factory.mktemp("runs")
  right, wrong = rows_of_gaia(folder / "metadata.jsonl"), folder / "metadata.json"
  flags = (*TINY, f"--config.run_dir={folder / 'run'}", "--config.checkpoint.every=1", "--config.eval.every=1")
  text = sentence(launch(cache, *flags, f"--config.task.path={wrong}"))
  assert f"no GAIA file at {wrong}" in text
  flags += (f"--config.task.path={right}",)
  done = launch(cache, *flags)
  assert done[0] == 0, done[2]
  return folder / "run", flags, done


def test_a_first_try_with_a_wrong_file_does_not_bind_the_folder(gaia_run):
  assert json.loads((gaia_run[0] / "config.json").read_text())["task"]["path"].endswith("metadata.jsonl")


def test_questions_that_do_not_fit_are_said_once_and_stay_in_the_denominator(gaia_run):
  folder, _, (_, _, err) = gaia_run
  assert err.count("questions are too long, end as context_full and count as wrong") == 1 and "Traceback" not in err
  rows = metrics.read_metrics(folder)
  assert [r["step"] for r in rows] == [0, 1]
  assert rows[1]["train/rollouts"] == 8 and rows[1]["eval/validation/count"] == 2
  statuses = {k: v for k, v in rows[1].items() if k.startswith("eval/validation/status_")}
  assert sum(statuses.values()) == 2


def test_a_saved_team_answers_all_questions_also_those_too_long_and_of_another_version(cache, gaia_run, tmp_path):
  folder = shutil.copytree(gaia_run[0], tmp_path / "run")
  config = json.loads((folder / "config.json").read_text())
  del config["rollout"]["thinking"]
  config["train"]["key_of_the_future"] = 3
  config["agents"]["search"]["mesh"]["data"] = 4  # trained where there were more devices
  (folder / "config.json").write_text(json.dumps(config))
  before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
  code, out, err = launch(cache, f"--run={folder}", "--step=last", script="evaluate.py")
  assert code == 0, err
  summary = json.loads(out)
  assert summary["count"] == 4 and summary["accuracy"] == 0.0 and summary["step"] == 1
  assert sum(v for k, v in summary.items() if k.startswith("status_")) == 4 and summary["status_context_full"] >= 1
  assert "this version does not know train.key_of_the_future (ignored)" in err and "it lacks rollout.thinking" in err
  assert "every agent is put on one" in err
  assert {p: p.stat().st_mtime_ns for p in folder.rglob("*")} == before  # a reader writes nothing


@pytest.mark.parametrize("flags, said", [
  ([], "--run"), (["--run=nowhere"], "'nowhere' is no run folder: it has no config.json"),
  (["--run=RUN", "--step=7"], "--step=7 is neither best, last nor one of the kept steps [0, 1]"),
  (["--run=RUN", "--count=0"], "flag --count=0"), (["--run=RUN", "--split=tset"], "flag --split=tset"),
])
def test_mistakes_in_an_evaluation_are_one_sentence(cache, gaia_run, flags, said):
  assert said in sentence(launch(cache, *(f.replace("RUN", str(gaia_run[0])) for f in flags), script="evaluate.py"))


def test_a_folder_in_use_is_refused_with_its_holder(cache, tmp_path):
  with RunFolder.open(tmp_path / "run", {}):
    text = sentence(launch(cache, *TINY, f"--config.run_dir={tmp_path / 'run'}"))
  assert text.startswith(f"run folder '{tmp_path / 'run'}' is in use by process {os.getpid()} on host ")


def test_a_damaged_checkpoint_is_named_and_the_earlier_one_is_still_good(cache, gaia_run, tmp_path):
  """The newest checkpoint was cut short by hand; without it, the same command goes on from the one before."""
  folder = shutil.copytree(gaia_run[0], tmp_path / "run")
  newest = folder / "checkpoints" / "step_00000001"
  for file in newest.rglob("*"):
    if file.is_file() and "main" in file.parts:
      os.truncate(file, file.stat().st_size // 2)
  flags = [f for f in gaia_run[1] if "run_dir" not in f] + [f"--config.run_dir={folder}"]
  text = sentence(launch(cache, *flags), before=("questions of ", "warning: "))
  assert text.startswith("checkpoint of step 1 in ") and text.endswith("remove its folder to use another (there are: [0])")
  shutil.rmtree(newest)
  with open(folder / "metrics.jsonl", "a") as file:
    file.write('{"step": 1, "torn')
  code, _, err = launch(cache, *flags)
  assert code == 0, err
  assert [r["step"] for r in metrics.read_metrics(folder)] == [0, 1]


def test_sigterm_says_how_to_go_on_and_frees_the_folder(cache, gaia_run, tmp_path):
  flags = [f for f in gaia_run[1] if "run_dir" not in f and "steps" not in f]
  folder = tmp_path / "run"
  command = [sys.executable, str(ROOT / "launch/train.py"), *flags, f"--config.run_dir={folder}", "--config.train.steps=100000"]
  process = subprocess.Popen(command, cwd=cache, env=environment(cache), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
  deadline = time.time() + 200
  while not list(folder.glob("checkpoints/step_*1")) and time.time() < deadline and process.poll() is None:
    time.sleep(0.05)
  process.send_signal(signal.SIGTERM)
  _, err = process.communicate(timeout=60)
  assert process.returncode == 143 and err.endswith("stopped; run the same command to continue\n") and "Traceback" not in err, err
  RunFolder.open(folder, json.loads((folder / "config.json").read_text())).close()
