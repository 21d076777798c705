"""What a hurried user may get wrong in a config is refused in one sentence that names the key, before anything starts."""

import importlib.util
import json
import pathlib
import re

import pytest
from ml_collections import config_dict

from mgrpo_jax import config as config_lib
from mgrpo_jax import validation
from mgrpo_jax.errors import UserError
from mgrpo_jax.policy import attention, transformer

ROOT = pathlib.Path(__file__).resolve().parents[1]


def load(name, arg=None):
  spec = importlib.util.spec_from_file_location(name, ROOT / "configs" / f"{name}.py")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module.get_config(arg)


def changed(config="gaia", **changes):
  """A config with some dotted keys set ("__" for "."), as `--config.KEY=VALUE` sets them."""
  c = load(config)
  with c.unlocked(), c.ignore_type():
    for key, value in changes.items():
      *parents, last = key.split("__")
      node = c
      for p in parents:
        node = node[p]
      node[last] = value
  return c


def refusal(c):
  with pytest.raises(UserError) as caught:
    validation.validate(c)
  text = str(caught.value)
  assert "\n" not in text and len(text) < 400, text
  return text


@pytest.mark.parametrize("name, arg", [("gaia", None), ("gaia", "smoke"), ("gaia", "long"), ("gaia", "paper"), ("gaia_single", None), ("gaia_single", "smoke")])
def test_the_shipped_configs_are_fine(name, arg):
  validation.validate(load(name, arg))


def test_every_key_has_a_rule_and_every_rule_a_key():
  kinds = validation.schema(load("gaia"))
  assert [k for k, (kind, _) in kinds.items() if kind is not bool and validation.rule(k) is None] == []
  numbers = [k for k, (kind, _) in kinds.items() if kind in (int, float)]
  assert [k for k in numbers if not re.fullmatch(r"[\[(].+, .+[\])]", validation.rule(k))] == []
  assert set(validation.RULES) == {re.sub(r"^agents\.\w+\.", "agents.*.", k) for k in kinds if ".flaws." not in k
                                   and kinds[k][0] is not bool}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_no_number_may_be_infinite_or_no_number_at_all(value):
  for key, (kind, _) in validation.schema(load("gaia")).items():
    if kind is float:
      assert refusal(changed(**{key.replace(".", "__"): value})).startswith(f"config.{key}={value} must be"), key


def test_the_choices_of_a_model_are_those_of_its_code():  # which validation does not import: it would take jax
  assert validation.rule("agents.*.model.attention") == attention.KINDS
  assert validation.rule("agents.*.model.remat") == tuple(transformer.REMAT)


def test_every_number_has_a_lower_bound_but_the_entropy_bonus():
  for key, (kind, _) in validation.schema(load("gaia")).items():
    if kind in (int, float) and key != "method.loss.entropy_coef":
      assert refusal(changed(**{key.replace(".", "__"): kind(-1)})).startswith(f"config.{key}=-1"), key
  validation.validate(changed(method__loss__entropy_coef=-0.01))


def test_every_setting_is_refused_with_a_value_of_another_type():
  wrong = {int: "eight", float: "fast", bool: "maybe", str: 3, tuple: "search"}
  for key, (kind, _) in validation.schema(load("gaia")).items():
    text = refusal(changed(**{key.replace(".", "__"): wrong[kind]}))
    assert re.match(re.escape(f"config.{key}={wrong[kind]!r} ") + "(must be|is not one of)", text), text


def test_whole_numbers_and_switches_are_not_taken_for_each_other():
  assert refusal(changed(method__queries=True)) == "config.method.queries=True must be a whole number"
  assert refusal(changed(method__queries=2.5)) == "config.method.queries=2.5 must be a whole number"
  assert refusal(changed(agents__search__trainable=0)) == "config.agents.search.trainable=0 must be True or False"
  assert refusal(changed(train__steps=None)) == "config.train.steps=None must be a whole number"
  validation.validate(changed(method__loss__clip_low=0))  # a whole number is a number, and None stands for "not set"
  validation.validate(changed(method__loss__dual_clip=None))


