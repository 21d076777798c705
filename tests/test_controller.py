"""Rollouts: budgets, statuses, delegation, failures, and that timing, order and slots change nothing."""

import dataclasses
import functools
import random
import threading
import time
import zlib

import jax
import numpy as np
import pytest

from mgrpo_jax import credit, evaluation
from mgrpo_jax.policy.tokenizer import build_tokenizer
from mgrpo_jax.policy.transformer import ModelConfig, Transformer
from mgrpo_jax.rollout import protocol
from mgrpo_jax.rollout.controller import AgentRuntime, Job, Limits, run_rollouts, trajectory_key
from mgrpo_jax.rollout.engine import EngineConfig, FinishedTurn, LocalEngine
from mgrpo_jax.trajectory import Query, stable_hash


def ask(agent, task):
  return protocol.render_call(agent, {"task": task})


LOOK, RESULT = protocol.render_call("look", {"at": "it"}), protocol.render_result
# Everything that the random policy below writes is one token: it never spells.
WRITTEN = [ask("search", "a"), ask("search", "b"), ask("reason", "a"), ask("search", " "), LOOK, "<result>x</result>", "<result>y</result>"]
TOK = build_tokenizer([*protocol.TEMPLATE_TOKENS, *WRITTEN], ["abab"], merges=20)
END = TOK.control("<|end|>")


class ScriptedEngine:
  """An engine (rollout/engine.py) whose turns stand in a table: the edge of the controller.

  Args:
    script: "query/rollout/agent/invocation" -> the texts of its turns, each followed by the stop token. A turn
      longer than its budget is cut off, as by any engine.
    delay: most steps a turn may take (by its name, not at random).
    max_length: tokens of a conversation.
  """

  def __init__(self, script=None, *, delay=0, max_length=10_000, fail_at=None):
    self.script, self.delay, self.max_length, self.fail_at = script or {}, delay, max_length, fail_at
    self.version, self.open, self.queue, self.requests = 5, {}, {}, []
    self.next_id, self.steps, self.dispatched = 0, 0, False

  def submit(self, request):
    assert request.conversation not in {r.conversation for r, _ in self.queue.values()}, "a turn is in flight"
    assert request.turn == self.open.get(request.conversation, (0, 0))[1]
    self.requests.append(request)
    wait = zlib.crc32(f"{request.conversation}/{request.turn}".encode()) % (self.delay + 1)
    self.queue[self.next_id] = (request, self.steps + wait)
    self.open.setdefault(request.conversation, (0, 0))
    self.next_id += 1
    return self.next_id - 1

  def dispatch(self):
    assert not self.dispatched
    self.dispatched, self.steps = True, self.steps + 1
    if self.steps == self.fail_at:
      self.dispatched = False
      raise RuntimeError("the device is gone")

  def fetch(self):
    assert self.dispatched
    self.dispatched = False
    done = [i for i, (_, when) in sorted(self.queue.items()) if when < self.steps]
    return [self._turn(i, self.queue.pop(i)[0]) for i in done]

  def step(self):
    self.dispatch()
    return self.fetch()

  def close(self, conversation):
    self.open.pop(conversation, None)
    self.queue = {i: v for i, v in self.queue.items() if v[0].conversation != conversation}

  @property
  def pending(self):
    return len(self.queue)

  def _turn(self, id, request):
    length, turn = self.open[request.conversation]
    length += len(request.tokens)
    make = functools.partial(FinishedTurn, id, request.conversation)
    if length >= self.max_length:
      return make(*(np.zeros(0, t) for t in (np.int32, np.float32, np.int32)), "context")
    text = self.script[request.conversation.split("/", 2)[2]][turn]
    ids = np.array([*TOK.encode(text), END][: request.max_new_tokens], np.int32)
    self.open[request.conversation] = (length + len(ids), turn + 1)
    return make(ids, -ids / 100, np.full(len(ids), self.version, np.int32), "stop" if ids[-1] == END else "length")


