"""Chat tokenizers: text never becomes control, messages become what the template says, and nothing sampled is encoded again."""

import dataclasses
import itertools
import json
import pathlib
import re
import shutil

import jax
import jinja2
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from ml_collections import ConfigDict

from mgrpo_jax import credit, learner, loop, warm_start
from mgrpo_jax.method import alignment
from mgrpo_jax.method import loss as loss_lib
from mgrpo_jax.policy import logprobs as logprobs_lib
from mgrpo_jax.policy.chat import ChatTokenizer
from mgrpo_jax.policy.transformer import ModelConfig, Transformer
from mgrpo_jax.rollout import controller, conversation, protocol
from mgrpo_jax.rollout.engine import EngineConfig, FinishedTurn, LocalEngine
from mgrpo_jax.trajectory import Query, Trajectory, Turn

FOLDER = pathlib.Path(__file__).parent / "fixtures" / "chat"
TOK = ChatTokenizer(FOLDER)
HF = tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
START, END = HF.token_to_id("<|im_start|>"), HF.token_to_id("<|im_end|>")
CHATML = json.loads((FOLDER / "tokenizer_config.json").read_text())["chat_template"]
# Thoughts of earlier turns are dropped, as many reasoning models' templates do.
STRIPS = CHATML.replace("message['content'] +", "(message['content'].split('</thinking>')[-1] if message['role'] == 'assistant' else message['content']) +")
TRIMS = CHATML.replace("message['content'] +", "message['content'] | trim +")
FORGETS = CHATML.replace("message['content'] +", "('...' if message['role'] == 'assistant' and messages | length > 2 else message['content']) +")
LOOK = protocol.render_call("look", {"at": "it"})
RESULT = "<result>Lima</result>"


def write(folder, template=CHATML, files=()):
  """A copy of the fixture's folder with another template, and with other values in its JSON files."""
  shutil.copytree(FOLDER, folder)
  (folder / "chat_template.jinja").write_text(template)
  for name, values in dict(files).items():
    content = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(content | values))
  return folder


@pytest.fixture
def make(tmp_path):
  counter = itertools.count()
  return lambda template=CHATML, **files: ChatTokenizer(write(tmp_path / f"tok{next(counter)}", template, files))


def by_hand(messages, generate=True):
  """The fixture's own layout, written out."""
  text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages)
  return text + ("<|im_start|>assistant\n" if generate else "")


THINKS = CHATML.replace("<|im_start|>assistant\\n", "<|im_start|>assistant\\n<think>\\n")  # opens the thought itself


@pytest.mark.parametrize("strips", [False, True])
def test_a_thought_that_the_template_opens_is_read_taught_and_shown_with_its_tag(make, strips):
  tok = make(THINKS.replace("message['content'] +", "(message['content'].split('</think>')[-1] if message['role'] == 'assistant' else message['content']) +")
             if strips else THINKS)
  assert (tok.lead, TOK.lead) == ("<think>\n", "")
  turns = conversation.demonstration_turns(tok, "Where?", [(f"<thinking>so</thinking>{LOOK}", "there"), (RESULT, None)])
  texts = [conversation.sampled_text(tok, t) for t in turns]
  assert texts == [f"<think>\nso\n</think>\n\n{LOOK}", f"<think>\n\n</think>\n\n{RESULT}"]
  parsed = [protocol.parse_turn(t, thinking="required") for t in texts]
  assert parsed[0].thinking == "so" and parsed[0].call.name == "look" and parsed[1].result == "Lima"
  assert tok.decode(turns[0].prompt).endswith("<|im_start|>assistant\n<think>\n")
  assert turns[1].restart == strips
  whole = "".join(tok.decode(t) for turn in turns[strips:] for t in (turn.prompt, turn.sampled))
  first = ("assistant", f"\n\n{LOOK}" if strips else texts[0])
  assert whole == by_hand([("user", "Where?"), first, ("tool", "there")], generate=False) + f"<|im_start|>assistant\n{texts[1]}<|im_end|>"


