"""A world that is asked only what it could be asked.

Calls that no tool could take are refused by program, in the published codes;
the world behind hears of them with its next request, so its own rows stay those
of the episode.
"""

import collections
from collections.abc import Mapping, Sequence
import dataclasses

import numpy as np

from envace_jax import types
from envace_jax.sampling import generator
from envace_jax.text import template as templates
from envace_jax.worlds import base, validation


class CheckedWorld:
  """Refuses faulty calls; everything else is the inner world's."""

  def __init__(self, inner: base.World, template: templates.Template):
    self._inner, self._template = inner, template
    self._tasks: Sequence[types.Task] = ()
    self._unheard: dict[int, list[generator.Row]] = {}
    self.refused = collections.Counter()  # by code

  def open(self, batch: base.Batch) -> None:
    self._tasks, self._unheard = batch.tasks, {}
    self._inner.open(batch)

  def respond(
    self, session: generator.Session, requests: Sequence[base.Request]
  ) -> list[base.Response]:
    answers, passed = {}, []
    for request in requests:
      tools = self._tasks[request.row].tools
      fault = validation.call_fault(request.action, tools)
      heard = [*self._unheard.pop(request.row, []), *request.heard]
      if fault is None:
        passed.append(dataclasses.replace(request, heard=tuple(heard)))
        continue
      self.refused[fault[0]] += 1
      text = validation.render(fault)
      ids = self._template.observation(text)
      world = np.full(len(ids), types.Author.WORLD, np.int8)
      self._unheard[request.row] = [*heard, (ids, world)]
      answers[request.row] = base.Response(text=text)
    if passed:
      inner = self._inner.respond(session, passed)
      rows = [request.row for request in passed]
      answers |= dict(zip(rows, inner, strict=True))
    return [answers[request.row] for request in requests]

  def warm_up(self, batch: base.Batch) -> None:
    self._inner.warm_up(batch)

  def trained_rows(self) -> list[types.Row] | None:
    return self._inner.trained_rows()

  def provenance(self, row: int) -> base.Provenance:
    return self._inner.provenance(row)

  def final_state(self, row: int) -> str | None:
    return self._inner.final_state(row)

  def interventions(self) -> Mapping[str, int]:
    refused = {
      f'refused/{code}': self.refused[code] for code in validation.CALL_CODES
    }
    return {**refused, **self._inner.interventions()}

  def close(self) -> None:
    self._inner.close()
