"""Peak memory and time of one update of the SmolLM2-135M shape: 16 x 256 tokens, AdamW, all parameters trained.

    /usr/bin/time -v python benchmarks/memory.py              # "Maximum resident set size" is the peak
    /usr/bin/time -v python benchmarks/memory.py --rows=4     # micro-batches of 4 rows instead of 16

Random weights (the shape decides), two updates, so that the first one's compilation is inside the peak. Peers on the
same job (their own trainers, measured by the project on the same two cores): TRL 13.9 GiB, tunix 17.7 GiB.
"""

import argparse
import json
import resource
import time

import jax
import numpy as np

from mgrpo_jax import learner
from mgrpo_jax.method import alignment
from mgrpo_jax.policy import sharding
from mgrpo_jax.policy.transformer import ModelConfig, Transformer, num_parameters
from mgrpo_jax.trajectory import Trajectory, Turn

SHAPE = dict(vocab_size=49152, num_layers=30, embed_dim=576, num_heads=9, num_kv_heads=3, head_dim=64, mlp_dim=1536,
             rope_theta=1e5, scan_layers=True, remat="full")


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--rows", type=int, default=16, help="rows of a micro-batch")
  args = parser.parse_args()
  model, mesh = Transformer(ModelConfig(**SHAPE)), sharding.make_mesh({"data": 1})
  optimizer = learner.make_optimizer(learning_rate=1e-6)
  fns = learner.make_update(model, optimizer, learner.LossOptions())
  state = learner.init_state(sharding.init_sharded(model, jax.random.key(0), mesh), optimizer)
  rng = np.random.default_rng(0)
  rows = []
  for i in range(16):
    prompt, sampled = (rng.integers(0, 49152, 128).astype(np.int32) for _ in range(2))
    turn = Turn(prompt, sampled, np.full(128, -10.8, np.float32), np.zeros(128, np.int32))
    rows.append(Trajectory("main", "q", i, turns=[turn]))
  batches = list(alignment.emit_batches(rows, rng.normal(size=16).astype(np.float32), np.ones(16, np.float32), rows=args.rows, length=256))
  seconds = []
  for _ in range(2):
    start = time.perf_counter()
    state, _ = learner.update(state, [sharding.shard_batch(b, mesh) for b in batches], fns, 16.0)
    seconds.append(round(time.perf_counter() - start, 1))
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
  print(json.dumps({"parameters": num_parameters(model.config), "rows": args.rows, "micro_batches": len(batches),
                    "seconds": seconds, "peak_gib": round(peak, 2)}))


if __name__ == "__main__":
  main()
