"""The training loop, top to bottom: roll out, score, compare within groups, align, update, publish.

All agents run in this process, each on its own mesh; they meet only in the rollouts and in the outcomes of a
step (which rollouts were right). A step depends on (seed, step, weights) alone, so a run that was killed goes on
from its last checkpoint to the same parameters, bit for bit, as one that never was.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable

import grain
import jax
import numpy as np

from mgrpo_jax import agent as agent_lib
from mgrpo_jax import checkpoint, credit, evaluation, learner, metrics, rendering, warm_start, world
from mgrpo_jax.config import MAIN
from mgrpo_jax.errors import UserError
from mgrpo_jax.method import alignment
from mgrpo_jax.method import loss as loss_lib
from mgrpo_jax.rollout import controller, protocol
from mgrpo_jax.run_folder import RunFolder, write_json
from mgrpo_jax.trajectory import Query, Rollout, stable_hash


@dataclasses.dataclass
class Team:
  """Everything a run holds.

  Attributes:
    config: as used.
    world: questions, scorer, tools.
    agents: by name, the main agent first.
    targets: the running choice of D per sub-agent (None: fixed).
    bad_updates: skipped updates in a row, by agent.
  """

  config: object
  world: world.World
  agents: dict[str, agent_lib.Agent]
  targets: dict[str, alignment.AutoTarget | None]
  bad_updates: dict[str, int]

  @property
  def runtimes(self) -> dict[str, controller.AgentRuntime]:
    return {name: a.runtime for name, a in self.agents.items()}

  @property
  def tool_options(self) -> dict:
    """How `run_rollouts` calls tools."""
    return {"tool_threads": self.config.rollout.tool_threads, "tool_deadline": self.config.rollout.tool_deadline}

  @property
  def rows(self) -> int:
    """The most trajectories that one agent can have in a step: statistics are padded to it."""
    m, limits = self.config.method, self.agents[MAIN].config.limits
    draws = 1 + (m.resample_attempts if m.zero_variance == "resample" else 0)
    return draws * m.queries * m.rollouts * max(1, limits.calls)


def build_team(config, folder, *, progress=None) -> Team:
  """The world and every agent of a config, warm-started, with version 0 published."""
  surroundings = world.load(config, folder)
  meshes = agent_lib.build_meshes(config, jax.devices())
  agent_lib.check(config, meshes, surroundings.tokenizers)
  names = [MAIN, *(n for n in config.agents if n != MAIN)]
  bases: dict = {}
  agents = {n: agent_lib.build(n, config, meshes[n], surroundings.tokenizers[n], bases=bases, tools=surroundings.tools, progress=progress)
            for n in names}
  a = config.method.alignment
  targets = {n: alignment.AutoTarget(window=a.window, quantile=a.quantile, buckets=tuple(a.buckets))
             if a.target == "auto" else None for n in names if n != MAIN}
  return Team(config, surroundings, agents, targets, dict.fromkeys(names, 0))


# ---- data ---------------------------------------------------------------------------------------------------------


def question_iterator(queries: list[Query], seed: int):
  """Endless, shuffled anew in every pass, and restorable (grain); yields one query at a time."""
  data = grain.MapDataset.source(list(range(len(queries)))).seed(seed).shuffle().repeat()
  return iter(data.to_iter_dataset())


def draw(iterator, queries: list[Query], count: int, taken: set[str]) -> list[Query]:
  """The next `count` questions that are not among `taken` (a step asks each question once)."""
  out: list[Query] = []
  while len(out) < count and len(taken) < len(queries):
    q = queries[int(next(iterator))]
    if q.id not in taken:
      taken.add(q.id)
      out.append(q)
  return out


# ---- one step -----------------------------------------------------------------------------------------------------


def collect(team: Team, iterator, step: int) -> tuple[list[Rollout], dict[str, float]]:
  """Roll out Q questions K times and score them; with "resample", replace questions whose main group is dead."""
  m, kept, taken = team.config.method, [], set()
  missing, resampled, spent, dead_queries = m.queries, 0, [], []
  for attempt in range(1 + (m.resample_attempts if m.zero_variance == "resample" else 0)):
    queries = draw(iterator, team.world.train, missing, taken)
    if not queries:  # every question there is has had its turn
      break
    jobs = [controller.Job(q, k, team.config.seed, step, float(team.config.rollout.temperature))
            for q in queries for k in range(m.rollouts)]
    rollouts = controller.run_rollouts(team.runtimes, jobs, main=MAIN, **team.tool_options)
    _score(team, rollouts)
    dead = set(_group(team, rollouts, MAIN, step).dead_queries) if m.zero_variance == "resample" else set()
    kept += [r for r in rollouts if r.query.id not in dead]
    spent += [r for r in rollouts if r.query.id in dead]
    dead_queries += [q.id for q in queries if q.id in dead]
    missing, resampled = missing - len(queries) + len(dead), attempt
    if not missing:
      break
  # dead questions for which no other was found stay in the step, the last drawn ones: a step always has Q questions
  # (fewer only if there are no more), and their sub-agents may have something to learn
  last = set(dead_queries[max(0, len(dead_queries) - missing):])
  if last and len(last) == len({r.query.id for r in kept} | last):
    print(f"step {step}: in none of the {len(taken)} questions drawn ({resampled} extra draws) do the rewards of {MAIN} differ; it learns "
          "nothing in this step", file=sys.stderr)
  drawn = [r.correct for r in kept + spent]  # what was kept is a choice by outcome: its accuracy is not that of the policy
  kept += [r for r in spent if r.query.id in last]
  return kept, {"train/resample_attempts": float(resampled), "train/dead_queries_left": float(len(last)),
                "train/accuracy_drawn": float(np.mean(drawn))}


def _score(team: Team, rollouts: list[Rollout]) -> None:
  m = team.config.method
  overlong = {**m.overlong.to_dict(), "max_tokens": {n: a.config.limits.tokens for n, a in team.agents.items()}}
  credit.score_rollouts(rollouts, correct=team.world.correct, experts=team.world.experts,
                        main_weights=m.reward.main.to_dict(), sub_weights=m.reward.sub.to_dict(), overlong=overlong)


def _group(team: Team, rollouts: list[Rollout], name: str, step: int) -> credit.Group:
  m = team.config.method
  target = team.targets.get(name)
  return credit.agent_group(
    rollouts, name, main=MAIN, mode=m.alignment.mode, advantage=m.advantage.to_dict(), group_by=m.group_by,
    zero_variance=m.zero_variance, overlong=m.overlong.to_dict(), size=team.rows,
    target=target.target if target else int(8 if m.alignment.target == "auto" else m.alignment.target),
    seed=stable_hash(f"{team.config.seed}/{step}/{name}/alignment"))


def update_agent(team: Team, name: str, rollouts: list[Rollout], step: int, folder: RunFolder) -> Callable[[], dict[str, float]]:
  """One agent's own part of a step: its advantages, its alignment, its updates.

  Returns:
    A function that waits for the updates, which have only been started, and gives the metrics.
  """
  agent, group = team.agents[name], _group(team, rollouts, name, step)
  values = _describe(group) | {"staleness": max((agent.version - t.oldest_version() for t in group.trajectories if t.num_sampled), default=0)}
  if (target := team.targets.get(name)) is not None:
    values |= {"target": target.target}  # what this step was aligned with; its own calls act on the next one
    target.observe(credit.calls_per_rollout(rollouts, name))
    values |= {"target_doublings": target.doublings}
  finish = dict
  if agent.trainable:
    plan = plan_updates(group, agent.options, team.config, stable_hash(f"{team.config.seed}/{step}/{name}"))
    finish = _start_updates(team, agent, plan, step, folder)
  return lambda: {f"train/{name}/{k}": v for k, v in (values | finish()).items()}


def update_agents(team: Team, rollouts: list[Rollout], step: int, folder: RunFolder) -> dict[str, float]:
  """Every agent's part of a step: on devices of their own they work at the same time, on shared ones in turn."""
  devices = [d for a in team.agents.values() for d in a.mesh.devices.flat]
  started = (update_agent(team, name, rollouts, step, folder) for name in team.agents)
  values: dict[str, float] = {}
  for finish in list(started) if len(set(devices)) == len(devices) else started:
    values |= finish()
  return values


