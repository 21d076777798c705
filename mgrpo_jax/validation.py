"""What is refused before anything compiles: unknown keys, wrong types, values out of range, impossible combinations.

Every refusal is one sentence that names the key, its value and what to do. `RULES` has a line for every key of a
config that holds a number, a text or a list, so that a new key cannot be forgotten (tests/test_config.py holds it).
"""

from __future__ import annotations

import difflib
import math
import re
from typing import Any

from mgrpo_jax.config import MAIN, agent_config, base_config
from mgrpo_jax.errors import UserError, user_input
from mgrpo_jax.method import alignment
from mgrpo_jax.tasks import atlas_demos

COUNT, SIZE, SEED, SHARE = "[0, inf)", "[1, inf)", "[0, 2147483647]", "[0, 1]"
POSITIVE, NOT_NEGATIVE = "(0, inf)", "[0, inf)"
TOOLS = ("search", "visit")
OVERLONG = ("max_turns", "context_full", "tool_budget")
RESERVED = ("host", "metrics", "default")  # names that checkpoints use themselves
ANY = "any"  # free text, or with a check of its own below

# What config.task.path means for each config.task.name that has no questions of its own
FILES = {
  "gaia": "GAIA's metadata JSONL; its terms forbid shipping it", "xbench": "XBench-DeepSearch's CSV, such as DeepSearch-2505.csv",
  "webwalker": "WebWalkerQA's JSONL"}

# Numbers as intervals (a round bracket leaves its end out), texts as their choices. "*" is the name of any agent.
RULES: dict[str, str | tuple[str, ...]] = {
  "seed": SEED, "run_dir": ANY,
  "task.name": ("atlas", *FILES), "task.path": ANY, "task.test_path": ANY, "task.train_questions": SIZE,
  "task.validation_questions": SIZE, "task.test_questions": SIZE, "task.seed": SEED,
  "tokenizer.merges": COUNT,
  "method.queries": SIZE, "method.rollouts": "[2, inf)",
  "method.alignment.mode": alignment.MODES, "method.alignment.target": ANY,
  "method.alignment.quantile": "(0, 1]", "method.alignment.window": SIZE, "method.alignment.buckets": ANY,
  "method.advantage.scale": ("std", "none"), "method.advantage.baseline": ("mean", "leave_one_out"),
  "method.advantage.ddof": "[0, 1]", "method.advantage.tol": NOT_NEGATIVE,
  "method.group_by": ("query", "position", "turn", "pooled"),
  "method.zero_variance": ("keep", "drop", "resample"), "method.resample_attempts": COUNT,
  "method.overlong.mode": ("keep", "mask", "exclude", "penalise", "penalise_length"), "method.overlong.statuses": ANY,
  "method.overlong.penalty": NOT_NEGATIVE, "method.overlong.buffer": COUNT,
  "method.reward.main.format_weight": NOT_NEGATIVE, "method.reward.main.correct_weight": NOT_NEGATIVE,
  "method.reward.sub.format_weight": NOT_NEGATIVE, "method.reward.sub.main_weight": NOT_NEGATIVE,
  "method.reward.sub.expert_weight": NOT_NEGATIVE,
  "method.loss.ratio": ("token", "sequence", "sequence-product"),
  "method.loss.aggregate": ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"),
  "method.loss.norm_length": SIZE, "method.loss.clip_low": SHARE, "method.loss.clip_high": NOT_NEGATIVE,
  "method.loss.dual_clip": "(1, inf)", "method.loss.importance_cap": POSITIVE, "method.loss.kl": ("k1", "k2", "k3"),
  "method.loss.kl_coef": NOT_NEGATIVE, "method.loss.entropy_coef": "(-inf, inf)",
  "rollout.temperature": POSITIVE, "rollout.slots": SIZE, "rollout.decode_chunk": SIZE, "rollout.prefill_rows": SIZE,
  "rollout.prefill_buckets": ANY, "rollout.tool_threads": COUNT, "rollout.tool_deadline": POSITIVE, "rollout.thinking": ("optional", "required"),
  "train.steps": COUNT, "train.updates_per_step": SIZE, "train.rows": SIZE, "train.length": SIZE,
  "train.logprob_chunk": SIZE, "train.max_bad_updates": SIZE, "train.warm_start": ANY, "train.sample_rollouts": COUNT,
  "checkpoint.every": SIZE, "checkpoint.keep_last": SIZE, "checkpoint.keep_best": COUNT, "eval.every": SIZE,
  "warm_start.path": ANY,
  "agents.*.init": ANY, "agents.*.lora.rank": COUNT, "agents.*.lora.alpha": POSITIVE, "agents.*.lora.layers": ANY,
  "agents.*.prompt": ANY, "agents.*.tools": ANY, "agents.*.delegates": ANY, "agents.*.expert": ANY,
  "agents.*.model.num_layers": SIZE, "agents.*.model.embed_dim": SIZE, "agents.*.model.num_heads": SIZE,
  "agents.*.model.num_kv_heads": SIZE, "agents.*.model.head_dim": SIZE, "agents.*.model.mlp_dim": SIZE,
  "agents.*.model.rope_theta": POSITIVE, "agents.*.model.norm_eps": POSITIVE, "agents.*.model.init_std": POSITIVE,
  "agents.*.model.vocab_size": SIZE, "agents.*.model.rope_scaling": ANY, "agents.*.model.num_experts": COUNT,
  "agents.*.model.experts_per_token": COUNT, "agents.*.model.expert_dim": COUNT, "agents.*.model.remat": ("none", "full", "dots"),
  "agents.*.model.attention": ("auto", "dense", "blockwise", "splash"), "agents.*.model.dtype": ("float32", "bfloat16"),
  "agents.*.model.param_dtype": ("float32", "bfloat16"),
  "agents.*.rules": ANY, "agents.*.mesh.data": SIZE, "agents.*.mesh.fsdp": SIZE, "agents.*.mesh.expert": SIZE, "agents.*.mesh.tensor": SIZE,
  "agents.*.optimizer.learning_rate": NOT_NEGATIVE, "agents.*.optimizer.warmup_updates": COUNT,
  "agents.*.optimizer.b1": "[0, 1)", "agents.*.optimizer.b2": "[0, 1)", "agents.*.optimizer.eps": POSITIVE,
  "agents.*.optimizer.weight_decay": NOT_NEGATIVE, "agents.*.optimizer.clip_norm": POSITIVE,
  "agents.*.limits.turns": SIZE, "agents.*.limits.turn_tokens": SIZE, "agents.*.limits.tokens": SIZE,
  "agents.*.limits.calls": COUNT, "agents.*.limits.context": SIZE, "agents.*.limits.answer_reserve": COUNT,
  "agents.*.warm_start.demonstrations": ("main", "search", "single"), "agents.*.warm_start.steps": SIZE,
  "agents.*.warm_start.batch": SIZE, "agents.*.warm_start.learning_rate": NOT_NEGATIVE,
  "agents.*.warm_start.warmup_updates": COUNT, "agents.*.warm_start.permute": SHARE,
  "agents.*.warm_start.count": SIZE, "agents.*.warm_start.tokens": SIZE, "agents.*.warm_start.seed": SEED,
}


