"""Advantages: a hand-worked table, and the identities they must satisfy."""

import itertools

import numpy as np
import pytest

from envace_jax.learning import advantages
from envace_jax.learning.advantages import Baseline, Weighting

CELLS = list(itertools.product(Baseline, Weighting))

# Two interleaved groups; counts are (act, rehearse) generations.
REWARDS = np.array([1.0, 0.0, 0.5, 1.0, 0.0])
GROUPS = np.array([7, 3, 7, 3, 7])
COUNTS = np.array([[3, 2], [1, 0], [1, 0], [2, 1], [2, 1]])
SCORED = np.ones(5, bool)


def compute(rewards, groups, counts, scored=None, **options):
  defaults = {
    'baseline': Baseline.ROLE,
    'weighting': Weighting.ROW,
    'leave_one_out': False,
    'std': False,
  }
  scored = np.ones(len(rewards), bool) if scored is None else scored
  return advantages.role_advantages(
    rewards, scored, groups, counts, **(defaults | options)
  )


@pytest.mark.parametrize(
  'baseline, weighting, means_7, means_3',
  [
    # Group 7: rewards 1, .5, 0; act rows 3, 1, 2; rehearse rows 2, 0, 1.
    # Group 3: rewards 0, 1; act rows 1, 2; rehearse rows 0, 1 (singleton).
    (Baseline.ROLE, Weighting.ROW, (3.5 / 6, 2 / 3), (2 / 3, 1.0)),
    (Baseline.ROLE, Weighting.EPISODE, (0.5, 0.5), (0.5, 1.0)),
    (Baseline.SHARED, Weighting.ROW, (5.5 / 9, 5.5 / 9), (0.75, 0.75)),
    (Baseline.SHARED, Weighting.EPISODE, (0.5, 0.5), (0.5, 0.5)),
  ],
)
def test_table_worked_by_hand(baseline, weighting, means_7, means_3):
  means = np.where((GROUPS == 7)[:, None], means_7, means_3)
  expected = np.where(COUNTS > 0, REWARDS[:, None] - means, 0.0)
  got = compute(REWARDS, GROUPS, COUNTS, baseline=baseline, weighting=weighting)
  assert got.dtype == np.float32
  np.testing.assert_allclose(got, expected, atol=1e-7)


def test_leave_one_out_and_std_by_hand():
  rewards, counts = np.array([1.0, 0.0, 0.5]), np.array([[3], [1], [2]])
  got = compute(rewards, np.zeros(3), counts, leave_one_out=True)
  np.testing.assert_allclose(
    got[:, 0], [1 - 1 / 3, 0 - 4 / 5, 0.5 - 3 / 4], atol=1e-7
  )
  got = compute(rewards, np.zeros(3), counts, std=True)
  mean = 4 / 6
  deviation = np.sqrt(
    (3 * (1 - mean) ** 2 + mean**2 + 2 * (0.5 - mean) ** 2) / 6
  )
  np.testing.assert_allclose(got[:, 0], (rewards - mean) / deviation, rtol=1e-5)


def test_published_tables_of_rloo_and_grpo():
  # RLOO (Ahmadian et al. 2024, arXiv 2402.14740, section 3.2): the mean of the
  # others. Rewards 1, 0, 0, 0.5: means of the others 1/6, 1/2, 1/2, 1/3.
  rewards, counts = np.array([1.0, 0.0, 0.0, 0.5]), np.ones((4, 2), int)
  got = compute(rewards, np.zeros(4), counts, leave_one_out=True)
  np.testing.assert_allclose(
    got[:, 0], [5 / 6, -1 / 2, -1 / 2, 1 / 6], atol=1e-7
  )
  # Which is the centred reward times K / (K - 1).
  centred = compute(rewards, np.zeros(4), counts)
  np.testing.assert_allclose(got, centred * 4 / 3, atol=1e-7)
  # GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1.2): over the standard
  # deviation, here that of the group itself (1/K). Rewards 2, 0, 0, 2: mean 1,
  # deviation 1.
  got = compute(np.array([2.0, 0, 0, 2]), np.zeros(4), counts, std=True)
  np.testing.assert_allclose(got[:, 0], [1, -1, -1, 1], rtol=1e-5)


@pytest.mark.parametrize('leave_one_out', [False, True])
@pytest.mark.parametrize('std', [False, True])
def test_equal_rows_make_the_four_cells_bit_equal(leave_one_out, std):
  rng = np.random.default_rng(0)
  rewards = rng.uniform(size=12)
  groups = rng.permutation(np.repeat([0, 1, 2], 4))
  # Equal within a group, not across groups nor across roles.
  counts = np.array([[3, 2], [7, 6], [1, 5]])[groups]
  first, *rest = (
    compute(
      rewards,
      groups,
      counts,
      baseline=baseline,
      weighting=weighting,
      leave_one_out=leave_one_out,
      std=std,
    )
    for baseline, weighting in CELLS
  )
  assert np.abs(first).min() > 0
  for other in rest:
    np.testing.assert_array_equal(first, other)


