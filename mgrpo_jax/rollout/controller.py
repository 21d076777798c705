"""Main asks, subs answer: rollouts as generators, one driver that never blocks on another agent.

A trajectory is a generator that yields what it needs next (`Sample`, `ToolCall`, `Delegate`) and is
resumed with the answer. `run_rollouts` steps all engines round robin in a fixed order: it dispatches on
every engine first, then fetches, then resumes. What a rollout becomes is a function of its keys and the
weights, never of timing: the random key of a trajectory is a hash of (seed, step, query, rollout, agent,
invocation), and the engine folds in turn and position.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import Any, Protocol

import numpy as np

from mgrpo_jax.rollout import conversation, protocol
from mgrpo_jax.rollout.engine import Engine, TurnRequest
from mgrpo_jax.trajectory import Query, Rollout, Trajectory, Turn


class ToolSession(Protocol):
  """The tools of one trajectory, with whatever they remember between calls."""

  def call(self, name: str, arguments: dict) -> str: ...


@dataclasses.dataclass(frozen=True)
class Limits:
  """Budgets of one trajectory.

  Attributes:
    turns: turns the policy may take.
    turn_tokens: sampled tokens per turn.
    tokens: sampled tokens in all.
    calls: tool calls and delegations in all; one more gets "answer now", the next ends it.
    context: tokens of prompt, observations and turns together (of a segment, where a chat template begins anew).
    answer_reserve: room kept for a last answer; an observation that would eat it is replaced.
  """

  turns: int = 8
  turn_tokens: int = 24
  tokens: int = 128
  calls: int = 6
  context: int = 128
  answer_reserve: int = 12


@dataclasses.dataclass(frozen=True)
class AgentRuntime:
  """What it takes to run trajectories of one agent.

  Attributes:
    name: the agent.
    engine: where its turns are sampled.
    tokenizer: encode / decode / control.
    limits: budgets.
    tools: makes a fresh ToolSession for a trajectory (given its random seed), or None.
    tool_names: names that go to the session.
    delegates: names of sub-agents it may call, each with one text argument "task".
    system: system text before the task.
    thinking: "optional" or "required".
  """

  name: str
  engine: Engine
  tokenizer: Any
  limits: Limits
  tools: Callable[[int], ToolSession] | None = None
  tool_names: tuple[str, ...] = ()
  delegates: tuple[str, ...] = ()
  system: str = ""
  thinking: str = "optional"


@dataclasses.dataclass(frozen=True)
class Job:
  """One rollout to run.

  Attributes:
    query, index: the question and which of its K rollouts this is.
    seed, step: fold into every random key.
    temperature: 0 = greedy.
  """

  query: Query
  index: int
  seed: int = 0
  step: int = 0
  temperature: float = 1.0


@dataclasses.dataclass(frozen=True)
class Sample:
  """Wanted: one sampled turn after these new tokens, or (restart) after these tokens alone."""

  tokens: np.ndarray
  max_new_tokens: int
  restart: bool = False


@dataclasses.dataclass(frozen=True)
class ToolCall:
  """Wanted: the observation of a tool."""

  name: str
  arguments: dict


@dataclasses.dataclass(frozen=True)
class Delegate:
  """Wanted: the sub trajectory that answers this task."""

  agent: str
  task: str
  turn: int


def trajectory_key(job: Job, agent: str, invocation: int) -> np.ndarray:
  """uint32[2]: random key of a trajectory, the same in every process."""
  name = "\x1f".join(map(str, (job.seed, job.step, job.query.id, job.index, agent, invocation)))
  return np.frombuffer(hashlib.blake2b(name.encode(), digest_size=8).digest(), np.uint32).copy()


def trajectory_steps(runtime: AgentRuntime, trajectory: Trajectory) -> Generator[Any, Any, Trajectory]:
  """One trajectory from its first prompt to its end; fills and returns `trajectory`.

  Yields Sample, ToolCall or Delegate; is resumed with a FinishedTurn, an observation text or a sub Trajectory.
  """
  limits, tok = runtime.limits, runtime.tokenizer
  now = conversation.begin(tok, trajectory.task, system=runtime.system)
  length = sampled = calls = 0
  clean = True
  trajectory.status = "max_turns"
  for turn_index in range(limits.turns):
    new, length = now.prompt, 0 if now.restart else length
    room = min(limits.turn_tokens, limits.tokens - sampled, limits.context - length - len(new))
    if room < 1:
      trajectory.status = "context_full"
      break
    done = yield Sample(new, room, now.restart)
    if done.finish == "context":  # the engine's own context is smaller: nothing was sampled, nothing was appended
      trajectory.status = "context_full"
      break
    turn = Turn(new, done.tokens, done.logprobs, done.versions, "stop" if done.finish == "stop" else "length", now.restart)
    trajectory.turns.append(turn)
    length, sampled = length + len(new) + len(done.tokens), sampled + len(done.tokens)
    text = conversation.sampled_text(tok, turn)
    parsed = protocol.parse_turn(text, thinking=runtime.thinking)
    if turn.finish != "stop":  # a turn cut off is never used, whatever it happens to parse as
      parsed = protocol.ParsedTurn(error=protocol.NOT_FINISHED)
    event: dict = {"text": text, "finish": turn.finish}
    trajectory.events.append(event)
    if parsed.result is not None:
      trajectory.result, trajectory.status = parsed.result, "finished"
      break
    if parsed.call is None:
      clean, observation = False, parsed.error
    elif calls >= limits.calls:
      if calls > limits.calls:
        trajectory.status = "tool_budget"
        break
      calls, observation = calls + 1, protocol.ANSWER_NOW
    else:
      calls += 1
      observation, valid = yield from _answer_call(runtime, parsed.call, turn_index, event)
      clean = clean and valid
    before, now = now, now.observe(turn, observation)
    if (0 if now.restart else length) + len(now.prompt) + limits.answer_reserve > limits.context:
      observation = protocol.ANSWER_NOW
      now = before.observe(turn, observation)
    event["observation"] = observation
  trajectory.format_ok = clean and trajectory.result is not None
  return trajectory


def _answer_call(runtime: AgentRuntime, call: protocol.Call, turn_index: int, event: dict):
  """(observation, whether the call itself obeyed the protocol; what tools and subs write is never judged)."""
  event["call"] = {"name": call.name, "arguments": call.arguments}
  if call.name in runtime.delegates:
    task = call.arguments.get("task")
    if not isinstance(task, str) or not task.strip():
      return protocol.BAD_CALL, False
    sub = yield Delegate(call.name, task, turn_index)
    event["invocation"] = sub.invocation
    return sub.result or protocol.NO_RESULT, True
  if call.name in runtime.tool_names:
    return (yield ToolCall(call.name, call.arguments)), True
  return protocol.UNKNOWN_TOOL, False


@dataclasses.dataclass
class _Task:
  """One trajectory being run."""

  steps: Generator
  runtime: AgentRuntime
  trajectory: Trajectory
  rollout: Rollout
  job: Job
  parent: _Task | None
  session: ToolSession | None = None
  turns: int = 0
  restarts: int = 0

  @property
  def id(self) -> str:
    t, j = self.trajectory, self.job
    return f"{j.seed}/{j.step}/{t.query_id}/{t.rollout}/{t.agent}/{t.invocation}"

  @property
  def conversation(self) -> str:
    """Its name in the engine: a new one for every segment."""
    return f"{self.id}#{self.restarts}" if self.restarts else self.id


def run_rollouts(agents: dict[str, AgentRuntime], jobs: Iterable[Job], *, main: str = "main",
                 stand_ins: dict[str, Callable[[str], str | None]] | None = None,
                 tool_threads: int = 0, tool_deadline: float = 120.0,
                 progress: Callable[[Rollout], None] | None = None) -> list[Rollout]:
  """Run every job to its end and return the rollouts in the order of the jobs.

  Args:
    agents: runtimes by name; engines are stepped in this order.
    main: the agent that gets the question.
    stand_ins: functions that answer in place of a sub-agent (an oracle, or nothing: controls).
    tool_threads: 0 calls tools in the driver thread (local tools); more uses a pool, whose results are
      applied in the order of the requests.
    tool_deadline: seconds a pooled tool may take; then its trajectory counts as failed.
    progress: called with each rollout when it is done.

  Raises:
    ValueError: no runtime named `main`, two jobs with the same name, or a team that cannot work together.
  """
  stand_ins = stand_ins or {}
  _check_team(agents, main, stand_ins)
  return _Driver(agents, main, stand_ins, tool_threads, tool_deadline, progress).run(list(jobs))


def _check_team(agents: dict[str, AgentRuntime], main: str, stand_ins: dict) -> None:
  if main not in agents:
    raise ValueError(f"no agent named {main!r} among {sorted(agents)}")
  for name, agent in agents.items():
    if agent.tool_names and agent.tools is None:
      raise ValueError(f"agent {name!r} may call {', '.join(agent.tool_names)} but has no tool session; pass tools=")
    for sub in agent.delegates:
      if sub in stand_ins:
        continue
      if sub not in agents:
        raise ValueError(f"agent {name!r} delegates to {sub!r}, which has neither a runtime nor a stand-in")
      if agents[sub].engine is agent.engine:  # the callers would hold the slots that the called wait for, for ever
        raise ValueError(f"agents {name!r} and {sub!r} share one engine; a caller needs an engine of its own")


def _call(pool: threading.BoundedSemaphore | None, function, *args) -> concurrent.futures.Future:
  """Call now (no pool), or in a thread of the pool's number: a daemon, for a tool that hangs must not keep the process."""
  future: concurrent.futures.Future = concurrent.futures.Future()

  def call() -> None:
    with pool or contextlib.nullcontext():
      if not future.set_running_or_notify_cancel():
        return
      try:
        future.set_result(function(*args))
      except Exception as error:
        future.set_exception(error)

  threading.Thread(target=call, daemon=True).start() if pool else call()
  return future


