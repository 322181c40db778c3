"""Tool calls and tool responses as text, read without ever raising.

Whatever a policy or a tool wrote is hostile input: it comes back as a value
(`ToolCall`, JSON) or as a `ParseError` that names what was wrong. The form is
the one of Hermes and Qwen:

  <tool_call>{"name": "get_order", "arguments": {"order_id": "O12"}}</tool_call>
  <tool_response>{"order_id": "O12", "status": "shipped"}</tool_response>

Decisions that parsers disagree about:
- Tags are found outside JSON strings only; braces are never counted by regex.
- Text before the opening tag is allowed (models think aloud); text after the
  closing tag, or between the JSON and it, is 'trailing'. Nothing is repaired.
- Several calls in one action are an error, not the first of them, unless
  parallel calls are asked for (`parse_actions`); one bad call then voids all.
- A repeated key is an error: two readers could disagree about its value.
- NaN, Infinity and numbers beyond 64 bits are errors: no tool could take them.
- Arguments must be an object. A string that contains one is 'double_encoded'.
- Unknown keys beside `name` and `arguments` are ignored.
- Lone surrogates and NUL, legal as JSON escapes, become U+FFFD, since neither
  files nor processes nor SQL can carry them.
"""

from collections.abc import Mapping
import json
import math
import re
from typing import Any, NoReturn

from envace_jax import types

CALL_OPEN = '<tool_call>'
CALL_CLOSE = '</tool_call>'
RESPONSE_OPEN = '<tool_response>'
RESPONSE_CLOSE = '</tool_response>'

ERROR_KINDS = (
  'no_call',  # no opening tag
  'unclosed',  # no closing tag outside a JSON string
  'several_calls',  # a second opening tag after the closing one
  'trailing',  # anything else beside the JSON value
  'empty',  # nothing between the tags
  'bad_json',
  'bad_number',  # NaN, Infinity, or outside 64 bits
  'duplicate_key',
  'too_deep',  # nested deeper than MAX_DEPTH
  'not_object',  # a call that is no object; a response that is a scalar
  'bad_name',
  'bad_arguments',
  'double_encoded',  # JSON inside a JSON string
  'no_response',  # no opening <tool_response>
)
MAX_DEPTH = 64
ERROR_KEYS = frozenset({'error', 'error_tool_call'})  # ours, and the published

_UNSAFE = re.compile('[\ud800-\udfff\x00]')
_INT64 = 1 << 63


class _Rejected(Exception):
  """Leaves the JSON decoder with an error kind; never leaves this module."""

  def __init__(self, kind: str, detail: str):
    super().__init__(kind)
    self.error = types.ParseError(kind=kind, detail=detail)


def clean(text: str) -> str:
  """Replaces lone surrogates and NUL by U+FFFD."""
  return _UNSAFE.sub('\ufffd', text)


def is_call(text: str) -> bool:
  """Whether an action is a call, well formed or not, rather than a reply."""
  return CALL_OPEN in text


def parse_action(text: str) -> types.ToolCall | types.ParseError:
  """Reads an action that is known to be a call."""
  body = _inside(text, CALL_OPEN, CALL_CLOSE, 'no_call', 'several_calls')
  if isinstance(body, types.ParseError):
    return body
  payload = parse_json(body)
  if isinstance(payload, types.ParseError):
    return payload
  return call_of(payload)


def parse_actions(text: str) -> list[types.ToolCall | types.ParseError]:
  """Reads all the calls of an action, in order; one bad call voids all.

  The list is never empty: an action without a call is one 'no_call'.
  """
  parts = split_calls(text)
  if parts is None or len(parts[1]) == 1:
    return [parse_action(text)]
  calls = []
  for body in parts[1]:
    call = parse_action(CALL_OPEN + body + CALL_CLOSE)
    if isinstance(call, types.ParseError):
      return [call]
    calls.append(call)
  return calls


def split_calls(text: str) -> tuple[str, list[str]] | None:
  """The text before the calls of an action, and what stands in their tags.

  None where there is no call, an unclosed one, or anything but white space
  between calls or after them.
  """
  before, opening, rest = text.partition(CALL_OPEN)
  bodies = []
  while opening:
    end = _find_outside_strings(rest, CALL_CLOSE, 0)
    if end < 0:
      return None
    bodies.append(rest[:end])
    between, opening, rest = rest[end + len(CALL_CLOSE) :].partition(CALL_OPEN)
    if between.strip():
      return None
  return (before, bodies) if bodies else None


def render_call(call: types.ToolCall) -> str:
  """The one spelling of a call; `parse_action` reads it back."""
  payload = {'name': call.name, 'arguments': call.arguments}
  return CALL_OPEN + dumps(payload) + CALL_CLOSE


def parse_response(text: str) -> types.Json | list | types.ParseError:
  """Reads `<tool_response>JSON</tool_response>`, an object or an array."""
  body = _inside(text, RESPONSE_OPEN, RESPONSE_CLOSE, 'no_response', 'trailing')
  return body if isinstance(body, types.ParseError) else _container(body)


def parse_observation(text: str) -> types.Json | list | types.ParseError:
  """Reads a response with or without its tags."""
  if text.lstrip().startswith(RESPONSE_OPEN):
    return parse_response(text)
  return _container(text)


def reports_error(text: str) -> bool:
  """Whether an observation is an object that says that the call failed."""
  return is_error(parse_observation(text))


def is_error(value: Any) -> bool:
  """Whether a parsed observation says that the call failed."""
  return isinstance(value, dict) and not ERROR_KEYS.isdisjoint(value)


