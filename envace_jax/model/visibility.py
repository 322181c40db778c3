"""What a token sees of its transcript, and how far away: mask and rotation.

Who attends says what a mask is (`attention`): an array, or the structure that
one would be made of.

Both depend on positions alone, so they are made once for all layers without a
window, and once for those with one ("sliding" layers: token t sees the window's
last tokens, itself included). Sliding layers may turn at a frequency of theirs.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from envace_jax.model import attention, rope
from envace_jax.model import config as config_lib

View = tuple[rope.Rotation, attention.Visible]


def of_row(
  config: config_lib.TransformerConfig,
  positions_BT: jax.Array,
  valid_BT: jax.Array | None,
  *,
  rows: int,
) -> tuple[View, View | None]:
  """The views of full and of sliding layers (None: there are none).

  Positions that start again start another transcript.
  """
  T = positions_BT.shape[1]
  who = attention.choose(config, rows, T)
  time_T = jnp.arange(T)
  # Where a token's transcript starts; transcripts of a row differ by it.
  start_BT = time_T[None, :] - positions_BT
  if who == 'splash':
    segment_BT = jnp.broadcast_to(start_BT, (rows, T)).astype(jnp.int32)
    if valid_BT is not None:
      segment_BT = jnp.where(valid_BT, segment_BT, attention.PADDING)
    sees = lambda window: attention.Segments(segment_BT, window)
    return _views(config, positions_BT, sees)
  mask_BTS = start_BT[:, :, None] == start_BT[:, None, :]
  mask_BTS &= jnp.tril(jnp.ones((T, T), bool))[None]
  if valid_BT is not None:
    mask_BTS = mask_BTS & valid_BT[:, None, :]
  sees = _within(mask_BTS, (time_T[:, None] - time_T[None, :])[None])
  if who == 'fused':
    sees = lambda window, mask=sees: attention.FusedMask(mask(window))
  return _views(config, positions_BT, sees)


def of_cache(
  config: config_lib.TransformerConfig, positions_BT: jax.Array, capacity: int
) -> tuple[View, View | None]:
  """The same for tokens that attend to a cache, whose slots are positions."""
  slot_S = jnp.arange(capacity)
  mask_BTS = slot_S[None, None, :] <= positions_BT[:, :, None]
  distance_BTS = positions_BT[:, :, None] - slot_S[None, None, :]
  return _views(config, positions_BT, _within(mask_BTS, distance_BTS))


def _within(mask_BTS, distance_BTS):
  """The mask of a layer, by its window."""
  return lambda window: (
    mask_BTS if window is None else mask_BTS & (distance_BTS < window)
  )


def _views(
  config, positions_BT, sees: Callable[[int | None], attention.Visible]
):
  c = config
  rotation = rope.make_rotation(
    positions_BT, c.head_dim, c.rope_theta, c.rope_scaling
  )
  full = rotation, sees(None)
  if not c.sliding_layers:
    return full, None
  if c.sliding_rope_theta is not None:
    rotation = rope.make_rotation(
      positions_BT, c.head_dim, c.sliding_rope_theta
    )
  return full, (rotation, sees(c.sliding_window))
