"""What a run is about: the user's files, contexts and experts, refused or warned about before anything compiles."""

import base64
import importlib.util
import json
import pathlib
import sys

import jax
import numpy as np
import pytest

from mgrpo_jax import agent, checkpoint, validation, world
from mgrpo_jax.errors import UserError
from mgrpo_jax.tasks import gaia
from mgrpo_jax.trajectory import Query

ROOT = pathlib.Path(__file__).resolve().parents[1]


def config_of(arg="smoke", **changes):
  spec = importlib.util.spec_from_file_location("gaia_config", ROOT / "configs/gaia.py")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  c = module.get_config(arg)
  for key, value in changes.items():
    c.update_from_flattened_dict({key.replace("__", "."): value})
  validation.validate(c)
  return c


def gaia_rows(count=12, **changes):
  """Rows in GAIA's own columns: questions of several lines, other scripts, long ones, hidden work of annotators."""
  rows = []
  for i in range(count):
    question = [f"How many moons has planet {i}?", f"A table:\n| a | b |\n|---|---|\n| {i} | 2 |\n\nWhat is b?",
                f"Où est née l'écrivaine n°{i} — 作家 🙂?", f"Question {i}. " + "It is a long story of many words. " * 20][i % 4]
    rows.append({
      "task_id": f"{i:08x}-0000-4000-8000-000000000000", "Question": question, "Level": 1 + i % 3, "Final answer": str(i),
      "file_name": "", "Annotator Metadata": {"Steps": "1. Look.\n2. Read.", "Number of steps": "2", "Tools": "none",
                                              "How long did this take?": "2 minutes", "Number of tools": "0"}} | changes)
  return rows


def write(path, rows):
  path.write_text("\n".join(json.dumps(r, ensure_ascii=False) for r in rows) + "\n", encoding="utf-8")
  return str(path)


def refusal(c):
  with pytest.raises(UserError) as caught:
    world.load(c, None)
  text = str(caught.value)
  assert "\n" not in text and len(text) < 500, text
  return text


# ------------------------------------------------------------------------------------------- files of questions


def test_a_gaia_file_is_split_said_and_its_too_long_questions_are_counted_in_one_line(tmp_path, capsys):
  path = write(tmp_path / "metadata.jsonl", gaia_rows())
  w = world.load(config_of(task__path=path), None)
  assert (len(w.train), len(w.validation), len(w.test)) == (6, 2, 4)
  everything = [*w.train, *w.validation, *w.test]
  assert len({q.id for q in everything}) == 12 and {q.level for q in everything} == {"1", "2", "3"}
  assert any("\n| 1 | 2 |" in q.question for q in everything) and any("作家" in q.question for q in everything)
  said = capsys.readouterr().err.splitlines()
  assert said[0] == f"questions of {path}: 6 train, 2 validation, 4 test"
  blind, long = said[1:]
  assert blind.startswith("warning: config.agents.search.expert='atlas_oracle' can judge no subquestion of these questions")
  assert long.startswith("warning: ") and " of 12 questions are too long, end as context_full and count as wrong: the question " in long
  assert "tokens of config.agents.main.limits.context=128" in long
  again = world.load(config_of(task__path=path), None)
  assert [q.id for q in again.train] == [q.id for q in w.train]
  for text in (q.question for q in everything):
    assert w.tokenizers["main"].decode(w.tokenizers["main"].encode(text)) == text


def test_a_test_file_of_its_own_is_used_whole_and_train_questions_can_be_cut(tmp_path, capsys):
  path = write(tmp_path / "train.jsonl", gaia_rows(8))
  other = [r | {"task_id": f"t{i}", "Question": f"Test {i}?"} for i, r in enumerate(gaia_rows(5))]
  other[0]["file_name"] = "picture.png"
  c = config_of(task__path=path, task__test_path=write(tmp_path / "test.jsonl", other), task__train_questions=3)
  w = world.load(c, None)
  assert (len(w.train), len(w.validation), [q.id for q in w.test]) == (3, 2, ["t1", "t2", "t3", "t4"])
  assert "4 test; 1 with an attached file are left out" in capsys.readouterr().err


