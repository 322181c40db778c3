"""Vocabularies of pretrained models: byte-level BPE from a tokenizer.json.

Two rules of `text.tokenizer` hold here too. *Content never yields an added
token*, whatever it spells: content is encoded by a copy of the model that knows
none. *Bytes stand behind everything*: any ids decode, and any text round-trips,
up to the Unicode normal form that a model may have been trained on (Qwen: NFC),
which is kept because ids must be the ones the model knows.

Added tokens are this vocabulary's control pieces, named by what they spell. The
ids of a text are those of the `tokenizers` library, which does the work.
"""

from collections.abc import Mapping, Sequence
import functools
import json
import pathlib

from envace_jax import errors, types
from envace_jax.text import tokenizer as base

FILE, CONFIG_FILE = 'tokenizer.json', 'tokenizer_config.json'
_CACHED_TEXTS = 1 << 12


class FastTokenizer:
  """The tokenizer of a pretrained model."""

  def __init__(
    self, source: str, config: types.Json, vocab_size: int | None = None
  ):
    """Makes a tokenizer.

    Args:
      source: the text of a tokenizer.json.
      config: its tokenizer_config.json; {} for none.
      vocab_size: rows of the model's embedding, which may be more than the
        tokenizer has pieces; None: as many.

    Raises:
      ValueError: it is no byte-level BPE, or larger than the model.
    """
    self._source, self.config = source, config
    self._given_size = vocab_size
    parts = _read(source)
    self.control = {
      token['content']: token['id'] for token in parts['added_tokens']
    }
    vocab = parts['model']['vocab']
    self._lacking = {
      byte for char, byte in _byte_of_char().items() if char not in vocab
    }
    if self._lacking.intersection('\ufffd'.encode()):
      raise ValueError('it cannot spell U+FFFD; use a byte-level BPE')
    self._bytes_of = _bytes_of(vocab, self.control)
    self.vocab_size = _size(len(self._bytes_of), vocab_size)
    self.pad_id = self._pad_id()
    self._pieces = _content_pieces(parts)
    self._encode = functools.lru_cache(_CACHED_TEXTS)(self._encode_new)

  def __reduce__(self):
    return FastTokenizer, (self._source, self.config, self._given_size)

  def encode(self, text: str) -> list[int]:
    return list(self._encode(text))

  def decode(self, ids: Sequence[int]) -> str:
    return base.decode_bytes(self._bytes_of, ids)

  def save(self, path: str) -> None:
    """Writes one .json file, or a directory with the configuration too."""
    target = pathlib.Path(path)
    if target.suffix == '.json':
      target.write_text(self._source, encoding='utf-8')
      return
    target.mkdir(parents=True, exist_ok=True)
    (target / FILE).write_text(self._source, encoding='utf-8')
    config = json.dumps(self.config, ensure_ascii=False, indent=2)
    (target / CONFIG_FILE).write_text(config, encoding='utf-8')

  def special(self, name: str) -> str | None:
    """What a named token of the configuration spells, e.g. 'eos_token'."""
    value = self.config.get(name)
    return value.get('content') if isinstance(value, Mapping) else value

  def _encode_new(self, text: str) -> tuple[int, ...]:
    text = base.clean_surrogates(text)
    if self._lacking:
      text = ''.join(
        '\ufffd' if self._lacking.intersection(char.encode()) else char
        for char in text
      )
    return tuple(self._pieces.encode(text, add_special_tokens=False).ids)

  def _pad_id(self) -> int:
    for name in ('pad_token', 'eos_token'):
      spelt = self.special(name)
      if spelt in self.control:
        return self.control[spelt]
    return 0


def load(path: str | pathlib.Path, vocab_size: int | None = None):
  """The tokenizer of a directory, or of one tokenizer.json.

  Raises:
    UserError: it is missing, or is not one that can be used.
  """
  given = pathlib.Path(path)
  folder = given if given.is_dir() else given.parent
  file = given / FILE if given.is_dir() else given
  try:
    source = file.read_text(encoding='utf-8')
    config = {}
    if given.is_dir() and (folder / CONFIG_FILE).exists():
      config = json.loads((folder / CONFIG_FILE).read_text(encoding='utf-8'))
    if not isinstance(config, dict):
      raise ValueError(f'{CONFIG_FILE} is no JSON object')
    return FastTokenizer(source, config, vocab_size)
  except OSError as e:
    raise errors.UserError(
      f'{file} cannot be read ({e.strerror}); give a directory with a {FILE}'
    ) from e
  except ValueError as e:
    raise errors.UserError(f'{given}: {e}') from e