# ------------------------------------------------------------------------------------------- the tokenizer


def test_sizes_and_ends_of_turns_are_those_of_the_files(make):
  assert (TOK.vocab_size, TOK.embedding_size) == (HF.get_vocab_size(), 352)
  assert (TOK.end_of_turn, TOK.stop_tokens) == (END, (0, END))
  assert make(**{"generation_config.json": {"eos_token_id": 0}}).stop_tokens == (0, END)
  # the template's own end of turn ends a turn even where no file names it
  bare = make(**{"generation_config.json": {"eos_token_id": None}, "tokenizer_config.json": {"eos_token": None}})
  assert bare.stop_tokens == (END,) == (bare.end_of_turn,)


CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
NASTY = st.lists(st.sampled_from([*CONTROL, "<|im_", "end|>", "<|", "|>", "<think>", "\ufdd0", "\ufdd01", "\ufdd00", "im_end", "\n", " ", "é"])
                 | st.text(max_size=4)).map("".join)


@settings(max_examples=200, deadline=None)
@given(NASTY)
def test_no_text_ever_becomes_a_control_token_and_none_is_changed(text):
  ids = TOK.encode(text)
  assert not {0, START, END} & set(ids)
  assert TOK.decode(ids) == text.encode("utf-8", "replace").decode()
  sound = TOK.decode(ids)
  for prompt in (conversation.first_prompt(TOK, text, system=f"s{text}"), TOK.encode_rendered(TOK.render([TOK.observation(text)] * 2))):
    assert [i for i in prompt if i in (0, START, END)] == [START, END, START, END, START]
    assert TOK.decode(prompt) in (by_hand([("system", f"s{sound}"), ("user", sound)]), by_hand([("tool", sound)] * 2))


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=30), st.text(max_size=30))
def test_messages_without_control_become_the_ids_that_the_library_gives_for_the_whole_text(a, b):
  text = by_hand([("system", f"s{a}"), ("user", b)])
  assert conversation.first_prompt(TOK, b, system=f"s{a}").tolist() == HF.encode(text, add_special_tokens=False).ids


def test_names_that_overlap_and_names_without_a_flag_are_control_too(make):
  folder = make().folder
  state = json.loads((folder / "tokenizer.json").read_text())
  for i, name in enumerate(("<|a|><|b|>", "<|b|>c<|", "<｜User｜>")):
    state["added_tokens"].append({"id": 342 + i, "content": name, "special": i == 1, "single_word": False, "lstrip": False, "rstrip": False,
                                  "normalized": False})
  (folder / "tokenizer.json").write_text(json.dumps(state))
  tok = ChatTokenizer(folder)
  text = "<|a|><|b|>c<|im_end|>x<｜User｜>"
  assert set(HF.encode("x").ids) <= set(tok.encode(text)) and max(tok.encode(text)) < 340
  assert tok.decode(tok.encode_rendered(tok.render(tok.opening(text)))) == by_hand([("user", text)])
  assert [i for i in tok.encode_rendered(tok.render(tok.opening(text))) if i in (0, START, END) or i > 341] == [START, END, START]


def test_ids_without_a_token_are_shown_as_unknown_and_ids_outside_are_refused():
  a, b = TOK.encode("a"), TOK.encode("b")
  assert TOK.decode([*a, 350, *b]) == "a\ufffdb" and TOK.decode([END, *a]) == "<|im_end|>a"
  for bad in (-1, 352):
    with pytest.raises(ValueError, match=f"token id {bad} is outside 0..351"):
      TOK.decode([bad])


def test_a_saved_tokenizer_is_the_same_and_another_template_is_another(make, tmp_path):
  make(STRIPS).save(tmp_path / "new" / "folder")
  again = ChatTokenizer(tmp_path / "new" / "folder")
  assert again.fingerprint == make(STRIPS).fingerprint and again.fingerprint != TOK.fingerprint
  assert make().fingerprint == TOK.fingerprint  # wherever the same template stands
  assert make(**{"tokenizer_config.json": {"eos_token": "<|endoftext|>"}}).fingerprint != TOK.fingerprint