def test_files_that_cannot_be_used_are_one_sentence_with_file_and_line(tmp_path):
  rows = gaia_rows(8)
  half = write(tmp_path / "half.jsonl", rows) and (tmp_path / "half.jsonl")
  half.write_text(half.read_text(encoding="utf-8")[:-40], encoding="utf-8")
  (tmp_path / "folder").mkdir()
  (tmp_path / "table.csv").write_text("task_id,Question,Level,Final answer\n1,Who?,1,me\n")
  surrogate = [rows[0] | {"Question": "broken \ud83d"}, *rows[1:]]
  (tmp_path / "surrogate.jsonl").write_text("\n".join(json.dumps(r) for r in surrogate))
  cases = {
    str(tmp_path / "nope.jsonl"): "no GAIA file at",
    str(half): "half.jsonl, line 8: not JSON",
    str(tmp_path / "table.csv"): "table.csv, line 1: not JSON",
    str(tmp_path / "folder"): "no metadata.jsonl in",
    write(tmp_path / "twice.jsonl", [*rows, rows[2]]): "line 9: task_id '00000002-0000-4000-8000-000000000000' already stands in line 3",
    write(tmp_path / "columns.jsonl", [{"question": "Who?", "answer": "me"}]): "line 1: no column 'task_id'",
    write(tmp_path / "hidden.jsonl", [*rows[:7], rows[7] | {"Final answer": "?"}]): "1 of 8 questions have a hidden answer ('?')",
    write(tmp_path / "few.jsonl", rows[:3]): "holds 3 text questions, too few to split",
    write(tmp_path / "empty.jsonl", []): "holds no rows",
    str(tmp_path / "surrogate.jsonl"): "the row of task_id '00000000-0000-4000-8000-000000000000' holds half a character",
  }
  for path, sentence in cases.items():
    assert sentence in refusal(config_of(task__path=path)), path


def test_questions_that_are_trained_on_cannot_be_tested(tmp_path):
  path = write(tmp_path / "all.jsonl", gaia_rows())
  assert "holds 12 questions of config.task.path" in refusal(config_of(task__path=path, task__test_path=path)).replace("24", "12")
  renamed = write(tmp_path / "renamed.jsonl", [gaia_rows()[3] | {"task_id": "new"}])
  assert "holds 1 questions of config.task.path" in refusal(config_of(task__path=path, task__test_path=renamed))


def test_too_many_questions_are_refused_with_how_many_there_are(tmp_path):
  assert "atlas has at most" in refusal(config_of(task__test_questions=100_000))
  assert "balanced validation questions; asked for 100000" in refusal(config_of(task__validation_questions=100_000))
  assert "there are 3 training questions, fewer than config.method.queries=4" in refusal(
    config_of(task__train_questions=3, method__queries=4))
  path = write(tmp_path / "all.jsonl", gaia_rows())
  assert "there are 6 training questions, fewer than config.method.queries=8" in refusal(config_of(task__path=path, method__queries=8))


def test_evidence_of_another_shape_is_left_alone():
  steps = ["a text", [["one", "two"]], [["angola", "no relation", "x"]], [["no such page", "capital", "x"]], None]
  queries = [Query(f"q{i}", "?", "a", metadata={"evidence": e}) for i, e in enumerate(steps)]
  assert world._gold_subquestions(queries) == []
  good = Query("g", "?", "luanda", metadata={"evidence": [["angola", "capital", "luanda"]]})
  assert [(q.question, q.answer) for q in world._gold_subquestions([good])] == [("the capital of angola", "luanda")]


def test_atlas_questions_are_kept_in_the_run_folder_whole_or_not_at_all(tmp_path):
  w = world.load(config_of(), tmp_path / "run")
  files = sorted(p.name for p in (tmp_path / "run/questions").iterdir())
  assert files == ["test.jsonl", "train.jsonl", "validation.jsonl"]
  assert [q.id for q in gaia.read(tmp_path / "run/questions/test.jsonl")] == [q.id for q in w.test]


