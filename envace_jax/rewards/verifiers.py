"""Machine predicates: a check and a transcript in, a verdict out.

A check is plain JSON whose `kind` picks one function of the table `_DECIDE`;
`validate_check` refuses anything malformed when tasks are loaded, so training
never meets it. Verifiers read what the policy wrote, and in a rehearsed world
that includes the observations: only 'state' looks at an environment, and it
ABSTAINs where there is none. No text is ever executed or shown to a model.

  replied           contains: every phrase is in the reply; excludes: none is
  observed          contains: every phrase is in one observation; about: a value
                    that the answered call must have had among its arguments
  called            name, arguments: some call has at least these arguments
  acknowledged      name, arguments: such a call was answered by a JSON object
                    without "error", with the fields of `echo` equal, valid
                    under the tool's `function.returns` schema if it has one
  no_other_writes   writes: names of writing tools; allowed: [{name, arguments}]
  state             state_hash: equal to that of the environment at the end

What a text mentions is said in `phrases`. Values of arguments and fields are
equal as JSON: 1 equals 1.0, not true and not "1".
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import functools
import json
import re
from typing import Any

import jsonschema
import referencing

from envace_jax import types
from envace_jax.rewards import phrases
from envace_jax.text import tool_calls

PASS, FAIL, ABSTAIN = types.Verdict


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transcript:
  """What a verifier may look at."""

  steps: Sequence[types.Step]
  reply: str | None  # None when the episode ended without one
  tools: Sequence[types.Json] = ()  # for the schemas of what they return
  state_hash: str | None = None  # None while training


def decide(check: types.Json, transcript: Transcript) -> types.Verdict:
  """Decides one check; an empty one can only be decided by a judge."""
  if not check:
    return ABSTAIN
  if check.get('kind') not in _DECIDE:
    raise ValueError(_unknown_kind(check))
  return _DECIDE[check['kind']](check, transcript)


def validate_check(check: types.Json) -> None:
  """Raises ValueError unless `decide` can decide `check`."""
  if not check:
    return
  kind = check.get('kind')
  if kind not in _DECIDE:
    raise ValueError(_unknown_kind(check))
  required, optional = _FIELDS[kind]
  legal = {**required, **optional}
  for field, value in check.items():
    if field == 'kind':
      continue
    if field not in legal:
      raise ValueError(f'{kind} check has {field!r}; legal: {sorted(legal)}')
    if not legal[field](value):
      raise ValueError(f'{kind} check: {field}={value!r} is malformed')
  if missing := sorted(set(required) - set(check)):
    raise ValueError(f'{kind} check lacks {missing}')


def validate_tools(tools: Sequence[types.Json]) -> None:
  """Raises ValueError on an output schema that is no JSON schema."""
  for tool in tools:
    schema = tool.get('function', {}).get('returns')
    if schema is not None:
      fault = _schema_fault(json.dumps(schema))
      if fault is not None:
        name = tool['function'].get('name')
        raise ValueError(f'tool {name}: bad returns: {fault}')


@functools.lru_cache(256)
def _schema_fault(schema: str) -> str | None:
  """Why some JSON is no JSON schema; many tasks share a few schemas."""
  try:
    jsonschema.Draft202012Validator.check_schema(json.loads(schema))
  except jsonschema.SchemaError as error:
    return error.message
  return None


def _decide_replied(check: types.Json, transcript: Transcript) -> types.Verdict:
  reply = transcript.reply
  if reply is None or not reply.strip():
    return FAIL
  contains = all(phrases.mentions(reply, p) for p in check.get('contains', ()))
  excludes = any(phrases.mentions(reply, p) for p in check.get('excludes', ()))
  return PASS if contains and not excludes else FAIL


def _decide_observed(
  check: types.Json, transcript: Transcript
) -> types.Verdict:
  for step in transcript.steps:
    if 'about' in check and not _is_about(step.action, check['about']):
      continue
    text = _readable(step.observation_text)
    if all(phrases.mentions(text, phrase) for phrase in check['contains']):
      return PASS
  return FAIL


def _decide_called(check: types.Json, transcript: Transcript) -> types.Verdict:
  called = any(_matches(step.action, check) for step in transcript.steps)
  return PASS if called else FAIL


def _decide_acknowledged(
  check: types.Json, transcript: Transcript
) -> types.Verdict:
  schema = _returns_schema(transcript.tools, check['name'])
  for step in transcript.steps:
    if not _matches(step.action, check):
      continue
    answer = tool_calls.parse_observation(step.observation_text)
    if not isinstance(answer, dict) or 'error' in answer:
      continue
    if not _has_fields(answer, check.get('echo', {})):
      continue
    valid = _is_valid(answer, schema)
    if valid is None:
      return ABSTAIN  # the task's schema is broken, not the policy
    if valid:
      return PASS
  return FAIL


def _decide_no_other_writes(
  check: types.Json, transcript: Transcript
) -> types.Verdict:
  for step in transcript.steps:
    action = step.action
    if not isinstance(action, types.ToolCall):
      continue
    if action.name not in check['writes']:
      continue
    answer = tool_calls.parse_observation(step.observation_text)
    # A write is undone by an explicit error only: a garbled acknowledgement
    # must not hide it.
    refused = isinstance(answer, dict) and 'error' in answer
    allowed = any(_matches(action, call) for call in check['allowed'])
    if not refused and not allowed:
      return FAIL
  return PASS


def _decide_state(check: types.Json, transcript: Transcript) -> types.Verdict:
  if transcript.state_hash is None:
    return ABSTAIN
  return PASS if transcript.state_hash == check['state_hash'] else FAIL


_DECIDE: dict[str, Callable[[types.Json, Transcript], types.Verdict]] = {
  'replied': _decide_replied,
  'observed': _decide_observed,
  'called': _decide_called,
  'acknowledged': _decide_acknowledged,
  'no_other_writes': _decide_no_other_writes,
  'state': _decide_state,
}
KINDS = tuple(_DECIDE)


def _unknown_kind(check: types.Json) -> str:
  return f'unknown check kind {check.get("kind")!r}; legal kinds: {KINDS}'


def _is_list_of(is_item: Callable[[Any], bool]) -> Callable[[Any], bool]:
  def is_legal(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(map(is_item, value))

  return is_legal


def _is_text(value: Any) -> bool:
  return isinstance(value, str) and bool(value.strip())


def _is_object(value: Any) -> bool:
  return isinstance(value, Mapping)


def _is_call(value: Any) -> bool:
  return (
    _is_object(value)
    and set(value) <= {'name', 'arguments'}
    and _is_text(value.get('name'))
    and _is_object(value.get('arguments', {}))
  )


_is_texts = _is_list_of(_is_text)
# kind -> (required fields, optional fields); field -> whether a value is legal
_FIELDS = {
  'replied': ({}, {'contains': _is_texts, 'excludes': _is_texts}),
  'observed': ({'contains': _is_texts}, {'about': _is_text}),
  'called': ({'name': _is_text}, {'arguments': _is_object}),
  'acknowledged': (
    {'name': _is_text},
    {'arguments': _is_object, 'echo': _is_object},
  ),
  'no_other_writes': (
    {'writes': _is_texts, 'allowed': _is_list_of(_is_call)},
    {},
  ),
  'state': ({'state_hash': _is_text}, {}),
}


def _matches(
  action: types.ToolCall | types.ParseError, call: types.Json
) -> bool:
  """Whether an action is this call, with at least its arguments."""
  return (
    isinstance(action, types.ToolCall)
    and action.name == call['name']
    and _has_fields(action.arguments, call.get('arguments', {}))
  )


def _has_fields(value: types.Json, fields: types.Json) -> bool:
  return all(k in value and _same(value[k], v) for k, v in fields.items())


def _same(a: Any, b: Any) -> bool:
  """Equality of JSON values; Python's own says that True equals 1."""
  if isinstance(a, bool) or isinstance(b, bool):
    return a is b
  if isinstance(a, Mapping) and isinstance(b, Mapping):
    return len(a) == len(b) and _has_fields(a, b)
  if isinstance(a, list | tuple) and isinstance(b, list | tuple):
    return len(a) == len(b) and all(map(_same, a, b))
  return a == b