class Tools:
  """A tool session that remembers its calls; `wait` makes it slow, `broken` makes it raise."""

  def __init__(self, seed, wait=0.0, broken=()):
    self.seed, self.calls, self.wait, self.broken = seed, 0, wait, broken

  def call(self, name, arguments):
    self.calls += 1
    if self.wait:
      time.sleep(random.Random(self.seed + self.calls).random() * self.wait)
    if arguments.get("at") in self.broken:
      raise ConnectionError("no route")
    return f"{name} {self.calls} {self.seed % 97}"


LIMITS = Limits(turns=6, turn_tokens=200, tokens=2000, calls=3, context=4000, answer_reserve=10)


def team(script=None, *, limits=LIMITS, tools=Tools, engine=ScriptedEngine, **options):
  """main, who may call two different sub-agents; both may use `look`."""
  main = AgentRuntime("main", engine(script, **options), TOK, limits, delegates=("search", "reason"))
  subs = {n: AgentRuntime(n, engine(script, **options), TOK, limits, tools=tools, tool_names=("look",)) for n in ("search", "reason")}
  return {"main": main, **subs}


def clean(agents):
  """No engine holds anything for a conversation that is over."""
  return all(not a.engine.open and not a.engine.pending and not a.engine.dispatched for a in agents.values())


def one(main_turns, subs=(), **options):
  """One rollout of `main_turns`; `subs` are (agent, turns) by invocation."""
  script = {"q/0/main/-1": main_turns, **{f"q/0/{agent}/{i}": turns for i, (agent, turns) in enumerate(subs)}}
  run = {k: options.pop(k) for k in ("stand_ins", "tool_threads", "tool_deadline") if k in options}
  agents = team(script, **options)
  rollout, = run_rollouts(agents, [Job(QUERY, 0)], **run)
  assert clean(agents)
  return rollout


QUERY = Query("q", "who?", "Paris")
ANSWER = RESULT("Paris")


def observations(trajectory):
  return [e.get("observation") for e in trajectory.events]


# ---------------------------------------------------------------------------- statuses and budgets


def test_a_result_finishes_the_trajectory():
  main = one([ANSWER, "never asked for"]).main
  assert (main.status, main.result, main.format_ok, main.weight, len(main.turns)) == ("finished", "Paris", True, 1.0, 1)
  assert main.turns[0].versions.tolist() == [5] * len(main.turns[0].sampled)


def test_a_spoiled_turn_goes_back_to_the_model_and_costs_the_format():
  main = one(["hm", '<tool_call>{"name": "search", "arguments": {"task": "x"', ask("search", "a") * 2, ask("visit", "x"), ANSWER]).main
  assert observations(main) == [protocol.BAD_TAGS, protocol.BAD_JSON, protocol.TWO_CALLS, protocol.UNKNOWN_TOOL, None]
  assert (main.status, main.result, main.format_ok) == ("finished", "Paris", False)


def test_out_of_turns():
  main = one(["hm"] * 9).main
  assert (main.status, len(main.turns), main.result, main.format_ok, main.weight) == ("max_turns", LIMITS.turns, None, False, 1.0)


def test_the_call_budget_gives_answer_now_once_and_then_ends():
  rollout = one([ask("reason", "a")] * 9, [("reason", [RESULT("r")])] * 3)
  assert len(rollout.subs) == LIMITS.calls and rollout.main.status == "tool_budget"
  assert observations(rollout.main) == ["r", "r", "r", protocol.ANSWER_NOW, None]


def test_an_answer_after_answer_now_is_a_good_one():
  rollout = one([ask("reason", "a")] * 4 + [ANSWER], [("reason", [RESULT("r")])] * 3)
  assert (rollout.main.status, rollout.main.format_ok, len(rollout.subs)) == ("finished", True, 3)


