"""Text to ids and back, with control pieces that content cannot forge.

Two rules shape this file.

*Control pieces are written by the template, never by content.* `encode` takes
content and cannot yield a control id, whatever the text spells; `decode` shows
control ids by name. Bytes stand behind everything, so any text round-trips
(a lone surrogate becomes U+FFFD) and any ids decode.

*A value is spelt the same wherever it stands.* A tiny model copies `O12` from
an instruction into a call only if it is the same piece in both. So a local
lexer cuts text into words (ids, numbers, names) and gaps (punctuation, spaces,
JSON keys), and both training and encoding work segment by segment:

  {"order_id": "|O12|", "status": "|shipped|"}      Cancel| |order| |O12|.

The ids of a segment depend on that segment alone. This is the pre-tokenizer of
a byte-level BPE, with JSON keys as scaffolding; it is not a JSON parser, so cut
or malformed text is cut the same way.

Training is SentencePiece unigram (Kudo 2018, arXiv 1804.10959). SentencePiece
finds candidate pieces by looking for repeated substrings among *distinct*
segments, where a whole id occurs once and is never proposed; the candidates are
therefore given (`_seed_pieces`). BPE would also reach whole ids but fills a
third of a small vocabulary with intermediate merges.
"""

import collections
from collections.abc import Iterable, Mapping, Sequence
import functools
import io
import pathlib
import re
import tempfile
from typing import Protocol

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

CONTROL = (
  '<|pad|>',
  '<|user|>',
  '<|notes|>',
  '<|act|>',
  '<|rehearse|>',
  '<|end|>',
  '<tool_call>',
  '</tool_call>',
  '<tool_response>',
  '</tool_response>',
  '<|system|>',
  '<|tools|>',
)
# Marks of private thinking, in vocabularies for policies that think aloud.
THOUGHTS = ('<think>', '</think>')
DELIMITER = '\ue000'  # private use: a piece border in the training corpus
MAX_PIECE_CHARS = 64

_UNKNOWN = '<unk>'  # SentencePiece insists on one; byte fallback never uses it
_CACHED_SEGMENTS = 1 << 16
_BYTE_MAGIC = b'envace_jax byte tokenizer\n'

# SentencePiece forbids pieces that end in a space and reads tabs and newlines
# of a seed file as structure. It is shown stand-ins; literal stand-ins, its own
# space mark U+2581 and NUL go straight to bytes.
_STAND_INS = {' ': '\ue001', '\n': '\ue002', '\t': '\ue003', '\r': '\ue004'}
_TO_STAND_IN = str.maketrans(_STAND_INS)
_FROM_STAND_IN = str.maketrans({v: k for k, v in _STAND_INS.items()})
_RESERVED = '\x00\u2581\ue000-\ue004'
_UNTRAINABLE = re.compile(f'[{_RESERVED}]')
_SURROGATE = re.compile('[\ud800-\udfff]')
_CONTROL_NAME = re.compile('|'.join(map(re.escape, CONTROL + THOUGHTS)))

_CJK = '\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af'  # no spaces between words
_W = rf'[^\W{_CJK}]'
_WORD = '|'.join(
  [
    r'\w[\w.+-]{0,63}+@\w[\w-]*+(?:\.\w+)++',  # a@b.co
    r'\d{1,3}(?:,\d{3})++(?:\.\d++)?(?!\w)',  # 1,200.50
    r'\d++(?:\.\d++)++(?!\w)',  # 12.5
    rf'{_W}++(?:-{_W}++)*+',  # O12, get_order, USB-C
    rf'[{_CJK}]++',
  ]
)
# A key with a digit or a leading capital is a value used as a key.
_KEY = r'"[a-z_][A-Za-z_]*+"\s*+:'
# The tool name of a call is scaffolding: choosing a tool is one decision.
_CALL = r'\{"name": "[\w.-]++", "arguments": \{'
_ESCAPE = r'\\(?:u[0-9a-fA-F]{4}|["\\/bfnrt])'
_SUFFIX = r"'(?:s|t|re|ve|m|ll|d)\b"  # Ana's: the name stays whole
_GAP = rf'(?:{_CALL}|{_KEY}|{_ESCAPE}|{_SUFFIX}|[^\w{DELIMITER}])++'
_SEGMENT = re.compile(f'{_WORD}|{_GAP}|.', re.DOTALL)
_ATOM = re.compile(r'\w+|\W+')


