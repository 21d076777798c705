"""Supervised warm start on scripted demonstrations, and where its weights are kept.

A model from nothing cannot be taught by reward alone: it must first write the protocol now and then. The
demonstrations are of mixed quality (tasks/atlas_demos.py), so that what is left to learn are choices. In most of
them the names are replaced by invented ones, consistently within one demonstration (a permutation of the
tokenizer's name pieces): copying then carries over to names never seen.

The result is kept under a hash of everything that makes it (settings, tokenizer, demonstrations): the package
ships the default ones, other settings are trained once and cached.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from mgrpo_jax import checkpoint, learner
from mgrpo_jax.method import alignment
from mgrpo_jax.rollout import conversation
from mgrpo_jax.trajectory import Trajectory

SHIPPED = pathlib.Path(__file__).parent / "assets" / "warm_start"


@dataclasses.dataclass(frozen=True)
class Settings:
  """What makes a warm start, besides model, tokenizer and demonstrations.

  Attributes:
    steps, batch: updates, and demonstrations in each.
    permute: share of demonstrations with invented names.
    count: how many distinct demonstrations.
    rows, length: shape of a micro-batch.
  """

  steps: int
  batch: int
  learning_rate: float
  warmup_updates: int
  permute: float
  count: int
  seed: int
  rows: int
  length: int


def cache_root() -> pathlib.Path:
  """What is kept between runs lies here: MGRPO_CACHE, else the user's cache."""
  return pathlib.Path(os.environ.get("MGRPO_CACHE") or os.path.join(
    os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "mgrpo_jax"))


def cache_folder() -> pathlib.Path:
  """Where warm starts that are not shipped are kept."""
  return cache_root() / "warm_start"


def content_hash(model_config, tokenizer_fingerprint: str, demonstrations: Sequence, settings: Settings, *, system: str = "", base: str = "") -> str:
  """Name of the weights that these inputs make; the first demonstrations stand for all of them."""
  h = hashlib.blake2b(digest_size=8)
  text = json.dumps([_shape(model_config), tokenizer_fingerprint, dataclasses.asdict(settings)], sort_keys=True)
  h.update(text.encode())
  h.update((system + base).encode())
  for d in demonstrations:
    h.update(repr((d.task, list(d.turns))).encode())
  return h.hexdigest()


def _shape(model_config) -> dict:
  """What decides a model's weights: fields that the first shipped ones did not know count where they are set."""
  later = {"qkv_bias", "qk_norm", "rope_scaling", "num_experts", "experts_per_token", "expert_dim", "norm_topk", "param_dtype",
           "lora_rank", "lora_alpha", "lora_layers"}
  how = {"scan_layers", "remat", "attention"}  # change the program, not what it computes
  fields = {f.name: (getattr(model_config, f.name), f.default) for f in dataclasses.fields(model_config)}
  return {"remat": False} | {n: x for n, (x, default) in fields.items() if n not in how and not (n in later and x == default)}


def find(name: str) -> pathlib.Path | None:
  """The file with these weights, shipped or cached."""
  for folder in (SHIPPED, cache_folder()):
    if (path := folder / f"{name}.safetensors").is_file():
      return path
  return None


def tokenize(demonstrations: Sequence, tokenizer, *, system: str = "") -> list[Trajectory]:
  """Demonstrations as trajectories, laid out exactly as rollouts are."""
  return [Trajectory("demonstration", str(i), 0, task=d.task,
                     turns=conversation.demonstration_turns(tokenizer, d.task, d.turns, system=system))
          for i, d in enumerate(demonstrations)]


def permute_names(tokens: np.ndarray, classes: Sequence[np.ndarray], vocab_size: int, rng: np.random.Generator) -> np.ndarray:
  """The same tokens with the pieces of each class permuted consistently: other names, same sense."""
  table = np.arange(vocab_size, dtype=np.int32)
  for ids in classes:
    table[ids] = rng.permutation(ids)
  return table[tokens]


@dataclasses.dataclass
class _Permuted:
  """A trajectory whose names are replaced (what `emit_batches` reads)."""

  tokens: np.ndarray
  mask: np.ndarray
  logprobs: np.ndarray
  versions: np.ndarray


def batches(trajectories: Sequence[Trajectory], tokenizer, settings: Settings) -> Iterator[tuple[list[dict], float]]:
  """Micro-batches of each step and the tokens they teach, in a fixed order given by the seed."""
  plain = [_Permuted(s.tokens, s.mask, s.logprobs, s.versions) for t in trajectories for s in t.segments]
  classes = tokenizer.piece_classes()
  rng = np.random.default_rng([settings.seed, 71])
  order: list[int] = []
  for _ in range(settings.steps):
    while len(order) < settings.batch:
      order += rng.permutation(len(plain)).tolist()
    picked, order = order[: settings.batch], order[settings.batch:]
    rows = []
    for i in picked:
      tokens = plain[i].tokens
      if rng.random() < settings.permute:
        tokens = permute_names(tokens, classes, tokenizer.vocab_size, rng)
      rows.append(dataclasses.replace(plain[i], tokens=tokens))
    ones = np.ones(len(rows), np.float32)
    taught = float(sum(r.mask.sum() for r in rows))
    yield list(alignment.emit_batches(rows, ones, ones, rows=settings.rows, length=settings.length)), taught


def train(model, params, tokenizer, demonstrations: Sequence, settings: Settings, *, place: Callable = lambda b: b,
          system: str = "", frozen=None, report: Callable[[int, float], None] | None = None):
  """Train parameters on demonstrations.

  Args:
    params: fresh parameters (on the agent's mesh); they are donated.
    frozen: the base, where these are adapters.
    place: puts a batch on the agent's mesh.
    report: called with (step, loss in nats per sampled token) after each step.

  Returns:
    (params, final mean loss over the last tenth of the steps).
  """
  optimizer = learner.make_optimizer(learning_rate=settings.learning_rate, warmup_updates=settings.warmup_updates,
                                     decay_updates=settings.steps, clip_norm=1.0)
  options = learner.LossOptions(aggregate="token-mean")
  fns = learner.make_update(model, optimizer, options, supervised=True)
  state, losses = learner.init_state(params, optimizer), []
  steps = batches(tokenize(demonstrations, tokenizer, system=system), tokenizer, settings)
  for step, (micro, taught) in enumerate(steps):
    state, metrics = learner.update(state, [place(b) for b in micro], fns, taught, frozen)
    losses.append(metrics["loss"])
    if report:
      report(step, losses[-1])
  return state["params"], float(np.mean(losses[-max(1, len(losses) // 10):])) if losses else float("nan")


def save(path: pathlib.Path, params, metadata: dict) -> None:
  """Write weights so that a reader never sees half a file."""
  path.parent.mkdir(parents=True, exist_ok=True)
  part = path.with_suffix(f".{os.getpid()}.tmp")
  checkpoint.save_weights(part, jax.device_get(params), metadata)
  os.replace(part, path)