def test_tool_calls_and_delegations_and_refused_calls_share_the_call_budget():
  rollout = one([ask("search", "a"), ask("visit", "x"), ask("reason", "a"), ask("search", "b"), ANSWER], [("search", [LOOK] * 4 + [ANSWER]), ("reason", [ANSWER])])
  assert observations(rollout.main)[3] == protocol.ANSWER_NOW
  assert [s.agent for s in rollout.subs] == ["search", "reason"]
  look = [o.split()[1] if o and o.startswith("look") else o for o in observations(rollout.subs[0])]
  assert look == ["1", "2", "3", protocol.ANSWER_NOW, None]


def test_turn_and_trajectory_token_budgets_cut_the_turn():
  n = len(TOK.encode("hm")) + 1
  limits = dataclasses.replace(LIMITS, turn_tokens=4, tokens=6)
  main = one(["abcabcabcabc", "abcabcabcabc", "hm"], limits=limits).main
  assert [len(t.sampled) for t in main.turns] == [4, 2] and {t.finish for t in main.turns} == {"length"}
  assert observations(main) == [protocol.NOT_FINISHED] * 2
  assert (main.status, main.num_sampled) == ("context_full", 6)  # nothing is left to sample with
  assert one(["hm", ANSWER], limits=dataclasses.replace(LIMITS, tokens=n + 30)).main.status == "finished"


def test_a_first_prompt_longer_than_the_context_takes_no_turn():
  limits = dataclasses.replace(LIMITS, context=5)
  main = one([ANSWER], limits=limits).main
  assert (main.status, main.turns, main.weight, len(main), main.oldest_version()) == ("context_full", [], 1.0, 0, -1)


def test_a_trajectory_never_outgrows_the_context_and_a_long_observation_becomes_answer_now():
  long = RESULT("word " * 96)
  rollout = one([ask("search", "a"), ANSWER], [("search", [long])], limits=dataclasses.replace(LIMITS, turn_tokens=900, context=500))
  assert len(rollout.subs[0]) > 400 and rollout.subs[0].status == "finished"
  assert observations(rollout.main) == [protocol.ANSWER_NOW, None] and rollout.main.status == "finished"
  for context in range(5, 60):
    main = one([ask("search", "a")] * 9, [("search", [RESULT("a b c d e")])] * 9, limits=dataclasses.replace(LIMITS, context=context)).main
    assert len(main) <= context
    assert main.status in ("context_full", "tool_budget", "max_turns")


def test_an_engine_with_a_smaller_context_than_the_limits_ends_the_trajectory_there():
  agents = team({"q/0/main/-1": [ask("search", "a"), ANSWER], "q/0/search/0": [RESULT("word " * 30)]})
  agents["main"].engine.max_length = 100
  main = run_rollouts(agents, [Job(QUERY, 0)])[0].main
  assert (main.status, len(main.turns)) == ("context_full", 1)
  assert len(main) == len(main.turns[0].prompt) + len(main.turns[0].sampled)  # nothing that the engine never saw


def test_required_thinking_reaches_the_parser():
  agents = team({"q/0/main/-1": [ANSWER, f"<thinking>so</thinking>{ANSWER}"]})
  agents["main"] = dataclasses.replace(agents["main"], thinking="required")
  main = run_rollouts(agents, [Job(QUERY, 0)])[0].main
  assert observations(main) == [protocol.NO_THINKING, None] and (main.result, main.format_ok) == ("Paris", False)


# -------------------------------------------------------------------------------------- delegation


def test_two_different_sub_agents_make_one_tree():
  rollout = one([ask("search", "where"), ask("reason", "why"), ask("search", "when"), ANSWER],
                [("search", [LOOK, RESULT("there")]), ("reason", [RESULT("because")]), ("search", [RESULT("then")])])
  assert [(s.agent, s.task, s.result, s.invocation, s.turn_index) for s in rollout.subs] == [
    ("search", "where", "there", 0, 0), ("reason", "why", "because", 1, 1), ("search", "when", "then", 2, 2)]
  assert observations(rollout.main) == ["there", "because", "then", None]
  assert [e.get("invocation") for e in rollout.main.events] == [0, 1, 2, None]
  assert all(s.format_ok and s.query_id == "q" and s.weight == 1 for s in rollout.subs)