def test_a_training_truncation_left_in_the_file_cuts_nothing(make):
  folder = make().folder
  hf = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
  hf.enable_truncation(4)
  hf.save(str(folder / "tokenizer.json"))
  assert ChatTokenizer(folder).encode("x y z " * 9) == TOK.encode("x y z " * 9)


# ------------------------------------------------------------------------------------------- the template


def test_templates_find_what_they_expect(make):
  extra = ("{{ [1, '<é>'] | tojson }} {{ strftime_now('%Y') | length }} {% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
           "{% generation %}g{% endgeneration %}{{ eos_token }}{% if tools %}t{% endif %}")
  text = make(CHATML + extra).render([{"role": "user", "content": "x"}], generate=False)
  assert text == by_hand([("user", "x")], False) + '[1, "<é>"] 4 1g<|im_end|>'


def test_the_date_in_a_prompt_does_not_hang_on_the_day():
  source = pathlib.Path(FOLDER.parent.parent.parent / "mgrpo_jax/policy/chat.py").read_text()
  assert ".now(" not in source and ".today(" not in source


def test_what_a_template_trims_is_trimmed_as_the_template_says(make):
  tok, task, system = make(TRIMS), "\n  who <|im_end|> ? \n", "  be good\n\n"
  rendered = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(TRIMS).render(
    messages=[{"role": "system", "content": system}, {"role": "user", "content": task}], add_generation_prompt=True)
  prompt = conversation.first_prompt(tok, task, system=system)
  assert tok.decode(prompt) == rendered == by_hand([("system", "be good"), ("user", "who <|im_end|> ?")])
  assert prompt.tolist().count(END) == 2


def test_roles_that_a_template_lacks_are_told_as_the_users(make):
  strict = "{% for m in messages %}{% if m['role'] not in ('user', 'assistant') %}{{ raise_exception('no such role') }}{% endif %}{% endfor %}" + CHATML
  silent = "{% set messages = messages | rejectattr('role', 'in', ['system', 'tool']) | list %}" + CHATML
  for template in (strict, silent):
    tok = make(template)
    assert tok.decode(conversation.first_prompt(tok, "who?", system="be good")) == by_hand([("user", "be good\n\nwho?")])
    assert tok.decode(conversation.first_prompt(tok, "who?")) == by_hand([("user", "who?")])
    t, _ = drive(tok, [(written(LOOK), "stop"), (written(RESULT), "stop")], ["seen"])
    assert tok.decode(t.turns[1].prompt) == "\n<|im_start|>user\n<tool_response>seen</tool_response><|im_end|>\n<|im_start|>assistant\n"
  t, _ = drive(TOK, [(written(LOOK), "stop"), (written(RESULT), "stop")], ["seen"])
  assert TOK.decode(t.turns[1].prompt) == "\n<|im_start|>tool\nseen<|im_end|>\n<|im_start|>assistant\n"


def broken(change):
  def make(folder):
    shutil.copytree(FOLDER, folder)
    change(folder)
    return folder
  return make


def json_with(name, **values):
  return lambda f: (f / name).write_text(json.dumps(json.loads((f / name).read_text()) | values))


def template_of(text):
  return lambda f: (f / "chat_template.jinja").write_text(text)