REFUSED = {
  # choices
  "method.group_by=qurey": "config.method.group_by='qurey' is not one of query, position, turn, pooled; did you mean 'query'?",
  "method.zero_variance=dropp": "did you mean 'drop'?",
  "method.loss.ratio=tokens": "did you mean 'token'?",
  "method.loss.kl=k4": "config.method.loss.kl='k4' is not one of k1, k2, k3",
  "task.name=gaya": "did you mean 'gaia'?",
  "agents.main.model.dtype=float16": "did you mean 'bfloat16'?",
  "agents.search.warm_start.demonstrations=serch": "did you mean 'search'?",
  # numbers
  "method.rollouts=1": "config.method.rollouts=1 must lie in [2, inf)",
  "method.queries=0": "config.method.queries=0 must be at least 1",
  "train.steps=-1": "config.train.steps=-1 must not be negative",
  "rollout.slots=0": "config.rollout.slots=0 must be at least 1",
  "rollout.temperature=0.0": "config.rollout.temperature=0.0 must be positive",
  "tokenizer.merges=-1": "config.tokenizer.merges=-1 must not be negative",
  "method.loss.dual_clip=1.0": "config.method.loss.dual_clip=1.0 must lie in (1, inf)",
  "method.loss.clip_low=1.5": "config.method.loss.clip_low=1.5 must lie in [0, 1]",
  "method.reward.sub.main_weight=-0.4": "config.method.reward.sub.main_weight=-0.4 must not be negative",
  "method.alignment.quantile=0.0": "config.method.alignment.quantile=0.0 must lie in (0, 1]",
  "method.advantage.ddof=2": "config.method.advantage.ddof=2 must lie in [0, 1]",
  "agents.main.optimizer.b2=1.0": "config.agents.main.optimizer.b2=1.0 must lie in [0, 1)",
  "agents.main.optimizer.learning_rate=-0.1": "config.agents.main.optimizer.learning_rate=-0.1 must not be negative",
  "agents.search.warm_start.permute=1.5": "config.agents.search.warm_start.permute=1.5 must lie in [0, 1]",
  "agents.search.warm_start.flaws.miss=1.5": "config.agents.search.warm_start.flaws.miss=1.5 must lie in [0, 1]",
  "seed=-1": "config.seed=-1 must lie in [0, 2147483647]",
  # texts and lists with a meaning
  "run_dir=": "config.run_dir is empty",
  "run_dir=gs://bucket/run": "config.run_dir='gs://bucket/run' must be a folder of this machine",
  "method.alignment.target=0": "config.method.alignment.target='0' must be 'auto' or a whole number of at least 1",
  "method.alignment.target=autoo": "config.method.alignment.target='autoo' must be 'auto'",
  "method.alignment.target=-8": "config.method.alignment.target='-8' must be",
  "method.alignment.target=²": "config.method.alignment.target='²' must be",
  "method.alignment.buckets=(4, 2)": "config.method.alignment.buckets=(4, 2) must be rising whole numbers",
  "rollout.prefill_buckets=(32, 16)": "config.rollout.prefill_buckets=(32, 16) must be rising whole numbers of at least 1",
  "rollout.prefill_buckets=(16, 16)": "must be rising",
  "rollout.prefill_buckets=(0, 16)": "must be rising",
  "rollout.prefill_buckets=()": "must be rising",
  "rollout.prefill_buckets=('a',)": "must be rising whole numbers",
  "method.overlong.statuses=('max_turn',)": "config.method.overlong.statuses='max_turn' is not one of max_turns, context_full, "
                                            "tool_budget; did you mean 'max_turns'?",
  "method.overlong.statuses=(3,)": "config.method.overlong.statuses=3 is not one of",
  "agents.search.tools=('search', 'visti')": "config.agents.search.tools='visti' is not one of search, visit; did you mean 'visit'?",
  # combinations
  "method.loss.importance_cap=2.0": "needs config.method.loss.proximal=True",
  "method.loss.aggregate=seq-mean-token-sum-norm": "needs config.method.loss.norm_length",
  "task.name=gaia": "needs config.task.path=",
  "task.test_path=test.jsonl": "config.task.test_path needs config.task.path",
  "agents.main.delegates=('serch',)": "config.agents.main.delegates names 'serch', which is not in config.agents (main, search)",
  "agents.main.delegates=('main', 'search')": "only the main agent delegates, and not to itself",
  "agents.search.delegates=('search',)": "config.agents.search.delegates='search': only the main agent delegates",
  "agents.main.delegates=()": "config.agents.main.warm_start.demonstrations='main' shows how to delegate",
  "agents.main.tools=('search',)": "'search' is both a tool and a sub-agent",
  "agents.main.expert=atlas_oracle": "config.agents.main.expert='atlas_oracle' is never asked",
  "agents.main.model.num_kv_heads=3": "config.agents.main.model.num_heads=4 must be a multiple of num_kv_heads=3",
  "agents.main.model.head_dim=33": "must be even",
  "agents.main.model.num_experts=4": "needs experts_per_token (1 to 4, now 0) and expert_dim (now 0)",
  "agents.main.model.rope_scaling=(8.0, 1.0, 4.0)": "must be four positive numbers",
  "agents.main.mesh.expert=2": "config.agents.main.mesh.expert=2, but the model has no experts",
  "agents.main.model.remat=all": "is not one of none, full, dots",
  "agents.main.mesh.tensor=3": "config.agents.main.mesh.tensor=3 does not divide model.num_heads=4",
  "agents.main.mesh.fsdp=3": "config.agents.main.mesh.fsdp=3 does not divide model.embed_dim=128",
  "agents.search.mesh.data=5": "config.train.rows=16 does not split over config.agents.search.mesh (data x fsdp x expert = 5)",
  "agents.search.limits.context=1000": "does not fit a row of config.train.length=256",
  "agents.main.limits.context=10": "config.agents.main.limits.answer_reserve=12 leaves no room in context=10",
}


