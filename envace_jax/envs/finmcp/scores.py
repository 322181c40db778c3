"""TF1 of FinMCP-Bench: which tools were called, whatever their arguments.

For a sample, gold and predicted are the names of all calls, all turns pooled,
as multisets:

  TP = Σ_name min(gold, predicted)    FN = Σ gold - TP    FP = Σ predicted - TP
  F1 = 2PR / (P + R),  P = TP / (TP + FP),  R = TP / (TP + FN);  0 for 0/0

  micro_f1  from the summed TP, FP and FN: the paper's TF1
  macro_f1  the mean of the samples' F1
  consist   the names are equal, in their order
  emr       the same, the order within a parallel group being free
"""

import collections
from collections.abc import Sequence
import dataclasses
import itertools
import math


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counts:
  """Matches between two multisets of names."""

  tp: int
  fp: int
  fn: int

  @property
  def f1(self) -> float:
    # 2PR / (P + R), with neither a P nor an R that could be 0/0.
    total = 2 * self.tp + self.fp + self.fn
    return 2 * self.tp / total if total else 0.0

  def __add__(self, other: 'Counts') -> 'Counts':
    return Counts(
      tp=self.tp + other.tp, fp=self.fp + other.fp, fn=self.fn + other.fn
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
  """One sample: its gold calls by assistant message, and what was called."""

  gold: Sequence[Sequence[str]]
  predicted: Sequence[str]

  def counts(self) -> Counts:
    gold = collections.Counter(itertools.chain.from_iterable(self.gold))
    predicted = collections.Counter(self.predicted)
    tp = (gold & predicted).total()
    return Counts(tp=tp, fp=predicted.total() - tp, fn=gold.total() - tp)

  def is_consistent(self) -> bool:
    return list(itertools.chain.from_iterable(self.gold)) == list(
      self.predicted
    )

  def is_exact(self) -> bool:
    rest = list(self.predicted)
    for group in self.gold:
      mine, rest = rest[: len(group)], rest[len(group) :]
      if sorted(mine) != sorted(group):
        return False
    return not rest


def pooled(turns: Sequence[Pair]) -> Pair:
  """The turns of one sample as one: a call may come a turn early or late."""
  return Pair(
    gold=[group for turn in turns for group in turn.gold],
    predicted=[name for turn in turns for name in turn.predicted],
  )


def aggregate(samples: Sequence[Pair]) -> dict[str, float]:
  """All four numbers, and the counts behind TF1.

  Raises:
    ValueError: there is no sample.
  """
  if not samples:
    raise ValueError('no sample to score; load some first')
  counts = [sample.counts() for sample in samples]
  total = sum(counts, start=Counts(tp=0, fp=0, fn=0))
  n = len(samples)
  return {
    'micro_f1': total.f1,
    'macro_f1': math.fsum(c.f1 for c in counts) / n,
    'consist': sum(s.is_consistent() for s in samples) / n,
    'emr': sum(s.is_exact() for s in samples) / n,
    'tp': total.tp,
    'fp': total.fp,
    'fn': total.fn,
  }
