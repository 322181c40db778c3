"""τ²-Bench's telecom tickets as tasks to train on, and the phone line itself.

A ticket says what the customer suffers from, and not why; one to nine faults
of account and device are behind it, and the agent holds the tools of both. The
2,285 tickets are compositions of nineteen faults. Splits:

  train       all but the benchmark's 'base' tickets, one for each initial
              state, and none that shares its state with a ticket of the others
  base_train  the benchmark's own training split, 74 tickets
  test        its held-out split, 40 tickets; nothing is learned from it

As everywhere, the checklist sees a transcript and the evaluation the final
state. The benchmark asks that state for facts ("an MMS can be sent"), which
many databases satisfy. Here the states that satisfy a ticket's assertions count
as one: `state_hash` is the same for all of them, and so a 'state' check decides
just what the benchmark's own evaluator does. Other states differ by content.
"""

from collections.abc import Sequence
import functools
import hashlib
import json
import pickle
from typing import Any

from envace_jax import types
from envace_jax.envs import base
from envace_jax.envs.tau2 import data as tau2_data
from envace_jax.envs.tau2 import oracles as tau2_oracles
from envace_jax.envs.tau2 import package as tau2_package
from envace_jax.envs.tau2 import prompts as tau2_prompts
from envace_jax.text import tool_calls

SPLITS = ('train', 'base_train', 'test')
TOOL_ERROR = 'tool_error'
REPLY = 'The ticket is solved.'
HANDED_OVER = 'I have transferred you to a human agent.'

CATEGORY, _DOMAIN = 'telecom_solo', 'telecom'
_PROOFS = {
  'mms_issue': ('can_send_mms', 'can send MMS messages'),
  'mobile_data_issue': ('run_speed_test', 'Excellent'),
  'service_issue': ('check_network_status', 'Cellular Connection: connected'),
}
_TRANSFER = 'transfer_to_human_agents'


class TelecomEnvironment:
  """Implements `base.Environment` over the benchmark's own environment."""

  def __init__(self):
    self.tools = tools()
    self._names = {tool['function']['name'] for tool in self.tools}
    self._task = None
    self._environment = tau2_data.environment(_DOMAIN, solo=True)

  def reset(self, task: types.Task) -> None:
    self._task = tau2_data.task(_DOMAIN, task.environment['ticket'])
    self._environment = tau2_data.environment(_DOMAIN, solo=True)
    state = self._task.initial_state
    self._environment.set_state(
      state.initialization_data, state.initialization_actions, []
    )

  def call(self, action: types.ToolCall | types.ParseError) -> base.Observation:
    if isinstance(action, types.ParseError):
      return base.failure('invalid_call', action.kind)
    if not isinstance(action.name, str) or action.name not in self._names:
      return base.failure('unknown_tool', _short(action.name))
    try:
      arguments = json.loads(
        tool_calls.clean(json.dumps(dict(action.arguments), allow_nan=False))
      )
    except (RecursionError, TypeError, ValueError):
      return base.failure('invalid_arguments', 'arguments')
    before = self.snapshot()
    try:
      answer = self._environment.get_response(_message(action.name, arguments))
    except Exception as e:  # an answer that cannot be written down
      self.restore(before)
      return base.failure(TOOL_ERROR, type(e).__name__)
    if answer.error:
      self.restore(before)
      detail = answer.content.removeprefix('Error: ')
      return base.failure(TOOL_ERROR, detail)
    return base.success({'result': _value(answer.content)})

  def snapshot(self) -> bytes:
    databases = self._environment.tools.db, self._environment.user_tools.db
    return pickle.dumps(databases, pickle.HIGHEST_PROTOCOL)

  def restore(self, snapshot: bytes) -> None:
    databases = pickle.loads(snapshot)
    self._environment.tools.db, self._environment.user_tools.db = databases

  def state_hash(self) -> str:
    if self._task is not None and self._holds():
      return goal_hash(self._task.id)
    hashes = (
      self._environment.get_db_hash(),
      self._environment.get_user_db_hash(),
    )
    return hashlib.sha256('/'.join(hashes).encode()).hexdigest()

  def close(self) -> None:
    self._environment = None

  def _holds(self) -> bool:
    """Whether every assertion of the task does."""
    try:
      return all(
        self._environment.run_env_assertion(
          assertion, raise_assertion_error=False
        )
        for assertion in self._task.evaluation_criteria.env_assertions or ()
      )
    except Exception:  # a state that an assertion cannot read is not the goal
      return False


@functools.cache
def tools() -> Sequence[types.Json]:
  """All but `done`: a reply ends an episode."""
  return tuple(
    tool
    for tool in tau2_data.tools(CATEGORY)
    if tool['function']['name'] != 'done'
  )


@functools.cache
def writes() -> frozenset[str]:
  """Names of the tools that can change account or device."""
  made = tau2_data.environment(_DOMAIN, solo=True)
  return frozenset(
    name
    for kit in (made.tools, made.user_tools)
    for name in kit.tools
    if kit.tool_type(name).value == 'write'
  )


def is_write(name: str) -> bool:
  return name in writes()


