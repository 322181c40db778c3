"""The seam to a real environment: tools, calls, and a state one can compare.

An environment executes calls; it does not know what a task asks, what it is
worth, or who is calling. Whatever a model writes comes back as an observation,
never as an exception: an exception here is a bug of the environment.
"""

from collections.abc import Sequence
import dataclasses
import json
from typing import Protocol

from envace_jax import types


@dataclasses.dataclass(frozen=True, kw_only=True)
class Observation:
  """What a call returns. `error` names the broken rule, None for success."""

  text: str  # JSON
  error: str | None = None


class Environment(Protocol):
  """One independent copy of the world; two attempts never share one state."""

  tools: Sequence[types.Json]

  def reset(self, task: types.Task) -> None:
    """Puts the state that `task` starts from in place."""

  def call(self, action: types.ToolCall | types.ParseError) -> Observation:
    """Executes one call; a failed call leaves the state as it was."""

  def snapshot(self) -> bytes:
    """The whole state; `restore` brings it back, in this or another copy."""

  def restore(self, snapshot: bytes) -> None:
    """Undoes everything since `snapshot` was taken."""

  def state_hash(self) -> str:
    """Equal for equal content, however it was reached."""

  def close(self) -> None:
    """Releases what the environment holds."""


def success(fields: types.Json) -> Observation:
  """An observation that says what a call returned."""
  return Observation(text=json.dumps(fields, ensure_ascii=False))


def failure(error: str, detail: str) -> Observation:
  """An observation that says which rule a call broke, and the fact behind."""
  fields = {'error': error, 'detail': detail}
  return Observation(text=json.dumps(fields, ensure_ascii=False), error=error)
