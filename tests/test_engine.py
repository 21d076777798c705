"""The sampling engine: what any engine must do ("conformance"), then what the local one promises besides.

Another engine is held to the first part by adding its maker to the fixture `make`: a function of
(params, version) that gives an engine with the model, stop token and context of this file.
"""

import contextlib
import dataclasses
import functools

import jax
import numpy as np
import pytest

from mgrpo_jax.policy import logprobs, sharding, transformer
from mgrpo_jax.rollout.engine import EngineConfig, LocalEngine, TurnRequest

STOP, VOCAB, CONTEXT = 1, 40, 48
CONFIG = transformer.ModelConfig(vocab_size=VOCAB, num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2, head_dim=8,
                                 mlp_dim=48, token_shift=True, init_std=0.3)
MODEL = transformer.Transformer(CONFIG)
# Odd numbers of slots and rows: remainders of vector loops must not round differently.
SHAPES = EngineConfig(stop_tokens=(STOP,), slots=7, max_length=CONTEXT, prefill_rows=3, buckets=(4, 12), decode_chunk=5)


@functools.cache
def weights(seed=0):
  return MODEL.init(jax.random.key(seed))


def make_local(params, version=0):
  return LocalEngine(MODEL, params, SHAPES, version=version)


@pytest.fixture(params=[make_local], ids=["local"])
def make(request):
  return request.param


def ask(conversation, turn, tokens, *, seed=None, most=8, temperature=1.0):
  key = np.array([17, hash_of(conversation) if seed is None else seed], np.uint32)
  return TurnRequest(conversation, key, turn, np.asarray(tokens, np.int32), most, temperature)


def hash_of(name):
  return sum(ord(c) * 31**i for i, c in enumerate(name)) % 2**31


def drain(engine):
  done = []
  for _ in range(500):
    done += engine.step()
    if not engine.pending:
      return done
  raise AssertionError(f"{engine.pending} turns never ended")


def one(engine, request):
  engine.submit(request)
  (turn,) = drain(engine)
  return turn


def script(rng, name):
  """Random turns of a conversation: appended tokens, most new tokens, temperature."""
  return [ask(name, t, rng.integers(2, VOCAB, rng.integers(1, 15 if t else 20)), most=int(rng.integers(1, 8)),
              temperature=float(rng.choice([0.0, 0.7, 1.0, 1.3]))) for t in range(int(rng.integers(1, 4)))]


def content(turn):
  """Everything of a finished turn but its id, comparable bit for bit."""
  return (turn.conversation, turn.tokens.tolist(), turn.logprobs.tobytes(), turn.versions.tolist(), turn.finish)


def score(params, tokens, temperature=1.0):
  """The trainer's log-probabilities of one sequence."""
  tokens = np.asarray(tokens, np.int32)
  padded = np.zeros((1, CONTEXT), np.int32)
  padded[0, : len(tokens)] = tokens
  return np.asarray(TRAINER(params, padded, np.float32(temperature))[0][0])[: len(tokens)]


TRAINER = jax.jit(lambda params, tokens, temperature: logprobs.token_logprobs(
  MODEL, params, tokens, np.arange(CONTEXT)[None], np.zeros((1, CONTEXT), np.int32), temperature=temperature))


# ---- conformance


def test_each_turn_is_the_same_bits_whatever_runs_beside_it(make):
  """Alone and in random interleavings: other slots, other order, other neighbours, turns held back, early closes."""
  engine, rng = make(weights()), np.random.default_rng(0)
  scripts = {f"c{i}": script(rng, f"c{i}") for i in range(16)}
  alone = {}
  for name, requests in scripts.items():
    alone[name] = [content(one(engine, r)) for r in requests]
    engine.close(name)
  assert {turn[-1] for turns in alone.values() for turn in turns} >= {"stop", "length"}

  for seed in range(3):
    rng = np.random.default_rng(100 + seed)
    ready = [(name, 0) for name in rng.permutation(sorted(scripts))]
    got, submitted, held = {name: [] for name in scripts}, {}, []
    while ready or held or engine.pending:
      for name, turn in [ready.pop(0) for _ in range(min(len(ready), int(rng.integers(0, 5))))]:
        submitted[engine.submit(scripts[name][turn])] = (name, turn)
      done = engine.step()
      assert [t.id for t in done] == sorted(t.id for t in done)
      for finished in done:
        name, turn = submitted.pop(finished.id)
        got[name].append(content(finished))
        if turn + 1 < len(scripts[name]):
          held.append((name, turn + 1))
        else:
          engine.close(name)
      rng.shuffle(held)
      ready, held = ready + held[:2], held[2:]
    assert got == alone


