"""The update of one agent: against float64 numpy, and the same however it is split, placed or repeated."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mgrpo_jax import learner, metrics
from mgrpo_jax.method import alignment
from mgrpo_jax.method import loss as loss_lib
from mgrpo_jax.policy import logprobs, sharding
from mgrpo_jax.policy.transformer import ModelConfig, Transformer

V, ROWS, LENGTH = 24, 4, 32
MODEL = Transformer(ModelConfig(vocab_size=V, num_layers=1, embed_dim=16, num_heads=2, num_kv_heads=2, head_dim=4, mlp_dim=16,
                                token_shift=True, init_std=0.2))
PARAMS = jax.jit(MODEL.init)(jax.random.key(0))
HOST = jax.device_get(PARAMS)  # updates take the buffers of what they are given
TEMPERATURE = 0.8
PER_TOKEN = ("proximal_logprobs", "ref_logprobs")


@dataclasses.dataclass
class Row:
  """A trajectory with made-up log-probabilities near those of an even guess, so that every clip happens somewhere."""

  tokens: np.ndarray
  mask: np.ndarray
  logprobs: np.ndarray
  versions: np.ndarray
  proximal_logprobs: np.ndarray
  ref_logprobs: np.ndarray


def make_rows(seed=0, lengths=(9, 14, 5, 11, 7, 16, 3, 12, 8)):
  rng, rows = np.random.default_rng(seed), []
  for n in lengths:
    mask = rng.random(n) < 0.6
    mask[0], mask[-1] = False, True
    near = lambda: (-np.log(V) + rng.normal(0, 0.5, n)).astype(np.float32)  # noqa: E731, B023
    rows.append(Row(rng.integers(0, V, n).astype(np.int32), mask, near(), np.zeros(n, np.int32), near(), near()))
  advantages = rng.normal(0, 1, len(rows)).astype(np.float32)
  weights = rng.choice([0.25, 0.5, 1.0, 2.0], len(rows)).astype(np.float32)
  advantages[1], weights[3] = 0.0, 0.0
  return rows, advantages, weights


def emit(rows, advantages, weights, extra=PER_TOKEN):
  """Batches of the one shape, with the per-token arrays of other policies laid out as the tokens are."""
  batches = list(alignment.emit_batches(rows, advantages, weights, rows=ROWS, length=LENGTH))
  for batch in batches:
    for name in extra:
      batch[name] = np.full((ROWS, LENGTH), np.nan, np.float32)  # what is no token must not matter
      for b, t in zip(*np.nonzero(batch["segment_ids"] >= 0)):
        row = rows[batch["trajectory"][batch["segment_ids"][b, t]]]
        batch[name][b, t] = getattr(row, name)[batch["positions"][b, t]]
  return batches


def split(parts=3, seed=0, extra=PER_TOKEN):
  """(one big batch, the same rows as several micro-batches), all of one shape."""
  rows, advantages, weights = make_rows(seed)
  whole = emit(rows, advantages, weights, extra)
  assert len(whole) == 1
  micro = []
  for i in range(parts):
    micro += emit(rows[i::parts], advantages[i::parts], weights[i::parts], extra)
  return whole, micro


def normalizer(batches, options):
  return sum(float(loss_lib.loss_normalizer(b["mask"], b["weights"], segment_ids=b["segment_ids"], aggregate=options.aggregate,
                                            norm_length=options.norm_length)) for b in batches)


def zeros():
  return jax.tree.map(jnp.zeros_like, PARAMS), jnp.zeros(())


# ------------------------------------------------------------------------- the float64 reference


@jax.jit
def pull_back(params, batch, logprob_bar, entropy_bar):
  """token_logprobs and the gradient of sum(lp * logprob_bar + entropy * entropy_bar)."""
  run = lambda p: logprobs.token_logprobs(MODEL, p, batch["tokens"], batch["positions"], batch["segment_ids"], temperature=TEMPERATURE, chunk=8)  # noqa: E731
  out, pull = jax.vjp(run, params)
  return out, pull((logprob_bar, entropy_bar))[0]


def reference(lp, entropy, batch, o, divisor):
  """Loss and its derivatives to log-probabilities and entropies, by plain loops in float64."""
  lp, entropy = np.asarray(lp, np.float64), np.asarray(entropy, np.float64)
  loss, dlp, dent = 0.0, np.zeros_like(lp), np.zeros_like(lp)
  for s, w in enumerate(batch["weights"].astype(np.float64)):
    at = np.nonzero(batch["mask"] & (batch["segment_ids"] == s))
    n = len(at[0])
    if w == 0 or n == 0:
      continue
    share = (w / n if o.aggregate == "seq-mean-token-mean" else w) / divisor
    a, new = float(batch["advantages"][s]), lp[at]
    behavior = batch["behavior_logprobs"][at].astype(np.float64)
    old = batch["proximal_logprobs"][at].astype(np.float64) if o.proximal else behavior
    reduce = {"token": lambda d: d, "sequence": lambda d: np.full(n, d.mean()), "sequence-product": lambda d: np.full(n, d.sum())}[o.ratio]  # noqa: B023
    ratio = np.exp(reduce(new - old))
    unclipped, clipped = -a * ratio, -a * np.clip(ratio, 1 - o.clip_low, 1 + o.clip_high)
    term = np.maximum(unclipped, clipped)
    slope = np.where(unclipped >= clipped, unclipped, 0.0)  # d term / d log-ratio
    if o.dual_clip and a < 0:
      slope = np.where(term > -a * o.dual_clip, 0.0, slope)
      term = np.minimum(term, -a * o.dual_clip)
    if o.proximal:
      importance = np.exp(reduce(old - behavior))
      importance = importance if o.importance_cap is None else np.minimum(importance, o.importance_cap)
      term, slope = importance * term, importance * slope
    if o.ratio != "token":
      slope = np.full(n, slope.sum() / (n if o.ratio == "sequence" else 1))
    if o.kl_coef:
      d = new - batch["ref_logprobs"][at].astype(np.float64)
      value, dvalue = {"k1": (d, np.ones(n)), "k2": (d**2 / 2, d), "k3": (np.exp(-d) - 1 + d, 1 - np.exp(-d))}[o.kl]
      term, slope = term + o.kl_coef * value, slope + o.kl_coef * dvalue
    loss += share * np.sum(term - o.entropy_coef * entropy[at])
    dlp[at], dent[at] = share * slope, -share * o.entropy_coef
  return loss, dlp, dent


OPTIONS = [
  learner.LossOptions(aggregate="token-mean", entropy_coef=0.05, clip_low=0.3, clip_high=0.1),
  learner.LossOptions(aggregate="seq-mean-token-mean", proximal=True, importance_cap=1.3, kl_coef=0.1, kl="k3"),
  learner.LossOptions(aggregate="seq-mean-token-sum", ratio="sequence", dual_clip=1.4, kl_coef=0.2, kl="k2", entropy_coef=0.01),
  learner.LossOptions(aggregate="seq-mean-token-sum-norm", norm_length=20, ratio="sequence-product", proximal=True, kl_coef=0.1, kl="k1"),
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: o.aggregate)
def test_micro_batches_and_one_big_batch_give_the_loss_and_gradient_of_numpy(options):
  options = dataclasses.replace(options, temperature=TEMPERATURE)
  fns = learner.make_update(MODEL, optax.sgd(1.0), options, chunk=16 if options.proximal else 64)
  whole, micro = split(extra=("proximal_logprobs",) * options.proximal + ("ref_logprobs",) * (options.kl_coef > 0))
  divisor = normalizer(micro, options)
  assert divisor == pytest.approx(normalizer(whole, options))

  flat = np.zeros((ROWS, LENGTH), np.float32)
  plain = {k: whole[0][k] for k in ("tokens", "positions", "segment_ids")}
  (lp, entropy), _ = pull_back(PARAMS, plain, flat, flat)
  expected, dlp, dent = reference(lp, entropy, whole[0], options, divisor)
  assert (dlp != 0).sum() > 10
  _, expected_grads = pull_back(PARAMS, plain, dlp.astype(np.float32), dent.astype(np.float32))

  sums = []
  for batches in (whole, micro, micro[::-1]):
    total, pairs = zeros(), []
    for batch in batches:
      total, m = fns.gradients(PARAMS, total, batch, np.float32(divisor))
      pairs.append(m)
    grads, loss = total
    assert float(loss) == pytest.approx(expected, abs=2e-6)
    jax.tree.map(lambda g, e: np.testing.assert_allclose(g, e, atol=3e-6), grads, expected_grads)
    sums.append({k: [float(sum(p[k][i] for p in pairs)) for i in (0, 1)] for k in pairs[0]})
  for k, pair in sums[0].items():
    assert sums[1][k] == pytest.approx(pair, rel=1e-4, abs=1e-5) and sums[2][k] == pytest.approx(pair, rel=1e-4, abs=1e-5), k
  seen = whole[0]["mask"] & (whole[0]["weights"][whole[0]["segment_ids"]] > 0)
  assert sums[0]["entropy"] == pytest.approx([np.asarray(entropy)[seen].sum(), seen.sum()], rel=1e-5)
  if options.kl_coef:
    d = (np.asarray(lp) - whole[0]["ref_logprobs"])[seen]
    kl = {"k1": d, "k2": d**2 / 2, "k3": np.exp(-d) - 1 + d}[options.kl]
    assert sums[0]["kl_ref"] == pytest.approx([kl.sum(), seen.sum()], rel=1e-4)


def test_supervised_loss_is_the_cross_entropy_of_the_sampled_tokens():
  fns = learner.make_update(MODEL, optax.sgd(1.0), learner.LossOptions(aggregate="token-mean"), supervised=True)
  batch, = emit(*make_rows(), extra=())
  hidden = jax.jit(MODEL.forward)(PARAMS, *(batch[k] for k in ("tokens", "positions", "segment_ids")))
  logits = np.asarray(MODEL.logits(PARAMS, hidden), np.float64)
  total = weight = 0.0
  for b, t in zip(*np.nonzero(batch["mask"])):
    w = float(batch["weights"][batch["segment_ids"][b, t]])
    before = logits[b, t - 1]
    total += w * (np.log(np.exp(before - before.max()).sum()) + before.max() - before[batch["tokens"][b, t]])
    weight += w
  (grads, loss), pairs = fns.gradients(PARAMS, zeros(), batch, np.float32(weight))
  assert float(loss) == pytest.approx(total / weight, rel=1e-5) and pairs == {}
  step = jax.tree.map(lambda p, g: p - 0.05 * np.asarray(g), PARAMS, grads)
  assert float(fns.gradients(step, zeros(), batch, np.float32(weight))[0][1]) < float(loss)  # downhill


@pytest.mark.parametrize("options, missing", [
  (learner.LossOptions(proximal=True), "proximal_logprobs"), (learner.LossOptions(kl_coef=0.1), "ref_logprobs")])
def test_a_batch_without_the_other_policy_it_needs_is_refused(options, missing):
  fns = learner.make_update(MODEL, optax.sgd(1.0), options)
  batch, = emit(*make_rows(), extra=())
  with pytest.raises(ValueError, match=missing):
    fns.gradients(PARAMS, zeros(), batch, np.float32(1))


# --------------------------------------------------------------------------------- the optimizer


def numpy_adamw(params, gradients, rates, *, b1, b2, eps, weight_decay, clip_norm):
  """Parameters after each step, in float64; matrices alone decay."""
  p = {k: v.astype(np.float64) for k, v in params.items()}
  m, v, out = {k: 0 * x for k, x in p.items()}, {k: 0 * x for k, x in p.items()}, []
  for t, (grads, rate) in enumerate(zip(gradients, rates), 1):
    norm = np.sqrt(sum(np.sum(g.astype(np.float64) ** 2) for g in grads.values()))
    for k in p:
      g = grads[k] * min(1.0, clip_norm / norm)
      m[k], v[k] = b1 * m[k] + (1 - b1) * g, b2 * v[k] + (1 - b2) * g**2
      step = m[k] / (1 - b1**t) / (np.sqrt(v[k] / (1 - b2**t)) + eps)
      p[k] = p[k] - rate * (step + (weight_decay * p[k] if p[k].ndim > 1 else 0))
    out.append(dict(p))
  return out


def flat(tree):
  return {jax.tree_util.keystr(k): np.asarray(v) for k, v in jax.tree_util.tree_leaves_with_path(tree)}


def test_three_steps_of_adamw_with_warm_up_and_clipping_are_those_of_numpy():
  settings = dict(b1=0.8, b2=0.95, eps=1e-3, weight_decay=0.1, clip_norm=0.5)
  optimizer = learner.make_optimizer(learning_rate=0.03, warmup_updates=2, **settings)
  fns = learner.make_update(MODEL, optimizer, learner.LossOptions())
  state = learner.init_state(jax.tree.map(jnp.array, HOST), optimizer)
  rng = np.random.default_rng(0)
  scales = (0.3, 0.001, 2.0)  # the second is under the clip, the others over
  gradients = [jax.tree.map(lambda p: rng.normal(0, s, p.shape).astype(np.float32), PARAMS) for s in scales]  # noqa: B023
  expected = numpy_adamw(flat(PARAMS), [flat(g) for g in gradients], [0.015, 0.03, 0.03], **settings)
  for i, g in enumerate(gradients):
    state, info = fns.apply(state, (jax.tree.map(jnp.asarray, g), jnp.float32(0.5)))
    norm = np.sqrt(sum(np.sum(x.astype(np.float64) ** 2) for x in flat(g).values()))
    assert float(info["grad_norm"]) == pytest.approx(norm, rel=1e-5) and (norm > 0.5) == (i != 1)
    assert bool(info["finite"]) and float(info["loss"]) == 0.5 and int(state["step"]) == i + 1
    for k, v in flat(state["params"]).items():
      np.testing.assert_allclose(v, expected[i][k], atol=1e-6, err_msg=k)


def test_bfloat16_parameters_follow_a_float32_master_that_small_steps_do_move():
  optimizer = learner.make_optimizer(learning_rate=1e-4, b1=0.9, b2=0.99, clip_norm=1e9)
  fns = learner.make_update(MODEL, optimizer, learner.LossOptions())
  half = jax.tree.map(lambda p: jnp.asarray(p, jnp.bfloat16), HOST)
  exact = learner.init_state(jax.tree.map(lambda p: p.astype(jnp.float32), half), optimizer)
  state = learner.init_state(half, optimizer)
  assert "master" not in exact and {x.dtype for x in jax.tree.leaves((state["master"], state["opt_state"][1][0].mu))} == {jnp.dtype("float32")}
  zeros, _ = fns.zeros(state["params"])
  assert {x.dtype for x in jax.tree.leaves(zeros)} == {jnp.dtype("float32")}
  before = jax.device_get(state["params"])
  for i in range(30):  # each step is far below half a unit in the last place of most weights
    gradients = jax.tree.map(lambda p: jnp.full(p.shape, 1.0 + i % 3), HOST)  # noqa: B023
    state, _ = fns.apply(state, (gradients, jnp.float32(0)))
    exact, _ = fns.apply(exact, (gradients, jnp.float32(0)))
  for (k, p), (_, m), (_, e) in zip(*(sorted(flat(x).items()) for x in (state["params"], state["master"], exact["params"]))):
    np.testing.assert_array_equal(m, e, err_msg=k)
    np.testing.assert_array_equal(p, e.astype(jnp.bfloat16), err_msg=k)
  moved = [np.mean(a != b) for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(jax.device_get(state["params"])))]
  assert min(moved) > 0.2
  kept = jax.device_get(state)
  state, info = fns.apply(state, (jax.tree.map(lambda p: jnp.full(p.shape, jnp.nan), HOST), jnp.float32(0)))
  assert not bool(info["finite"])
  jax.tree.map(np.testing.assert_array_equal, kept, jax.device_get(state))


def rates(count, **options):
  """The learning rate of each update: AdamW moves by it when all gradients are the same."""
  optimizer = learner.make_optimizer(clip_norm=1e9, eps=1e-12, **options)

  def one(carry, _):
    p, s = carry
    updates, s = optimizer.update({"w": jnp.ones(1)}, s, {"w": p})
    return (p, s), -updates["w"][0]

  start = jnp.zeros(1)
  return np.asarray(jax.lax.scan(one, (start, optimizer.init({"w": start})), None, length=count)[1])


def test_warm_up_rises_from_the_first_update_on_and_then_stays():
  np.testing.assert_allclose(rates(6, learning_rate=0.4, warmup_updates=4), [0.1, 0.2, 0.3, 0.4, 0.4, 0.4], rtol=1e-4)
  np.testing.assert_allclose(rates(2, learning_rate=0.4, warmup_updates=1), [0.4, 0.4], rtol=1e-4)
  np.testing.assert_allclose(rates(2, learning_rate=0.4), [0.4, 0.4], rtol=1e-4)


def test_decay_is_a_cosine_to_a_tenth():
  got = rates(14, learning_rate=1.0, warmup_updates=2, decay_updates=12)
  cosine = [0.1 + 0.9 * (1 + np.cos(np.pi * i / 10)) / 2 for i in range(11)]
  np.testing.assert_allclose(got, [0.5, 0.75, *cosine, 0.1], rtol=1e-4)


# ------------------------------------------------------------------- whole updates, on any mesh

RUN = learner.LossOptions(aggregate="seq-mean-token-mean", temperature=TEMPERATURE)
# A large eps, so that a parameter of almost no gradient does not move by a full step of either sign.
OPTIMIZER = learner.make_optimizer(learning_rate=0.01, warmup_updates=3, eps=1e-3, weight_decay=0.01)


@dataclasses.dataclass
class Setup:
  mesh: jax.sharding.Mesh
  fns: learner.UpdateFns

  def state(self):
    return learner.init_state(sharding.place(HOST, self.mesh), OPTIMIZER)

  def update(self, state, batches, divisor=None):
    placed = [sharding.shard_batch(b, self.mesh) for b in batches]
    return learner.update(state, placed, self.fns, normalizer(batches, RUN) if divisor is None else divisor)


@pytest.fixture(scope="module")
def single():
  return Setup(sharding.make_mesh({"data": 1, "fsdp": 1, "tensor": 1}), learner.make_update(MODEL, OPTIMIZER, RUN))


@pytest.fixture(scope="module")
def cube():
  return Setup(sharding.make_mesh({"data": 2, "fsdp": 2, "tensor": 2}), learner.make_update(MODEL, OPTIMIZER, RUN))


def close(a, b, atol):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol), jax.device_get(a), jax.device_get(b))


def same_bits(a, b):
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))


@pytest.mark.parametrize("where", ["single", "cube"])
def test_after_a_blank_update_nothing_is_compiled_and_everything_keeps_its_place(where, request):
  # the first test of its fixtures, so that no other test has compiled anything yet
  setup = request.getfixturevalue(where)
  _, micro = split(extra=())
  state = setup.state()
  places = jax.tree.map(lambda x: x.sharding, state)
  moments = [s for s in jax.tree.leaves(state["opt_state"], is_leaf=lambda x: isinstance(x, dict)) if isinstance(s, dict)]
  assert len(moments) == 2 and all(jax.tree.map(lambda x: x.sharding, m) == places["params"] for m in moments)
  setup.update(jax.tree.map(jnp.copy, state), micro[:1], 1.0)  # as `Agent.warm_up` does
  placed = [[sharding.shard_batch(b, setup.mesh) for b in micro[:n]] for n in (3, 1, 2)]
  with metrics.CompileCounter() as counter:
    for batches in placed:
      state, _ = learner.update(state, batches, setup.fns, 1.0)
    assert counter.programs == 0
  assert jax.tree.map(lambda x: x.sharding, state) == places
  grads, _ = setup.fns.zeros(state["params"])
  assert jax.tree.map(lambda x: x.sharding, grads) == places["params"]  # no device holds a whole gradient


def test_an_update_does_not_depend_on_micro_batches_or_devices(single, cube):
  whole, micro = split(extra=())
  more, _ = split(seed=1, extra=())
  results = []
  for setup, batches in ((single, whole), (single, micro), (cube, whole), (cube, micro)):
    state, out = setup.update(setup.state(), batches)
    state, _ = setup.update(state, more)
    results.append((state, out))
  for state, out in results[1:]:
    assert out["loss"] == pytest.approx(results[0][1]["loss"], abs=1e-6)
    assert out["grad_norm"] == pytest.approx(results[0][1]["grad_norm"], rel=1e-5)
    assert {k: v for k, v in out.items() if k in ("tokens", "sequences")} == {k: results[0][1][k] for k in ("tokens", "sequences")}
    close(state["params"], results[0][0]["params"], 2e-6)
    close(state["opt_state"], results[0][0]["opt_state"], 2e-6)
  assert [int(s["step"]) for s, _ in results] == [2] * 4


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_loss_that_is_not_finite_changes_not_one_bit(single, bad):
  _, micro = split(extra=())
  state, _ = single.update(single.state(), micro)
  before = jax.device_get(state)
  spoiled = [dict(b) for b in micro]
  spoiled[1]["advantages"] = np.where(spoiled[1]["trajectory"] == 0, bad, spoiled[1]["advantages"]).astype(np.float32)
  state, out = single.update(state, spoiled)
  assert out["finite"] is False and not (np.isfinite(out["loss"]) and np.isfinite(out["grad_norm"]))
  same_bits(state, before)
  again, out = single.update(state, micro)  # and learning goes on from there
  expected, _ = single.update(jax.device_put(before), micro)
  assert out["finite"] is True and int(again["step"]) == 2
  same_bits(again["params"], expected["params"])


@pytest.mark.parametrize("bad", [np.inf, np.nan, 3e38])
def test_a_gradient_that_is_not_finite_changes_not_one_bit(single, bad):
  state = single.state()
  before = jax.device_get(state)
  grads, _ = single.fns.zeros(state["params"])
  grads = dict(grads, final_norm=grads["final_norm"].at[:2].set(bad))
  state, info = single.fns.apply(state, (grads, jnp.float32(1.0)))
  assert not bool(info["finite"])
  same_bits(state, before)


def test_without_a_batch_the_state_comes_back_as_it_was(single):
  state = single.state()
  assert learner.update(state, [], single.fns, 1.0) == (state, {})


def test_rows_without_weight_or_advantage_train_nothing(single):
  rows, advantages, weights = make_rows()
  batch, = emit(rows, advantages, weights, extra=())
  state, out = single.update(single.state(), [dict(batch, weights=np.zeros_like(batch["weights"]))], 0.0)
  assert out["loss"] == out["grad_norm"] == 0 and out["finite"] and out["tokens"] == (0, 0)
  _, out = single.update(state, [dict(batch, advantages=np.zeros_like(batch["advantages"]))])
  assert out["loss"] == out["grad_norm"] == 0
