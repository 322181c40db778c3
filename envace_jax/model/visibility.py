"""What a token sees of its transcript, and how far away: mask and rotation.

Both depend on positions alone, so they are made once for all layers without a
window, and once for those with one ("sliding" layers: token t sees the window's
last tokens, itself included). Sliding layers may turn at a frequency of theirs.
"""

import jax
import jax.numpy as jnp

from envace_jax.model import config as config_lib
from envace_jax.model import rope

View = tuple[rope.Rotation, jax.Array]  # rotation, mask_BTS


def of_row(
  config: config_lib.TransformerConfig,
  positions_BT: jax.Array,
  valid_BT: jax.Array | None,
) -> tuple[View, View | None]:
  """The views of full and of sliding layers (None: there are none).

  Positions that start again start another transcript.
  """
  T = positions_BT.shape[1]
  time_T = jnp.arange(T)
  # Where a token's transcript starts; transcripts of a row differ by it.
  start_BT = time_T[None, :] - positions_BT
  mask_BTS = start_BT[:, :, None] == start_BT[:, None, :]
  mask_BTS &= jnp.tril(jnp.ones((T, T), bool))[None]
  if valid_BT is not None:
    mask_BTS = mask_BTS & valid_BT[:, None, :]
  distance_BTS = (time_T[:, None] - time_T[None, :])[None]
  return _views(config, positions_BT, mask_BTS, distance_BTS)


def of_cache(
  config: config_lib.TransformerConfig, positions_BT: jax.Array, capacity: int
) -> tuple[View, View | None]:
  """The same for tokens that attend to a cache, whose slots are positions."""
  slot_S = jnp.arange(capacity)
  mask_BTS = slot_S[None, None, :] <= positions_BT[:, :, None]
  distance_BTS = positions_BT[:, :, None] - slot_S[None, None, :]
  return _views(config, positions_BT, mask_BTS, distance_BTS)


def _views(config, positions_BT, mask_BTS, distance_BTS):
  c = config
  rotation = rope.make_rotation(
    positions_BT, c.head_dim, c.rope_theta, c.rope_scaling
  )
  full = rotation, mask_BTS
  if not c.sliding_layers:
    return full, None
  if c.sliding_rope_theta is not None:
    rotation = rope.make_rotation(
      positions_BT, c.head_dim, c.sliding_rope_theta
    )
  return full, (rotation, mask_BTS & (distance_BTS < c.sliding_window))