class Tokenizer(Protocol):
  """What templates and models need to know about a vocabulary."""

  @property
  def vocab_size(self) -> int: ...

  @property
  def pad_id(self) -> int: ...

  @property
  def control(self) -> Mapping[str, int]:
    """Name of a control piece -> its id; all of CONTROL, THOUGHTS or not."""
    ...

  def encode(self, text: str) -> list[int]:
    """Ids of content; never a control id."""
    ...

  def decode(self, ids: Sequence[int]) -> str:
    """Text of any ids, control pieces by name, bad bytes as U+FFFD."""
    ...

  def save(self, path: str) -> None: ...


class ByteTokenizer:
  """Control ids, then the 256 bytes. For tests and for no training corpus."""

  def __init__(self):
    names = CONTROL + THOUGHTS
    self.control = {name: i for i, name in enumerate(names)}
    self.pad_id = 0
    self.vocab_size = len(names) + 256
    self._bytes_of = [name.encode() for name in names]
    self._bytes_of += [bytes([b]) for b in range(256)]

  def encode(self, text: str) -> list[int]:
    return [b + len(self.control) for b in clean_surrogates(text).encode()]

  def decode(self, ids: Sequence[int]) -> str:
    return decode_bytes(self._bytes_of, ids)

  def save(self, path: str) -> None:
    pathlib.Path(path).write_bytes(_BYTE_MAGIC)


class SentencePieceTokenizer:
  """A SentencePiece model applied segment by segment."""

  def __init__(self, proto: bytes):
    self._proto = proto
    self._pieces = sentencepiece.SentencePieceProcessor(model_proto=proto)
    self.vocab_size = self._pieces.get_piece_size()
    ids = {name: self._pieces.piece_to_id(name) for name in CONTROL + THOUGHTS}
    self.control = {n: i for n, i in ids.items() if self._pieces.is_control(i)}
    if missing := set(CONTROL) - set(self.control):
      raise ValueError(f'{sorted(missing)} are no control pieces of this model')
    self.pad_id = self.control['<|pad|>']
    self._bytes_of = [self._piece_bytes(i) for i in range(self.vocab_size)]
    self._byte_ids = [
      self._pieces.piece_to_id(f'<0x{b:02X}>') for b in range(256)
    ]
    # A stand-in that is no piece would fall back to its own bytes.
    unused = [
      char
      for char, mark in _STAND_INS.items()
      if self._pieces.is_unknown(self._pieces.piece_to_id(mark))
    ]
    self._bytes_only = re.compile(f'([{_RESERVED}{"".join(unused)}])')
    self._encode_segment = functools.lru_cache(_CACHED_SEGMENTS)(
      self._encode_new_segment
    )

  def __reduce__(self):
    return SentencePieceTokenizer, (self._proto,)

  @staticmethod
  def load(path: str) -> 'SentencePieceTokenizer':
    return SentencePieceTokenizer(pathlib.Path(path).read_bytes())

  @staticmethod
  def train(
    sentences: Iterable[str],
    vocab_size: int,
    delimiter: str = DELIMITER,
    *,
    thoughts: bool = False,
  ) -> 'SentencePieceTokenizer':
    """Learns at most `vocab_size` pieces; same sentences, same bytes."""
    control = CONTROL + THOUGHTS if thoughts else CONTROL
    return SentencePieceTokenizer(
      _train(sentences, vocab_size, delimiter, control)
    )

  def save(self, path: str) -> None:
    pathlib.Path(path).write_bytes(self._proto)

  def encode(self, text: str) -> list[int]:
    ids: list[int] = []
    for segment in split(text):
      ids.extend(self._encode_segment(segment))
    return ids

  def decode(self, ids: Sequence[int]) -> str:
    return decode_bytes(self._bytes_of, ids)

  def _encode_new_segment(self, segment: str) -> tuple[int, ...]:
    ids: list[int] = []
    for i, part in enumerate(self._bytes_only.split(segment)):
      if i % 2:
        ids.extend(self._byte_ids[b] for b in part.encode())
      elif part:
        ids.extend(self._pieces.encode(part.translate(_TO_STAND_IN)))
    return tuple(ids)

  def _piece_bytes(self, i: int) -> bytes:
    piece = self._pieces.id_to_piece(i)
    if self._pieces.is_byte(i):
      return bytes([int(piece[3:5], 16)])
    if self._pieces.is_unknown(i):
      return '\ufffd'.encode()
    return piece.translate(_FROM_STAND_IN).encode()


def load(path: str) -> Tokenizer:
  """Reads back whatever `save` wrote."""
  if pathlib.Path(path).read_bytes() == _BYTE_MAGIC:
    return ByteTokenizer()
  return SentencePieceTokenizer.load(path)


def clean_surrogates(text: str) -> str:
  """Lone surrogates, which UTF-8 cannot carry, become U+FFFD."""
  return _SURROGATE.sub('\ufffd', text)