@pytest.mark.parametrize("flag", REFUSED)
def test_values_that_cannot_work_are_refused_with_the_key_and_the_fix(flag):
  key, _, text = flag.partition("=")
  kind = validation.schema(load("gaia"))[key][0]
  value = {int: int, float: float, str: str, tuple: eval}[kind](text)
  assert REFUSED[flag] in refusal(changed(**{key.replace(".", "__"): value}))


def test_nothing_and_the_ends_of_ranges_are_settings_too():
  zeros = ("train.steps", "train.sample_rollouts", "checkpoint.keep_best", "tokenizer.merges", "method.resample_attempts",
           "method.overlong.buffer", "method.advantage.ddof", "rollout.tool_threads", "agents.main.limits.calls",
           "agents.main.limits.answer_reserve", "agents.main.optimizer.warmup_updates", "agents.search.warm_start.warmup_updates", "seed")
  validation.validate(changed(**{k.replace(".", "__"): 0 for k in zeros}))
  reals = ("method.loss.kl_coef", "method.loss.clip_low", "method.reward.main.format_weight", "method.reward.sub.expert_weight",
           "agents.main.optimizer.learning_rate", "agents.main.optimizer.weight_decay", "agents.search.warm_start.permute")
  validation.validate(changed(**{k.replace(".", "__"): 0.0 for k in reals}))
  ends = {"method.alignment.quantile": 1.0, "method.loss.clip_low": 1.0, "method.rollouts": 2, "method.advantage.ddof": 1,
          "seed": 2**31 - 1, "agents.search.warm_start.permute": 1.0, "method.alignment.target": "1", "rollout.prefill_buckets": (1,)}
  validation.validate(changed(**{k.replace(".", "__"): v for k, v in ends.items()}))


def test_combinations_of_several_settings():
  frozen = changed(agents__main__trainable=False, agents__search__trainable=False)
  assert "no agent is trainable" in refusal(frozen)
  validation.validate(changed(agents__main__trainable=False, agents__search__trainable=False, train__steps=0))
  long_buffer = dict(method__overlong__mode="penalise_length", method__overlong__buffer=1000)
  assert refusal(changed(**long_buffer)).startswith("config.method.overlong.buffer=1000 is more than config.agents.main.limits.tokens=")
  validation.validate(changed(method__overlong__buffer=1000))  # the buffer has no meaning in the other modes
  no_reward = changed(method__reward__main__format_weight=0.0, method__reward__main__correct_weight=0.0)
  assert "config.method.reward.main: all weights are 0" in refusal(no_reward)
  flaws = changed(agents__search__warm_start__flaws__miss=0.7, agents__search__warm_start__flaws__wrong_link=0.7)
  assert refusal(flaws).startswith("config.agents.search.warm_start.flaws: flaw 'shares' out of range")
  validation.validate(changed(method__loss__importance_cap=2.0, method__loss__proximal=True))
  alone = changed(agents__main__delegates=(), agents__main__warm_start__demonstrations="single")
  assert "config.agents.search is never called" in refusal(without_flaws(alone, "main"))


