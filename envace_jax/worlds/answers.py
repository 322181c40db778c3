"""Answers a model writes as REHEARSE, drawn again where they are impossible.

A rejected answer leaves no trace in the row: it is cut off, and the next draw
uses other numbers. What stands was then drawn from the policy restricted to
valid answers, while its log-probs, when sampled as when rescored, are those of
the unrestricted policy: the gradient is biased by as much as is rejected, which
`rejected` counts.
"""

import collections
from collections.abc import Mapping, Sequence
import dataclasses

from envace_jax import types
from envace_jax.sampling import generator
from envace_jax.text import template as templates
from envace_jax.worlds import base, validation


@dataclasses.dataclass
class Answers:
  """Draws answers for one batch of rows after another."""

  template: templates.Template
  max_resamples: int | None  # None: whatever is said stands
  rejected: collections.Counter = dataclasses.field(
    default_factory=collections.Counter
  )  # by code

  def interventions(self) -> Mapping[str, int]:
    """As `worlds.base.World` has it."""
    if self.max_resamples is None:
      return {}
    return {
      f'rejected/{code}': self.rejected[code]
      for code in validation.ANSWER_CODES
    }

  def draw(
    self,
    session: generator.Session,
    requests: Sequence[base.Request],
    tasks: Sequence[types.Task],
  ) -> dict[int, types.Generation | str]:
    """An answer per row: a generation, or the refusal of a hopeless one.

    Rows end in REHEARSE's header. A refused row still ends there.
    """
    rows = [request.row for request in requests]
    before = {row: int(session.lengths[row]) for row in rows}
    said = dict(session.generate(types.Role.REHEARSE, rows))
    if self.max_resamples is None:
      return said
    for attempt in range(self.max_resamples + 1):
      faults = {
        request.row: fault
        for request in requests
        if (fault := self._fault(said[request.row], request, tasks))
      }
      if not faults:
        break
      self.rejected.update(code for code, _ in faults.values())
      session.rewind({row: before[row] for row in faults})
      if attempt == self.max_resamples:
        said |= {row: validation.render(f) for row, f in faults.items()}
      else:
        said |= session.generate(types.Role.REHEARSE, list(faults))
    return said

  def _fault(self, said, request, tasks) -> tuple[str, str] | None:
    if not isinstance(request.action, types.ToolCall) or not said.finished:
      return None  # nothing it could be an answer to; a limit, which has a name
    text = self.template.observation_text(said.ids)
    return validation.answer_fault(
      text, request.action, tasks[request.row].tools
    )
