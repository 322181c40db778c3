"""What a task says in the published layout is what is read back."""

import dataclasses
import json

import hypothesis
from hypothesis import strategies as st
import published
import pytest

from envace_jax import errors, types
from envace_jax.envs.checklist import convert as checklist_convert
from envace_jax.envs.checklist import schema as checklist_schema
from envace_jax.text import tool_calls


def test_a_hand_written_sample_comes_back_in_the_published_layout():
  sample = published.sample()
  read = checklist_convert.from_sample(sample)
  written = checklist_convert.to_sample(read.task, read.demonstration)
  assert set(written) == {'data_source', 'messages', 'extra_info'}
  assert written['messages'] == sample['messages']
  ours, theirs = written['extra_info'], sample['extra_info']
  assert json.loads(ours['tools']) == json.loads(theirs['tools'])
  assert ours['original_index'] == 'u-1' and ours['need_tools_kwargs'] is True
  (turns,) = ours['interaction_kwargs']['checklist_list']
  (expected,) = theirs['interaction_kwargs']['checklist_list']
  for entry, original in zip(sum(turns, []), sum(expected, []), strict=True):
    original.pop('dependence', None)
    if 'check' in entry:
      entry['check'] = json.loads(entry['check'])
    assert entry == original
  roles = [m['role'] for m in ours['messages']]
  assert roles.count('tool') == 2 and 'observation' not in roles
  (hall, attic) = ours['messages'][2]['tool_calls']
  assert hall['id'] != attic['id'] and attic['type'] == 'function'
  assert json.loads(attic['function']['arguments'])['celsius'] == 18.5


# NUL has no place in a call (`text.tool_calls`), nor has more than 64 bits.
TEXT = st.text(max_size=9)
SAFE = st.text(
  st.characters(exclude_characters='\x00', codec='utf-8'), max_size=9
)
SPOKEN = TEXT.filter(lambda text: '<tool_call>' not in text)
MARKERS = st.sampled_from(['<|end|>', '<tool_call>{"name": "', '</tool_call>'])
USER = st.lists(TEXT | MARKERS, min_size=1, max_size=4).map(''.join)
LEAF = (
  st.none()
  | st.booleans()
  | st.integers(-(2**63), 2**63 - 1)
  | st.floats(allow_nan=False, allow_infinity=False)
  | SAFE
  | MARKERS
)
JSON = st.recursive(
  LEAF,
  lambda inner: st.lists(inner) | st.dictionaries(SAFE, inner),
  max_leaves=6,
)
OBJECT = st.dictionaries(SAFE, JSON, max_size=3)
CALL = st.builds(
  types.ToolCall,
  name=SAFE.filter(str.strip),
  arguments=OBJECT,
)
CALLS = st.lists(CALL, min_size=1, max_size=3)
EVIDENCE = st.lists(
  st.fixed_dictionaries(
    {
      'turn': st.integers(0, 9),
      'step': st.integers(0, 9),
      'from': st.sampled_from(['user.content', *checklist_schema.FOCUS]),
      'snippet': TEXT,
    }
  ),
  max_size=2,
).map(lambda value: json.dumps(value, ensure_ascii=False) if value else '')