def plan_updates(group: credit.Group, options: learner.LossOptions, config, seed: int) -> list[tuple[list[dict], float]]:
  """[(micro-batches, normalizer)] for each optimizer update of a step; updates without a row are left out.

  Trajectories are dealt to the updates at random (seeded). A row whose advantage is exactly 0 needs no work when
  no KL or entropy term acts on it, but the divisor counts it: then the entropy, ratios and clipped shares that are
  reported are those of the rows that teach.
  """
  t = config.train
  tokens = np.array([tr.num_sampled for tr in group.trajectories], np.int64)
  weights = np.where(tokens > 0, group.loss_weights, 0.0).astype(np.float32)
  order = np.random.default_rng(seed).permutation(len(weights))
  lazy = options.kl_coef == 0 and options.entropy_coef == 0
  plan = []
  for part in range(t.updates_per_step):
    mine = np.zeros(len(weights), bool)
    mine[order[part:: t.updates_per_step]] = True
    w = np.where(mine, weights, 0.0).astype(np.float32)
    normalizer = float(loss_lib.normalizer_from_counts(tokens, w, aggregate=options.aggregate, norm_length=options.norm_length))
    batches = list(alignment.emit_batches(group.trajectories, group.advantages, w, rows=t.rows, length=t.length, drop_zero=lazy,
                                          aggregate=options.aggregate))
    if batches:
      plan.append((batches, normalizer))
  return plan


