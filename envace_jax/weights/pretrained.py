"""Pretrained weights: a Hugging Face directory or a GGUF file -> parameters.

  checkpoint = pretrained.open_checkpoint(path)
  config = dataclasses.replace(checkpoint.config, scan_layers=True)
  params = checkpoint.load(config, shardings)

Opening reads names and shapes only and refuses, by name, a tensor that is
missing, unknown or of the wrong shape; nothing is compiled or placed before.
"""

from collections.abc import Mapping
import dataclasses
import json
import pathlib
import re
from typing import Any

import numpy as np

from envace_jax import errors
from envace_jax.model import config as config_lib
from envace_jax.weights import (
  architectures,
  gguf_file,
  names,
  placement,
  safetensors_files,
)

# Not parameters: frequencies that old checkpoints store, and GGUF's own ones.
_IGNORED = re.compile(r'model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq')


@dataclasses.dataclass(frozen=True)
class Pretrained:
  """An opened checkpoint whose tensors are those of `config`."""

  path: pathlib.Path
  config: config_lib.TransformerConfig
  tensors: Any  # .shapes, .read(name)
  is_gguf: bool

  def load(
    self,
    config: config_lib.TransformerConfig | None = None,
    shardings: Any = None,
    dtype: str = 'float32',
  ) -> dict[str, Any]:
    """Parameters in the layout of `config`, already placed.

    Args:
      config: the checkpoint's own architecture; layout and numerics may
        differ. None: the checkpoint's config.
      shardings: tree of the parameters' structure; None: the default device.
      dtype: of the parameters; a base that stays frozen may be bfloat16.
    """
    config = self.config if config is None else config
    architectures.check_same(config, self.config, self.path)
    if dtype not in config_lib.DTYPES:
      raise errors.UserError(
        f'dtype={dtype!r} of parameters is not one of '
        f'{sorted(config_lib.DTYPES)}'
      )
    as_numpy = np.dtype(config_lib.DTYPES[dtype])
    return placement.load(self.read, config, shardings, as_numpy)

  def read(
    self, parameter: names.Parameter, layer: int | None = None
  ) -> np.ndarray:
    """One tensor as Hugging Face files store it."""
    name = _name(parameter, layer, self.is_gguf)
    stored = self.tensors.read(name)
    if self.is_gguf:
      stored = gguf_file.unpermute(stored, parameter, self.tensors.kind)
    return stored


def open_checkpoint(path: str | pathlib.Path) -> Pretrained:
  """Opens a directory with config.json and safetensors, or a .gguf file."""
  path = pathlib.Path(path)
  if not path.exists():
    raise errors.UserError(
      f'{path} does not exist; give a checkpoint directory or a .gguf file'
    )
  if path.is_dir():
    config = architectures.read(_json(path / 'config.json'), path)
    tensors = safetensors_files.SafetensorsFiles(path)
  else:
    tensors = gguf_file.GgufFile(path)
    config = tensors.config()
  opened = Pretrained(path, config, tensors, not path.is_dir())
  _check_tensors(opened)
  return opened


def _json(path: pathlib.Path) -> Mapping[str, Any]:
  try:
    return json.loads(path.read_text())
  except FileNotFoundError as error:
    raise errors.UserError(
      f'{path} is missing; give a checkpoint directory or a .gguf file'
    ) from error
  except (ValueError, OSError, RecursionError) as error:
    raise errors.UserError(f'{path} is no JSON file: {error}') from error


def _name(parameter, layer, is_gguf) -> str:
  template = parameter.gguf if is_gguf else parameter.hf
  return template.format(i=layer)


def _check_tensors(opened: Pretrained) -> None:
  shapes, path, config = opened.tensors.shapes, opened.path, opened.config
  expected = {}
  for parameter in names.parameters(config):
    layers = range(config.num_layers) if parameter.layered else [None]
    for layer in layers:
      name = _name(parameter, layer, opened.is_gguf)
      expected[name] = parameter.stored_shape
  for name, shape in expected.items():
    if name not in shapes:
      raise errors.UserError(
        f'{path} lacks tensor {name}; the file is incomplete, or its config '
        'is of another model'
      )
    if shapes[name] != shape:
      raise errors.UserError(
        f'{path}: tensor {name} has shape {list(shapes[name])}, its config '
        f'says {list(shape)}; one of them is of another model'
      )
  # Some files store the tied table twice.
  ignored = {'lm_head.weight'} if config.tie_embeddings else set()
  for name in sorted(set(shapes) - set(expected) - ignored):
    if not _IGNORED.fullmatch(name):
      raise errors.UserError(
        f'{path} holds tensor {name}, which no part of the model is; '
        'its config is of another model, or leaves a feature out'
      )
