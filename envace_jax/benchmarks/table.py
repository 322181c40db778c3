"""Results by category: rates with intervals over tasks, errors, and cost.

Errored attempts are counted and left out of every rate. `success` and `reward`
are means over tasks of the mean over trials; `hat_k` is pass^k, with k as many
as the trials. A bootstrap over tasks that all agree has no width, so a category
with one trial a task has Wilson's interval, which has. Prerequisites of tasks
are in what was spent, and in nothing else.
"""

from collections.abc import Iterable, Sequence
import dataclasses

from envace_jax.benchmarks import results
from envace_jax.evaluation import intervals, success

HEAD = (
  'category',
  'tasks',
  'success',
  'reward',
  'pass^k',
  'errored',
  'capped',
  'calls',
  'tokens in',
  'tokens out',
  'rehearsal tokens',
  'seconds',
)
ALL = 'all'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """One category, or all of them together."""

  category: str
  tasks: int
  attempts: int
  errored: int
  capped: int
  success: intervals.Interval | None  # None: nothing was judged
  reward: intervals.Interval | None
  hat_k: intervals.Interval | None
  k: int
  unjudged_tasks: Sequence[str]
  calls: int
  tokens_in: int
  tokens_out: int
  rehearsal_tokens: int
  seconds: float


def rows(found: Sequence[results.Result], *, seed: int) -> list[Row]:
  """A row a category, in their order; and one of all, if there are several.

  The last is a sum of what was run, and not a benchmark's own overall score.
  """
  categories = list(dict.fromkeys(result.category for result in found))
  made = [
    _row(name, [r for r in found if r.category == name], seed)
    for name in categories
  ]
  return [*made, _row(ALL, found, seed)] if len(made) > 1 else made


def render(made: Sequence[Row]) -> str:
  """A table in Markdown."""
  return markdown(HEAD, map(_cells, made))


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
  """A table of texts."""
  rows = [head, ['---'] * len(head), *lines]
  return '\n'.join(f'| {" | ".join(row)} |' for row in rows)


def _row(name: str, made: Sequence[results.Result], seed: int) -> Row:
  found = [result for result in made if not result.prerequisite]
  outcomes = [
    (_task(result), None if result.error else result.success)
    for result in found
  ]
  rate = success.success_rate(outcomes, seed=seed)
  rewards: dict[str, list[float]] = {}
  for result in found:
    if not result.error:
      rewards.setdefault(_task(result), []).append(result.reward)
  tasks = {_task(result) for result in found}
  k = len(found) // len(tasks)
  interval = rate.rate
  if k == 1 and interval is not None:
    interval = intervals.wilson(
      sum(result.success for result in found if not result.error),
      rate.num_judged,
    )
  return Row(
    category=name,
    tasks=len(tasks),
    attempts=len(found),
    errored=rate.num_unjudged,
    capped=sum(result.capped for result in made),
    success=interval,
    reward=intervals.bootstrap_mean(rewards, seed=seed),
    hat_k=success.passes(outcomes, k, seed=seed).all_of_k,
    k=k,
    unjudged_tasks=rate.unjudged_tasks,
    calls=sum(result.calls for result in made),
    tokens_in=sum(result.tokens_in for result in made),
    tokens_out=sum(result.tokens_out for result in made),
    rehearsal_tokens=sum(result.rehearsal_tokens for result in made),
    seconds=sum(result.seconds for result in made),
  )


def _task(result: results.Result) -> str:
  return f'{result.category}/{result.task_id}'


def _cells(row: Row) -> list[str]:
  return [
    row.category,
    str(row.tasks),
    shown(row.success),
    shown(row.reward),
    f'{shown(row.hat_k)} (k={row.k})',
    f'{row.errored}/{row.attempts}',
    str(row.capped),
    str(row.calls),
    str(row.tokens_in),
    str(row.tokens_out),
    str(row.rehearsal_tokens),
    f'{row.seconds:.1f}',
  ]


def shown(interval: intervals.Interval | None) -> str:
  """A mean and its interval; '-' for nothing."""
  if interval is None:
    return '-'
  if interval.lo is None:
    return f'{interval.mean:.3f}'
  return f'{interval.mean:.3f} [{interval.lo:.3f}, {interval.hi:.3f}]'