def _start_updates(team: Team, agent, plan, step: int, folder: RunFolder) -> Callable[[], dict[str, float]]:
  placed = [([agent.place(b) for b in batches], normalizer) for batches, normalizer in plan]
  started = []
  for batches, normalizer in placed:
    agent.state, out = learner.dispatch(agent.state, batches, agent.fns, normalizer, agent.frozen)
    started.append((batches, normalizer, out))
  return lambda: _finish_updates(team, agent, started, step, folder)


def _finish_updates(team: Team, agent, started, step: int, folder: RunFolder) -> dict[str, float]:
  pairs: dict[str, list[tuple[float, float]]] = {}
  plain: dict[str, list[float]] = {"loss": [], "grad_norm": []}
  skipped = 0
  for i, (batches, normalizer, out) in enumerate(started):
    out = learner.fetch(out)
    if out.pop("finite"):
      team.bad_updates[agent.name] = 0
    else:
      skipped += 1
      _keep_bad_batch(team, agent.name, batches, normalizer, step, i, folder)
    for k in plain:
      plain[k].append(out.pop(k))
    for k, pair in out.items():
      pairs.setdefault(k, []).append(pair)
  values = {k: metrics.mean_valid(v)[0] for k, v in plain.items() if v}
  for k, v in pairs.items():
    total, count = (sum(x) for x in zip(*v))
    values[k] = total / count if count else float("nan")
  return {**values, "updates": len(started), "skipped_updates": skipped, "micro_batches": sum(len(b) for b, *_ in started)}


