"""Keys and values of tokens already read: an explicit argument and result.

Slot == position. Rows are right-padded, row b owns slots [0, length_b), so a
row is extended by writing at length_b and nothing is ever moved:

  length = [3, 1, 4]         row 0  a b c d e .     d, e written at 3, 4
  extend by [2, 3, 0]   ->   row 1  f g h i . .
  capacity S = 6             row 2  j k l m . .     nothing written

Keys lie as [B, K, H, S] and values as [B, K, S, H]: the products of attention
then read both in the order in which they lie. In one-token decoding on a CPU
that takes a third of the time of keys that lie as values do. One array per
layer, not one stacked array: a stacked cache is copied whole by every step of a
loop.
"""

from flax import linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from envace_jax.model import config as config_lib


@flax.struct.dataclass
class KVCache:
  k: tuple[jax.Array, ...]  # one [B, K, H, S] per layer
  v: tuple[jax.Array, ...]  # one [B, K, S, H] per layer
  length: jax.Array  # [B] int32; above capacity: the row has overflowed

  @property
  def capacity(self) -> int:
    return self.v[0].shape[2]


def empty(
  config: config_lib.TransformerConfig, batch: int, capacity: int
) -> KVCache:
  """A cache in which no row owns a slot yet."""
  if capacity > config.max_len:
    raise ValueError(
      f'cache capacity {capacity} exceeds model.max_len={config.max_len}; '
      'raise max_len or shorten the rows'
    )
  lead = (batch, config.num_kv_heads)

  def zeros(*panel):
    return tuple(
      jnp.zeros(lead + panel, config.compute_dtype)
      for _ in range(config.num_layers)
    )

  return KVCache(
    k=zeros(config.head_dim, capacity),
    v=zeros(capacity, config.head_dim),
    length=jnp.zeros((batch,), jnp.int32),
  )


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
  none, free = (0, 0), (0, extra)
  return cache.replace(
    k=tuple(jnp.pad(k, (none, none, none, free)) for k in cache.k),
    v=tuple(jnp.pad(v, (none, none, free, none)) for v in cache.v),
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


def write_keys(
  cache_BKHS: jax.Array, new_BTKH: jax.Array, slots_BT: jax.Array
) -> jax.Array:
  """Scatters keys into their slots; slots past the end are dropped.

  Dropped, not clamped: `dynamic_update_slice` would move an overflowing write
  back onto the row's newest real entries.
  """
  rows_B1 = jnp.arange(cache_BKHS.shape[0])[:, None]
  cache_BKHS = cache_BKHS.at[rows_B1, :, :, slots_BT].set(
    new_BTKH.astype(cache_BKHS.dtype), mode='drop'
  )
  return nn.with_logical_constraint(
    cache_BKHS, ('batch', 'kv_heads', 'head_dim', 'time')
  )


def write_values(
  cache_BKSH: jax.Array, new_BTKH: jax.Array, slots_BT: jax.Array
) -> jax.Array:
  """Scatters values into their slots; slots past the end are dropped."""
  rows_B1 = jnp.arange(cache_BKSH.shape[0])[:, None]
  cache_BKSH = cache_BKSH.at[rows_B1, :, slots_BT].set(
    new_BTKH.astype(cache_BKSH.dtype), mode='drop'
  )
  return nn.with_logical_constraint(
    cache_BKSH, ('batch', 'kv_heads', 'time', 'head_dim')
  )