def validate(c, *, planned: bool = False) -> None:
  """Refuse what cannot work, with the key and the fix.

  Args:
    c: the whole config, a ConfigDict.
    planned: it will only be planned (launch/plan.py), so the files of its questions may be missing.

  Raises:
    UserError: one sentence.
  """
  _check_values(c, check_keys(c))
  if not planned:
    _check_task(c)
  _check_method(c)
  _check_rising("rollout.prefill_buckets", c.rollout.prefill_buckets)
  _check_agents(c)


# ------------------------------------------------------------------------------------------------ single keys


def schema(c) -> dict[str, tuple[type, bool]]:
  """{dotted key: (type, whether None is fine)} of every setting that a config with these agents has.

  Raises:
    UserError: demonstrations that there are not.
  """
  out = _kinds(base_config(), "")
  for name in c.agents:
    try:
      demonstrations = c.agents[name].warm_start.demonstrations
    except (AttributeError, KeyError):
      demonstrations = "search"
    key = f"agents.{name}.warm_start.demonstrations"  # which flaws there are hangs on it
    _check_choice(key, demonstrations, rule(key))
    out |= _kinds(agent_config(demonstrations=demonstrations), f"agents.{name}.")
  return out


def check_keys(c) -> dict[str, tuple[type, bool]]:
  """The schema of a config; refuses keys that it has too many, or that it lacks."""
  if not hasattr(c, "get_type"):
    raise UserError(f"get_config() of the config file returned {type(c).__name__}, not a ConfigDict; it must end with return c.lock()")
  if not hasattr(c.get("agents"), "keys") or MAIN not in c.agents:
    there = ", ".join(c.agents) if hasattr(c.get("agents"), "keys") else ""
    raise UserError(f"config.agents has no agent named {MAIN!r} (it has {there or 'none'})")
  known, there = schema(c), flat(c)
  for key in there:
    if key not in known:
      near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
      raise UserError(f"config.{key} is no setting" + (f"; did you mean config.{near[0]}?" if near else ""))
  # a share of flawed demonstrations that is not named is the default one
  missing = [k for k in known if k not in there and ".flaws." not in k]
  if missing:
    raise UserError(f"config.{missing[0]} is missing; start the config from base_config() and agent_config()")
  return {k: v for k, v in known.items() if k in there}


