"""Policy-gradient surrogates: how far a rollout may be reused, per token.

With x = log p(token) under the policy, y under the policy that it is compared
with, A the advantage and [l, h] = [1 - clip_low, 1 + clip_high]:

  TOKEN     rho_t = exp(x_t - y_t)
            J_t = min(rho_t A, clip(rho_t, l, h) A)
  SEQUENCE  rho_t = exp(mean of x - y over the token's generation)
            J_t as above, the same number for every token of a generation
  CISPO     rho_t as in TOKEN
            J_t = stop_gradient(clip(rho_t, l, h)) A x_t

TOKEN is PPO (Schulman et al. 2017, eq. 7) and, with h - 1 > 1 - l, DAPO's
clip-higher (arXiv 2503.14476). SEQUENCE is GSPO (arXiv 2507.18071), whose
published range is about 3e-4, as a mean over many tokens moves little; a
generation is a maximal run of one role's tokens in a row, not the whole
episode. CISPO (arXiv 2506.13585) never silences a token: it bounds its weight.

A clipped token has no gradient, and clipping is on one side only: where A < 0
a ratio may grow without bound. `dual_clip` = c > 1 stops that (Ye et al. 2020,
arXiv 1912.09729, eq. 5; c = 3): J_t >= c A there.

Sums are over tokens whatever the surrogate. The mean over generations that
GSPO was published with weighs a token by 1 / its generation's length; here,
length counts, as it does for the others, so that the surrogates can be
compared at the same normaliser.
"""

from collections.abc import Mapping
import dataclasses
import enum

import jax
import jax.numpy as jnp

from envace_jax.learning import losses


class Surrogate(enum.Enum):
  TOKEN = 'token'  # clipped ratio of each token: PPO, DAPO
  SEQUENCE = 'sequence'  # clipped ratio of each generation: GSPO
  CISPO = 'cispo'  # bounded, detached weight on log p


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bounds:
  """Where ratios are clipped."""

  low: float  # ratios below 1 - low are clipped
  high: float  # ratios above 1 + high are clipped
  dual: float | None = None  # objective >= dual * A where A < 0


def policy_gradient(
  logp_BT: jax.Array,
  behaviour_BT: jax.Array,
  adv_BT: jax.Array,
  mask_BT: jax.Array,
  *,
  bounds: Bounds,
  surrogate: Surrogate = Surrogate.TOKEN,
  weight_BT: jax.Array | None = None,
) -> tuple[losses.WeightedSum, Mapping[str, losses.WeightedSum]]:
  """Minus the surrogate, summed over the tokens of one role.

  Args:
    logp_BT: log-probs under the policy that is trained.
    behaviour_BT: under the policy it is compared with, at the same
      temperature; then the ratio is 1 until the first update and the gradient
      is A grad logp, whichever the surrogate.
    adv_BT: the advantage of each token.
    mask_BT: tokens sampled in one role. SEQUENCE reads generations off it.
    bounds: the clipping range; `bounds.dual` does nothing to CISPO.
    surrogate: which objective.
    weight_BT: a constant factor per token (`truncated_weights`).

  Returns:
    The loss and, for the log, the share of clipped tokens, the mean ratio, the
    k3 estimate of KL(behaviour || current) and the share of ratios beyond
    exp(+-20); with `bounds.dual`, the share that it stopped.
  """
  raw_BT = losses.masked_difference(logp_BT, behaviour_BT, mask_BT)
  if surrogate is Surrogate.SEQUENCE:
    raw_BT = generation_means(raw_BT, mask_BT)
  limit = losses.MAX_LOG_RATIO
  log_ratio_BT = jnp.clip(raw_BT, -limit, limit)
  ratio_BT = jnp.exp(log_ratio_BT)
  adv_BT = jnp.where(mask_BT, adv_BT.astype(jnp.float32), 0.0)
  bounded_BT = jnp.clip(ratio_BT, 1.0 - bounds.low, 1.0 + bounds.high)
  dual = None
  if surrogate is Surrogate.CISPO:
    is_clipped_BT = bounded_BT != ratio_BT
    selected_BT = jnp.where(mask_BT, logp_BT.astype(jnp.float32), 0.0)
    objective_BT = jax.lax.stop_gradient(bounded_BT) * adv_BT * selected_BT
  else:
    # A select, not jnp.minimum: on-policy every token is a tie, where minimum
    # would route half of the gradient through clip and lose it at its edges.
    is_clipped_BT = bounded_BT * adv_BT < ratio_BT * adv_BT
    objective_BT = adv_BT * jnp.where(is_clipped_BT, bounded_BT, ratio_BT)
    dual = bounds.dual
  metrics = {
    'clip_fraction': losses.masked_sum(is_clipped_BT, mask_BT),
    'ratio': losses.masked_sum(ratio_BT, mask_BT),
    'behaviour_kl': losses.masked_sum(ratio_BT - 1.0 - log_ratio_BT, mask_BT),
    'ratio_overflow': losses.masked_sum(jnp.abs(raw_BT) > limit, mask_BT),
  }
  if dual is not None:
    is_stopped_BT = (adv_BT < 0) & (objective_BT < dual * adv_BT)
    objective_BT = jnp.where(is_stopped_BT, dual * adv_BT, objective_BT)
    metrics['dual_clip_fraction'] = losses.masked_sum(is_stopped_BT, mask_BT)
  if weight_BT is not None:
    objective_BT = jax.lax.stop_gradient(weight_BT) * objective_BT
  return losses.masked_sum(-objective_BT, mask_BT), metrics


