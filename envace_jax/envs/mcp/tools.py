"""A server's tools as OpenAI function schemas, under names that are legal.

A function's name has letters, digits, _ and -, and at most 64 of them; MCP
allows anything. Other characters become _, names that would then collide get a
number, in the order of the list. A list that cannot be used as it stands is
not refused: what was wrong with it is said in `faults`.
"""

from collections.abc import Collection, Sequence
import dataclasses
import json
import re
from typing import Any

from envace_jax import types

_LONGEST = 64
_ILLEGAL = re.compile(r'[^A-Za-z0-9_-]')
_ANYTHING = {'type': 'object', 'properties': {}}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tools:
  """What may be called, and by which name the server knows it."""

  schemas: Sequence[types.Json] = ()
  names: types.Json = dataclasses.field(default_factory=dict)  # ours -> theirs
  faults: Sequence[str] = ()  # a sentence each


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hidden:
  """What of a server is not for the policy, by the server's names."""

  tools: Collection[str] = ()
  parameters: Collection[str] = ()  # of any tool; must not be required


NOTHING = Hidden()


def convert(listed: Sequence[Any], hidden: Hidden) -> Tools:
  """Schemas of the SDK's tools, without what is hidden."""
  schemas, names, faults = [], {}, []
  seen = set()
  for tool in listed:
    if tool.name in seen:
      faults.append(f'tool {tool.name!r} is listed twice; the first counts')
      continue
    seen.add(tool.name)
    if tool.name in hidden.tools:
      continue
    name = _free(_legal(tool.name), names)
    if name != tool.name:
      faults.append(f'tool {tool.name!r} is called {name!r} here')
    parameters = tool.input_schema
    if parameters.get('type') != 'object' or not _is_json(parameters):
      faults.append(f'tool {tool.name!r} takes no object; its schema is left')
      parameters = _ANYTHING
    names[name] = tool.name
    schemas.append(
      {
        'type': 'function',
        'function': {
          'name': name,
          'description': tool.description or tool.title or '',
          'parameters': _without(parameters, hidden.parameters),
        },
      }
    )
  if missing := sorted(set(hidden.tools) - seen):
    faults.append(f'hidden tools {missing} are not among those listed')
  return Tools(schemas=tuple(schemas), names=names, faults=tuple(faults))


def _without(parameters: types.Json, hidden: Collection[str]) -> types.Json:
  properties = parameters.get('properties')
  if not isinstance(properties, dict):
    return dict(parameters)
  shown = {k: v for k, v in properties.items() if k not in hidden}
  return {**parameters, 'properties': shown}


def _legal(name: str) -> str:
  return _ILLEGAL.sub('_', name)[:_LONGEST] or '_'


def _free(name: str, taken: Collection[str]) -> str:
  """The name itself, or with the first number that makes it another one."""
  free, number = name, 2
  while free in taken:
    end = f'_{number}'
    free, number = name[: _LONGEST - len(end)] + end, number + 1
  return free


def _is_json(value: Any) -> bool:
  try:
    json.dumps(value, allow_nan=False).encode('utf-8')
  except (ValueError, RecursionError):
    return False
  return True