# ---------------------------------------------------------------------------------------------------- contexts


def test_a_context_that_a_question_does_not_fit_is_refused_with_the_longest(tmp_path):
  text = refusal(config_of(agents__main__limits__context=20))
  assert text.startswith("the question 'atlas-") and "raise the context" in text
  assert "tokens of config.agents.main.limits.context=20, of which answer_reserve=12 must stay free" in text
  w = world.load(config_of(), None)
  longest = max(len(w.tokenizers["main"].encode(q.question)) + 3 for q in [*w.train, *w.validation, *w.test])
  assert f" takes {longest} tokens " in text
  exact = dict(agents__main__limits__answer_reserve=5)
  world.load(config_of(agents__main__limits__context=longest + 5, **exact), None)
  refusal(config_of(agents__main__limits__context=longest + 4, **exact))
  assert "the subquestion 'the " in refusal(config_of(agents__search__limits__context=14))
  assert "config.agents.search.limits.context" in refusal(config_of(agents__search__prompt="Read the page with care. " * 40))


def test_a_file_of_which_no_training_question_fits_is_refused(tmp_path):
  rows = [r | {"Question": f"{i} " + "long " * 300} for i, r in enumerate(gaia_rows())]
  assert "raise the context" in refusal(config_of(task__path=write(tmp_path / "long.jsonl", rows)))


# ----------------------------------------------------------------------------------------------------- experts


@pytest.fixture
def experts(tmp_path, monkeypatch):
  (tmp_path / "my_experts.py").write_text(
    "import numpy as np\n"
    "def good(task, result):\n  return np.float32(0.5)\n"
    "def whole(task, result):\n  return 1\n"
    "def nothing(task, result):\n  return None\n"
    "def text(task, result):\n  return 'yes'\n"
    "def large(task, result):\n  return 7\n"
    "def nan(task, result):\n  return float('nan')\n"
    "def fails(task, result):\n  return {}['key']\n"
    "def one_argument(task):\n  return 1\n"
    "number = 3\n")
  (tmp_path / "broken_experts.py").write_text("def f(:\n")
  monkeypatch.syspath_prepend(tmp_path)
  yield
  sys.modules.pop("my_experts", None)


@pytest.mark.parametrize("expert, sentence", [
  ("nothing_of_this_name:f", "ModuleNotFoundError"), ("my_experts:nope", "AttributeError"), ("my_experts", "AttributeError"),
  (":f", "ValueError"), ("my_experts:one_argument", "too many positional arguments"), ("my_experts:number", "not a callable"),
  ("broken_experts:f", "SyntaxError"), ("atlas_orakel", "ModuleNotFoundError")])
def test_experts_that_cannot_be_called_are_refused_at_the_start(experts, expert, sentence):
  text = refusal(config_of(agents__search__expert=expert))
  assert text.startswith(f"config.agents.search.expert={expert!r} is neither 'atlas_oracle' nor a 'module:function'") and sentence in text


def test_what_an_expert_says_is_checked(experts):
  def score(name):
    return world._experts(config_of(agents__search__expert=f"my_experts:{name}"))["search"]("the capital of x", None)

  assert (score("good"), score("whole"), score("nothing")) == (0.5, 1.0, None)
  for name, said in (("text", "gave 'yes'"), ("large", "gave 7"), ("nan", "gave nan"), ("fails", "failed on")):
    with pytest.raises(UserError, match=f"config.agents.search.expert='my_experts:{name}' {said}") as caught:
      score(name)
    assert "'the capital of x'" in str(caught.value)
  assert world._experts(config_of(agents__search__expert="")) == {}


# ------------------------------------------------------------------------------------- meshes and weights


@pytest.fixture(scope="module")
def tokenizers():
  return world.load(config_of(), None).tokenizers


def check(c, tokenizers):
  agent.check(c, agent.build_meshes(c, jax.devices()), tokenizers)


