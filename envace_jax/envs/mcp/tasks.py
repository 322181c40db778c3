"""Task files for a user's own benchmark on a user's own server.

A file is JSON lines: one task record a line, as in `tasks.records`, of which
`kind`, `tools` (the server says them) and `checklist` may be left out.

  {"id": "rename-1", "instruction": "Rename a.txt to b.txt.", "family": "files",
   "user_turns": [],                      more user messages, one per reply
   "checklist": [{"id": "said", "question": "Was it confirmed?",
                  "check": {"kind": "replied", "contains": ["b.txt"]}}],
   "evaluation": [...],                   likewise; may use {"kind": "state"}
   "environment": {
     "reset": ["cp", "-r", "/data/case1/.", "."],   a command or module:function
     "setup": [{"name": "login", "arguments": {}}], calls before the policy's
     "check": "my_bench.checks:renamed",            a hook on the final state
     "arguments": {"new": "b.txt"},                 free JSON for both hooks
     "hook_s": 30},                                 a command's deadline
   "plan": [{"name": "move_file", "arguments": {...}}], "plan_reply": "Done."}

Hooks are described in `mcp_hooks`. `family` is the task's category, 'tasks' if
there is none. Every error is one sentence with file, line, task and field.
"""

from collections.abc import Sequence
import dataclasses
import json
import re

from etils import epath

from envace_jax import errors, types
from envace_jax.envs.mcp import hooks as mcp_hooks
from envace_jax.tasks import records

_FIELDS = ('reset', 'setup', 'check', 'arguments', 'hook_s')
_FAMILY = re.compile(r'[A-Za-z0-9][\w.-]*', re.ASCII)
DEFAULT_FAMILY = 'tasks'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Episode:
  """What a task's `environment` says."""

  reset: mcp_hooks.Hook | None = None
  setup: Sequence[types.ToolCall] = ()
  check: mcp_hooks.Hook | None = None
  arguments: types.Json = dataclasses.field(default_factory=dict)
  hook_s: float = 60.0


def episode(task: types.Task) -> Episode:
  """Reads `task.environment`; ValueError '<field>: <what is wrong>'."""
  given = task.environment
  if unknown := sorted(set(given) - set(_FIELDS)):
    raise ValueError(
      f'environment.{unknown[0]}: unknown; the fields are {", ".join(_FIELDS)}'
    )
  for field in ('reset', 'check'):
    if field in given and (fault := mcp_hooks.fault(given[field])):
      raise ValueError(f'environment.{field}: {fault}')
  if not isinstance(given.get('arguments', {}), dict):
    raise ValueError('environment.arguments: not an object')
  hook_s = given.get('hook_s', Episode.hook_s)
  if isinstance(hook_s, bool) or not isinstance(hook_s, int | float):
    raise ValueError(f'environment.hook_s: {hook_s!r} is no number of seconds')
  if not 0 < hook_s <= 3600:
    raise ValueError(f'environment.hook_s: {hook_s} is not in (0, 3600]')
  return Episode(
    reset=given.get('reset'),
    setup=_calls(given.get('setup', [])),
    check=given.get('check'),
    arguments=given.get('arguments', {}),
    hook_s=hook_s,
  )


def read(path: epath.PathLike) -> list[types.Task]:
  """The tasks of a file; raises UserError, also for a file without any."""
  try:
    content = epath.Path(path).read_bytes()
  except OSError as error:
    raise errors.UserError(f'cannot read {path}: {error}') from error
  tasks, first = [], {}
  # Not splitlines: U+2028 may stand inside a JSON string.
  lines = content.removeprefix(b'\xef\xbb\xbf').split(b'\n')
  for number, line in enumerate(lines, 1):
    if not line.strip():
      continue
    where = f'{path} line {number}'
    task = _task(line, where)
    if task.id in first:
      raise errors.UserError(
        f'{where}, task {task.id!r}: id: line {first[task.id]} has it too'
      )
    first[task.id] = number
    tasks.append(task)
  if not tasks:
    raise errors.UserError(f'{path} has no task: write one JSON object a line')
  return tasks


def _task(line: bytes, where: str) -> types.Task:
  try:
    value = records.parse_json(line.decode('utf-8'))
  except ValueError as error:  # also what is not UTF-8
    raise errors.UserError(f'{where}: {error}') from error
  if isinstance(value, dict):
    value = {'kind': 'task', 'tools': [], 'checklist': [], **value}
  record = records.from_json(json.dumps(value), where=where)
  if not isinstance(record, types.Task):
    raise errors.UserError(f'{where}: kind: a task is needed')
  try:
    if record.family and not _FAMILY.fullmatch(record.family):
      raise ValueError(f'family: {record.family!r} is no name like a file has')
    judged = episode(record).check or record.checklist or record.evaluation
    if not judged:
      raise ValueError(
        'checklist: nothing says what success is; give a checklist, an '
        'evaluation or environment.check'
      )
  except ValueError as error:
    raise errors.UserError(f'{where}, task {record.id!r}: {error}') from error
  return record


def _calls(given: object) -> tuple[types.ToolCall, ...]:
  if not isinstance(given, list):
    raise ValueError('environment.setup: not a list of calls')
  calls = []
  for i, call in enumerate(given):
    legal = isinstance(call, dict) and set(call) == {'name', 'arguments'}
    if not legal or not isinstance(call['arguments'], dict):
      raise ValueError(
        f'environment.setup[{i}]: a call is {{"name": ..., "arguments": {{}}}}'
      )
    calls.append(types.ToolCall(name=call['name'], arguments=call['arguments']))
  return tuple(calls)
