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

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# exp(20) = 4.9e8. A larger ratio means the two models have nothing in common;
# it would overflow float32 at 88 and drown every other token long before.
MAX_LOG_RATIO = 20.0


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


def negative_log_likelihood(
  logp_BT: jax.Array, mask_BT: jax.Array
) -> WeightedSum:
  """-log p of the recorded tokens, in nats."""
  return masked_sum(-logp_BT, mask_BT)


def masked_difference(
  left_BT: jax.Array, right_BT: jax.Array, mask_BT: jax.Array
) -> jax.Array:
  """left - right where the mask is set, 0 elsewhere, NaN-proof."""
  left_BT = jnp.where(mask_BT, left_BT.astype(jnp.float32), 0.0)
  right_BT = jnp.where(mask_BT, right_BT.astype(jnp.float32), 0.0)
  return left_BT - right_BT
