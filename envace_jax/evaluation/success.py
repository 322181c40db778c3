"""How often tasks succeed, and what that cost.

An outcome is (task id, success), success None for an attempt that errored or
could not be judged. Such attempts are counted and never called failures; all
denominators are judged attempts. Per task with n judged attempts of which c
succeeded,

  success = c / n
  pass@k  = 1 - C(n - c, k) / C(n, k)   any of k succeeds (Chen et al. 2021,
                                        arXiv 2107.03374, unbiased)
  pass^k  = C(c, k) / C(n, k)           all of k succeed (tau-bench,
                                        arXiv 2406.12045, unbiased)

and each is averaged over tasks, every task weighing the same. These are not
the plug-in estimates 1 - (1 - c/n)**k and (c/n)**k, which are biased.
"""

from collections import Counter
from collections.abc import Sequence
import dataclasses
import math

from envace_jax import types
from envace_jax.evaluation import intervals

Outcome = tuple[str, bool | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SuccessRate:
  rate: intervals.Interval | None  # None: nothing could be judged
  num_judged: int
  num_unjudged: int
  unjudged_tasks: Sequence[str]  # tasks without a single judged attempt


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassAtK:
  """`short_tasks` lost attempts to errors, have fewer than k, are left out."""

  k: int
  any_of_k: intervals.Interval | None  # pass@k
  all_of_k: intervals.Interval | None  # pass^k
  short_tasks: Sequence[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spending:
  """What the given episodes cost; pass private rehearsals too."""

  num_episodes: int
  real_calls: int
  act_tokens: int
  rehearse_tokens: int
  all_tokens: int  # prompts and forced tokens included
  real_calls_per_task: intervals.Interval | None
  sampled_tokens_per_task: intervals.Interval | None  # act and rehearse


def success_rate(
  outcomes: Sequence[Outcome], *, seed: int, draws: int = 10_000
) -> SuccessRate:
  """Mean over tasks of c / n, and who is missing from it."""
  attempts = _by_task(outcomes)
  judged = {task: _judged(values) for task, values in attempts.items()}
  num_judged = sum(map(len, judged.values()))
  return SuccessRate(
    rate=intervals.bootstrap_mean(
      {task: values for task, values in judged.items() if values},
      seed=seed,
      draws=draws,
    ),
    num_judged=num_judged,
    num_unjudged=len(outcomes) - num_judged,
    unjudged_tasks=tuple(t for t, values in judged.items() if not values),
  )


def pass_at_k(n: int, c: int, k: int) -> float:
  """1 - C(n - c, k) / C(n, k): of k drawn from n attempts, any succeeds."""
  _check(n, c, k)
  return 1 - math.comb(n - c, k) / math.comb(n, k)


def pass_hat_k(n: int, c: int, k: int) -> float:
  """C(c, k) / C(n, k): of k drawn from n attempts, all succeed."""
  _check(n, c, k)
  return math.comb(c, k) / math.comb(n, k)


def passes(
  outcomes: Sequence[Outcome], k: int, *, seed: int, draws: int = 10_000
) -> PassAtK:
  """pass@k and pass^k over tasks; too few *attempts* anywhere is an error."""
  any_of_k, all_of_k, short = {}, {}, []
  for task, values in _by_task(outcomes).items():
    if len(values) < k:
      raise ValueError(
        f'pass@{k}: task {task!r} was attempted {len(values)} times; lower k '
        'or attempt each task more often'
      )
    judged = _judged(values)
    n, c = len(judged), sum(judged)
    if n < k:
      short.append(task)
      continue
    any_of_k[task] = [pass_at_k(n, c, k)]
    all_of_k[task] = [pass_hat_k(n, c, k)]
  if k < 1:
    raise ValueError(f'k={k} must be at least 1')
  return PassAtK(
    k=k,
    any_of_k=intervals.bootstrap_mean(any_of_k, seed=seed, draws=draws),
    all_of_k=intervals.bootstrap_mean(all_of_k, seed=seed, draws=draws),
    short_tasks=tuple(short),
  )


def spending(
  episodes: Sequence[types.Episode], *, seed: int, draws: int = 10_000
) -> Spending:
  """Real calls and tokens, summed, and per task over all its episodes."""
  tokens, calls = Counter(), Counter()
  author_tokens = Counter()
  for episode in episodes:
    counts = Counter(
      author for row in episode.rows for author in row.authors.tolist()
    )
    author_tokens += counts
    sampled = counts[types.Author.ACT] + counts[types.Author.REHEARSE]
    tokens[episode.task_id] += sampled
    calls[episode.task_id] += episode.real_calls
  return Spending(
    num_episodes=len(episodes),
    real_calls=calls.total(),
    act_tokens=author_tokens[types.Author.ACT],
    rehearse_tokens=author_tokens[types.Author.REHEARSE],
    all_tokens=author_tokens.total(),
    real_calls_per_task=_mean(calls, seed, draws),
    sampled_tokens_per_task=_mean(tokens, seed, draws),
  )


def _mean(total: Counter, seed: int, draws: int) -> intervals.Interval | None:
  values = {task: [value] for task, value in total.items()}
  return intervals.bootstrap_mean(values, seed=seed, draws=draws)


def _by_task(outcomes: Sequence[Outcome]) -> dict[str, list[bool | None]]:
  attempts: dict[str, list[bool | None]] = {}
  for task, success in outcomes:
    # A reward of 0.7 passed for a success would average without a word.
    if success not in (True, False, None):
      raise ValueError(f'task {task!r}: success={success!r} is no bool or None')
    attempts.setdefault(task, []).append(success)
  return attempts


def _judged(values: Sequence[bool | None]) -> list[bool]:
  return [value for value in values if value is not None]


def _check(n: int, c: int, k: int) -> None:
  if not (1 <= k <= n and 0 <= c <= n):
    raise ValueError(f'need 1 <= k <= n and 0 <= c <= n, not {n=} {c=} {k=}')
