"""The seam to a benchmark: its tasks, attempts at them, and its own verdict.

A benchmark brings its own tools, data and checkers, and they decide. Whoever is
measured is given messages and answers with a reply; what comes back is other
messages, until the attempt is over. Nothing a model writes is raised: it is an
observation, or counts against the attempt.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import pathlib
from typing import Any, Literal, Protocol, runtime_checkable

from envace_jax import types


class AttemptFailed(Exception):
  """Somebody but the policy broke an attempt: it is errored, and not wrong."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reply:
  """What the policy said. Calls that could not be read are among the calls."""

  text: str  # without its calls
  calls: Sequence[types.ToolCall | types.ParseError] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Message:
  """What is said to the policy."""

  role: Literal['user', 'tool']
  text: str
  error: str | None = None  # why a call failed; None for success and for users


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
  """The benchmark's verdict on one attempt."""

  reward: float  # in [0, 1], by the benchmark's own rule
  success: bool
  reason: str = ''  # the benchmark's own name of a failure; '' for success
  parts: types.Json = dataclasses.field(default_factory=dict)  # its components


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recorded:
  """One attempt that is over, for the benchmark's own result file."""

  task_id: str
  trial: int
  started: str  # ISO 8601
  seconds: float
  value: Any  # what `Attempt.record` gave


class Attempt(Protocol):
  """One attempt at one task. It shares no state with any other attempt.

  What it goes on from (`Chained`) is a value that it was given.
  """

  system: str  # '' for none
  instruction: str  # the user's first message
  tools: Sequence[types.Json]  # OpenAI function schemas; may grow, by turns

  def respond(self, reply: Reply) -> Sequence[Message]:
    """Executes calls or hears a text; empty when the attempt is over.

    One tool message per call, in their order, or one user message.

    Raises:
      AttemptFailed: the benchmark's own machinery, or its user, broke down.
    """

  def score(self) -> Outcome:
    """The verdict on what was said so far; may be asked once.

    Raises:
      AttemptFailed: there is none without something that is not configured.
    """

  def record(self) -> Any:
    """This attempt as JSON for `Benchmark.write`, once it is over."""

  def close(self) -> None:
    """Releases what the attempt holds."""


class Benchmark(Protocol):
  """A set of tasks, by category."""

  name: str
  version: str  # of package and data, as printed beside every score

  def categories(self) -> Sequence[str]:
    """What scores are reported by; a category is a name like a file's."""

  def task_ids(self, category: str) -> Sequence[str]:
    """In the benchmark's own order."""

  def open(self, task_id: str) -> Attempt:
    """A fresh attempt."""

  def oracle(self, task_id: str) -> Sequence[Reply] | None:
    """Replies that earn full marks; None where nobody recorded any."""

  def groups(
    self,
    outcomes: Mapping[str, Sequence[Outcome | None]],
    recorded: Sequence[Recorded],
  ) -> Mapping[str, float]:
    """Scores over several attempts, in the benchmark's own terms.

    Args:
      outcomes: by category; None is an attempt that errored.
      recorded: of those that did not.
    """

  def write(
    self, directory: pathlib.Path, policy: str, recorded: Sequence[Recorded]
  ) -> Sequence[pathlib.Path]:
    """Writes result files as the benchmark's own tools read them, if any do."""


@runtime_checkable
class Chained(Protocol):
  """What a benchmark adds if some of its attempts go on from others.

  A prerequisite is attempted by the same policy in the same trial, once for all
  that need it. It is an attempt like any other, with its calls, its cost and
  its record, but nobody asks for its score. All that goes on from it is its
  record: that is kept with the results, so a measurement that is resumed goes
  on from the very same, and two measurements never share anything.
  """

  oracle_note: str  # what an oracle proves where nobody recorded a plan

  def prerequisites(self, task_id: str) -> Sequence[str]:
    """Ids of tasks to attempt before, in order; a prerequisite has its own."""

  def open_after(self, task_id: str, records: Sequence[Any]) -> Attempt:
    """Like `open`, from what its prerequisites left: their records, in order.

    `open` begins as if they had left nothing.
    """