def test_sub_agents_do_not_share_conversations_keys_or_tool_sessions():
  rollout = one([ask("search", "a"), ask("search", "a"), ANSWER], [("search", [LOOK, LOOK, ANSWER])] * 2)
  first, second = (observations(s) for s in rollout.subs)
  assert [o.split()[1] for o in first[:2]] == ["1", "2"] and [o.split()[1] for o in second[:2]] == ["1", "2"]
  assert first[0].split()[2] != second[0].split()[2]  # another seed
  np.testing.assert_array_equal(rollout.subs[0].turns[0].prompt, rollout.subs[1].turns[0].prompt)


def test_zero_calls():
  rollout = one([ANSWER])
  assert rollout.subs == [] and rollout.trajectories == [rollout.main]


@pytest.mark.parametrize("arguments", [{}, {"task": 3}, {"task": " "}, {"task": None}, {"query": "x"}, {"task": ["x"]}])
def test_a_garbled_delegation_starts_nothing_and_costs_the_format(arguments):
  rollout = one([protocol.render_call("search", arguments), ANSWER])
  assert rollout.subs == [] and observations(rollout.main)[0] == protocol.BAD_CALL
  assert (rollout.main.result, rollout.main.format_ok) == ("Paris", False)


@pytest.mark.parametrize("turns", [["hm"] * 9, [RESULT("")], [RESULT("  ")]])
def test_a_sub_without_a_result_is_told_as_no_result(turns):
  rollout = one([ask("search", "a"), ANSWER], [("search", turns)])
  assert observations(rollout.main)[0] == protocol.NO_RESULT and rollout.main.format_ok


@pytest.mark.parametrize("text", [protocol.UNKNOWN_TOOL, protocol.BAD_CALL, protocol.ANSWER_NOW])
def test_what_a_sub_writes_never_costs_main_its_format(text):
  rollout = one([ask("search", "a"), ANSWER], [("search", [RESULT(text)])])
  assert observations(rollout.main)[0] == text and rollout.main.format_ok


def test_stand_ins_answer_in_place_of_a_sub_agent_and_take_no_part_in_training():
  asked = []
  stand_ins = {"search": lambda task: asked.append(task) or f"<{task}>", "reason": lambda task: None}
  rollout = one([ask("search", "a"), ask("reason", "b"), ANSWER], stand_ins=stand_ins)
  assert asked == ["a"] and observations(rollout.main) == ["<a>", protocol.NO_RESULT, None]
  assert [(s.weight, len(s.turns), s.result) for s in rollout.subs] == [(0.0, 0, "<a>"), (0.0, 0, None)]


# ---------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("threads", [0, 2])
def test_a_tool_that_raises_fails_its_trajectory_only(threads):
  tools = functools.partial(Tools, broken=("it",))
  rollout = one([ask("search", "a"), ask("reason", "b"), ANSWER], [("search", [LOOK, ANSWER]), ("reason", [RESULT("r")])],
                tools=tools, tool_threads=threads)
  sub = rollout.subs[0]
  assert (sub.status, sub.weight, sub.result, sub.format_ok) == ("failed", 0.0, None, False)
  assert sub.events[-1]["error"] == "ConnectionError: no route"
  assert observations(rollout.main) == [protocol.NO_RESULT, "r", None] and rollout.main.status == "finished"


def test_a_tool_session_that_cannot_be_made_is_a_failure_too():
  def tools(seed):
    raise OSError("no browser")

  rollout = one([ask("search", "a"), ANSWER], tools=tools)
  assert rollout.subs[0].status == "failed" and rollout.subs[0].events[-1]["error"] == "OSError: no browser"
  assert rollout.main.result == "Paris"


def test_a_tool_that_hangs_is_given_up_at_its_deadline_with_a_word_of_what_it_was():
  release = threading.Event()

  class Hangs:
    def call(self, name, arguments):
      release.wait(20)

  start = time.monotonic()
  rollout = one([ask("search", "a"), ANSWER], [("search", [LOOK])], tools=lambda seed: Hangs(), tool_threads=1, tool_deadline=0.2)
  release.set()
  assert time.monotonic() - start < 10 and rollout.subs[0].status == "failed"
  assert rollout.subs[0].events[-1]["error"] == "tool 'look' gave no answer in 0.2 s"


