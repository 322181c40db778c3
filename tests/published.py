"""A small sample in the published layout, and ways to change it."""

import json

from envace_jax.envs.checklist import files as checklist_files
from envace_jax.envs.checklist import samples as checklist_samples

TOOL = {
  'type': 'function',
  'function': {
    'name': 'heat',
    'description': 'Set the temperature of a room.',
    'parameters': {
      'type': 'object',
      'properties': {
        'room': {'type': 'string', 'enum': ['attic', 'hall']},
        'celsius': {'type': 'number'},
      },
      'required': ['room'],
    },
  },
}
VARIANTS = 'extra_info.interaction_kwargs.checklist_list'


def item(name, focus, weight, **fields):
  return {
    'id': name,
    'evidence': [],
    'focus_on': focus,
    'question': 'Is it so?',
    'pass_condition': 'It is so.',
    'failure_examples': ['It is not.'],
    'required_for_next_turn': False,
    'weight': weight,
    **fields,
  }


def call(room, celsius):
  arguments = json.dumps({'room': room, 'celsius': celsius})
  return {
    'id': f'call_{room}',
    'type': 'function',
    'function': {'name': 'heat', 'arguments': arguments},
  }


def sample(name='u-1'):
  """Two user turns, two calls at once in the first, none in the second."""
  dialogue = [
    {'role': 'system', 'content': 'You run a house.'},
    {'role': 'user', 'content': 'Warm the hall and the attic.'},
    {
      'role': 'assistant',
      'content': '<think>both</think>One moment.',
      'tool_calls': [call('hall', 20), call('attic', 18.5)],
    },
    {'role': 'tool', 'content': '{"ok": true, "celsius": 20}'},
    {'role': 'observation', 'content': '{"ok": true, "celsius": 18.5}'},
    {'role': 'assistant', 'content': 'Both are warm.', 'tool_calls': None},
    {'role': 'user', 'content': 'How warm is the hall?'},
    {'role': 'assistant', 'content': '<think>20</think>20 degrees.'},
  ]
  evidence = {
    'turn': 0,
    'step': 1,
    'from': 'assistant.tool_calls',
    'snippet': '"celsius": 20',
  }
  first = [
    item(
      'C0',
      'assistant.tool_calls',
      0.6,
      evidence=[evidence],
      required_for_next_turn=True,
      check={'kind': 'called', 'name': 'heat'},
    ),
    item('C1', 'tool.content', 0.4, dependence=['C0']),
  ]
  second = [
    item('C0', 'assistant.content.user_visible_reply', 0.5),
    item('C1', 'assistant.content.thinking', 0.5),
  ]
  return {
    'data_source': 'houses',
    'messages': dialogue[:2],
    'extra_info': {
      'original_index': name,
      'index': 7,
      'need_tools_kwargs': True,
      'messages': dialogue,
      'tools': json.dumps([TOOL]),
      'interaction_kwargs': {
        'name': 'checklist',
        'checklist_list': [[first, second]],
      },
    },
  }


def load(row, **options):
  rows = checklist_files.located([row], 'memory')
  return checklist_samples.from_rows(rows, **options)


def set_at(*path):
  """A change of a sample: path[-2] below path[:-2] becomes path[-1]."""

  def change(sample):
    *keys, last, value = path
    place = sample
    for key in keys:
      place = place[key]
    if value is KeyError:
      del place[last]
    else:
      place[last] = value

  return change


def in_extra(*path):
  return set_at('extra_info', *path)


def in_item(*path):
  where = ('extra_info', 'interaction_kwargs', 'checklist_list', 0)
  return set_at(*where, *path)
