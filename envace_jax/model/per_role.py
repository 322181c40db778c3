"""One network for both roles, or one for each.

Whatever exists once per network (parameters, optimizer state, the rows that it
learns from) is a `PerRole` where each role has a network of its own, and is the
plain thing where they share one. `of` asks either for what concerns a role, so
whoever samples or trains a role need not know which it is.
"""

from typing import Any

import flax.struct


@flax.struct.dataclass
class PerRole:
  """One of something for each role."""

  act: Any
  rehearse: Any

  def __getitem__(self, role: int) -> Any:
    """Role 0 is ACT and role 1 is REHEARSE, as in `types.Role`."""
    return (self.act, self.rehearse)[role]


def of(shared_or_not: Any, role: int) -> Any:
  """What concerns a role: its own, or that of both."""
  if isinstance(shared_or_not, PerRole):
    return shared_or_not[role]
  return shared_or_not
