"""The configuration: its defaults, in one place, and what is refused before anything compiles.

An experiment is a Python file in `configs/` whose `get_config(arg=None)` starts from `base_config()` and
changes what it is about. Unknown keys cannot be set (the ConfigDict is locked); `validate` names the key and
the fix of everything else that cannot work.
"""

from __future__ import annotations

import difflib
import pathlib

from ml_collections import config_dict

from mgrpo_jax.errors import UserError
from mgrpo_jax.tasks import atlas_demos

MAIN = "main"  # the agent that gets the question

_CHOICES = {
  "method.alignment.mode": ("weighted", "duplicate", "per_call"),
  "method.advantage.scale": ("std", "none"),
  "method.advantage.baseline": ("mean", "leave_one_out"),
  "method.group_by": ("query", "position", "turn", "pooled"),
  "method.zero_variance": ("keep", "drop", "resample"),
  "method.overlong.mode": ("keep", "mask", "exclude", "penalise"),
  "method.loss.ratio": ("token", "sequence", "sequence-product"),
  "method.loss.aggregate": ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"),
  "method.loss.kl": ("k1", "k2", "k3"),
  "rollout.thinking": ("optional", "required"),
  "task.name": ("atlas", "gaia"),
}


def agent_config(*, tools=(), delegates=(), demonstrations="search", **overrides) -> config_dict.ConfigDict:
  """One agent: its model, mesh, optimizer, tools, prompt and warm start."""
  c = config_dict.ConfigDict()
  c.trainable = True
  c.prompt = ""  # system text before the task
  c.tools = tuple(tools)  # names of tools
  c.delegates = tuple(delegates)  # names of sub-agents it may call
  c.model = config_dict.ConfigDict(dict(
    num_layers=2, embed_dim=128, num_heads=4, num_kv_heads=2, head_dim=32, mlp_dim=384, rope_theta=10_000.0,
    norm_eps=1e-6, tie_embeddings=True, token_shift=True, init_std=0.02, dtype="float32"))
  c.mesh = config_dict.ConfigDict(dict(data=1, fsdp=1, tensor=1))  # devices along each axis
  c.optimizer = config_dict.ConfigDict(dict(
    learning_rate=2e-4, warmup_updates=15, b1=0.9, b2=0.98, eps=1e-8, weight_decay=0.0, clip_norm=0.5))
  c.limits = config_dict.ConfigDict(dict(
    turns=8, turn_tokens=24, tokens=128, calls=6, context=128, answer_reserve=12))
  c.warm_start = config_dict.ConfigDict(dict(
    demonstrations=demonstrations,  # which scripted demonstrations (tasks/atlas_demos.py)
    steps=300, batch=32, learning_rate=2e-3, warmup_updates=30, permute=0.75, count=4096, seed=0,
    flaws=dict(getattr(atlas_demos, f"{demonstrations.upper()}_FLAWS"))))  # shares of bad demonstrations
  c.expert = config_dict.placeholder(str)  # score of a sub-agent's own work: "atlas_oracle" or "module:function"
  c.update(config_dict.ConfigDict(overrides))
  return c


