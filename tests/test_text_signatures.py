"""One line a tool, whatever its schema holds."""

import pytest

from envace_jax.text import signatures


def _tool(properties, required=()):
  parameters = {
    'type': 'object',
    'properties': properties,
    'required': list(required),
  }
  function = {'name': 'f', 'description': 'long', 'parameters': parameters}
  return {'type': 'function', 'function': function}


@pytest.mark.parametrize(
  'properties, required, line',
  [
    ({}, [], 'f()'),
    ({'a': {'type': 'string'}}, ['a'], 'f(a: str)'),
    ({'a': {'type': 'integer'}}, [], 'f(a?: int)'),
    (
      {
        'a': {'type': 'number', 'default': 0.5},
        'b': {'enum': ['x', 'y'], 'type': 'string'},
        'c': {'type': 'boolean', 'default': False},
      },
      ['b'],
      "f(a: float = 0.5, b: 'x' | 'y', c: bool = False)",
    ),
    (
      {
        'rooms': {
          'type': 'array',
          'items': {
            'type': 'object',
            'properties': {
              'floor': {'type': 'integer'},
              'view': {'type': ['string', 'null']},
            },
            'required': ['floor'],
          },
        }
      },
      ['rooms'],
      'f(rooms: list[{floor: int, view?: str | None}])',
    ),
    (
      {'a': {'type': 'array'}, 'b': {'type': 'object'}},
      'ab',
      'f(a: list, b: dict)',
    ),
    ({'a': {}}, ['a'], 'f(a: any)'),
    ({'a': {'default': ['x\n'], 'type': 'array'}}, [], 'f(a: list = ["x\\n"])'),
    ({'a\n': {'enum': ['b\n']}}, ['a\n'], "f('a\\n': 'b\\n')"),
  ],
)
def test_lines(properties, required, line):
  assert signatures.signature(_tool(properties, required)) == line


def test_no_schema_breaks_the_line():
  nested = {'type': 'string'}
  for _ in range(50):
    nested = {'type': 'object', 'properties': {'a': nested}}
  odd = (
    {'a': nested},
    {'a': True, 'b': None},
    {'a': {'type': 'array', 'items': {'type': 'array', 'items': nested}}},
    {'a': {'enum': []}},
  )
  lines = [signatures.signature(_tool(properties)) for properties in odd]
  assert all('\n' not in line and len(line) < 200 for line in lines)
  bare = {'name': 'g', 'description': ''}
  assert signatures.signature({'function': bare}) == 'g()'
  joined = signatures.signatures([_tool({}), {'function': bare}])
  assert joined == 'f()\ng()'
