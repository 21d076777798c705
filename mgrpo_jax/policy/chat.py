"""The tokenizer and the chat template of a Hugging Face folder.

Three kinds of text are told apart. What the template itself writes may hold control tokens. What stands inside a
message (question, observation, page, earlier turn) never gives one: before a template is rendered, every control
token's name in a message is broken by a mark, which is taken out again after the rendered text was cut at the
control tokens that are left. So a template may trim, split or search its messages as it likes, and where no message
names a control token the ids are exactly those of `apply_chat_template` (checked at loading). And what the policy
sampled is kept as ids and never comes here.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import pathlib
import re
import shutil
from collections.abc import Iterable, Sequence

import jinja2
import jinja2.sandbox
import numpy as np
import tokenizers

from mgrpo_jax.errors import one_line

FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
# Templates may print the date; it must not make a rollout depend on the day it is run.
TODAY = datetime.datetime(2025, 1, 1)
_MARK = "\ufdd0"  # a noncharacter: in no text that is meant for interchange, and escaped where it is
_LOOKS_LIKE_CONTROL = re.compile(r"<[|｜].*[|｜]>", re.S)  # some files do not flag theirs as special
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_PROBE = "probe7"


class ChatTokenizer:
  """Text to ids and back, and messages to prompts, as a folder with the files of FILES says.

  Attributes:
    folder: where it was read.
    vocab_size: ids that have a token.
    embedding_size: rows of the model's embedding as its config.json says (else vocab_size); never smaller.
    end_of_turn: id that the template puts after what the assistant wrote.
    lead: the opening tag of a thought, if the template's header of a turn already ends with one ("<think>\\n"), else "".
    stop_tokens: ids that end a turn: `end_of_turn`, the tokenizer's eos and those of generation_config.json.
    fingerprint: hash of everything that decides what messages and texts become: equal prints, equal tokenizers.

  Raises:
    ValueError: a file that is missing or broken, no chat template or one that fails, a tokenizer that cannot keep
      text and control tokens apart.
  """

  def __init__(self, folder):
    self.folder = folder = pathlib.Path(folder).expanduser()
    if not folder.is_dir():
      raise ValueError(f"{folder} is no folder; give one with the files of a Hugging Face model")
    config = _read_json(folder / "tokenizer_config.json")
    source = _read(folder / "tokenizer.json")
    try:
      self._hf, state = tokenizers.Tokenizer.from_str(source), json.loads(source)
      added = state["added_tokens"] = state.get("added_tokens") or []
    except Exception as error:  # the library raises bare Exception
      raise ValueError(f"{folder / 'tokenizer.json'} cannot be used ({one_line(error)}); fetch it again") from error
    self._hf.no_truncation()  # some files carry their training's
    vocabulary = self._hf.get_vocab()
    self.vocab_size = max(vocabulary.values()) + 1
    self.embedding_size = self._embedding_size()
    self._names = {k: v["content"] if isinstance(v, dict) else v for k in _NAMES if (v := config.get(k))}
    stops = self._eos_ids()
    control = {t["content"] for t in added if t["special"] or _LOOKS_LIKE_CONTROL.fullmatch(t["content"])}
    control |= {self._hf.id_to_token(i) for i in stops}
    self._control = {name: vocabulary[name] for name in control if name}
    if not self._control:
      raise ValueError(f"{folder} names no end-of-turn token: generation_config.json needs eos_token_id")
    for t in added:
      t["special"] = t["content"] in self._control
    self._plain = tokenizers.Tokenizer.from_str(json.dumps(state))
    self._plain.no_truncation()
    self._plain.encode_special_tokens = True  # the names of special tokens are text like any other
    names = sorted(self._control, key=len, reverse=True)
    self._starts = re.compile(f"(?=(?:{'|'.join(map(re.escape, names))}))(.)", re.S)  # looks ahead, so that names that overlap are all found
    left = {t["content"] for t in added if t["lstrip"]}
    right = {t["content"] for t in added if t["rstrip"]}
    self._cuts = re.compile("|".join((r"\s*" if n in left else "") + f"({re.escape(n)})" + (r"\s*" if n in right else "")
                                     for n in names))
    self._source = self._template_source(config)
    self._template = self._compile()
    self._check_template()
    self.stop_tokens = tuple(sorted({*stops, self.end_of_turn}))
    self._check_tokens()
    self._has_system = self._shows([_message("system", _PROBE), _message("user", "x")])
    self._has_tool = self._shows([_message("user", "x"), _message("assistant", "y"), _message("tool", _PROBE)])
    self.render([*self.opening("x", "x"), _message("assistant", "y"), self.observation("z")])  # raises what is wrong
    parts = (source, self._source, self._names, self.stop_tokens)
    self.fingerprint = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]

  # ---- text

  def encode(self, text: str) -> list[int]:
    """Ids of a text; never a control token. Lone surrogates, which no file can hold, become '?'."""
    return self._plain.encode(_sound(text), add_special_tokens=False).ids

  def decode(self, ids: Iterable[int]) -> str:
    """The text of some ids, control tokens by name; ids without a token and broken UTF-8 become U+FFFD."""
    runs: list[list[int]] = [[]]
    for i in map(int, ids):
      if not 0 <= i < self.embedding_size:
        raise ValueError(f"token id {i} is outside 0..{self.embedding_size - 1}.")
      runs[-1].append(i) if self._hf.id_to_token(i) is not None else runs.append([])
    return "\ufffd".join(self._hf.decode(run, skip_special_tokens=False) for run in runs)

  def piece_classes(self) -> list[np.ndarray]:
    """None: no pieces of a natural language may stand in for each other (see `Tokenizer.piece_classes`)."""
    return []

  def save(self, folder) -> None:
    """Copies its files into a folder, which is made if there is none."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
      if (self.folder / name).is_file():
        shutil.copyfile(self.folder / name, folder / name)

  # ---- messages

  def opening(self, task: str, system: str = "") -> tuple[dict, ...]:
    """The messages before the first turn; the system text goes before the task where the template has no such role."""
    if system and self._has_system:
      return _message("system", system), _message("user", task)
    return (_message("user", f"{system}\n\n{task}" if system else task),)

  def observation(self, text: str) -> dict:
    """The message of an observation: of role "tool" where the template shows one, else a tagged one of the user."""
    return _message("tool", text) if self._has_tool else _message("user", f"<tool_response>{text}</tool_response>")

  def render(self, messages: Sequence[dict], *, generate: bool = True) -> str:
    """The template's text of some messages, their contents masked (see `mask`), with the header of the next turn.

    Raises:
      ValueError: the template fails on them.
    """
    try:
      return self._template.render(messages=[_message(m["role"], self.mask(m["content"])) for m in messages],
                                   add_generation_prompt=generate, tools=None, documents=None, **self._names)
    except Exception as error:  # a template is a program: it may raise anything
      roles = ", ".join(m["role"] for m in messages)
      raise ValueError(f"the chat template of {self.folder} failed on messages of {roles}: {one_line(error)}") from error

  def mask(self, text: str) -> str:
    """The text with a mark inside every control token's name, so that none is left."""
    return self._starts.sub(rf"\g<1>{_MARK}1", _sound(text).replace(_MARK, f"{_MARK}0"))

  def encode_rendered(self, text: str) -> np.ndarray:
    """i32[n]: ids of a rendered text, or of a part that begins behind a control token."""
    ids, at = [], 0
    for cut in self._cuts.finditer(text):
      ids += [*self._unmasked(text[at : cut.start()]), self._control[cut[cut.lastindex]]]
      at = cut.end()
    return np.asarray([*ids, *self._unmasked(text[at:])], np.int32)

  # ---- inside

  def _unmasked(self, text: str) -> list[int]:
    return self.encode(text.replace(f"{_MARK}1", "").replace(f"{_MARK}0", _MARK)) if text else []

  def _embedding_size(self) -> int:
    path = self.folder / "config.json"
    size = _read_json(path).get("vocab_size", self.vocab_size) if path.is_file() else self.vocab_size
    if not isinstance(size, int) or size < self.vocab_size:
      raise ValueError(f"{path} has vocab_size {size} but tokenizer.json has ids up to {self.vocab_size - 1}; they are not of one model")
    return size

  def _eos_ids(self) -> set[int]:
    path = self.folder / "generation_config.json"
    eos = _read_json(path).get("eos_token_id") if path.is_file() else None
    ids = set(eos if isinstance(eos, list) else [] if eos is None else [eos])
    if "eos_token" in self._names:
      ids.add(self._hf.token_to_id(self._names["eos_token"]))
    bad = [i for i in ids if not isinstance(i, int) or self._hf.id_to_token(i) is None]
    if bad:
      raise ValueError(f"{self.folder}: an eos token of generation_config.json or tokenizer_config.json is not in tokenizer.json "
                       f"({eos!r}, {self._names.get('eos_token')!r})")
    return ids

  def _template_source(self, config: dict) -> str:
    path = self.folder / "chat_template.jinja"
    source = _read(path) if path.is_file() else config.get("chat_template")
    if isinstance(source, list):  # several by name
      source = {t.get("name"): t.get("template") for t in source}.get("default")
    if not isinstance(source, str):
      raise ValueError(f"{self.folder} has no chat template: neither chat_template.jinja nor chat_template in tokenizer_config.json; "
                       "take an instruct model, or write the template there")
    return source

  def _compile(self) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
      trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise, "strftime_now": TODAY.strftime}
    # {% generation %} only marks what the assistant wrote
    source = re.sub(r"\{%(-?)\s*generation\s*(-?)%\}", r"{%\1 if true \2%}", self._source)
    source = re.sub(r"\{%(-?)\s*endgeneration\s*(-?)%\}", r"{%\1 endif \2%}", source)
    try:
      return environment.from_string(source)
    except jinja2.TemplateError as error:
      raise ValueError(f"the chat template of {self.folder} is broken: {one_line(error)} (line {getattr(error, 'lineno', '?')})") from error

  def _check_template(self) -> None:
    """Finds the token that ends a turn; a template that cannot show a question and its answer is refused."""
    asked = [_message("user", "x")]
    opened = re.search(r"<(think|thinking)>\s*$", self.render(asked))
    self.lead = opened[0] if opened else ""
    text = self.render([*asked, _message("assistant", _PROBE)], generate=False)
    if _PROBE not in text:
      raise ValueError(f"the chat template of {self.folder} does not show what the assistant wrote")
    end = self._cuts.match(text, text.rindex(_PROBE) + len(_PROBE))
    name = end[end.lastindex] if end else self._names.get("eos_token", "")
    if name not in self._control:
      raise ValueError(f"the chat template of {self.folder} ends a turn with no control token, and tokenizer_config.json has no eos_token")
    self.end_of_turn = self._control[name]

  def _check_tokens(self) -> None:
    leaks = [name for name in self._control if set(self.encode(name)) & set(self._control.values())]
    if leaks:
      raise ValueError(f"{self.folder / 'tokenizer.json'} makes a control token of the mere text {leaks[0]!r}; such a tokenizer cannot be used")
    text = self.render([_message("user", "What is 12 + 3?\n"), _message("assistant", "It is 15.")], generate=False)
    if self.encode_rendered(text).tolist() != self._hf.encode(text, add_special_tokens=False).ids:
      raise ValueError(f"{self.folder / 'tokenizer.json'} reads a text between two control tokens otherwise than alone; "
                       "such a tokenizer cannot be used")

  def _shows(self, messages: list[dict]) -> bool:
    try:
      return _PROBE in self.render(messages)
    except ValueError:
      return False


def _message(role: str, content: str) -> dict:
  return {"role": role, "content": content}


def _sound(text: str) -> str:
  return text.encode("utf-8", "replace").decode()


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
  """Jinja's own filter would escape for HTML."""
  return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str):
  raise jinja2.TemplateError(message)


def _read(path: pathlib.Path) -> str:
  try:
    return path.read_text(encoding="utf-8")
  except FileNotFoundError as error:
    raise ValueError(f"{path} is missing; a chat model's Hugging Face folder has it") from error
  except UnicodeDecodeError as error:
    raise ValueError(f"{path} is not UTF-8 text; fetch it again") from error


def _read_json(path: pathlib.Path) -> dict:
  try:
    value = json.loads(_read(path))
  except json.JSONDecodeError as error:
    raise ValueError(f"{path} is not JSON ({error.msg}, line {error.lineno}); fetch it again") from error
  if not isinstance(value, dict):
    raise ValueError(f"{path} must hold a JSON object")
  return value