def without_flaws(c, name):
  """A share of flaws that is not named is the default; those of other demonstrations are unknown."""
  with c.unlocked():
    c.agents[name].warm_start.flaws = config_dict.ConfigDict()
  return c


def test_flaws_of_other_demonstrations_are_unknown_and_missing_ones_the_defaults():
  other = changed(agents__search__warm_start__demonstrations="main")
  assert re.fullmatch(r"config\.agents\.search\.warm_start\.flaws\.\w+ is no setting.*", refusal(other))
  validation.validate(without_flaws(load("gaia"), "search"))


@pytest.mark.parametrize("name", ["host", "metrics", "default", "my/agent", "2nd", "a-b", ""])
def test_agents_cannot_have_names_that_files_and_checkpoints_need(name):
  c = load("gaia")
  with c.unlocked():
    c.agents[name] = config_lib.agent_config(tools=("search",))
    c.agents.main.delegates = ("search", name)
  assert f"an agent cannot be called {name!r}" in refusal(c)


def test_a_key_that_is_misspelt_inside_a_config_file_is_refused():
  """Before it is locked, a ConfigDict takes any key: a typo would do nothing, silently."""
  c = load("gaia")
  with c.unlocked():
    c.train.step = 5
  assert refusal(c) == "config.train.step is no setting; did you mean config.train.steps?"
  c = load("gaia")
  with c.unlocked():
    c.agents.main.limits.turn = 3
  assert "did you mean config.agents.main.limits.turns?" in refusal(c)


def test_a_config_that_lacks_keys_or_is_none_is_refused():
  c = load("gaia")
  with c.unlocked():
    del c.eval
  assert refusal(c) == "config.eval.every is missing; start the config from base_config() and agent_config()"
  c = load("gaia")
  with c.unlocked():
    c.agents.main = config_dict.ConfigDict({"tools": ()})
  assert "config.agents.main." in refusal(c) and "is missing" in refusal(c)
  assert "config.agents has no agent named 'main' (it has none)" in refusal(config_lib.base_config())
  assert "returned NoneType, not a ConfigDict" in refusal(None)
  assert "config.agents has no agent named 'main'" in refusal(config_dict.ConfigDict({"agents": 3}))


def test_lists_given_as_texts_are_refused_where_they_are_written():
  with pytest.raises(ValueError, match="lists of names"):
    config_lib.agent_config(tools="search")
  with pytest.raises(ValueError, match="no demonstrations 'serch'"):
    config_lib.agent_config(demonstrations="serch")


def test_a_config_survives_its_json_file():
  """Lists come back for tuples, and are the same settings."""
  c = load("gaia")
  saved = json.loads(json.dumps(c.to_dict()))
  assert validation.flat(saved).keys() == validation.schema(c).keys()


def test_the_config_beside_the_launchers_is_found_from_anywhere(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  there = f"--config={ROOT / 'configs/gaia.py'}"
  assert config_lib.find_config(["x", "--config=configs/gaia.py:smoke", "--config.seed=1"], ROOT) == ["x", there + ":smoke", "--config.seed=1"]
  assert config_lib.find_config(["x", "--config", "configs/gaia.py"], ROOT) == ["x", there]
  assert config_lib.find_config(["x", "--config.seed=1", "-config=configs/gaia.py"], ROOT) == ["x", there, "--config.seed=1"]
  assert config_lib.find_config(["x", "--config.seed=1"], ROOT) == ["x", there, "--config.seed=1"]
  assert config_lib.find_config(["x", "--config"], ROOT) == ["x", "--config="]
  (tmp_path / "configs").mkdir()
  (tmp_path / "configs/gaia.py").write_text("")
  assert config_lib.find_config(["x", "--config=configs/gaia.py"], ROOT) == ["x", "--config=configs/gaia.py"]
  assert config_lib.find_config(["x", "--config=nope.py"], ROOT) == ["x", "--config=nope.py"]