def flat(c, prefix: str = "") -> dict[str, Any]:
  """{dotted key: value} of a ConfigDict or dict."""
  out = {}
  for key, value in c.items():
    out |= flat(value, f"{prefix}{key}.") if hasattr(value, "keys") else {prefix + key: value}
  return out


def rule(key: str) -> str | tuple[str, ...] | None:
  """The rule of a dotted key, or None."""
  key = re.sub(r"^agents\.[^.]*\.", "agents.*.", key)
  return SHARE if ".flaws." in key else RULES.get(key)


def _kinds(c, prefix: str) -> dict[str, tuple[type, bool]]:
  out = {}
  for key, value in c.items():
    out |= _kinds(value, f"{prefix}{key}.") if hasattr(value, "keys") else {prefix + key: (c.get_type(key), value is None)}
  return out


_TYPES = {bool: "True or False", int: "a whole number", float: "a number", str: "a text", tuple: "a list like (1, 2)"}


def _check_values(c, kinds: dict[str, tuple[type, bool]]) -> None:
  values = flat(c)
  for key, (kind, optional) in kinds.items():
    value = values[key]
    if value is None and optional:
      continue
    accepted = {float: (int, float), tuple: (tuple, list)}.get(kind, kind)
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
      raise UserError(f"config.{key}={value!r} must be {_TYPES[kind]}")
    allowed = rule(key)
    if isinstance(allowed, tuple):
      _check_choice(key, value, allowed)
    elif kind in (int, float):
      _check_number(key, value, allowed)


def _check_choice(key: str, value: str, allowed: tuple[str, ...]) -> None:
  if value not in allowed:
    near = difflib.get_close_matches(str(value), allowed, n=1)
    raise UserError(f"config.{key}={value!r} is not one of {', '.join(allowed)}" + (f"; did you mean {near[0]!r}?" if near else ""))


def _check_number(key: str, value: float, interval: str) -> None:
  low, high = map(float, interval[1:-1].split(","))
  above = value >= low if interval[0] == "[" else value > low
  below = value <= high if interval[-1] == "]" else value < high
  if not (above and below):  # NaN is neither
    words = {COUNT: "must not be negative", SIZE: "must be at least 1", POSITIVE: "must be positive",
             "(-inf, inf)": "must be finite"}.get(interval, f"must lie in {interval}")
    raise UserError(f"config.{key}={value} {words if math.isfinite(value) else 'must be a finite number'}")


def _check_rising(key: str, sizes) -> None:
  whole = all(isinstance(n, int) and not isinstance(n, bool) for n in sizes)
  if not sizes or not whole or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
    raise UserError(f"config.{key}={tuple(sizes)} must be rising whole numbers of at least 1, like (16, 32)")


# ------------------------------------------------------------------------------------------------ combinations


def _check_task(c) -> None:
  if not c.run_dir.strip():
    raise UserError("config.run_dir is empty; name a folder for the run")
  if "://" in c.run_dir:
    raise UserError(f"config.run_dir={c.run_dir!r} must be a folder of this machine (a mounted one is fine)")
  if c.task.name in FILES and not c.task.path:
    raise UserError(f"config.task.name={c.task.name!r} needs config.task.path=... ({FILES[c.task.name]})")
  if c.task.test_path and not c.task.path:
    raise UserError("config.task.test_path needs config.task.path=..., the questions to train on")


def _check_method(c) -> None:
  m = c.method
  target = m.alignment.target
  if target != "auto" and not (re.fullmatch("[0-9]{1,9}", target) and int(target) >= 1):
    raise UserError(f"config.method.alignment.target={target!r} must be 'auto' or a whole number of at least 1")
  _check_rising("method.alignment.buckets", m.alignment.buckets)
  for status in m.overlong.statuses:
    _check_choice("method.overlong.statuses", status, OVERLONG)
  for who in ("main", "sub"):
    if not any(m.reward[who].values()):
      raise UserError(f"config.method.reward.{who}: all weights are 0, so every reward is the same; raise one")
  for name, a in c.agents.items() if m.overlong.mode == "penalise_length" else ():
    if m.overlong.buffer > a.limits.tokens:
      raise UserError(f"config.method.overlong.buffer={m.overlong.buffer} is more than config.agents.{name}.limits.tokens="
                      f"{a.limits.tokens}; lower it")
  loss = m.loss
  if loss.aggregate == "seq-mean-token-sum-norm" and not loss.norm_length:
    raise UserError("config.method.loss.aggregate='seq-mean-token-sum-norm' needs config.method.loss.norm_length (a constant length)")
  if loss.importance_cap is not None and not loss.proximal:
    raise UserError("config.method.loss.importance_cap needs config.method.loss.proximal=True (without it the ratio already corrects)")


