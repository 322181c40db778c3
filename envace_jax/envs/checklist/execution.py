"""Where a sample can be tried for real: our own key `execution`.

A published sample has no environment: its tools exist in its dialogue alone. A
sample of ours says in `extra_info.execution`, which other readers ignore, what
its task is executed in and what must hold afterwards:

  {"environment": {"name": "desk", ...}, "evaluation": [criterion, ...]}

as JSON, with criteria as `tasks.records` spells them.
"""

from collections.abc import Sequence
import dataclasses
import json

import jsonschema

from envace_jax import types
from envace_jax.envs.checklist import schema as schema
from envace_jax.tasks import records

_FIELD = 'extra_info.execution'
_VALIDATOR = jsonschema.Draft202012Validator(
  {
    'type': 'object',
    'properties': {
      'environment': {'type': 'object', 'minProperties': 1},
      'evaluation': records.SCHEMAS['task']['properties']['evaluation'],
    },
    'required': ['environment', 'evaluation'],
  }
)


def read(extra: types.Json) -> tuple[types.Json, Sequence[types.Criterion]]:
  """(environment, evaluation) of a sample; both empty without the key.

  Raises:
    schema.Invalid: it is there, and cannot be read.
  """
  value = extra.get('execution')
  if value is None:
    return {}, ()
  if isinstance(value, str):
    value = schema.decoded(value, _FIELD, 'execution')
  error = jsonschema.exceptions.best_match(_VALIDATOR.iter_errors(value))
  if error is not None:
    where = _FIELD + error.json_path.removeprefix('$')
    raise schema.Invalid('execution', where, error.message)
  return value['environment'], tuple(map(_criterion, value['evaluation']))


def write(task: types.Task) -> types.Json:
  """The key and its value; nothing of a task without an environment."""
  if not task.environment:
    return {}
  value = {
    'environment': task.environment,
    'evaluation': [dataclasses.asdict(c) for c in task.evaluation],
  }
  return {'execution': json.dumps(value, ensure_ascii=False)}


def _criterion(value: types.Json) -> types.Criterion:
  examples = tuple(value.get('failure_examples', ()))
  return types.Criterion(**{**value, 'failure_examples': examples})
