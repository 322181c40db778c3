"""pass^k of τ²-Bench: whether a task is solved every time, not once.

  pass^k = mean over tasks of C(c, k) / C(n, k)

with c successes in n trials of a task: an estimate, without bias, of the
probability that k trials all succeed. It falls with k, unlike pass@k.
"""

from collections.abc import Mapping, Sequence
import math


def pass_hat_k(successes: int, trials: int, k: int) -> float:
  """Of one task."""
  if not 1 <= k <= trials:
    raise ValueError(f'k={k} must be from 1 to the {trials} trials')
  if not 0 <= successes <= trials:
    raise ValueError(f'{successes} successes in {trials} trials')
  return math.comb(successes, k) / math.comb(trials, k)


def pass_hat_ks(by_task: Mapping[str, Sequence[bool]]) -> dict[int, float]:
  """k -> pass^k, as far as every task has that many trials.

  Args:
    by_task: task id -> the success of each of its trials.
  """
  if not by_task:
    return {}
  most = min(map(len, by_task.values()))
  return {
    k: math.fsum(
      pass_hat_k(sum(map(bool, trials)), len(trials), k)
      for trials in by_task.values()
    )
    / len(by_task)
    for k in range(1, most + 1)
  }
