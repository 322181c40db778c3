"""Verdicts counted by category, and groups of categories as on the leaderboard.

  live          mean over all tasks of its four categories
  multi_turn    mean of the four categories' accuracies
  irrelevance   mean of the two categories' accuracies
  relevance     its one category
  non_live      mean of simple, multiple, parallel and parallel_multiple
  memory        mean of the three stores' accuracies
  memory_kv.student, ...  one store's accuracy in one scenario, which the
                leaderboard does not show

The leaderboard's `simple` is itself the mean of Python, Java and JavaScript;
ours is Python alone and the group is named for it. There is no overall score:
much of it is made of what does not run here. A group is reported when all of
its categories were attempted, and a scenario where all attempts at its category
were judged: an errored one does not say which it was at. An attempt that broke
down through no fault of the policy is counted as errored and kept apart; the
leaderboard's accuracy, used for groups, counts it as wrong.
"""

import collections
from collections.abc import Iterable, Mapping
import dataclasses

from envace_jax.envs import benchmark

_WEIGHTED = {
  'live': (
    'live_simple',
    'live_multiple',
    'live_parallel',
    'live_parallel_multiple',
  )
}
_UNWEIGHTED = {
  'non_live_python': (
    'simple_python',
    'multiple',
    'parallel',
    'parallel_multiple',
  ),
  'irrelevance': ('irrelevance', 'live_irrelevance'),
  'relevance': ('live_relevance',),
  'multi_turn': (
    'multi_turn_base',
    'multi_turn_miss_func',
    'multi_turn_miss_param',
    'multi_turn_long_context',
  ),
  'memory': ('memory_kv', 'memory_vector', 'memory_rec_sum'),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CategoryScore:
  """What became of the attempts at one category."""

  correct: int
  wrong: int
  errored: int
  reasons: Mapping[str, int]  # of the wrong ones, by the benchmark's names

  @property
  def total(self) -> int:
    return self.correct + self.wrong + self.errored

  @property
  def accuracy(self) -> float | None:
    """Over what was judged; None where nothing was."""
    judged = self.correct + self.wrong
    return self.correct / judged if judged else None

  @property
  def leaderboard_accuracy(self) -> float | None:
    """Over everything: an errored attempt is a wrong one."""
    return self.correct / self.total if self.total else None


def category_score(
  outcomes: Iterable[benchmark.Outcome | None],
) -> CategoryScore:
  """Counts verdicts; None stands for an attempt that errored."""
  outcomes = list(outcomes)
  judged = [outcome for outcome in outcomes if outcome is not None]
  wrong = [outcome for outcome in judged if not outcome.success]
  return CategoryScore(
    correct=len(judged) - len(wrong),
    wrong=len(wrong),
    errored=len(outcomes) - len(judged),
    reasons=collections.Counter(outcome.reason for outcome in wrong),
  )


def group_scores(scores: Mapping[str, CategoryScore]) -> dict[str, float]:
  """Accuracy by group, for groups whose categories were all attempted."""
  groups = {}
  for name, categories in (_UNWEIGHTED | _WEIGHTED).items():
    parts = [scores[c] for c in categories if c in scores and scores[c].total]
    if len(parts) < len(categories):
      continue
    if name in _WEIGHTED:
      total = sum(part.total for part in parts)
      groups[name] = sum(part.correct for part in parts) / total
    else:
      accuracies = [part.leaderboard_accuracy for part in parts]
      groups[name] = sum(accuracies) / len(accuracies)
  return groups


def scenario_scores(
  outcomes: Mapping[str, Iterable[benchmark.Outcome | None]],
) -> dict[str, float]:
  """Accuracy by memory category and scenario, where nothing errored."""
  shares: dict[str, list[bool]] = {}
  for category, found in outcomes.items():
    found = list(found)
    if any(one is None or 'scenario' not in one.parts for one in found):
      continue
    for one in found:
      name = f'{category}.{one.parts["scenario"]}'
      shares.setdefault(name, []).append(one.success)
  return {name: sum(some) / len(some) for name, some in shares.items()}