def test_row_weighting_shifts_the_mean_by_a_covariance():
  rng = np.random.default_rng(1)
  rewards = rng.uniform(size=6)
  counts = rng.integers(1, 9, (6, 2))
  by_row = compute(rewards, np.zeros(6), counts)
  by_episode = compute(
    rewards, np.zeros(6), counts, weighting=Weighting.EPISODE
  )
  for role in range(2):
    n = counts[:, role]
    shift = np.cov(n, rewards, bias=True)[0, 1] / n.mean()
    np.testing.assert_allclose(
      by_episode[:, role] - by_row[:, role], shift, atol=1e-6
    )
  # Row weighting leaves no net push on a role's rows.
  np.testing.assert_allclose((by_row * counts).sum(0), 0, atol=1e-6)


@pytest.mark.parametrize('baseline, weighting', CELLS)
@pytest.mark.parametrize('leave_one_out', [False, True])
@pytest.mark.parametrize('std', [False, True])
@pytest.mark.parametrize('dtype', [np.float16, np.float32, np.float64])
def test_equal_rewards_give_exactly_zero(
  baseline, weighting, leave_one_out, std, dtype
):
  rewards = np.full(7, 0.1, dtype)
  counts = np.array([[3, 1]] * 3 + [[2, 7]] * 3 + [[11, 1]])
  got = compute(
    rewards,
    np.zeros(7),
    counts,
    baseline=baseline,
    weighting=weighting,
    leave_one_out=leave_one_out,
    std=std,
  )
  np.testing.assert_array_equal(got, np.zeros((7, 2)))


@pytest.mark.parametrize('baseline, weighting', CELLS)
@pytest.mark.parametrize('leave_one_out', [False, True])
@pytest.mark.parametrize('std', [False, True])
def test_a_group_of_one_gets_zero(baseline, weighting, leave_one_out, std):
  got = compute(
    np.array([1.0, 0.0, 1.0]),
    np.array([0, 1, 1]),
    np.array([[2, 1], [1, 1], [1, 1]]),
    baseline=baseline,
    weighting=weighting,
    leave_one_out=leave_one_out,
    std=std,
  )
  np.testing.assert_array_equal(got[0], [0, 0])
  assert (got[1] < 0).all() and (got[2] > 0).all()


@pytest.mark.parametrize('baseline, weighting', CELLS)
def test_order_of_episodes_does_not_matter_to_the_bit(baseline, weighting):
  rng = np.random.default_rng(2)
  rewards, groups = rng.uniform(size=20), rng.integers(0, 4, 20)
  counts, scored = rng.integers(0, 5, (20, 2)), rng.uniform(size=20) < 0.8
  options = {'baseline': baseline, 'weighting': weighting, 'std': True}
  straight = compute(rewards, groups, counts, scored, **options)
  order = rng.permutation(20)
  shuffled = compute(
    rewards[order], groups[order], counts[order], scored[order], **options
  )
  np.testing.assert_array_equal(straight[order], shuffled)


@pytest.mark.parametrize('baseline, weighting', CELLS)
@pytest.mark.parametrize('missing', [np.nan, 1e9, 0.0])
def test_unscored_episodes_leave_the_group(baseline, weighting, missing):
  options = {'baseline': baseline, 'weighting': weighting}
  scored = np.array([True, False, True, True])
  counts = np.array([[2, 1], [5, 4], [1, 1], [3, 2]])
  rewards = np.array([1.0, missing, 0.0, 1.0])
  got = compute(rewards, np.zeros(4), counts, scored, **options)
  without = compute(rewards[scored], np.zeros(3), counts[scored], **options)
  np.testing.assert_array_equal(got[scored], without)
  np.testing.assert_array_equal(got[1], [0, 0])


def test_a_score_of_none_is_accepted_only_as_unscored():
  rewards = [1.0, None, 0.0]
  scored = [reward is not None for reward in rewards]
  got = compute(rewards, [0, 0, 0], [[1, 1]] * 3, scored)
  np.testing.assert_array_equal(got[:, 0], [0.5, 0, -0.5])
  with pytest.raises(ValueError, match=r'episodes \[1\] are scored'):
    compute(rewards, [0, 0, 0], [[1, 1]] * 3)


def test_statistics_count_what_cannot_teach():
  stats = advantages.group_statistics(
    # group 0: varied; group 1: equal; group 2: alone; group 3: unscored
    np.array([1.0, 0.0, 0.5, 0.5, 1.0, np.nan, 0.0]),
    np.array([True, True, True, True, True, False, True]),
    np.array([0, 0, 1, 1, 2, 3, 0]),
    np.array([[1, 1], [1, 0], [2, 1], [1, 1], [1, 1], [1, 1], [1, 0]]),
  )
  assert stats.groups == 3
  assert stats.unscored_episodes == 1
  np.testing.assert_array_equal(stats.singleton_groups_R, [1, 2])
  np.testing.assert_array_equal(stats.zero_variance_groups_R, [1, 1])


def test_shapes_that_disagree_are_an_error():
  with pytest.raises(ValueError, match='do not agree'):
    compute(np.ones(3), np.zeros(3), np.ones((2, 2)))
