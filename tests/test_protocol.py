"""The text protocol: users' cases (O33..O48), and that no text whatever can break the parser."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mgrpo_jax.rollout import protocol
from mgrpo_jax.rollout.protocol import Call, parse_turn, render_call, render_result

CALL = render_call("search", {"query": "x"})
SNIPPETS = [*protocol.TEMPLATE_TOKENS, "<think>", "</think>", *protocol.CALL_SUFFIXES, CALL, protocol.call_prefix("search", "query"),
            '{"name": "search", "arguments": {', "}", "]", "[", '"', "\\", "\\u", "1e999", "NaN", "-Infinity", "```", "`",
            " ", "\n", "\x00", "\ufeff", "\ud800", "é", "巴黎", "𝄞", "<", ">", "</", "{", "null", "9" * 5000, "[" * 2000]
texts = st.one_of(
  st.text(), st.text(st.characters(codec=None)), st.lists(st.sampled_from(SNIPPETS), max_size=12).map("".join))
json_values = st.recursive(
  st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
  | st.text(st.characters(codec=None)) | st.lists(st.sampled_from(SNIPPETS), max_size=4).map("".join),
  lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3), max_leaves=8)


def outcome(text, **options):
  """("call" | "result" | "error", value), after checking that there is exactly one."""
  parsed = parse_turn(text, **options)
  there = [(k, v) for k in ("call", "result", "error") if (v := getattr(parsed, k)) is not None]
  assert len(there) == 1, parsed
  return there[0]


# ------------------------------------------------------------------------------- what is right


@pytest.mark.parametrize("text, expected", [
  (CALL, ("call", Call("search", {"query": "x"}))),
  (f"  {CALL}\n", ("call", Call("search", {"query": "x"}))),
  ('<tool_call>\n{ "arguments" : {"link": 2},\n "name":"visit"}\n</tool_call>', ("call", Call("visit", {"link": 2}))),
  ('<tool_call>{"name": "now", "arguments": {}}</tool_call>', ("call", Call("now", {}))),
  (f"<thinking>look it up</thinking>{CALL}", ("call", Call("search", {"query": "x"}))),
  ("<result> Paris </result>", ("result", "Paris")),
  ("<result></result>", ("result", "")),
  ("<thinking>a > b, {} and `x`</thinking>\n\n<result>7</result>", ("result", "7")),
  ("<think>\nas open models do\n</think>\n\n<result>7</result>", ("result", "7")),
  ("<result>say <b>{\"name\"}</b></result>", ("result", "say <b>{\"name\"}</b>")),
])
def test_a_turn_is_an_optional_thought_and_one_call_or_result(text, expected):
  assert outcome(text) == expected


def test_the_thought_is_kept_apart_also_beside_an_error():
  assert parse_turn(f"<thinking> a </thinking>{CALL}").thinking == "a"
  assert parse_turn("<thinking>a</thinking>nothing").thinking == "a"
  assert parse_turn(f"<think>\na\n</think>\n\n{CALL}", thinking="required").thinking == "a"
  assert parse_turn(CALL).thinking is None


@pytest.mark.parametrize("text", [CALL, "<result>7</result>", f"<thinking>{CALL}", "", "thinking <thinking>a</thinking>"])
def test_required_thinking_must_come_first(text):
  assert outcome(text, thinking="required")[0] == "error"
  if not text.startswith("<thinking>"):
    assert outcome(text, thinking="required")[1] == protocol.NO_THINKING
  assert outcome(f"<thinking>so</thinking>{CALL}", thinking="required")[0] == "call"


# -------------------------------------------------------------------------------- users' cases


def test_O33_O37_without_a_tag_there_is_no_result():
  assert outcome("it could be 3 or 7") == ("error", protocol.BAD_TAGS)
  assert outcome("the answer is <result>7</result>") == ("error", protocol.BAD_TAGS)
  assert outcome("<result>7</result> I hope") == ("error", protocol.BAD_TAGS)


def test_O35_O36_two_results_or_an_open_one_fall_back_to_nothing():
  assert outcome("<result>5</result><result>7</result>") == ("error", protocol.BAD_TAGS)
  assert outcome("<result>7</result> ... <result>") == ("error", protocol.BAD_TAGS)
  assert outcome("<result>7") == ("error", protocol.BAD_TAGS)
  assert outcome("<result>5<result>7</result>") == ("error", protocol.BAD_TAGS)


@pytest.mark.parametrize("text", [
  "<thinking>x</tool_call><result>y</result>", "<thinking>x <result>y</result>", "<thinking>x<thinking>y</thinking><result>z</result>",
  "<thinking>x</result></thinking><result>y</result>", "<result>y</tool_call>", "</thinking><result>y</result>",
  "<thinking>a</thinking><thinking>b</thinking><result>y</result>", "<thinking>only a thought</thinking>",
  "<think>x</thinking><result>y</result>", "<thinking>x</think><result>y</result>", "<think>a</think><think>b</think><result>y</result>",
  "<think>x<think>y</think><result>z</result>", "</think><result>y</result>", "<think>x <result>y</result>",
])
def test_O39_mismatched_tags_are_no_format(text):
  assert outcome(text) == ("error", protocol.BAD_TAGS)


@pytest.mark.parametrize("text", [
  f"{CALL}{CALL}", f"{CALL}\n{CALL}",
  '<tool_call>{"name":"search","arguments":{"query":"x"}}\n{"name":"visit","arguments":{"link":1}}</tool_call>',
  '<tool_call>[{"name":"search","arguments":{}},{"name":"visit","arguments":{}}]</tool_call>',
])
def test_O45_two_calls_in_one_turn_run_neither_and_say_so(text):
  assert outcome(text) == ("error", protocol.TWO_CALLS)


def test_a_call_and_a_result_in_one_turn_are_an_error():
  assert outcome(f"{CALL}<result>y</result>")[0] == outcome(f"<result>y</result>{CALL}")[0] == "error"


@pytest.mark.parametrize("body", [
  '{"name":"search","arguments":{"query":"x"', '{"name":"search","arguments":{"query":"x}}', "", "search(x)", "{'name': 'search'}",
  '{"name":"search","arguments":{"n": NaN}}', '{"name":"search","arguments":{"n": 1e999}}', '{"name":"search","arguments":{"n": ' + "9" * 5000 + "}}",
  '{"name":"search","arguments":{},}', "[" * 100_000, '{"a":' * 100_000,
])
def test_O46_broken_json_is_never_a_call(body):
  assert outcome(f"<tool_call>{body}</tool_call>") == ("error", protocol.BAD_JSON)
  assert outcome(f"<tool_call>{body}")[0] == "error"


@pytest.mark.parametrize("value", [
  {"name": "search"}, {"arguments": {}}, {"name": 1, "arguments": {}}, {"name": "search", "arguments": "x"}, {"name": "search", "arguments": ["x"]},
  {"name": "search", "arguments": None}, {"name": "search", "arguments": {}, "id": 3}, "search", 3, None, [], [{"name": "a", "arguments": {}}],
])
def test_a_call_needs_exactly_a_name_and_arguments(value):
  assert outcome(f"<tool_call>{json.dumps(value)}</tool_call>") == ("error", protocol.BAD_CALL)


def test_an_open_call_tag_is_an_error():
  assert outcome(CALL.removesuffix("</tool_call>")) == ("error", protocol.BAD_TAGS)


@pytest.mark.parametrize("string", [
  "use `print` here", "```json\n{}\n```", "</tool_call>", "<tool_call>", "<result>x</result>", '{"name": "visit"}', '"\\', "<|end|>", "é 巴黎 𝄞 \u2028"])
def test_O48_tags_fences_and_braces_inside_a_string_are_data(string):
  assert outcome(render_call("search", {"query": string})) == ("call", Call("search", {"query": string}))
  raw = f'<tool_call>{json.dumps({"name": "search", "arguments": {"query": string}}, ensure_ascii=False)}</tool_call>'
  assert outcome(raw) == ("call", Call("search", {"query": string}))


# ---------------------------------------------------------------------------------- properties


@settings(max_examples=600, deadline=None)
@given(text=texts, thinking=st.sampled_from(["optional", "required"]))
@example(text="<tool_call>" + "[" * 100_000, thinking="optional")
def test_no_text_makes_the_parser_raise_and_there_is_exactly_one_outcome(text, thinking):
  kind, value = outcome(text, thinking=thinking)
  if kind == "error":
    assert value in protocol.ERRORS
  if thinking == "required" and kind != "error":
    assert text.strip().startswith(("<thinking>", "<think>"))


@settings(max_examples=300, deadline=None)
@given(name=st.text(st.characters(codec=None), max_size=8), arguments=st.dictionaries(st.text(max_size=5), json_values, max_size=3))
def test_every_rendered_call_is_read_back(name, arguments):
  assert outcome(render_call(name, arguments)) == ("call", Call(name, arguments))
  assert outcome(f"<thinking>hm</thinking> {render_call(name, arguments)} ", thinking="required")[0] == "call"


@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_a_rendered_result_is_read_back_unless_it_holds_a_tag(text):
  kind, value = outcome(render_result(text))
  if any(tag in text for tag in protocol.TAGS):
    assert kind == "error"
  else:
    assert (kind, value) == ("result", text.strip())


def test_call_prefix_and_suffix_are_pieces_of_the_canonical_call():
  assert protocol.call_prefix("search", "query") + "x" + protocol.CALL_SUFFIXES[0] == CALL
  assert protocol.call_prefix("visit", "link", text=False) + "3" + protocol.CALL_SUFFIXES[1] == render_call("visit", {"link": 3})
