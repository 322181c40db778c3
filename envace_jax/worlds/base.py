"""A world is whoever answers an action.

The method, both baselines and private rehearsal differ by the world they are
given and by nothing else. Worlds answer in batches: on an accelerator a world
that is itself a model must not be asked row by row.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Protocol

import jax

from envace_jax import types
from envace_jax.sampling import generator


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
  """The episodes that a world is opened for, group by group."""

  tasks: Sequence[types.Task]  # [B]
  prompts: Sequence[generator.Row]  # [P], what ACT sees of each group's task
  row_keys: jax.Array  # [B] typed keys of ACT's rows, by global sample index

  @property
  def group_size(self) -> int:
    return len(self.tasks) // len(self.prompts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """One tool call that wants an answer."""

  row: int
  action: types.ToolCall | types.ParseError
  # Everything that ACT's row gained since its prompt, or since the row's last
  # request, but for the world's own answers. Ends in REHEARSE's header.
  heard: Sequence[generator.Row]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Response:
  """What a world says. Exactly one of `text`, `generation`, `stop` is set.

  `text` is an observation that the policy did not write. `generation` is one
  that it did: in ACT's own row, where it already stands, or (`in_own_row`) in a
  row of REHEARSE's own, from which ACT's row is given a copy. `stop` ends the
  episode unanswered: WORLD_FAILED, or CONTEXT_FULL in the world's own row.
  """

  text: str | None = None
  generation: types.Generation | None = None
  in_own_row: bool = False
  stop: types.StopReason | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Provenance:
  """Who was to answer a row, and what it cost."""

  source: types.Source
  real_calls: int = 0  # executed in an environment, shown or not


class World(Protocol):
  """Answers the actions of a batch of episodes, one batch at a time."""

  def open(self, batch: Batch) -> None:
    """Prepares one fresh state per row."""

  def warm_up(self, batch: Batch) -> None:
    """Compiles whatever answering such batches can need."""

  def respond(
    self, session: generator.Session, requests: Sequence[Request]
  ) -> list[Response]:
    """Answers the requests in order; `session` holds the rows of ACT."""

  def trained_rows(self) -> list[types.Row] | None:
    """REHEARSE's own rows [B], to be trained; None where there are none."""

  def provenance(self, row: int) -> Provenance:
    """Where the answers of a row came from, since `open`."""

  def final_state(self, row: int) -> str | None:
    """Fingerprint of a row's real state; None where there is no such thing."""

  def interventions(self) -> Mapping[str, int]:
    """How often a program stepped in since the world was made, by its reason.

    'refused/<code>' are calls, 'rejected/<code>' answers, 'stopped/writes'
    writes; empty where nobody watches, and with every code that there is where
    somebody does.
    """

  def close(self) -> None:
    """Releases what `open` took."""
