"""The main job over several seeds: gains with intervals, weight swaps, controls, learning curves.

    for s in 0 1 2; do python launch/train.py --config=configs/gaia.py --config.seed=$s --config.run_dir=runs/main-s$s; done
    python benchmarks/main_job.py runs/main-s0 runs/main-s1 runs/main-s2
    python benchmarks/main_job.py runs/smollm2 --name=smollm2

Reads what the runs left (evaluations/*.json, metrics.jsonl); writes benchmarks/results/NAME.json, NAME.png, NAME.md.
Intervals: per run, paired bootstrap over questions; over all runs, bootstrap over seeds and questions.
"""

import argparse
import json
import pathlib

import numpy as np

from mgrpo_jax import final, metrics, statistics
from mgrpo_jax.report import curves

HERE = pathlib.Path(__file__).resolve().parent / "results"
PAIRS = (
  ("warm start", "as it came"),
  ("trained", "warm start"),
  ("only main trained", "warm start"),
  ("only search trained", "warm start"),
  ("trained", "only main trained"),
  ("trained", "only search trained"),
  ("headroom: main with a perfect sub, trained", "headroom: main with a perfect sub, warm"),
  ("headroom: search on gold subquestions, trained", "headroom: search on gold subquestions, warm"),
)
CONTROLS = ("trained, closed book", "trained, random search")


def evaluations(run: pathlib.Path) -> dict[str, np.ndarray]:
  """Right or wrong per question, by name of the evaluation."""
  names = json.loads((run / "results.json").read_text())["evaluations"]
  files = {n: final.evaluation_file(run / "evaluations", n) for n in names}
  return {n: np.array(json.loads(f.read_text())["correct"], bool) for n, f in files.items()}


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("runs", nargs="+", type=pathlib.Path, help="finished run folders of one config, one per seed")
  parser.add_argument("--name", default="main_job", help="name of the result files")
  args = parser.parse_args()
  done = [evaluations(run) for run in args.runs]
  rows, out = [], {"command": f"python benchmarks/main_job.py {' '.join(map(str, args.runs))}", "runs": [], "comparisons": {}}
  for run in args.runs:
    result, config = (json.loads((run / f).read_text()) for f in ("results.json", "config.json"))
    log = metrics.read_metrics(run)
    out["runs"].append({
      "seed": config["seed"], "best_step": result["best_step"], "steps": result["steps"], "evaluations": result["evaluations"], "gains": result["gains"],
      "validation": [[r["step"], r["eval/validation/accuracy"]] for r in log if "eval/validation/accuracy" in r],
      "log_ratio_abs": {n: [r.get(f"train/{n}/log_ratio_abs") for r in log if r["step"] > 0] for n in config["agents"]},
      "seconds_per_step": float(np.median([r["time/total"] for r in log if r["step"] > 0])),
      "programs_compiled_in_steps": int(sum(r["compile/programs"] for r in log if r["step"] > 0))})
  for a, b in PAIRS:
    if all(a in d and b in d for d in done):
      mean, low, high = statistics.pooled_seeds([(d[a], d[b]) for d in done])
      each = [statistics.paired_difference(d[a], d[b]) for d in done]
      out["comparisons"][f"{a} - {b}"] = {"mean": mean, "interval": [low, high], "per_seed": [list(e) for e in each]}
      rows.append([a, b, f"{np.mean([d[a].mean() for d in done]):.3f}", f"{np.mean([d[b].mean() for d in done]):.3f}",
                   f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]", "; ".join(f"{m:+.3f} [{x:+.3f}, {y:+.3f}]" for m, x, y in each)])
  table = curves.table(rows, ["weights", "against", "accuracy", "of the other", "difference [95 %, seeds and questions]", "each seed [95 %]"])
  lines = [table, ""] + [f"{c}: " + ", ".join(f"{d[c].mean():.3f}" for d in done) for c in CONTROLS if all(c in d for d in done)]
  HERE.mkdir(exist_ok=True)
  (HERE / f"{args.name}.json").write_text(json.dumps(out, indent=1) + "\n")
  (HERE / f"{args.name}.md").write_text(f"    {out['command']}\n\n" + "\n".join(lines) + "\n")
  curves.learning_curve({f"{len(args.runs)} seeds": [run / "metrics.jsonl" for run in args.runs]}, HERE / f"{args.name}.png",
                        title=f"{args.name}: validation accuracy and rewards")
  print("\n".join(lines))


if __name__ == "__main__":
  main()
