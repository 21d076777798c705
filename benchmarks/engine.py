"""Speed of the sampling engine with random weights: prints, saves nothing.

    python benchmarks/engine.py                       # the tiny default model, 64 slots
    python benchmarks/engine.py --layers=3 --slots=128 --turns=4

Conversations of several turns with answers of random lengths, more of them than slots, so that slots empty and
fill at different times, as they do under agents. "Full" is one decode iteration with every slot active.
"""

import argparse
import os
import time

import jax
import numpy as np

from mgrpo_jax.policy.transformer import ModelConfig, Transformer, num_parameters
from mgrpo_jax.rollout.engine import EngineConfig, LocalEngine, TurnRequest


def parse():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  for name, default in dict(layers=2, width=128, heads=4, kv_heads=4, vocab=600, slots=64, length=192, turns=3,
                            conversations=128, observation=14, most=24, prefill_rows=8, decode_chunk=8,
                            repeats=5).items():
    parser.add_argument("--" + name.replace("_", "-"), type=int, default=default)
  return parser.parse_args()


def converse(engine, args, seed):
  """Runs all conversations, each turn cut at a random length."""
  rng = np.random.default_rng(seed)
  budget = rng.integers(args.most // 4, args.most + 1, (args.conversations, args.turns))
  prompts = rng.integers(2, args.vocab, (args.conversations, args.turns, args.observation)).astype(np.int32)
  started, turn_of = 0, {}

  def submit(i, turn):
    turn_of[i] = turn
    key = np.array([seed, i], np.uint32)
    engine.submit(TurnRequest(str(i), key, turn, prompts[i, turn], int(budget[i, turn])))

  while started < args.conversations:
    submit(started, 0)
    started += 1
  while engine.pending:
    for done in engine.step():
      i = int(done.conversation)
      if turn_of[i] + 1 < args.turns and done.finish != "context":
        submit(i, turn_of[i] + 1)
      else:
        engine.close(done.conversation)


def full_iteration(engine, args) -> float:
  """Milliseconds of one decode iteration with every slot active."""
  rng = np.random.default_rng(0)
  for i in range(args.slots):
    prompt = rng.integers(2, args.vocab, 8).astype(np.int32)
    engine.submit(TurnRequest(f"full{i}", np.zeros(2, np.uint32), 0, prompt, args.length - 9))
  engine.step()
  times = []
  while engine.pending and len(times) < 5:
    before, start = engine.stats.decode_iterations, time.perf_counter()
    engine.step()
    times.append((time.perf_counter() - start) * 1e3 / max(1, engine.stats.decode_iterations - before))
  for i in range(args.slots):
    engine.close(f"full{i}")
  for _ in range(args.length // args.decode_chunk + 1):
    engine.step()  # until the loop on the device has let go of the closed ones
  return float(np.median(times))


def main():
  args = parse()
  model = Transformer(ModelConfig(
    vocab_size=args.vocab, num_layers=args.layers, embed_dim=args.width, num_heads=args.heads,
    num_kv_heads=args.kv_heads, head_dim=args.width // args.heads, mlp_dim=2 * args.width, token_shift=True))
  config = EngineConfig(stop_tokens=(1,), slots=args.slots, max_length=args.length, prefill_rows=args.prefill_rows,
                        decode_chunk=args.decode_chunk)
  engine = LocalEngine(model, model.init(jax.random.key(0)), config)
  start = time.perf_counter()
  engine.warm_up()
  print(f"{num_parameters(model.config):,} parameters on {jax.devices()[0].device_kind}; compiled in "
        f"{time.perf_counter() - start:.1f} s; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
  print(f"full: {full_iteration(engine, args):.2f} ms per decode iteration of {args.slots} slots")
  rates = []
  for seed in range(args.repeats):
    before, start = vars(engine.stats).copy(), time.perf_counter()
    converse(engine, args, seed)
    seconds = time.perf_counter() - start
    n = {k: v - before[k] for k, v in vars(engine.stats).items()}
    rates.append(n["sampled_tokens"] / seconds)
  print(f"agents: {np.median(rates):,.0f} sampled tokens/s (median of {args.repeats}, {min(rates):,.0f} to {max(rates):,.0f})")
  print(f"  of the last: {n['sampled_tokens']:,} sampled, {n['prefill_tokens']:,} prefilled in {n['prefill_padded']:,} "
        f"padded, {n['decode_iterations']} iterations ({n['sampled_tokens'] / n['decode_iterations']:.0f} tokens each), "
        f"{n['steps']} steps")


if __name__ == "__main__":
  main()