def render_response(text: str) -> str:
  """Puts what a tool returned between the response tags."""
  return RESPONSE_OPEN + clean(text) + RESPONSE_CLOSE


def dumps(value: Any) -> str:
  """JSON as the whole project spells it. Raises on what is not JSON at all."""
  return clean(json.dumps(value, ensure_ascii=False, default=_plain))


def parse_json(text: str) -> Any:
  """Any JSON value under the rules above, or a `ParseError`."""
  if not text.strip():
    return types.ParseError(kind='empty', detail='no JSON value')
  if _depth(text) > MAX_DEPTH:
    detail = f'nested deeper than {MAX_DEPTH}'
    return types.ParseError(kind='too_deep', detail=detail)
  start = len(text) - len(text.lstrip(' \t\n\r'))
  try:
    value, end = _DECODER.raw_decode(text, start)
    value = _clean_value(value)
  except _Rejected as e:
    return e.error
  except ValueError as e:
    return types.ParseError(kind='bad_json', detail=str(e)[:200])
  if rest := text[end:].strip(' \t\n\r'):
    return types.ParseError(kind='trailing', detail=clean(rest[:80]))
  return value


def call_of(payload: Any) -> types.ToolCall | types.ParseError:
  """A parsed JSON value as a call."""
  if not isinstance(payload, dict):
    kind = 'double_encoded' if _is_json_in_string(payload) else 'not_object'
    return types.ParseError(kind=kind, detail='a call is a JSON object')
  name = payload.get('name')
  if not isinstance(name, str) or not name.strip():
    detail = 'need "name": a non-empty string'
    return types.ParseError(kind='bad_name', detail=detail)
  arguments = payload.get('arguments')
  if not isinstance(arguments, dict):
    encoded = _is_json_in_string(arguments)
    return types.ParseError(
      kind='double_encoded' if encoded else 'bad_arguments',
      detail='need "arguments": a JSON object',
    )
  return types.ToolCall(name=name, arguments=arguments)


def _container(text: str) -> types.Json | list | types.ParseError:
  value = parse_json(text)
  if isinstance(value, dict | list | types.ParseError):
    return value
  kind = 'double_encoded' if _is_json_in_string(value) else 'not_object'
  return types.ParseError(kind=kind, detail='need an object or an array')


def _is_json_in_string(value: Any) -> bool:
  return isinstance(value, str) and isinstance(parse_json(value), dict | list)


def _inside(
  text: str, opening: str, closing: str, missing: str, repeated: str
) -> str | types.ParseError:
  """The text between the tags; `missing`, `repeated` name the error kinds."""
  start = text.find(opening)
  if start < 0:
    return types.ParseError(kind=missing, detail=f'no {opening}')
  start += len(opening)
  end = _find_outside_strings(text, closing, start)
  if end < 0:
    return types.ParseError(kind='unclosed', detail=f'no {closing}')
  rest = text[end + len(closing) :]
  if opening in rest:
    detail = f'a second {opening}'
    return types.ParseError(kind=repeated, detail=detail)
  if rest.strip():
    detail = clean(rest.strip()[:80])
    return types.ParseError(kind='trailing', detail=detail)
  return text[start:end]


# Strings may run to the end of the text: a cut string hides what follows it.
_STRING = r'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)'
_STRINGS_AND_BRACKETS = re.compile(rf'{_STRING}|[\[\]{{}}]', re.DOTALL)
_STRINGS_AND_TAGS = {
  tag: re.compile(rf'{_STRING}|{re.escape(tag)}', re.DOTALL)
  for tag in (CALL_CLOSE, RESPONSE_CLOSE)
}


def _find_outside_strings(text: str, tag: str, start: int) -> int:
  for match in _STRINGS_AND_TAGS[tag].finditer(text, start):
    if match.group() == tag:
      return match.start()
  return -1


def _depth(text: str) -> int:
  """Deepest nesting, seen before a recursive reader is trusted with it."""
  depth = deepest = 0
  for match in _STRINGS_AND_BRACKETS.finditer(text):
    bracket = match.group()
    if bracket in '[{':
      depth += 1
      deepest = max(deepest, depth)
    elif bracket in ']}':
      depth -= 1
  return deepest


def _reject_constant(name: str) -> NoReturn:
  raise _Rejected('bad_number', f'{name} is not JSON')


def _parse_int(digits: str) -> int:
  if len(digits) > 20 or not -_INT64 <= (value := int(digits)) < _INT64:
    raise _Rejected('bad_number', f'{digits[:24]} does not fit 64 bits')
  return value


def _parse_float(digits: str) -> float:
  value = float(digits)
  if math.isinf(value):
    raise _Rejected('bad_number', f'{digits[:24]} does not fit 64 bits')
  return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  result = {}
  for key, value in pairs:
    key = clean(key)
    if key in result:
      raise _Rejected('duplicate_key', f'{key[:80]!r} appears twice')
    result[key] = value
  return result


_DECODER = json.JSONDecoder(
  object_pairs_hook=_unique,
  parse_constant=_reject_constant,
  parse_int=_parse_int,
  parse_float=_parse_float,
)


def _clean_value(value: Any) -> Any:
  if isinstance(value, str):
    return clean(value)
  if isinstance(value, list):
    return [_clean_value(v) for v in value]
  if isinstance(value, dict):
    return {k: _clean_value(v) for k, v in value.items()}
  return value


def _plain(value: Any) -> Any:
  if isinstance(value, Mapping):
    return dict(value)
  raise TypeError(f'{type(value).__name__} is not JSON')
