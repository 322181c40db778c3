"""The JSON form of tasks and demonstrations, strict both ways.

A record is a `types.Task` or a `types.Demonstration`. `to_json` and `from_json`
are inverse; `SCHEMAS` documents the form; JSONL, a record a line, is the form
for people. NaN, infinities, duplicate keys, lone surrogates and trailing text
are errors that name the record and the field. Declared sequences come back as
tuples, arrays inside free JSON (arguments, environment) as lists.
"""

from collections.abc import Mapping
import dataclasses
import enum
import functools
import json
import math

from etils import epath
import jsonschema

from envace_jax import errors, types

Record = types.Task | types.Demonstration
Located = tuple[str, Record]  # where it was found, for messages

_TEXT = {'type': 'string'}
_NAME = {'type': 'string', 'minLength': 1}
_FREE = {'type': 'object'}  # any JSON object
_INDEX = {'type': 'integer', 'minimum': 0}


def _array(items: types.Json) -> types.Json:
  return {'type': 'array', 'items': items}


def _object(required: types.Json, optional: types.Json) -> types.Json:
  """A closed object: an unknown key is a spelling mistake."""
  return {
    'type': 'object',
    'properties': {**required, **optional},
    'required': list(required),
    'additionalProperties': False,
  }


_CALL = _object({'name': _NAME, 'arguments': _FREE}, {})
_CRITERION = _object(
  {'id': _NAME, 'question': _TEXT, 'check': _FREE},
  {
    'turn': _INDEX,
    'weight': {'type': 'number', 'minimum': 0, 'maximum': 1e6},
    'focus_on': {
      'enum': ['tool_calls', 'tool.content', 'thinking', 'reply', 'state']
    },
    'required': {'type': 'boolean'},
    'required_for_next_turn': {'type': 'boolean'},
    'pass_condition': _TEXT,
    'failure_examples': _array(_TEXT),
    'evidence': _TEXT,
  },
)
_STEP = _object(
  {
    'action': {
      'type': 'object',
      # A call, or why the text was none.
      'if': {'required': ['name']},
      'then': _CALL,
      'else': _object({'kind': _NAME, 'detail': _TEXT}, {}),
    },
    'action_text': _TEXT,
    'observation_text': _TEXT,
  },
  {
    'author': {'enum': [author.name for author in types.Author]},
    'turn': _INDEX,
    'message': _INDEX,
    'outcome': _TEXT,
  },
)
_RECORD = _object({'call': _CALL, 'observation_text': _TEXT}, {})
_TOOL = {
  'type': 'object',
  'properties': {
    'type': {'const': 'function'},
    'function': {
      'type': 'object',
      'properties': {'name': _NAME, 'parameters': _FREE},
      'required': ['name'],
    },
  },
  'required': ['type', 'function'],
}

# kind -> JSON Schema of a record. Absent optional keys have types' defaults.
SCHEMAS = {
  'task': _object(
    {
      'kind': {'const': 'task'},
      'id': {**_NAME, 'description': 'unique in a dataset, over all splits'},
      'instruction': {**_NAME, 'description': "the user's first message"},
      'tools': {**_array(_TOOL), 'description': 'OpenAI function schemas'},
      'checklist': {**_array(_CRITERION), 'description': 'trained on'},
    },
    {
      'evaluation': {**_array(_CRITERION), 'description': 'never trained on'},
      'environment': {**_FREE, 'description': 'for the real environment'},
      'family': _TEXT,
      'plan': {**_array(_CALL), 'description': 'an oracle solution'},
      'plan_reply': _TEXT,
      'user_turns': {**_array(_TEXT), 'description': 'after the instruction'},
      'system': _TEXT,
      'records': {**_array(_RECORD), 'description': 'real, for REHEARSE only'},
    },
  ),
  'demonstration': _object(
    {
      'kind': {'const': 'demonstration'},
      'task_id': _NAME,
      'instruction': _NAME,
      'steps': _array(_STEP),
      'reply': _TEXT,
    },
    {
      'notes': _TEXT,
      'habit': _TEXT,
      'tools': _array(_TOOL),
      'system': _TEXT,
      'user_turns': _array(_TEXT),
      'turn_replies': _array(_TEXT),
    },
  ),
}
_VALIDATORS = {
  kind: jsonschema.Draft202012Validator(schema)
  for kind, schema in SCHEMAS.items()
}
KINDS = {types.Task: 'task', types.Demonstration: 'demonstration'}


def to_json(record: Record, *, where: str = 'record') -> str:
  """One line of JSON; `where` opens the message of an error."""
  kind = KINDS[type(record)]
  try:
    value = {'kind': kind, **_plain(record)}
    _validate(value)
    return json.dumps(value, ensure_ascii=False)
  except (ValueError, RecursionError) as error:
    raise errors.UserError(f'{where}, {_label(record)}: {error}') from error


def from_json(text: str, *, where: str = 'record') -> Record:
  """Inverse of `to_json`; raises UserError for anything else."""
  value = None
  try:
    value = parse_json(text)
    _validate(value)
    return _record(_plain(value))
  except (ValueError, RecursionError) as error:
    who = f'{where}, {_label(value)}' if _label(value) else where
    raise errors.UserError(f'{who}: {error}') from error


def from_stored(text: str) -> Record:
  """`from_json` for what `to_json` made: nothing is validated again."""
  return _record(json.loads(text))


def _record(value: types.Json) -> Record:
  """A record from its plain form, which somebody has validated."""
  return _task(value) if value['kind'] == 'task' else _demonstration(value)