def test_a_failure_leaves_its_whole_rollout_out_of_the_statistics_but_stays_in_the_evaluation():
  # rollouts 0 and 1 right and wrong, 2 right with a failed sub, 3 where main itself is alone and right
  script = {"q/0/main/-1": [ask("search", "a"), ANSWER], "q/0/search/0": [RESULT("r")],
            "q/1/main/-1": [ask("search", "a"), RESULT("Rome")], "q/1/search/0": [RESULT("r")],
            "q/2/main/-1": [ask("search", "a"), ask("reason", "a"), ANSWER], "q/2/search/0": [LOOK], "q/2/reason/1": [RESULT("r")],
            "q/3/main/-1": [ANSWER]}
  tools = functools.partial(Tools, broken=("it",))
  correct = lambda result, query: result == query.answer  # noqa: E731
  rollouts = run_rollouts(team(script, tools=tools), [Job(QUERY, k) for k in range(4)])
  credit.score_rollouts(rollouts, correct=correct, experts={}, main_weights={}, sub_weights={}, overlong={"mode": "keep"})
  assert [t.weight for r in rollouts for t in r.trajectories] == [1, 1, 1, 1, 0, 0, 0, 1]
  options = dict(main="main", mode="weighted", advantage=dict(scale="none", baseline="mean", ddof=0, tol=1e-6), group_by="query",
                 zero_variance="keep", overlong={"mode": "keep"}, target=2, seed=0, size=8)
  group = credit.agent_group(rollouts, "main", **options)
  np.testing.assert_allclose(group.advantages, [0.3, -0.6, 0, 0.3], atol=1e-6)  # rewards 1, 0.1, -, 1
  np.testing.assert_allclose(credit.agent_group(rollouts, "search", **options).advantages, [0.2, -0.2, 0], atol=1e-6)

  # two questions: one whose main agent dies of its own tool, one that is right; accuracy is 1 of 2
  questions = [Query("dies", "?", "Paris"), Query("lives", "?", "Paris")]
  single = AgentRuntime("main", ScriptedEngine({"dies/0/main/-1": [LOOK], "lives/0/main/-1": [ANSWER]}), TOK, LIMITS, tools=tools, tool_names=("look",))
  result = evaluation.evaluate({"main": single}, questions, correct)
  assert result.correct.tolist() == [False, True] and result.accuracy == 0.5
  assert result.summary()["count"] == 2 and result.summary()["status_failed"] == 1


@pytest.mark.parametrize("fail_at", [1, 2, 4, 7])
@pytest.mark.parametrize("who", ["main", "search", "reason"])
def test_an_error_in_an_engine_leaves_nothing_open_in_any(who, fail_at):
  script = {f"q/{k}/{name}": turns for k in range(3) for name, turns in {
    "main/-1": [ask("search", "a"), ask("reason", "b"), ANSWER], "search/0": [LOOK, LOOK, RESULT("r")], "reason/1": [LOOK, LOOK, RESULT("r")]}.items()}
  agents = team(script, delay=3)
  agents[who].engine.fail_at = fail_at
  with pytest.raises(RuntimeError, match="the device is gone"):
    run_rollouts(agents, [Job(QUERY, k) for k in range(3)])
  assert clean(agents)
  assert all(r.main.result == "Paris" for r in run_rollouts(agents, [Job(QUERY, k) for k in range(3)]))


def test_an_error_of_the_caller_leaves_nothing_open_either():
  script = {"a/0/main/-1": [ANSWER], "b/0/main/-1": [ask("search", "a"), ANSWER], "b/0/search/0": [LOOK, "hm", RESULT("r")]}
  agents = team(script, delay=2)

  def progress(rollout):
    raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    run_rollouts(agents, [Job(Query("a", "?", ""), 0), Job(Query("b", "?", ""), 0)], progress=progress)
  assert clean(agents)