def make_tasks(split: str) -> list[types.Task]:
  """The tickets of a split, those with fewer faults first.

  Raises:
    ValueError: there is no such split.
  """
  if split not in SPLITS:
    raise ValueError(f'split={split!r}; use one of {SPLITS}')
  if split == 'train':
    ids = _new_ids()
  else:
    own = {'base_train': 'train', 'test': 'test'}[split]
    ids = tau2_data.task_ids(CATEGORY, own)
  return [_task(task_id) for task_id in sorted(ids, key=num_faults)]


def num_faults(task_id: str) -> int:
  """Of a ticket: its id names them."""
  return task_id.partition(']')[2].partition('[')[0].count('|') + 1


def goal_hash(task_id: str) -> str:
  """The hash of every state that satisfies a ticket's assertions."""
  return hashlib.sha256(f'goal/{task_id}'.encode()).hexdigest()


def proof(task_id: str) -> tuple[str, str]:
  """What shows that a ticket is solved: a tool, and words of its answer."""
  return _PROOFS[task_id.partition(']')[0].removeprefix('[')]


def is_handed_over(calls: Sequence[types.ToolCall]) -> bool:
  return any(call.name == _TRANSFER for call in calls)


@functools.cache
def _new_ids() -> Sequence[str]:
  """Tickets that are not the benchmark's, one for each initial state."""
  base_ids = set(tau2_data.task_ids(CATEGORY))
  seen = {_initial(task_id) for task_id in base_ids}
  ids = []
  for task_id in tau2_data.task_ids(CATEGORY, 'full'):
    state = _initial(task_id)
    if task_id not in base_ids and state not in seen:
      seen.add(state)
      ids.append(task_id)
  return tuple(ids)


def _initial(task_id: str) -> tuple[str, ...]:
  """What was broken, in whatever order."""
  state = tau2_data.shared_task(_DOMAIN, task_id).initial_state
  return tuple(
    sorted(action.model_dump_json() for action in state.initialization_actions)
  )


def _task(task_id: str) -> types.Task:
  task = tau2_data.shared_task(_DOMAIN, task_id)
  plan = [call for call, _ in tau2_oracles.gold_calls(task)]
  handed_over = is_handed_over(plan)
  tool, words = proof(task_id)
  checklist = [
    types.Criterion(
      id=f'action_{i}',
      question=f'Was {call.name} called, and did it work?',
      check={
        'kind': 'acknowledged',
        'name': call.name,
        'arguments': _compared(task, i),
      },
      focus_on='tool_calls',
    )
    for i, call in enumerate(plan)
  ]
  checklist.append(_restraint(plan))
  if not handed_over:
    plan.append(types.ToolCall(name=tool, arguments={}))
    checklist.append(
      types.Criterion(
        id='proof',
        question='Was it seen to work in the end?',
        check={'kind': 'observed', 'contains': [words]},
        focus_on='tool.content',
      )
    )
  return types.Task(
    id=f'tau2/{task_id}',
    instruction=task.ticket,
    tools=tools(),
    checklist=tuple(checklist),
    evaluation=_evaluation(task),
    environment={'ticket': task_id},
    family=f'faults_{num_faults(task_id)}',
    plan=tuple(plan),
    plan_reply=HANDED_OVER if handed_over else REPLY,
    system=tau2_prompts.SHORT_SOLO,
  )


def _restraint(plan: Sequence[types.ToolCall]) -> types.Criterion:
  allowed = [{'name': call.name, 'arguments': call.arguments} for call in plan]
  return types.Criterion(
    id='restraint',
    question='Was nothing changed that was not broken?',
    check={
      'kind': 'no_other_writes',
      'writes': sorted(writes()),
      'allowed': allowed,
    },
    focus_on='tool_calls',
    required=False,  # the benchmark does not ask for it
  )


def _evaluation(task: Any) -> Sequence[types.Criterion]:
  """What the benchmark asks for, by its own basis."""
  found = [
    types.Criterion(
      id='assertions',
      question='Do all assertions hold in the end?',
      check={'kind': 'state', 'state_hash': goal_hash(task.id)},
      focus_on='state',
    )
  ]
  criteria = task.evaluation_criteria
  if 'ACTION' not in {kind.value for kind in criteria.reward_basis}:
    return tuple(found)
  for i, action in enumerate(criteria.actions):
    found.append(
      types.Criterion(
        id=f'action_{i}',
        question=f'Was {action.name} called?',
        check={
          'kind': 'called',
          'name': action.name,
          'arguments': _compared(task, i),
        },
        focus_on='tool_calls',
      )
    )
  return tuple(found)


def _compared(task: Any, i: int) -> types.Json:
  """The arguments of a gold action that the benchmark compares."""
  action = task.evaluation_criteria.actions[i]
  if action.compare_args is None:
    return dict(action.arguments)
  return {k: action.arguments[k] for k in action.compare_args}


def _message(name: str, arguments: types.Json) -> Any:
  return tau2_package.load().message.ToolCall(name=name, arguments=arguments)


def _value(text: str) -> Any:
  """Records are JSON, and the phone speaks in words."""
  try:
    value = json.loads(text)
  except ValueError:
    return text
  return value if isinstance(value, dict | list) else text


def _short(value: Any) -> str:
  if not isinstance(value, str):
    return type(value).__name__
  return tool_calls.clean(value[:64])
