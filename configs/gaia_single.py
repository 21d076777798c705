"""The single agent: the main agent with the sub-agent's tools and nobody to ask.

    python launch/train.py --config=configs/gaia_single.py

Two cores, about 7 minutes: from 0.30 to 0.59 of 384 held-out questions (one seed, greedy).

Budgets: `--config.agents.main.limits.tokens=...` (sampled tokens per rollout), `--config.agents.main.model.embed_dim=...`
(parameters). Its warm start sees the same mixture of good and bad demonstrations.
"""

from mgrpo_jax.config import agent_config, base_config, shrink


def get_config(arg=None):
  c = base_config()
  c.run_dir = "runs/gaia-single"
  c.agents.main = agent_config(tools=("search", "visit"), demonstrations="single")
  limits = c.agents.main.limits
  limits.context, limits.turns, limits.calls, limits.turn_tokens, limits.tokens = 384, 16, 12, 48, 256
  c.agents.main.warm_start.update(steps=700, learning_rate=3e-3)
  c.train.rows, c.train.length = 8, 512
  if arg == "smoke":
    c.run_dir = "runs/gaia-single-smoke"
    shrink(c)
  elif arg:
    raise ValueError(f"configs/gaia_single.py knows :smoke, not {arg!r}")
  return c.lock()
