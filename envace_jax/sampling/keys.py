"""Random keys by name, train step and global sample index.

Nothing here depends on how rows are batched, bucketed or spread over hosts, so
an episode draws the same numbers wherever and whenever it is sampled, and a
resumed run needs no random state in its checkpoint.
"""

from collections.abc import Sequence
import zlib

import jax
import jax.numpy as jnp
import numpy as np


def stream(seed: int, name: str, step: int) -> jax.Array:
  """The key of one named stream at one train step."""
  key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(name.encode()))
  return jax.random.fold_in(key, step)


def rows(key: jax.Array, sample_indices: Sequence[int]) -> jax.Array:
  """One key per row [B], derived from the row's global sample index."""
  indices = jnp.asarray(np.asarray(sample_indices, np.uint32))
  return jax.vmap(lambda index: jax.random.fold_in(key, index))(indices)


def names(row_keys: jax.Array) -> list[str]:
  """A text for each of some typed keys [B], to seed what the host draws.

  Say what is drawn in front of it: two draws of one name are equal.
  """
  words_B2 = np.asarray(jax.random.key_data(row_keys))
  return [' '.join(map(str, words)) for words in words_B2.tolist()]
