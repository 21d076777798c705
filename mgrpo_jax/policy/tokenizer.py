"""A small tokenizer made from the text of a world: whole template pieces, BPE on names, bytes under all.

Ids are laid out as control tokens, then the 256 bytes and their BPE merges, then the templates. Control tokens
exist only beside the text: `encode` can never give their ids, whatever stands in a web page, and `control` is
the one way to get them. Any valid unicode text survives `decode(encode(text))` exactly.
"""

from __future__ import annotations

import collections
import hashlib
import json
import pathlib
from collections.abc import Iterable, Sequence

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

CONTROL = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")


class Tokenizer:
  """Text to token ids and back. Made by `build_tokenizer` or `load`.

  Args:
    vocab: BPE piece (in the byte alphabet of GPT-2) -> its index, 0..n-1.
    merges: pairs of pieces, earlier ones first.
    templates: strings that are one token each wherever they occur, the longest match first.
  """

  def __init__(self, vocab: dict[str, int], merges: Sequence[tuple[str, str]], templates: Sequence[str]):
    self._vocab, self._merges, self._templates = dict(vocab), [tuple(m) for m in merges], list(templates)
    self._pieces = [_piece_bytes(piece) for piece, _ in sorted(self._vocab.items(), key=lambda kv: kv[1])]
    self._bytes = [c.encode() for c in CONTROL] + self._pieces + [t.encode() for t in self._templates]
    self._hf = tokenizers.Tokenizer(models.BPE(self._vocab, self._merges))
    self._hf.pre_tokenizer = _pre_tokenizer()
    self._hf.decoder = decoders.ByteLevel()
    self._hf.add_tokens([tokenizers.AddedToken(t, normalized=False, special=False) for t in self._templates])
    clash = [t for i, t in enumerate(self._templates) if self._hf.token_to_id(t) != len(self._vocab) + i]
    if clash:
      raise ValueError(f"templates {clash[:5]} look like pieces of the byte alphabet, which stand for other text; "
                       "leave them out, or make them longer.")

  @property
  def vocab_size(self) -> int:
    return len(self._bytes)

  @property
  def templates(self) -> tuple[str, ...]:
    return tuple(self._templates)

  @property
  def name_ids(self) -> np.ndarray:
    """i32[n]: the ids that are bytes or BPE pieces, neither control tokens nor templates."""
    return np.arange(len(CONTROL), len(CONTROL) + len(self._pieces), dtype=np.int32)

  def control(self, name: str) -> int:
    """Id of a control token, such as "<|end|>"."""
    if name not in CONTROL:
      raise ValueError(f"no control token {name!r}; there are {', '.join(CONTROL)}.")
    return CONTROL.index(name)

  special = control

  @property
  def end_of_turn(self) -> int:
    return self.control("<|end|>")

  @property
  def stop_tokens(self) -> tuple[int, ...]:
    """Ids that end a turn."""
    return (self.end_of_turn,)

  def encode(self, text: str) -> list[int]:
    """Token ids of a text; never a control token. Lone surrogates, which no file can hold, become '?'."""
    text = text.encode("utf-8", "replace").decode()
    return [i + len(CONTROL) for i in self._hf.encode(text, add_special_tokens=False).ids]

  def decode(self, ids: Iterable[int], *, skip_control: bool = False) -> str:
    """The text of some ids. Control tokens are shown by name or left out; broken UTF-8 becomes U+FFFD."""
    first = len(CONTROL) if skip_control else 0
    ids = [int(i) for i in ids]
    if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
      raise ValueError(f"token id {min(ids) if min(ids) < 0 else max(ids)} is outside 0..{self.vocab_size - 1}.")
    return b"".join(self._bytes[i] for i in ids if i >= first).decode("utf-8", "replace")

  def piece_classes(self) -> list[np.ndarray]:
    """Groups of ids of pieces that may stand in for each other without changing the look of a text.

    Letters by (starts with a space, first letter is a capital), and single digits. Pieces with punctuation,
    and bytes that are no character by themselves, are in no class: a permutation leaves them alone.
    """
    classes = collections.defaultdict(list)
    for i, piece in zip(self.name_ids, self._pieces, strict=True):
      try:
        text = piece.decode()
      except UnicodeDecodeError:
        continue
      core = text.removeprefix(" ")
      if core.isalpha():
        classes["letters", core != text, core[0].isupper()].append(i)
      elif core.isdecimal():
        classes["digits", core != text, len(core)].append(i)
    return [np.asarray(classes[k], np.int32) for k in sorted(classes)]

  @property
  def fingerprint(self) -> str:
    """Hash of everything that decides what `encode` gives: equal prints, equal tokenizers."""
    return hashlib.sha256(self._dumps().encode()).hexdigest()[:16]

  def save(self, path) -> None:
    """Writes one JSON file."""
    pathlib.Path(path).write_text(self._dumps(), encoding="utf-8")

  def _dumps(self) -> str:
    content = {"control": CONTROL, "vocab": self._vocab, "merges": self._merges, "templates": self._templates}
    return json.dumps(content, sort_keys=True, indent=0)


