"""A separate, frozen model plays the environment; it is never trained.

It keeps its own caches over the same rows: what the policy wrote is extended
into them before it answers, and its answers enter the policy's rows as WORLD.
"""

from collections.abc import Sequence

import jax
import numpy as np

from envace_jax import types
from envace_jax.sampling import generator, keys
from envace_jax.text import template as templates
from envace_jax.worlds import base


class SimulatedWorld:
  """Answers with frozen parameters in the REHEARSE role."""

  def __init__(
    self,
    decoder: generator.Decoder,
    template: templates.Template,
    params,
    key: jax.Array,
  ):
    """Makes a simulator.

    Args:
      decoder: the simulator's model and sampling settings.
      template: the row format that it was trained on.
      params: frozen.
      key: a stream of its own, not the policy's; each batch it is opened for
        derives fresh row keys from it.
    """
    self._decoder, self._template = decoder, template
    self._params, self._key = params, key
    self._opened = 0
    self._session: generator.Session | None = None
    self._answered: set[int] = set()

  def open(
    self, tasks: Sequence[types.Task], prompts: Sequence[generator.Row]
  ) -> None:
    del tasks
    row_keys = keys.rows(
      jax.random.fold_in(self._key, self._opened), range(len(prompts))
    )
    self._opened += 1
    self._session = generator.Session(
      self._decoder, self._params, prompts, 1, row_keys
    )
    self._answered = set()

  def respond(
    self, session: generator.Session, requests: Sequence[base.Request]
  ) -> list[base.Response]:
    del session
    own = self._session
    headers = self._template.header_ids
    answers = []
    for request in requests:
      ids = [*request.action_ids, headers[types.Role.REHEARSE]]
      if request.row in self._answered:
        ids.insert(0, headers[types.Role.ACT])
      if len(ids) < own.room(request.row):
        own.extend(
          request.row,
          np.asarray(ids, np.int32),
          np.full(len(ids), types.Author.PROMPT, np.int8),
        )
        answers.append(request.row)
    generations = own.generate(types.Role.REHEARSE, answers) if answers else {}
    self._answered |= set(answers)
    return [self._response(generations.get(r.row)) for r in requests]

  def _response(self, generation: types.Generation | None) -> base.Response:
    if generation is None:
      return base.Response(failure='the simulator has no context left')
    if not generation.finished:
      return base.Response(failure='the simulator did not finish its answer')
    return base.Response(text=self._template.observation_text(generation.ids))

  def final_state(self, row: int) -> str | None:
    del row

  def close(self) -> None:
    self._session = None
