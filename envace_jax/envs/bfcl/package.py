"""bfcl-eval, imported lean: its data, backends and checkers, and no vendor.

The package's `model_config` imports a handler for every vendor, with their
dependencies, and its `ast_checker` reads one flag of it for names with dots.
Names have none here (`bfcl_tools`), so an empty table stands in while
the checker is imported. The package makes directories when it is imported, by
default beside itself; they go to a temporary one unless BFCL_PROJECT_ROOT says
otherwise.
"""

import dataclasses
import functools
import importlib
import importlib.metadata
import os
import sys
import tempfile
import threading
import types as python_types

from envace_jax import errors, types

INSTALL = (
  "pip install 'envace_jax[envs]' && pip install --no-deps bfcl-eval==2026.3.23"
)

_CONFIG = 'bfcl_eval.constants.model_config'
_IMPORTING = threading.Lock()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Package:
  """The modules that are used, by their own names."""

  version: str
  utils: python_types.ModuleType
  multi_turn_utils: python_types.ModuleType
  multi_turn_checker: python_types.ModuleType
  ast_checker: python_types.ModuleType
  agentic_checker: python_types.ModuleType
  default_prompts: python_types.ModuleType
  enums: python_types.ModuleType
  type_mappings: python_types.ModuleType
  file_system: python_types.ModuleType

  def entries(self, category: str) -> list[types.Json]:
    """Questions of a category, in the package's own order."""
    return _entries(self, category)

  def sessions(self, category: str) -> list[types.Json]:
    """Conversations that come before a memory category's questions."""
    return _sessions(self, category)

  def answers(self, category: str) -> list[types.Json]:
    """Ground truth, in the order of the questions."""
    return _answers(self, category)

  def functions(self, backend: str) -> list[types.Json]:
    """Docs of one backend's functions."""
    folder = self.utils.MULTI_TURN_FUNC_DOC_PATH
    files = self.utils.MULTI_TURN_FUNC_DOC_FILE_MAPPING
    return self.utils.load_file(folder / files[backend])


def load() -> Package:
  """Imports what is needed of the package.

  Raises:
    errors.UserError: it is not installed, with the line that installs it.
  """
  with _IMPORTING:
    return _load()


@functools.cache
def _load() -> Package:
  root = os.environ.get('BFCL_PROJECT_ROOT')
  stands_in = _CONFIG not in sys.modules
  if root is None:
    os.environ['BFCL_PROJECT_ROOT'] = _scratch().name
  if stands_in:
    config = python_types.ModuleType(_CONFIG)
    config.MODEL_CONFIG_MAPPING = {}
    sys.modules[_CONFIG] = config
  try:
    version = importlib.metadata.version('bfcl-eval')
    multi_turn = 'bfcl_eval.eval_checker.multi_turn_eval'
    return Package(
      version=version,
      utils=importlib.import_module('bfcl_eval.utils'),
      multi_turn_utils=importlib.import_module(
        f'{multi_turn}.multi_turn_utils'
      ),
      multi_turn_checker=importlib.import_module(
        f'{multi_turn}.multi_turn_checker'
      ),
      ast_checker=importlib.import_module(
        'bfcl_eval.eval_checker.ast_eval.ast_checker'
      ),
      agentic_checker=importlib.import_module(
        'bfcl_eval.eval_checker.agentic_eval.agentic_checker'
      ),
      default_prompts=importlib.import_module(
        'bfcl_eval.constants.default_prompts'
      ),
      enums=importlib.import_module('bfcl_eval.constants.enums'),
      type_mappings=importlib.import_module(
        'bfcl_eval.constants.type_mappings'
      ),
      file_system=importlib.import_module(
        f'{multi_turn}.func_source_code.gorilla_file_system'
      ),
    )
  except ImportError as error:
    raise errors.UserError(f'BFCL needs {error.name}; {INSTALL}') from error
  finally:
    if root is None:
      del os.environ['BFCL_PROJECT_ROOT']
    if stands_in:  # whoever wants the real one can still import it
      sys.modules.pop(_CONFIG, None)


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory:
  """Removed when the process ends."""
  return tempfile.TemporaryDirectory(prefix='bfcl_')


@functools.cache
def _entries(package: Package, category: str) -> list[types.Json]:
  return package.utils.load_dataset_entry(category, include_prereq=False)


@functools.cache
def _sessions(package: Package, category: str) -> list[types.Json]:
  both = package.utils.load_dataset_entry(category, include_prereq=True)
  return [e for e in both if package.utils.is_memory_prereq(e['id'])]


@functools.cache
def _answers(package: Package, category: str) -> list[types.Json]:
  return package.utils.load_ground_truth_entry(category)
