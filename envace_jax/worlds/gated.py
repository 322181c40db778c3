"""A world in which no write is made that its maker expects to be refused.

Before a write is executed the policy rehearses it. Where too many of the
rehearsed answers are refusals it is not executed: the policy is told the
likeliest of them instead, as if it had asked, and has spent no real call.
"""

import collections
from collections.abc import Callable, Mapping, Sequence

from envace_jax import types
from envace_jax.sampling import generator
from envace_jax.text import template as templates
from envace_jax.text import tool_calls
from envace_jax.worlds import base, foresight


class GatedWorld:
  """Stops writes; everything else is the inner world's."""

  def __init__(
    self,
    inner: base.World,
    template: templates.Template,
    *,
    is_write: Callable[[str], bool],
    answers: int,
    max_refused: float,
  ):
    """Makes such a world.

    Args:
      inner: answers what passes; one that rehearses nothing itself.
      template: the row format.
      is_write: by tool name.
      answers: rehearsed for each write.
      max_refused: the largest share of refusals with which a write passes.
    """
    self._inner, self._template = inner, template
    self._is_write, self._answers = is_write, answers
    self._max_refused = max_refused
    self.stopped = 0

  def open(self, batch: base.Batch) -> None:
    self._inner.open(batch)

  def respond(
    self, session: generator.Session, requests: Sequence[base.Request]
  ) -> list[base.Response]:
    writes = [
      request.row
      for request in requests
      if isinstance(request.action, types.ToolCall)
      and self._is_write(request.action.name)
    ]
    expected = foresight.expect(session, self._template, writes, self._answers)
    stopped = {
      row: refusal
      for row, answers in expected.items()
      if (refusal := self._refusal(answers)) is not None
    }
    self.stopped += len(stopped)
    passed = [request for request in requests if request.row not in stopped]
    inner = self._inner.respond(session, passed) if passed else []
    responses = dict(zip([r.row for r in passed], inner, strict=True))
    responses |= {
      row: base.Response(text=text) for row, text in stopped.items()
    }
    return [responses[request.row] for request in requests]

  def _refusal(self, answers: Sequence[str]) -> str | None:
    refusals = [text for text in answers if tool_calls.reports_error(text)]
    if len(refusals) <= self._max_refused * len(answers):
      return None
    return collections.Counter(refusals).most_common(1)[0][0]

  def warm_up(self, batch: base.Batch) -> None:
    self._inner.warm_up(batch)

  def trained_rows(self) -> list[types.Row] | None:
    return self._inner.trained_rows()

  def provenance(self, row: int) -> base.Provenance:
    return self._inner.provenance(row)

  def final_state(self, row: int) -> str | None:
    return self._inner.final_state(row)

  def interventions(self) -> Mapping[str, int]:
    return {'stopped/writes': self.stopped, **self._inner.interventions()}

  def close(self) -> None:
    self._inner.close()