def _read(source: str) -> dict:
  """The parts of a tokenizer.json, as far as they are relied upon."""
  parts = json.loads(source)
  model = parts.get('model') if isinstance(parts, dict) else None
  if not isinstance(model, dict) or model.get('type', 'BPE') != 'BPE':
    raise ValueError(
      'no byte-level BPE; use the tokenizer.json of such a model'
    )
  if not isinstance(model.get('vocab'), dict) or not _is_byte_level(parts):
    raise ValueError(
      'no byte-level BPE; use the tokenizer.json of such a model'
    )
  parts['added_tokens'] = parts.get('added_tokens') or []
  for token in parts['added_tokens']:
    if any(token.get(flag) for flag in ('single_word', 'lstrip', 'rstrip')):
      raise ValueError(
        f'the added token {token["content"]!r} takes in the text around it, '
        'which rows cannot keep exact; use another tokenizer'
      )
  return parts


def _is_byte_level(parts: Mapping) -> bool:
  decoder = parts.get('decoder') or {}
  kinds = [decoder.get('type')]
  kinds += [part.get('type') for part in decoder.get('decoders', [])]
  return 'ByteLevel' in kinds


def _content_pieces(parts: Mapping):
  """The library's tokenizer without any added token, for contents."""
  try:
    import tokenizers
  except ImportError as e:
    raise ValueError(
      'a tokenizer.json needs the tokenizers library; pip install '
      "'envace_jax[hf]'"
    ) from e
  added = {token['content'] for token in parts['added_tokens']}
  merged = {
    ''.join(pair) if isinstance(pair, list) else pair.replace(' ', '', 1)
    for pair in parts['model'].get('merges', [])
  }
  if forged := sorted(added & merged):
    raise ValueError(
      f'content could spell the added token {forged[0]!r}; use another '
      'tokenizer'
    )
  vocab = {
    piece: i
    for piece, i in parts['model']['vocab'].items()
    if piece not in added
  }
  plain = {
    **parts,
    'added_tokens': [],
    'post_processor': None,
    'truncation': None,
    'padding': None,
    'model': {**parts['model'], 'vocab': vocab, 'unk_token': None},
  }
  try:
    return tokenizers.Tokenizer.from_str(json.dumps(plain))
  except Exception as e:  # the library has no exception of its own
    raise ValueError(f'the tokenizers library refuses it: {e}') from e


def _bytes_of(
  vocab: Mapping[str, int], control: Mapping[str, int]
) -> list[bytes]:
  """What every id spells; holes of the vocabulary are unreadable."""
  byte_of = _byte_of_char()
  spelt = ['\ufffd'.encode()] * (max([*vocab.values(), *control.values()]) + 1)
  for piece, i in vocab.items():
    try:
      spelt[i] = bytes(byte_of[char] for char in piece)
    except KeyError:
      spelt[i] = piece.encode()  # a special piece that is no byte string
  for name, i in control.items():
    spelt[i] = name.encode()
  return spelt


def _size(pieces: int, vocab_size: int | None) -> int:
  if vocab_size is not None and vocab_size < pieces:
    raise ValueError(
      f'the tokenizer has {pieces} pieces but the model knows {vocab_size}; '
      'use the tokenizer that belongs to the model'
    )
  return vocab_size or pieces


@functools.cache
def _byte_of_char() -> dict[str, int]:
  """The printable stand-in of each byte in a byte-level vocabulary.

  Printable Latin-1 stands for itself; the other bytes, in order, take the
  characters from U+0100 on.
  """
  printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
  others = [byte for byte in range(256) if byte not in printable]
  stand_ins = {chr(256 + i): byte for i, byte in enumerate(others)}
  return {chr(byte): byte for byte in printable} | stand_ins
