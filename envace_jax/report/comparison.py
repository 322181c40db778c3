"""Where a rehearsed answer and the real one differ, for a person to read.

For display only: the fidelity that is reported is measured by `evaluation`,
on the fields that can be known.
"""

from collections.abc import Iterator
import dataclasses
import json

MAX_DIFFERENCES = 6
MISSED_ERROR = 'optimistic: the real error was not rehearsed'
INVENTED_ERROR = 'pessimistic: rehearsed an error that does not occur'
_ABSENT = 'absent'
_Path = tuple[str | int, ...]  # keys and indices, so that none can collide


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
  """`differences` are (path, rehearsed, real); the first few only."""

  agrees: bool
  label: str
  differences: tuple[tuple[str, str, str], ...] = ()


def compare(rehearsed: str, real: str) -> Comparison:
  """Compares as JSON where both are JSON objects or lists, else as text."""
  ours, theirs = _parse(rehearsed), _parse(real)
  if theirs is None or ours is None:
    if rehearsed.strip() == real.strip():
      return Comparison(agrees=True, label='agrees')
    readable = 'differs' if theirs is None else 'differs: not valid JSON'
    return Comparison(agrees=False, label=readable)
  left, right = dict(_leaves(ours)), dict(_leaves(theirs))
  paths = list({**right, **left})
  differing = [
    (_spell(path), left.get(path, _ABSENT), right.get(path, _ABSENT))
    for path in paths
    if left.get(path) != right.get(path)
  ]
  if not differing:
    return Comparison(agrees=True, label='agrees')
  # An error and a result share no field: the label says it all.
  if _is_error(theirs) and not _is_error(ours):
    return Comparison(agrees=False, label=MISSED_ERROR)
  if _is_error(ours) and not _is_error(theirs):
    return Comparison(agrees=False, label=INVENTED_ERROR)
  return Comparison(
    agrees=False,
    label=f'differs in {len(differing)} of {len(paths)} fields',
    differences=tuple(differing[:MAX_DIFFERENCES]),
  )


def _parse(text: str) -> dict | list | None:
  try:
    value = json.loads(text)
  except (ValueError, RecursionError):  # model text may nest without end
    return None
  return value if isinstance(value, dict | list) else None


def _is_error(value: dict | list) -> bool:
  return isinstance(value, dict) and 'error' in value


def _leaves(value: dict | list) -> Iterator[tuple[_Path, str]]:
  """(path, canonical text) of every leaf, without recursion."""
  stack: list[tuple[_Path, object]] = [((), value)]
  while stack:
    path, node = stack.pop()
    if isinstance(node, dict) and node:
      stack += [((*path, k), v) for k, v in reversed(node.items())]
    elif isinstance(node, list) and node:
      stack += [((*path, i), v) for i, v in reversed(list(enumerate(node)))]
    else:
      yield path, _canonical(node)


def _spell(path: _Path) -> str:
  parts = (f'[{key}]' if isinstance(key, int) else f'.{key}' for key in path)
  return ''.join(parts).lstrip('.') or 'value'


def _canonical(node: object) -> str:
  if isinstance(node, float) and node.is_integer():
    node = int(node)  # 3 and 3.0 are one number to a reader
  return json.dumps(node, ensure_ascii=False)
