"""`envace compare`: arms of a sweep against each other, seeds and tasks paired.

Reads the task-level tables of finished runs (`evaluations/*.json`) under one
directory. Runs that differ in nothing but the seed are one arm. A difference is
taken task by task within a seed, then averaged; its interval is a two-level
bootstrap over seeds and tasks (`evaluation.intervals`), with the exact
sign-flip p over seeds beside it. Only seeds that both sides have are used.

Honesty and private rehearsal are compared between seeds: a measure of a run is
one number, and its interval a paired t over seeds.
"""

import collections
from collections.abc import Mapping, Sequence
import dataclasses
import itertools
import json
import pathlib
import sys

from absl import logging
import numpy as np
import rich.console
import rich.table

from envace_jax import errors, workdirs
from envace_jax.evaluation import intervals

TABLES = ('sampled/iid', 'greedy/iid', 'sampled/ood', 'greedy/ood')
MEASURES = (
  'rehearsed_success',
  'gap',
  'fidelity',
  'error_recall',
  'optimism_index',
)
_SEED = 0
# What may differ between the runs of one arm. Host and device rollouts give the
# same tokens.
_NOT_AN_ARM = (
  'seed',
  'warm_start.workdir',
  'private.attempts',
  'evaluation.every',
  'rollout.mode',
)

Outcomes = Mapping[str, float]  # task id -> mean success over its samples


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  arm: str
  seed: int
  before: Mapping[str, Outcomes]  # by table
  after: Mapping[str, Outcomes]
  measured: tuple[dict, dict]  # evaluations/*.json, before and after
  private: Sequence[dict] = ()  # lines of `evaluate --private`, where made


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
      if change is None:  # nothing was executed
        continue
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
    if shown.row_count:
      console.print(shown)
    records += _between(arms, table, console)
  for arm, seeds in arms.items():
    records += _measures(arm, list(seeds.values()), console)
    records += _private(arm, list(seeds.values()), console)
    records += _private_study(arm, list(seeds.values()), console)
  sys.stdout.write(json.dumps(records, indent=1) + '\n')
  return 0


def _between(arms, table: str, console) -> list[dict]:
  """Every arm against every other, after training."""
  shown = rich.table.Table(title=f'arm minus another ({table}, after)')
  for column in ('arm', 'another', 'seeds', 'difference', 'p'):
    shown.add_column(column)
  records = []
  for arm, other in itertools.combinations(arms, 2):
    seeds = sorted(set(arms[arm]) & set(arms[other]))
    if not seeds:
      continue
    change = difference(
      [(arms[arm][s].after[table], arms[other][s].after[table]) for s in seeds]
    )
    if change is None:
      continue
    shown.add_row(arm, other, str(len(seeds)), *_text(change))
    records.append({'table': table, 'arm': arm, 'against': other} | change)
  if records:
    console.print(shown)
  return records


def _measures(arm: str, runs: list[Run], console) -> list[dict]:
  """What became of the rehearsed world's honesty."""
  shown = rich.table.Table(title=f'{arm}: honesty, {len(runs)} seeds')
  for column in ('measure', 'before', 'after', 'after - before', 'p'):
    shown.add_column(column)
  records = []
  for name in MEASURES:
    pairs = [
      tuple(side[name]['mean'] for side in run.measured)
      for run in runs
      if all(
        side.get(name, {}).get('mean') is not None for side in run.measured
      )
    ]
    if not pairs:
      continue
    change = _over_seeds([after - before for before, after in pairs])
    means = [f'{np.mean(side):.3f}' for side in zip(*pairs, strict=True)]
    shown.add_row(name, *means, *_text(change))
    records.append({'table': name, 'arm': arm, 'against': 'before'} | change)
  if records:
    console.print(shown)
  return records


def _private(arm: str, runs: list[Run], console) -> list[dict]:
  """Private rehearsal against plain execution, at equal real calls."""
  shown = rich.table.Table(title=f'{arm}: private rehearsal')
  for column in (
    'policy', 'calls', 'seeds', 'plain', 'rehearsed', 'placebo',
    'rehearsed - plain', 'p',
  ):  # fmt: skip
    shown.add_column(column)
  records = []
  for phase, policy in enumerate(('warm start', 'after')):
    by_cap = collections.defaultdict(list)
    for run in runs:
      for line in run.measured[phase].get('private_rehearsal_by_cap', ()):
        means = {k: line[k]['mean'] for k in ('plain', 'rehearsed', 'placebo')}
        if None not in means.values():
          by_cap[line['cap']].append(means)
    for cap, lines in by_cap.items():
      change = _over_seeds(
        [line['rehearsed'] - line['plain'] for line in lines]
      )
      means = [f'{np.mean([line[k] for line in lines]):.3f}' for k in lines[0]]
      shown.add_row(policy, str(cap), str(len(lines)), *means, *_text(change))
      records.append(
        {'table': f'private/{cap}', 'arm': f'{arm}, {policy}',
         'against': 'plain'} | change
      )  # fmt: skip
  if records:
    console.print(shown)
  return records


