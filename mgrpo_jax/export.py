"""From a run to a Hugging Face folder, which is how trained weights are served elsewhere."""

from __future__ import annotations

import pathlib

import jax

from mgrpo_jax import agent as agent_lib
from mgrpo_jax import origin, run, run_folder
from mgrpo_jax.config import MAIN
from mgrpo_jax.errors import UserError
from mgrpo_jax.policy import lora, sharding, weights


def export(path: str, out: str, *, agent: str = MAIN, step: str = "best", dtype: str | None = None) -> pathlib.Path:
  """Writes the weights of one agent of a run as the open model they began as, adapters merged in.

  Args:
    path: run folder.
    out: folder to write, new or empty.
    step: "best" on validation, "last", or a number.
    dtype: of the file; None keeps that of the parameters.

  Raises:
    UserError: no such run, agent or checkpoint; an agent that did not begin from open weights; a folder in use.
  """
  folder, target = pathlib.Path(path).expanduser(), pathlib.Path(out).expanduser()
  if not (folder / run_folder.CONFIG).is_file():
    raise UserError(f"{path!r} is no run folder: it has no {run_folder.CONFIG}; give the run_dir of a training run")
  if target.exists() and (not target.is_dir() or any(target.iterdir())):
    raise UserError(f"--out={out!r} is not empty; name a new folder")
  config = run.saved_config(folder / run_folder.CONFIG)
  if agent not in config.agents:
    raise UserError(f"--agent={agent!r} is not in the run; it has {', '.join(config.agents)}")
  source = origin.find(config.agents[agent].init, agent)
  if source.folder is None:
    raise UserError(f"agent {agent!r} of {path!r} was made from nothing, with a tokenizer and a model of this project only; "
                    "what began from open weights (config.agents.<name>.init) can be exported")
  model, mesh = agent_lib.build_model(agent, config, None), sharding.make_mesh({"data": 1})
  abstract = agent_lib.trained_part(model, jax.eval_shape(model.init, jax.random.key(0)))
  abstract = sharding.abstract(abstract, sharding.param_shardings(abstract, mesh, model.rules))
  params = origin.trained(origin.Origin(source.folder, folder, step), agent, abstract)
  if model.config.lora_rank:
    params = lora.merge(lora.join(origin.base(source, model, mesh), params), model.config.lora_alpha / model.config.lora_rank)
  weights.write(target, params, origin.without_adapters(model), source.folder, dtype=dtype)
  return target