# ------------------------------------------------------------------------------ what is refused


def test_duplicate_jobs_are_refused():
  with pytest.raises(ValueError, match="same query and index"):
    run_rollouts(team(), [Job(QUERY, 0), Job(dataclasses.replace(QUERY, question="other"), 0)])
  run_rollouts(team({"q/0/main/-1": [ANSWER]}), [Job(QUERY, 0), Job(QUERY, 0, step=1), Job(QUERY, 0, seed=1)])


def test_teams_that_cannot_work_are_refused():
  agents = team()
  with pytest.raises(ValueError, match="no agent named 'boss'"):
    run_rollouts(agents, [], main="boss")
  with pytest.raises(ValueError, match="'reason', which has neither a runtime nor a stand-in"):
    run_rollouts({k: agents[k] for k in ("main", "search")}, [])
  run_rollouts({k: agents[k] for k in ("main", "search")}, [], stand_ins={"reason": lambda task: None})
  with pytest.raises(ValueError, match="share one engine"):
    run_rollouts({**agents, "search": dataclasses.replace(agents["search"], engine=agents["main"].engine)}, [])
  with pytest.raises(ValueError, match="no tool session"):
    run_rollouts({**agents, "search": dataclasses.replace(agents["search"], tools=None)}, [])


# ---------------------------------------------------------- timing, order, slots: nothing changes


def contents(rollouts):
  """All that a rollout is, comparable bit for bit."""
  return [[(t.agent, t.query_id, t.rollout, t.invocation, t.turn_index, t.task, t.status, t.result, t.format_ok, t.weight, str(t.events),
            *(x.tobytes() for x in (t.tokens, t.mask, t.logprobs, t.versions))) for t in r.trajectories] for r in rollouts]


def test_keys_are_fixed_for_ever_and_distinct():
  job = Job(QUERY, 3, seed=1, step=2)
  assert trajectory_key(job, "main", -1).tolist() == [3790403413, 2387883164]
  other = [dataclasses.replace(job, seed=9), dataclasses.replace(job, step=9), dataclasses.replace(job, index=9), dataclasses.replace(job, query=Query("r", "", ""))]
  keys = [trajectory_key(j, "main", -1) for j in [job, *other]] + [trajectory_key(job, "search", -1), trajectory_key(job, "main", 0)]
  assert len({tuple(k.tolist()) for k in keys}) == len(keys)
  # neither the text of the question nor the temperature takes part
  same = dataclasses.replace(job, query=dataclasses.replace(QUERY, question="x"), temperature=0.1)
  np.testing.assert_array_equal(trajectory_key(job, "main", -1), trajectory_key(same, "main", -1))


def test_pooled_tools_of_random_delays_give_the_rollouts_of_inline_ones():
  script = {}
  for k in range(6):
    script |= {f"q/{k}/main/-1": [ask("search", "a"), ask("reason", "b"), ANSWER], f"q/{k}/search/0": [LOOK] * (k % 3) + [RESULT("s")],
               f"q/{k}/reason/1": [LOOK] * 3 + [RESULT("r")]}
  jobs = [Job(QUERY, k) for k in range(6)]
  expected = contents(run_rollouts(team(script), jobs))
  for threads, delay in ((1, 0), (3, 2), (8, 5)):
    agents = team(script, tools=functools.partial(Tools, wait=0.02), delay=delay)
    assert contents(run_rollouts(agents, jobs, tool_threads=threads)) == expected
    assert clean(agents)


def test_rollouts_come_back_in_the_order_of_the_jobs_and_progress_sees_each_once():
  script = {f"q/{k}/main/-1": ["hm"] * (5 - k) + [ANSWER] for k in range(5)}
  seen = []
  rollouts = run_rollouts(team(script), (Job(QUERY, k) for k in range(5)), progress=lambda r: seen.append(r.index))
  assert [r.index for r in rollouts] == [0, 1, 2, 3, 4] and seen == [4, 3, 2, 1, 0]