def _keep_bad_batch(team: Team, name: str, batches: list[dict], normalizer: float, step: int, index: int, folder: RunFolder) -> None:
  path = folder.path / "bad_batches" / f"{name}-step{step}-update{index}.npz"
  path.parent.mkdir(exist_ok=True)
  arrays = {f"{i}/{k}": np.asarray(v) for i, b in enumerate(batches) for k, v in b.items()}
  np.savez_compressed(path, normalizer=np.float32(normalizer), **arrays)
  team.bad_updates[name] += 1
  print(f"step {step}: agent {name} had a loss or gradient that is not finite; the update was skipped, its batch is in {path}",
        file=sys.stderr)
  if team.bad_updates[name] >= team.config.train.max_bad_updates:
    raise UserError(f"agent {name!r}: {team.bad_updates[name]} updates in a row were not finite (step {step}); look at {path}; "
                    f"a lower config.agents.{name}.optimizer.learning_rate (in a new config.run_dir) may help")


def _describe(group: credit.Group) -> dict[str, float]:
  live = [t for t in group.trajectories if t.weight > 0]
  mean, _, missing = metrics.mean_valid(t.reward for t in live) if live else (float("nan"), 0, 0)
  n = max(1, len(group.trajectories))
  out = {
    "reward": mean, "reward_missing": missing, "trajectories": len(group.trajectories),
    "format": sum(t.format_ok for t in group.trajectories) / n,
    "parse_errors": sum(e.get("observation") in protocol.ERRORS for t in group.trajectories for e in t.events),
    "sampled_tokens": sum(t.num_sampled for t in group.trajectories),
    "turns": sum(len(t.turns) for t in group.trajectories) / n,
    **group.stats}
  for term in {k for t in live for k in t.components} - {"format"}:
    out[term] = float(np.mean([t.components[term] for t in live]))
  for t in group.trajectories:
    out[f"status_{t.status}"] = out.get(f"status_{t.status}", 0) + 1
  return out


# ---- the run ------------------------------------------------------------------------------------------------------


def train(config, folder: RunFolder, *, finish: Callable[[Team, checkpoint.Checkpoints, RunFolder], dict] | None = None) -> dict:
  """Run a config in its folder, from the start or from its last checkpoint, to the end.

  Args:
    finish: makes the final results (`final.results`); its return value is written to results.json.

  Returns:
    What `finish` returned, or {} without it.
  """
  steps = config.train.steps
  compiled = metrics.CompileCounter()
  checkpoints = checkpoint.Checkpoints(folder.checkpoints, config.checkpoint.keep_last, config.checkpoint.keep_best)
  with checkpoints:
    start = checkpoints.latest_step()
    if start is not None and folder.warm(MAIN).exists():  # where a run began is its own: caches and packages change under it
      config = config.copy_and_resolve_references()
      config.train.warm_start = str(folder.warm(MAIN).parent)
    team = build_team(config, folder.path, progress=_bar)
    for name, tokenizer in team.world.tokenizers.items():  # a file, or the files of an open model
      tokenizer.save(folder.path / (f"tokenizer-{name}" if team.agents[name].config.init else "tokenizer.json"))
    iterator = question_iterator(team.world.train, config.seed)
    # ---- go on where the last checkpoint stands
    if start is not None:
      restore(team, checkpoints, iterator, start)
    log = metrics.Metrics(folder.path, resume_step=metrics.START if start is None else start)
    with log:
      if start is None:
        start = 0
        for name, a in team.agents.items():
          warm_start.save(folder.warm(name), a.state["params"], {"agent": name})
        _evaluate_and_save(team, checkpoints, iterator, 0, log, {})
      for name, a in team.agents.items():
        a.warm_up(config.train.rows, config.train.length)
        _group(team, [], name, 0)
      compiled.pop()
      bar = metrics.Progress(steps, "train", initial=start)
      with bar:
        for step in range(start, steps):
          values = run_step(team, iterator, step, folder, compiled)
          scores = _evaluate_and_save(team, checkpoints, iterator, step + 1, log, values)
          shown = {"reward": values[f"train/{MAIN}/reward"], "right": values["train/accuracy"]}
          if scores is not None:
            shown["validation"] = scores
          bar.update(1, **shown)
    result = finish(team, checkpoints, folder) if finish else {}
    if result:
      write_json(folder.results, result)
  compiled.close()
  return result