@st.composite
def pairs(draw):
  """A task and a demonstration that the format can carry."""
  count = draw(st.integers(1, 3))
  users = [draw(USER.filter(bool)) for _ in range(count)]
  replies = [draw(SPOKEN) for _ in range(count)]
  criteria, steps, message = [], [], 0
  for turn in range(count):
    weights = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
    weights = weights if sum(weights) else [1]
    for i, weight in enumerate(weights):
      criteria.append(
        types.Criterion(
          id=f'{turn}/{draw(TEXT)}{i}',
          question=draw(TEXT),
          check=draw(OBJECT),
          turn=turn,
          weight=weight / sum(weights),
          focus_on=draw(st.sampled_from([*checklist_schema.FOCUS.values()])),
          required=draw(st.booleans()),
          required_for_next_turn=draw(st.booleans()),
          pass_condition=draw(TEXT),
          failure_examples=tuple(draw(st.lists(TEXT, max_size=2))),
          evidence=draw(EVIDENCE),
        )
      )
    for calls in draw(
      st.lists(st.lists(CALL, min_size=1, max_size=3), max_size=2)
    ):
      rendered = ''.join(map(tool_calls.render_call, calls))
      text = draw(SPOKEN) + rendered
      for action in calls:
        steps.append(
          types.Step(
            action=action,
            action_text=text,
            observation_text=draw(TEXT | MARKERS),
            turn=turn,
            message=message,
          )
        )
      message += 1
    message += 1
  tools = tuple(draw(st.lists(st.just(published.TOOL), max_size=2)))
  environment = draw(OBJECT)
  task = types.Task(
    id=draw(st.text(min_size=1)),
    instruction=users[0],
    tools=tools,
    checklist=tuple(criteria),
    # Where nothing can be executed there is nothing to evaluate.
    evaluation=tuple(criteria[:2]) if environment else (),
    environment=environment,
    family=draw(TEXT),
    user_turns=tuple(users[1:]),
    system=draw(TEXT),
    records=tuple(
      types.Record(call=s.action, observation_text=s.observation_text)
      for s in steps
    ),
  )
  demonstration = types.Demonstration(
    task_id=task.id,
    instruction=task.instruction,
    steps=tuple(steps),
    reply=replies[-1],
    tools=tools,
    system=task.system,
    user_turns=task.user_turns,
    turn_replies=tuple(replies[:-1]),
  )
  return task, demonstration


@hypothesis.settings(
  max_examples=40,
  deadline=None,
  suppress_health_check=list(hypothesis.HealthCheck),
)
@hypothesis.given(pairs())
def test_a_sample_reads_back_what_was_written(pair):
  written = json.dumps(checklist_convert.to_sample(*pair))
  read = published.load(json.loads(written), strict=True)
  assert (read.tasks[0], read.demonstrations[0]) == pair
  assert not read.left_out


def good_pair():
  read = checklist_convert.from_sample(published.sample())
  return read.task, read.demonstration


def with_criterion(task, **fields):
  first, *others = task.checklist
  changed = dataclasses.replace(first, **fields)
  return dataclasses.replace(task, checklist=(changed, *others))


def with_step(demonstration, **fields):
  first, *others = demonstration.steps
  changed = dataclasses.replace(first, **fields)
  return dataclasses.replace(demonstration, steps=(changed, *others))


SLIP = types.ParseError(kind='bad_json', detail='{')
UNSAYABLE = {
  'instruction': lambda t, d: (dataclasses.replace(t, instruction='x'), d),
  'user_turns': lambda t, d: (dataclasses.replace(t, user_turns=()), d),
  'task_id': lambda t, d: (dataclasses.replace(t, id='x'), d),
  'system': lambda t, d: (t, dataclasses.replace(d, system='Be rude.')),
  'turn_replies': lambda t, d: (t, dataclasses.replace(d, turn_replies=())),
  'steps': lambda t, d: (t, with_step(d, turn=2)),
  'action_text': lambda t, d: (
    t,
    with_step(d, action=SLIP, action_text='<tool_call>{</tool_call>'),
  ),
  'one by one': lambda t, d: (t, dataclasses.replace(d, steps=d.steps[:1])),
  'focus_on': lambda t, d: (with_criterion(t, focus_on='state'), d),
  'weights sum': lambda t, d: (with_criterion(t, weight=0.7), d),
  'turn 2 of 2': lambda t, d: (with_criterion(t, turn=2), d),
  '0/C0.evidence': lambda t, d: (with_criterion(t, evidence='seen'), d),
  'extra_info.tools': lambda t, d: (
    dataclasses.replace(t, tools=({'type': 'function'},)),
    d,
  ),
  'messages[5]': lambda t, d: (
    t,
    dataclasses.replace(d, turn_replies=('<tool_call>',)),
  ),
}


@pytest.mark.parametrize('words', UNSAYABLE)
def test_what_the_layout_cannot_say_is_an_error(words):
  checklist_convert.to_sample(*good_pair())
  with pytest.raises(errors.UserError, match="task '(u-1|x)': ") as error:
    checklist_convert.to_sample(*UNSAYABLE[words](*good_pair()))
  assert words in str(error.value)