def base_config() -> config_dict.ConfigDict:
  """Defaults of everything but the agents."""
  c = config_dict.ConfigDict()
  c.seed = 0
  c.run_dir = "runs/default"
  c.agents = config_dict.ConfigDict()
  c.task = config_dict.ConfigDict(dict(
    name="atlas",
    validation_questions=192, test_questions=384, seed=0))
  c.task.path = config_dict.placeholder(str)  # GAIA metadata JSONL to train on; the rest is split off it
  c.task.test_path = config_dict.placeholder(str)  # another JSONL for the test questions
  c.task.train_questions = config_dict.placeholder(int)  # None: as many as there are
  c.tokenizer = config_dict.ConfigDict(dict(merges=300))
  c.method = config_dict.ConfigDict()
  m = c.method
  m.queries = 8  # Q: questions per step
  m.rollouts = 8  # K: attempts per question
  m.alignment = config_dict.ConfigDict(dict(mode="weighted", quantile=0.99, window=512, buckets=(1, 2, 4, 8, 16, 32)))
  m.alignment.target = "8"  # D of the paper, or "auto" (its rule over a running window)
  m.advantage = config_dict.ConfigDict(dict(scale="std", baseline="mean", ddof=0, tol=1e-6))
  m.group_by = "query"
  m.zero_variance = "keep"
  m.resample_attempts = 3  # extra draws of Q questions when zero_variance = "resample"
  m.overlong = config_dict.ConfigDict(dict(
    mode="keep", statuses=("max_turns", "context_full", "tool_budget"), buffer=16))
  m.reward = config_dict.ConfigDict(dict(
    main=dict(format_weight=0.1, correct_weight=0.9),
    sub=dict(format_weight=0.1, main_weight=0.4, expert_weight=0.5)))
  m.loss = config_dict.ConfigDict(dict(
    clip_low=0.2, clip_high=0.28, ratio="token", aggregate="seq-mean-token-mean", proximal=False, kl_coef=0.0,
    kl="k3", entropy_coef=0.0))
  m.loss.dual_clip = config_dict.placeholder(float)
  m.loss.importance_cap = config_dict.placeholder(float)
  m.loss.norm_length = config_dict.placeholder(int)
  c.rollout = config_dict.ConfigDict(dict(
    temperature=1.0, slots=64, decode_chunk=16, prefill_buckets=(16, 32, 64), prefill_rows=16, tool_threads=0,
    thinking="optional", random_search=False))
  c.train = config_dict.ConfigDict(dict(
    steps=60, updates_per_step=2, rows=16, length=256, logprob_chunk=64, max_bad_updates=3,
    warm_start="shipped",  # ("rebuild", "none", or a folder of AGENT.safetensors): made anew where settings differ
    sample_rollouts=4))  # rollouts per step kept as readable text
  c.checkpoint = config_dict.ConfigDict(dict(every=20, keep_last=2, keep_best=1))
  c.eval = config_dict.ConfigDict(dict(every=20, final=True))
  return c


def shrink(c) -> None:
  """Shrink everything so that a whole run takes a minute."""
  c.method.queries, c.method.rollouts = 2, 4
  c.train.steps, c.train.rows = 3, 4
  c.rollout.slots, c.rollout.prefill_rows = 8, 4
  c.task.validation_questions, c.task.test_questions = 6, 6
  c.checkpoint.every = c.eval.every = 2
  for agent in c.agents.values():
    agent.model.num_layers, agent.model.embed_dim, agent.model.mlp_dim = 1, 32, 64
    agent.model.num_heads, agent.model.num_kv_heads, agent.model.head_dim = 2, 1, 16
    agent.warm_start.steps, agent.warm_start.count, agent.warm_start.batch = 4, 64, 8


def find_config(argv: list[str], root: pathlib.Path) -> list[str]:
  """`--config=configs/x.py` means the file beside the launchers when the working directory has none."""
  out = []
  for arg in argv:
    flag, is_set, value = arg.partition("=")
    path, _, _ = value.partition(":")
    beside = flag in ("--config", "-config") and is_set and not pathlib.Path(path).exists() and (root / path).exists()
    out.append(f"{flag}={root / value}" if beside else arg)
  return out


def validate(c: config_dict.ConfigDict) -> None:
  """Refuse what cannot work, with the key and the fix.

  Raises:
    UserError: one sentence.
  """
  for key, allowed in _CHOICES.items():
    value = _get(c, key)
    if value not in allowed:
      near = difflib.get_close_matches(str(value), allowed, n=1)
      raise UserError(f"config.{key}={value!r} is not one of {', '.join(allowed)}"
                      + (f"; did you mean {near[0]!r}?" if near else ""))
  for key in ("method.queries", "method.rollouts", "train.updates_per_step", "train.rows", "train.length", "rollout.slots",
              "rollout.decode_chunk", "rollout.prefill_rows", "checkpoint.every", "checkpoint.keep_last", "eval.every",
              "task.validation_questions", "task.test_questions", "train.max_bad_updates"):
    if _get(c, key) < 1:
      raise UserError(f"config.{key}={_get(c, key)} must be at least 1")
  if c.train.steps < 0:
    raise UserError(f"config.train.steps={c.train.steps} must not be negative")
  if c.method.rollouts < 2:
    raise UserError("config.method.rollouts=1 leaves nothing to compare with: a group needs at least 2 rollouts")
  if c.method.alignment.target != "auto":
    if not str(c.method.alignment.target).isdigit() or int(c.method.alignment.target) < 1:
      raise UserError(f"config.method.alignment.target={c.method.alignment.target!r} must be 'auto' or a number of at least 1")
  _validate_loss(c.method.loss)
  if c.rollout.temperature <= 0:
    raise UserError(f"config.rollout.temperature={c.rollout.temperature} must be positive: greedy rollouts of a query are all alike")
  if c.task.name == "gaia" and not c.task.path:
    raise UserError("config.task.name='gaia' needs config.task.path=... (GAIA's metadata JSONL; its terms forbid shipping it)")
  _validate_agents(c)


