"""Parameters -> a directory that `transformers` and its kin load.

  export.save(params, config, 'model', dtype='bfloat16', eos_ids=(2,))

config.json, generation_config.json, and model.safetensors, or numbered shards
of it with an index. What was stored in `dtype` before comes back bit for bit.
Tokenizer files are the caller's to add.
"""

from collections.abc import Iterator, Sequence
import json
import pathlib
import shutil
from typing import Any

import jax
import numpy as np

from envace_jax import errors
from envace_jax.model import config as config_lib
from envace_jax.weights import architectures, names, safetensors_files

SHARD_BYTES = 4 << 30


def save(
  params: Any,
  config: config_lib.TransformerConfig,
  directory: str | pathlib.Path,
  *,
  dtype: str,
  eos_ids: Sequence[int],
  shard_bytes: int = SHARD_BYTES,
) -> None:
  """Writes the directory, all or nothing.

  Args:
    params: plain parameters, in the layout that `config` says.
    config: its `lora` must be None: merge adapters first.
    directory: must not exist yet.
    dtype: as stored, 'float32' or 'bfloat16'.
    eos_ids: tokens that end a generation.
    shard_bytes: a file holds at most so much, or one tensor.

  Raises:
    UserError: no architecture of theirs computes this model, there is
      something at `directory`, or an end token is no token.
  """
  directory = pathlib.Path(directory)
  if dtype not in config_lib.DTYPES:
    raise errors.UserError(
      f'dtype={dtype!r} of an export is not one of {sorted(config_lib.DTYPES)}'
    )
  if config.lora is not None:
    raise errors.UserError('adapters have no place in an export; merge them')
  described = architectures.write(config, dtype)
  stops = list(map(int, eos_ids))
  if not stops or min(stops) < 0 or max(stops) >= config.vocab_size:
    raise errors.UserError(
      f'eos_ids={stops} must be at least one id below the vocabulary of '
      f'{config.vocab_size}; take the stop ids of the chat template'
    )
  if directory.exists():
    raise errors.UserError(f'{directory} exists already; name a new directory')
  partial = directory.with_name(directory.name + '.partial')
  shutil.rmtree(partial, ignore_errors=True)
  partial.mkdir(parents=True)
  try:
    _write_json(partial / 'config.json', described)
    _write_json(partial / 'generation_config.json', {'eos_token_id': stops})
    tensors = _tensors(params, config, np.dtype(config_lib.DTYPES[dtype]))
    _write_shards(partial, tensors, shard_bytes)
    partial.rename(directory)
  except BaseException:
    # Gigabytes that nobody would look for.
    shutil.rmtree(partial, ignore_errors=True)
    raise


def _tensors(
  params, config, dtype: np.dtype
) -> Iterator[tuple[str, np.ndarray]]:
  """(name in the file, tensor), one after another."""
  for parameter in names.parameters(config):
    for i, path in enumerate(names.tree_paths(parameter, config)):
      leaf = params
      for key in path:
        leaf = leaf[key]
      stacked = parameter.layered and config.scan_layers
      for layer in range(config.num_layers) if stacked else [i]:
        ours = jax.device_get(leaf[layer] if stacked else leaf)
        name = parameter.hf.format(i=layer)
        yield name, parameter.to_file(np.asarray(ours, dtype))


def _write_shards(folder: pathlib.Path, tensors, shard_bytes: int) -> None:
  """Fills files in turn; they get their names when their number is known."""
  held: dict[str, np.ndarray] = {}
  files: list[list[str]] = []
  total = 0

  def flush():
    _save_file(held, folder / f'{len(files)}.part')
    files.append(list(held))
    held.clear()

  for name, tensor in tensors:
    size = sum(x.nbytes for x in held.values())
    if held and size + tensor.nbytes > shard_bytes:
      flush()
    held[name] = tensor
    total += tensor.nbytes
  flush()
  if len(files) == 1:
    (folder / '0.part').rename(folder / safetensors_files.SINGLE)
    return
  weight_map = {}
  for i, held_names in enumerate(files):
    file = f'model-{i + 1:05}-of-{len(files):05}.safetensors'
    (folder / f'{i}.part').rename(folder / file)
    weight_map |= dict.fromkeys(held_names, file)
  _write_json(
    folder / safetensors_files.INDEX,
    {'metadata': {'total_size': total}, 'weight_map': weight_map},
  )


def _save_file(tensors: dict[str, np.ndarray], path: pathlib.Path) -> None:
  try:
    import safetensors.numpy
  except ImportError as error:
    raise errors.UserError(
      "writing safetensors needs: pip install 'envace_jax[hf]'"
    ) from error
  # transformers reads this field, and refuses files that lack it.
  safetensors.numpy.save_file(tensors, str(path), metadata={'format': 'pt'})


def _write_json(path: pathlib.Path, value) -> None:
  path.write_text(json.dumps(value, indent=2) + '\n')
