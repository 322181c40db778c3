"""Several transcripts in one row: who shares it, and what is left over.

  capacity 10, transcripts of 7 5 4 3 1 tokens

  unpacked                 packed by first fit, longest first
    a a a a a a a . . .      a a a a a a a d d d
    b b b b b . . . . .      b b b b b c c c c e
    c c c c . . . . . .      . . . . . . . . . .
    d d d . . . . . . .      . . . . . . . . . .
    e . . . . . . . . .      . . . . . . . . . .

A batch keeps as many rows as it has transcripts, so that any lengths fit and
there is one compiled shape; the rows that are left over come to lie in
microbatches of their own, which are not scored (`unless_empty`). What keeps
transcripts apart is the position of each token in its own one
(`batch.TrainBatch.positions`), which `model.transformer` reads.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
  """Indices by row: each in the first row with room, longest first.

  A function of the lengths alone; equal ones keep their order. No row holds
  more than `capacity` tokens, and there are at most as many rows as lengths.
  First fit decreasing needs at most 11/9 of the fewest possible rows, plus one
  (Johnson 1973).

  Raises:
    ValueError: one is longer than `capacity`.
  """
  longest = max(lengths, default=0)
  if longest > capacity:
    raise ValueError(f'{longest} tokens do not fit in rows of {capacity}')
  rows, room = [], np.zeros(len(lengths), np.int64)
  for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
    fits = room[: len(rows)] >= lengths[i]
    if not fits.any():
      room[len(rows)] = capacity
      rows.append([])
    row = int(np.argmax(fits)) if fits.any() else len(rows) - 1
    rows[row].append(i)
    room[row] -= lengths[i]
  return rows


def unless_empty(lengths_B: jax.Array, compute: Callable[[], Any]) -> Any:
  """`compute()`, or zeros of its shapes where no row holds a token.

  Differentiable: what is left out has neither a forward nor a backward pass.
  """

  def zeros():
    shapes = jax.eval_shape(compute)
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

  return jax.lax.cond(jnp.any(lengths_B > 0), compute, zeros)