def run_step(team: Team, iterator, step: int, folder: RunFolder, compiled: metrics.CompileCounter) -> dict[str, float]:
  """Step t of every agent. Version t samples, version t + 1 is published at its end.

  The compilations counted are those since the step before, its evaluation and checkpoint included.
  """
  timer = metrics.Timer()
  with timer("rollout"):
    rollouts, values = collect(team, iterator, step)
  with timer("update"):
    values |= update_agents(team, rollouts, step, folder)
  with timer("publish"):
    for a in team.agents.values():
      a.publish(step + 1)
  correct = [r.correct for r in rollouts]
  values |= {"train/accuracy": float(np.mean(correct)), "train/rollouts": len(rollouts),
             "train/calls": float(np.mean([len(r.subs) for r in rollouts])),
             "train/zero_call_rollouts": float(np.mean([not r.subs for r in rollouts]))}
  keep = team.config.train.sample_rollouts
  if keep:
    text = "\n\n".join(rendering.rollout_text(r) for r in rollouts[:: max(1, len(rollouts) // keep)][:keep])
    (folder.rollouts / f"step{step:06d}.txt").write_text(text + "\n", encoding="utf-8")
  return {**values, **timer.pop(), "compile/programs": compiled.pop(), "memory/peak_mb": metrics.peak_memory_mb()}


def _evaluate_and_save(team: Team, checkpoints, iterator, step: int, log: metrics.Metrics, values: dict) -> float | None:
  """Validation accuracy and a checkpoint when they are due; writes the row of metrics of the step before."""
  config, score = team.config, None
  last = step == config.train.steps
  if step % config.eval.every == 0 or last:
    result = evaluation.evaluate(team.runtimes, team.world.validation, team.world.correct, main=MAIN, **team.tool_options)
    score = result.accuracy
    values = {**values, **evaluation.flat(result.summary(), "eval/validation")}
  log.write(step, values)
  if score is not None or step % config.checkpoint.every == 0 or last:  # what has a score may be the best
    save(team, checkpoints, iterator, step, score)
  return score


def save(team: Team, checkpoints, iterator, step: int, score: float | None) -> None:
  """Everything that the same command needs to go on: parameters, optimizer, data position, counters."""
  host = {"data": json.dumps(iterator.get_state()), "questions": _which(team.world.train), "bad_updates": team.bad_updates,
          "targets": {n: t.state_dict() for n, t in team.targets.items() if t}}
  checkpoints.save(step, {n: a.state for n, a in team.agents.items()}, host, score)


def restore(team: Team, checkpoints, iterator, step: int) -> None:
  """The inverse of `save`: states on their meshes, data position, versions published."""
  states, host = checkpoints.restore(step, {n: a.state for n, a in team.agents.items()})
  there = _which(team.world.train)
  if host.get("questions", there) == there:
    iterator.set_state(json.loads(host["data"]))
  else:  # a position in another list of questions means nothing in this one
    print(f"warning: the {there['count']} training questions are not the {host['questions']['count']} that step {step} was saved with; "
          "they are read from their start", file=sys.stderr)
  team.bad_updates = dict(host["bad_updates"])
  for n, state in host["targets"].items():
    team.targets[n].load_state_dict(state)
  for n, a in team.agents.items():
    a.state = states[n]
    a.publish(step)


def _which(queries: list[Query]) -> dict[str, int]:
  """What tells one list of questions from another: how many, and which in which order."""
  return {"count": len(queries), "ids": stable_hash("\n".join(q.id for q in queries))}


def _bar(total: int, text: str):
  bar = metrics.Progress(total, text)

  def report(step: int, loss: float) -> None:
    bar.update(1, loss=loss)
    if step + 1 == total:
      bar.close()

  return report
