"""Honest numbers about accuracy: intervals, paired comparisons, pass@k. Pure numpy on the host.

Every denominator is the caller's: a question that failed counts as answered wrongly (DESIGN 3, evaluation).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def wilson_interval(k: float, n: float, z: float = 1.96) -> tuple[float, float]:
  """Wilson's score interval for k successes in n trials; (0, 1) when n is 0. z = 1.96 gives 95 %."""
  if not 0 <= k <= n:
    raise ValueError(f"wilson_interval: successes must lie in 0..n, got k={k}, n={n}")
  if n == 0:
    return 0.0, 1.0
  p = k / n
  middle = (p + z * z / (2 * n)) / (1 + z * z / n)
  half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
  # at k = 0 and k = n the formula gives the bound exactly; rounding must not cross it
  return (0.0 if k == 0 else max(0.0, middle - half)), (1.0 if k == n else min(1.0, middle + half))


def paired_difference(a, b, *, samples: int = 10000, seed: int = 0) -> tuple[float, float, float]:
  """mean(a) - mean(b) over the same questions, with a 95 % percentile bootstrap over questions.

  Args:
    a, b: bool[n] or f[n], entry i of both about question i (e.g. after and before training).

  Returns:
    (mean, lo, hi).
  """
  d = _paired(a, b)
  rng = np.random.default_rng(seed)
  means = np.empty(samples)
  for start in range(0, samples, 1000):  # 1000 x n at a time: memory stays small
    stop = min(start + 1000, samples)
    means[start:stop] = d[rng.integers(0, len(d), (stop - start, len(d)))].mean(axis=1)
  lo, hi = np.percentile(means, [2.5, 97.5])
  return float(d.mean()), float(lo), float(hi)


def paired_exact(a, b) -> float:
  """McNemar's exact two-sided p-value for bool[n] outcomes on the same questions; 1 when none differs."""
  d = _paired(np.asarray(a, bool), np.asarray(b, bool))
  wins, losses = int((d > 0).sum()), int((d < 0).sum())
  n = wins + losses
  tail = sum(math.comb(n, i) for i in range(min(wins, losses) + 1))
  return min(1.0, 2 * tail / 2**n)  # integers: exact, and no overflow


def pooled_seeds(pairs: Sequence, *, samples: int = 10000, seed: int = 0) -> tuple[float, float, float]:
  """Mean gain over several training seeds, with a 95 % bootstrap over seeds AND questions.

  Args:
    pairs: one (a, b) per seed as in `paired_difference`, all on the same n questions in the same order.
      Seeds and questions are drawn apart (a question is hard for all seeds), with replacement.

  Returns:
    (mean, lo, hi). With few seeds the part that comes from seeds is coarse: say how many there were.
  """
  if not pairs:
    raise ValueError("pooled_seeds: no seeds given")
  rows = [_paired(a, b) for a, b in pairs]
  if len({len(r) for r in rows}) > 1:
    counts = [len(r) for r in rows]
    raise ValueError(f"pooled_seeds: seeds must be scored on the same questions, got counts {counts}")
  d = np.stack(rows)  # [seeds, n]
  seeds, n = d.shape
  rng = np.random.default_rng(seed)
  by_seed = rng.multinomial(seeds, np.full(seeds, 1 / seeds), samples) / seeds
  by_question = rng.multinomial(n, np.full(n, 1 / n), samples) / n
  means = ((by_seed @ d) * by_question).sum(axis=1)
  lo, hi = np.percentile(means, [2.5, 97.5])
  return float(d.mean()), float(lo), float(hi)


def pass_at_k(correct, total, k: int):
  """Chance that at least one of k attempts is right, unbiased from `correct` of `total` attempts.

  1 - C(total - correct, k) / C(total, k) (Chen et al. 2021), not a bootstrap, which is biased low.

  Args:
    correct, total: i[...] per question (broadcast), total >= k. Failed attempts count as wrong.

  Returns:
    f64[...] per question, or a float for scalars; take the mean over questions.
  """
  correct, total = _attempts(correct, total, k)
  out = np.ones(correct.shape)
  for i in range(k):  # product over i of (wrong - i) / (total - i), 0 once wrong runs out
    out *= np.maximum(total - correct - i, 0) / (total - i)
  return _scalar(1.0 - out)


def avg_at_k(correct, total, k: int):
  """Expected share of right answers among k attempts: correct / total, unbiased for every k <= total."""
  correct, total = _attempts(correct, total, k)
  return _scalar(correct / total)


def _paired(a, b) -> np.ndarray:
  a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
  if a.ndim != 1 or a.shape != b.shape or a.size == 0:
    raise ValueError(
      f"paired outcomes must be two non-empty vectors of one length, got shapes {a.shape} and {b.shape}"
    )
  if not (np.isfinite(a).all() and np.isfinite(b).all()):
    raise ValueError("paired outcomes must be finite; count a failed question as wrong")
  return a - b


def _attempts(correct, total, k: int) -> tuple[np.ndarray, np.ndarray]:
  correct, total = np.broadcast_arrays(np.asarray(correct), np.asarray(total))
  if k < 1 or (total < k).any():
    raise ValueError(f"k={k} must lie between 1 and the attempts of each question (fewest: {total.min()})")
  if (correct < 0).any() or (correct > total).any():
    raise ValueError("the count of right attempts must lie between 0 and the count of attempts")
  return correct.astype(np.float64), total.astype(np.float64)


def _scalar(x: np.ndarray):
  return float(x) if x.ndim == 0 else x
