"""What a program can say of a call, or of an answer, before anybody reads it.

A call is checked as the published release orders it, and refused in its codes:

  format      INVALID_TOOL_CALL_FORMAT   the action is no well-formed call
  whitelist   TOOL_NOT_AVAILABLE         the task has no such tool
  arguments   INVALID_PARAMETERS         they break the tool's JSON Schema

  {"error_tool_call": {"code": ..., "message": ...}}

An answer is a non-empty object or an array, valid under the tool's
`function.returns` schema where it has one; an object that reports an error is
valid as it is. The published release leaves both to the policy itself
(`rollout.validation='policy'`).
"""

from collections.abc import Sequence
import functools
import json

import jsonschema
import referencing

from envace_jax import types
from envace_jax.text import tool_calls

CALL_CODES = (
  'INVALID_TOOL_CALL_FORMAT',
  'TOOL_NOT_AVAILABLE',
  'INVALID_PARAMETERS',
)
ANSWER_CODES = (
  'SIMULATOR_JSON_DECODE_ERROR',
  'INVALID_EXECUTION_RESULT_TYPE',
  'SCHEMA_VALIDATION_FAILED',
)
_SHOWN_CHARS = 120  # of a reason


def call_fault(
  action: types.ToolCall | types.ParseError, tools: Sequence[types.Json]
) -> tuple[str, str] | None:
  """(code, reason) of a call that must not be answered, or None."""
  if isinstance(action, types.ParseError):
    return 'INVALID_TOOL_CALL_FORMAT', f'{action.kind}: {action.detail}'
  function = _function(tools, action.name)
  if function is None:
    return 'TOOL_NOT_AVAILABLE', action.name
  reason = _breach(action.arguments, function.get('parameters'))
  return None if reason is None else ('INVALID_PARAMETERS', reason)


def answer_fault(
  text: str, action: types.ToolCall, tools: Sequence[types.Json]
) -> tuple[str, str] | None:
  """(code, reason) of an observation no such tool could return, or None."""
  value = tool_calls.parse_observation(text)
  if isinstance(value, types.ParseError):
    if value.kind == 'not_object':
      return 'INVALID_EXECUTION_RESULT_TYPE', value.detail
    return 'SIMULATOR_JSON_DECODE_ERROR', f'{value.kind}: {value.detail}'
  if value == {}:
    return 'INVALID_EXECUTION_RESULT_TYPE', 'an empty object'
  if tool_calls.is_error(value):
    return None
  function = _function(tools, action.name) or {}
  reason = _breach(value, function.get('returns'))
  return None if reason is None else ('SCHEMA_VALIDATION_FAILED', reason)


def render(fault: tuple[str, str]) -> str:
  """A fault as an observation, in the published shape."""
  code, reason = fault
  if len(reason) > _SHOWN_CHARS:
    reason = reason[: _SHOWN_CHARS - 3] + '...'
  return tool_calls.dumps(
    {'error_tool_call': {'code': code, 'message': reason}}
  )


def _function(tools: Sequence[types.Json], name: str) -> types.Json | None:
  for tool in tools:
    if tool['function']['name'] == name:
      return tool['function']
  return None


def _breach(value, schema: types.Json | None) -> str | None:
  """The first way in which a value breaks a schema."""
  if schema is None:
    return None
  error = jsonschema.exceptions.best_match(
    _validator(json.dumps(schema)).iter_errors(value)
  )
  if error is None:
    return None
  path = error.json_path.removeprefix('$').removeprefix('.')
  return f'{path}: {error.message}' if path else error.message


@functools.lru_cache(512)
def _validator(schema: str) -> jsonschema.protocols.Validator:
  # An empty registry: a schema must never make us fetch anything.
  return jsonschema.Draft202012Validator(
    json.loads(schema), registry=referencing.Registry()
  )
