"""BFCL's file system as an environment to train in.

The package's backend executes; here are no globals, no `eval` and no script of
users. An observation is the backend's own object; what is none (`mkdir` returns
nothing, and the package shows `None`) is put into one as `result`. A call that
fails leaves the state as it was, also where the backend would not: one that
copies a directory into itself would never be walked to its end again.

A hash is of names and contents from the root on, as the official checker
compares states: where the policy stands does not count.
"""

import copy
import hashlib
import json
import pickle

from envace_jax import types
from envace_jax.envs import base
from envace_jax.envs.bfcl import backends as bfcl_backends
from envace_jax.envs.bfcl import calls as bfcl_calls
from envace_jax.envs.bfcl import package as bfcl_package
from envace_jax.envs.bfcl import tools as bfcl_tools

BACKEND = 'GorillaFileSystem'
WRITES = ('cp', 'echo', 'mkdir', 'mv', 'rm', 'rmdir', 'touch')


class Files:
  """One file system; `reset` takes its tree from the task."""

  def __init__(self):
    package = bfcl_package.load()
    self._backend = getattr(package.file_system, BACKEND)
    docs = package.functions(BACKEND)
    mapping = package.type_mappings.GORILLA_TO_OPENAPI
    self._names = {doc['name'] for doc in docs}
    self.tools = tuple(bfcl_tools.to_openai(doc, mapping) for doc in docs)
    self._load({})

  def reset(self, task: types.Task) -> None:
    self._load(task.environment['initial_config'][BACKEND])

  def call(self, action: types.ToolCall | types.ParseError) -> base.Observation:
    if isinstance(action, types.ParseError):
      return base.failure('invalid_call', action.kind)
    name = action.name
    if not isinstance(name, str) or name not in self._names:
      return base.failure('unknown_tool', ascii(name)[:60])
    try:
      bfcl_calls.render(action)
    except bfcl_calls.Malformed as error:
      return base.failure('invalid_arguments', str(error))
    try:
      result = getattr(self._files, name)(**action.arguments)
      bfcl_backends.check_size(self._files)
      image = pickle.dumps(self._files)
    except Exception as error:  # of any kind: the package shows them all
      self.restore(self._image)
      return base.failure('raised', str(error))
    if not isinstance(result, dict):
      result = {'result': str(result)}
    if 'error' in result:
      self.restore(self._image)
      return base.Observation(text=json.dumps(result), error='refused')
    self._image = image
    return base.success(result)

  def snapshot(self) -> bytes:
    return self._image

  def restore(self, snapshot: bytes) -> None:
    """Undoes everything since; `snapshot` is one of ours, and trusted."""
    self._image = snapshot
    self._files = pickle.loads(snapshot)

  def state_hash(self) -> str:
    tree = json.dumps(_tree(self._files.root), sort_keys=True)
    return hashlib.sha256(tree.encode()).hexdigest()

  def close(self) -> None:
    pass

  def _load(self, config: types.Json) -> None:
    self._files = self._backend()
    self._files._load_scenario(copy.deepcopy(config))
    self._image = pickle.dumps(self._files)


def _tree(item):
  """A directory as an object, a file as its text."""
  contents = getattr(item, 'contents', None)
  if contents is None:
    return item.content
  return {name: _tree(inside) for name, inside in contents.items()}
