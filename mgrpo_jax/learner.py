"""Train state and update of one agent: plain pytrees and jitted functions.

    state = {"params", "opt_state", "step"};  update(state, batches, ...) -> (state, metrics)

"params" are what is trained: all parameters, or adapters (policy/lora.py) beside a `frozen` base that every function
takes as well. Parameters of less than float32 have their exact values in "master", which the optimizer moves.

An optimizer update may take several micro-batches. Their losses are divided by the normaliser of the whole
update (DESIGN decision 7), so gradients simply add up and nothing depends on how the rows were split.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mgrpo_jax.method import loss as loss_lib
from mgrpo_jax.policy import logprobs as logprobs_lib
from mgrpo_jax.policy import lora, sharding

State = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class LossOptions:
  """Static options of the loss; names and meanings are those of `method.loss.clipped_ratio_loss`."""

  clip_low: float = 0.2
  clip_high: float = 0.28
  ratio: str = "token"
  aggregate: str = "seq-mean-token-mean"
  dual_clip: float | None = None
  proximal: bool = False
  importance_cap: float | None = None
  kl_coef: float = 0.0
  kl: str = "k3"
  entropy_coef: float = 0.0
  norm_length: int | None = None
  temperature: float = 1.0


def make_optimizer(*, learning_rate: float, warmup_updates: int = 0, decay_updates: int = 0, b1: float = 0.9, b2: float = 0.98, eps: float = 1e-8,
                   weight_decay: float = 0.0, clip_norm: float = 0.5) -> optax.GradientTransformation:
  """AdamW with gradient clipping and a linear warm-up; matrices alone get weight decay.

  Args:
    decay_updates: 0 keeps the rate constant after the warm-up; else a cosine to a tenth of it over so many updates.
  """
  rate = learning_rate
  if decay_updates:
    rate = optax.warmup_cosine_decay_schedule(learning_rate / max(warmup_updates, 1), learning_rate, warmup_updates,
                                              max(decay_updates, warmup_updates + 1), learning_rate / 10)
  elif warmup_updates:
    # update 0 already moves: the ramp is (n + 1) / warmup
    rate = optax.linear_schedule(learning_rate / warmup_updates, learning_rate, max(warmup_updates - 1, 1))
  decay_mask = functools.partial(jax.tree.map, lambda p: p.ndim > 1)
  return optax.chain(optax.clip_by_global_norm(clip_norm),
                     optax.adamw(rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=decay_mask))


def init_state(params, optimizer: optax.GradientTransformation) -> State:
  """Train state around parameters (jax arrays, used as they are); moments are created where their parameters lie."""
  places = jax.tree.map(lambda x: x.sharding, abstract_state(params, optimizer))
  state = {"params": jax.device_put(params, places["params"]), "step": jax.device_put(jnp.zeros((), jnp.int32), places["step"])}
  if "master" in places:
    params = state["master"] = jax.jit(_float32, out_shardings=places["master"])(params)
  return state | {"opt_state": jax.jit(optimizer.init, out_shardings=places["opt_state"])(params)}


def abstract_state(params, optimizer: optax.GradientTransformation) -> State:
  """The shapes, types and places of a train state around such parameters (arrays, or ShapeDtypeStructs with shardings)."""
  param_places, scalar = _places(params)
  shapes = {"params": params, "step": jax.ShapeDtypeStruct((), jnp.int32)}
  places = {"params": param_places, "step": scalar}
  if any(p.dtype != jnp.float32 for p in jax.tree.leaves(params)):
    params = shapes["master"] = jax.eval_shape(_float32, params)
    places["master"] = param_places
  shapes["opt_state"] = jax.eval_shape(optimizer.init, params)
  places["opt_state"] = optax.tree.map_params(optimizer, lambda _, place: place, shapes["opt_state"], param_places,
                                              transform_non_params=lambda _: scalar)
  return sharding.abstract(shapes, places)


def _float32(tree):
  return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def _places(params):
  """(sharding of each parameter, sharding of a scalar beside them)."""
  places = jax.tree.map(lambda p: p.sharding, params)
  first = jax.tree.leaves(places)[0]
  if isinstance(first, jax.sharding.NamedSharding):
    return places, jax.sharding.NamedSharding(first.mesh, jax.sharding.PartitionSpec())
  return places, first


def _jit_in_place(function: Callable, places: Callable, donate: tuple[int, ...] = ()) -> Callable:
  """`jax.jit(function)` whose outputs lie where `places(*args)` says; one program per placement.

  Left to itself the compiler may put an output elsewhere than the input that it replaces in the next call, and then
  compile that call again.
  """
  programs: dict = {}

  def program(*args):
    out = places(*args)
    leaves, structure = jax.tree.flatten(out)
    key = (tuple(leaves), structure)
    if key not in programs:
      programs[key] = jax.jit(function, out_shardings=out, donate_argnums=donate)
    return programs[key]

  def call(*args):
    return program(*args)(*args)

  call.lower = lambda *args: program(*args).lower(*args)
  return call


@dataclasses.dataclass(frozen=True)
class UpdateFns:
  """The compiled pieces of an update (see `make_update`).

  Attributes:
    gradients: (params, (grads, loss) so far, batch, normalizer, frozen) -> ((grads, loss), sums): adds one micro-batch.
    apply: (state, (grads, loss)) -> (state, info): one optimizer step; a non-finite loss or gradient changes nothing.
    logprobs: (params, batch, frozen) -> f32[B, T], for proximal and reference policies.
    zeros: params -> (zero gradients, zero loss), float32.
  """

  gradients: Callable
  apply: Callable
  logprobs: Callable
  zeros: Callable


def make_update(model, optimizer: optax.GradientTransformation, options: LossOptions, *, supervised: bool = False,
                chunk: int = 64) -> UpdateFns:
  """Compile the update of one agent.

  Args:
    model: the policy's model (static).
    supervised: maximise the log-likelihood of the masked tokens instead (the warm start); the batch then needs no
      advantages, and `weights` weigh the sequences.
    chunk: positions per chunk of the log-probability computation (never a full [B, T, V]).
  """

  def batch_logprobs(params, batch, frozen):
    return logprobs_lib.token_logprobs(model, lora.join(frozen, params), batch["tokens"], batch["positions"], batch["segment_ids"],
                                       temperature=options.temperature, chunk=chunk, wanted=batch["mask"])

  def batch_loss(params, batch, normalizer, frozen=None):
    lp, entropy = batch_logprobs(params, batch, frozen)
    shared = dict(segment_ids=batch["segment_ids"], aggregate=options.aggregate, normalizer=normalizer,
                  norm_length=options.norm_length)
    if supervised:
      return -loss_lib.masked_aggregate(lp, batch["mask"], batch["weights"], **shared), {}
    value, metrics = loss_lib.clipped_ratio_loss(
      lp, batch["behavior_logprobs"], batch["advantages"], batch["mask"], batch["weights"],
      clip_low=options.clip_low, clip_high=options.clip_high, ratio=options.ratio, dual_clip=options.dual_clip,
      importance_cap=options.importance_cap, kl_coef=options.kl_coef, kl=options.kl, **_other_policies(batch, options),
      **shared)
    if options.entropy_coef:
      value -= options.entropy_coef * loss_lib.masked_aggregate(entropy, batch["mask"], batch["weights"], **shared)
    seen = batch["mask"] & (jnp.append(batch["weights"], 0.0)[batch["segment_ids"]] > 0)
    count = jnp.sum(seen)
    metrics = dict(metrics, entropy=(jnp.sum(jnp.where(seen, jax.lax.stop_gradient(entropy), 0.0)), count))
    return value, metrics

  def gradients(params, so_far, batch, normalizer, frozen=None):
    (value, metrics), grads = jax.value_and_grad(batch_loss, has_aux=True)(params, batch, normalizer, frozen)
    return jax.tree.map(jnp.add, so_far, (grads, value)), metrics

  def apply(state, total):
    grads, loss = total
    norm = optax.global_norm(grads)
    good = jnp.isfinite(norm) & jnp.isfinite(loss)
    exact = state.get("master", state["params"])
    updates, opt_state = optimizer.update(grads, state["opt_state"], exact)
    exact = optax.apply_updates(exact, updates)
    new = {"params": jax.tree.map(lambda x, p: x.astype(p.dtype), exact, state["params"]), "opt_state": opt_state,
           "step": state["step"] + 1}
    new |= {"master": exact} if "master" in state else {}
    # select, so that a skipped update leaves parameters, moments and counters exactly as they were
    return jax.tree.map(lambda a, b: jnp.where(good, a, b), new, state), {"loss": loss, "grad_norm": norm, "finite": good}

  return UpdateFns(
    gradients=_jit_in_place(gradients, lambda params, *_: (_places(params), None), donate=(1,)),
    apply=_jit_in_place(apply, lambda state, _: (jax.tree.map(lambda x: x.sharding, state), None), donate=(0,)),
    logprobs=jax.jit(lambda params, batch, frozen=None: batch_logprobs(params, batch, frozen)[0]),
    zeros=_jit_in_place(lambda params: (jax.tree.map(lambda p: jnp.zeros(p.shape), params), jnp.zeros(())), _places))


def lower(fns: UpdateFns, state: State, batch: dict, frozen: dict | None = None) -> dict[str, jax.stages.Lowered]:
  """The two programs of an update for abstract inputs (`abstract_state`, and a batch of ShapeDtypeStructs)."""
  total = fns.zeros.lower(state["params"]).out_info
  divisor = jax.ShapeDtypeStruct((), jnp.float32)
  return {"gradients": fns.gradients.lower(state["params"], total, batch, divisor, frozen),
          "apply": fns.apply.lower(state, total)}


def _other_policies(batch: dict, options: LossOptions) -> dict:
  """The log-probabilities of other policies that the options ask for; nothing else in the batch changes the loss."""
  needed = {"proximal_logprobs": options.proximal, "ref_logprobs": options.kl_coef != 0}
  for name, need in needed.items():
    if need and name not in batch:
      raise ValueError(f"the loss options need {name}, which the batch lacks; put `UpdateFns.logprobs` of that policy in it")
  return {name: batch[name] for name, need in needed.items() if need}


def update(state: State, batches: Sequence[dict], fns: UpdateFns, normalizer: float, frozen: dict | None = None) -> tuple[State, dict]:
  """One optimizer update from micro-batches of one fixed shape: (state, metrics). See `dispatch` and `fetch`."""
  state, out = dispatch(state, batches, fns, normalizer, frozen)
  return state, fetch(out)


def dispatch(state: State, batches: Sequence[dict], fns: UpdateFns, normalizer: float, frozen: dict | None = None) -> tuple[State, tuple | None]:
  """Start an update without waiting for it, so that another agent's devices can begin with theirs.

  Args:
    batches: dicts of arrays as `method.alignment.emit_batches` yields them (already on the agent's mesh or host).
    normalizer: the divisor of the whole update (`method.loss.loss_normalizer` over all its rows).
    frozen: parameters that are not trained, where the state has adapters only.

  Returns:
    (state, what `fetch` takes). With no batch the state comes back as it was.
  """
  if not batches:
    return state, None
  total, sums = fns.zeros(state["params"]), []
  divisor = np.float32(normalizer)
  for batch in batches:
    total, metrics = fns.gradients(state["params"], total, batch, divisor, frozen)
    sums.append(metrics)
  state, info = fns.apply(state, total)
  return state, (sums, info)


def fetch(out: tuple | None) -> dict:
  """The metrics of a dispatched update, once it is done.

  Returns:
    (sum, count) pairs over all micro-batches, except `loss` and `grad_norm` (floats) and `finite`; {} if it had no batch.
  """
  if out is None:
    return {}
  sums, info = jax.device_get(out)
  pairs = {k: tuple(float(sum(m[k][i] for m in sums)) for i in (0, 1)) for k in sums[0]}
  return {**pairs, "loss": float(info["loss"]), "grad_norm": float(info["grad_norm"]), "finite": bool(info["finite"])}
