"""Every way a sample can be wrong is counted, and names its field."""

import copy
import json

import published
import pytest

from envace_jax import errors
from envace_jax.envs.checklist import files as checklist_files
from envace_jax.envs.checklist import samples as checklist_samples
from envace_jax.envs.checklist import schema as checklist_schema

set_at, in_extra = published.set_at, published.in_extra
in_item, VARIANTS = published.in_item, published.VARIANTS


def arguments(text):
  path = ('messages', 2, 'tool_calls', 1, 'function', 'arguments', text)
  return in_extra(*path)


def tools(*path):
  def change(sample):
    changed = [copy.deepcopy(published.TOOL), copy.deepcopy(published.TOOL)]
    set_at(1, 'function', *path)(changed)
    sample['extra_info']['tools'] = json.dumps(changed)

  return change


def without(*indices):
  def change(sample):
    for i in sorted(indices, reverse=True):
      del sample['extra_info']['messages'][i]

  return change


def no_users(sample):
  sample['extra_info']['messages'] = []
  del sample['messages']


def empty_user(sample):
  sample['extra_info']['messages'][1]['content'] = ''
  del sample['messages']


HEAT = f'{VARIANTS}[0][0][1]'
ARGUMENTS = 'extra_info.messages[2].tool_calls[1].function.arguments'
PROPERTIES = 'extra_info.tools[1].function.parameters.properties'
# name -> (a change of a good sample, reason, field)
WRONG = {
  'no extra_info': (
    set_at('extra_info', KeyError),
    'schema',
    'sample',
  ),
  'no id': (
    in_extra('original_index', KeyError),
    'schema',
    'extra_info',
  ),
  'empty id': (
    in_extra('original_index', ''),
    'schema',
    'extra_info.original_index',
  ),
  'role': (
    in_extra('messages', 3, 'role', 'robot'),
    'schema',
    'extra_info.messages[3].role',
  ),
  'content': (
    in_extra('messages', 1, 'content', None),
    'schema',
    'extra_info.messages[1].content',
  ),
  'interaction': (
    in_extra('interaction_kwargs', 'name', 'math'),
    'schema',
    'extra_info.interaction_kwargs.name',
  ),
  'no variant': (
    in_extra('interaction_kwargs', 'checklist_list', []),
    'schema',
    VARIANTS,
  ),
  'item key': (in_item(0, 1, 'question', KeyError), 'schema', HEAT),
  'focus': (
    in_item(0, 1, 'focus_on', 'reply'),
    'schema',
    f'{HEAT}.focus_on',
  ),
  'weight': (
    in_item(0, 1, 'weight', -0.4),
    'schema',
    f'{HEAT}.weight',
  ),
  'huge weight': (
    in_item(0, 1, 'weight', 10**400),
    'schema',
    f'{HEAT}.weight',
  ),
  'surrogate': (
    in_extra('messages', 1, 'content', 'a\ud800'),
    'json',
    'extra_info.messages[1].content',
  ),
  'tools text': (
    in_extra('tools', '[{'),
    'tools',
    'extra_info.tools',
  ),
  'tools value': (
    in_extra('tools', '{}'),
    'tools',
    'extra_info.tools',
  ),
  'tool description': (
    tools('description', KeyError),
    'tools',
    'extra_info.tools[1].function',
  ),
  'tool enum': (
    tools('parameters', 'properties', 'room', 'enum', [1]),
    'tools',
    f'{PROPERTIES}.room.enum[0]',
  ),
  'tool property': (
    tools('parameters', 'properties', 'room', 'type', ['string', 'null']),
    'tools',
    f'{PROPERTIES}.room.type',
  ),
  'ids repeat': (
    in_item(0, 1, 'id', 'C0'),
    'checklist',
    f'{VARIANTS}[0][0]',
  ),
  'no weight': (
    in_item(1, [published.item('C0', 'tool.content', 0)]),
    'checklist',
    f'{VARIANTS}[0][1]',
  ),
  'nan weight': (
    in_item(1, [published.item('C0', 'tool.content', float('nan'))]),
    'checklist',
    f'{VARIANTS}[0][1]',
  ),
  'no items': (
    in_extra('interaction_kwargs', 'checklist_list', 0, [[], []]),
    'checklist',
    f'{VARIANTS}[0]',
  ),
  'check text': (
    in_item(0, 1, 'check', '{'),
    'checklist',
    f'{HEAT}.check',
  ),
  'check value': (
    in_item(0, 1, 'check', '[]'),
    'checklist',
    f'{HEAT}.check',
  ),
  'arguments text': (arguments('{'), 'dialogue', ARGUMENTS),
  'arguments value': (arguments('[1]'), 'dialogue', ARGUMENTS),
  'arguments surrogate': (
    arguments('{"a": ["\\ud800"]}'),
    'json',
    f'{ARGUMENTS}.a[0]',
  ),
  'arguments size': (
    arguments('{"celsius": 1e3, "room": 99999999999999999999}'),
    'dialogue',
    'extra_info.messages[2]',
  ),
  'stray call': (
    in_extra('messages', 2, 'content', 'so <tool_call>{}'),
    'dialogue',
    'extra_info.messages[2]',
  ),
  'stray call in a reply': (
    in_extra('messages', 5, 'content', '<tool_call>{}</tool_call>'),
    'dialogue',
    'extra_info.messages[5].content',
  ),
  'one answer too few': (without(4), 'dialogue', 'extra_info.messages[4]'),
  'one answer too many': (
    in_extra('messages', 5, {'role': 'tool', 'content': '{}'}),
    'dialogue',
    'extra_info.messages[5]',
  ),
  'answers at the end are missing': (
    without(4, 5, 6, 7),
    'dialogue',
    'extra_info.messages',
  ),
  'no reply between': (without(5), 'dialogue', 'extra_info.messages[5]'),
  'two replies': (without(6), 'dialogue', 'extra_info.messages[6]'),
  'no last reply': (without(7), 'dialogue', 'extra_info.messages'),
  'no second turn': (without(6, 7), 'dialogue', 'extra_info.messages'),
  'no users': (no_users, 'dialogue', 'extra_info.messages'),
  'late system': (
    in_extra('messages', 6, 'role', 'system'),
    'dialogue',
    'extra_info.messages[6]',
  ),
  'empty instruction': (empty_user, 'dialogue', 'extra_info.messages'),
  'prompt': (
    set_at('messages', 1, 'content', 'x'),
    'dialogue',
    'messages',
  ),
  'prompt system': (
    set_at('messages', 0, 'content', 'x'),
    'dialogue',
    'messages',
  ),
  'prompt shape': (
    set_at('messages', 1, 'role', 'assistant'),
    'dialogue',
    'messages',
  ),
  'execution is no JSON': (
    in_extra('execution', '{'),
    'execution',
    'extra_info.execution',
  ),
  'execution is no object': (
    in_extra('execution', '[]'),
    'execution',
    'extra_info.execution',
  ),
  'execution type': (
    in_extra('execution', 3),
    'schema',
    'extra_info.execution',
  ),
  'execution nowhere': (
    in_extra('execution', {'environment': {}, 'evaluation': []}),
    'execution',
    'extra_info.execution.environment',
  ),
  'execution without evaluation': (
    in_extra('execution', {'environment': {'name': 'desk'}}),
    'execution',
    'extra_info.execution',
  ),
  'execution criterion': (
    in_extra(
      'execution',
      {
        'environment': {'name': 'desk'},
        'evaluation': [{'id': 'a', 'question': '', 'check': 3}],
      },
    ),
    'execution',
    'extra_info.execution.evaluation[0].check',
  ),
}