def load(path) -> Tokenizer:
  """Reads what `Tokenizer.save` wrote. ValueError if it is something else."""
  try:
    content = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    control, parts = content["control"], (content["vocab"], content["merges"], content["templates"])
  except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
    raise ValueError(f"{path} is no tokenizer file ({error!r}); make it again with build_tokenizer.") from error
  if tuple(control) != CONTROL:
    raise ValueError(f"{path} was made for control tokens {control}, this version has {list(CONTROL)}; rebuild it.")
  return Tokenizer(*parts)


def build_tokenizer(templates: Iterable[str], names: Iterable[str], *, merges: int = 300,
                    multiple: int = 8) -> Tokenizer:
  """Derives a tokenizer from the strings of a world; the same in every process and for every order of the input.

  Args:
    templates: strings that become one token each (tags, JSON skeletons, fixed words), spaces and newlines
      included; empty ones and repetitions are dropped.
    names: texts to learn byte-pair merges from, each with and without a leading space.
    merges: how many merges at most; fewer when the names do not repeat enough.
    multiple: the last merges are given up so that the vocabulary is a multiple of this, and can be sharded.
  """
  templates = sorted({t for t in templates if t})
  shown = [t for t in templates if any(c in t for c in CONTROL)]
  if shown:
    raise ValueError(f"template {shown[0]!r} contains a control token; control tokens are never text.")
  trained = tokenizers.Tokenizer(models.BPE())
  trained.pre_tokenizer = _pre_tokenizer()
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  trainer = trainers.BpeTrainer(vocab_size=256 + merges, min_frequency=2, initial_alphabet=alphabet,
                                show_progress=False)
  # Sorted, because the trainer breaks ties by order of appearance.
  trained.train_from_iterator([text for name in sorted(names) for text in (name, " " + name)], trainer)
  model = json.loads(trained.to_str())["model"]
  pairs = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in model["merges"]]
  vocab = {piece: i for i, piece in enumerate(alphabet)}
  # A template of one piece would be two tokens for one text; the template wins.
  single = {_bytes_piece(t.encode()) for t in templates}
  pairs = _without(pairs, single)
  templates = [t for t in templates if _bytes_piece(t.encode()) not in vocab]
  surplus = (len(CONTROL) + len(vocab) + len(pairs) + len(templates)) % multiple
  pairs = pairs[: max(0, len(pairs) - surplus)]
  for a, b in pairs:
    vocab.setdefault(a + b, len(vocab))
  return Tokenizer(vocab, pairs, templates)


def _without(pairs, banned):
  """The merges that neither make a banned piece nor build on one."""
  kept, gone = [], set(banned)
  for a, b in pairs:
    if a in gone or b in gone or a + b in gone:
      gone.add(a + b)
    else:
      kept.append((a, b))
  return kept


def _pre_tokenizer():
  """Digits one by one, then words with their leading space (GPT-2's pattern), then bytes."""
  return pre_tokenizers.Sequence([
    pre_tokenizers.Digits(individual_digits=True),
    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
  ])


def _byte_alphabet() -> dict[int, str]:
  """GPT-2's printable stand-in for each byte."""
  plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
  rest = [b for b in range(256) if b not in plain]
  return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(rest)}


_TO_CHAR = _byte_alphabet()
_TO_BYTE = {c: b for b, c in _TO_CHAR.items()}


def _piece_bytes(piece: str) -> bytes:
  return bytes(_TO_BYTE[c] for c in piece)


def _bytes_piece(raw: bytes) -> str:
  return "".join(_TO_CHAR[b] for b in raw)
