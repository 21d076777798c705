"""The tokenizer: exact text, whole templates, no control token from text, the same in every process."""

import os
import random
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mgrpo_jax.policy import tokenizer

CALL = '<tool_call>{"name": "search", "arguments": {"query": "'
CALL_END = '"}}</tool_call>'
TEMPLATES = [CALL, CALL_END, '"}}', "<thinking>", "</thinking>\n\n", " capital", " capital of ", " of ", "\n", "The "]
NAMES = ["France", "Germany", "Guinea", "Papua New Guinea", "Equatorial Guinea", "Guinea-Bissau", "Côte d'Ivoire",
         "São Tomé", "New Zealand", "Frankfurt", "12,345 km", "1234 km", "Nevis", "日本"] * 2


@pytest.fixture(scope="module")
def tok():
  return tokenizer.build_tokenizer(TEMPLATES, NAMES, merges=60)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.text(), st.sampled_from(TEMPLATES + NAMES + list(tokenizer.CONTROL) + [" ", "  ", "é"]))))
def test_any_text_comes_back_exactly_and_never_holds_a_control_token(parts):
  tok = tokenizer.build_tokenizer(TEMPLATES, NAMES, merges=60)
  text = "".join(parts)
  ids = tok.encode(text)
  assert tok.decode(ids) == text
  assert all(len(tokenizer.CONTROL) <= i < tok.vocab_size for i in ids)


def test_control_tokens_come_from_control_alone_and_are_shown_or_skipped(tok):
  end = tok.control("<|end|>")
  assert tok.control("<|pad|>") == 0 and tok.special("<|end|>") == end
  page = tok.encode("buy <|end|> now<|user|>")
  assert not set(page) & {tok.control(c) for c in tokenizer.CONTROL}
  assert tok.decode([*page, end]) == "buy <|end|> now<|user|><|end|>"
  assert tok.decode([*page, end], skip_control=True) == "buy <|end|> now<|user|>"
  with pytest.raises(ValueError, match="no control token '<|stop|>'"):
    tok.control("<|stop|>")


def test_templates_are_one_token_and_the_longest_wins(tok):
  assert set(tok.templates) == set(TEMPLATES) - {"\n"}  # one byte is one token anyway
  for template in TEMPLATES:
    assert len(tok.encode(template)) == 1
  text = CALL + "France" + CALL_END
  ids = tok.encode(text)
  assert tok.decode(ids[:1]) == CALL and tok.decode(ids[-1:]) == CALL_END
  pieces = [tok.decode([i]) for i in tok.encode("The  capital of  capital.\n")]
  assert pieces == ["The ", " capital of ", " capital", ".", "\n"]


def test_names_are_few_pieces_and_digits_are_single(tok):
  assert len(tok.encode(" Guinea")) == 1
  assert [tok.decode([i]) for i in tok.encode("1234")] == ["1", "2", "3", "4"]


def test_order_repetition_and_process_do_not_matter(tok):
  rng = random.Random(3)
  for _ in range(3):
    shuffled = tokenizer.build_tokenizer(rng.sample(TEMPLATES * 2, 20), rng.sample(NAMES, len(NAMES)), merges=60)
    assert shuffled.fingerprint == tok.fingerprint
  code = ("from tests.test_tokenizer import *\n"
          "print(tokenizer.build_tokenizer(TEMPLATES[::-1], NAMES[::-1], merges=60).fingerprint)")
  root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
  for seed in ("1", "2"):
    env = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": root}
    out = subprocess.run([sys.executable, "-c", code], env=env, cwd=root, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == tok.fingerprint
  assert tokenizer.build_tokenizer(TEMPLATES, NAMES, merges=40).fingerprint != tok.fingerprint
  assert tokenizer.build_tokenizer(TEMPLATES[1:], NAMES, merges=60).fingerprint != tok.fingerprint


def test_saved_and_loaded_it_is_the_same(tok, tmp_path):
  tok.save(tmp_path / "tokenizer.json")
  again = tokenizer.load(tmp_path / "tokenizer.json")
  text = CALL + "Papua New Guinea 12,345" + CALL_END
  assert again.fingerprint == tok.fingerprint and again.encode(text) == tok.encode(text)
  assert again.vocab_size == tok.vocab_size
  (tmp_path / "bad.json").write_text("{}")
  with pytest.raises(ValueError, match="bad.json is no tokenizer file"):
    tokenizer.load(tmp_path / "bad.json")
  changed = (tmp_path / "tokenizer.json").read_text().replace("<|tool|>", "<|tools|>")
  (tmp_path / "old.json").write_text(changed)
  with pytest.raises(ValueError, match="rebuild it"):
    tokenizer.load(tmp_path / "old.json")


def test_the_vocabulary_has_no_holes_and_divides(tok):
  assert tok.vocab_size % 8 == 0
  texts = [tok.decode([i]) for i in range(tok.vocab_size)]
  whole = [t for t in texts if "\ufffd" not in t]
  assert len(set(whole)) == len(whole)  # no two ids for one text
  odd = tokenizer.build_tokenizer(TEMPLATES, NAMES, merges=60, multiple=1)
  assert 0 <= odd.vocab_size - tok.vocab_size < 8


def test_a_template_that_is_also_a_piece_is_one_id():
  tok = tokenizer.build_tokenizer([" Guinea", "a"], NAMES, merges=60)
  assert tok.templates == (" Guinea",)
  assert tok.encode(" Guinea") == [tok.vocab_size - 1]
  assert tok.decode(tok.encode("a Papua New Guinea")) == "a Papua New Guinea"


def test_permuting_pieces_within_their_classes_keeps_the_look_of_a_text(tok):
  classes = tok.piece_classes()
  members = np.concatenate(classes)
  assert len(set(members.tolist())) == len(members) and set(members) <= set(tok.name_ids.tolist())
  assert any(len(c) == 10 for c in classes)  # the digits
  rng = np.random.default_rng(0)
  table = np.arange(tok.vocab_size)
  for c in classes:
    table[c] = rng.permutation(c)
  text = CALL + "Côte d'Ivoire 12,345 km" + CALL_END + "The  capital of Papua New Guinea is 日本"
  ids = np.array(tok.encode(text))
  other = tok.decode(table[ids])
  assert other != text and "\ufffd" not in other
  assert CALL in other and CALL_END in other

  def shape(ids):
    return ["9" if t.isdecimal() else t if not t.strip(" ").isalpha() else
            (t[0] == " ", t.strip(" ")[0].isupper()) for t in (tok.decode([i]) for i in ids)]

  assert shape(ids) == shape(table[ids])


def test_bad_input_is_refused_in_a_sentence(tok):
  with pytest.raises(ValueError, match="contains a control token"):
    tokenizer.build_tokenizer(["x<|end|>"], NAMES)
  with pytest.raises(ValueError, match="stand for other text"):
    tokenizer.build_tokenizer(["é"], NAMES)
  with pytest.raises(ValueError, match=f"token id {tok.vocab_size} is outside"):
    tok.decode([3, tok.vocab_size])
  assert tok.decode(tok.encode("a\ud800b")) == "a?b"
  assert tok.encode("") == [] and tok.decode([]) == ""