def split(text: str) -> list[str]:
  """Words and gaps of a text, in order; their concatenation is the text."""
  return _SEGMENT.findall(clean_surrogates(text))


def split_for_training(text: str, delimiter: str = DELIMITER) -> str:
  """Puts delimiters between segments and in place of control pieces.

  Rows may be given whole or as contents, and may already be delimited.
  """
  segments: list[str] = []
  for content in _CONTROL_NAME.split(text):
    for part in content.split(delimiter):
      segments.extend(s for s in split(part) if not _UNTRAINABLE.search(s))
  return delimiter.join(segments)


def decode_bytes(bytes_of: Sequence[bytes], ids: Sequence[int]) -> str:
  """Text of ids whose bytes are known; others, and bad bytes, as U+FFFD."""
  bad = '\ufffd'.encode()
  parts = (bytes_of[i] if 0 <= i < len(bytes_of) else bad for i in ids)
  return b''.join(parts).decode('utf-8', 'replace')


def _train(
  sentences: Iterable[str],
  vocab_size: int,
  delimiter: str,
  control: Sequence[str],
) -> bytes:
  corpus = [
    split_for_training(s, delimiter).translate(_TO_STAND_IN) for s in sentences
  ]
  corpus = [line for line in corpus if line]
  if not corpus:
    raise ValueError('the tokenizer was given no text to train on')
  counts = collections.Counter(
    s for line in corpus for s in line.split(delimiter)
  )
  # Each covered character takes a piece; a word with an uncovered one is spelt
  # in bytes. Scripts too large for the vocabulary lose their rarest signs.
  many = len(set(''.join(counts))) > (vocab_size - 257 - len(control)) / 2
  coverage = 0.9995 if many else 1.0
  model = io.BytesIO()
  with tempfile.TemporaryDirectory() as folder:
    seeds = pathlib.Path(folder, 'seeds.tsv')
    lines = (f'{piece}\t{count}\n' for piece, count in _seed_pieces(counts))
    seeds.write_text(''.join(lines), encoding='utf-8')
    try:
      sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus),
        model_writer=model,
        model_type='unigram',
        vocab_size=vocab_size,
        hard_vocab_limit=False,
        control_symbols=list(control[1:]),
        pad_id=0,
        pad_piece=control[0],
        unk_id=1,
        unk_piece=_UNKNOWN,
        bos_id=-1,
        eos_id=-1,
        byte_fallback=True,
        character_coverage=coverage,
        normalization_rule_name='identity',
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        split_by_whitespace=False,
        split_by_number=False,
        split_by_unicode_script=False,
        pretokenization_delimiter=delimiter,
        max_sentencepiece_length=MAX_PIECE_CHARS,
        max_sentence_length=1 << 30,
        seed_sentencepieces_file=str(seeds),
        num_threads=1,
        minloglevel=2,
      )
    except RuntimeError as e:
      raise ValueError(
        f'vocab_size={vocab_size} does not work for this corpus; bytes and '
        f'control pieces alone take {257 + len(control)}: {e}'
      ) from e
  proto = sentencepiece_model_pb2.ModelProto.FromString(model.getvalue())
  # The name of a temporary file would make two equal models differ.
  proto.trainer_spec.ClearField('seed_sentencepieces_file')
  return proto.SerializeToString(deterministic=True)


def _seed_pieces(counts: Mapping[str, int]) -> list[tuple[str, int]]:
  """Candidate pieces: whole segments, and parts that several segments share.

  Parts of a gap are cut at its key and punctuation borders, parts of a word
  anywhere.
  """
  seeds = {s: n for s, n in counts.items() if len(s) <= MAX_PIECE_CHARS}
  owners = collections.Counter()
  for segment in counts:
    atoms = _ATOM.findall(segment)
    owners.update(_spans(list(segment) if len(atoms) == 1 else atoms))
  # A part starts with the weight of its owners' number, not of their counts:
  # it must not outbid the rare whole segment that it is a part of.
  for part, n in owners.items():
    if n > 1:
      seeds.setdefault(part, n)
  # Count times length is how SentencePiece ranks its own candidates.
  chosen = [(p, c * len(p)) for p, c in seeds.items() if len(p) > 1]
  return sorted(chosen, key=lambda pair: (-pair[1], pair[0]))


def _spans(units: Sequence[str], longest: int = 12) -> set[str]:
  """Distinct concatenations of up to `longest` neighbouring units."""
  n = len(units)
  spans = (
    ''.join(units[i:j])
    for i in range(n)
    for j in range(i + 1, min(i + longest, n) + 1)
  )
  return {s for s in spans if len(s) <= MAX_PIECE_CHARS}
