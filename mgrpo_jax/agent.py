"""One agent, built from its part of the config: model, mesh, sampling engine, train state, update.

Nothing here knows of another agent; they meet in `loop.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mgrpo_jax import checkpoint, learner, origin, warm_start
from mgrpo_jax.errors import UserError, user_input
from mgrpo_jax.method import alignment
from mgrpo_jax.policy import lora, sharding, transformer
from mgrpo_jax.rollout import controller, engine
from mgrpo_jax.tasks import atlas, atlas_demos, chat_demos
from mgrpo_jax.tools import web
from mgrpo_jax.trajectory import Trajectory, Turn


@dataclasses.dataclass
class Agent:
  """What the loops hold of one agent.

  Attributes:
    name, config: its name and its part of the config.
    model: the pure functions of its policy.
    mesh: its devices.
    engine: samples with the weights of `version`.
    runtime: how its trajectories are run (prompt, tools, budgets).
    state: {"params", "opt_state", "step"}; with adapters, "params" are these alone.
    version: number of finished steps (a frozen agent counts as current).
    options, fns: its loss and its compiled update.
    reference: the parameters it started from, on the mesh, when a KL term needs them.
    frozen: the base under its adapters, or None; agents that begin from the same weights share it.
  """

  name: str
  config: Any
  model: transformer.Transformer
  mesh: jax.sharding.Mesh
  engine: engine.LocalEngine
  runtime: controller.AgentRuntime
  options: learner.LossOptions
  fns: learner.UpdateFns
  state: learner.State
  version: int = 0
  reference: Any = None
  frozen: Any = None

  @property
  def trainable(self) -> bool:
    return self.config.trainable

  def place(self, batch: dict) -> dict:
    """A host batch on the agent's mesh, rows over its data axis, with what the loss needs of other policies.

    The proximal policy is the one of this moment: place all batches of a step before its first update.
    """
    batch = sharding.shard_batch(batch, self.mesh, self.model.rules)
    if self.options.proximal:
      batch["proximal_logprobs"] = self.fns.logprobs(self.state["params"], batch, self.frozen)
    if self.options.kl_coef:
      batch["ref_logprobs"] = self.fns.logprobs(self.reference, batch, self.frozen)
    return batch

  def publish(self, version: int) -> None:
    """Give the current parameters to the engine as this version: it samples with the same buffers that the next update takes over."""
    self.version = version
    self.engine.set_weights(self.state["params"], version)

  def with_weights(self, params) -> None:
    """Let the engine sample with other parameters (for evaluations); `publish` ends it."""
    self.engine.set_weights(params, self.version)

  def warm_up(self, rows: int, length: int) -> None:
    """Compile everything that a step runs, so that no later step compiles anything."""
    self.engine.warm_up()
    if not self.trainable:
      return
    batch = self.place(blank_batch(rows, length))
    # two micro-batches: the second one starts from another's sums
    learner.update(jax.tree.map(jnp.copy, self.state), [batch] * 2, self.fns, 1.0, self.frozen)


def blank_batch(rows: int, length: int) -> dict:
  """A host batch as an update gets it, with nothing to learn in it."""
  blank = Trajectory("", "", 0, turns=[Turn(*(np.zeros(n, np.int32) for n in (2, 0, 0, 0)))])
  return next(alignment.emit_batches([blank], [0.0], [1.0], rows=rows, length=length))


def build_meshes(config, devices) -> dict[str, jax.sharding.Mesh]:
  """One mesh per agent: disjoint devices if there are enough, else shared."""
  shapes = {name: a.mesh.to_dict() for name, a in config.agents.items()}
  try:
    return sharding.partition_devices(devices, shapes)
  except ValueError as error:
    raise UserError(f"config.agents.<name>.mesh: {error}") from error


def check(config, meshes, tokenizers) -> None:
  """Refuse, before anything compiles, models that do not fit their mesh and weights that do not fit their model.

  Raises:
    UserError: names the agent, and the parameter with its shapes.
  """
  for name, mesh in meshes.items():
    model = build_model(name, config, tokenizers[name])
    params = jax.eval_shape(lambda m=model: m.init(jax.random.key(0)))
    with user_input(f"config.agents.{name}.mesh"):
      sharding.param_shardings(params, mesh, model.rules)
    origin.check(origin.find(config.agents[name].init, name), model)
    if config.train.warm_start not in BUILT_IN:
      with user_input(f"config.train.warm_start, agent {name!r}"):
        checkpoint.load_weights(_weights_of(name, config), trained_part(model, params))


def build_model(name: str, config, tokenizer, mesh=None) -> transformer.Transformer:
  """The model of an agent, as pure functions for a mesh; with model.vocab_size set, `tokenizer` may be None.

  Raises:
    UserError: fewer tokens than the tokenizer has; open weights of a model that is not supported.
  """
  opened = origin.model_config(origin.find(config.agents[name].init, name), config.agents[name])
  with user_input(f"config.agents.{name}.rules"):
    rules = sharding.DEFAULT_RULES.but(config.agents[name].rules)
  if opened is not None:
    return transformer.Transformer(opened, mesh, rules)
  settings = config.agents[name].model.to_dict()
  known = tokenizer.vocab_size if tokenizer is not None else 0
  settings["vocab_size"] = settings["vocab_size"] or known
  if settings["vocab_size"] < known:
    raise UserError(f"config.agents.{name}.model.vocab_size={settings['vocab_size']} is less than the {known} tokens of the tokenizer")
  return transformer.Transformer(transformer.ModelConfig(**settings), mesh, rules)


def build_update(name: str, config, model):
  """(optimizer, loss options, compiled pieces of the update) of an agent."""
  optimizer = learner.make_optimizer(**config.agents[name].optimizer.to_dict())
  options = learner.LossOptions(temperature=float(config.rollout.temperature), **config.method.loss.to_dict())
  return optimizer, options, learner.make_update(model, optimizer, options, chunk=config.train.logprob_chunk)


def engine_shapes(name: str, config, stop_tokens: tuple[int, ...]) -> engine.EngineConfig:
  """The fixed shapes of an agent's engine."""
  r = config.rollout
  return engine.EngineConfig(stop_tokens, slots=r.slots, max_length=config.agents[name].limits.context, prefill_rows=r.prefill_rows,
                             buckets=tuple(r.prefill_buckets), decode_chunk=r.decode_chunk)


