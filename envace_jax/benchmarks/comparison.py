"""Files of results against the first of them, task by task.

Only tasks that both sides attempted and that were judged on both count; how
many those are stands in the table, and so does the cost of an attempt: real
calls, tokens of replies, tokens of private rehearsals. Sides with other caps on
real calls are not compared. Versions of a benchmark are not compared:
another version is another test.
"""

from collections.abc import Sequence
import json
import os
import pathlib

from envace_jax import errors
from envace_jax.benchmarks import results, table
from envace_jax.evaluation import intervals

Values = dict[str, list[float]]  # task id -> success of its attempts

HEAD = (
  'category',
  'policy',
  'tasks',
  'success',
  'minus the first',
  'calls',
  'reply tokens',
  'rehearsal tokens',
)


def read(path: str | os.PathLike) -> tuple[dict, list[results.Result]]:
  """What was measured, and its results, as a finished command left them.

  Raises:
    UserError: there is no such file, or it is torn or none of ours.
  """
  path = pathlib.Path(path)
  if path.is_dir():
    path = path / 'results.jsonl'
  try:
    head, *lines = path.read_text().splitlines()
    measured = json.loads(head)['measured']
    found = [results.Result(**json.loads(line)) for line in lines]
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise errors.UserError(
      f'{path} cannot be read as results ({error}); give what '
      '`envace evaluate --benchmark` wrote, once it has finished'
    ) from error
  return measured, list({one.key: one for one in found}.values())


def compare(paths: Sequence[str | os.PathLike], *, seed: int) -> str:
  """A table in Markdown.

  Raises:
    UserError: a file is wrong, or the benchmarks differ.
  """
  if len(paths) < 2:
    raise errors.UserError('a comparison needs two files of results or more')
  sides = [read(path) for path in paths]
  kinds = [(m['benchmark'], m['version']) for m, _ in sides]
  if len(set(kinds)) > 1:
    other = next(k for k in kinds if k != kinds[0])
    raise errors.UserError(
      f'{" ".join(kinds[0])} and {" ".join(other)} are different tests'
    )
  caps = [measured.get('max_calls') for measured, _ in sides]
  if len(set(caps)) > 1:
    raise errors.UserError(
      f'these are not at equal real calls: their --max_calls are {caps}'
    )
  by_side = [_by_category(found) for _, found in sides]
  lines = []
  # By name: attempts end in any order, and that is the order of a file.
  for category, first in sorted(by_side[0].items()):
    for i, (measured, found) in enumerate(sides):
      mine = by_side[i].get(category, {})
      both = sorted(set(mine) & set(first))
      lines.append(
        (
          category,
          measured['policy'],
          str(len(both)),
          _mean(mine, seed),
          _difference(mine, first, both, seed) if i else '',
          *_costs([one for one in found if one.category == category]),
        )
      )
  return f'{" ".join(kinds[0])}\n\n{table.markdown(HEAD, lines)}'


def _mean(values: Values, seed: int) -> str:
  return table.shown(intervals.bootstrap_mean(values, seed=seed))


def _difference(
  mine: Values, first: Values, both: Sequence[str], seed: int
) -> str:
  one, other = ({task: side[task] for task in both} for side in (mine, first))
  return table.shown(intervals.paired_difference(one, other, seed=seed))


def _costs(found: Sequence[results.Result]) -> list[str]:
  """Of a judged attempt, in the mean, its share of prerequisites included."""
  num_judged = sum(one.is_judged for one in found)
  if not num_judged:
    return ['-'] * 3
  made = [one for one in found if not one.error]
  return [
    f'{sum(values) / num_judged:.1f}'
    for values in (
      [one.calls for one in made],
      [one.tokens_out for one in made],
      [one.rehearsal_tokens for one in made],
    )
  ]


def _by_category(found: Sequence[results.Result]) -> dict[str, Values]:
  """Success of the judged attempts at each task, by category."""
  values: dict[str, Values] = {}
  for one in found:
    if one.is_judged:
      tasks = values.setdefault(one.category, {})
      tasks.setdefault(one.task_id, []).append(float(one.success))
  return values