def test_tokens_follow_the_trajectorys_keys_and_the_trainers_distribution(make):
  """Two turns recomputed from the trainer's own logits: key fold_in(fold_in(key, turn), position), Gumbel maximum."""
  params = weights()
  for temperature in (1.0, 0.6, 0.0):
    engine, sequence = make(params), []
    for turn, appended in enumerate(([5, 6, 7, 8, 9, 10, 11], [12, 13])):
      request = ask("a", turn, appended, temperature=temperature, most=6)
      finished = one(engine, request)
      sequence += appended
      assert len(finished.tokens) and finished.versions.tolist() == [0] * len(finished.tokens)
      for token, logprob in zip(finished.tokens, finished.logprobs, strict=True):
        padded = np.zeros((1, CONTEXT), np.int32)
        padded[0, : len(sequence)] = sequence
        logits = LOGITS(params, padded)[0, len(sequence) - 1]
        key = jax.random.fold_in(jax.random.wrap_key_data(request.key), turn)
        noise = jax.random.gumbel(jax.random.fold_in(key, len(sequence)), (VOCAB,))
        assert token == int(np.argmax(logits + temperature * noise))
        scaled = np.asarray(logits, np.float64) / (temperature or 1.0)
        assert abs(logprob - (scaled - np.log(np.exp(scaled).sum()))[token]) < 1e-4
        sequence.append(int(token))


LOGITS = jax.jit(lambda params, tokens: MODEL.logits(
  params, MODEL.forward(params, tokens, np.arange(CONTEXT)[None], np.zeros((1, CONTEXT), np.int32))))


def test_sampled_logprobs_agree_with_the_trainer_over_many_turns(make):
  params, rng = weights(), np.random.default_rng(5)
  engine = make(params)
  tokens, spans = {f"t{i}": [] for i in range(6)}, {f"t{i}": [] for i in range(6)}
  for turn in range(3):
    for name in tokens:
      appended = rng.integers(2, VOCAB, rng.integers(1, 9)).tolist()
      engine.submit(ask(name, turn, appended, temperature=0.8))
      tokens[name] += appended
    for finished in drain(engine):
      if finished.finish == "context":
        continue
      spans[finished.conversation].append((len(tokens[finished.conversation]), finished))
      tokens[finished.conversation] += finished.tokens.tolist()
  assert sum(len(s) for s in spans.values()) == 18
  for name, sequence in tokens.items():
    want = score(params, sequence, 0.8)
    for first, finished in spans[name]:
      np.testing.assert_allclose(finished.logprobs, want[first : first + len(finished.tokens)], atol=1e-4)


def test_frequencies_of_the_first_token_are_the_models_probabilities(make):
  params = weights()
  engine = make(params)
  counts = np.zeros(VOCAB)
  for i in range(700):
    engine.submit(ask(f"f{i}", 0, [4, 9, 2], seed=i, most=1))
  while engine.pending:
    for finished in engine.step():
      counts[finished.tokens[0]] += 1
      engine.close(finished.conversation)
  p = np.exp([score(params, [4, 9, 2, v])[3] for v in range(VOCAB)])
  np.testing.assert_allclose(p.sum(), 1, atol=1e-4)
  common = p * 700 >= 5
  chi2 = (((counts - 700 * p) ** 2) / (700 * p))[common].sum()
  assert chi2 < 2.2 * common.sum()  # about 5 standard deviations at this many cells


def test_new_weights_give_a_cold_engines_logprobs_to_a_conversation_in_flight(make):
  """O55: nothing that old weights left in a cache may be used again."""
  old, new = weights(0), weights(1)
  engine, cold = make(old, 3), make(new, 4)
  first = one(engine, ask("a", 0, range(2, 12)))
  assert first.versions.tolist() == [3] * len(first.tokens)
  engine.set_weights(new, 4)
  assert engine.version == 4
  request = ask("a", 1, [7, 8, 9])
  warm = one(engine, request)
  whole = dataclasses.replace(request, tokens=np.array([*range(2, 12), *first.tokens, 7, 8, 9], np.int32))
  assert content(warm) == content(one(cold, whole))
  assert warm.versions.tolist() == [4] * len(warm.tokens)
  assert content(warm) != content(one(make(old, 4), whole))


