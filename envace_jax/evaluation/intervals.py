"""Intervals that respect who was sampled: tasks, and seeds above them.

The samples of one task are not independent, so a bootstrap draw takes tasks
with replacement and every sample of a drawn task together. All statistics are
functions of counts summed over tasks, `f(sum_t c_t)`, hence one resampler
(`bootstrap_counts`) serves means, ratios and correlation coefficients, and
statistics resampled with one seed are resampled alike (paired).

What has no value is None and never 0: a statistic that is 0/0, and the ends of
an interval over fewer than two tasks. Percentile intervals have no width when
all tasks agree, and few tasks make them too narrow.

For comparisons of training runs: two-level bootstrap (seeds, then the tasks of
each), which few seeds make anti-conservative, so paired t and the exact
sign-flip test over seeds are given beside it. The latter's two-sided floor is
2 / 2**n: five seeds can not reach 0.05.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses

import numpy as np
from scipy import special

_BLOCK = 4_000_000  # resampled indices held at a time
_MAX_FLIPS = 20  # 2**20 sign patterns

Values = Mapping[str, Sequence[float]]  # task id -> its samples
Statistic = Callable[[np.ndarray], np.ndarray]  # [..., C] sums -> [...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interval:
  """A point estimate and its 95 % interval over n units (tasks or seeds)."""

  mean: float
  lo: float | None
  hi: float | None
  n: int


def bootstrap_counts(
  counts: np.ndarray,  # [tasks, C]
  statistic: Statistic,
  *,
  seed: int,
  draws: int = 10_000,
) -> Interval | None:
  """Interval of `statistic(counts.sum(0))`, resampling tasks.

  `statistic` marks an undefined value by NaN. None if the point is undefined;
  undefined draws (a draw without any real error, say) are left out.
  """
  counts = _finite(counts, 'counts')
  if len(counts) == 0:
    return None
  with np.errstate(divide='ignore', invalid='ignore'):
    point = float(statistic(counts.sum(0)))
    if np.isnan(point):
      return None
    if len(counts) < 2:
      return Interval(mean=point, lo=None, hi=None, n=len(counts))
    values = statistic(_resampled_sums(counts, seed, draws))
  lo, hi = np.nanpercentile(values, [2.5, 97.5])
  return Interval(mean=point, lo=float(lo), hi=float(hi), n=len(counts))


def bootstrap_mean(
  values_by_task: Values, *, seed: int, draws: int = 10_000
) -> Interval | None:
  """Mean over tasks of the mean of each task's samples; None for no task.

  Every task weighs the same, however many of its samples could be judged.
  """
  means = _task_means(values_by_task)
  counts = np.stack([list(means.values()), np.ones(len(means))], -1)
  return bootstrap_counts(counts, ratio(0, 1), seed=seed, draws=draws)


def wilson(successes: int, n: int) -> Interval | None:
  """Of a share of independent trials; it has width also at 0 and at 1.

  Roots of (p - s/n)^2 = z^2 p (1 - p) / n (Wilson 1927), z the 97.5 % normal
  quantile.
  """
  if not 0 <= successes <= n:
    raise ValueError(f'need 0 <= successes <= n, not {successes=} {n=}')
  if n == 0:
    return None
  z, share = special.ndtri(0.975), successes / n
  centre = (share + z**2 / (2 * n)) / (1 + z**2 / n)
  spread = share * (1 - share) / n + z**2 / (4 * n**2)
  half = z / (1 + z**2 / n) * np.sqrt(spread)
  lo, hi = max(0.0, float(centre - half)), min(1.0, float(centre + half))
  return Interval(mean=share, lo=lo, hi=hi, n=n)


def paired_difference(
  a: Values, b: Values, *, seed: int, draws: int = 10_000
) -> Interval | None:
  """Mean over tasks of a - b; both must hold the same tasks."""
  if odd := set(a) ^ set(b):
    raise ValueError(f'tasks on one side only: {sorted(odd)[:5]}')
  mean_a, mean_b = _task_means(a), _task_means(b)
  difference = {task: [mean_a[task] - mean_b[task]] for task in a}
  return bootstrap_mean(difference, seed=seed, draws=draws)


def seeds_then_tasks(
  matrix: np.ndarray,  # [seeds, tasks], differences that are already paired
  *,
  seed: int,
  draws: int = 10_000,
) -> Interval | None:
  """Two-level bootstrap of the grand mean: seeds, then tasks within each."""
  matrix = _finite(matrix, 'matrix')
  if matrix.ndim != 2:
    raise ValueError(f'matrix has shape {matrix.shape}, not [seeds, tasks]')
  seeds, tasks = matrix.shape
  if matrix.size == 0:
    return None
  if seeds < 2:
    return Interval(mean=float(matrix.mean()), lo=None, hi=None, n=seeds)
  rng = np.random.Generator(np.random.Philox(seed))
  values = []
  for size in _blocks(draws, seeds * tasks):
    row = rng.integers(seeds, size=(size, seeds))
    column = rng.integers(tasks, size=(size, seeds, tasks))
    values.append(matrix[row[..., None], column].mean((1, 2)))
  lo, hi = np.percentile(np.concatenate(values), [2.5, 97.5])
  return Interval(
    mean=float(matrix.mean()), lo=float(lo), hi=float(hi), n=seeds
  )


def paired_t(differences: Sequence[float]) -> tuple[Interval, float | None]:
  """Student interval of the mean over seeds, and its two-sided p."""
  d = _finite(differences, 'differences')
  n = len(d)
  if n < 1:
    raise ValueError('paired_t needs at least one difference')
  mean = float(d.mean())
  if n < 2:
    return Interval(mean=mean, lo=None, hi=None, n=n), None
  error = d.std(ddof=1) / np.sqrt(n)
  half = special.stdtrit(n - 1, 0.975) * error
  interval = Interval(
    mean=mean, lo=float(mean - half), hi=float(mean + half), n=n
  )
  if error == 0:  # t is 0/0, or infinite
    return interval, None if mean == 0 else 0.0
  return interval, float(2 * special.stdtr(n - 1, -abs(mean) / error))


def sign_flip_p(differences: Sequence[float]) -> float:
  """Exact two-sided p: the share of sign patterns at least as extreme."""
  d = _finite(differences, 'differences')
  n = len(d)
  if not 1 <= n <= _MAX_FLIPS:
    raise ValueError(f'{n} differences: exact for 1 to {_MAX_FLIPS}')
  signs = 1 - 2 * (np.arange(2**n)[:, None] >> np.arange(n) & 1)
  # Sums that are equal on paper may differ in the last bit.
  slack = 1e-12 * np.abs(d).sum()
  return float(np.mean(np.abs(signs @ d) >= abs(d.sum()) - slack))


def ratio(numerator: int, denominator: int) -> Statistic:
  """Statistic: column over column; NaN, that is undefined, for 0/0."""
  return lambda sums: sums[..., numerator] / sums[..., denominator]


def cluster(
  task_ids: Sequence[str], counts: np.ndarray
) -> np.ndarray:  # [tasks, C]
  """Sums rows of one task; an empty id is a task of its own."""
  counts = np.asarray(counts, np.float64)
  if len(task_ids) != len(counts):
    raise ValueError(f'{len(task_ids)} task ids for {len(counts)} rows')
  slots: dict[object, int] = {}
  index = [
    slots.setdefault(task or (i,), len(slots))
    for i, task in enumerate(task_ids)
  ]
  sums = np.zeros((len(slots), *counts.shape[1:]))
  np.add.at(sums, np.array(index, np.int64), counts)
  return sums


def _resampled_sums(counts: np.ndarray, seed: int, draws: int) -> np.ndarray:
  """[draws, C] sums over tasks drawn with replacement."""
  rng = np.random.Generator(np.random.Philox(seed))
  n = len(counts)
  sums = []
  for size in _blocks(draws, n):
    index = rng.integers(n, size=(size, n))
    flat = index + n * np.arange(size)[:, None]
    times = np.bincount(flat.ravel(), minlength=size * n).reshape(size, n)
    sums.append(times @ counts)
  return np.concatenate(sums)


def _blocks(draws: int, width: int) -> list[int]:
  """Sizes that sum to `draws`, so that size * width fits in memory."""
  if draws < 1:
    raise ValueError(f'draws={draws} must be positive')
  size = max(1, min(draws, _BLOCK // width))
  rest = draws % size
  return [size] * (draws // size) + ([rest] if rest else [])


def _task_means(values_by_task: Values) -> dict[str, float]:
  for task, values in values_by_task.items():
    if len(values) == 0:
      raise ValueError(f'task {task!r} has no value: leave it out and say so')
  return {
    task: float(_finite(values, f'task {task!r}').mean())
    for task, values in values_by_task.items()
  }


def _finite(values: object, what: str) -> np.ndarray:
  array = np.asarray(values, np.float64)
  if not np.isfinite(array).all():
    raise ValueError(f'{what}: not finite: {array[~np.isfinite(array)][:3]}')
  return array