def _private_study(arm: str, runs: list[Run], console) -> list[dict]:
  """Every line of `envace evaluate --private` against the executor's plain."""
  shown = rich.table.Table(title=f'{arm}: private rehearsal in full')
  for column in (
    'executor', 'line', 'calls', 'seeds', 'success', 'minus plain', 'p',
    'real calls', 'tokens', 's / task',
  ):  # fmt: skip
    shown.add_column(column)
  by_line = collections.defaultdict(list)
  for run in runs:
    plain = {
      (line['executor'], at['cap']): at['success']['mean']
      for line in run.private
      if line['arm'] == 'plain'
      for at in line['by_cap']
    }
    for line in run.private:
      for at in line['by_cap']:
        where = line['executor'], at['cap']
        key = line['executor'], _line_name(line), at['cap']
        rate = at['success']['mean']
        by_line[key].append((line, rate, rate - plain[where]))
  records = []
  for (executor, name, cap), found in by_line.items():
    change = _over_seeds([difference for _, _, difference in found])
    mean = lambda key, found=found: np.mean([line[key] for line, *_ in found])
    success = np.mean([rate for _, rate, _ in found])
    tokens = mean('rehearsed_tokens') + mean('committed_tokens')
    shown.add_row(
      executor, name, str(cap), str(len(found)), f'{success:.3f}',
      *_text(change), f'{mean("real_calls"):.2f}', f'{tokens:.0f}',
      f'{mean("seconds"):.2f}',
    )  # fmt: skip
    records.append(
      {'table': f'private in full/{cap}', 'arm': f'{arm}, {executor}, {name}',
       'against': 'plain', 'success': success} | change
    )  # fmt: skip
  if records:
    console.print(shown)
  return records


def _line_name(line: Mapping) -> str:
  """What tells the lines of one executor apart."""
  if 'rehearser' not in line:
    return line['arm']
  who = 'itself' if line['rehearser'] == line['executor'] else line['rehearser']
  return (
    f'{line["arm"]}: {line["attempts"]} by {who}, {line["mode"]}, '
    f'{line["memory"]}'
  )


def _over_seeds(differences: list[float]) -> dict:
  """Mean over seeds, its t interval and the exact sign-flip p."""
  interval, _ = intervals.paired_t(differences)
  return {
    'seeds': len(differences),
    'mean': interval.mean,
    'lo': interval.lo,
    'hi': interval.hi,
    'p': intervals.sign_flip_p(differences),
    'by_seed': [round(x, 4) for x in differences],
  }


def difference(pairs: list[tuple[Outcomes, Outcomes]]) -> dict | None:
  """Mean of left minus right over seeds and tasks, with interval and p.

  None where no task was measured on both sides of every seed.
  """
  tasks = sorted(set.intersection(*({*a} & {*b} for a, b in pairs)))
  if not tasks:
    return None
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
    files = [
      workdir / 'evaluations' / f'{name}.json'
      for name in ('warm_start', 'after')
    ]
    config = json.loads(file.read_text())
    borrowed = config['warm_start']['workdir']
    if borrowed and not files[0].exists():
      files[0] = pathlib.Path(borrowed) / 'evaluations' / 'warm_start.json'
    if missing := [str(path) for path in files if not path.exists()]:
      logging.warning('%s is left out: no %s', workdir, ', '.join(missing))
      continue
    study = workdir / workdirs.PRIVATE_STUDY_FILE
    lines = json.loads(study.read_text())['lines'] if study.exists() else ()
    found.append(
      (config, *(json.loads(path.read_text()) for path in files), lines)
    )
  if not found:
    raise errors.UserError(
      f'{directory} holds no finished run (evaluations/after.json); '
      'give the directory of a sweep'
    )
  flats = [workdirs.flat(config) for config, *_ in found]
  varied = sorted(
    key
    for key in set().union(*flats)
    if key not in _NOT_AN_ARM
    and len({repr(flat.get(key)) for flat in flats}) > 1
  )
  runs = []
  for (config, before, after, lines), flat in zip(found, flats, strict=True):
    arm = ', '.join(f'{key}={flat.get(key)}' for key in varied) or 'the run'
    runs.append(
      Run(
        arm=arm,
        seed=config['seed'],
        before=_outcomes(before),
        after=_outcomes(after),
        measured=(before, after),
        private=lines,
      )
    )
  return sorted(runs, key=lambda one: (one.arm, one.seed))


def _outcomes(measured: dict) -> dict[str, Outcomes]:
  """Judged attempts per task, averaged; unjudged ones are left out."""
  means = {}
  for name, rows in measured['outcomes'].items():
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
