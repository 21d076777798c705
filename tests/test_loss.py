"""The clipped-ratio loss against float64 loops and finite differences, users' cases, and its invariances."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mgrpo_jax.method.alignment import align, emit_batches, merge_copies
from mgrpo_jax.method.loss import (
  AGGREGATES,
  KLS,
  RATIOS,
  clipped_ratio_loss,
  loss_normalizer,
  masked_aggregate,
  normalizer_from_counts,
)

T = 6
SHAPE = (8, T + 3)  # of rows that are not packed: one program for each kind of loss
EVERY = dict(dual_clip=1.3, importance_cap=1.2, kl_coef=0.3, kl="k3", norm_length=5.0)  # all terms at once
KINDS = [(r, a) for r in RATIOS for a in AGGREGATES]
GARBAGE = [np.nan, np.inf, -np.inf, 1e30]


# --------------------------------------------------------------- the reference: loops in float64


def reference(seqs, *, ratio, aggregate, normalizer=None, norm_length=None, clip_low=0.2, clip_high=0.28,
              dual_clip=None, importance_cap=None, kl_coef=0.0, kl="k3"):  # fmt: skip
  """seqs: dicts with lp, behavior, prox | None, ref | None, mask (lists) and adv, w (numbers)."""
  top = bottom = 0.0
  for s in seqs:
    on = [t for t in range(len(s["mask"])) if s["mask"][t]]
    if not on or s["w"] == 0:
      continue
    old = s["behavior"] if s["prox"] is None else s["prox"]

    def reduced(a, b, on=on):
      d = [a[t] - b[t] for t in on]
      d = d if ratio == "token" else [sum(d) / (len(d) if ratio == "sequence" else 1)] * len(d)
      return [np.exp(np.clip(x, -20, 20)) for x in d]

    scale = [1.0] * len(on)
    if s["prox"] is not None:
      scale = [min(x, importance_cap or np.inf) for x in reduced(s["prox"], s["behavior"])]
    losses = []
    for t, r, c in zip(on, reduced(s["lp"], old), scale):
      a = s["adv"]
      x = max(-a * r, -a * np.clip(r, 1 - clip_low, 1 + clip_high))
      if dual_clip is not None and a < 0:
        x = min(x, -dual_clip * a)
      x *= c
      if s["ref"] is not None:
        d = s["lp"][t] - s["ref"][t]
        x += kl_coef * {"k1": d, "k2": d * d / 2, "k3": np.exp(-d) - 1 + d}[kl]
      losses.append(x)
    total, n = sum(losses), len(losses)
    top += s["w"] * (total / n if aggregate == "seq-mean-token-mean" else total)
    bottom += s["w"] * {"token-mean": n, "seq-mean-token-sum-norm": norm_length}.get(aggregate, 1)
  bottom = bottom if normalizer is None else normalizer
  return top / bottom if bottom else 0.0


def difference(seqs, step=1e-6, **options):
  """d reference / d lp by central differences, per sequence."""
  out = []
  for s in seqs:
    lp, g = s["lp"], np.zeros(len(s["lp"]))
    for t in range(len(lp)):
      values = []
      for sign in (1, -1):
        s["lp"] = lp.copy()
        s["lp"][t] += sign * step
        values.append(reference(seqs, **options))
      g[t] = (values[0] - values[1]) / (2 * step)
    s["lp"] = lp
    out.append(g)
  return out


def sequences(n, seed, lengths=None, full=True):
  """n random sequences of up to T tokens, with log-ratios wide enough to be clipped on both sides."""
  rng = np.random.default_rng(seed)
  lengths = rng.integers(1, T + 1, n) if lengths is None else lengths
  seqs = []
  for length in lengths:
    lp = -rng.random(length) * 3

    def near(width, lp=lp):
      return lp + rng.normal(0, width, len(lp))

    seqs.append(
      dict(
        lp=lp,
        behavior=near(0.4),
        prox=near(0.4) if full else None,
        ref=near(0.5) if full else None,
        mask=rng.random(length) < 0.7,
        adv=float(rng.choice([-1.5, -0.5, 0.0, 0.7, 1.3])),
        w=float(rng.choice([0.0, 0.25, 1.0, 2.0])),
      )
    )
  return seqs


def padded(seqs, rows, width, garbage=0.0):
  """One row per sequence; everything that must not matter is `garbage`."""
  arrays = {k: np.full((rows, width), garbage, np.float32) for k in ("lp", "behavior", "prox", "ref")}
  mask = np.zeros((rows, width), bool)
  adv, w = np.full(rows, garbage, np.float32), np.zeros(rows, np.float32)
  for b, s in enumerate(seqs):
    n = len(s["mask"])
    mask[b, :n] = s["mask"]
    live = mask[b, :n] if s["w"] else np.zeros(n, bool)
    for k in arrays:
      if s[k] is None:
        arrays[k] = None
      elif arrays[k] is not None:
        arrays[k][b, :n] = np.where(live, s[k], garbage)
    adv[b], w[b] = (s["adv"] if s["w"] else garbage), s["w"]
  return dict(**arrays, mask=mask, adv=adv, w=w, ids=None)


@functools.cache
def compiled(options):
  def run(lp, b, normalizer):
    return clipped_ratio_loss(
      lp, b["behavior"], b["adv"], b["mask"], b["w"], segment_ids=b["ids"], proximal_logprobs=b["prox"],
      ref_logprobs=b["ref"], normalizer=normalizer, **dict(options),
    )  # fmt: skip

  # Dozens of tiny programs: most of the time here is LLVM, so it is told to hurry.
  fast = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
  return jax.jit(jax.value_and_grad(run, has_aux=True), compiler_options=fast)


def loss_of(b, normalizer=None, **options):
  (value, metrics), grad = compiled(tuple(sorted(options.items())))(jnp.asarray(b["lp"]), b, normalizer)
  return float(value), np.asarray(grad), {k: (float(s), float(c)) for k, (s, c) in metrics.items()}


# --------------------------------------------------------------------- value and gradient, by kind


@pytest.mark.parametrize("ratio, aggregate", KINDS)
def test_value_and_gradient_are_those_of_loops_and_differences(ratio, aggregate):
  options = dict(ratio=ratio, aggregate=aggregate, **EVERY)
  clipped = bounded = 0
  for seed in range(10):
    seqs = sequences(3, seed)
    value, grad, metrics = loss_of(padded(seqs, *SHAPE), np.float32(2.5), **options)
    assert value == pytest.approx(reference(seqs, normalizer=2.5, **options), rel=2e-5, abs=1e-6)
    for row, expected in zip(grad, difference(seqs, normalizer=2.5, **options)):
      np.testing.assert_allclose(row[: len(expected)], expected, rtol=2e-4, atol=2e-5)
    clipped += metrics["clip_fraction_positive"][0] + metrics["clip_fraction_negative"][0]
    bounded += metrics["dual_clip_fraction"][0]
  assert clipped > 0 and bounded > 0


@pytest.mark.parametrize("kl", KLS)
def test_without_the_proximal_policy_the_ratio_is_to_the_behavior(kl):
  options = dict(ratio="token", aggregate="token-mean", kl=kl, kl_coef=0.2)
  seqs = sequences(4, 5)
  for s in seqs:
    s["prox"] = None
  value, grad, _ = loss_of(padded(seqs, 4, T), None, **options)
  assert value == pytest.approx(reference(seqs, **options), rel=2e-5)
  for row, expected in zip(grad, difference(seqs, **options)):
    np.testing.assert_allclose(row[: len(expected)], expected, rtol=2e-4, atol=2e-5)


# ------------------------------------------------- one property: how the update is cut does not matter


@st.composite
def updates(draw):
  lengths = draw(st.lists(st.integers(0, T), min_size=6, max_size=6))
  seqs = sequences(6, draw(st.integers(0, 10_000)), lengths)
  if draw(st.booleans()):
    seqs[2]["mask"] = np.zeros(lengths[2], bool)  # a sequence without sampled tokens
  order = draw(st.permutations(range(6)))
  return seqs, order, draw(st.sampled_from(GARBAGE))


@pytest.mark.parametrize("ratio, aggregate", KINDS)
@settings(max_examples=10, deadline=None)
@given(update=updates())
def test_loss_and_gradient_do_not_depend_on_how_the_update_is_cut(ratio, aggregate, update):
  """Micro-batches, padding, row order, packing, and garbage (inf, NaN) where nothing counts."""
  seqs, order, garbage = update
  options = dict(ratio=ratio, aggregate=aggregate, **EVERY)
  divisor = dict(aggregate=aggregate, norm_length=EVERY["norm_length"])

  # two micro-batches with the normalizer of both
  halves = [padded(seqs[:3], *SHAPE), padded(seqs[3:], *SHAPE)]
  normalizer = np.float32(sum(loss_normalizer(h["mask"], h["w"], **divisor) for h in halves))
  parts = [loss_of(h, normalizer, **options) for h in halves]
  value, grad = sum(p[0] for p in parts), np.concatenate([p[1][:3] for p in parts])
  metrics = {k: tuple(np.add(parts[0][2][k], parts[1][2][k])) for k in parts[0][2]}
  assert np.isfinite(value)
  assert value == pytest.approx(reference(seqs, **options), rel=5e-5, abs=1e-6)

  # all at once, other order, garbage wherever nothing counts, the padding included
  whole = padded([seqs[i] for i in order], *SHAPE, garbage)
  got, g, m = loss_of(whole, np.float32(loss_normalizer(whole["mask"], whole["w"], **divisor)), **options)
  assert got == pytest.approx(value, rel=5e-5, abs=1e-6)
  np.testing.assert_allclose(g[:6, :T], grad[list(order), :T], rtol=1e-4, atol=1e-6)
  assert (g[6:] == 0).all() and (g[~whole["mask"]] == 0).all() and (g[whole["w"] == 0] == 0).all()
  for name in metrics:
    np.testing.assert_allclose(m[name], metrics[name], rtol=1e-4, atol=1e-5, err_msg=name)

  # packed, several to a row
  trajectories = [
    SimpleNamespace(
      tokens=np.arange(len(s["mask"])),
      mask=s["mask"],
      logprobs=s["behavior"],
      versions=np.zeros(len(s["mask"])),
    )
    for s in seqs
  ]
  weights = [s["w"] for s in seqs]
  got, totals = 0.0, dict.fromkeys(metrics, (0.0, 0.0))
  for batch in emit_batches(trajectories, [s["adv"] for s in seqs], weights, rows=2, length=2 * T):
    packed = dict(mask=batch["mask"], adv=batch["advantages"], w=batch["weights"], ids=batch["segment_ids"])
    which = np.where(packed["ids"] >= 0, batch["trajectory"][packed["ids"]], -1)
    for name in ("lp", "behavior", "prox", "ref"):
      packed[name] = np.full(which.shape, garbage, np.float32)
      for i, t in zip(*np.nonzero(batch["mask"])):
        packed[name][i, t] = seqs[which[i, t]][name][batch["positions"][i, t]]
    part, g, m = loss_of(packed, normalizer, **options)
    got += part
    for i, t in np.ndindex(which.shape):
      expected = grad[which[i, t], batch["positions"][i, t]] if batch["mask"][i, t] else 0.0
      assert g[i, t] == pytest.approx(expected, rel=1e-4, abs=1e-6)
    totals = {k: tuple(np.add(totals[k], m[k])) for k in metrics}
  assert got == pytest.approx(value, rel=5e-5, abs=1e-6)
  for name in metrics:
    np.testing.assert_allclose(totals[name], metrics[name], rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("ratio", RATIOS)
@settings(max_examples=10, deadline=None)
@given(calls=st.lists(st.integers(0, 3), min_size=2, max_size=2), seed=st.integers(0, 99))
def test_copies_and_multiplicities_have_the_same_gradient(ratio, calls, seed):
  a = align(calls, target=4, mode="duplicate", seed=seed)
  distinct = {(k, i): s for k in range(2) for i, s in enumerate(sequences(calls[k], [seed, k]))}
  copies = [dict(distinct[k, i], w=0.25, id=(k, int(i))) for k in range(2) for i in a.indices[k] if i >= 0]
  merged = [dict(s, w=float(merge_copies(a)[k, i]), id=(k, i)) for (k, i), s in distinct.items()]
  assert len(copies) == 4 * sum(d > 0 for d in calls)
  options = dict(ratio=ratio, aggregate="seq-mean-token-mean", **EVERY)
  results = []
  for rows in (copies, merged):
    b = padded(rows, *SHAPE)
    normalizer = loss_normalizer(b["mask"], b["w"], aggregate=options["aggregate"])
    value, grad, _ = loss_of(b, np.float32(normalizer), **options)
    total = {s["id"]: np.zeros(T) for s in merged}
    for s, g in zip(rows, grad):
      total[s["id"]] += g[:T]
    results.append((value, total))
  assert results[0][0] == pytest.approx(results[1][0], rel=1e-5, abs=1e-7)
  for key, g in results[0][1].items():
    np.testing.assert_allclose(g, results[1][1][key], rtol=1e-4, atol=1e-7)


# -------------------------------------------------------------------------------- hand-made numbers


def hand(lp, behavior, adv, mask=None, w=None, prox=None, ref=None, **options):
  """-> loss, metrics of ragged lists, one row per sequence, in one padded shape for all (fewer compilations)."""
  mask = [[True] * len(row) for row in lp] if mask is None else mask
  none = [None] * len(lp)
  fields = zip(lp, behavior, prox or none, ref or none, mask, adv, w or [1.0] * len(lp))
  seqs = [dict(zip(("lp", "behavior", "prox", "ref", "mask", "adv", "w"), f)) for f in fields]
  b = padded(seqs, 3, max(4, *map(len, lp), 0))
  loss, metrics = clipped_ratio_loss(
    b["lp"], b["behavior"], b["adv"], b["mask"], b["w"], proximal_logprobs=b["prox"] if prox else None,
    ref_logprobs=b["ref"] if ref else None, **options,
  )  # fmt: skip
  return float(loss), {k: (float(s), float(c)) for k, (s, c) in metrics.items()}


def aggregate_of(rows, aggregate, **options):
  width = max(len(r) for r in rows)
  values = np.array([[*r, *[np.nan] * (width - len(r))] for r in rows], np.float32)
  mask = np.array([[i < len(r) for i in range(width)] for r in rows])
  return float(masked_aggregate(values, mask, np.ones(len(rows)), aggregate=aggregate, **options))


def test_the_four_aggregates_of_one_example():  # semantics C3
  got = {a: aggregate_of([[1, 1], [0.5] * 6], a, norm_length=10) for a in AGGREGATES}
  assert got == pytest.approx(
    {
      "token-mean": 0.625,
      "seq-mean-token-sum": 2.5,
      "seq-mean-token-mean": 0.75,
      "seq-mean-token-sum-norm": 0.25,
    }
  )


def test_token_mean_is_over_all_micro_batches():  # O25
  parts = [([[4.0]], 1), ([[0.0, 0, 0]], 3)]
  normalizer = sum(
    loss_normalizer(np.ones((1, n), bool), np.ones(1), aggregate="token-mean") for _, n in parts
  )
  assert sum(aggregate_of(rows, "token-mean", normalizer=normalizer) for rows, _ in parts) == pytest.approx(
    1.0
  )


def test_the_dr_grpo_divisor_is_a_constant_however_rows_are_dealt():  # O26: sums 2 and 3, L = 10, B = 2
  rows, options = [[1, 1], [1, 1, 1]], dict(aggregate="seq-mean-token-sum-norm", norm_length=10)
  assert aggregate_of(rows, **options) == pytest.approx(0.25)
  assert sum(aggregate_of([r], normalizer=20.0, **options) for r in rows) == pytest.approx(0.25)


def test_token_mean_is_over_the_batch_and_not_over_groups():  # O27
  assert aggregate_of([[1.0], [0, 0, 0]], "token-mean") == pytest.approx(0.25)


def test_the_divisor_counts_sampled_tokens_only():  # O9
  mask = np.array([[1, 1, 0, 0, 1], [1, 0, 0, 0, 0]], bool)
  assert loss_normalizer(mask, np.ones(2), aggregate="token-mean") == 4


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_rows_without_tokens_or_weight_leave_the_divisor(aggregate):
  mask = np.array([[1, 1, 0], [0, 0, 0], [1, 1, 1], [1, 0, 0]], bool)
  w = np.array([0.5, 1, 0, 2], np.float32)
  expected = {"token-mean": 3.0, "seq-mean-token-sum-norm": 25.0}.get(aggregate, 2.5)
  options = dict(aggregate=aggregate, norm_length=10)
  ids = np.array([[0, 0, 1], [3, -1, 2], [2, 2, -1]])
  packed = np.array([[1, 1, 0], [1, 1, 1], [1, 1, 0]], bool)
  for as_array in (np.asarray, jnp.asarray):  # on the host it stays on the host
    for got in (
      loss_normalizer(as_array(mask), as_array(w), **options),
      loss_normalizer(as_array(packed), as_array(w), segment_ids=as_array(ids), **options),
      normalizer_from_counts(as_array([2, 0, 3, 1]), as_array(w), **options),
    ):
      assert got == pytest.approx(expected) and isinstance(got, jax.Array) == (as_array is jnp.asarray)


@pytest.mark.parametrize("aggregate, normalizer", [*((a, None) for a in AGGREGATES), ("token-mean", 0.0)])
def test_nothing_to_train_is_loss_and_gradient_zero(aggregate, normalizer):  # O16
  def f(lp):
    return clipped_ratio_loss(
      lp,
      lp,
      np.ones(2),
      np.zeros((2, 3), bool),
      np.ones(2),
      aggregate=aggregate,
      norm_length=7,
      normalizer=normalizer,
    )[0]

  value, grad = jax.jit(jax.value_and_grad(f))(jnp.full((2, 3), np.nan))
  assert value == 0 and (grad == 0).all()


def test_values_are_selected_and_not_multiplied():  # O16
  value = masked_aggregate(np.array([[np.nan, 2.0]]), np.array([[0, 1]]), np.ones(1), aggregate="token-mean")
  assert value == 2


def test_masked_logprobs_do_not_matter():  # O24
  def loss(x, y):
    lp, behavior, mask = np.array([[-1, x]]), np.array([[-1, y]]), np.array([[True, False]])
    return float(clipped_ratio_loss(lp, behavior, np.ones(1), mask, np.ones(1))[0])

  assert loss(-0.5, -3.0) == loss(0.0, 1.0) == loss(np.nan, np.inf) == -1.0


def test_one_action_among_observations_has_the_only_gradient():  # O19
  def f(lp):
    return clipped_ratio_loss(lp, lp * 0 - 1, np.ones(1), np.array([[0, 1, 0, 0]]), np.ones(1))[0]

  grad = jax.jit(jax.grad(f))(jnp.full((1, 4), -1.0))
  np.testing.assert_allclose(grad, [[0, -1, 0, 0]])


@pytest.mark.parametrize(
  "adv, shift, options, expected",
  [
    (1.0, 0.5, {}, -1.28),  # clipped above
    (1.0, -0.5, {}, -np.exp(-0.5)),  # not clipped: pessimistic
    (-1.0, -0.5, {}, 0.8),  # clipped below
    (-1.0, 0.5, {}, np.exp(0.5)),
    (-1.0, 2.0, {}, np.exp(2.0)),
    (-2.0, 2.0, dict(dual_clip=3.0), 6.0),  # dual clip bounds it by -c A
    (-2.0, 1.0, dict(dual_clip=3.0), 2 * np.exp(1.0)),
    (1.0, -90.0, {}, -np.exp(-20.0)),  # clamped before exp
    (-1.0, 90.0, {}, np.exp(20.0)),
    (1.0, 0.5, dict(clip_high=1.0), -np.exp(0.5)),
  ],
)
def test_the_clip_of_one_token(adv, shift, options, expected):
  assert hand([[shift - 1]], [[-1.0]], [adv], **options)[0] == pytest.approx(expected, rel=1e-5)


def test_clip_fractions_are_over_sampled_tokens_and_split_by_sign():
  lp = [[0.5, -0.5, 0.0, 9.0], [0.5, -0.5, -0.6, 9.0], [9.0] * 4]
  mask = [[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
  _, m = hand(lp, [[0.0] * 4] * 3, [1.0, -1.0, 1.0], mask=mask, w=[1, 1, 0])
  assert m["clip_fraction_positive"] == (1, 3)
  assert m["clip_fraction_negative"] == (2, 3)
  assert m["tokens"] == (6, 2) and m["sequences"] == (2, 2)
  assert m["ratio"][0] == pytest.approx(sum(np.exp([0.5, -0.5, 0, 0.5, -0.5, -0.6])), rel=1e-6)
  assert m["ratio_max"] == (pytest.approx(2 * np.exp(0.5), rel=1e-6), 2)


def test_long_sequences_report_token_means_beside_sequence_sums():  # O29: 100 tokens of +.012
  lp, zero = [[0.012] * 100], [[0.0] * 100]
  loss, m = hand(lp, zero, [1.0], ratio="sequence")
  assert loss == pytest.approx(-np.exp(0.012), rel=1e-5)
  assert m["log_ratio_abs"] == pytest.approx((1.2, 100), rel=1e-4)
  assert m["sequence_log_ratio_abs"] == pytest.approx((1.2, 1), rel=1e-4)
  assert m["kl_behavior"] == pytest.approx((100 * (np.exp(0.012) - 1.012), 100), rel=1e-2)
  assert hand(lp, zero, [-1.0], ratio="sequence-product")[0] == pytest.approx(np.exp(1.2), rel=1e-4)


def test_a_sequence_ratio_is_one_number_for_all_its_tokens():  # O32: B = 2, T = 3
  lp = np.array([[0.1, 0.2, 0.0], [0.3, -0.3, 0.15]], np.float32)
  for ratio, divisor in (("sequence", 3), ("sequence-product", 1)):
    _, m = hand(lp.tolist(), [[0.0] * 3] * 2, [1.0, 1.0], ratio=ratio)
    s = np.exp(lp.sum(1) / divisor)
    assert m["ratio"] == pytest.approx((3 * s.sum(), 6), rel=1e-5)
    assert m["ratio_max"] == pytest.approx((s.sum(), 2), rel=1e-5)

    def f(x, ratio=ratio):
      return clipped_ratio_loss(x, 0 * lp, np.ones(2), lp > -9, np.ones(2), ratio=ratio, clip_high=9)[0]

    np.testing.assert_allclose(
      jax.jit(jax.grad(f))(jnp.asarray(lp)), -s[:, None] / divisor / 2 * np.ones((2, 3)), rtol=1e-5
    )


@pytest.mark.parametrize(
  "shift, cap, weight", [(0.7, 2.0, 2.0), (-0.1, 2.0, np.exp(-0.1)), (0.7, None, np.exp(0.7))]
)
def test_importance_is_a_constant_truncated_above(shift, cap, weight):  # semantics C8
  prox = [[-1.0]]
  loss, m = hand([[-0.9]], [[-1.0 - shift]], [1.0], prox=prox, importance_cap=cap)
  assert loss == pytest.approx(-weight * np.exp(0.1), rel=1e-5)
  assert m["importance"] == (pytest.approx(weight, rel=1e-5), 1)
  assert m["importance_capped"] == (float(cap is not None and shift > 0.69), 1)


def test_only_the_trained_policy_has_a_gradient():
  """The proximal and the reference log-probabilities may be the very array that is trained."""
  lp, ones = jnp.array([[-1.0, -2.0]]), np.ones((1, 2), bool)
  f = functools.partial(clipped_ratio_loss, advantages=np.array([0.5]), mask=ones, weights=np.ones(1))

  def gradient(g):
    return np.asarray(jax.jit(jax.grad(lambda x: g(x)[0]))(lp))

  np.testing.assert_allclose(gradient(lambda x: f(x, x)), [[-0.25, -0.25]], rtol=1e-6)
  # importance is e, capped at 2: two times the on-policy gradient
  got = gradient(lambda x: f(x, lp - 1, proximal_logprobs=x, importance_cap=2.0))
  np.testing.assert_allclose(got, [[-0.5, -0.5]], rtol=1e-6)
  # uncapped it is a constant all the same
  got = gradient(lambda x: f(x, lp - 1, proximal_logprobs=x - 0.1))
  np.testing.assert_allclose(got, np.full((1, 2), -0.25 * np.exp(0.9 + 0.1)), rtol=1e-5)
  # k1 has slope 1 in the policy alone
  got = gradient(lambda x: f(x, x, ref_logprobs=x, kl="k1", kl_coef=0.1))
  np.testing.assert_allclose(got, [[-0.2, -0.2]], rtol=1e-5)


# --------------------------------------------------------------------------------------------- KL


@pytest.mark.parametrize("kl, expected", [("k1", 0.5), ("k2", 0.125), ("k3", 0.1065307)])
def test_kl_estimators_of_a_half(kl, expected):  # semantics C6, and O31: the penalty is +
  loss, m = hand([[-1.0]], [[-1.0]], [0.0], ref=[[-1.5]], kl=kl, kl_coef=0.1)
  assert loss == pytest.approx(0.1 * expected, rel=1e-5)
  assert m["kl_ref"] == pytest.approx((expected, 1), rel=1e-5)


def test_kl_acts_on_groups_without_advantage_and_is_never_scaled_by_it():  # O17
  losses = [
    hand([[-1.0]], [[-1.0]], [a], ref=[[-1.5]], kl="k1", kl_coef=0.1)[0] + a for a in (0.0, 1.0, -2.0)
  ]
  np.testing.assert_allclose(losses, 0.05, atol=1e-6)


def test_gradients_of_the_kl_estimators_on_policy():  # O30
  """In expectation over the policy: k1 nothing, k2 KL(policy || ref), k3 KL(ref || policy)."""
  logits, ref = np.array([0.3, -0.2, 0.9]), np.array([0.0, 0.5, -0.4])
  p, q = (np.exp(x) / np.exp(x).sum() for x in (logits, ref))
  d = np.log(p) - np.log(q)
  expected = {"k1": 0 * p, "k2": p * (d - (p * d).sum()), "k3": p - q}

  def f(x, kl):
    lp = jax.nn.log_softmax(x)[:, None]  # each of the three tokens once, weighed by its probability
    q_ = np.log(q).astype(np.float32)[:, None]
    behavior = jax.lax.stop_gradient(lp)
    return clipped_ratio_loss(
      lp,
      behavior,
      np.zeros(3),
      np.ones((3, 1), bool),
      p,
      ref_logprobs=q_,
      kl=kl,
      kl_coef=1.0,
      aggregate="token-mean",
    )[0]

  for kl in KLS:
    np.testing.assert_allclose(
      jax.jit(jax.grad(f), static_argnums=1)(jnp.asarray(logits, jnp.float32), kl), expected[kl], atol=1e-6
    )


# ---------------------------------------------------------------------------------- refused input


@pytest.mark.parametrize(
  "change, words",
  [
    (dict(ratio="seq"), "ratio is 'seq'"),
    (dict(aggregate="mean"), "aggregate is 'mean'"),
    (dict(kl="k4"), "kl is 'k4'"),
    (dict(aggregate="seq-mean-token-sum-norm"), "needs norm_length"),
    (dict(aggregate="seq-mean-token-sum-norm", norm_length=0), "norm_length is 0"),
    (dict(importance_cap=2.0), "importance_cap needs proximal_logprobs"),
    (dict(kl_coef=0.1), "kl_coef is 0.1 but there are no ref_logprobs"),
    (dict(dual_clip=1.0), "dual_clip is 1.0"),
    (dict(clip_low=-0.1), "clip_low is -0.1"),
    (dict(clip_high=-0.1), "clip_high is -0.1"),
    (dict(ref_logprobs=np.zeros((2, 4))), r"ref_logprobs has shape \(2, 4\)"),
    (dict(segment_ids=np.zeros((2, 4))), r"segment_ids has shape \(2, 4\)"),
    (dict(weights=np.ones(3)), "give one per row"),
    (dict(advantages=np.ones(3)), r"advantages has shape \(3,\)"),
    (dict(mask=np.ones(3)), "mask has shape"),
  ],
)
def test_bad_input_is_refused_with_a_reason(change, words):
  arguments = dict(
    logprobs=np.zeros((2, 3)), behavior_logprobs=np.zeros((2, 3)), advantages=np.ones(2), mask=np.ones((2, 3)),
    weights=np.ones(2),
  ) | change  # fmt: skip
  with pytest.raises(ValueError, match=words):
    clipped_ratio_loss(**arguments)
