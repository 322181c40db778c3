"""M3 and M4: is the rehearsed world kinder than the real one?

M3, per call, from whether an observation is an error and of which class c:

                      rehearsed error   rehearsed OK
    real error              a                b
    real OK                 f                d

  error recall      ER  = a / (a + b)          typed: also c^ = c
  false alarm       FA  = f / (f + d)
  optimism index    OI  = (1 - ER) - FA        in [-1, 1]; > 0 is optimistic
  error-rate deficit ERD = P(real error) - P(rehearsed error) = (b - f) / N
  MCC = (a d - b f) / sqrt((a + b)(f + d)(a + f)(b + d))

Rehearsed text that is not JSON is wrong whatever was real (it falls in b or in
f) and is counted: left out, garbage would be a way not to recall an error. A
metric whose condition never occurs is None: without real errors there is no
error recall, and 0 would read as the worst. On-policy ER alone is confounded
(a better actor leaves other errors): report a frozen probe set too.

M4, per matched attempt at a task, from four scores in [0, 1]: the rehearsed
trajectory under the transcript scorer, R^(t^); its actions replayed in the real
environment under the same scorer, R^(t_replay), and under the environment's own
truth, R(t_replay); and an independent closed-loop real attempt, R(t_real).

  G_total = E R^(t^) - E R(t_real) = G_dyn + G_judge + G_adapt
  G_dyn   = E R^(t^) - E R^(t_replay)       dynamics: same actions, same scorer
  G_judge = E R^(t_replay) - E R(t_replay)      scorer against truth
  G_adapt = E R(t_replay) - E R(t_real)         open against closed loop
  OOR = P(S^ = 1 | S_replay = 0)      UOR = P(S^ = 0 | S_replay = 1)

A gap also closes when R^ merely drops, so the four means stand beside it.

Sources: EnvACE arXiv 2608.06197 (the setting; it reports none of these);
WebWorld 2602.14721 (sycophantic simulators); Word2World 2512.18832 (replaying
simulated actions for real). The definitions are this project's.
"""

from collections.abc import Mapping, Sequence
import dataclasses

import numpy as np

from envace_jax.evaluation import intervals
from envace_jax.tasks import records

OK = 'ok'
UNPARSEABLE = 'unparseable'
_ERROR = 'error:'  # a prefix, so that no tool can name its error 'ok'


@dataclasses.dataclass(frozen=True, kw_only=True)
class ErrorPair:
  """Classes (`outcome_class`) of the two answers to one call."""

  rehearsed: str
  real: str
  task_id: str = ''  # unit of resampling; '' is a unit of its own


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimism:
  num_real_errors: int
  num_real_ok: int
  num_unparseable: int  # rehearsed; counted as wrong
  num_real_unparseable: int  # left out
  error_recall: intervals.Interval | None
  typed_error_recall: intervals.Interval | None
  false_alarm: intervals.Interval | None
  optimism_index: intervals.Interval | None
  error_rate_deficit: intervals.Interval | None
  mcc: intervals.Interval | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gap:
  """`total` is the floating-point sum dyn + judge + adapt, exactly."""

  num_matched: int
  num_unjudged: int  # attempts of which some score is None, left out
  means: Mapping[str, intervals.Interval | None]  # keys: SCORES
  dyn: intervals.Interval | None
  judge: intervals.Interval | None
  adapt: intervals.Interval | None
  total: intervals.Interval | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SuccessErrors:
  num_judged: int
  num_unjudged: int
  over_optimism: intervals.Interval | None  # OOR
  under_rate: intervals.Interval | None  # UOR


SCORES = ('rehearsed', 'replay_transcript', 'replay_real', 'real')


def outcome_class(observation: str) -> str:
  """OK, UNPARSEABLE, or 'error:<type>' for {"error": "<type>", ...}."""
  try:
    value = records.parse_json(observation)
  except (ValueError, RecursionError):
    return UNPARSEABLE
  error = value.get('error') if isinstance(value, dict) else None
  if not error:  # {"error": null} is how many tools report success
    return OK
  return _ERROR + (error if isinstance(error, str) else 'untyped')


