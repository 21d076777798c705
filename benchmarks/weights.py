"""Host memory while open weights are read: near one tensor, not one model.

    python benchmarks/weights.py                 # writes benchmarks/results/weights.json

A llama of 107M random parameters in several safetensors files is read by a fresh process onto one device and onto 8
(fsdp=4 x tensor=2; fake devices of one CPU, whose parameters lie in the same memory). The peak of the anonymous memory
(RssAnon, sampled every 2 ms) is taken above what the process had before and above the parameters themselves: pages of
the mapped files are left out, as the system takes them back at will.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time

SHAPE = dict(vocab_size=16384, hidden_size=768, intermediate_size=2560, num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=4,
             head_dim=64, rms_norm_eps=1e-5, rope_theta=1e4, tie_word_embeddings=True, hidden_act="silu", max_position_embeddings=2048,
             architectures=["LlamaForCausalLM"], model_type="llama")
MESHES = {"one device": {"data": 1}, "8 devices": {"fsdp": 4, "tensor": 2}}
MIB = 2**20


def anonymous() -> int:
  return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("RssAnon"))


def make(folder: pathlib.Path, dtype: str) -> None:
  import jax

  from mgrpo_jax.policy import families, weights
  from mgrpo_jax.policy.transformer import Transformer

  folder.mkdir()
  (folder / "config.json").write_text(json.dumps(SHAPE))
  model = Transformer(families.read_config(folder))
  weights.write(folder, model.init(jax.random.key(0)), model, folder, dtype=dtype, shard_bytes=100 * MIB)


def measure(folder: str, mesh: str, scan: str) -> None:
  import jax

  from mgrpo_jax.policy import families, sharding, weights
  from mgrpo_jax.policy.transformer import Transformer

  model, devices = Transformer(families.read_config(pathlib.Path(folder), scan_layers=scan == "scan")), sharding.make_mesh(MESHES[mesh])
  jax.block_until_ready(jax.device_put(0.0))
  before, peak, done = anonymous(), [0], threading.Event()

  def watch():
    while not done.is_set():
      peak[0] = max(peak[0], anonymous())
      time.sleep(0.002)

  watcher = threading.Thread(target=watch)
  watcher.start()
  start = time.perf_counter()
  params = jax.block_until_ready(weights.read(pathlib.Path(folder), model, devices))
  seconds = time.perf_counter() - start
  done.set()
  watcher.join()
  leaves = jax.tree.leaves(params)
  held = sum(s.data.nbytes for x in leaves for s in x.addressable_shards)
  print(json.dumps({"parameters_mib": round(held / MIB, 1), "above_parameters_mib": round((peak[0] - before - held) / MIB, 1),
                    "largest_tensor_mib": round(SHAPE["vocab_size"] * SHAPE["hidden_size"] * 4 / MIB, 1), "seconds": round(seconds, 2)}))


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--out", default=str(pathlib.Path(__file__).parent / "results/weights.json"))
  parser.add_argument("--child", nargs=3, metavar=("FOLDER", "MESH", "SCAN"), help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.child:
    measure(*args.child)
    return
  runs = []
  with tempfile.TemporaryDirectory() as scratch:
    for dtype in ("float32", "bfloat16"):
      folder = pathlib.Path(scratch) / dtype
      make(folder, dtype)
      for mesh in MESHES:
        for scan in ("layers", "scan"):
          env = {**os.environ, "JAX_PLATFORMS": "cpu", "NPROC": "16", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
          done = subprocess.run([sys.executable, __file__, "--child", str(folder), mesh, scan], env=env, capture_output=True, text=True, check=True)
          runs.append({"file": dtype, "files": len(list(folder.glob("*.safetensors"))), "onto": mesh, "layers": scan, **json.loads(done.stdout)})
          print(runs[-1])
  result = {"command": "python benchmarks/weights.py", "machine": f"{os.cpu_count()} cores, CPU only", "runs": runs}
  pathlib.Path(args.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
  main()
