"""Two agents learn together: a main agent that plans and a search agent that reads a small web.

    python launch/train.py --config=configs/gaia.py

Without GAIA's files (its terms forbid shipping them) the questions come from `atlas`, a small web about real
countries, cities and peaks, in GAIA's format. `--config.task.path=.../metadata.jsonl` reads the real ones.

Two cores, about 6.5 minutes: from 0.22 to 0.46 of 384 held-out questions (mean of three seeds, greedy).

Arguments: `:smoke` (a minute, for tests), `:long` (150 steps of 16 questions, about 25 minutes: 0.51, one seed),
`:paper` (the setting of arXiv 2511.13288: two Qwen3-30B-A3B; `launch/plan.py` says on which devices it fits).
"""

from mgrpo_jax import presets
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
    c.run_dir = "runs/gaia-paper"
    presets.paper(c)
    c.agents.search.expert = "atlas_oracle"  # the paper asks an LLM
  elif arg:
    raise ValueError(f"configs/gaia.py knows :smoke, :long and :paper, not {arg!r}")
  return c.lock()