# ------------------------------------------------------------------- the real engine, random trees

# A model whose next token hangs almost only on the last one, so that it writes valid turns at random, while its
# small attention makes every log-probability hang on the whole context.
NEXT = {TOK.control("<|assistant|>"): [TOK.encode(w)[0] for w in WRITTEN], **{TOK.encode(w)[0]: [END] for w in WRITTEN}}
MODEL = Transformer(ModelConfig(vocab_size=TOK.vocab_size, num_layers=1, embed_dim=32, num_heads=2, num_kv_heads=1, head_dim=8,
                                mlp_dim=32, tie_embeddings=False, init_std=0.1))


def random_policy(seed):
  params = jax.device_get(MODEL.init(jax.random.key(seed)))
  embedding, head = 0.02 * params["embedding"], 0.1 * params["lm_head"]
  for axis, (token, after) in enumerate(NEXT.items()):
    embedding[token, axis] = 1.0
    head[axis, after] += 1.6  # the final norm makes the axis sqrt(32) long: e^9 to the others' e^0
  return {**params, "embedding": embedding, "lm_head": head}


PARAMS = {name: random_policy(seed) for seed, name in enumerate(("main", "search", "reason"))}
REAL_LIMITS = Limits(turns=5, turn_tokens=6, tokens=40, calls=3, context=96, answer_reserve=8)


def real_team(**shapes):
  config = EngineConfig((END,), **{"slots": 4, "max_length": 96, "prefill_rows": 2, "buckets": (32,), "decode_chunk": 4, **shapes})
  agents = {}
  for name, params in PARAMS.items():
    subs = ("search", "reason") if name == "main" else ()
    agents[name] = AgentRuntime(name, LocalEngine(MODEL, params, config), TOK, REAL_LIMITS, tools=Tools, tool_names=("look",), delegates=subs)
  return agents


def idle(agents):
  return all(not a.engine._conversations and not a.engine.pending for a in agents.values())


def test_with_the_real_engine_a_rollout_is_a_function_of_its_name_alone():
  queries = [Query(f"q{i}", text, "x") for i, text in enumerate(("who?", "where is it, and why is it there?"))]
  jobs = [Job(q, k, seed=7, step=1) for q in queries for k in range(4)]
  agents = real_team()
  rollouts = run_rollouts(agents, jobs)
  expected = dict(zip(jobs, contents(rollouts)))
  assert idle(agents)
  calls = [len(r.subs) for r in rollouts]
  assert len(set(calls)) > 2 and {t.agent for r in rollouts for t in r.subs} == {"search", "reason"}, calls
  assert len({t.result for r in rollouts for t in r.trajectories}) > 1

  shuffled = random.Random(0).sample(jobs, len(jobs))
  assert dict(zip(shuffled, contents(run_rollouts(agents, shuffled)))) == expected  # the order, and engines used before
  few = run_rollouts(real_team(slots=2, decode_chunk=3), jobs, tool_threads=3)
  assert dict(zip(jobs, contents(few))) == expected  # slots and threads
  # with ONE slot a matrix product becomes a matrix-vector product, whose sums round otherwise
  for a, b in zip(rollouts, run_rollouts(real_team(slots=1), jobs)):
    for t, u in zip(a.trajectories, b.trajectories, strict=True):
      np.testing.assert_array_equal(t.tokens, u.tokens)
      np.testing.assert_allclose(t.logprobs, u.logprobs, atol=1e-5)
  for job in jobs[::3]:
    assert contents(run_rollouts(agents, [job])) == [expected[job]]  # other jobs
  assert contents(run_rollouts(agents, [dataclasses.replace(jobs[0], step=2)])) != [expected[jobs[0]]]

  def stop(rollout):
    raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    run_rollouts(agents, jobs, progress=stop)
  assert idle(agents)
  assert dict(zip(jobs, contents(run_rollouts(agents, jobs)))) == expected  # what was abandoned leaves no trace


def test_the_hash_of_names_is_fixed_for_ever():
  assert stable_hash("q") == 469535885
