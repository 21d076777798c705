"""The clipped-ratio loss (paper eq. 14 and 16, minimised), jitted, with a divisor that is global.

Every option that users compare is here by name: where the ratio lives (token, sequence, product), how
tokens become one number, dual clip, KL, and the correction for tokens of another policy version. What
stands under mask 0 or weight 0 is replaced before it is used, so inf and NaN there reach neither value
nor gradient (0 * NaN is NaN: select, do not multiply).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

RATIOS = ("token", "sequence", "sequence-product")
AGGREGATES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
KLS = ("k1", "k2", "k3")
LOG_RATIO_LIMIT = 20.0

Metrics = dict[str, tuple[jax.Array, jax.Array]]


class _Layout(NamedTuple):
  """Which tokens count, and to which sequence they belong.

  Attributes:
    live: bool[B, T] tokens under mask, in a sequence of positive weight.
    weights: f32[N], 0 for what takes no part.
    ids: i32[B, T] sequence of each token (0 where there is none), or None: each row is a sequence.
    tokens: f32[N] live tokens of each sequence.
  """

  live: jax.Array
  weights: jax.Array
  ids: jax.Array | None
  tokens: jax.Array


def clipped_ratio_loss(
  logprobs: jax.Array,
  behavior_logprobs: jax.Array,
  advantages: jax.Array,
  mask: jax.Array,
  weights: jax.Array,
  *,
  segment_ids: jax.Array | None = None,
  clip_low: float = 0.2,
  clip_high: float = 0.28,
  ratio: str = "token",
  aggregate: str = "seq-mean-token-mean",
  dual_clip: float | None = None,
  proximal_logprobs: jax.Array | None = None,
  importance_cap: float | None = None,
  ref_logprobs: jax.Array | None = None,
  kl_coef: float = 0.0,
  kl: str = "k3",
  normalizer: Any = None,
  norm_length: float | None = None,
) -> tuple[jax.Array, Metrics]:
  """Policy loss max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), plus kl_coef * KL to a reference.

  A "sequence" is a row, or with `segment_ids` a segment (several to a row). Log-ratios are clamped to
  +-20 before exp. Only `logprobs` has a gradient.

  Args:
    logprobs: f32[B, T] of the policy that is trained.
    behavior_logprobs: f32[B, T] recorded when the tokens were sampled.
    advantages, weights: f32[B], or f32[N] with segment_ids. A weight multiplies its whole sequence, and
      counts as that many in the divisor.
    mask: bool[B, T], True on sampled tokens.
    segment_ids: i32[B, T] in 0..N-1, anything else (-1) for padding.
    ratio: "token" | "sequence" (exp of the mean log-ratio, GSPO: clips of order 1e-3 fit) |
      "sequence-product" (exp of the sum: the paper's formula as written). Static.
    aggregate: one of AGGREGATES; divisors as in `loss_normalizer`. Static.
    dual_clip: c > 1 bounds the loss of negative advantages by -c A.
    proximal_logprobs: f32[B, T]; then r = exp(lp - proximal), times the constant
      min(exp(proximal - behavior), importance_cap), both reduced as `ratio` says. Without: r = exp(lp -
      behavior).
    importance_cap: None leaves the importance weight uncapped.
    ref_logprobs, kl_coef, kl: KL estimator of d = lp - ref per token: "k1" d, "k2" d^2/2, "k3"
      exp(-d) - 1 + d. No ratio factor, same mask, weights and divisor, not scaled by the advantage.
    normalizer: the divisor of the whole update (all its batches). Default: this batch's own.
    norm_length: length constant of "seq-mean-token-sum-norm"; never T.

  Returns:
    loss f32[] (0 if the divisor is 0) and metrics: name -> (sum, count) over live tokens or sequences, so
    that micro-batches add up:
      clip_fraction_positive, clip_fraction_negative: clipped tokens among those with A > 0, A < 0.
      ratio; ratio_max (largest of each sequence); log_ratio_abs (tokens, to behavior);
      sequence_log_ratio_abs (|sum over a sequence|: grows with length, not a sign of drift by itself);
      kl_behavior (k3 estimate of KL(behavior || policy)); tokens (per sequence); sequences (with tokens,
      among those of positive weight); with a reference kl_ref; with proximal importance,
      importance_capped; with dual clip dual_clip_fraction (among A < 0).

  Raises:
    ValueError: unknown option, a number out of range, shapes that do not fit, a cap without
      proximal_logprobs, kl_coef without ref_logprobs, no norm_length where one is needed.
  """
  _check_choice("ratio", ratio, RATIOS)
  _check_choice("kl", kl, KLS)
  _check_aggregate(aggregate, norm_length)
  _check_number("clip_low", clip_low, lambda x: 0 <= x <= 1, "in 0..1")
  _check_number("clip_high", clip_high, lambda x: x >= 0, "not negative")
  _check_number("dual_clip", dual_clip, lambda x: x > 1, "above 1 (usually 3)")
  _check_number("importance_cap", importance_cap, lambda x: x > 0, "above 0 (usually 2)")
  if importance_cap is not None and proximal_logprobs is None:
    raise ValueError(
      "importance_cap needs proximal_logprobs: without them there is no importance weight to cap"
    )
  if ref_logprobs is None and not _is_zero(kl_coef):
    raise ValueError(f"kl_coef is {kl_coef} but there are no ref_logprobs: give them or set kl_coef to 0")
  shape = _check_shapes(mask, weights, segment_ids, advantages=advantages)
  for name, x in (
    ("logprobs", logprobs),
    ("behavior_logprobs", behavior_logprobs),
    ("proximal_logprobs", proximal_logprobs),
    ("ref_logprobs", ref_logprobs),
  ):
    if x is not None and np.shape(x) != shape:
      raise ValueError(f"{name} has shape {np.shape(x)} but mask has {shape}; they must be the same")
  return _loss(
    *(logprobs, behavior_logprobs, advantages, mask, weights, segment_ids),
    *(clip_low, clip_high, dual_clip, proximal_logprobs, importance_cap),
    *(ref_logprobs, kl_coef, normalizer, norm_length),
    ratio=ratio,
    aggregate=aggregate,
    kl=kl,
  )


def loss_normalizer(
  mask: Any,
  weights: Any,
  *,
  aggregate: str,
  norm_length: float | None = None,
  segment_ids: Any = None,
) -> Any:
  """The divisor of a batch; those of the batches of an update add up to its `normalizer`.

  "token-mean": sum(w_b n_b). "seq-mean-token-mean", "seq-mean-token-sum": sum(w_b). "seq-mean-token-sum-norm":
  norm_length * sum(w_b). Sequences without tokens under mask (n_b = 0) do not count.

  Args:
    mask, weights, segment_ids: as in `clipped_ratio_loss`.

  Returns:
    f32[]; numpy for numpy input, without any compilation.
  """
  _check_aggregate(aggregate, norm_length)
  _check_shapes(mask, weights, segment_ids)
  layout = _layout(mask, weights, segment_ids)
  return normalizer_from_counts(layout.tokens, layout.weights, aggregate=aggregate, norm_length=norm_length)


def normalizer_from_counts(
  tokens: Any, weights: Any, *, aggregate: str, norm_length: float | None = None
) -> Any:
  """`loss_normalizer` from the number of tokens under mask of each sequence: tokens i32[N], weights f32[N]."""
  _check_aggregate(aggregate, norm_length)
  xp = jnp if isinstance(tokens, jax.Array) or isinstance(weights, jax.Array) else np
  tokens, weights = xp.asarray(tokens, xp.float32), xp.asarray(weights, xp.float32)
  weights = xp.where((weights > 0) & (tokens > 0), weights, 0.0)
  if aggregate == "token-mean":
    return xp.sum(weights * tokens)
  return xp.sum(weights) * (norm_length if aggregate == "seq-mean-token-sum-norm" else 1.0)


def masked_aggregate(
  values: jax.Array,
  mask: jax.Array,
  weights: jax.Array,
  *,
  segment_ids: jax.Array | None = None,
  aggregate: str = "seq-mean-token-mean",
  normalizer: Any = None,
  norm_length: float | None = None,
) -> jax.Array:
  """One number from per-token values f32[B, T], as the loss is: same mask, weights and divisor.

  For terms beside the loss, such as an entropy bonus. Values under mask 0 or weight 0 may be anything.

  Returns:
    f32[]; 0 if the divisor is 0.
  """
  _check_aggregate(aggregate, norm_length)
  shape = _check_shapes(mask, weights, segment_ids)
  if np.shape(values) != shape:
    raise ValueError(f"values has shape {np.shape(values)} but mask has {shape}; they must be the same")
  return _aggregate(values, mask, weights, segment_ids, normalizer, norm_length, aggregate=aggregate)


# -------------------------------------------------------------------------------------- the sums


@functools.partial(jax.jit, static_argnames=("ratio", "aggregate", "kl"))
def _loss(
  logprobs,
  behavior,
  advantages,
  mask,
  weights,
  segment_ids,
  clip_low,
  clip_high,
  dual_clip,
  proximal,
  importance_cap,
  ref,
  kl_coef,
  normalizer,
  norm_length,
  *,
  ratio,
  aggregate,
  kl,
):
  layout = _layout(mask, weights, segment_ids)
  lp = _clean(logprobs, layout.live)
  behavior = jax.lax.stop_gradient(_clean(behavior, layout.live))
  old = behavior if proximal is None else jax.lax.stop_gradient(_clean(proximal, layout.live))
  adv = _per_token(jnp.where(layout.weights > 0, advantages, 0.0), layout)

  r = jnp.exp(_log_ratio(lp, old, layout, ratio))
  # Selecting by sign is max(-A r, -A clip(r)) with one-sided gradients at the corners.
  clipped = ((adv > 0) & (r > 1 + clip_high)) | ((adv < 0) & (r < 1 - clip_low))
  loss = -adv * jnp.where(clipped, jnp.where(adv > 0, 1 + clip_high, 1 - clip_low), r)
  extra = {}
  if dual_clip is not None:
    bounded = (adv < 0) & (r > dual_clip)
    loss = jnp.where(bounded, -adv * dual_clip, loss)
    extra["dual_clip_fraction"] = (bounded, adv < 0)
  if proximal is not None:
    importance = jnp.exp(_log_ratio(old, behavior, layout, ratio))
    capped = jnp.zeros_like(clipped) if importance_cap is None else importance > importance_cap
    importance = importance if importance_cap is None else jnp.minimum(importance, importance_cap)
    loss = importance * loss
    extra["importance"], extra["importance_capped"] = (importance, True), (capped, True)
  if ref is not None:
    divergence = _kl(lp - jax.lax.stop_gradient(_clean(ref, layout.live)), kl)
    loss = loss + kl_coef * divergence
    extra["kl_ref"] = (divergence, True)
  value = _reduce(loss, layout, aggregate, normalizer, norm_length)
  extra["clip_fraction_positive"] = (clipped, adv > 0)
  extra["clip_fraction_negative"] = (clipped, adv < 0)
  return value, jax.lax.stop_gradient(_metrics(lp, behavior, r, layout, extra))


@functools.partial(jax.jit, static_argnames=("aggregate",))
def _aggregate(values, mask, weights, segment_ids, normalizer, norm_length, *, aggregate):
  return _reduce(values, _layout(mask, weights, segment_ids), aggregate, normalizer, norm_length)


def _metrics(lp, behavior, r, layout: _Layout, extra) -> Metrics:
  """(sum, count) pairs; `extra` has per-token (value, among which tokens)."""

  def over_tokens(value, among=True):
    among = layout.live & among
    return jnp.sum(jnp.where(among, value, 0.0)), jnp.sum(among, dtype=jnp.float32)

  drift = lp - behavior
  bounded = jnp.clip(drift, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
  filled = layout.tokens > 0
  sequences = jnp.sum(filled, dtype=jnp.float32)
  shown = jnp.where(layout.live, r, 0.0)
  if layout.ids is None:
    largest = jnp.max(shown, axis=1)
  else:
    largest = jax.ops.segment_max(shown.ravel(), layout.ids.ravel(), layout.weights.shape[0])
  return {
    **{name: over_tokens(*pair) for name, pair in extra.items()},
    "ratio": over_tokens(r),
    "ratio_max": (jnp.sum(jnp.where(filled, largest, 0.0)), sequences),
    "log_ratio_abs": over_tokens(jnp.abs(drift)),
    "sequence_log_ratio_abs": (jnp.sum(jnp.abs(_per_sequence(drift, layout))), sequences),
    "kl_behavior": over_tokens(jnp.exp(bounded) - 1 - bounded),
    "tokens": (jnp.sum(layout.tokens), sequences),
    "sequences": (sequences, jnp.sum(layout.weights > 0, dtype=jnp.float32)),
  }


def _layout(mask, weights, segment_ids) -> _Layout:
  """Works on numpy (and stays there) or jax arrays alike."""
  xp = jnp if any(isinstance(x, jax.Array) for x in (mask, weights, segment_ids)) else np
  mask, weights = xp.asarray(mask).astype(bool), xp.asarray(weights, xp.float32)
  weights = xp.where(weights > 0, weights, 0.0)
  if segment_ids is None:
    live = mask & (weights > 0)[:, None]
    return _Layout(live, weights, None, xp.sum(live, axis=1, dtype=xp.float32))
  ids, n = xp.asarray(segment_ids), weights.shape[0]
  inside = (ids >= 0) & (ids < n)
  ids = xp.where(inside, ids, 0)
  live = mask & inside & (weights > 0)[ids]
  if xp is np:
    return _Layout(live, weights, ids, np.bincount(ids[live], minlength=n).astype(np.float32))
  tokens = jax.ops.segment_sum(live.astype(jnp.float32).ravel(), ids.ravel(), n)
  return _Layout(live, weights, ids, tokens)


def _reduce(values, layout: _Layout, aggregate, normalizer, norm_length):
  if normalizer is None:
    normalizer = normalizer_from_counts(
      layout.tokens, layout.weights, aggregate=aggregate, norm_length=norm_length
    )
  share = layout.weights
  if aggregate == "seq-mean-token-mean":
    share = share / jnp.maximum(layout.tokens, 1.0)
  total = jnp.sum(jnp.where(layout.live, values, 0.0) * _per_token(share, layout))
  normalizer = jnp.asarray(normalizer, total.dtype)
  return jnp.where(normalizer == 0, 0.0, total / jnp.where(normalizer == 0, 1.0, normalizer))


def _log_ratio(new, old, layout: _Layout, ratio):
  """f32[B, T]: the log-ratio each token is judged by, the same for all tokens of a sequence if it says so."""
  d = new - old
  if ratio != "token":
    d = _per_sequence(d, layout)
    if ratio == "sequence":
      d = d / jnp.maximum(layout.tokens, 1.0)
    d = _per_token(d, layout)
  return jnp.clip(d, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _kl(d, kind):
  if kind == "k1":
    return d
  if kind == "k2":
    return d**2 / 2
  d = jnp.clip(d, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
  return jnp.exp(-d) - 1 + d


def _clean(x, live):
  x = jnp.asarray(x)
  return jnp.where(live, x, 0.0).astype(jnp.promote_types(x.dtype, jnp.float32))


def _per_token(x, layout: _Layout):
  """[N] -> [B, T]."""
  return jnp.broadcast_to(x[:, None], layout.live.shape) if layout.ids is None else x[layout.ids]


def _per_sequence(values, layout: _Layout):
  """[B, T], 0 where not live -> [N]."""
  if layout.ids is None:
    return jnp.sum(values, axis=1)
  return jax.ops.segment_sum(values.ravel(), layout.ids.ravel(), layout.weights.shape[0])


# ------------------------------------------------------------------------------------- the checks


def _check_choice(name, value, choices):
  if value not in choices:
    raise ValueError(f"{name} is {value!r}; it must be one of {choices}")


def _check_number(name, value, ok, words):
  if value is not None and not isinstance(value, jax.Array) and not ok(value):
    raise ValueError(f"{name} is {value}; it must be {words}")


def _check_aggregate(aggregate, norm_length):
  _check_choice("aggregate", aggregate, AGGREGATES)
  if aggregate == "seq-mean-token-sum-norm" and norm_length is None:
    raise ValueError(
      "aggregate 'seq-mean-token-sum-norm' needs norm_length, a constant such as the largest number of "
      "tokens a trajectory may sample"
    )
  _check_number("norm_length", norm_length, lambda x: x > 0, "above 0")


def _check_shapes(mask, weights, segment_ids, **others):
  shape, n = np.shape(mask), np.shape(weights)
  if len(shape) != 2 or len(n) != 1:
    raise ValueError(
      f"mask has shape {shape} and weights {n}; they must be [B, T] and [B] (or [N] with segment_ids)"
    )
  if segment_ids is None and n[0] != shape[0]:
    raise ValueError(f"weights has shape {n} for {shape[0]} rows; without segment_ids give one per row")
  if segment_ids is not None and np.shape(segment_ids) != shape:
    raise ValueError(
      f"segment_ids has shape {np.shape(segment_ids)} but mask has {shape}; they must be the same"
    )
  for name, x in others.items():
    if np.shape(x) != n:
      raise ValueError(f"{name} has shape {np.shape(x)} but weights has {n}; they must be the same")
  return shape


def _is_zero(x):
  return not isinstance(x, jax.Array) and x == 0