def truncated_weights(
  proximal_BT: jax.Array,
  behaviour_BT: jax.Array,
  mask_BT: jax.Array,
  *,
  cap: float,
) -> tuple[jax.Array, Mapping[str, losses.WeightedSum]]:
  """weight_BT = min(p_proximal / p_behaviour, cap), 0 where masked; detached.

  With it, for the log, the mean weight and the share of capped tokens.

  Truncated importance sampling (Ionides 2008) of what the sampler did, as the
  trainer sees it before its first update on the rollout: the two differ in
  kernels, cache or precision, not in parameters. Tokens then enter the
  surrogate by their ratio to `proximal`, and the mismatch by this weight.
  """
  raw_BT = losses.masked_difference(proximal_BT, behaviour_BT, mask_BT)
  limit = losses.MAX_LOG_RATIO
  ratio_BT = jnp.exp(jnp.clip(raw_BT, -limit, limit))
  weight_BT = jnp.where(mask_BT, jnp.minimum(ratio_BT, cap), 0.0)
  metrics = {
    'importance_weight': losses.masked_sum(weight_BT, mask_BT),
    'importance_capped': losses.masked_sum(ratio_BT > cap, mask_BT),
  }
  return jax.lax.stop_gradient(weight_BT), metrics


def generation_means(values_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
  """Each masked token's mean over its run of masked tokens, 0 elsewhere.

  mask    0 1 1 0 1 0        runs {1, 2}, {4}
  values  9 2 4 9 5 9   ->   0 3 3 0 5 0
  """
  T = values_BT.shape[1]
  before_BT = jnp.pad(mask_BT, ((0, 0), (1, 0)))[:, :-1]
  # Run n of a row gets id n; what precedes the first run shares id 0.
  run_BT = jnp.cumsum(mask_BT & ~before_BT, axis=1)

  def spread(values_T, mask_T, run_T):
    add = lambda x_T: jax.ops.segment_sum(
      x_T, run_T, num_segments=T + 1, indices_are_sorted=True
    )
    total = add(jnp.where(mask_T, values_T, 0.0))
    count = add(mask_T.astype(jnp.float32))
    return (total / jnp.maximum(count, 1.0))[run_T]

  # Row by row, so that rows shared out over devices stay where they are.
  means_BT = jax.vmap(spread)(values_BT, mask_BT, run_BT)
  return jnp.where(mask_BT, means_BT, 0.0)
