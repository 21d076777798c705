"""The configuration: its defaults, in one place.

An experiment is a Python file in `configs/` whose `get_config(arg=None)` starts from `base_config()` and
changes what it is about. What a value may be stands in `validation.py`.
"""

from __future__ import annotations

import pathlib

from ml_collections import config_dict

from mgrpo_jax.tasks import atlas_demos

MAIN = "main"  # the agent that gets the question


def agent_config(*, tools=(), delegates=(), demonstrations="search", **overrides) -> config_dict.ConfigDict:
  """One agent: its model, mesh, optimizer, tools, prompt and warm start.

  Raises:
    ValueError: unknown demonstrations; a text where a list of names belongs.
  """
  if isinstance(tools, str) or isinstance(delegates, str):
    raise ValueError("tools and delegates are lists of names, like ('search',)")
  flaws = getattr(atlas_demos, f"{demonstrations.upper()}_FLAWS", None)
  if flaws is None:
    raise ValueError(f"there are no demonstrations {demonstrations!r}; there are main, search and single")
  c = config_dict.ConfigDict()
  c.trainable = True
  c.prompt = ""  # system text before the task
  c.tools = tuple(tools)  # names of tools
  c.delegates = tuple(delegates)  # names of sub-agents it may call
  c.model = config_dict.ConfigDict(dict(
    num_layers=2, embed_dim=128, num_heads=4, num_kv_heads=2, head_dim=32, mlp_dim=384, rope_theta=10_000.0,
    norm_eps=1e-6, tie_embeddings=True, token_shift=True, init_std=0.08, dtype="float32",
    qkv_bias=False, qk_norm=False, num_experts=0, experts_per_token=0, expert_dim=0, norm_topk=True,
    param_dtype="float32", scan_layers=False, remat="none", attention="auto"))
  c.model.rope_scaling = config_dict.placeholder(tuple)  # Llama 3's four numbers (policy/transformer.py)
  c.model.vocab_size = config_dict.placeholder(int)  # None: as many as the tokenizer has
  c.mesh = config_dict.ConfigDict(dict(data=1, fsdp=1, expert=1, tensor=1))  # devices along each axis
  c.rules = ()  # pairs like ("vocab", "fsdp") that differ from the table in policy/sharding.py
  c.optimizer = config_dict.ConfigDict(dict(
    learning_rate=2e-4, warmup_updates=15, b1=0.9, b2=0.98, eps=1e-8, weight_decay=0.0, clip_norm=0.5))
  c.limits = config_dict.ConfigDict(dict(
    turns=8, turn_tokens=24, tokens=128, calls=6, context=128, answer_reserve=12))
  c.warm_start = config_dict.ConfigDict(dict(
    demonstrations=demonstrations,  # which scripted demonstrations (tasks/atlas_demos.py)
    steps=300, batch=32, learning_rate=4e-3, warmup_updates=30, permute=0.75, count=4096, seed=0,
    tokens=4096,  # positions in a micro-batch
    flaws=dict(flaws)))  # shares of bad demonstrations
  c.init = config_dict.placeholder(str)  # where the policy begins: an open model or a run (origin.py); None: made from nothing
  c.lora = config_dict.ConfigDict(dict(rank=0, alpha=16.0, layers=("q_proj", "k_proj", "v_proj", "o_proj")))  # rank 0: no adapters
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
    mode="keep", statuses=("max_turns", "context_full", "tool_budget"), penalty=1.0, buffer=16))
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
    temperature=1.0, slots=64, decode_chunk=4, prefill_buckets=(12, 24, 40, 64), prefill_rows=4, tool_threads=0, tool_deadline=120.0,
    thinking="optional", random_search=False))
  c.train = config_dict.ConfigDict(dict(
    steps=40, updates_per_step=2, rows=16, length=256, logprob_chunk=64, max_bad_updates=3,
    warm_start="shipped",  # ("rebuild", "none", or a folder of AGENT.safetensors): made anew where settings differ
    sample_rollouts=4))  # rollouts per step kept as readable text
  c.warm_start = config_dict.ConfigDict(dict())
  c.warm_start.path = config_dict.placeholder(str)  # own demonstrations (tasks/chat_demos.py) in place of the scripted ones
  c.checkpoint = config_dict.ConfigDict(dict(every=10, keep_last=2, keep_best=1))
  c.eval = config_dict.ConfigDict(dict(
    every=10, final=True,
    parts=True))  # in the final results also: whose learning it was, closed book, each agent's headroom
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


def find_config(argv: list[str], root: pathlib.Path, default: str = "configs/gaia.py") -> list[str]:
  """The command line with its `--config=FILE` in front, where its overrides need it, or with the default one.

  A file that the working directory has not means the one under `root`, beside the launchers.
  """
  rest, given = [], iter(argv[1:])
  value = default
  for arg in given:
    flag, is_set, text = arg.partition("=")
    if flag in ("--config", "-config"):
      value = text if is_set else next(given, "")
    else:
      rest.append(arg)
  path = value.partition(":")[0]
  if path and not pathlib.Path(path).exists() and (root / path).is_file():
    value = str(root / value)
  return [argv[0], f"--config={value}", *rest]
