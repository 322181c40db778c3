"""A tool in one line, for policies that cannot afford JSON schemas.

  grep(file_name: str, pattern: str)
  wc(file_name: str, mode: 'l' | 'w' = 'l')
  book(rooms: list[{floor: int, view?: str}], note?: str)

The line says names, types, choices, defaults and, by a question mark, what may
be left out; descriptions are dropped. It is for reading: nothing parses it, and
whatever a schema holds, it stays one line.
"""

from collections.abc import Iterable, Sequence
import json

from envace_jax import types

_NAMES = {
  'string': 'str',
  'integer': 'int',
  'number': 'float',
  'boolean': 'bool',
  'null': 'None',
}
_MAX_DEPTH = 4  # of objects and arrays shown; below it a bare `dict` or `list`


def signature(tool: types.Json) -> str:
  """One line for an OpenAI function schema."""
  function = tool.get('function', tool)
  parameters = function.get('parameters') or {}
  return f'{_word(function["name"])}({_fields(parameters, 0)})'


def signatures(tools: Iterable[types.Json]) -> str:
  """One line a tool, in their order."""
  return '\n'.join(signature(tool) for tool in tools)


def _fields(schema: types.Json, depth: int) -> str:
  properties = schema.get('properties')
  if not isinstance(properties, dict):
    return ''
  required = schema.get('required') or ()
  fields = [
    (name, field if isinstance(field, dict) else {})
    for name, field in properties.items()
  ]
  return ', '.join(
    _field(name, field, depth, required=name in required)
    for name, field in fields
  )


def _field(name, schema: types.Json, depth: int, *, required: bool) -> str:
  kind = _type(schema, depth)
  if required:
    return f'{_word(name)}: {kind}'
  if 'default' in schema:
    return f'{_word(name)}: {kind} = {_value(schema["default"])}'
  return f'{_word(name)}?: {kind}'


def _type(schema: types.Json, depth: int) -> str:
  choices = schema.get('enum')
  if isinstance(choices, Sequence) and choices and not isinstance(choices, str):
    return ' | '.join(_value(choice) for choice in choices)
  kind = schema.get('type', 'any')
  if isinstance(kind, list):
    return ' | '.join(_type({**schema, 'type': one}, depth) for one in kind)
  if kind == 'array':
    items = schema.get('items')
    if not isinstance(items, dict) or not items or depth >= _MAX_DEPTH:
      return 'list'
    return f'list[{_type(items, depth + 1)}]'
  if kind == 'object':
    inside = _fields(schema, depth + 1) if depth < _MAX_DEPTH else ''
    return f'{{{inside}}}' if inside else 'dict'
  return _NAMES.get(kind) or _word(kind)


def _value(value) -> str:
  """As Python would write it; JSON where Python's form has line breaks."""
  if isinstance(value, str | bool | int | float) or value is None:
    return repr(value)
  return json.dumps(value)


def _word(name) -> str:
  """A name as it stands, quoted where it would break the line."""
  text = str(name)
  return text if text.isprintable() else repr(text)
