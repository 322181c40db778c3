"""Calls as the package evaluates them, and what must hold before it may.

The package hands the text of a call to Python's `eval`. So no text of a policy
reaches it: a call is a name and plain values, both are checked here, and the
text is written anew with `repr`. What is read (ground truth, and policies that
answer in Python) goes through a parser that knows literals only.
"""

import ast
from collections.abc import Mapping, Sequence
import keyword
import math
import re

from envace_jax import types

MAX_DEPTH = 32  # of values inside values
MAX_CHARS = 100_000  # of a call's text

_NAME = re.compile(r'[A-Za-z_][A-Za-z0-9_]*')
_DOTTED = re.compile(r'[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*')
_INT64 = 1 << 63


class Malformed(ValueError):
  """A call that is not a known name with plain values, and why."""


def render(call: types.ToolCall) -> str:
  """`name(argument=value)` with values that `eval` can only read.

  Raises:
    Malformed: the name is no identifier, or a value no plain literal.
  """
  check_arguments(call.arguments)
  for name in (call.name, *call.arguments):
    if not isinstance(name, str) or not _NAME.fullmatch(name):
      raise Malformed(f'{_short(name)} is no name')
    if keyword.iskeyword(name):
      raise Malformed(f'{name} is a word of the language')
  values = ', '.join(
    f'{key}={value!r}' for key, value in call.arguments.items()
  )
  text = f'{call.name}({values})'
  if len(text) > MAX_CHARS:
    raise Malformed(f'longer than {MAX_CHARS} characters')
  return text


def read(text: str, parameters: Mapping[str, Sequence[str]]) -> types.ToolCall:
  """One call of a function in `parameters`: its names, in their order.

  Raises:
    Malformed: anything but a known name, with literals for arguments.
  """
  if len(text) > MAX_CHARS:
    raise Malformed(f'longer than {MAX_CHARS} characters')
  name = text.partition('(')[0].strip()
  # Python reads look-alikes of letters as the letters: only ASCII passes.
  if not _DOTTED.fullmatch(name) or name not in parameters:
    raise Malformed(f'{_short(name)} is no known function')
  try:
    body = ast.parse(text.strip(), mode='eval').body
    if not isinstance(body, ast.Call) or ast.unparse(body.func) != name:
      raise Malformed('not one call')
    values = [ast.literal_eval(value) for value in body.args]
    named = [(key.arg, ast.literal_eval(key.value)) for key in body.keywords]
  except Malformed:
    raise
  except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
    raise Malformed('arguments are not literals') from None
  if len(values) > len(parameters[name]):
    raise Malformed(f'more arguments than {name} has')
  named = [*zip(parameters[name], values, strict=False), *named]
  arguments = dict(named)
  if len(arguments) < len(named):
    raise Malformed('an argument is given twice')
  if None in arguments:
    raise Malformed('** is no argument')
  check_arguments(arguments)
  return types.ToolCall(name=name, arguments=arguments)


def check_arguments(arguments: types.Json) -> None:
  """Raises Malformed unless every value is a plain, finite literal."""
  if not isinstance(arguments, Mapping):
    raise Malformed('arguments are no object')
  for value in arguments.values():
    fault = _fault(value, 0)
    if fault:
      raise Malformed(fault)


def _fault(value, depth: int) -> str | None:
  """Why a value is no plain literal. Exact types: a subclass may lie."""
  if depth > MAX_DEPTH:
    return f'nested deeper than {MAX_DEPTH}'
  if value is None or type(value) in (bool, str):
    return None
  if type(value) is int:
    return None if -_INT64 <= value < _INT64 else 'an integer beyond 64 bits'
  if type(value) is float:
    return None if math.isfinite(value) else 'a number that is not finite'
  if type(value) in (list, tuple):
    inside = value
  elif type(value) is dict:
    if not all(type(key) is str for key in value):
      return 'a key that is no string'
    inside = value.values()
  else:
    return f'a {type(value).__name__}'
  return next(filter(None, (_fault(v, depth + 1) for v in inside)), None)


def _short(name) -> str:
  return ascii(name)[:60] if isinstance(name, str) else type(name).__name__
