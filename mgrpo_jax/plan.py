"""Will it fit? Memory and FLOPs of every agent on a named chip, before anything is allocated.

What is held all the time (parameters, optimizer, cache) is arithmetic over shapes and shardings. What programs need
on top comes from the TPU's own compiler, through `libtpu`, which needs no TPU; where it cannot be had (GPUs, no
libtpu) it is estimated, and the plan says so.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import sys
import time

import jax
from jax.experimental import topologies
from jax.sharding import AbstractMesh, AxisType, Mesh

from mgrpo_jax import agent as agent_lib
from mgrpo_jax import learner, world
from mgrpo_jax.errors import UserError, one_line, user_input
from mgrpo_jax.policy import attention, lora, sharding
from mgrpo_jax.policy.transformer import Transformer
from mgrpo_jax.rollout import engine
from mgrpo_jax.tasks import atlas

GIB = 2**30
USABLE = 0.95  # of the memory: the rest is the runtime's, or lost between buffers


@dataclasses.dataclass(frozen=True)
class Chip:
  """hbm: GiB of memory. tflops: dense bfloat16 peak, 1e12 per second. slices: number of chips -> TPU topology."""

  hbm: float
  tflops: float
  slices: dict[int, str] = dataclasses.field(default_factory=dict)


_FLAT = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_CUBE = {1: "1x1x1", 4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8", 512: "8x8x8"}
CHIPS = {
  "v5e": Chip(16, 197, _FLAT),  # https://cloud.google.com/tpu/docs/v5e
  "v5p": Chip(95, 459, _CUBE),  # https://cloud.google.com/tpu/docs/v5p
  "v6e": Chip(32, 918, _FLAT),  # https://cloud.google.com/tpu/docs/v6e
  "a100": Chip(80, 312),  # https://www.nvidia.com/en-us/data-center/a100 (SXM, 80 GB)
  "h100": Chip(80, 989),  # https://www.nvidia.com/en-us/data-center/h100 (SXM; half of the figure with sparsity)
  "h200": Chip(141, 989),  # https://www.nvidia.com/en-us/data-center/h200 (SXM; half of the figure with sparsity)
}


@dataclasses.dataclass(frozen=True)
class AgentPlan:
  """One agent; all sizes in bytes per device.

  Attributes:
    parameters, active: how many numbers, and how many of them one token is multiplied with.
    held: by name, what lies in memory all the time.
    programs: by name, what a program needs on top while it runs; None where the compiler refused it (`refusals`).
    flops: of one token, "sampled" and "trained", at a context that is half full.
    tokens: of one micro-batch.
    seconds: time to compile, or None for an estimate.
  """

  name: str
  mesh: dict[str, int]
  parameters: int
  active: int
  held: dict[str, int]
  programs: dict[str, int | None]
  flops: dict[str, float]
  tokens: int
  seconds: float | None
  refusals: dict[str, str] = dataclasses.field(default_factory=dict)

  @property
  def peak(self) -> float:
    return math.inf if self.refusals else sum(self.held.values()) + max(self.programs.values())

  def fits(self, chip: Chip) -> bool:
    return self.peak <= USABLE * chip.hbm * GIB


def plan(config, chip: str, *, slices: int = 1, report=lambda text: print(text, file=sys.stderr)) -> list[AgentPlan]:
  """The plan of every agent, each on devices of its own. Agents of equal settings are compiled once.

  Args:
    chip: a name in CHIPS.
    slices: TPU slices that each agent's first mesh axis (data) goes across.
    report: called with a line before what takes a while.

  Raises:
    UserError: a mesh that no slice of this chip has, or that does not fit the model.
  """
  if slices > 1 and not CHIPS[chip].slices:
    raise UserError(f"--slices={slices} is for TPUs; {chip} is none")
  tokenizer = None
  if any(a.model.vocab_size is None for a in config.agents.values()):
    tokenizer = world.build_tokenizer(config, atlas.Atlas.load())
  compiled = bool(CHIPS[chip].slices) and importlib.util.find_spec("libtpu") is not None
  done, plans = {}, []
  for name, a in config.agents.items():
    with user_input(f"config.agents.{name}.mesh"):
      mesh = topology_mesh(chip, a.mesh.to_dict(), slices) if compiled else abstract_mesh(a.mesh.to_dict())
      model = agent_lib.build_model(name, config, tokenizer, mesh)
      key = (model.config, str(a.mesh), a.limits.context, str(a.optimizer))
      if key not in done and compiled:
        report(f"compiling the programs of {name} for {mesh.size} x {chip}")
      done[key] = done.get(key) or plan_agent(name, config, model, mesh)
    plans.append(dataclasses.replace(done[key], name=name))
  return plans


def plan_agent(name: str, config, model: Transformer, mesh: Mesh | AbstractMesh) -> AgentPlan:
  """One agent on a mesh: compiled for its devices, or estimated where it is abstract."""
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  params = sharding.abstract(shapes, sharding.param_shardings(shapes, mesh, model.rules))
  optimizer, options, fns = agent_lib.build_update(name, config, model)
  trained, frozen = agent_lib.trained_part(model, params), lora.split(params)[0] if model.config.lora_rank else None
  state = learner.abstract_state(trained, optimizer)
  engine_config = agent_lib.engine_shapes(name, config, stop_tokens=(0,))
  sampler = engine.abstract_state(model, engine_config, mesh)
  weights, cache = device_bytes(params), device_bytes(sampler)
  held = {"parameters": weights, "optimizer": device_bytes(state["opt_state"]), "KV cache": cache}
  if "master" in state:
    held["float32 master"] = device_bytes(state["master"])
  if options.kl_coef:
    held["reference"] = device_bytes(trained)
  rows, length = config.train.rows, config.train.length
  seconds, refusals = None, {}
  if isinstance(mesh, AbstractMesh):
    programs = _estimate(model, mesh, rows, length, config.train.logprob_chunk, engine_config, params, cache)
  else:
    start = time.monotonic()
    batch = agent_lib.blank_batch(rows, length)
    for other, needed in (("proximal_logprobs", options.proximal), ("ref_logprobs", options.kl_coef)):
      batch |= {other: batch["behavior_logprobs"]} if needed else {}
    lowered = learner.lower(fns, state, sharding.abstract(batch, sharding.batch_shardings(batch, mesh, model.rules)), frozen)
    lowered |= engine.lower(model, engine_config, params, mesh)
    inside = {"gradients": weights, "apply": device_bytes(state), "prefill": weights + cache, "decode": weights + cache}
    programs = {}
    for program, low in lowered.items():
      programs[program], refusal = _compile(low, inside[program])
      refusals |= {program: refusal} if refusal else {}
    seconds = time.monotonic() - start
  c = model.config
  active = active_parameters(shapes, c)
  forward = lambda context: 2.0 * active + 4.0 * c.num_layers * c.num_heads * c.head_dim * context  # noqa: E731
  flops = {"sampled": forward(engine_config.max_length / 2), "trained": (4 if c.remat == "full" else 3) * forward(length / 2)}
  return AgentPlan(name, dict(mesh.shape), sum(x.size for x in jax.tree.leaves(shapes)), active, held, programs, flops,
                   rows * length, seconds, refusals)


def describe(plans: list[AgentPlan], chip: str) -> str:
  """The plans as a text for people: GiB per device."""
  hbm, lines = CHIPS[chip].hbm, []
  sizes = lambda items: "  ".join(f"{k} {'?' if v is None else _gib(v)}" for k, v in items.items())  # noqa: E731
  for p in plans:
    devices = math.prod(p.mesh.values())
    how = "an estimate, not compiled" if p.seconds is None else f"compiled for it in {p.seconds:.0f} s"
    worst = max(p.programs, key=lambda k: p.programs[k] or 0)
    seconds = p.flops["trained"] * p.tokens / (devices * CHIPS[chip].tflops * 1e12)
    lines += [
      f"{p.name}: {_count(p.parameters)} parameters ({_count(p.active)} active) on {devices} x {chip} "
      f"({', '.join(f'{k}={v}' for k, v in p.mesh.items())}); {how}",
      f"  held, GiB per device     {sizes(p.held)}",
      f"  activations, GiB         {sizes(p.programs)}",
      *(f"  refused by the compiler  {program}: {why}" for program, why in p.refusals.items()),
      f"  peak                     {'?' if p.refusals else _gib(p.peak)} of {hbm} GiB{'' if p.refusals else f' (in {worst})'}: "
      f"{'fits' if p.fits(CHIPS[chip]) else 'DOES NOT FIT'}",
      f"  FLOPs per token          sampled {p.flops['sampled']:.2e}, trained {p.flops['trained']:.2e}; a micro-batch of {p.tokens} tokens "
      f"takes {seconds:.2g} s at the chip's peak or more",
    ]
  return "\n".join(lines)


def device_bytes(tree) -> int:
  """Bytes of abstract arrays on one device."""
  return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def active_parameters(shapes, config) -> int:
  """How many parameters one token is multiplied with: of the experts the chosen ones, of embeddings the head."""
  idle = 0 if config.tie_embeddings else config.vocab_size * config.embed_dim
  idle += 3 * config.num_layers * config.embed_dim * config.expert_dim * (config.num_experts - config.experts_per_token)
  return sum(x.size for x in jax.tree.leaves(shapes)) - idle


# ---- devices


def abstract_mesh(shape: dict[str, int]) -> AbstractMesh:
  return AbstractMesh(tuple(shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * len(shape))


def topology_mesh(chip: str, shape: dict[str, int], slices: int = 1) -> Mesh:
  """A mesh of TPUs that are not there, to compile for.

  Raises:
    ValueError: no slice of this chip has so many.
  """
  # read when libtpu is loaded; what a TPU machine says of itself stays
  for key, value in dict(TPU_SKIP_MDS_QUERY="1", TPU_ACCELERATOR_TYPE="v5litepod-8", TPU_WORKER_HOSTNAMES="localhost", TPU_WORKER_ID="0",
                         ALLOW_MULTIPLE_LIBTPU_LOAD="1", TPU_LOG_DIR="disabled").items():
    os.environ.setdefault(key, value)
  known, need = CHIPS[chip].slices, math.prod(shape.values())
  if need % slices or need // slices not in known:
    raise ValueError(f"{shape} needs {need} chips, but {slices} slice(s) of {chip} have {slices} x one of {', '.join(map(str, known))}")
  options = dict(num_slices=slices) if slices > 1 else {}
  if need // slices < 4:
    options["chips_per_host_bounds"] = [1, 1, 1]
  return sharding.make_mesh(shape, topologies.get_topology_desc(f"{chip}:{known[need // slices]}", "tpu", **options).devices)


def _compile(lowered, held: int) -> tuple[int | None, str | None]:
  """(bytes that a program needs on a device beside `held`, why the compiler refused it)."""
  try:
    # with least effort: matrix products are not tuned, which takes minutes and changes little in memory
    memory = lowered.compile(compiler_options={"exec_time_optimization_effort": -1.0}).memory_analysis()
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    return None, one_line(error).removeprefix("RESOURCE_EXHAUSTED: ")[:200]
  return (memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes + memory.temp_size_in_bytes
          - held), None


# ---- without a compiler


def _estimate(model, mesh, rows, length, chunk, engine_config, params, cache) -> dict[str, int]:
  """What the programs need on top, in bytes per device: the large pieces only, none of them shared.

  params: abstract parameters. cache: bytes per device.
  """
  c, part = model.config, lambda axis: sharding.axis_size(axis, mesh, model.rules)
  width, heads = jax.numpy.dtype(c.dtype).itemsize, part("heads")
  weights = device_bytes(params)
  floats = device_bytes(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, "float32", sharding=x.sharding), params))
  # a token has one wide mlp, or goes to several experts, sorted in and out again
  mlp = (c.experts_per_token * (3 * c.expert_dim / part("mlp") + 3 * c.embed_dim) if c.num_experts else 3 * c.mlp_dim / part("mlp"))

  def layer(tokens):  # what one layer makes: two norms, q, k, v before and after turning, attention, mlp
    return tokens * (8 * c.embed_dim + width * (2 * c.embed_dim + (3 * c.num_heads + 4 * c.num_kv_heads) * c.head_dim / heads + mlp))

  def scores(queries, keys):  # of one layer
    block = min(queries, attention.BLOCK) * attention.BLOCK
    return c.num_heads / heads * (queries * keys if keys <= attention.DENSE_LENGTH else block) * (4 + width)

  batch = rows / part("batch")
  tokens, one = batch * length, layer(batch * length) + batch * scores(length, length)
  # with remat: the inputs of all layers, and one layer made again; the gradient of a layer is as large as the layer
  kept = c.num_layers * one if c.remat == "none" else c.num_layers * tokens * c.embed_dim * width + one
  gathered = 2 * weights * part("embed") / c.num_layers if part("embed") > 1 else 0
  cast = floats * width / 4 if width < weights / floats * 4 else 0  # the weights in the compute type, made once per call
  slots, conversation = engine_config.slots / part("slots"), cache * part("slots") / engine_config.slots
  wide = 12 * c.vocab_size / part("vocab")  # logits, noise and probabilities of one token
  prefill_rows, bucket = engine_config.prefill_rows, engine_config.buckets[-1]
  out = {
    "gradients": floats + weights + kept + one + gathered + batch * chunk * wide,
    "apply": floats,
    "prefill": cast + prefill_rows * (2 * conversation + layer(bucket) + scores(bucket, engine_config.max_length) + wide),
    "decode": cast + slots * (layer(1) + scores(1, engine_config.max_length) + wide),
  }
  return {k: int(v) for k, v in out.items()}


def _gib(size: float) -> str:
  return f"{size / GIB:.2f}" if size >= GIB / 100 else f"{size / GIB:.1g}"


def _count(n: int) -> str:
  return next((f"{n / unit:.1f} {word}" for unit, word in ((1e9, "billion"), (1e6, "million")) if n >= unit), str(n))
