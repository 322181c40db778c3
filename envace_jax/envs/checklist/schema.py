"""The published checklist sample, as JSON Schema (Draft 2020-12).

A sample is a reference dialogue, the tools it may call, and per user turn a
list of yes/no items (EnvACE, arXiv 2608.06197; CM2, arXiv 2602.12268). Objects
are open: keys that are not named here belong to other readers. Three optional
keys are ours: an item's `check`, the machine predicate that decides it, and
`required`, false where success does not need it; a sample's `execution`, where
it can be tried for real (`checklist_execution`).

Free-form objects are JSON *strings* (`tools`, `arguments`, `check`,
`execution`), because Parquet gives every object of a column the keys of all of
them; a list of tools and an object as check or execution are read too.
"""

import functools
import json

import jsonschema

from envace_jax import types
from envace_jax.tasks import records

REASONS = (
  'json',  # no JSON, or text that UTF-8 cannot carry
  'schema',  # not as `checklist_schema.SAMPLE` says
  'tools',
  'checklist',
  'dialogue',
  'execution',
)
# Published `focus_on` -> ours. `state` has no published form.
FOCUS = {
  'assistant.tool_calls': 'tool_calls',
  'assistant.content.thinking': 'thinking',
  'assistant.content.user_visible_reply': 'reply',
  'tool.content': 'tool.content',
}
TOOL_ROLES = ('tool', 'observation')  # two names of one role

_TEXT = {'type': 'string'}
_NAME = {'type': 'string', 'minLength': 1}
_INDEX = {'type': 'integer', 'minimum': 0}


def _object(required: types.Json, optional: types.Json) -> types.Json:
  """An open object."""
  return {
    'type': 'object',
    'properties': {**required, **optional},
    'required': list(required),
  }


def _array(items: types.Json) -> types.Json:
  return {'type': 'array', 'items': items}


_TOOL_CALL = _object(
  {
    'function': _object(
      {
        'name': _NAME,
        'arguments': {**_TEXT, 'description': 'JSON of an object'},
      },
      {},
    )
  },
  {'type': {'const': 'function'}},
)
_MESSAGE = _object(
  {
    'role': {'enum': ['system', 'user', 'assistant', *TOOL_ROLES]},
    'content': {
      **_TEXT,
      'description': "an assistant's: thoughts in <think>, then what is seen",
    },
  },
  {'tool_calls': {'type': ['array', 'null'], 'items': _TOOL_CALL}},
)
_EVIDENCE = _object(
  {
    'turn': _INDEX,
    'step': _INDEX,
    'from': {'enum': ['user.content', *FOCUS]},
    'snippet': _TEXT,
  },
  {},
)
_ITEM = _object(
  {
    'id': {**_NAME, 'description': 'C0, C1, ...; unique within its turn'},
    'evidence': _array(_EVIDENCE),
    'focus_on': {'enum': list(FOCUS)},
    'question': _TEXT,
    'pass_condition': _TEXT,
    'failure_examples': _array(_TEXT),
    'required_for_next_turn': {'type': 'boolean'},
    'weight': {
      'type': 'number',
      'minimum': 0,
      'maximum': 1e6,
      'description': 'those of a turn sum to 1',
    },
  },
  {
    'dependence': {**_array(_TEXT), 'description': 'not read'},
    'check': {
      'type': ['string', 'object'],
      'description': 'a predicate of rewards.verifiers, or JSON of one',
    },
    'required': {'type': 'boolean', 'description': 'default true'},
  },
)
# What the published reader keeps a sample for.
TOOL = _object(
  {
    'type': {'const': 'function'},
    'function': _object(
      {
        'name': _NAME,
        'description': _TEXT,
        'parameters': _object(
          {
            'type': _TEXT,
            'properties': {
              'type': 'object',
              'additionalProperties': _object(
                {'type': _TEXT}, {'enum': _array(_TEXT)}
              ),
            },
            'required': _array(_TEXT),
          },
          {},
        ),
      },
      {},
    ),
  },
  {},
)
SAMPLE = _object(
  {
    'extra_info': _object(
      {
        'original_index': {
          'type': ['string', 'integer'],
          'minLength': 1,
          'description': 'unique in a dataset',
        },
        'messages': {
          **_array(_MESSAGE),
          'description': 'reference dialogue; its user messages are the script',
        },
        'tools': {
          'type': ['string', 'array'],
          'description': 'function schemas, or JSON of a list of them',
        },
        'interaction_kwargs': _object(
          {
            'checklist_list': {
              **_array(_array(_array(_ITEM))),
              'minItems': 1,
              'description': '[variant][turn][item]',
            },
          },
          {'name': {'const': 'checklist'}},
        ),
      },
      {
        'need_tools_kwargs': {'const': True},
        'execution': {
          'type': ['string', 'object'],
          'description': 'of `checklist_execution`, or JSON of one',
        },
      },
    ),
  },
  {
    'data_source': _TEXT,
    'messages': {
      **_array(_MESSAGE),
      'minItems': 1,
      'description': 'a training row only: the prompt, which ends in the first'
      ' user message',
    },
  },
)
_SAMPLES = jsonschema.Draft202012Validator(SAMPLE)
_TOOLS = jsonschema.Draft202012Validator(_array(TOOL))


class Invalid(Exception):
  """Why a sample is no task: one of REASONS, and '<field>: <what>'."""

  def __init__(self, reason: str, field: str, what: str):
    if len(what) > 200:
      what = f'{what[:100]} ... {what[-90:]}'
    super().__init__(f'{field or "sample"}: {what}')
    self.reason = reason


def validate_sample(value: object) -> None:
  """Raises Invalid unless it is a sample; strings of JSON are not read."""
  refuse_unencodable(value, '')
  if fault := _fault(_SAMPLES, value):
    raise Invalid('schema', *fault)


def validate_tools(tools: object) -> None:
  """Raises Invalid unless the published reader would take all of them."""
  if fault := _tools_fault(json.dumps(tools)):
    where, what = fault
    dot = '.' if where and not where.startswith('[') else ''
    raise Invalid('tools', f'extra_info.tools{dot}{where}', what)


def decoded(text: str, field: str, reason: str) -> object:
  """The value of a JSON string inside a sample."""
  try:
    value = records.parse_json(text)
  except ValueError as error:
    raise Invalid(reason, field, f'no JSON: {error}') from error
  if '\\u' in text:  # nothing else can spell what the text itself has not
    refuse_unencodable(value, field)
  return value


def refuse_unencodable(value: object, field: str) -> None:
  """Finds lone surrogates, which no file could store."""
  if isinstance(value, dict):
    for key, item in value.items():
      refuse_unencodable(key, f'{field} (a key)')
      refuse_unencodable(item, f'{field}.{key}'.lstrip('.'))
  elif isinstance(value, list):
    for i, item in enumerate(value):
      refuse_unencodable(item, f'{field}[{i}]')
  elif isinstance(value, str) and not value.isascii():
    try:
      value.encode('utf-8')
    except UnicodeEncodeError as error:
      raise Invalid('json', field, f'lone surrogate: {error}') from error


@functools.lru_cache(256)
def _tools_fault(text: str) -> tuple[str, str] | None:
  """Many samples share a few lists of tools."""
  return _fault(_TOOLS, json.loads(text))


def _fault(validator, value: object) -> tuple[str, str] | None:
  """The field that is wrong, and what is wrong with it."""
  error = jsonschema.exceptions.best_match(validator.iter_errors(value))
  if error is None:
    return None
  return error.json_path.removeprefix('$').removeprefix('.'), error.message
