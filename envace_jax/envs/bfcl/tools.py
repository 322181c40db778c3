"""Function docs of the package as OpenAI schemas, and names there and back.

The docs name types as Python and Java do; a schema names them as JSON does. An
OpenAI name has no dots, so `math.add` becomes `math_add`, as for the package's
own function-calling models, and its checker is given docs and answers that are
renamed alike. No two functions of one task share a renamed name.
"""

from collections.abc import Iterable, Mapping

from envace_jax import types


def to_openai(doc: types.Json, mapping: Mapping[str, str]) -> types.Json:
  """One function doc as an OpenAI schema; `mapping` is the package's."""
  function = {
    'name': renamed(doc['name']),
    'description': doc['description'],
    'parameters': _object(doc['parameters'], mapping),
  }
  if 'response' in doc:
    function['returns'] = _object(doc['response'], mapping)
  return {'type': 'function', 'function': function}


def renamed(name: str) -> str:
  """A name as OpenAI's interface can say it."""
  return name.replace('.', '_')


def renamed_docs(docs: Iterable[types.Json]) -> list[types.Json]:
  """Docs for the checker; only names differ."""
  return [{**doc, 'name': renamed(doc['name'])} for doc in docs]


def renamed_answers(answers: Iterable[types.Json]) -> list[types.Json]:
  """Accepted answers `{name: arguments}` for the checker."""
  return [{renamed(name): value for name, value in a.items()} for a in answers]


def parameter_names(docs: Iterable[types.Json]) -> dict[str, list[str]]:
  """What each function takes, in the order of its doc."""
  return {doc['name']: list(doc['parameters']['properties']) for doc in docs}


def _object(schema: types.Json, mapping) -> types.Json:
  """The outermost schema is an object, whatever it is called."""
  return {**_schema(schema, mapping), 'type': 'object'}


def _schema(schema: types.Json, mapping) -> types.Json:
  kind = schema.get('type')
  translated = {**schema, 'type': mapping.get(kind, 'string')}
  if kind == 'float':
    note = ' This is a float type value.'
    translated['format'] = 'float'
    translated['description'] = schema.get('description', '') + note
  if isinstance(schema.get('properties'), Mapping):
    translated['properties'] = {
      name: _schema(field, mapping)
      for name, field in schema['properties'].items()
    }
  if isinstance(schema.get('items'), Mapping):
    translated['items'] = _schema(schema['items'], mapping)
  if isinstance(schema.get('items'), list):  # of a tuple, one by one
    del translated['items']
    translated['prefixItems'] = [_schema(s, mapping) for s in schema['items']]
  return translated
