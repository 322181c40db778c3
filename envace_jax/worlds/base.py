"""A world is whoever answers an action.

The method, both baselines and private rehearsal differ by the world they are
given and by nothing else. Worlds answer in batches: on an accelerator a world
that is itself a model must not be asked row by row.
"""

from collections.abc import Sequence
import dataclasses
from typing import Protocol

import numpy as np

from envace_jax import types
from envace_jax.sampling import generator


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """One action that wants an answer."""

  row: int  # row of the session
  action: types.ToolCall | types.ParseError
  action_ids: np.ndarray  # [T] int32, as sampled, stop token included


@dataclasses.dataclass(frozen=True, kw_only=True)
class Response:
  """What a world says. Exactly one field is set.

  `generation` is set iff the policy itself wrote the observation: its tokens
  are then already in the row. `text` is an observation somebody else wrote.
  `failure` says that the world could not answer; the episode ends.
  """

  text: str | None = None
  generation: types.Generation | None = None
  failure: str | None = None


class World(Protocol):
  """Answers the actions of a batch of episodes, one batch at a time."""

  def open(
    self, tasks: Sequence[types.Task], prompts: Sequence[generator.Row]
  ) -> None:
    """Prepares one fresh state per row; `prompts` are the rows' openings."""

  def respond(
    self, session: generator.Session, requests: Sequence[Request]
  ) -> list[Response]:
    """Answers the requests in order; their rows end in REHEARSE's header."""

  def final_state(self, row: int) -> str | None:
    """Fingerprint of a row's real state; None where there is no such thing."""

  def close(self) -> None:
    """Releases what `open` took."""
