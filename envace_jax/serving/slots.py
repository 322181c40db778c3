"""Which row holds which tokens, and which of them a new prompt goes to.

A row keeps what it holds after its answer. A prompt begins with what the row
that it shares most with holds: it takes that row over where it goes on from all
of it, as the next turn of a conversation does; otherwise it takes the row that
was not used for the longest time, and the shared tokens are copied there, so
that a common system prompt is read once and nobody's row is lost to it.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass
class Slot:
  """One row, seen from the host."""

  index: int
  held: np.ndarray  # [capacity] int32; the first `length` are in the row
  length: int = 0
  is_busy: bool = False
  used_at: int = 0  # in admissions


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
  """Where a prompt goes: to `target`, with `keep` tokens of `source`."""

  target: Slot
  source: Slot
  keep: int


class Slots:
  """All rows of a server."""

  def __init__(self, count: int, capacity: int):
    self._slots = [
      Slot(index=i, held=np.zeros((capacity,), np.int32)) for i in range(count)
    ]
    self._clock = 0

  @property
  def busy(self) -> int:
    return sum(slot.is_busy for slot in self._slots)

  def place(self, prompt: np.ndarray) -> Place | None:
    """Takes a row for a prompt; None while all are busy."""
    idle = [slot for slot in self._slots if not slot.is_busy]
    if not idle:
      return None
    shares = {slot.index: _shared(slot, prompt) for slot in self._slots}
    # Of equals an idle one, which may be taken over.
    source = max(
      self._slots, key=lambda slot: (shares[slot.index], not slot.is_busy)
    )
    keep = shares[source.index]
    target = min(idle, key=lambda slot: slot.used_at)
    # The last token of a row is not in its cache: what goes on from all but
    # that goes on from the row.
    if not source.is_busy and keep and keep >= source.length - 1:
      target = source
    self._clock += 1
    target.held[:keep] = source.held[:keep]
    target.length, target.is_busy = keep, True
    target.used_at = self._clock
    return Place(target=target, source=source, keep=keep)

  def append(self, slot: Slot, ids: np.ndarray) -> None:
    """Notes down what a row was given, or has said."""
    slot.held[slot.length : slot.length + len(ids)] = ids
    slot.length += len(ids)

  def release(self, slot: Slot) -> None:
    """Whoever had a row is done; what it holds may be gone on from."""
    slot.is_busy = False

  def forget(self) -> None:
    """The rows are lost."""
    for slot in self._slots:
      slot.length, slot.is_busy = 0, False


def _shared(slot: Slot, prompt: np.ndarray) -> int:
  """Tokens that a row and a prompt both begin with."""
  size = min(slot.length, len(prompt))
  differ = np.flatnonzero(slot.held[:size] != prompt[:size])
  return int(differ[0]) if len(differ) else size
