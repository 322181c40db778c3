"""`envace compare`: arms of a sweep against each other, seeds and tasks paired.

Reads the task-level tables of finished runs (`evaluations/*.json`) under one
directory. Runs that differ in nothing but the seed are one arm. A difference is
taken task by task within a seed, then averaged; its interval is a two-level
bootstrap over seeds and tasks (`evaluation.intervals`), with the exact
sign-flip p over seeds beside it. Only seeds that both sides have are used.
"""

import collections
from collections.abc import Mapping
import dataclasses
import json
import pathlib
import sys

import numpy as np
import rich.console
import rich.table

from envace_jax import errors, workdirs
from envace_jax.evaluation import intervals

TABLES = ('sampled/iid', 'greedy/iid', 'sampled/ood', 'greedy/ood')
_SEED = 0
# What may differ between the runs of one arm.
_NOT_AN_ARM = ('seed', 'warm_start.workdir', 'private.attempts')

Outcomes = Mapping[str, float]  # task id -> mean success over its samples


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  arm: str
  seed: int
  before: Mapping[str, Outcomes]  # by table
  after: Mapping[str, Outcomes]


def run(directory: str) -> int:
  """Prints the comparison as a table and as JSON; returns the exit code."""
  runs = load(pathlib.Path(directory))
  arms = collections.defaultdict(dict)
  for one in runs:
    arms[one.arm][one.seed] = one
  console = rich.console.Console()
  records = []
  for table in TABLES:
    shown = rich.table.Table(title=f'real success, {table}')
    for column in ('arm', 'seeds', 'before', 'after', 'after - before', 'p'):
      shown.add_column(column)
    for arm, seeds in arms.items():
      change = difference(
        [(r.after[table], r.before[table]) for r in seeds.values()]
      )
      means = [
        np.mean([np.mean(list(side[table].values())) for side in sides])
        for sides in (
          [r.before for r in seeds.values()],
          [r.after for r in seeds.values()],
        )
      ]
      shown.add_row(
        arm, str(len(seeds)), *(f'{mean:.3f}' for mean in means), *_text(change)
      )
      records.append({'table': table, 'arm': arm, 'against': 'warm start'}
                     | change)  # fmt: skip
    console.print(shown)
    records += _between(arms, table, console)
  sys.stdout.write(json.dumps(records, indent=1) + '\n')
  return 0


def _between(arms, table: str, console) -> list[dict]:
  """The first arm against every other, after training."""
  first, *others = arms
  if not others:
    return []
  shown = rich.table.Table(title=f'{first}, minus ({table}, after)')
  for column in ('arm', 'seeds', 'difference', 'p'):
    shown.add_column(column)
  records = []
  for arm in others:
    seeds = sorted(set(arms[first]) & set(arms[arm]))
    if not seeds:
      continue
    change = difference(
      [(arms[first][s].after[table], arms[arm][s].after[table]) for s in seeds]
    )
    shown.add_row(arm, str(len(seeds)), *_text(change))
    records.append({'table': table, 'arm': first, 'against': arm} | change)
  console.print(shown)
  return records


def difference(pairs: list[tuple[Outcomes, Outcomes]]) -> dict:
  """Mean of left minus right over seeds and tasks, with interval and p."""
  tasks = sorted(set.intersection(*({*a} & {*b} for a, b in pairs)))
  matrix = np.asarray([[a[t] - b[t] for t in tasks] for a, b in pairs])
  interval = intervals.seeds_then_tasks(matrix, seed=_SEED)
  return {
    'seeds': len(pairs),
    'tasks': len(tasks),
    'mean': interval.mean,
    'lo': interval.lo,
    'hi': interval.hi,
    'p': intervals.sign_flip_p(matrix.mean(1).tolist()),
    'by_seed': [round(x, 4) for x in matrix.mean(1).tolist()],
  }


def load(directory: pathlib.Path) -> list[Run]:
  """Every finished run below a directory, arms in order of their names.

  Raises:
    UserError: there is none.
  """
  found = []
  for file in sorted(directory.glob('**/config.json')):
    workdir = file.parent
    evaluations = [
      workdir / 'evaluations' / f'{name}.json'
      for name in ('warm_start', 'after')
    ]
    config = json.loads(file.read_text())
    borrowed = config['warm_start']['workdir']
    if borrowed and not evaluations[0].exists():
      evaluations[0] = (
        pathlib.Path(borrowed) / 'evaluations' / 'warm_start.json'
      )
    if all(path.exists() for path in evaluations):
      before, after = (_outcomes(path) for path in evaluations)
      found.append((config, before, after))
  if not found:
    raise errors.UserError(
      f'{directory} holds no finished run (evaluations/after.json); '
      'give the directory of a sweep'
    )
  flats = [workdirs.flat(config) for config, _, _ in found]
  varied = sorted(
    key
    for key in set().union(*flats)
    if key not in _NOT_AN_ARM
    and len({repr(flat.get(key)) for flat in flats}) > 1
  )
  runs = []
  for (config, before, after), flat in zip(found, flats, strict=True):
    arm = ', '.join(f'{key}={flat.get(key)}' for key in varied) or 'the run'
    runs.append(Run(arm=arm, seed=config['seed'], before=before, after=after))
  return sorted(runs, key=lambda one: (one.arm, one.seed))


def _outcomes(path: pathlib.Path) -> dict[str, Outcomes]:
  """Judged attempts per task, averaged; unjudged ones are left out."""
  tables = json.loads(path.read_text())['outcomes']
  means = {}
  for name, rows in tables.items():
    by_task = collections.defaultdict(list)
    for task, success in rows:
      if success is not None:
        by_task[task].append(float(success))
    means[name] = {task: float(np.mean(v)) for task, v in by_task.items()}
  return means


def _text(change: dict) -> tuple[str, str]:
  if change['lo'] is None:
    return f'{change["mean"]:+.3f}', f'{change["p"]:.3f}'
  return (
    f'{change["mean"]:+.3f} [{change["lo"]:+.3f}, {change["hi"]:+.3f}]',
    f'{change["p"]:.3f}',
  )
