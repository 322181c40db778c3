"""Attention of queries over keys and values: one call, whoever computes it."""

import jax
import jax.numpy as jnp

# Finite, so that a query with no visible key averages instead of dividing 0/0.
_MASKED = -1e30


def attend(
  q_BTNH: jax.Array,
  k_BKSH: jax.Array,
  v_BKSH: jax.Array,
  mask_BTS: jax.Array,
  *,
  scale: float | None = None,
) -> jax.Array:
  """Softmax attention; query heads [g * K...] share key/value heads.

  `mask_BTS` is True where query t may see slot s (batch may be 1). Query head
  n uses key head n // (N / K). Scores are multiplied by `scale`, by default
  1 / sqrt(H).
  """
  B, T, N, H = q_BTNH.shape
  scale = H**-0.5 if scale is None else scale
  K = k_BKSH.shape[1]
  # One matrix per key head, [G * T, H] x [H, S]: XLA on CPU runs the einsum
  # with separate G and T axes three times slower at T = 1.
  q_BKMH = q_BTNH.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4)
  q_BKMH = q_BKMH.reshape(B, K, N // K * T, H)
  score_BKMS = jnp.einsum(
    'BKMH,BKSH->BKMS', q_BKMH, k_BKSH, preferred_element_type=jnp.float32
  )
  score_BKGTS = score_BKMS.reshape(B, K, N // K, T, -1) * scale
  score_BKGTS = jnp.where(mask_BTS[:, None, None], score_BKGTS, _MASKED)
  weight_BKGTS = jax.nn.softmax(score_BKGTS, axis=-1).astype(v_BKSH.dtype)
  out_BKMH = jnp.einsum(
    'BKMS,BKSH->BKMH', weight_BKGTS.reshape(score_BKMS.shape), v_BKSH
  )
  out_BKGTH = out_BKMH.reshape(B, K, N // K, T, H)
  return out_BKGTH.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)