def error_agreement(
  pairs: Sequence[ErrorPair], *, seed: int, draws: int = 10_000
) -> Optimism:
  """M3 with intervals over tasks."""
  scored = [pair for pair in pairs if pair.real != UNPARSEABLE]
  counts = np.array([_cell(pair) for pair in scored], np.float64)
  counts = counts.reshape(-1, 5)
  by_task = intervals.cluster([pair.task_id for pair in scored], counts)

  def over_tasks(statistic):
    def of_cells(sums):
      return statistic(*np.moveaxis(sums, -1, 0))

    return intervals.bootstrap_counts(by_task, of_cells, seed=seed, draws=draws)

  real_errors = sum(pair.real != OK for pair in scored)
  return Optimism(
    num_real_errors=real_errors,
    num_real_ok=len(scored) - real_errors,
    num_unparseable=sum(pair.rehearsed == UNPARSEABLE for pair in scored),
    num_real_unparseable=len(pairs) - len(scored),
    error_recall=over_tasks(lambda a, b, f, d, typed: a / (a + b)),
    typed_error_recall=over_tasks(lambda a, b, f, d, typed: typed / (a + b)),
    false_alarm=over_tasks(lambda a, b, f, d, typed: f / (f + d)),
    optimism_index=over_tasks(
      lambda a, b, f, d, typed: b / (a + b) - f / (f + d)
    ),
    error_rate_deficit=over_tasks(
      lambda a, b, f, d, typed: (b - f) / (a + b + f + d)
    ),
    mcc=over_tasks(_mcc),
  )


def _cell(pair: ErrorPair) -> tuple[bool, ...]:
  """a, b, f, d of the table above, and whether the class agrees too."""
  garbage = pair.rehearsed == UNPARSEABLE
  is_error = pair.rehearsed not in (OK, UNPARSEABLE)
  if pair.real != OK:
    return is_error, not is_error, False, False, pair.rehearsed == pair.real
  alarm = is_error or garbage
  return False, False, alarm, not alarm, False


def _mcc(a, b, f, d, typed):
  del typed
  return (a * d - b * f) / np.sqrt((a + b) * (f + d) * (a + f) * (b + d))


def gap(
  task_ids: Sequence[str],
  *,
  rehearsed: Sequence[float | None],
  replay_transcript: Sequence[float | None],
  replay_real: Sequence[float | None],
  real: Sequence[float | None],
  seed: int,
  draws: int = 10_000,
) -> Gap:
  """M4 from four scores per matched attempt; every task weighs the same."""
  columns = (rehearsed, replay_transcript, replay_real, real)
  rows = list(zip(task_ids, *columns, strict=True))
  matched = [row for row in rows if None not in row[1:]]
  table = np.array([[*row[1:], 1] for row in matched], np.float64)
  by_task = intervals.cluster(
    [row[0] for row in matched], table.reshape(-1, len(SCORES) + 1)
  )
  means = by_task[:, :-1] / by_task[:, -1:]  # [tasks, scores]
  counts = np.concatenate([means, np.ones((len(means), 1))], -1)

  def over_tasks(statistic):
    def of_means(sums):
      mean = sums[..., :-1] / sums[..., -1:]
      return statistic(*np.moveaxis(mean, -1, 0))

    return intervals.bootstrap_counts(counts, of_means, seed=seed, draws=draws)

  return Gap(
    num_matched=len(matched),
    num_unjudged=len(rows) - len(matched),
    means={
      name: over_tasks(lambda *scores, i=i: scores[i])
      for i, name in enumerate(SCORES)
    },
    dyn=over_tasks(lambda h, t, r, e: h - t),
    judge=over_tasks(lambda h, t, r, e: t - r),
    adapt=over_tasks(lambda h, t, r, e: r - e),
    total=over_tasks(lambda h, t, r, e: (h - t) + (t - r) + (r - e)),
  )


def success_errors(
  task_ids: Sequence[str],
  *,
  rehearsed: Sequence[bool | None],
  replay: Sequence[bool | None],
  seed: int,
  draws: int = 10_000,
) -> SuccessErrors:
  """OOR and UOR: what a rehearsed success or failure is worth when replayed."""
  rows = list(zip(task_ids, rehearsed, replay, strict=True))
  judged = [row for row in rows if None not in row[1:]]
  cells = [
    (not s and h, not s, s and not h, bool(s))  # h: rehearsed, s: replayed
    for _, h, s in judged
  ]
  by_task = intervals.cluster(
    [row[0] for row in judged], np.array(cells, np.float64).reshape(-1, 4)
  )

  def over_tasks(numerator, denominator):
    statistic = intervals.ratio(numerator, denominator)
    return intervals.bootstrap_counts(
      by_task, statistic, seed=seed, draws=draws
    )

  return SuccessErrors(
    num_judged=len(judged),
    num_unjudged=len(rows) - len(judged),
    over_optimism=over_tasks(0, 1),
    under_rate=over_tasks(2, 3),
  )
