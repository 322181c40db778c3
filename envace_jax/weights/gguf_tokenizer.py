"""The tokenizer in a GGUF file -> tokenizer.json and tokenizer_config.json.

The file holds pieces, merges, their kinds and a name for how text is cut before
merging; the cut itself is known only by that name. A name that is not in
`_CUTS` is refused: a wrong cut gives other ids than the model was trained on,
and no error.
"""

import json
import pathlib

from envace_jax import errors, types
from envace_jax.weights import gguf_file

_BYTE_LEVEL = {
  'type': 'ByteLevel',
  'add_prefix_space': False,
  'trim_offsets': True,
  'use_regex': True,
}
_DIGITS = {'type': 'Digits', 'individual_digits': True}
# How each named cut is spelt in a tokenizer.json.
_CUTS = {
  'gpt-2': [_BYTE_LEVEL],
  'smollm': [_DIGITS, _BYTE_LEVEL],
}
_CONTROL, _USER_DEFINED = 3, 4  # kinds of pieces that text may not spell
_KEY = 'tokenizer.ggml.'
_NAMED = {
  'bos_token': 'bos_token_id',
  'eos_token': 'eos_token_id',
  'unk_token': 'unknown_token_id',
  'pad_token': 'padding_token_id',
}


def write_tokenizer(path: pathlib.Path, directory: pathlib.Path) -> None:
  """Writes both files into `directory`, which may exist.

  Raises:
    UserError: it is no byte-level BPE, or cut in a way that is not known.
  """
  reader = gguf_file.open_reader(path)

  def get(key, kind, default=None):
    return gguf_file.metadata(reader, path, _KEY + key, kind, default)

  model, cut = get('model', str), get('pre', str, 'default')
  if model != 'gpt2' or cut not in _CUTS:
    raise errors.UserError(
      f'{path}: its tokenizer is {model!r}, cut as {cut!r}, and known are '
      f"'gpt2' cut as one of {sorted(_CUTS)}; load the Hugging Face directory "
      'of this model'
    )
  pieces = get('tokens', list)
  kinds = get('token_type', list, [1] * len(pieces))
  vocab = {piece: i for i, piece in enumerate(pieces)}
  if len(vocab) != len(pieces) or len(kinds) != len(pieces):
    raise errors.UserError(
      f'{path}: its tokenizer has {len(pieces)} pieces, {len(vocab)} of them '
      f'different, and {len(kinds)} kinds; the file is broken, use another'
    )
  added = [
    _added(i, pieces[i], special=kind == _CONTROL)
    for i, kind in enumerate(kinds)
    if kind in (_CONTROL, _USER_DEFINED)
  ]
  config = {
    name: pieces[i]
    for name, key in _NAMED.items()
    if 0 <= (i := get(key, int, -1)) < len(pieces)
  }
  template = gguf_file.metadata(
    reader, path, 'tokenizer.chat_template', str, ''
  )
  if template:
    config['chat_template'] = template
  config['tokenizer_class'] = 'PreTrainedTokenizerFast'
  config['clean_up_tokenization_spaces'] = False
  described = _describe(vocab, get('merges', list), added, _CUTS[cut])
  directory.mkdir(parents=True, exist_ok=True)
  _write(directory / 'tokenizer.json', described)
  _write(directory / 'tokenizer_config.json', config)


def eos_id(path: pathlib.Path) -> int:
  """The token that ends what the model says."""
  reader = gguf_file.open_reader(path)
  return gguf_file.metadata(reader, path, f'{_KEY}eos_token_id', int)


def _describe(vocab, merges, added, cuts) -> types.Json:
  """A tokenizer.json."""
  return {
    'version': '1.0',
    'truncation': None,
    'padding': None,
    'added_tokens': added,
    'normalizer': None,
    'pre_tokenizer': {'type': 'Sequence', 'pretokenizers': cuts},
    'post_processor': None,
    'decoder': _BYTE_LEVEL,
    'model': {
      'type': 'BPE',
      'dropout': None,
      'unk_token': None,
      'continuing_subword_prefix': None,
      'end_of_word_suffix': None,
      'fuse_unk': False,
      'byte_fallback': False,
      'vocab': vocab,
      'merges': merges,
    },
  }


def _added(i: int, content: str, *, special: bool) -> types.Json:
  return {
    'id': i,
    'content': content,
    'single_word': False,
    'lstrip': False,
    'rstrip': False,
    'normalized': False,
    'special': special,
  }


def _write(path: pathlib.Path, value: types.Json) -> None:
  path.write_text(json.dumps(value, ensure_ascii=False), encoding='utf-8')