def test_weights_arriving_in_mid_turn_wait_for_the_turns_being_sampled(make):
  old, new = weights(0), weights(1)
  engine, reference = make(old), make(old)
  long = ask("a", 0, range(2, 12), most=20, seed=4)
  want = content(one(reference, long))
  assert len(want[1]) > 6, "the turn must outlast a step"
  engine.submit(long)
  assert engine.step() == []
  engine.set_weights(new, 1)
  late = ask("b", 0, [5, 6])
  engine.submit(late)
  done = {t.conversation: t for t in drain(engine)}
  assert content(done["a"]) == want
  assert content(done["b"]) == content(one(make(new, 1), late))


def test_stop_and_budget_and_context_end_a_turn(make):
  engine = make(weights())
  ends = [one(engine, ask(f"s{i}", 0, [3, 4, 5], most=30)) for i in range(6)]
  assert any(t.finish == "stop" for t in ends)
  for t in ends:
    stops = [i for i, token in enumerate(t.tokens) if token == STOP]
    assert stops == ([len(t.tokens) - 1] if t.finish == "stop" else [])
  for t in ends:
    engine.close(t.conversation)
  short = one(engine, ask("one", 0, [3, 4, 5], most=1))
  assert len(short.tokens) == 1
  # The context holds prompt and sample: 46 + 2 = 48, and not one more.
  full = one(engine, ask("full", 0, np.arange(46) % 30 + 2, most=30, seed=2))
  assert (len(full.tokens), full.finish) == (2, "length")
  over = one(engine, ask("full", 1, [5]))
  assert (over.finish, len(over.tokens), len(over.logprobs), len(over.versions)) == ("context", 0, 0, 0)
  assert one(engine, ask("long", 0, [5] * 48)).finish == "context"
  assert one(engine, ask("last", 0, [5] * 47, most=9)).tokens.shape == (1,)


def test_a_refused_context_leaves_the_conversation_as_it_was(make):
  engine, reference = make(weights()), make(weights())
  for e in (engine, reference):
    one(e, ask("a", 0, [3, 4, 5], most=4))
  assert one(engine, ask("a", 1, [5] * 48)).finish == "context"
  request = ask("a", 1, [6, 7])
  assert content(one(engine, request)) == content(one(reference, request))


def test_more_conversations_than_slots_wait_their_turn_and_closing_frees(make):
  engine = make(weights())
  ids = [engine.submit(ask(f"q{i}", 0, [3, i + 2], most=3)) for i in range(20)]
  assert ids == list(range(ids[0], ids[0] + 20)) and engine.pending == 20
  finished = []
  while engine.pending:
    for turn in engine.step():
      finished.append(turn.id)
      engine.close(turn.conversation)
  assert finished == ids


def test_closing_drops_a_turn_in_flight_or_in_the_queue(make):
  engine = make(weights())
  for i in range(9):
    engine.submit(ask(f"d{i}", 0, [3, i + 2], most=20))
  engine.dispatch()
  engine.close("d0")  # running
  engine.close("d8")  # waiting for a slot
  engine.close("nobody")
  done = engine.fetch()
  again = ask("d0", 0, [9, 9], most=4)
  engine.submit(again)
  for turn in [*done]:
    engine.close(turn.conversation)
  while engine.pending:
    for turn in engine.step():
      done.append(turn)
      engine.close(turn.conversation)
  assert sorted(t.conversation for t in done) == [f"d{i}" for i in range(8)]
  assert content(next(t for t in done if t.conversation == "d0")) == content(one(make(weights()), again))


def test_bad_requests_are_refused_in_a_sentence_and_leave_no_trace(make):
  engine = make(weights())
  good = ask("a", 0, [3, 4])
  for change, words in [
    ({"tokens": np.array([3, VOCAB])}, "tokens must be in 0..39"),
    ({"tokens": np.array([-1])}, "tokens must be in 0..39"),
    ({"tokens": np.array([], np.int32)}, "at least one token"),
    ({"max_new_tokens": 0}, "max_new_tokens is 0"),
    ({"temperature": -1.0}, "temperature -1.0"),
    ({"temperature": float("nan")}, "temperature nan"),
    ({"key": np.uint32(3)}, "two uint32 numbers"),
  ]:
    with pytest.raises(ValueError, match=words):
      engine.submit(dataclasses.replace(good, **change))
  assert engine.pending == 0
  engine.submit(good)
  with pytest.raises(ValueError, match="'a' has a turn in flight"):
    engine.submit(ask("a", 1, [5]))
  assert len(drain(engine)) == 1


