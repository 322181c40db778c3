"""Which record stands at which position of an endless stream of epochs.

`Order` is a function of seed and position, so the only state of the data is one
integer, the cursor, and resume is exact.
"""

from collections.abc import Iterator
import dataclasses
import functools

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupBatch:
  """Rows of one train step on one process; `groups` and samples are global."""

  records: np.ndarray  # [B] int64, index of the row's record
  groups: np.ndarray  # [B] int64, which prompt of the whole batch
  sample_indices: np.ndarray  # [B] int64, unique over all processes
  next_cursor: int  # where the following step starts


class Order:
  """Position -> record index: each epoch a fresh permutation.

  The cursor counts records handed out to all processes together. It moves by
  the global batch size whatever becomes of the episodes, so it is the only
  state. A batch may span two epochs and then hold a record twice.
  """

  def __init__(self, num_records: int, seed: int):
    if num_records < 1:
      raise ValueError(f'num_records={num_records}: an order needs a record')
    if not 0 <= seed < 2**32:
      raise ValueError(f'seed={seed} must lie in [0, 2**32)')
    self.num_records = num_records
    self.seed = seed

  @functools.cached_property
  def _positions(self):
    # Here, because grain loads jax and this module must not.
    import grain

    source = grain.MapDataset.source(range(self.num_records))
    return source.seed(self.seed).shuffle().repeat()

  def batch_indices(
    self, cursor: int, batch_size: int, *, process: int = 0, num_processes=1
  ) -> np.ndarray:
    """This process's contiguous part of the global batch at `cursor`."""
    if cursor < 0 or batch_size < 1 or not 0 <= process < num_processes:
      raise ValueError(f'{cursor=} {batch_size=} {process=} {num_processes=}')
    if batch_size % num_processes:
      raise ValueError(f'{batch_size=} must be a multiple of {num_processes=}')
    local = batch_size // num_processes
    start = cursor + process * local
    return np.array(
      [self._positions[start + i] for i in range(local)], np.int64
    )

  def group_batches(
    self,
    cursor: int,
    *,
    groups: int,
    group_size: int,
    process: int = 0,
    num_processes: int = 1,
  ) -> Iterator[GroupBatch]:
    """Endless batches of `groups` records (global), each `group_size` times."""
    if group_size < 1:
      raise ValueError(f'group_size={group_size} must be positive')
    while True:
      indices = self.batch_indices(
        cursor, groups, process=process, num_processes=num_processes
      )
      first = process * len(indices) * group_size
      samples = first + np.arange(len(indices) * group_size)
      cursor += groups
      yield GroupBatch(
        records=np.repeat(indices, group_size),
        groups=samples // group_size,
        sample_indices=samples,
        next_cursor=cursor,
      )