def test_meshes_that_do_not_fit_devices_or_model_are_refused(tokenizers):
  with pytest.raises(UserError, match="agent 'search': mesh .* needs 16 devices, there are 8"):
    check(config_of(agents__search__mesh__data=16, train__rows=16), tokenizers)
  wide = {f"agents__main__model__{k}": v for k, v in (("num_heads", 3), ("num_kv_heads", 3), ("mlp_dim", 66))}
  assert tokenizers["main"].vocab_size % 3
  with pytest.raises(UserError, match=r"config.agents.main.mesh: parameter 'embedding' has shape .*'vocab'.* of size 3"):
    check(config_of(agents__main__mesh__tensor=3, **wide), tokenizers)
  check(config_of(agents__main__mesh__data=2, agents__search__mesh__data=4), tokenizers)


def test_weights_to_start_from_that_are_missing_damaged_or_of_another_shape_are_refused(tokenizers, tmp_path):
  c = config_of(train__warm_start=str(tmp_path))
  with pytest.raises(UserError, match="is neither shipped, rebuild, none nor a folder with main.safetensors"):
    check(c, tokenizers)
  shapes = jax.eval_shape(lambda: agent.build_model("main", c, tokenizers["main"]).init(jax.random.key(0)))
  weights = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), shapes)
  for name in ("main", "search"):
    checkpoint.save_weights(tmp_path / f"{name}.safetensors", weights)
  check(c, tokenizers)
  other = config_of(train__warm_start=str(tmp_path), agents__search__model__mlp_dim=96)
  with pytest.raises(UserError, match=r"search.safetensors' does not fit: layer_0/.* has shape \(.*\) in it, this model needs \(.*96.*\)"):
    check(other, tokenizers)
  (tmp_path / "main.safetensors").write_bytes(b"nonsense")
  with pytest.raises(UserError, match="main.safetensors' is not a whole .safetensors file"):
    check(c, tokenizers)


@pytest.mark.parametrize("name, right", [("xbench", "Answer 3"), ("webwalker", "answer  3.")])
def test_other_benchmarks_files_are_split_and_scored_by_their_own_rules(tmp_path, name, right):
  path = tmp_path / f"{name}.txt"
  if name == "xbench":
    path.write_text("id,prompt,answer,reference_steps,canary\n" + "".join(
      f"{i},{base64.b64encode(bytes(b ^ 107 for b in f'What is {i}?'.encode())).decode()},"
      f"{base64.b64encode(bytes(b ^ 107 for b in f'Answer {i}'.encode())).decode()},,k\n" for i in range(12)))
  else:
    path.write_text("".join(json.dumps({"question": f"What is {i}?", "answer": f"Answer {i}"}) + "\n" for i in range(12)))
  loaded = world.load(config_of(task__name=name, task__path=str(path), task__validation_questions=2, task__test_questions=2), None)
  everything = {q.question: q for q in (*loaded.train, *loaded.validation, *loaded.test)}
  assert [len(x) for x in (loaded.train, loaded.validation, loaded.test)] == [8, 2, 2] and len(everything) == 12
  query = everything["What is 3?"]
  assert loaded.correct(right, query) and not loaded.correct("Answer 4", query)
  assert loaded.correct("answer 3", query) == (name == "webwalker")


@pytest.mark.parametrize("file, arg", [("xbench", None), ("xbench", "paper"), ("webwalker", None), ("webwalker", "paper")])
def test_their_configs_need_a_file_to_run_and_none_to_be_planned(file, arg):
  spec = importlib.util.spec_from_file_location(file, ROOT / f"configs/{file}.py")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  c = module.get_config(arg)
  validation.validate(c, planned=True)
  with pytest.raises(UserError, match=f"config.task.name='{file}' needs config.task.path="):
    validation.validate(c)
  paper = config_of("paper")
  same = {n: c.agents[n].model == paper.agents[n].model and c.agents[n].limits == paper.agents[n].limits for n in ("main", "search")}
  assert set(same.values()) == {arg == "paper"} and (c.method.alignment == paper.method.alignment) == (arg == "paper")
