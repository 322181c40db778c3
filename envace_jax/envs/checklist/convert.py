"""One published checklist sample as a task, and back.

A sample (`checklist_schema`) becomes a `types.Task` and, from its reference
dialogue, a `types.Demonstration`:

  system message                 Task.system
  first, later user messages     instruction, user_turns: a turn per checklist
  tool calls and their answers   Demonstration.steps, Task.records
  tool-free assistant messages   turn_replies, reply
  item C0 of turn 1              Criterion '1/C0' with turn=1
  original_index, data_source    Task.id, Task.family
  execution, a key of ours       Task.environment, Task.evaluation

Not carried: what a sample has no place for (plan, notes, habit, an evaluation
without an environment) and what a task has none for (dependence, further
checklist variants, user turns without a checklist; the last two are counted).
"""

from collections.abc import Mapping, Sequence
import dataclasses
import json
import math

from envace_jax import errors, types
from envace_jax.envs.checklist import dialogue as dialogue
from envace_jax.envs.checklist import execution as execution
from envace_jax.envs.checklist import schema as schema

_WEIGHT_TOLERANCE = 1e-6
_VARIANTS = 'extra_info.interaction_kwargs.checklist_list'
_PUBLISHED_FOCUS = {ours: theirs for theirs, ours in schema.FOCUS.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
  """One sample, read."""

  task: types.Task
  demonstration: types.Demonstration
  repaired: str  # what was wrong with its weights, '' for nothing
  left_out: Mapping[str, int]  # 'variants', 'turns' that the task lacks


def from_sample(value: object) -> Sample:
  """Reads a sample; weights of a turn are scaled to sum to 1.

  Raises:
    Invalid: anything else is wrong with it.
  """
  try:
    schema.validate_sample(value)
    return _sample(value)
  except RecursionError as error:
    raise schema.Invalid('json', '', 'nested too deeply') from error


def to_sample(
  task: types.Task, demonstration: types.Demonstration
) -> types.Json:
  """A training row in the published layout; `from_sample` reads it back.

  Criterion ids lose the turn that `from_sample` puts before them. Records are
  those of the demonstration.

  Raises:
    UserError: the two do not belong together, or the layout cannot say what
      they say: a malformed call, a check of the final state, weights of a turn
      that do not sum to 1.
  """
  try:
    messages = dialogue.write(task, demonstration)
    opening = 1 + bool(task.system)
    variant = [[] for _ in range(len(task.user_turns) + 1)]
    for criterion in task.checklist:
      if criterion.turn >= len(variant):
        fault = f'turn {criterion.turn} of {len(variant)}'
        raise schema.Invalid('checklist', criterion.id, fault)
      variant[criterion.turn].append(_item(criterion))
    tools = json.dumps(list(task.tools), ensure_ascii=False)
    sample = {
      'data_source': task.family,
      'messages': messages[:opening],
      'extra_info': {
        'original_index': task.id,
        'need_tools_kwargs': True,
        'messages': messages,
        'tools': tools,
        'interaction_kwargs': {
          'name': 'checklist',
          'checklist_list': [variant],
        },
        **execution.write(task),
      },
    }
    if repaired := from_sample(sample).repaired:
      raise schema.Invalid('checklist', '', repaired)
  except schema.Invalid as error:
    raise errors.UserError(f'task {task.id!r}: {error}') from error
  return sample


def _sample(value: types.Json) -> Sample:
  """Reads what the schema has passed."""
  extra = value['extra_info']
  variants = extra['interaction_kwargs']['checklist_list']
  turns = len(variants[0])
  checklist, repaired = _checklist(variants[0])
  system = dialogue.system(value)
  users, replies, steps = dialogue.read(extra['messages'])
  judged = min(len(users), len(replies))
  if judged < turns:
    fault = f'{judged} answered user turns for a checklist of {turns}'
    raise schema.Invalid('dialogue', dialogue.FIELD, fault)
  if not users[0]:
    fault = 'the first user message is empty'
    raise schema.Invalid('dialogue', dialogue.FIELD, fault)
  steps = tuple(step for step in steps if step.turn < turns)
  environment, evaluation = execution.read(extra)
  task = types.Task(
    id=str(extra['original_index']),
    instruction=users[0],
    tools=_tools(extra['tools']),
    checklist=checklist,
    evaluation=evaluation,
    environment=environment,
    family=value.get('data_source', ''),
    user_turns=tuple(users[1:turns]),
    system=system,
    records=tuple(
      types.Record(call=s.action, observation_text=s.observation_text)
      for s in steps
    ),
  )
  demonstration = types.Demonstration(
    task_id=task.id,
    instruction=task.instruction,
    steps=steps,
    reply=replies[turns - 1],
    tools=task.tools,
    system=system,
    user_turns=task.user_turns,
    turn_replies=tuple(replies[: turns - 1]),
  )
  return Sample(
    task=task,
    demonstration=demonstration,
    repaired=repaired,
    left_out={'variants': len(variants) - 1, 'turns': len(users) - turns},
  )


def _tools(value: str | list) -> tuple[types.Json, ...]:
  if isinstance(value, str):
    value = schema.decoded(value, 'extra_info.tools', 'tools')
  schema.validate_tools(value)
  return tuple(value)


def _checklist(turns: Sequence) -> tuple[tuple[types.Criterion, ...], str]:
  """Criteria of one variant, and what was wrong with their weights."""
  criteria, repaired = [], ''
  for turn, items in enumerate(turns):
    field = f'{_VARIANTS}[0][{turn}]'
    ids = [item['id'] for item in items]
    if len(set(ids)) < len(ids):
      raise schema.Invalid('checklist', field, f'ids repeat: {ids}')
    total = math.fsum(item['weight'] for item in items)
    if items and not total > 0:  # also NaN
      raise schema.Invalid('checklist', field, f'weights sum to {total}')
    scale = 1.0
    if items and abs(total - 1) > _WEIGHT_TOLERANCE:
      scale = total
      repaired = repaired or f'{field}: weights sum to {total:g}, not to 1'
    for i, item in enumerate(items):
      criteria.append(_criterion(item, turn, scale, f'{field}[{i}]'))
  # A turn may go unjudged (thanks, goodbye), but not every one of them.
  if not criteria:
    raise schema.Invalid('checklist', f'{_VARIANTS}[0]', 'no items')
  return tuple(criteria), repaired


def _criterion(item, turn, scale, field) -> types.Criterion:
  check = item.get('check', {})
  if isinstance(check, str):
    check = schema.decoded(check, f'{field}.check', 'checklist')
    if not isinstance(check, dict):
      raise schema.Invalid('checklist', f'{field}.check', 'no JSON object')
  evidence = item['evidence']
  return types.Criterion(
    id=f'{turn}/{item["id"]}',
    question=item['question'],
    check=check,
    turn=turn,
    weight=float(item['weight']) / scale,
    focus_on=schema.FOCUS[item['focus_on']],
    required=item.get('required', True),
    required_for_next_turn=item['required_for_next_turn'],
    pass_condition=item['pass_condition'],
    failure_examples=tuple(item['failure_examples']),
    evidence=json.dumps(evidence, ensure_ascii=False) if evidence else '',
  )


def _item(criterion: types.Criterion) -> types.Json:
  field = criterion.id
  if criterion.focus_on not in _PUBLISHED_FOCUS:
    fault = f'focus_on={criterion.focus_on!r} has no published form'
    raise schema.Invalid('checklist', field, fault)
  evidence = []
  if criterion.evidence:
    evidence = schema.decoded(
      criterion.evidence, f'{field}.evidence', 'checklist'
    )
  item = {
    'id': field.removeprefix(f'{criterion.turn}/'),
    'evidence': evidence,
    'focus_on': _PUBLISHED_FOCUS[criterion.focus_on],
    'question': criterion.question,
    'pass_condition': criterion.pass_condition,
    'failure_examples': list(criterion.failure_examples),
    'required_for_next_turn': criterion.required_for_next_turn,
    'weight': criterion.weight,
  }
  if criterion.check:
    item['check'] = json.dumps(criterion.check, ensure_ascii=False)
  if not criterion.required:
    item['required'] = False
  return item
