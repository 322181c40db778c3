"""Dynamic sampling: groups that cannot teach are replaced by further tasks.

A group whose attempts all earned the same has no advantage. DAPO (arXiv
2503.14476, section 3.2) goes on sampling until a batch is full of groups that
differ. Here tasks come from one deterministic order, a batch of `wanted` at a
time, because a rollout has one compiled shape:

  position   0 1 2 3 | 4 5 6 7          wanted = 4
  varied     y n y n | y n y y
  taken      0   2     4   6            drawn 8, dropped 3 (1, 3, 5)
  next cursor                7          position 7 was drawn, and not needed

The cursor ends behind the last group that was looked at, so that a surplus
task is not lost: it is drawn again, afresh, by the next step. It is the only
state; whoever calls stores it with a checkpoint.

When the budget is spent first, the batch is filled up with dropped groups,
oldest first. They have no advantage, but their tokens still count in the
loss's denominator, as they do without dynamic sampling.

Host code, and pure if `collect` is.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Generic, TypeVar

import numpy as np

Group = TypeVar('Group')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Filled(Generic[Group]):
  """A batch of groups and what it took."""

  groups: Sequence[Group]  # `wanted` of them, in the order of their positions
  collected: Sequence[Group]  # all that were sampled
  cursor: int  # where the next step starts
  drawn: int  # groups sampled
  kept: int  # groups that differ, among `groups`
  dropped: int  # groups looked at that do not, refilled with or not
  budget_exhausted: bool  # fewer than `wanted` groups differ


def has_signal(rewards: Sequence[float | None]) -> bool:
  """Whether two scored attempts of a group earned differently."""
  scored = [reward for reward in rewards if reward is not None]
  return bool(scored) and max(scored) > min(scored)


def fill(
  collect: Callable[[int, int], Sequence[Group]],
  teaches: Callable[[Group], bool],
  *,
  cursor: int,
  wanted: int,
  max_draws: int,
) -> Filled[Group]:
  """Draws until `wanted` groups teach, at most `max_draws` times.

  Args:
    collect: (cursor, draw) -> the groups of the `wanted` positions from there.
    teaches: whether a group differs within itself.
    cursor: the first position.
    wanted: groups in a batch, and in a draw.
    max_draws: the budget, the first draw included.
  """
  if min(wanted, max_draws) < 1 or cursor < 0:
    raise ValueError(f'{cursor=} {wanted=} {max_draws=}')
  collected, is_good = [], []
  for draw in range(max_draws):
    groups = list(collect(cursor + draw * wanted, draw))
    if len(groups) != wanted:
      raise ValueError(f'{len(groups)} groups were collected, not {wanted}')
    collected += groups
    is_good += [teaches(group) for group in groups]
    if sum(is_good) >= wanted:
      break
  good = np.flatnonzero(is_good)[:wanted]
  is_full = len(good) == wanted
  looked_at = int(good[-1]) + 1 if is_full else len(collected)
  filler = np.flatnonzero(~np.asarray(is_good))[: wanted - len(good)]
  taken = sorted([*good.tolist(), *filler.tolist()])
  return Filled(
    groups=[collected[i] for i in taken],
    collected=collected,
    cursor=cursor + looked_at,
    drawn=len(collected),
    kept=len(good),
    dropped=looked_at - len(good),
    budget_exhausted=not is_full,
  )