def build(name: str, config, mesh, tokenizer, *, bases: dict, tools=None, progress=None) -> Agent:
  """One agent with its warm-started parameters.

  Args:
    config: the whole config.
    bases: open weights that are on a mesh already; those of this agent are added if they stay frozen.
    tools: makes a tool session from a seed, or None.
    progress: called as progress(total, text) -> callable(step, loss) while a warm start is trained.
  """
  a = config.agents[name]
  model = build_model(name, config, tokenizer, mesh)
  optimizer, options, fns = build_update(name, config, model)
  params, frozen = initial_params(name, config, model, mesh, tokenizer, bases=bases, progress=progress)
  sampler = engine.LocalEngine(model, params, engine_shapes(name, config, tokenizer.stop_tokens), mesh=mesh, frozen=frozen, copy=False)
  runtime = controller.AgentRuntime(
    name, sampler, tokenizer, controller.Limits(**a.limits.to_dict()), tools=tools if a.tools else None,
    tool_names=tuple(a.tools), delegates=tuple(a.delegates), system=a.prompt, thinking=config.rollout.thinking)
  reference = sharding.place(params, mesh, model.rules) if options.kl_coef else None
  state = learner.init_state(params, optimizer)
  return Agent(name, a, model, mesh, sampler, runtime, options, fns, state, reference=reference, frozen=frozen)


