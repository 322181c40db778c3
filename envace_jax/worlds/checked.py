"""A world that is asked only what it could be asked.

Calls that no tool could take are refused by program, in the published codes.
"""

import collections
from collections.abc import Mapping, Sequence

from envace_jax import types
from envace_jax.sampling import generator
from envace_jax.text import template as templates
from envace_jax.worlds import base, intercepting, validation


class CheckedWorld(intercepting.InterceptingWorld):
  """Refuses faulty calls; everything else is the inner world's."""

  def __init__(self, inner: base.World, template: templates.Template):
    super().__init__(inner, template)
    self._tasks: Sequence[types.Task] = ()
    self.refused = collections.Counter()  # by code

  def open(self, batch: base.Batch) -> None:
    self._tasks = batch.tasks
    super().open(batch)

  def intercept(
    self, session: generator.Session, requests: Sequence[base.Request]
  ) -> Mapping[int, base.Response]:
    del session
    refusals = {}
    for request in requests:
      tools = self._tasks[request.row].tools
      fault = validation.call_fault(request.action, tools)
      if fault is not None:
        self.refused[fault[0]] += 1
        refusals[request.row] = base.Response(text=validation.render(fault))
    return refusals

  def interventions(self) -> Mapping[str, int]:
    refused = {
      f'refused/{code}': self.refused[code] for code in validation.CALL_CODES
    }
    return {**refused, **super().interventions()}
