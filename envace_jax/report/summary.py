"""`summary.json`: what one run found, under keys that do not move.

A *measurement* is `{"mean", "lo", "hi", "n"}`: the estimate, its 95 % interval
and the number of episodes (or observations) behind it. When nothing could be
measured `n` is 0 and the other three are null; NaN never appears. In words:

  real_success.{warm_start,after}.{sampled,greedy}.{iid,ood}
      success in the real environment on held-out tasks: before and after
      rehearsal RL, at the sampling temperature and greedily, on tasks like the
      training ones and on held-out combinations.
  rehearsed_success.{warm_start,after}
      success the policy claims for itself when it answers its own calls.
  gap.{warm_start,after}
      rehearsed minus real success on the same tasks; > 0 is optimistic.
  fidelity.{warm_start,after}
      F1 of rehearsed against real observations, on fields that can be known.
  error_recall, optimism_index   (after training)
  error_recall_warm_start, optimism_index_warm_start   (optional)
      error recall: share of real errors that are rehearsed as errors.
      optimism index: missed errors minus invented ones, in [-1, 1].
  private_rehearsal.{plain,rehearsed,placebo}
      success of one committed execution: without rehearsal, after private
      rehearsals, and with the notes of another task.
  private_rehearsal_by_cap   (optional)
      list of `{"cap": real calls allowed, "plain", "rehearsed", "placebo"}`.
  real_calls
      tool calls the whole run spent in the real environment (training: none).
  seconds.{data,warm_start,rl,evaluation,total}   wall clock
  compiles.{warm_up,after}   programs compiled before and after warm-up
  seed, config   what to run again
"""

from collections.abc import Iterator
import json
import math
import os
import pathlib
from typing import Any

import jsonschema

from envace_jax import types

PHASES = ('warm_start', 'after')
ARMS = ('plain', 'rehearsed', 'placebo')
STAGES = ('data', 'warm_start', 'rl', 'evaluation', 'total')


def _closed(properties: dict, optional: tuple[str, ...] = ()) -> dict:
  """An object with exactly these keys: a misspelt key is an error."""
  return {
    'type': 'object',
    'properties': properties,
    'required': [key for key in properties if key not in optional],
    'additionalProperties': False,
  }


_MEASUREMENT = _closed(
  {
    'mean': {'type': ['number', 'null']},
    'lo': {'type': ['number', 'null']},
    'hi': {'type': ['number', 'null']},
    'n': {'type': 'integer', 'minimum': 0},
  }
)
_NOISE = 1e-6  # a bootstrap bound may miss an equal mean by rounding
_LEAF = {'$ref': '#/$defs/measurement'}
_COUNT = {'type': 'integer', 'minimum': 0}
_BY_PHASE = _closed({phase: _LEAF for phase in PHASES})
_SPLITS = _closed({'iid': _LEAF, 'ood': _LEAF})
_DECODINGS = _closed({'sampled': _SPLITS, 'greedy': _SPLITS})
_BY_ARM = {arm: _LEAF for arm in ARMS}
_OPTIONAL = (
  'error_recall_warm_start',
  'optimism_index_warm_start',
  'private_rehearsal_by_cap',
)

SCHEMA = {
  '$schema': 'https://json-schema.org/draft/2020-12/schema',
  '$defs': {'measurement': _MEASUREMENT},
  **_closed(
    {
      'real_success': _closed({phase: _DECODINGS for phase in PHASES}),
      'rehearsed_success': _BY_PHASE,
      'gap': _BY_PHASE,
      'fidelity': _BY_PHASE,
      'error_recall': _LEAF,
      'optimism_index': _LEAF,
      'error_recall_warm_start': _LEAF,
      'optimism_index_warm_start': _LEAF,
      'private_rehearsal': _closed(_BY_ARM),
      'private_rehearsal_by_cap': {
        'type': 'array',
        'items': _closed({'cap': _COUNT, **_BY_ARM}, optional=ARMS),
      },
      'real_calls': _COUNT,
      'seconds': _closed(
        {stage: {'type': 'number', 'minimum': 0} for stage in STAGES}
      ),
      'compiles': _closed({'warm_up': _COUNT, 'after': _COUNT}),
      'seed': {'type': 'integer'},
      'config': {'type': 'object'},
    },
    optional=_OPTIONAL,
  ),
}


def measurement(
  mean: float | None, lo: float | None, hi: float | None, n: int
) -> dict[str, float | int | None]:
  """One leaf; with `n=0` the numbers are null whatever was passed."""
  if n == 0:
    mean = lo = hi = None
  return {'mean': mean, 'lo': lo, 'hi': hi, 'n': n}


def validate(summary: types.Json) -> dict:
  """`summary` as plain JSON values, or a ValueError that names the key."""
  try:
    plain = json.loads(json.dumps(summary, default=_from_numpy))
  except TypeError as error:
    raise ValueError(f'summary is not JSON: {error}') from error
  for path, value in _walk(plain, ''):
    if isinstance(value, float) and not math.isfinite(value):
      raise ValueError(f'summary{path} is {value}; write null with n=0')
  error = jsonschema.exceptions.best_match(
    jsonschema.Draft202012Validator(SCHEMA).iter_errors(plain)
  )
  if error is not None:
    where = ''.join(f'.{part}' for part in error.absolute_path)
    raise ValueError(f'summary{where}: {error.message}')
  without_config = {k: v for k, v in plain.items() if k != 'config'}
  for path, value in _walk(without_config, ''):
    if isinstance(value, dict) and 'mean' in value:
      _check_measurement(path, value)
  return plain


def write(path: str | os.PathLike[str], summary: types.Json) -> None:
  """Validates, then replaces `path` in one step: never half a summary."""
  text = json.dumps(validate(summary), indent=2, allow_nan=False)
  path = pathlib.Path(path)
  temporary = path.with_name(path.name + '.tmp')
  temporary.write_text(text + '\n', encoding='utf-8')
  temporary.replace(path)


def leaf(summary: types.Json, path: str) -> types.Json | None:
  """The measurement at a dotted path; None if absent or not measured."""
  node: Any = summary
  for key in path.split('.'):
    node = node.get(key) if isinstance(node, dict) else None
  if not isinstance(node, dict) or node.get('mean') is None:
    return None
  return node


def _check_measurement(path: str, value: dict) -> None:
  numbers = [value['lo'], value['mean'], value['hi']]
  if value['n'] == 0:
    if any(x is not None for x in numbers):
      raise ValueError(f'summary{path}: n=0, so mean, lo and hi must be null')
  elif any(x is None for x in numbers):
    raise ValueError(f'summary{path}: null although n={value["n"]}')
  elif not numbers[0] - _NOISE <= numbers[1] <= numbers[2] + _NOISE:
    raise ValueError(f'summary{path}: not lo <= mean <= hi: {numbers}')


def _walk(node: Any, path: str) -> Iterator[tuple[str, Any]]:
  yield path, node
  if isinstance(node, dict):
    for key, value in node.items():
      yield from _walk(value, f'{path}.{key}')
  elif isinstance(node, list | tuple):
    for index, value in enumerate(node):
      yield from _walk(value, f'{path}[{index}]')


def _from_numpy(value: Any) -> Any:
  item = getattr(value, 'item', None)
  if item is None:
    raise TypeError(f'{type(value).__name__} {value!r}')
  return item()
