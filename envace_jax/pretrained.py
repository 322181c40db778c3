"""The published checkpoint that a run starts from, kept with the run.

  workdir/pretrained/   config.json, model.safetensors, tokenizer.json, ...

Whatever it was, it is a Hugging Face directory there, written before anything
else happens. So a run remembers its architecture, its tokenizer and the weights
that adapters correct: whoever evaluates, exports or goes on with it needs the
workdir alone, and may lose what `pretrained.path` names.
"""

import os
import pathlib
import shutil

import ml_collections

from envace_jax import errors, types
from envace_jax.model import config as model_config
from envace_jax.model import transformer
from envace_jax.text import template as templates
from envace_jax.text import tokenizer as tokenizers
from envace_jax.weights import export, gguf_tokenizer
from envace_jax.weights import pretrained as checkpoints

FOLDER = 'pretrained'
OWN_TOKENIZER_FILE = 'envace_tokenizer.model'
# Written anew with weights; all else describes a tokenizer.
WEIGHT_FILES = (
  'config.json',
  'generation_config.json',
  'model.safetensors.index.json',
)
_GGUF = '.gguf'


def architecture(
  config: ml_collections.ConfigDict, workdir: pathlib.Path | None = None
) -> model_config.TransformerConfig | None:
  """That of `pretrained.path`; None where a run starts from nothing.

  A run that has begun has its own copy in `workdir`.

  Raises:
    UserError: there is no such checkpoint, or none that is understood.
  """
  if not config.pretrained.path:
    return None
  path = pathlib.Path(config.pretrained.path)
  if workdir is not None and (workdir / FOLDER).is_dir():
    path = workdir / FOLDER
  return checkpoints.open_checkpoint(path).config


def keep(
  config: ml_collections.ConfigDict, workdir: pathlib.Path
) -> checkpoints.Pretrained | None:
  """The run's own copy, made first where it is missing; None without one.

  Raises:
    UserError: as `architecture`, or it has no tokenizer.
  """
  if not config.pretrained.path:
    return None
  folder = workdir / FOLDER
  if not folder.is_dir():
    partial = folder.with_name(FOLDER + '.partial')
    shutil.rmtree(partial, ignore_errors=True)
    _copy(pathlib.Path(config.pretrained.path), partial)
    partial.rename(folder)
  return checkpoints.open_checkpoint(folder)


def publish(
  params: transformer.Params,
  shape: model_config.TransformerConfig,
  template: templates.Template,
  tokenizer: tokenizers.Tokenizer,
  run: pathlib.Path,
  directory: pathlib.Path,
  dtype: str,
) -> None:
  """Writes a network as a directory that other tools load, all or nothing.

  With the tokenizer files of the checkpoint that `run` started from; a
  vocabulary of our own is not one that they read, and keeps our name for it.

  Raises:
    UserError: the directory exists, or cannot be written.
  """
  if directory.exists():
    raise errors.UserError(f'{directory} exists already; name a new directory')
  partial = directory.with_name(directory.name + '.partial')
  shutil.rmtree(partial, ignore_errors=True)
  export.save(
    params, shape, partial, dtype=dtype,
    eos_ids=template.stop_ids[types.Role.ACT],
  )  # fmt: skip
  if (run / FOLDER).is_dir():
    for file in sorted((run / FOLDER).iterdir()):
      if file.name not in WEIGHT_FILES and file.suffix != '.safetensors':
        shutil.copyfile(file, partial / file.name)
  else:
    tokenizer.save(str(partial / OWN_TOKENIZER_FILE))
  partial.rename(directory)


def _copy(source: pathlib.Path, folder: pathlib.Path) -> None:
  opened = checkpoints.open_checkpoint(source)  # refuses what it does not know
  if source.suffix == _GGUF:
    params = opened.load(opened.config, None, 'float32')
    export.save(
      params,
      opened.config,
      folder,
      dtype='float32',
      eos_ids=(gguf_tokenizer.eos_id(source),),
    )
    gguf_tokenizer.write_tokenizer(source, folder)
    return
  if not (source / 'tokenizer.json').is_file():
    raise errors.UserError(
      f'{source} has no tokenizer.json; put the one of this model beside its '
      'weights'
    )
  folder.mkdir(parents=True)
  for file in sorted(source.iterdir()):
    if file.suffix in ('.json', '.jinja', '.safetensors'):
      _link(file, folder / file.name)


def _link(file: pathlib.Path, copy: pathlib.Path) -> None:
  """A hard link where that is possible: weights may fill a disk."""
  try:
    os.link(file.resolve(), copy)
  except OSError:
    shutil.copyfile(file, copy)