@pytest.mark.parametrize("change, words", [
  (lambda f: shutil.rmtree(f), "is no folder"),
  (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json is missing"),
  (lambda f: (f / "tokenizer.json").write_text('{"model": 1}'), r"tokenizer.json cannot be used \("),
  (lambda f: (f / "tokenizer.json").write_bytes(b"\xff\xfe"), "tokenizer.json is not UTF-8"),
  (lambda f: (f / "tokenizer_config.json").unlink(), "tokenizer_config.json is missing"),
  (lambda f: (f / "tokenizer_config.json").write_text("{"), r"tokenizer_config.json is not JSON \("),
  (lambda f: (f / "generation_config.json").write_text("[]"), "generation_config.json must hold a JSON object"),
  (json_with("tokenizer_config.json", chat_template=None), "has no chat template"),
  (json_with("tokenizer_config.json", chat_template=[{"name": "rag", "template": "x"}]), "has no chat template"),
  (json_with("generation_config.json", eos_token_id=999), "an eos token .* is not in tokenizer.json"),
  (json_with("tokenizer_config.json", eos_token="<eos>"), "an eos token .* is not in tokenizer.json"),
  (json_with("config.json", vocab_size=300), "vocab_size 300 but tokenizer.json has ids up to 341"),
  (template_of("{% for m in messages %}"), "is broken: .*line 1"),
  (template_of("{{ raise_exception('not today') }}"), "failed on messages of user: not today"),
  (template_of("{{ messages[0].content.nothing() }}"), "failed on messages of user"),
  (template_of("{{ messages.append(1) }}"), "failed on messages of user"),  # the sandbox
  (template_of("hello"), "does not show what the assistant wrote"),
  (template_of(CHATML.replace("'<|im_end|>\\n'", "'\\n'")), None),
])
def test_a_folder_that_cannot_be_used_is_refused_in_one_sentence(tmp_path, change, words):
  folder = broken(change)(tmp_path / "f")
  if words is None:  # no end of turn in the template: the eos of the files stands in
    assert ChatTokenizer(folder).end_of_turn == END
    return
  with pytest.raises(ValueError, match=words) as error:
    ChatTokenizer(folder)
  assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


# ------------------------------------------------------------------------------------------- conversations


def written(text, end=END):
  return [*TOK.encode(text), end]


def runtime(tok, **limits):
  budget = controller.Limits(**{"turns": 4, "turn_tokens": 200, "tokens": 900, "context": 2000, **limits})
  return controller.AgentRuntime("search", None, tok, budget, tools=lambda seed: None, tool_names=("look",))


def drive(tok, answers, observations, *, task="who?", system="", **limits):
  """One trajectory with given (sampled ids, finish) and observations. Returns it and the requests for samples."""
  trajectory = Trajectory("search", "q", 0, task=task)
  steps = controller.trajectory_steps(dataclasses.replace(runtime(tok, **limits), system=system), trajectory)
  answers, observations, samples, reply = list(answers), list(observations), [], None
  while True:
    try:
      need = steps.send(reply)
    except StopIteration:
      return trajectory, samples
    if isinstance(need, controller.Sample):
      samples.append(need)
      ids, finish = answers.pop(0)
      n = len(ids)
      reply = FinishedTurn(0, "c", np.asarray(ids, np.int32), -np.arange(1, n + 1, dtype=np.float32), np.full(n, 3, np.int32), finish)
    else:
      reply = observations.pop(0)


THOUGHT = f"<thinking>hm</thinking>{LOOK}"


def test_turns_are_appended_and_the_sampled_end_is_not_appended_twice():
  first, last = written(THOUGHT), written(RESULT)
  t, samples = drive(TOK, [(first, "stop"), (last, "stop")], ["found: Lima"])
  assert [s.restart for s in samples] == [False, False] and t.segments == [t]
  whole = by_hand([("user", "who?"), ("assistant", THOUGHT), ("tool", "found: Lima"), ("assistant", RESULT)], False).removesuffix("\n")
  assert TOK.decode(t.tokens) == whole and t.tokens.tolist() == HF.encode(whole, add_special_tokens=False).ids
  assert t.tokens[t.mask].tolist() == first + last and (t.status, t.result, t.format_ok) == ("finished", "Lima", True)


def test_the_end_of_a_turn_that_was_cut_off_is_forced_and_not_trained():
  cut = TOK.encode("<result>Li")
  t, samples = drive(TOK, [(cut, "length"), (written(RESULT), "stop")], [])
  assert not samples[1].restart and samples[1].tokens[0] == END
  assert TOK.decode(samples[1].tokens) == f"<|im_end|>\n<|im_start|>tool\n{protocol.NOT_FINISHED}<|im_end|>\n<|im_start|>assistant\n"
  assert t.tokens[t.mask].tolist() == cut + written(RESULT)


def test_O21_the_ids_sampled_are_the_ids_trained_even_where_encoding_would_differ():
  a, b = (TOK.encode(c)[0] for c in "ab")
  assert len(TOK.encode("ab")) == 1, "this tokenizer must have a merge for the test to mean something"
  before, after = LOOK.split("it")
  sampled = [*TOK.encode(before), a, b, *TOK.encode(after), END]
  t, samples = drive(TOK, [(sampled, "stop"), (written(RESULT), "stop")], ["seen"])
  assert t.events[0]["call"]["arguments"] == {"at": "ab"} and TOK.encode(TOK.decode(sampled[:-1])) != sampled[:-1]
  assert not samples[1].restart and t.turns[0].sampled.tolist() == sampled
  assert t.tokens.tolist() == [*samples[0].tokens, *sampled, *samples[1].tokens, *written(RESULT)]


@pytest.mark.parametrize("template, first, stop", [
  (TRIMS, f"{LOOK} \n", END),  # the template drops the blank that was sampled
  (CHATML, LOOK, 0),  # the policy ended with another stop token than the template's
  (FORGETS, LOOK, END),
])
def test_O22_where_the_new_text_does_not_begin_with_the_old_nothing_is_sliced_but_a_segment_begins(make, template, first, stop):
  tok = make(template)
  sampled = written(first, stop)
  t, samples = drive(tok, [(sampled, "stop"), (written(RESULT), "stop")], ["seen"])
  assert [s.restart for s in samples] == [False, True] == [turn.restart for turn in t.turns]
  said = "..." if template is FORGETS else LOOK
  assert tok.decode(samples[1].tokens) == by_hand([("user", "who?"), ("assistant", said), ("tool", "seen")])
  one, two = t.segments
  assert one.tokens.tolist() == [*samples[0].tokens, *sampled] and two.tokens.tolist() == [*samples[1].tokens, *written(RESULT)]
  assert (t.status, t.result) == ("finished", "Lima")


def test_control_tokens_that_the_policy_sampled_are_mere_text_in_a_later_segment(make):
  tok = make(FORGETS.replace("'...'", "'..' + message['content']"))
  sampled = [*TOK.encode("a"), START, *TOK.encode("b"), END]
  t, samples = drive(tok, [(sampled, "stop"), (written(RESULT), "stop")], [])
  assert t.segments[0].tokens[-len(sampled):].tolist() == sampled and samples[1].restart
  assert "..a<|im_start|>b" in tok.decode(samples[1].tokens) and samples[1].tokens.tolist().count(START) == 4
  t, samples = drive(TOK, [(sampled, "stop"), (written(RESULT), "stop")], [])  # and nothing restarts because of them
  assert not samples[1].restart


def test_O23_dropped_thoughts_make_two_segments_of_one_rollout_trained_with_one_advantage(make):
  tok = make(STRIPS)
  first, last = written(THOUGHT), written(f"<thinking>so</thinking>{RESULT}")
  t, samples = drive(tok, [(first, "stop"), (last, "stop")], ["seen"])
  assert TOK.decode(samples[1].tokens) == by_hand([("user", "who?"), ("assistant", LOOK), ("tool", "seen")])
  assert [TOK.decode(s.tokens[s.mask]) for s in t.segments] == [f"{THOUGHT}<|im_end|>", f"<thinking>so</thinking>{RESULT}<|im_end|>"]
  (batch,) = alignment.emit_batches([t], [0.7], [1.0], rows=1, length=len(t))
  np.testing.assert_array_equal(batch["advantages"][:3], np.float32([0.7, 0.7, 0]))
  np.testing.assert_allclose(batch["weights"][:2].sum(), 1, rtol=1e-6)
  assert batch["trajectory"][:3].tolist() == [0, 0, -1]
  for i, s in enumerate(sorted(t.segments, key=len, reverse=True)):
    at = batch["segment_ids"] == i
    np.testing.assert_array_equal(batch["tokens"][at], s.tokens)
    np.testing.assert_array_equal(batch["mask"][at], s.mask)
    np.testing.assert_array_equal(batch["positions"][at], np.arange(len(s)))
    np.testing.assert_array_equal(batch["behavior_logprobs"][at], s.logprobs)


def test_the_context_is_that_of_a_segment_and_the_sampled_budget_that_of_the_trajectory(make):
  turn = written("<thinking>" + "a" * 60 + f"</thinking>{LOOK}")
  limits = dict(turns=3, context=230, answer_reserve=10)
  answers = [(turn, "stop")] * 2 + [(written(RESULT), "stop")]
  whole, _ = drive(TOK, answers, ["seen"] * 2, **limits)
  assert whole.status == "context_full" and len(whole.turns) == 2
  t, _ = drive(make(STRIPS), answers, ["seen"] * 2, **limits)
  assert t.status == "finished" and len(t) > 230 and max(map(len, t.segments)) <= 230
  t, samples = drive(make(STRIPS), answers, ["seen"] * 2, **(limits | dict(tokens=2 * len(turn) + 3)))
  assert samples[2].max_new_tokens == 3


def test_a_demonstration_is_laid_out_token_for_token_like_a_rollout(make):
  texts, observations = ["no tag", THOUGHT, RESULT], [protocol.BAD_TAGS, "found: <|im_end|>", None]
  for tok in (TOK, make(STRIPS), make(TRIMS)):
    rollout, _ = drive(tok, [(written(w), "stop") for w in texts], observations[1:], task="who is é?", system="look")
    turns = conversation.demonstration_turns(tok, "who is é?", list(zip(texts, observations)), system="look")
    demo = Trajectory("demonstration", "q", 0, turns=turns)
    np.testing.assert_array_equal(demo.tokens, rollout.tokens)
    np.testing.assert_array_equal(demo.mask, rollout.mask)
    assert [t.restart for t in turns] == [t.restart for t in rollout.turns]
  config = warm_start.Settings(1, 2, 1e-3, 0, 0.0, 1, 0, rows=2, length=400)
  demo = Trajectory("demonstration", "q", 0, turns=conversation.demonstration_turns(make(STRIPS), "x", list(zip(texts, observations))))
  ((micro, taught),) = warm_start.batches([demo], TOK, config)
  assert taught == demo.num_sampled and len(demo.segments) == 2
  for batch in micro:  # what a segment does not see is not in its sequence
    for i in set(batch["segment_ids"].ravel()) - {-1}:
      assert batch["tokens"][batch["segment_ids"] == i].tolist() in [s.tokens.tolist() for s in demo.segments]


# ------------------------------------------------------------------------------------------- training on segments


def turn_of(rng, prompt, sampled, restart=False):
  return Turn(rng.integers(3, 300, prompt).astype(np.int32), rng.integers(3, 300, sampled).astype(np.int32),
              -rng.random(sampled).astype(np.float32), np.zeros(sampled, np.int32), restart=restart)


def two_ways(rng):
  """Trajectories in several segments, and the same turns as one sequence."""
  shapes = [[(5, 3, 0), (9, 7, 1)], [(4, 6, 0)], [(6, 2, 0), (3, 5, 0), (8, 1, 1), (7, 9, 1)]]
  cut = [Trajectory("main", "q", k, turns=[turn_of(rng, p, s, bool(r)) for p, s, r in shape]) for k, shape in enumerate(shapes)]
  whole = [dataclasses.replace(t, turns=[dataclasses.replace(turn, restart=False) for turn in t.turns]) for t in cut]
  return cut, whole


OPTIONS = [dict(aggregate=a, norm_length=11.0 if a.endswith("norm") else None) for a in loss_lib.AGGREGATES]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: o["aggregate"])
@pytest.mark.parametrize("rows", [1, 4])
def test_segments_weigh_what_one_sequence_of_their_tokens_weighs(options, rows):
  rng = np.random.default_rng(0)
  cut, whole = two_ways(rng)
  group = [credit.Group(ts, w := np.float32([1.0, 0.5, 0.25]), w, np.float32([0.9, -0.4, 0.2]), {}, []) for ts in (cut, whole)]
  config = ConfigDict(dict(train=dict(updates_per_step=1, rows=rows, length=48)))
  values = []
  for g in group:
    total = 0.0
    ((batches, normalizer),) = loop.plan_updates(g, learner.LossOptions(**options), config, 3)
    for b in batches:  # a policy whose log-probabilities hang on the token alone
      lp = np.where(b["mask"], b["behavior_logprobs"] + 0.3 * np.sin(b["tokens"]), 0).astype(np.float32)
      total += float(loss_lib.clipped_ratio_loss(lp, b["behavior_logprobs"], b["advantages"], b["mask"], b["weights"],
                                                 segment_ids=b["segment_ids"], normalizer=normalizer, **options)[0])
    values.append((total, normalizer))
  assert abs(values[1][0]) > 1e-3
  np.testing.assert_allclose(values[0], values[1], rtol=1e-5)
  # and by hand
  expected, divisor = 0.0, 0.0
  for t, w, a in zip(whole, [1.0, 0.5, 0.25], [0.9, -0.4, 0.2]):
    r = np.exp(0.3 * np.sin(t.tokens[t.mask].astype(np.float64)))
    terms = -np.minimum(a * r, a * np.clip(r, 0.8, 1.28))
    mean = options["aggregate"] == "seq-mean-token-mean"
    expected += w * (terms.mean() if mean else terms.sum())
    divisor += w * (len(r) if options["aggregate"] == "token-mean" else options["norm_length"] or 1.0)
  np.testing.assert_allclose(values[0][0], expected / divisor, rtol=1e-5)


