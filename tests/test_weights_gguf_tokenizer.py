"""Ids of a tokenizer written from a GGUF file equal an independent BPE's.

The reference below is a few slow lines over the file's own pieces and merges:
each digit alone, then GPT-2's cut, then the merge of lowest rank, one by one.
transformers' own conversion leaves the digits step out and is no reference.
"""

import json
import random

import pretrained as fetched
import pytest

from envace_jax.text import fast_tokenizer
from envace_jax.weights import gguf_file

regex = pytest.importorskip('regex', reason='the cut of the reference')
tokenizers = pytest.importorskip('tokenizers', reason='what reads the file')
pytest.importorskip('gguf', reason='reads the file')

GPT2 = regex.compile(
  r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+"
  r'|\s+(?!\S)|\s+'
)
TEXTS = (
  'Order 48213 of 12/05, 3.50 EUR: 1,000,000 items',
  "don't we've I'M they're  it's\tO'Neil's",
  'a  b   c\n\n  d \r\n\te  ',
  'x²+½=Ⅷ ٣٤ 四五 1٢3',
  'Zoë naïve Straße 北京 こんにちは 😀👩‍👩‍👧 e\u0301',
  '{"name": "get_order", "arguments": {"id": "O12", "n": 007}}',
  'def f(x):\n    return x**2  # 42\n',
  '\u00a0\u2003x\u200b\ufeff\x00\x7f',
  ' ',
  '',
)


@pytest.fixture(scope='module')
def file():
  reader = gguf_file.open_reader(fetched.smollm2_gguf())
  read = lambda key: reader.fields[f'tokenizer.ggml.{key}'].contents()
  return {key: read(key) for key in ('tokens', 'merges', 'token_type')}


@pytest.fixture(scope='module')
def slow_encode(file):
  id_of = {piece: i for i, piece in enumerate(file['tokens'])}
  rank_of = {tuple(m.split(' ')): i for i, m in enumerate(file['merges'])}
  # Bytes that print stand for themselves, the others for U+0100 and on.
  prints = [*range(33, 127), *range(161, 173), *range(174, 256)]
  rest = [b for b in range(256) if b not in prints]
  letter_of = {b: chr(b) for b in prints}
  letter_of |= {b: chr(256 + i) for i, b in enumerate(rest)}

  def merge(word):
    parts = [letter_of[b] for b in word.encode()]
    while len(parts) > 1:
      ranks = [
        rank_of.get(pair, len(rank_of))
        for pair in zip(parts, parts[1:], strict=False)
      ]
      if min(ranks) == len(rank_of):
        break
      i = ranks.index(min(ranks))
      parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return [id_of[part] for part in parts]

  def encode(text):
    words = []
    for span in regex.split(r'(\p{N})', text):
      words += GPT2.findall(span)
    assert ''.join(words) == text
    return [i for word in words for i in merge(word)]

  return encode


def load():
  folder = fetched.smollm2_tokenizer()
  return tokenizers.Tokenizer.from_file(str(folder / 'tokenizer.json'))


@pytest.mark.parametrize('text', TEXTS)
def test_ids_equal_those_of_a_slow_bpe(slow_encode, text):
  ids = load().encode(text).ids
  assert ids == slow_encode(text)
  assert fast_tokenizer.load(fetched.smollm2_tokenizer()).encode(text) == ids
  assert load().decode(ids, skip_special_tokens=False) == text


def test_ids_of_noise_equal_those_of_a_slow_bpe(slow_encode):
  draw = random.Random(0)
  letters = 'aeht ZQ\n\t  0123456789.,\'"{}é北½٣😀_-'
  fast = load()
  for _ in range(300):
    text = ''.join(draw.choices(letters, k=draw.randint(1, 40)))
    assert fast.encode(text).ids == slow_encode(text), repr(text)


def test_digits_are_tokens_of_their_own():
  words = load().encode('in 2024, 100').tokens
  assert [w for w in words if any(c.isdigit() for c in w)] == list('2024100')


def test_markers_are_single_tokens_and_named(file):
  fast = load()
  controls = [i for i, kind in enumerate(file['token_type']) if kind == 3]
  assert len(controls) == 17
  for i in controls:
    piece = file['tokens'][i]
    assert fast.encode(f'a{piece}b').ids == [
      *fast.encode('a').ids, i, *fast.encode('b').ids
    ]  # fmt: skip
  folder = fetched.smollm2_tokenizer()
  config = json.loads((folder / 'tokenizer_config.json').read_text())
  assert config['bos_token'] == '<|im_start|>'
  assert config['eos_token'] == config['pad_token'] == '<|im_end|>'
  assert 'add_generation_prompt' in config['chat_template']


def test_transformers_reads_what_was_written():
  transformers = pytest.importorskip('transformers', reason='reads the files')
  folder = fetched.smollm2_tokenizer()
  theirs = transformers.AutoTokenizer.from_pretrained(folder)
  messages = [{'role': 'user', 'content': 'Add 17 and 25.'}]
  text = theirs.apply_chat_template(
    messages, tokenize=False, add_generation_prompt=True
  )
  assert text.endswith('<|im_start|>assistant\n')
  ids = theirs(text)['input_ids']
  assert ids == load().encode(text).ids and ids[0] == 1
  assert theirs.decode(ids) == text
  assert (theirs.eos_token_id, len(theirs)) == (2, 49_152)