@pytest.mark.parametrize('name', WRONG)
def test_a_wrong_sample_is_counted_and_its_field_named(tmp_path, name):
  change, reason, field = WRONG[name]
  wrong = copy.deepcopy(published.sample('u-2'))
  wrong['messages'] = copy.deepcopy(wrong['messages'])
  change(wrong)
  samples = [published.sample('u-1'), wrong, published.sample('u-3')]
  path = tmp_path / 'samples.jsonl'
  rows = [
    row._replace(where=f'{path} line {i}')
    for i, row in enumerate(checklist_files.located(samples, ''), 1)
  ]
  if not name.startswith('nan'):  # JSON has none, but a caller may
    text = ''.join(json.dumps(sample) + '\n' for sample in samples)
    path.write_text(text)
    rows = list(checklist_files.read(path))
  loaded = checklist_samples.from_rows(rows)
  assert [task.id for task in loaded.tasks] == ['u-1', 'u-3']
  assert [d.task_id for d in loaded.demonstrations] == ['u-1', 'u-3']
  assert loaded.dropped == {reason: 1}
  assert loaded.first[reason].startswith(f'{path} line 2: {field}: ')
  assert len(loaded.first[reason]) < len(str(path)) + 350
  with pytest.raises(errors.UserError) as error:
    checklist_samples.from_rows(rows, strict=True)
  assert str(error.value) == loaded.first[reason]


def test_every_reason_is_known():
  reasons = {reason for _, reason, _ in WRONG.values()}
  assert reasons == set(checklist_schema.REASONS)
  assert set(checklist_schema.REASONS) < set(checklist_samples.REASONS)