def initial_params(name: str, config, model, mesh, tokenizer, *, bases: dict | None = None, progress=None) -> tuple[dict, dict | None]:
  """(what is trained, what stays frozen under it or None), on the agent's mesh.

  What is trained comes from another run, from a file of a folder, is shipped or cached, or is trained now on
  demonstrations, from open weights or from nothing.
  """
  a, how = config.agents[name], config.train.warm_start
  w, seed = a.warm_start, jax.random.key(a.warm_start.seed)
  source = origin.find(a.init, name)
  frozen = _shared_base(source, model, mesh, bases) if a.lora.rank else None
  abstract = trained_part(model, jax.eval_shape(model.init, seed))

  def fresh():
    if frozen is not None:
      return origin.adapters(model, seed, mesh)
    return sharding.init_sharded(model, seed, mesh, model.rules) if source.folder is None else origin.base(source, model, mesh)

  path = _weights_of(name, config) if how not in BUILT_IN else None
  if path is None and source.run is not None:
    return origin.trained(source, name, sharding.abstract(abstract, sharding.param_shardings(abstract, mesh, model.rules))), frozen
  if path is None and (how == "none" or not demonstrations(name, config, 1)):
    return fresh(), frozen
  settings, key = warm_start_key(name, config, model, tokenizer)
  path = path or (None if how == "rebuild" else warm_start.find(key))
  if path is not None:
    return sharding.place(checkpoint.load_weights(path, abstract)[0], mesh, model.rules), frozen
  report = progress(w.steps, f"warm start of {name}") if progress else None
  with user_input(f"the warm start of {name}"):
    params, loss = warm_start.train(model, fresh(), tokenizer, demonstrations(name, config, w.count), settings, system=a.prompt, frozen=frozen,
                                    report=report, place=lambda b: sharding.shard_batch(b, mesh, model.rules))
  if not np.isfinite(loss):
    raise UserError(f"the warm start of {name} diverged (loss {loss}); lower config.agents.{name}.warm_start.learning_rate")
  path = warm_start.cache_folder() / f"{key}.safetensors"
  try:
    warm_start.save(path, params, {"agent": name, "loss": f"{loss:.4f}", "steps": str(w.steps)})
  except OSError as error:  # it is only made again the next time
    print(f"warning: the warm start of {name} cannot be kept in {path.parent} ({error.strerror}); set MGRPO_CACHE", file=sys.stderr)
  return params, frozen


def trained_part(model, params: dict) -> dict:
  """The part of a model's parameters that is trained."""
  return lora.split(params)[1] if model.config.lora_rank else params


def _shared_base(source: origin.Origin, model, mesh, bases: dict | None) -> dict:
  key = (source.folder, origin.without_adapters(model), mesh)
  bases = {} if bases is None else bases
  if key not in bases:
    bases[key] = origin.base(source, model, mesh)
  return bases[key]


BUILT_IN = ("shipped", "rebuild", "none")  # values of config.train.warm_start that are not a folder


def _weights_of(name: str, config) -> pathlib.Path:
  how = config.train.warm_start
  path = pathlib.Path(how).expanduser() / f"{name}.safetensors"
  if not path.is_file():
    raise UserError(f"config.train.warm_start={how!r} is neither {', '.join(BUILT_IN)} nor a folder with {path.name}")
  return path


def warm_start_key(name: str, config, model, tokenizer) -> tuple[warm_start.Settings, str]:
  """The settings of an agent's warm start, and the name of the weights that they make."""
  a = config.agents[name]
  w = a.warm_start
  length = 256 * -(-a.limits.context // 256)
  settings = warm_start.Settings(w.steps, w.batch, w.learning_rate, w.warmup_updates, w.permute, w.count, w.seed,
                                 rows=max(1, w.tokens // length), length=length)
  return settings, warm_start.content_hash(model.config, tokenizer.fingerprint, demonstrations(name, config, PROBE), settings,
                                           system=a.prompt, base=origin.fingerprint(origin.find(a.init, name)))


# So many demonstrations stand for all of them in the hash that names a warm start: making all takes long.
PROBE = 128


def demonstrations(name: str, config, count: int) -> list[atlas_demos.Demonstration]:
  """The demonstrations of an agent in the user's file, or the first `count` scripted ones, as its config mixes them."""
  if config.warm_start.path:
    return chat_demos.read(config.warm_start.path, {n: a.prompt for n, a in config.agents.items()})[name]
  w, pages = config.agents[name].warm_start, atlas.Atlas.load()
  flaws = w.flaws.to_dict()
  browse = functools.partial(web.Browser, web.LocalWeb(pages.pages))
  if w.demonstrations == "main":
    sub = config.agents[name].delegates[0]
    return list(atlas_demos.main_demonstrations(pages, count, w.seed, flaws=flaws, agent=sub))
  make = {"search": atlas_demos.search_demonstrations, "single": atlas_demos.single_demonstrations}[w.demonstrations]
  return list(make(pages, browse, count, w.seed, flaws=flaws))