def parse_json(text: str) -> object:
  """Strict JSON: what `json.loads` forgives is a ValueError here."""

  def unique(pairs):
    value = dict(pairs)
    if len(value) != len(pairs):
      raise ValueError(f'an object repeats a key: {[k for k, _ in pairs]}')
    return value

  def finite(literal):
    if not math.isfinite(float(literal)):
      raise ValueError(f'{literal} is not a finite number')
    return float(literal)

  try:
    return json.loads(
      text, object_pairs_hook=unique, parse_float=finite, parse_constant=finite
    )
  except RecursionError as error:
    raise ValueError('JSON is nested too deeply') from error


def read_jsonl(path: epath.PathLike) -> list[Record]:
  """The records of a UTF-8 file, one a line; blank lines are skipped."""
  return [record for _, record in read_located(path)]


def read_located(path: epath.PathLike) -> list[Located]:
  try:
    content = epath.Path(path).read_bytes()
  except OSError as error:
    raise errors.UserError(f'cannot read {path}: {error}') from error
  located = []
  # Not splitlines: U+2028 may stand inside a JSON string.
  lines = content.removeprefix(b'\xef\xbb\xbf').split(b'\n')
  for number, line in enumerate(lines, 1):
    where = f'{path} line {number}'
    if line.strip():
      try:
        text = line.decode('utf-8')
      except UnicodeDecodeError as error:
        raise errors.UserError(f'{where}: not UTF-8: {error}') from error
      located.append((where, from_json(text, where=where)))
  return located


def _label(record: Record | object) -> str:
  """The record's own name, as far as there is one."""
  if isinstance(record, Record):
    record = {'kind': KINDS[type(record)], **vars(record)}
  if not isinstance(record, dict):
    return ''
  name = record.get('id') or record.get('task_id')
  return f'{record.get("kind", "record")} {name!r}' if name else ''


def _validate(value: object) -> None:
  """Raises ValueError '<field>: <what is wrong>'."""
  kind = value.get('kind') if isinstance(value, dict) else None
  if not isinstance(kind, str) or kind not in SCHEMAS:
    raise ValueError(f'an object with kind in {list(SCHEMAS)} is needed')
  tools = value.get('tools')
  if isinstance(tools, list) and _are_tools(json.dumps(tools)):
    value = {**value, 'tools': []}  # the same few tools in every record
  error = jsonschema.exceptions.best_match(_VALIDATORS[kind].iter_errors(value))
  if error is not None:
    path = error.json_path.removeprefix('$').removeprefix('.')
    text = error.message
    short = text if len(text) <= 200 else f'{text[:100]} ... {text[-90:]}'
    raise ValueError(f'{path or "record"}: {short}')
  for field in ('checklist', 'evaluation'):
    ids = [criterion['id'] for criterion in value.get(field, ())]
    if repeated := {i for i in ids if ids.count(i) > 1}:
      raise ValueError(f'{field}: criterion ids {sorted(repeated)} repeat')


@functools.lru_cache(64)
def _are_tools(text: str) -> bool:
  """Whether a JSON array is a legal `tools` field."""
  schema = SCHEMAS['task']['properties']['tools']
  return jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))


def _plain(
  value: object, path: str = '', key: str | int | None = None
) -> types.Json | list | str | float | None:
  """Plain JSON values, or a ValueError that names the field path + key.

  The bulk of a task is ASCII: it goes first, and paths are spelled late.
  """
  if type(value) is str and value.isascii():
    return value
  if value is None or type(value) in (bool, int):
    return value
  if key is not None:
    path += f'[{key}]' if isinstance(key, int) else f'.{key}'
  where = path.lstrip('.')
  if dataclasses.is_dataclass(value):
    value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
  if isinstance(value, Mapping):
    for k in value:
      if not isinstance(k, str):
        raise ValueError(f'{where}: key {k!r} is not a string')
      _plain(k, path, 'key')
    return {k: _plain(item, path, k) for k, item in value.items()}
  if isinstance(value, list | tuple):
    return [_plain(item, path, i) for i, item in enumerate(value)]
  if isinstance(value, types.Author):
    return value.name
  if isinstance(value, str):
    try:
      value.encode('utf-8')
    except UnicodeEncodeError as error:
      raise ValueError(f'{where}: lone surrogate: {error}') from error
  if isinstance(value, float) and not math.isfinite(value):
    raise ValueError(f'{where}: {value} is not a finite number')
  if isinstance(value, enum.Enum) or not isinstance(value, str | int | float):
    raise ValueError(f'{where}: {type(value).__name__} has no JSON form')
  return value


def _criterion(value: types.Json) -> types.Criterion:
  examples = tuple(value.get('failure_examples', ()))
  weight = float(value.get('weight', 1.0))
  return types.Criterion(
    **{**value, 'failure_examples': examples, 'weight': weight}
  )


def _step(value: types.Json) -> types.Step:
  action = value['action']
  make = types.ToolCall if 'name' in action else types.ParseError
  author = types.Author[value.get('author', 'WORLD')]
  return types.Step(**{**value, 'action': make(**action), 'author': author})


def _call(value: types.Json) -> types.ToolCall:
  return types.ToolCall(**value)


def _fields(value: types.Json, **make) -> dict:
  """Keyword arguments, each array mapped over by its `make`."""
  made = {k: tuple(map(f, value[k])) for k, f in make.items() if k in value}
  return {k: v for k, v in value.items() if k != 'kind'} | made


def _task(value: types.Json) -> types.Task:
  return types.Task(
    **_fields(
      value,
      tools=dict,
      checklist=_criterion,
      evaluation=_criterion,
      plan=_call,
      user_turns=str,
      records=lambda record: types.Record(
        **{**record, 'call': _call(record['call'])}
      ),
    )
  )


def _demonstration(value: types.Json) -> types.Demonstration:
  return types.Demonstration(
    **_fields(value, steps=_step, tools=dict, user_turns=str, turn_replies=str)
  )