def _check_agents(c) -> None:
  for name, a in c.agents.items():
    if not re.fullmatch("[A-Za-z][A-Za-z0-9_]*", name) or name in RESERVED:
      raise UserError(f"config.agents: an agent cannot be called {name!r}; use letters, digits and _, and none of {', '.join(RESERVED)}")
    _check_team(c, name, a)
    _check_shapes(c, name, a)
    with user_input(f"config.agents.{name}.warm_start.flaws"):
      atlas_demos.knobs(getattr(atlas_demos, f"{a.warm_start.demonstrations.upper()}_FLAWS"), a.warm_start.flaws.to_dict())
  if not any(a.trainable for a in c.agents.values()) and c.train.steps:
    raise UserError("no agent is trainable: set config.agents.<name>.trainable=True for one, or config.train.steps=0")
  idle = [n for n in c.agents if n != MAIN and n not in c.agents[MAIN].delegates]
  if idle:
    raise UserError(f"config.agents.{idle[0]} is never called: add it to config.agents.main.delegates or remove it")


def _check_team(c, name: str, a) -> None:
  for sub in a.delegates:
    if sub not in c.agents:
      raise UserError(f"config.agents.{name}.delegates names {sub!r}, which is not in config.agents ({', '.join(c.agents)})")
    if sub == MAIN or name != MAIN:
      raise UserError(f"config.agents.{name}.delegates={sub!r}: only the main agent delegates, and not to itself")
  for tool in a.tools:
    _check_choice(f"agents.{name}.tools", tool, TOOLS)
  both = set(a.tools) & set(a.delegates)
  if both:
    raise UserError(f"config.agents.{name}: {min(both)!r} is both a tool and a sub-agent; rename the sub-agent")
  if a.warm_start.demonstrations == "main" and not a.delegates and c.train.warm_start in ("shipped", "rebuild"):
    raise UserError(f"config.agents.{name}.warm_start.demonstrations='main' shows how to delegate, but config.agents.{name}.delegates "
                    "is empty; name a sub-agent, or take 'single' or 'search'")
  if a.expert and name == MAIN:
    raise UserError(f"config.agents.{MAIN}.expert={a.expert!r} is never asked: only sub-agents have an expert score")


def _check_shapes(c, name: str, a) -> None:
  m, limits = a.model, a.limits
  if a.lora.rank and not a.init:
    raise UserError(f"config.agents.{name}.lora.rank={a.lora.rank} needs config.agents.{name}.init: a model made from nothing is trained whole")
  if not a.init:  # else its shape is that of the open model, which agent.check compares with the mesh
    _check_model(name, a, m)
  parts = a.mesh.data * a.mesh.fsdp * a.mesh.expert
  if c.train.rows % parts:
    raise UserError(f"config.train.rows={c.train.rows} does not split over config.agents.{name}.mesh (data x fsdp x expert = {parts}); "
                    "make it a multiple")
  if limits.context > c.train.length:
    raise UserError(f"config.agents.{name}.limits.context={limits.context} does not fit a row of config.train.length={c.train.length}; "
                    "raise train.length")
  if limits.answer_reserve >= limits.context:
    raise UserError(f"config.agents.{name}.limits.answer_reserve={limits.answer_reserve} leaves no room in context={limits.context}")


def _check_model(name: str, a, m) -> None:
  if m.num_heads % m.num_kv_heads:
    raise UserError(f"config.agents.{name}.model.num_heads={m.num_heads} must be a multiple of num_kv_heads={m.num_kv_heads}")
  if m.head_dim % 2:
    raise UserError(f"config.agents.{name}.model.head_dim={m.head_dim} must be even (rotary embedding)")
  if m.num_experts and not (1 <= m.experts_per_token <= m.num_experts and m.expert_dim):
    raise UserError(f"config.agents.{name}.model.num_experts={m.num_experts} needs experts_per_token (1 to {m.num_experts}, now "
                    f"{m.experts_per_token}) and expert_dim (now {m.expert_dim})")
  wide = ("expert_dim", "tensor") if m.num_experts else ("mlp_dim", "tensor")
  for field, axis in (("num_heads", "tensor"), ("num_kv_heads", "tensor"), wide, ("embed_dim", "fsdp"), ("num_experts", "expert")):
    if m[field] % a.mesh[axis]:
      raise UserError(f"config.agents.{name}.mesh.{axis}={a.mesh[axis]} does not divide model.{field}={m[field]}; change one of them")
  if a.mesh.expert > 1 and not m.num_experts:
    raise UserError(f"config.agents.{name}.mesh.expert={a.mesh.expert}, but the model has no experts; set it to 1")
  if m.rope_scaling is not None and not (len(m.rope_scaling) == 4 and all(isinstance(x, int | float) and x > 0 for x in m.rope_scaling)):
    raise UserError(f"config.agents.{name}.model.rope_scaling={tuple(m.rope_scaling)} must be four positive numbers: factor, low and high "
                    "frequency factor, original length")