# ---- the local engine


@pytest.fixture(scope="module")
def warmed():
  """(an engine of shapes that no other test uses, warmed up; what was compiled for it)."""
  engine = LocalEngine(MODEL, weights(), dataclasses.replace(SHAPES, decode_chunk=16))
  with compilations() as seen:
    engine.warm_up()
  return engine, seen


@contextlib.contextmanager
def compilations():
  """A list that fills with the compilations of the block."""
  seen, open_ = [], [True]

  def listen(event, duration, **kwargs):
    if open_ and "backend_compile" in event:
      seen.append(event)

  jax.monitoring.register_event_duration_secs_listener(listen)
  yield seen
  open_.clear()  # listeners cannot be taken off one by one


def test_nothing_compiles_after_warm_up(warmed):
  engine, seen = warmed
  assert len(seen) >= len(SHAPES.buckets) + 1, "the listener must hear the warm-up"
  rng, new = np.random.default_rng(1), weights(1)
  with compilations() as seen:
    for i in range(6):
      for request in script(rng, f"w{i}"):
        one(engine, request)
      engine.close(f"w{i}")
    engine.set_weights(new, 1)
    one(engine, ask("after", 0, range(2, 30)))
    engine.set_weights(weights(), 0)
    engine.close("after")
  assert seen == []


def test_stats_count_real_work_and_padding():
  engine = make_local(weights())
  # 30 tokens = 12 + 12 + 6 in a bucket of 12; 3 tokens in a bucket of 4; three rows a call.
  engine.submit(ask("a", 0, [5] * 30, most=6, temperature=0.0))
  engine.submit(ask("b", 0, [5] * 3, most=6, temperature=0.0))
  sampled = sum(len(t.tokens) for t in drain(engine))
  stats = engine.stats
  assert (stats.prefill_tokens, stats.prefill_padded) == (33, 3 * (12 * 3 + 4))
  assert (stats.turns, stats.sampled_tokens, stats.slots_used) == (2, sampled, 2)
  assert 1 <= stats.decode_iterations <= 5  # the first token of each comes with the prefill
  # The next turn appends to the cache: only the last sampled token and the new ones are computed.
  one(engine, ask("a", 1, [6, 7], most=1))
  assert engine.stats.prefill_tokens == 33 + 3


def test_rollouts_of_one_prompt_prefill_it_once_and_sample_what_each_would_alone():
  """Twice the slots' worth of conversations on two prompts, one of several chunks; then another turn, then new weights."""
  prompts = {"long": list(range(2, 32)), "short": [5, 6, 7]}
  names = [(f"{p}{k}", p) for k in range(7) for p in prompts]
  expected = {}
  for name, p in names:
    alone = make_local(weights())
    expected[name] = [content(one(alone, ask(name, 0, prompts[p]))), content(one(alone, ask(name, 1, [8, 9])))]
  engine, got = make_local(weights()), {name: [] for name, _ in names}
  for name, p in names:
    engine.submit(ask(name, 0, prompts[p]))
  while engine.pending:
    for turn in engine.step():
      got[turn.conversation].append(content(turn))
      if len(got[turn.conversation]) == 1:
        engine.submit(ask(turn.conversation, 1, [8, 9]))
      else:
        engine.close(turn.conversation)
  assert got == expected and len({str(turns[0][1]) for turns in got.values()}) > 8
  later = sum(1 + 2 for _ in names)  # of the second turns: the last sampled token and the new ones
  # a prompt is prefilled again only when nobody who holds it is left
  shared = engine.stats.prefill_tokens - later
  assert engine.stats.copied_tokens + shared == 7 * 33 and shared <= 3 * 33, engine.stats
  assert not engine._prompts
  engine.set_weights(weights(1), 1)
  for name in ("a", "b"):
    engine.submit(ask(name, 0, prompts["long"]))
  engine.step()
  engine.set_weights(weights(2), 2)
  drain(engine)  # what the old weights computed is not handed on
  assert content(one(engine, ask("c", 0, prompts["long"])))[1:3] == content(one(make_local(weights(2), 2), ask("c", 0, prompts["long"])))[1:3]


def test_the_loop_ends_when_every_turn_has_ended():
  engine = make_local(weights())
  one(engine, ask("a", 0, [3, 4], most=3))
  assert engine.stats.decode_iterations <= 2 and engine.stats.steps == 1