def _validate_loss(loss) -> None:
  if loss.aggregate == "seq-mean-token-sum-norm" and not loss.norm_length:
    raise UserError("config.method.loss.aggregate='seq-mean-token-sum-norm' needs config.method.loss.norm_length (a constant length)")
  if loss.importance_cap is not None and not loss.proximal:
    raise UserError("config.method.loss.importance_cap needs config.method.loss.proximal=True (without it the ratio already corrects)")
  if loss.dual_clip is not None and loss.dual_clip <= 1:
    raise UserError(f"config.method.loss.dual_clip={loss.dual_clip} must be above 1")
  for name in ("clip_low", "clip_high"):
    if loss[name] < 0 or (name == "clip_low" and loss[name] > 1):
      raise UserError(f"config.method.loss.{name}={loss[name]} is outside its range")


def _validate_agents(c) -> None:
  if MAIN not in c.agents:
    raise UserError(f"config.agents has no agent named {MAIN!r} (it has {', '.join(c.agents) or 'none'})")
  for name, a in c.agents.items():
    for sub in a.delegates:
      if sub not in c.agents:
        raise UserError(f"config.agents.{name}.delegates names {sub!r}, which is not in config.agents ({', '.join(c.agents)})")
      if sub == MAIN or c.agents[sub].delegates:
        raise UserError(f"config.agents.{name}.delegates={sub!r}: only the main agent delegates, one level deep")
    unknown = set(a.tools) - {"search", "visit"}
    if unknown:
      raise UserError(f"config.agents.{name}.tools: unknown tool {sorted(unknown)[0]!r}; there are 'search' and 'visit'")
    if set(a.tools) & set(a.delegates) and name == MAIN and a.tools:
      raise UserError(f"config.agents.{name}: {sorted(set(a.tools) & set(a.delegates))[0]!r} is both a tool and a sub-agent")
    m = a.model
    if m.num_heads % m.num_kv_heads:
      raise UserError(f"config.agents.{name}.model.num_heads={m.num_heads} must be a multiple of num_kv_heads={m.num_kv_heads}")
    if m.head_dim % 2:
      raise UserError(f"config.agents.{name}.model.head_dim={m.head_dim} must be even (rotary embedding)")
    for axis, size in a.mesh.items():
      if size < 1:
        raise UserError(f"config.agents.{name}.mesh.{axis}={size}: every axis needs at least 1 device")
    for field, axis in (("num_heads", "tensor"), ("num_kv_heads", "tensor"), ("mlp_dim", "tensor"), ("embed_dim", "fsdp")):
      if m[field] % a.mesh[axis]:
        raise UserError(f"config.agents.{name}.mesh.{axis}={a.mesh[axis]} does not divide model.{field}={m[field]}; change one of them")
    if c.train.rows % (a.mesh.data * a.mesh.fsdp):
      raise UserError(f"config.train.rows={c.train.rows} does not split over config.agents.{name}.mesh "
                      f"(data x fsdp = {a.mesh.data * a.mesh.fsdp}); make it a multiple")
    if a.limits.context > c.train.length:
      raise UserError(f"config.agents.{name}.limits.context={a.limits.context} does not fit a row of config.train.length={c.train.length}; "
                      "raise train.length")
    if a.limits.answer_reserve >= a.limits.context:
      raise UserError(f"config.agents.{name}.limits.answer_reserve={a.limits.answer_reserve} leaves no room in context={a.limits.context}")
  if not any(a.trainable for a in c.agents.values()) and c.train.steps:
    raise UserError("no agent is trainable: set config.agents.<name>.trainable=True for one, or config.train.steps=0")
  idle = [n for n in c.agents if n != MAIN and n not in c.agents[MAIN].delegates]
  if idle:
    raise UserError(f"config.agents.{idle[0]} is never called: add it to config.agents.main.delegates or remove it")


def _get(c, dotted: str):
  for part in dotted.split("."):
    c = c[part]
  return c
