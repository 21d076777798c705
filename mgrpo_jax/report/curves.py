"""The learning curve as a picture, and tables as text."""

from __future__ import annotations

import io
import math
import os
import pathlib
import re
from collections.abc import Mapping, Sequence

import numpy as np

from mgrpo_jax.metrics import read_metrics
from mgrpo_jax.run_folder import write_bytes
from mgrpo_jax.statistics import wilson_interval

ACCURACY = "eval/validation/accuracy"
_REWARD = re.compile(r"train/([^/]+)/reward")
# colour-blind safe (Okabe-Ito), dark enough for lines on white
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_DASHES = ("-", (0, (5, 2)), (0, (1, 1.3)), (0, (5, 1.5, 1, 1.5)))
_INK, _FAINT = "#222222", "#8a8a8a"


def learning_curve(
  metrics_files: Mapping[str, Sequence[str | os.PathLike]],
  output_png: str | os.PathLike,
  *,
  keys: Sequence[str] = (ACCURACY,),
  title: str = "",
) -> pathlib.Path:
  """Draws accuracy against step and, below it, the training reward of each agent.

  Args:
    metrics_files: for each label (a system, an arm) the metrics.jsonl of its seeds. One seed gets Wilson's
      95 % band from its `.../count`; several get their mean between the lowest and the highest.
    output_png: written whole; its folder is made.
    keys: accuracies to draw (`eval/validation/accuracy`, `eval/test/accuracy`, `train/accuracy`).
    title: above the picture.

  Files that are missing, empty, or hold one point are drawn as far as they go.
  """
  # Figure and Agg directly: pyplot would touch global state and may look for a display.
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  runs = {label: [read_metrics(p) for p in paths] for label, paths in metrics_files.items()}
  agents = list(dict.fromkeys(a for rows in _all_rows(runs) for a in _agents_of(rows)))
  # One system: its agents share a panel. Several: a panel per agent, or nobody could tell the lines apart.
  panels = [[a] for a in agents] if len(runs) > 1 else [agents] if agents else []
  figure = Figure(figsize=(8, 7.2 if panels else 4.4), dpi=130, layout="constrained", facecolor="white")
  FigureCanvasAgg(figure)
  heights = (1.4, 1) if panels else (1,)
  grid = figure.add_gridspec(len(heights), max(1, len(panels)), height_ratios=heights)
  upper = figure.add_subplot(grid[0, :])
  _draw_accuracy(upper, runs, keys)
  below = []
  for i, shown in enumerate(panels):
    below.append(figure.add_subplot(grid[1, i], sharey=below[0] if below else None))
    _draw_rewards(below[-1], runs, shown)
  steps = [r["step"] for rows in _all_rows(runs) for r in rows] or [0]
  for axes in (upper, *below):
    _dress(axes, min(steps), max(steps))
  if title:
    figure.suptitle(title, fontsize=12.5, color=_INK, x=0.012, ha="left", fontweight="bold")
  output_png = pathlib.Path(output_png)
  output_png.parent.mkdir(parents=True, exist_ok=True)
  picture = io.BytesIO()
  figure.savefig(picture, format="png")
  write_bytes(output_png, picture.getvalue())
  return output_png


def series(rows: Sequence[Mapping], key: str) -> tuple[np.ndarray, np.ndarray]:
  """(steps i[n], values f[n]) of a key, ascending; a step written twice keeps its last value, nulls go."""
  found = {r["step"]: float(r[key]) for r in rows if r.get(key) is not None}
  steps = sorted(found)
  return np.array(steps, int), np.array([found[s] for s in steps], float)


def smooth(values: np.ndarray, half_life: float) -> np.ndarray:
  """Exponential mean of past values whose weight halves every `half_life` entries; unbiased at the start."""
  decay = 0.5 ** (1 / half_life)
  total = weight = 0.0
  out = np.empty(len(values))
  for i, v in enumerate(values):
    total, weight = decay * total + v, decay * weight + 1
    out[i] = total / weight
  return out


def table(rows: Sequence[Sequence], headers: Sequence[str]) -> str:
  """A markdown table with aligned columns, numbers to the right: readable in a terminal as it stands.

  Floats are shown with three decimals, None and NaN as "-".

  Raises:
    ValueError: a row with another number of cells than there are headers.
  """
  for i, row in enumerate(rows):
    if len(row) != len(headers):
      raise ValueError(f"table: row {i} has {len(row)} cells, there are {len(headers)} headers")
  cells = [[_cell(c) for c in row] for row in rows]
  right = [bool(rows) and all(_is_number(r[j]) for r in rows) for j in range(len(headers))]
  heads = [str(h).replace("|", "\\|") for h in headers]
  width = [max([3, len(heads[j])] + [len(r[j]) for r in cells]) for j in range(len(heads))]

  def line(row):
    padded = [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, width, right)]
    return "| " + " | ".join(padded) + " |"

  rule = "|" + "|".join("-" * (w + 1) + (":" if r else "-") for w, r in zip(width, right)) + "|"
  return "\n".join([line(heads), rule, *map(line, cells)])


# ------------------------------------------------------------------------------------------------- drawing