def _is_about(action: types.ToolCall | types.ParseError, value: str) -> bool:
  arguments = getattr(action, 'arguments', {})  # a ParseError has none
  return value in _leaves(arguments)


def _leaves(value: Any) -> Iterator[str]:
  """Every string, number and literal inside a JSON value, as text."""
  if isinstance(value, Mapping):
    for v in value.values():
      yield from _leaves(v)
  elif isinstance(value, list | tuple):
    for v in value:
      yield from _leaves(v)
  elif isinstance(value, str):
    yield value
  else:
    yield json.dumps(value)


def _readable(observation_text: str) -> str:
  """An observation as sent, then its values without JSON escapes."""
  value = tool_calls.parse_observation(observation_text)
  if isinstance(value, types.ParseError):
    return observation_text
  return '\n'.join([observation_text, *_leaves(value)])


def _returns_schema(
  tools: Sequence[types.Json], name: str
) -> types.Json | None:
  functions = [tool.get('function', {}) for tool in tools]
  return next(
    (f.get('returns') for f in functions if f.get('name') == name), None
  )


def _is_valid(value: Any, schema: types.Json | None) -> bool | None:
  """Validity under a schema; None when the schema itself cannot be used."""
  if schema is None:
    return True
  broken = jsonschema.SchemaError, referencing.exceptions.Unresolvable, re.error
  try:
    return _validator(json.dumps(schema, sort_keys=True)).is_valid(value)
  except broken:
    return None


@functools.lru_cache(1024)
def _validator(schema: str) -> jsonschema.Draft202012Validator:
  kind = jsonschema.Draft202012Validator
  kind.check_schema(json.loads(schema))
  # An empty registry: a $ref must not make training fetch anything.
  return kind(json.loads(schema), registry=referencing.Registry())