def test_decode_chunk_changes_no_bit(warmed):
  got = []
  for engine in (warmed[0], make_local(weights())):
    for i in range(5):
      engine.submit(ask(f"c{i}", 0, range(2, 5 + i), most=12))
    got.append(sorted(content(t) for t in drain(engine)))
  assert got[0] == got[1]


def test_experts_are_mixed_for_each_row_the_same_whatever_its_neighbours_choose():
  """All tokens of a call are sorted by expert and multiplied in one ragged product: whom a token stands beside changes with them."""
  moe = transformer.Transformer(dataclasses.replace(CONFIG, num_experts=8, experts_per_token=2, expert_dim=24))
  params = moe.init(jax.random.key(3))
  requests = [ask(f"x{i}", 0, range(2 + i, 9 + 2 * i), most=8) for i in range(9)]
  alone, together = (LocalEngine(moe, params, SHAPES) for _ in range(2))
  expected = {}
  for r in requests:
    expected[r.conversation] = content(one(alone, r))
    alone.close(r.conversation)
  for r in requests:
    together.submit(r)
  got = {}
  while together.pending:
    for turn in together.step():
      got[turn.conversation] = content(turn)
      together.close(turn.conversation)
  assert got == expected and len({tuple(c[1]) for c in got.values()}) > 5


def test_an_engine_on_a_mesh_samples_the_same():
  """2 x 2 devices: slots over data (8 divides, 7 does not), heads and vocabulary over tensor."""
  params, requests = weights(), [ask(f"m{i}", 0, range(2, 6 + i), most=6) for i in range(9)]
  mesh = sharding.make_mesh({"data": 2, "tensor": 2}, jax.devices()[4:])
  shapes = dataclasses.replace(SHAPES, slots=8)
  engine = LocalEngine(MODEL, params, shapes, mesh=mesh)
  assert engine._state["cache"][0][0].addressable_shards[0].data.shape == (4, 1, CONTEXT, 8)
  want = make_local(params)
  results = []
  for e in (engine, want):
    done = []
    for r in requests:
      e.submit(r)
    while e.pending:
      for turn in e.step():
        done.append(turn)
        e.close(turn.conversation)
    results.append(sorted(done, key=lambda t: t.id))
  assert engine._state["cache"][0][0].addressable_shards[0].data.shape == (4, 1, CONTEXT, 8)
  for got, expected in zip(*results, strict=True):
    assert got.tokens.tolist() == expected.tokens.tolist() and got.finish == expected.finish
    np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=1e-4)
  assert LocalEngine(MODEL, params, SHAPES, mesh=mesh)._state["length"].sharding.is_fully_replicated


def test_the_callers_weights_may_be_donated_after_handing_them_over():
  params = jax.tree.map(lambda x: x + 0, weights())
  engine, reference = make_local(params), make_local(weights())
  jax.jit(lambda p: jax.tree.map(lambda x: x * 0, p), donate_argnums=0)(params)
  assert params["embedding"].is_deleted()
  request = ask("a", 0, [3, 4, 5])
  assert content(one(engine, request)) == content(one(reference, request))


def test_without_a_copy_it_samples_from_the_callers_buffers():
  params = jax.tree.map(lambda x: x + 0, weights())
  engine = LocalEngine(MODEL, params, SHAPES, copy=False)
  request = ask("a", 0, [3, 4, 5])
  assert content(one(engine, request)) == content(one(make_local(weights()), request))
  moved = jax.jit(lambda p: jax.tree.map(lambda x: x * 1, p), donate_argnums=0)(params)  # as an update does
  with pytest.raises((RuntimeError, ValueError), match="deleted"):
    one(engine, ask("b", 0, [3]))
  again = LocalEngine(MODEL, moved, SHAPES, copy=False)
  again.set_weights(moved, 1)
  assert content(one(again, request))[1:3] == content(one(make_local(weights()), request))[1:3]


def test_impossible_shapes_and_misuse_are_refused():
  with pytest.raises(ValueError, match="must be ascending"):
    dataclasses.replace(SHAPES, buckets=(12, 4))
  with pytest.raises(ValueError, match="engine.slots is 0"):
    dataclasses.replace(SHAPES, slots=0)
  with pytest.raises(ValueError, match="must be ids of the vocabulary of"):
    LocalEngine(MODEL, weights(), dataclasses.replace(SHAPES, stop_tokens=(VOCAB,)))
  engine = make_local(weights())
  with pytest.raises(RuntimeError, match="before dispatch"):
    engine.fetch()
  engine.dispatch()
  with pytest.raises(RuntimeError, match="twice"):
    engine.dispatch()
