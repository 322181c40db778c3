"""A world that stands before another and answers some requests itself.

The world behind hears of those answers with its next request, so rows of its
own stay those of the episode. Whoever stands before says which requests, and
how; everything else is the inner world's.
"""

from collections.abc import Mapping, Sequence
import dataclasses

import numpy as np

from envace_jax import types
from envace_jax.sampling import generator
from envace_jax.text import template as templates
from envace_jax.worlds import base


class InterceptingWorld:
  """Base of such worlds; see `intercept`."""

  def __init__(self, inner: base.World, template: templates.Template):
    self._inner, self._template = inner, template
    self._unheard: dict[int, list[generator.Row]] = {}

  def intercept(
    self, session: generator.Session, requests: Sequence[base.Request]
  ) -> Mapping[int, base.Response]:
    """Answers by row, of those that the inner world is not asked for.

    Each has a `text` or a `stop`.
    """
    raise NotImplementedError

  def open(self, batch: base.Batch) -> None:
    self._unheard = {}
    self._inner.open(batch)

  def respond(
    self, session: generator.Session, requests: Sequence[base.Request]
  ) -> list[base.Response]:
    answers = dict(self.intercept(session, requests))
    passed = []
    for request in requests:
      row = request.row
      heard = [*self._unheard.pop(row, []), *request.heard]
      if row not in answers:
        passed.append(dataclasses.replace(request, heard=tuple(heard)))
      elif answers[row].text is not None:
        ids = self._template.observation(answers[row].text)
        world = np.full(len(ids), types.Author.WORLD, np.int8)
        self._unheard[row] = [*heard, (ids, world)]
    if passed:
      said = self._inner.respond(session, passed)
      answers |= dict(zip([r.row for r in passed], said, strict=True))
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
    return self._inner.interventions()

  def close(self) -> None:
    self._inner.close()