class _Driver:
  """The one thread that steps all engines and resumes all trajectories."""

  def __init__(self, agents, main, stand_ins, tool_threads, tool_deadline, progress):
    self.agents, self.main, self.stand_ins = agents, main, stand_ins
    self.engines: list[Engine] = list({id(a.engine): a.engine for a in agents.values()}.values())
    self.waiting: dict[tuple[int, int], _Task] = {}
    self.ready: deque[tuple[_Task, Any]] = deque()
    self.tools: deque[tuple[_Task, str, concurrent.futures.Future]] = deque()
    self.open: dict[str, _Task] = {}  # every trajectory that has begun and not ended
    self.in_flight: list[Engine] = []  # dispatched, not yet fetched
    self.pool = threading.BoundedSemaphore(tool_threads) if tool_threads else None
    self.deadline, self.progress = tool_deadline, progress

  def run(self, jobs: list[Job]) -> list[Rollout]:
    names = [(j.seed, j.step, j.query.id, j.index) for j in jobs]
    if len(set(names)) != len(names):
      raise ValueError("two rollouts of one step have the same query and index; give each its own index")
    rollouts = []
    try:
      for job in jobs:
        trajectory = Trajectory(self.main, job.query.id, job.index, task=job.query.question)
        rollout = Rollout(job.query, job.index, trajectory)
        rollouts.append(rollout)
        self._start(_Task(None, self.agents[self.main], trajectory, rollout, job, None))
      while self.ready or self.waiting or self.tools:
        self._resume_all()
        busy = [e for e in self.engines if e.pending]
        for engine in busy:
          engine.dispatch()
          self.in_flight.append(engine)
        for engine in busy:
          self.in_flight.remove(engine)
          for turn in engine.fetch():
            self.ready.append((self.waiting.pop((id(engine), turn.id)), turn))
        self._collect_tools(wait=not busy and not self.ready)
    finally:
      for _, _, future in self.tools:
        future.cancel()
      self._abandon()
    return rollouts

  def _abandon(self) -> None:
    """After an error: no slot stays taken, no answer waits in an engine for the next caller."""
    for task in self.open.values():
      task.runtime.engine.close(task.conversation)
    for engine in self.in_flight:
      with contextlib.suppress(Exception):  # the first error is the one to be heard
        engine.fetch()

  def _start(self, task: _Task) -> None:
    task.steps = trajectory_steps(task.runtime, task.trajectory)
    self.open[task.id] = task
    if task.runtime.tools is not None:
      key = trajectory_key(task.job, task.trajectory.agent, task.trajectory.invocation)
      try:
        task.session = task.runtime.tools(int(key[0]))
      except Exception as error:  # as a tool that dies: infrastructure
        return self._fail(task, f"{type(error).__name__}: {error}")
    self.ready.append((task, None))

  def _resume_all(self) -> None:
    while self.ready:
      task, answer = self.ready.popleft()
      try:
        need = task.steps.send(answer)
      except StopIteration:
        self._finish(task)
        continue
      self._serve(task, need)

  def _serve(self, task: _Task, need) -> None:
    if isinstance(need, Sample):
      key = trajectory_key(task.job, task.trajectory.agent, task.trajectory.invocation)
      engine = task.runtime.engine
      if need.restart:
        engine.close(task.conversation)
        task.restarts += 1
      # turns are counted through all segments, so that no random key is used twice
      request = TurnRequest(task.conversation, key, task.turns, need.tokens, need.max_new_tokens, task.job.temperature)
      task.turns += 1
      self.waiting[(id(engine), engine.submit(request))] = task
    elif isinstance(need, ToolCall):
      self.tools.append((task, need.name, _call(self.pool, task.session.call, need.name, need.arguments)))
    else:
      self._delegate(task, need)

  def _delegate(self, task: _Task, need: Delegate) -> None:
    invocation = len(task.rollout.subs)
    sub = Trajectory(need.agent, task.job.query.id, task.job.index, invocation, need.turn, need.task)
    task.rollout.subs.append(sub)
    if need.agent in self.stand_ins:
      sub.result, sub.weight = self.stand_ins[need.agent](need.task), 0.0
      self.ready.append((task, sub))
    else:
      self._start(_Task(None, self.agents[need.agent], sub, task.rollout, task.job, task))

  def _finish(self, task: _Task) -> None:
    del self.open[task.id]
    task.runtime.engine.close(task.conversation)
    if task.parent is not None:
      self.ready.append((task.parent, task.trajectory))
    elif self.progress:
      self.progress(task.rollout)

  def _collect_tools(self, *, wait: bool) -> None:
    while self.tools:
      task, tool, future = self.tools[0]
      if not (wait or future.done()):
        return
      try:
        observation = future.result(timeout=self.deadline)
      except Exception as error:  # a tool that dies is infrastructure: the trajectory is not the policy's fault
        self.tools.popleft()
        late = isinstance(error, TimeoutError) and not future.done()
        self._fail(task, f"tool {tool!r} gave no answer in {self.deadline:g} s" if late else f"{type(error).__name__}: {error}")
      else:
        self.tools.popleft()
        self.ready.append((task, observation))
      wait = False

  def _fail(self, task: _Task, reason: str) -> None:
    task.steps.close()
    task.trajectory.status, task.trajectory.weight = "failed", 0.0
    task.trajectory.events.append({"error": reason})
    self._finish(task)