# ------------------------------------------------------------------------------------------- segments in the engine

MODEL = Transformer(ModelConfig(vocab_size=TOK.embedding_size, num_layers=1, embed_dim=32, num_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=32))


class Recorder(LocalEngine):
  def __init__(self, *args, **kwargs):
    super().__init__(*args, **kwargs)
    self.requests = []

  def submit(self, request):
    self.requests.append(request)
    return super().submit(request)


def test_a_segment_is_a_conversation_of_its_own_in_the_engine_and_no_random_key_comes_twice(make):
  tok = make(FORGETS)
  params = MODEL.init(jax.random.key(0))
  engine = Recorder(MODEL, params, EngineConfig(tok.stop_tokens, slots=3, max_length=160, prefill_rows=2, buckets=(32,), decode_chunk=4))
  agent = controller.AgentRuntime("main", engine, tok, controller.Limits(turns=3, turn_tokens=7, tokens=30, context=160, answer_reserve=8))
  rollouts = controller.run_rollouts({"main": agent}, [controller.Job(Query("q", "who?", "x"), k) for k in range(2)])
  assert not engine._conversations and engine.pending == 0
  for k, r in enumerate(rollouts):
    t = r.main
    assert [turn.restart for turn in t.turns] == [False, True, True]
    mine = [q for q in engine.requests if q.conversation.split("#")[0] == f"0/0/q/{k}/main/-1"]
    assert [(re.sub(r".*-1", "", q.conversation), q.turn) for q in mine] == [("", 0), ("#1", 1), ("#2", 2)]
    for q, turn in zip(mine, t.turns):
      np.testing.assert_array_equal(q.tokens, turn.prompt)
    # what was recorded is what the policy gives each segment by itself, packed beside the others
    (batch,) = alignment.emit_batches([t], [1.0], [1.0], rows=1, length=len(t))
    lp, _ = logprobs_lib.token_logprobs(MODEL, params, batch["tokens"], batch["positions"], batch["segment_ids"])
    np.testing.assert_allclose(np.where(batch["mask"], lp, 0), batch["behavior_logprobs"], atol=1e-4)
  keys = [(tuple(q.key), q.turn) for q in engine.requests]
  assert len(set(keys)) == len(keys)
