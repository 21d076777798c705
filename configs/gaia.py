"""Two agents learn together: a main agent that plans and a search agent that reads a small web.

    python launch/train.py --config=configs/gaia.py

Without GAIA's files (its terms forbid shipping them) the questions come from `atlas`, a small web about real
countries, cities and peaks, in GAIA's format. `--config.task.path=.../metadata.jsonl` reads the real ones.

Two cores, about 6.5 minutes: from 0.22 to 0.46 of 384 held-out questions (mean of three seeds, greedy).

Arguments: `:smoke` (a minute, for tests), `:long` (150 steps of 16 questions, about 25 minutes: 0.51, one seed),
`:paper` (the setting of arXiv 2511.13288: two Qwen3-30B-A3B; `launch/plan.py` says on which devices it fits).
"""

from mgrpo_jax.config import agent_config, base_config, shrink


def get_config(arg=None):
  c = base_config()
  c.run_dir = "runs/gaia"
  c.agents.main = agent_config(delegates=("search",), demonstrations="main")
  c.agents.search = agent_config(tools=("search", "visit"), demonstrations="search", expert="atlas_oracle")
  limits = c.agents.search.limits
  limits.context, limits.turns, limits.turn_tokens, limits.tokens = 208, 6, 32, 96
  c.agents.search.warm_start.update(steps=500, learning_rate=3e-3)
  if arg == "long":
    c.run_dir = "runs/gaia-long"
    c.method.queries, c.train.steps = 16, 150
  elif arg == "smoke":
    c.run_dir = "runs/gaia-smoke"
    shrink(c)
  elif arg == "paper":
    paper(c)
  elif arg:
    raise ValueError(f"configs/gaia.py knows :smoke, :long and :paper, not {arg!r}")
  return c.lock()


def paper(c):
  """The paper's setting, with what it leaves open from its authors' scripts (*) or chosen here (**)."""
  c.run_dir = "runs/gaia-paper"
  for a in c.agents.values():  # section 5.1: both agents start from Qwen3-30B-A3B (its config.json; 2507 variants: rope_theta=1e7)
    a.model.update(
      vocab_size=151936, num_layers=48, embed_dim=2048, num_heads=32, num_kv_heads=4, head_dim=128, rope_theta=1e6, norm_eps=1e-6,
      qk_norm=True, num_experts=128, experts_per_token=8, expert_dim=768, norm_topk=True, tie_embeddings=False, token_shift=False,
      init_std=0.02, dtype="bfloat16", param_dtype="bfloat16", scan_layers=True, remat="full")  # **: types, remat
    a.mesh.update(data=1, fsdp=8, expert=1, tensor=4)  # 32 devices per agent; ** how they are split
    a.optimizer.update(learning_rate=1e-6, warmup_updates=0, b1=0.9, b2=0.98, weight_decay=0.1, clip_norm=1.0)  # *; ** clip_norm
    a.limits.update(context=32768, turns=20, turn_tokens=1024, tokens=20480, calls=20, answer_reserve=1024)  # *; ** calls, reserve
  c.method.update(queries=8, rollouts=8)  # K = 8; ** Q
  c.method.alignment.update(mode="duplicate", target="8")  # D = 8
  c.method.loss.update(clip_low=0.2, clip_high=0.28)
  c.rollout.update(slots=64, prefill_rows=4, prefill_buckets=(128, 512, 2048), decode_chunk=16)  # **; temperature 1 *
  c.train.update(steps=100, updates_per_step=1, rows=8, length=32768, logprob_chunk=512, warm_start="none")  # * steps; **
