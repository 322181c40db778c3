"""A GGUF file: its config, and its tensors dequantised one by one.

Metadata keys start with the architecture's name (`llama.block_count`). Files
of architecture llama store the rows of q and k so that RoPE turns neighbours
(2i, 2i + 1); ours turns (i, i + H/2), as Hugging Face files do:

  file   0 2 1 3  ->  ours   0 1 2 3      H = 4, rows of one head
"""

import functools
import pathlib
from typing import Any

import numpy as np

from envace_jax import errors
from envace_jax.model import config as config_lib
from envace_jax.model import rope
from envace_jax.weights import names

KINDS = ('llama', 'qwen2', 'qwen3')


class GgufFile:
  """Tensors by name; a tensor is dequantised when it is asked for."""

  def __init__(self, path: pathlib.Path):
    self.path = path
    self._reader = open_reader(path)
    self.kind = self.metadata('general.architecture', str)
    if self.kind not in KINDS:
      raise errors.UserError(
        f'{path}: architecture {self.kind!r} is not one of {list(KINDS)}; '
        'load its Hugging Face directory'
      )
    self._tensors = {t.name: t for t in self._reader.tensors}
    if 'rope_freqs.weight' in self._tensors:
      raise errors.UserError(
        f'{path} scales RoPE by a tensor (rope_freqs.weight), which does not '
        'say how; load its Hugging Face directory'
      )
    # GGUF names the fastest axis first.
    self.shapes = {
      name: tuple(int(n) for n in reversed(t.shape))
      for name, t in self._tensors.items()
    }

  def read(self, name: str) -> np.ndarray:
    import gguf

    tensor = self._tensors[name]
    try:
      values = gguf.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
      raise errors.UserError(
        f'{self.path}: tensor {name} is quantised as '
        f'{tensor.tensor_type.name}, which cannot be read; use another file'
      ) from error
    return np.asarray(values, np.float32).reshape(self.shapes[name])

  def metadata(self, key: str, kind: type, default: Any = None) -> Any:
    """A scalar of the header; an error that names it where there is none."""
    return metadata(self._reader, self.path, key, kind, default)

  def config(self) -> config_lib.TransformerConfig:
    def get(key, kind, default=None):
      return self.metadata(f'{self.kind}.{key}', kind, default)

    heads = get('attention.head_count', int)
    d_model = get('embedding_length', int)
    head_dim = get('attention.key_length', int, d_model // max(heads, 1))
    rotated = get('rope.dimension_count', int, head_dim)
    if rotated != head_dim or get('attention.sliding_window', int, 0):
      raise errors.UserError(
        f'{self.path}: {self.kind} with partly rotated heads or a sliding '
        'window is not supported; use another file'
      )
    if 'token_embd.weight' not in self.shapes:
      raise errors.UserError(f'{self.path} lacks tensor token_embd.weight')
    try:
      return config_lib.TransformerConfig(
        vocab_size=self.shapes['token_embd.weight'][0],
        d_model=d_model,
        num_layers=get('block_count', int),
        num_heads=heads,
        num_kv_heads=get('attention.head_count_kv', int, heads),
        head_dim=head_dim,
        d_ff=get('feed_forward_length', int),
        rope_theta=_short(get('rope.freq_base', float, 10_000.0)),
        rope_scaling=self._rope_scaling(get),
        norm_eps=_short(get('attention.layer_norm_rms_epsilon', float)),
        qk_norm=self.kind == 'qwen3',
        attention_bias='blk.0.attn_q.bias' in self.shapes,
        output_bias='blk.0.attn_output.bias' in self.shapes,
        tie_embeddings='output.weight' not in self.shapes,
        max_len=get('context_length', int),
      )
    except ValueError as error:
      raise errors.UserError(
        f'{self.path} describes no model that can be built: {error}'
      ) from error

  def _rope_scaling(self, get) -> rope.RopeScaling | None:
    kind = get('rope.scaling.type', str, 'none')
    if kind == 'none':
      return None
    if kind != 'linear':
      raise errors.UserError(
        f'{self.path}: rope scaling type {kind!r} is not one of '
        "['none', 'linear']; load its Hugging Face directory"
      )
    return rope.RopeScaling(kind=kind, factor=get('rope.scaling.factor', float))


def unpermute(
  stored: np.ndarray, parameter: names.Parameter, kind: str
) -> np.ndarray:
  """Rows of q and k of a llama file in Hugging Face's order; others as is."""
  letters = {'wq', 'wk', 'wq_bias', 'wk_bias'}
  if kind != 'llama' or parameter.path[-1] not in letters:
    return stored
  head_dim = parameter.shape[-1]
  rows = stored.reshape(-1, head_dim // 2, 2, *stored.shape[1:])
  return rows.swapaxes(1, 2).reshape(stored.shape)


def open_reader(path: pathlib.Path):
  """The `gguf` package's reader of a whole file.

  That of the last file is kept: to read the header takes seconds, and whoever
  wants weights wants the tokenizer as well.
  """
  try:
    status = path.stat()
  except OSError as error:
    raise errors.UserError(
      f'{path} cannot be read ({error.strerror}); give a .gguf file'
    ) from error
  return _open_version(path, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=1)
def _open_version(path: pathlib.Path, mtime: int, size: int):
  try:
    import gguf
  except ImportError as error:
    raise errors.UserError(
      "reading GGUF needs: pip install 'envace_jax[hf]'"
    ) from error
  try:
    return gguf.GGUFReader(path)
  # The reader trusts the header: what a cut or foreign file raises is chance.
  except Exception as error:
    raise errors.UserError(
      f'{path} is cut short or no GGUF file ({error}); download it again'
    ) from error


def metadata(reader, path, key: str, kind: type, default: Any = None) -> Any:
  field = reader.fields.get(key)
  value = default if field is None else field.contents()
  if isinstance(value, int) and kind is float:
    value = float(value)
  if not isinstance(value, kind):
    raise errors.UserError(
      f'{path}: {key}={value!r} must be a {kind.__name__}; use another file'
    )
  return value


def _short(value: float) -> float:
  """The decimal that was meant by a number stored in float32."""
  return float(str(np.float32(value)))
