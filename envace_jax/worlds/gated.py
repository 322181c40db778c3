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
from envace_jax.worlds import base, foresight, intercepting


class GatedWorld(intercepting.InterceptingWorld):
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
    super().__init__(inner, template)
    self._is_write, self._answers = is_write, answers
    self._max_refused = max_refused
    self.stopped = 0

  def intercept(
    self, session: generator.Session, requests: Sequence[base.Request]
  ) -> Mapping[int, base.Response]:
    writes = [
      request.row
      for request in requests
      if isinstance(request.action, types.ToolCall)
      and self._is_write(request.action.name)
    ]
    expected = foresight.expect(session, self._template, writes, self._answers)
    stopped = {
      row: base.Response(text=refusal)
      for row, answers in expected.items()
      if (refusal := self._refusal(answers)) is not None
    }
    self.stopped += len(stopped)
    return stopped

  def interventions(self) -> Mapping[str, int]:
    return {'stopped/writes': self.stopped, **super().interventions()}

  def _refusal(self, answers: Sequence[str]) -> str | None:
    refusals = [text for text in answers if tool_calls.reports_error(text)]
    if len(refusals) <= self._max_refused * len(answers):
      return None
    return collections.Counter(refusals).most_common(1)[0][0]
