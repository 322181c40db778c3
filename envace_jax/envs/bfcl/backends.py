"""One attempt's copies of the package's backends, and their removal.

The package keeps instances in globals of a module, named after model and task:
two attempts under one name would share a state, and none would ever go. So
every attempt has a name of its own, and takes its instances away. Its backends
also set a global (the precision of mpmath), so one call runs at a time.

A call that is not executed (`bfcl_calls`, or one that would not come back) is
shown as the package shows an exception, and is REFUSED in its place when it
scores: a name that does not exist, whose evaluation fails.
"""

from collections.abc import Sequence
import itertools
import threading

from envace_jax import types
from envace_jax.envs import benchmark
from envace_jax.envs.bfcl import calls as bfcl_calls
from envace_jax.envs.bfcl import package as bfcl_package
from envace_jax.text import tool_calls

NO_NAME = 'refused'
REFUSED = f'{NO_NAME}()'
# What MathAPI takes any value of, though time and memory grow with it.
COSTLY = {
  'power': 'exponent',
  'logarithm': 'precision',
  'square_root': 'precision',
  'round_number': 'decimal_places',
}
MAX_COST = 10_000
MAX_FILES = 20_000  # directories copied into themselves never end
MAX_MEMORY = 100_000  # characters, which replacing could square each time

_RAISED = 'Error during execution: '
_EXECUTING = threading.RLock()
_SERIAL = itertools.count()


class Overgrown(Exception):
  """A file system has become too large, or a circle."""


class Backends:
  """The instances of one attempt at one multi-turn or agentic entry."""

  def __init__(self, package: bfcl_package.Package, entry: types.Json):
    self._package, self._entry = package, entry
    self._name = f'envace_{next(_SERIAL)}_attempt'
    # Held-out functions are executed too, as in the package: only docs hide.
    held_out = entry.get('missed_function', {}).values()
    docs = [*entry['function'], *itertools.chain(*held_out)]
    self._names = {doc['name'] for doc in docs}
    try:
      self.instances = self._run([])[1]
    except Exception as error:
      self.forget()
      raise benchmark.AttemptFailed(
        f'{entry["id"]}: no initial state: {error!r}'
      ) from error

  def execute(
    self, calls: Sequence[types.ToolCall]
  ) -> tuple[list[str], list[str]]:
    """Observations, and the texts of the calls as they are scored.

    Raises:
      Overgrown: a file system can no longer be walked.
    """
    observations, texts = [], []
    for call in calls:
      text, fault = self._text(call)
      observation = fault or self._run([text])[0][0]
      observations.append(tool_calls.clean(observation))
      texts.append(text)
    if any(call.name == 'cp' for call in calls):
      check_size(self.instances.get('GorillaFileSystem'))
    return observations, texts

  def check(
    self, turns: Sequence[Sequence[Sequence[str]]], truth: types.Json
  ) -> types.Json:
    """The package's verdict on all turns, from fresh instances."""
    category = self._entry['id'].rsplit('_', 1)[0]
    with _EXECUTING:
      return self._package.multi_turn_checker.multi_turn_checker(
        turns, truth, self._entry, category, self._name
      )

  def forget(self) -> None:
    """Takes the instances of this attempt out of the package's globals."""
    cached = vars(self._package.multi_turn_utils)
    with _EXECUTING:
      for name in [name for name in cached if name.startswith(self._name)]:
        del cached[name]
    self.instances = {}

  def _text(self, call: types.ToolCall) -> tuple[str, str | None]:
    """A call's text and None, or REFUSED and why."""
    if not isinstance(call.name, str) or call.name not in self._names:
      name = ascii(call.name)[:60]
      return REFUSED, f'{_RAISED}name {name} is not defined'
    try:
      text = bfcl_calls.render(call)
    except bfcl_calls.Malformed as error:
      return REFUSED, f'{_RAISED}{error}'
    if _number(call.arguments.get(COSTLY.get(call.name))) > MAX_COST:
      return REFUSED, f'{_RAISED}{COSTLY[call.name]} is beyond {MAX_COST}'
    if call.name == 'memory_replace' and self._memory_after(call) > MAX_MEMORY:
      return REFUSED, f'{_RAISED}memory would be longer than {MAX_MEMORY}'
    return text, None

  def _memory_after(self, call: types.ToolCall) -> int:
    """Characters of a recursive summary once a text in it is replaced."""
    memory = self.instances['MemoryAPI_rec_sum'].memory
    old, new = (
      str(call.arguments.get(name, '')) for name in ('old_text', 'new_text')
    )
    return len(memory) + memory.count(old) * (len(new) - len(old))

  def _run(self, texts: Sequence[str]) -> tuple[list[str], dict]:
    entry = self._entry
    with _EXECUTING:
      return self._package.multi_turn_utils.execute_multi_turn_func_call(
        func_call_list=list(texts),
        initial_config=entry.get('initial_config', {}),
        involved_classes=entry['involved_classes'],
        model_name=self._name,
        test_entry_id=entry['id'],
        long_context='long_context' in entry['id'],
      )


def _number(value) -> float:
  """The size of a number, also of one as text: mpmath takes that, too."""
  try:
    return abs(float(value))
  except (TypeError, ValueError):
    return 0.0


def error_of(observation: str) -> str | None:
  """None for success; 'raised', or 'refused' by the backend's own words."""
  if observation.startswith(_RAISED):
    return 'raised'
  return 'refused' if tool_calls.reports_error(observation) else None


def check_size(files) -> None:
  """Raises Overgrown where a file system has no end in sight."""
  waiting, seen = [files and files.root], 0
  while waiting:
    contents = getattr(waiting.pop(), 'contents', {})
    seen += len(contents)
    if seen > MAX_FILES:
      raise Overgrown(f'more than {MAX_FILES} files')
    waiting += contents.values()
