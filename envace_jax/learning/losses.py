"""Per-token losses as (sum, count): nobody divides here.

A mean taken inside a microbatch, a role or a host cannot be merged with
another one. Every function returns sums over the tokens its mask selects and
the number of those tokens; `learning.step` divides once, by a denominator of
the whole batch, and says which.

Masks select, they never multiply: a masked token takes the value 0 *before*
any difference or exponential, so whatever is stored there (a sentinel, -inf,
NaN) reaches neither the value nor the gradient, which is exactly 0.
Everything is float32.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# exp(20) = 4.9e8. A larger ratio means the two models have nothing in common;
# it would overflow float32 at 88 and drown every other token long before.
_MAX_LOG_RATIO = 20.0


class WeightedSum(NamedTuple):
  """A sum over `count` tokens; add two of them field by field."""

  total: jax.Array
  count: jax.Array

  def mean(self) -> jax.Array:
    """Mean over the tokens, 0 where there were none."""
    return self.total / jnp.maximum(self.count, 1.0)


# Of something that was not computed. Host scalars: no backend at import.
ZERO = WeightedSum(np.float32(0.0), np.float32(0.0))


def masked_sum(values_BT: jax.Array, mask_BT: jax.Array) -> WeightedSum:
  """Sums `values_BT` where the mask is set."""
  selected_BT = jnp.where(mask_BT, values_BT.astype(jnp.float32), 0.0)
  return WeightedSum(selected_BT.sum(), mask_BT.sum(dtype=jnp.float32))


def policy_gradient(
  logp_BT: jax.Array,
  behaviour_BT: jax.Array,
  adv_BT: jax.Array,
  mask_BT: jax.Array,
  *,
  clip_low: float,
  clip_high: float,
) -> tuple[WeightedSum, Mapping[str, WeightedSum]]:
  """Clipped surrogate of PPO (Schulman et al. 2017, eq. 7), per token.

    rho = exp(logp - behaviour)
    loss = -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)

  The ratio is per token. Both log-probs must be of the distribution that was
  sampled from (the same temperature); then rho = 1 until the first update
  and the gradient is A grad logp. Returns the loss and, for the log, the
  share of clipped tokens, the mean ratio, the k3 estimate of
  KL(behaviour || current) and the share of ratios beyond exp(+-20).
  """
  raw_BT = _masked_difference(logp_BT, behaviour_BT, mask_BT)
  log_ratio_BT = jnp.clip(raw_BT, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
  ratio_BT = jnp.exp(log_ratio_BT)
  adv_BT = jnp.where(mask_BT, adv_BT.astype(jnp.float32), 0.0)
  bounded_BT = jnp.clip(ratio_BT, 1.0 - clip_low, 1.0 + clip_high)
  # A select, not jnp.minimum: on-policy every token is a tie, where minimum
  # would route half of the gradient through clip and lose it at its edges.
  is_clipped_BT = bounded_BT * adv_BT < ratio_BT * adv_BT
  objective_BT = adv_BT * jnp.where(is_clipped_BT, bounded_BT, ratio_BT)
  metrics = {
    'clip_fraction': masked_sum(is_clipped_BT, mask_BT),
    'ratio': masked_sum(ratio_BT, mask_BT),
    'behaviour_kl': masked_sum(ratio_BT - 1.0 - log_ratio_BT, mask_BT),
    'ratio_overflow': masked_sum(jnp.abs(raw_BT) > _MAX_LOG_RATIO, mask_BT),
  }
  return masked_sum(-objective_BT, mask_BT), metrics


def kl_k3(
  logp_BT: jax.Array, ref_logp_BT: jax.Array, mask_BT: jax.Array
) -> WeightedSum:
  """Schulman's k3 estimate of KL(policy || reference), per sampled token.

    k3 = exp(d) - 1 - d,    d = ref_logp - logp

  Unbiased when the tokens come from the policy and never negative
  (http://joschu.net/blog/kl-approx.html). The gradient flows through `logp`
  only as far as the caller lets it; d is capped from above, not from below,
  where the estimate is linear and pulls back with a bounded force.
  """
  d_BT = _masked_difference(ref_logp_BT, logp_BT, mask_BT)
  d_BT = jnp.minimum(d_BT, _MAX_LOG_RATIO)
  return masked_sum(jnp.exp(d_BT) - 1.0 - d_BT, mask_BT)


def negative_log_likelihood(
  logp_BT: jax.Array, mask_BT: jax.Array
) -> WeightedSum:
  """-log p of the recorded tokens, in nats."""
  return masked_sum(-logp_BT, mask_BT)


def _masked_difference(left_BT, right_BT, mask_BT):
  """left - right where the mask is set, 0 elsewhere, NaN-proof."""
  left_BT = jnp.where(mask_BT, left_BT.astype(jnp.float32), 0.0)
  right_BT = jnp.where(mask_BT, right_BT.astype(jnp.float32), 0.0)
  return left_BT - right_BT
