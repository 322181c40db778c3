"""Group-relative advantages, one per (episode, role).

Episode i of a group (the attempts at one task) earned reward R_i and holds
n_i^r generations of role r. Its advantage in role r is

  A_i^r = R_i - mu^r,    mu^r = sum_j w_j^r R_j / sum_j w_j^r

over the scored episodes j of the group. Two independent choices set w:

                      Weighting.EPISODE           Weighting.ROW
  Baseline.ROLE       w_j^r = [n_j^r > 0]         w_j^r = n_j^r
  Baseline.SHARED     w_j^r = [n_j > 0]           w_j^r = n_j = sum_r n_j^r

"Role-wise" in the published sense (EnvACE, arXiv 2608.06197, eq. 6-7) is
ROLE x ROW: the mean over all *outputs* of one role for one task, so episode
i counts n_i^r times. ROLE x EPISODE separates the roles and nothing else.
With one reward per episode the two differ only by

  mu_ROW^r - mu_EPISODE^r = Cov_i(n^r, R) / mean_i(n^r),

so with equal row counts all four cells are the same numbers, bit for bit.

An unscored episode is not a zero: it leaves every mean and gets advantage 0.
A role with a single episode in its group has nothing to be compared with and
gets 0 (not R), and so does a group whose rewards are all equal, exactly:
rewards are centred on the group's minimum before any division.

Where roles earn different rewards, call once per role with that role's
rewards and keep its column. Host code in float64; sums are exactly rounded
(`math.fsum`), so the order of the episodes cannot change a bit.
"""

import dataclasses
import enum
import math

import numpy as np

# Added to the group's standard deviation, as GRPO does: groups whose rewards
# differ by rounding only are not blown up to unit variance.
_STD_FLOOR = 1e-6


class Baseline(enum.Enum):
  SHARED = 'shared'  # one mean per task
  ROLE = 'role'  # one mean per (task, role)


class Weighting(enum.Enum):
  EPISODE = 'episode'  # each episode counts once
  ROW = 'row'  # each episode counts once per generation


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupStatistics:
  """How much of a batch carries a learning signal, per role where it says R."""

  groups: int  # groups with at least one scored episode
  unscored_episodes: int
  singleton_groups_R: np.ndarray  # one scored episode has that role
  zero_variance_groups_R: np.ndarray  # two or more, all rewards equal


def role_advantages(
  rewards_E: np.ndarray,
  scored_E: np.ndarray,
  groups_E: np.ndarray,
  counts_ER: np.ndarray,
  *,
  baseline: Baseline,
  weighting: Weighting,
  leave_one_out: bool,
  std: bool,
) -> np.ndarray:
  """Returns adv_ER float32; 0 where unscored, alone, or without that role.

  Args:
    rewards_E: one reward per episode; ignored (may be NaN) where unscored.
    scored_E: whether the episode was judged at all.
    groups_E: any integers; episodes of a group need not be adjacent.
    counts_ER: generations of each role in each episode.
    baseline: pool the roles or keep them apart.
    weighting: what one unit of the mean is.
    leave_one_out: compare each episode with the mean of the others.
    std: also divide by the group's weighted standard deviation.
  """
  rewards_E, scored_E, groups_E, counts_ER = _checked(
    rewards_E, scored_E, groups_E, counts_ER
  )
  present_ER = (counts_ER > 0) & scored_E[:, None]
  weights_ER = _weights(counts_ER, baseline, weighting) * scored_E[:, None]
  adv_ER = np.zeros(counts_ER.shape, np.float64)
  for group in np.unique(groups_E):
    for role in range(counts_ER.shape[1]):
      member_E = (groups_E == group) & (weights_ER[:, role] > 0)
      if member_E.sum() > 1:
        adv_ER[member_E, role] = _centred(
          rewards_E[member_E],
          weights_ER[member_E, role],
          leave_one_out=leave_one_out,
          std=std,
        )
  return np.where(present_ER, adv_ER, 0.0).astype(np.float32)


def group_statistics(
  rewards_E: np.ndarray,
  scored_E: np.ndarray,
  groups_E: np.ndarray,
  counts_ER: np.ndarray,
) -> GroupStatistics:
  """Counts the groups that cannot teach, by reason and role."""
  rewards_E, scored_E, groups_E, counts_ER = _checked(
    rewards_E, scored_E, groups_E, counts_ER
  )
  num_roles = counts_ER.shape[1]
  singleton_R = np.zeros(num_roles, np.int64)
  zero_variance_R = np.zeros(num_roles, np.int64)
  for group in np.unique(groups_E):
    for role in range(num_roles):
      member_E = (groups_E == group) & scored_E & (counts_ER[:, role] > 0)
      singleton_R[role] += member_E.sum() == 1
      zero_variance_R[role] += (
        member_E.sum() > 1 and np.ptp(rewards_E[member_E]) == 0
      )
  return GroupStatistics(
    groups=len(np.unique(groups_E[scored_E])),
    unscored_episodes=int((~scored_E).sum()),
    singleton_groups_R=singleton_R,
    zero_variance_groups_R=zero_variance_R,
  )


def _checked(rewards_E, scored_E, groups_E, counts_ER):
  rewards_E = np.asarray(rewards_E, np.float64)
  scored_E = np.asarray(scored_E, bool)
  groups_E = np.asarray(groups_E)
  counts_ER = np.asarray(counts_ER)
  num_episodes = rewards_E.shape[0]
  if not (
    rewards_E.shape == scored_E.shape == groups_E.shape
    and rewards_E.ndim == 1
    and counts_ER.ndim == 2
    and counts_ER.shape[0] == num_episodes
  ):
    raise ValueError(
      f'shapes do not agree on the episodes: rewards {rewards_E.shape}, '
      f'scored {scored_E.shape}, groups {groups_E.shape}, '
      f'counts {counts_ER.shape}'
    )
  if (counts_ER < 0).any():
    raise ValueError(f'negative generation counts: {counts_ER.min()}')
  bad_E = scored_E & ~np.isfinite(rewards_E)
  if bad_E.any():
    raise ValueError(
      f'episodes {np.flatnonzero(bad_E).tolist()} are scored but their '
      f'rewards are {rewards_E[bad_E].tolist()}'
    )
  return rewards_E, scored_E, groups_E, counts_ER


def _weights(counts_ER, baseline, weighting):
  rows_ER = counts_ER.astype(np.float64)
  if baseline is Baseline.SHARED:
    rows_ER = np.broadcast_to(rows_ER.sum(1, keepdims=True), rows_ER.shape)
  if weighting is Weighting.EPISODE:
    rows_ER = (rows_ER > 0).astype(np.float64)
  return rows_ER


def _centred(rewards_K, weights_K, *, leave_one_out, std):
  """Advantages within one (task, role) of K > 1 episodes."""
  # Equal weights become exactly 1, so they cannot leave a trace of rounding.
  weights_K = weights_K / weights_K.max()
  above_K = rewards_K - rewards_K.min()
  mean = _mean(above_K, weights_K)
  if leave_one_out:
    others = ~np.eye(len(rewards_K), dtype=bool)
    mean = np.array([_mean(above_K[o], weights_K[o]) for o in others])
  adv_K = above_K - mean
  if std:
    deviation_K = above_K - _mean(above_K, weights_K)
    adv_K = adv_K / (math.sqrt(_mean(deviation_K**2, weights_K)) + _STD_FLOOR)
  return adv_K


def _mean(values_K, weights_K):
  return math.fsum(values_K * weights_K) / math.fsum(weights_K)