def _draw_accuracy(axes, runs, keys) -> None:
  ends, highest = [], 0.0
  for i, (label, seeds) in enumerate(runs.items()):
    for j, key in enumerate(keys):
      colour = _COLOURS[(i if len(runs) > 1 else j) % len(_COLOURS)]
      dash = _DASHES[(j if len(runs) > 1 else 0) % len(_DASHES)]
      curve = _accuracy_curve(seeds, key)
      if curve is None:
        continue
      steps, middle, low, high, note = curve
      name = f"{label}, {_key_name(key)}  ({note})" if len(keys) > 1 else f"{label}  ({note})"
      axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
      marker = "o" if len(steps) <= 40 else None
      axes.plot(steps, middle, color=colour, linestyle=dash, lw=2, marker=marker, ms=4, label=name)
      if len(steps) == 1:  # a band of no width: show it as a bar
        axes.plot([steps[0]] * 2, [low[0], high[0]], color=colour, lw=2, alpha=0.4)
      ends.append((steps[-1], middle[-1], colour))
      highest = max(highest, float(np.max(high)))
  axes.set_ylabel(_key_name(keys[0]) if len(keys) == 1 else "accuracy")
  axes.set_ylim(0, min(1.0, max(0.2, 1.15 * highest)) if ends else 1)
  _annotate_ends(axes, ends)
  if ends:
    axes.legend(loc="best", fontsize=9, frameon=True, framealpha=0.85, edgecolor="none")
  else:
    axes.text(0.5, 0.5, "no evaluation yet", transform=axes.transAxes, ha="center", color=_FAINT)


def _accuracy_curve(seeds, key: str):
  """(steps, middle, low, high, note for the legend) of one label, or None without data."""
  curves = [(rows, *series(rows, key)) for rows in seeds]
  curves = [c for c in curves if len(c[1])]
  if not curves:
    return None
  if len(curves) == 1:
    rows, steps, values = curves[0]
    counts = dict(zip(*series(rows, key.rsplit("/", 1)[0] + "/count")))
    low, high, biggest = values.copy(), values.copy(), 0
    for i, (s, v) in enumerate(zip(steps, values)):
      if n := int(counts.get(s, 0)):
        low[i], high[i] = wilson_interval(min(max(v * n, 0), n), n)
        biggest = max(biggest, n)
    return steps, values, low, high, f"95 % of {biggest} questions" if biggest else "one seed"
  # Seeds may be at different steps (one was stopped): each step shows the seeds that reached it.
  steps = np.unique(np.concatenate([c[1] for c in curves]))
  at = [[v for _, s, vs in curves for v in vs[s == step]] for step in steps]
  middle, low, high = (np.array([f(v) for v in at]) for f in (np.mean, np.min, np.max))
  return steps, middle, low, high, f"mean, min to max of {len(curves)} seeds"


def _annotate_ends(axes, ends) -> None:
  """The last value beside each curve, pushed apart where they would overlap."""
  if not ends:
    return
  lo, hi = axes.get_ylim()
  gap = 0.055 * (hi - lo)
  placed = []
  for step, value, colour in sorted(ends, key=lambda e: e[1]):
    y = max(value, placed[-1] + gap) if placed else value
    placed.append(y)
    axes.annotate(
      f"{value:.2f}", (step, value), xytext=(8, 0), textcoords="offset points", va="center", fontsize=10,
      color=colour, fontweight="bold", annotation_clip=False,
    ).set_y((y - value) / (hi - lo) * _height_points(axes))


def _height_points(axes) -> float:
  box = axes.get_position()
  return box.height * axes.figure.get_size_inches()[1] * 72


def _draw_rewards(axes, runs, agents) -> None:
  """Raw rewards faint, their smoothed mean over the seeds strong. Colours: agents, or systems if several."""
  several = len(runs) > 1
  for i, seeds in enumerate(runs.values()):
    for j, agent in enumerate(agents):
      colour = _COLOURS[(i if several else j) % len(_COLOURS)]
      curves = [c for c in (series(rows, f"train/{agent}/reward") for rows in seeds) if len(c[0])]
      if not curves:
        continue
      for steps, values in curves:
        axes.plot(steps, values, color=colour, lw=0.7, alpha=0.5 / (1 + len(curves)))
      steps = np.unique(np.concatenate([c[0] for c in curves]))
      mean = np.array([np.mean([v for s, vs in curves for v in vs[s == step]]) for step in steps])
      marker = "o" if len(steps) == 1 else None
      mean = smooth(mean, half_life=max(1.0, len(steps) / 20))
      axes.plot(steps, mean, color=colour, lw=2, marker=marker, ms=4, label=agent)
  if several:
    axes.set_title(f"training reward of {agents[0]}", fontsize=10, color=_INK, loc="left")
  else:
    axes.set_ylabel("training reward")
    axes.legend(loc="best", fontsize=9, framealpha=0.85, edgecolor="none")


def _dress(axes, first: int, last: int) -> None:
  from matplotlib.ticker import MaxNLocator

  axes.grid(True, color="#e4e4e4", lw=0.8)
  axes.set_axisbelow(True)
  for side in ("top", "right"):
    axes.spines[side].set_visible(False)
  for side in ("left", "bottom"):
    axes.spines[side].set_color("#9a9a9a")
  axes.tick_params(labelsize=9.5, color="#9a9a9a", labelcolor=_INK)
  margin = max(0.05 * (last - first), 1.2 if first == last else 0)
  axes.set_xlim(first - margin, last + margin)
  axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 5, 10]))
  axes.set_xlabel("step", fontsize=9.5)


def _all_rows(runs):
  return (rows for seeds in runs.values() for rows in seeds)


def _agents_of(rows) -> list[str]:
  return [m.group(1) for r in rows for k, v in r.items() if v is not None and (m := _REWARD.fullmatch(k))]


def _key_name(key: str) -> str:
  """ "eval/validation/accuracy" -> "validation accuracy"."""
  return key.removeprefix("eval/").replace("/", " ")


def _is_number(x) -> bool:
  return x is None or isinstance(x, (int, float, np.integer, np.floating)) and not isinstance(x, bool)


def _cell(x) -> str:
  if x is None or isinstance(x, (float, np.floating)) and math.isnan(x):
    return "-"
  if isinstance(x, (float, np.floating)):
    return f"{x:.3f}"
  return " ".join(str(x).split()).replace("|", "\\|")
