"""How far the policy has gone from a frozen reference, per sampled token.

With d = log p_ref(token) - log p(token), the estimators of
KL(policy || reference) of http://joschu.net/blog/kl-approx.html:

  K1  -d                 unbiased, may be negative
  K2  d^2 / 2            biased by a term of third order, never negative
  K3  exp(d) - 1 - d     unbiased, never negative
  EXACT                  sum_v p(v) (log p(v) - log p_ref(v)), no sampling

A good estimate is not a good loss. Differentiated through log p of tokens that
the policy has sampled, the expected gradient is

  K1    0: E[grad log p] vanishes, so it only adds noise
  K2    that of KL(policy || reference), exactly
  K3    that of KL(reference || policy)
  EXACT that of KL(policy || reference), without the sampling noise

which follows from d K2 = -d grad log p and d K3 = (1 - exp(d)) grad log p.
None of them differentiates the choice of earlier tokens.
"""

import enum

import jax
import jax.numpy as jnp

from envace_jax.learning import losses


class KLEstimator(enum.Enum):
  K1 = 'k1'
  K2 = 'k2'
  K3 = 'k3'
  EXACT = 'exact'  # over the whole vocabulary: `logprobs.token_logprobs_and_kl`


def k1(
  logp_BT: jax.Array, ref_logp_BT: jax.Array, mask_BT: jax.Array
) -> losses.WeightedSum:
  """Sum of -d. As a loss it has no expected gradient."""
  d_BT = losses.masked_difference(ref_logp_BT, logp_BT, mask_BT)
  return losses.masked_sum(-d_BT, mask_BT)


def k2(
  logp_BT: jax.Array, ref_logp_BT: jax.Array, mask_BT: jax.Array
) -> losses.WeightedSum:
  """Sum of d^2 / 2, whose gradient is bounded: |d| stops at 20."""
  d_BT = losses.masked_difference(ref_logp_BT, logp_BT, mask_BT)
  limit = losses.MAX_LOG_RATIO
  near_BT = jnp.clip(d_BT, -limit, limit)
  # Beyond the limit it goes on as a straight line that still pulls back.
  beyond_BT = jnp.abs(d_BT) - jnp.abs(near_BT)
  return losses.masked_sum(0.5 * near_BT**2 + limit * beyond_BT, mask_BT)


def k3(
  logp_BT: jax.Array, ref_logp_BT: jax.Array, mask_BT: jax.Array
) -> losses.WeightedSum:
  """Sum of exp(d) - 1 - d.

  d is capped from above, not from below, where the estimate is linear and
  pulls back with a bounded force.
  """
  d_BT = losses.masked_difference(ref_logp_BT, logp_BT, mask_BT)
  d_BT = jnp.minimum(d_BT, losses.MAX_LOG_RATIO)
  return losses.masked_sum(jnp.exp(d_BT) - 1.0 - d_BT, mask_BT)


# Of sampled tokens: (logp_BT, ref_logp_BT, mask_BT) -> sum.
SAMPLED = {KLEstimator.K1: k1, KLEstimator.K2: k2, KLEstimator.K3: k3}
