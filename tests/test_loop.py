"""The whole job in miniature: the shipped models, a few questions, real processes killed for real."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from mgrpo_jax import metrics

ROOT = pathlib.Path(__file__).resolve().parents[1]
MINI = ("--config.method.queries=2", "--config.method.rollouts=4", "--config.train.steps=4", "--config.train.rows=4",
        "--config.rollout.slots=16", "--config.task.validation_questions=6", "--config.task.test_questions=6",
        "--config.checkpoint.every=1", "--config.eval.every=2")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
  return tmp_path_factory.mktemp("cache")


def command(folder, *flags, config="gaia.py"):
  return [sys.executable, str(ROOT / "launch/train.py"), f"--config={ROOT / 'configs' / config}", f"--config.run_dir={folder}", *flags]


def environment(cache):
  return {**os.environ, "MGRPO_CACHE": str(cache), "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}


def launch(folder, cache, *flags, config="gaia.py"):
  return subprocess.run(command(folder, *flags, config=config), cwd=folder.parent, env=environment(cache), capture_output=True,
                        text=True, timeout=600)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, cache):
  folder = tmp_path_factory.mktemp("runs") / "uninterrupted"
  done = launch(folder, cache, *MINI)
  assert done.returncode == 0, done.stderr[-3000:]
  return folder, done


def test_the_main_job_ends_with_a_table_a_picture_and_readable_rollouts(finished):
  folder, done = finished
  for row in ("warm start", "trained, closed book", "trained, random search", "headroom: main with a perfect sub, trained",
              "headroom: search on gold subquestions, warm", "only main trained", "only search trained"):
    assert f"| {row} " in done.stdout
  assert (folder / "curve.png").stat().st_size > 10_000
  text = (folder / "rollouts/step000000.txt").read_text()
  assert "main: 'What is " in text and "    search: " in text and "reward " in text
  assert list((folder / "tensorboard").iterdir())
  results = json.loads((folder / "results.json").read_text())
  assert set(results["fingerprints"]) == {"main", "search"} and len(results["evaluations"]) == 10
  assert all(e["count"] == 6 for k, e in results["evaluations"].items() if "gold" not in k)


def test_both_agents_learned_something_and_nothing_compiled_after_the_first_step(finished):
  rows = [r for r in metrics.read_metrics(finished[0]) if r["step"] > 0]
  assert [r["step"] for r in rows] == [1, 2, 3, 4]
  for agent in ("main", "search"):
    assert any(r.get(f"train/{agent}/grad_norm") for r in rows), agent
  assert [r["compile/programs"] for r in rows] == [0, 0, 0, 0]
  assert rows[0]["train/search/trajectories"] > 0


def test_a_finished_run_shows_its_table_again_without_training(finished, cache):
  folder, first = finished
  again = launch(folder, cache, *MINI)
  assert again.returncode == 0 and again.stdout == first.stdout
  assert [r["step"] for r in metrics.read_metrics(folder)] == [0, 1, 2, 3, 4]


def test_a_run_that_was_killed_ends_with_the_same_parameters_bit_for_bit(finished, cache, tmp_path):
  folder = tmp_path / "killed"
  kill_after_step(folder, cache, 2)
  assert not (folder / "results.json").exists()
  done = launch(folder, cache, *MINI)
  assert done.returncode == 0, done.stderr[-3000:]
  assert_same_run(finished[0], folder)


@pytest.mark.slow
def test_a_run_killed_again_and_again_at_any_instant_ends_with_the_same_parameters(finished, cache, tmp_path):
  folder = tmp_path / "killed-often"
  for seconds in (9, 12, 14, 16, 18, 20):
    process = subprocess.Popen(command(folder, *MINI), env=environment(cache), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    process.wait()
  done = launch(folder, cache, *MINI)
  assert done.returncode == 0, done.stderr[-3000:]
  assert_same_run(finished[0], folder)


def test_a_resumed_run_begins_where_it_began_whatever_became_of_the_cache(cache, tmp_path):
  folder, elsewhere = tmp_path / "moved", tmp_path / "empty"
  few = (*MINI, "--config.agents.search.warm_start.steps=2", "--config.agents.search.warm_start.count=64")
  kill_after_step(folder, tmp_path / "first", 1, *few)
  kept = {f.name: f.read_bytes() for f in sorted((folder / "warm").iterdir())}
  assert list(kept) == ["main.safetensors", "search.safetensors"]
  done = launch(folder, elsewhere, *few, "--config.eval.final=False")
  assert done.returncode == 2 and "eval.final" in done.stderr  # the same command
  done = launch(folder, elsewhere, *few)
  assert done.returncode == 0, done.stderr[-3000:]
  assert "warm start of search" not in done.stderr and not (elsewhere / "warm_start").exists()
  assert kept == {f.name: f.read_bytes() for f in sorted((folder / "warm").iterdir())}


def test_another_config_in_the_same_folder_is_refused_with_the_difference(finished, cache):
  done = launch(finished[0], cache, *MINI, "--config.seed=7")
  assert done.returncode == 2
  assert "seed" in done.stderr and "7" in done.stderr and "Traceback" not in done.stderr


def test_a_frozen_agent_keeps_its_parameters_and_the_other_learns(finished, cache, tmp_path):
  results = {}
  for frozen in ("search", "main"):
    folder = tmp_path / f"frozen-{frozen}"
    done = launch(folder, cache, *MINI, f"--config.agents.{frozen}.trainable=False", "--config.eval.final=False")
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [r for r in metrics.read_metrics(folder) if r["step"] > 0]
    assert not any(f"train/{frozen}/grad_norm" in r for r in rows)
    results[frozen] = rows
  assert any(r.get("train/main/grad_norm") for r in results["search"])
  assert any(r.get("train/search/grad_norm") for r in results["main"])


def test_the_single_agent_runs_with_the_tools_of_the_sub_agent(cache, tmp_path):
  folder = tmp_path / "single"
  done = launch(folder, cache, *MINI, "--config.train.rows=2", "--config.eval.final=False", config="gaia_single.py")
  assert done.returncode == 0, done.stderr[-3000:]
  rows = metrics.read_metrics(folder)
  assert not any(k.startswith("train/search/") for k in rows[-1])
  assert "'visit'" not in done.stderr and '"name": "visit"' in (folder / "rollouts/step000000.txt").read_text()


def kill_after_step(folder, cache, step, *flags):
  process = subprocess.Popen(command(folder, *(flags or MINI)), env=environment(cache), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
  deadline = time.time() + 300
  while time.time() < deadline and process.poll() is None:
    rows = metrics.read_metrics(folder) if (folder / "metrics.jsonl").exists() else []
    if rows and rows[-1]["step"] >= step:
      break
    time.sleep(0.05)
  process.send_signal(signal.SIGKILL)
  assert process.wait() == -signal.SIGKILL, "the run ended before it could be killed"


def assert_same_run(a, b):
  one, two = (json.loads((f / "results.json").read_text()) for f in (a, b))
  assert one["fingerprints"] == two["fingerprints"]
  assert one["evaluations"] == two["evaluations"]
  timeless = [[{k: v for k, v in r.items() if not k.startswith(("time", "memory", "compile"))} for r in metrics.read_metrics(f)]
              for f in (a, b)]
  assert timeless[0] == timeless[1]
