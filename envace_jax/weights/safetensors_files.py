"""The safetensors files of a directory, opened once and read one by one."""

import json
import pathlib

import ml_dtypes  # noqa: F401  numpy learns bfloat16 from it
import numpy as np

from envace_jax import errors

SINGLE = 'model.safetensors'
INDEX = 'model.safetensors.index.json'

_ENDING = '.safetensors'
_DTYPES = ('F32', 'F16', 'BF16')


class SafetensorsFiles:
  """Tensors by name; a tensor is read when it is asked for, and not kept."""

  def __init__(self, directory: pathlib.Path):
    """Opens every file and reads its header.

    Raises:
      UserError: a file is missing, cut short, or holds what no model has.
    """
    self._files = {}
    self.shapes: dict[str, tuple[int, ...]] = {}
    for file, names in _files_of(directory).items():
      path = directory / file
      opened = _open(path)
      held = set(opened.keys())
      for name in sorted(held if names is None else names):
        if name not in held:
          raise errors.UserError(
            f'{path} lacks tensor {name}, which {INDEX} says it holds; '
            'download the checkpoint again'
          )
        described = opened.get_slice(name)
        if described.get_dtype() not in _DTYPES:
          raise errors.UserError(
            f'{path}: tensor {name} is stored as {described.get_dtype()}, '
            f'not one of {list(_DTYPES)}; convert the checkpoint'
          )
        self.shapes[name] = tuple(described.get_shape())
        self._files[name] = opened

  def read(self, name: str) -> np.ndarray:
    return self._files[name].get_tensor(name)


def _files_of(directory: pathlib.Path) -> dict[str, set[str] | None]:
  """File name -> the tensors that are its; None: whatever it holds."""
  index = directory / INDEX
  if not index.exists():
    if (directory / SINGLE).exists():
      return {SINGLE: None}
    raise errors.UserError(
      f'{directory} has neither {SINGLE} nor {INDEX}; '
      'give the directory of a checkpoint saved as safetensors'
    )
  try:
    table = json.loads(index.read_text())['weight_map']
    files = {}
    for name, file in table.items():
      # Nor `..` or nothing: both are plain, and folders.
      if pathlib.PurePath(file).name != file or not file.endswith(_ENDING):
        raise ValueError(f'{file!r} is no plain name of a {_ENDING} file')
      files.setdefault(file, set()).add(name)
  except (
    ValueError, KeyError, TypeError, AttributeError, RecursionError
  ) as error:  # fmt: skip
    raise errors.UserError(
      f'{index} has no weight_map of tensor to file name ({error}); '
      'download the checkpoint again'
    ) from error
  return files


def _open(path: pathlib.Path):
  try:
    import safetensors
  except ImportError as error:
    raise errors.UserError(
      "reading safetensors needs: pip install 'envace_jax[hf]'"
    ) from error
  if not path.exists():
    raise errors.UserError(f'{path} is missing; download the checkpoint again')
  try:
    return safetensors.safe_open(str(path), framework='numpy')
  except (safetensors.SafetensorError, OSError) as error:
    raise errors.UserError(
      f'{path} is cut short or no safetensors file ({error}); download it again'
    ) from error
