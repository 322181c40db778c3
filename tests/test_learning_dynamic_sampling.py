"""Dynamic sampling: the table of its docstring, budgets, and resuming."""

import numpy as np
import pytest

from envace_jax.learning import dynamic_sampling


def fill(teaches, *, cursor=0, wanted=4, max_draws=3, log=None):
  """Groups are their own positions; `teaches` is a set of positions."""

  def collect(position, draw):
    if log is not None:
      log.append((position, draw))
    return range(position, position + wanted)

  return dynamic_sampling.fill(
    collect,
    lambda group: group in teaches,
    cursor=cursor,
    wanted=wanted,
    max_draws=max_draws,
  )


def test_equal_reward_groups_are_replaced_in_order():
  # DAPO (arXiv 2503.14476) section 3.2; the table of the module, by hand.
  log = []
  filled = fill({0, 2, 4, 6, 7}, log=log)
  assert filled.groups == [0, 2, 4, 6]
  assert filled.cursor == 7  # 7 was drawn and not needed: it comes again
  assert log == [(0, 0), (4, 1)]  # a third draw was not needed
  assert (filled.drawn, filled.kept, filled.dropped) == (8, 4, 3)
  assert not filled.budget_exhausted
  assert filled.collected == [0, 1, 2, 3, 4, 5, 6, 7]


def test_a_spent_budget_is_filled_up_with_what_there_is():
  filled = fill({1, 6}, max_draws=2)
  # 1 and 6 teach; 0 and 2 are the oldest that do not; in order of position.
  assert filled.groups == [0, 1, 2, 6]
  assert (filled.drawn, filled.kept, filled.dropped) == (8, 2, 6)
  assert filled.budget_exhausted and filled.cursor == 8
  nothing = fill(set(), max_draws=2)
  assert nothing.groups == [0, 1, 2, 3]
  assert (nothing.kept, nothing.dropped, nothing.cursor) == (0, 8, 8)


@pytest.mark.parametrize('teaches', [set(), {1}, {0, 1, 2, 3}, {2, 3}])
def test_one_draw_keeps_every_group_and_moves_by_a_whole_batch(teaches):
  """Which is how a step went before there was dynamic sampling."""
  filled = fill({8 + t for t in teaches}, cursor=8, max_draws=1)
  assert filled.groups == [8, 9, 10, 11] and filled.cursor == 12
  assert filled.drawn == 4
  assert filled.budget_exhausted == (len(teaches) < 4)


def test_the_cursor_is_all_that_a_resumed_run_needs():
  rng = np.random.default_rng(0)
  teaches = set(np.flatnonzero(rng.uniform(size=400) < 0.4).tolist())

  def steps(cursor, number):
    history = []
    for _ in range(number):
      filled = fill(teaches, cursor=cursor)
      cursor = filled.cursor
      history.append(filled)
    return history

  unbroken = steps(0, 12)
  assert unbroken[:5] + steps(unbroken[4].cursor, 7) == unbroken
  # No task is skipped: what was looked at is one stretch after another.
  looked_at = sum(f.kept + f.dropped for f in unbroken)
  assert looked_at == unbroken[-1].cursor
  used = [g for f in unbroken if not f.budget_exhausted for g in f.groups]
  assert len(used) == len(set(used)) and set(used) <= teaches


@pytest.mark.parametrize(
  'rewards, expected',
  [
    ([1.0, 0.0, 1.0], True),
    ([0.5, 0.5, 0.5], False),
    ([0.5, None, 0.5], False),  # unscored is not a zero
    ([0.5, None, 0.25], True),
    ([None, None], False),
    ([1.0], False),
  ],
)
def test_a_group_teaches_if_two_scored_attempts_differ(rewards, expected):
  assert dynamic_sampling.has_signal(rewards) is expected


def test_what_cannot_work_is_refused():
  with pytest.raises(ValueError, match='max_draws=0'):
    fill(set(), max_draws=0)
  with pytest.raises(ValueError, match='3 groups were collected, not 4'):
    dynamic_sampling.fill(
      lambda position, draw: range(3), bool, cursor=0, wanted=4, max_draws=1
    )
