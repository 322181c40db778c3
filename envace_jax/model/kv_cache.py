"""Keys and values of tokens already read: an explicit argument and result.

Slot == position. Rows are right-padded, row b owns slots [0, length_b), so a
row is extended by writing at length_b and nothing is ever moved:

  length = [3, 1, 4]         row 0  a b c d e .     d, e written at 3, 4
  extend by [2, 3, 0]   ->   row 1  f g h i . .
  capacity S = 6             row 2  j k l m . .     nothing written

Layout is [B, K, S, H]: attention then reads contiguous [S, H] panels, several
times faster in one-token decoding than [B, S, K, H]. One array per layer, not
one stacked array: a stacked cache is copied whole by every step of a loop.
"""

from flax import linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from envace_jax.model import config as config_lib


@flax.struct.dataclass
class KVCache:
  k: tuple[jax.Array, ...]  # one [B, K, S, H] per layer
  v: tuple[jax.Array, ...]
  length: jax.Array  # [B] int32; above capacity: the row has overflowed

  @property
  def capacity(self) -> int:
    return self.k[0].shape[2]


def empty(
  config: config_lib.TransformerConfig, batch: int, capacity: int
) -> KVCache:
  """A cache in which no row owns a slot yet."""
  if capacity > config.max_len:
    raise ValueError(
      f'cache capacity {capacity} exceeds model.max_len={config.max_len}; '
      'raise max_len or shorten the rows'
    )
  shape = (batch, config.num_kv_heads, capacity, config.head_dim)

  def zeros():
    return tuple(
      jnp.zeros(shape, config.compute_dtype) for _ in range(config.num_layers)
    )

  return KVCache(k=zeros(), v=zeros(), length=jnp.zeros((batch,), jnp.int32))


def repeat(cache: KVCache, group_size: int) -> KVCache:
  """Row i becomes rows [i * G, (i + 1) * G): one prefill for a whole group."""
  return jax.tree.map(lambda x: jnp.repeat(x, group_size, axis=0), cache)


def grow(cache: KVCache, capacity: int) -> KVCache:
  """Pads every row with free slots up to `capacity`."""
  extra = capacity - cache.capacity
  if extra < 0:
    raise ValueError(
      f'cannot grow a cache of capacity {cache.capacity} to {capacity}; '
      'pass the larger bucket'
    )
  pad = lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, extra), (0, 0)))
  return cache.replace(
    k=tuple(pad(k) for k in cache.k), v=tuple(pad(v) for v in cache.v)
  )


def write_slots(
  positions_BT: jax.Array, valid_BT: jax.Array | None, capacity: int
) -> jax.Array:
  """Where each token is written; `capacity` means nowhere."""
  # Negative indices would wrap around to the row's last slots.
  writable_BT = positions_BT >= 0
  if valid_BT is not None:
    writable_BT &= valid_BT
  return jnp.where(writable_BT, positions_BT, capacity)


def write(
  cache_BKSH: jax.Array, new_BTKH: jax.Array, slots_BT: jax.Array
) -> jax.Array:
  """Scatters tokens into their slots; slots past the end are dropped.

  Dropped, not clamped: `dynamic_update_slice` would move an overflowing write
  back onto the row's newest real entries.
  """
  rows_B1 = jnp.arange(cache_BKSH.shape[0])[:, None]
  cache_BKSH = cache_BKSH.at[rows_B1, :, slots_BT].set(
    new_BTKH.astype(cache_BKSH.dtype), mode='drop'
  )
  return nn.with_logical_constraint(
    cache_BKSH, ('batch', 'kv_heads', 'time', 'head_dim')
  )
