"""A main agent with two different sub-agents: one searches and opens pages, the other only opens links."""

from mgrpo_jax.config import agent_config, base_config, shrink


def get_config(arg=None):
  c = base_config()
  c.agents.main = agent_config(delegates=("search", "reader"), demonstrations="main")
  c.agents.search = agent_config(tools=("search", "visit"), demonstrations="search", expert="test_two_subs:liked")
  c.agents.reader = agent_config(tools=("visit",), demonstrations="search", expert="test_two_subs:liked")
  for name in ("search", "reader"):
    c.agents[name].limits.context = 208
  shrink(c)
  c.train.steps = 2
  c.method.rollouts = 8
  c.rollout.prefill_buckets = (64,)  # fewer programs to compile
  c.agents.reader.model.num_layers = 2  # sub-agents need not have one shape
  return c.lock()
