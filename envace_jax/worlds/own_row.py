"""A model that answers from a row of its own, which ACT never sees.

With the policy's parameters it is the REHEARSE role under split views, and is
trained. With frozen ones of another model it is a simulator.

  ACT's row       prompt of ACT       <|act|> call <|rehearse|> copy    ...
  this row        prompt of its own   <|act|> copy <|rehearse|> answer  ...

Both rows hold the same tokens after their prompts, each live in its own cache;
a token sampled in one is extended into the other, and nothing is read twice.
What only this row may know (instructions, schemas, recorded exchanges) stands
in its prompt, so no path leads from there to an action but through an answer.
"""

from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from envace_jax import types
from envace_jax.sampling import generator
from envace_jax.text import template as templates
from envace_jax.worlds import answers as answering
from envace_jax.worlds import base


class OwnRowWorld:
  """Answers in the REHEARSE role, over sessions of its own."""

  def __init__(
    self,
    decoder: generator.Decoder,
    template: templates.Template,
    params,
    opening: Callable[[types.Task], templates.Span],
    answers: answering.Answers,
    *,
    trained: bool,
  ):
    """Makes such a world.

    Args:
      decoder: the model and its sampling settings; `prompt_tokens` is the
        width of its own prompts.
      template: the row format, of the same tokenizer as the policy's.
      params: of the model that answers.
      opening: the prompt of a task's own row, ACT's first header included.
      answers: draws them.
      trained: the answers are the policy's, to be trained where they stand;
        otherwise they are an observation like any other.
    """
    self._decoder, self._template = decoder, template
    self._params, self._opening = params, opening
    self._trained, self.answers = trained, answers
    self.session: generator.Session | None = None
    self._tasks: Sequence[types.Task] = ()

  def open(self, batch: base.Batch) -> None:
    self._tasks = batch.tasks
    # Another key than ACT's: positions of two rows must not share their draws.
    own_keys = jax.vmap(lambda key: jax.random.fold_in(key, 1))(batch.row_keys)
    self.session = generator.Session(
      self._decoder,
      self._params,
      [self._opening(task) for task in batch.tasks[:: batch.group_size]],
      batch.group_size,
      own_keys,
    )

  def respond(
    self, session: generator.Session, requests: Sequence[base.Request]
  ) -> list[base.Response]:
    del session
    asked = []
    for request in requests:
      ids, authors = self._heard(request)
      if len(ids) < self.session.room(request.row):
        self.session.extend(request.row, ids, authors)
        asked.append(request)
    said = self.answers.draw(self.session, asked, self._tasks) if asked else {}
    return [self._response(r.row, said.get(r.row)) for r in requests]

  def trained_rows(self) -> list[types.Row] | None:
    return self.session.rows() if self._trained else None

  def provenance(self, row: int) -> base.Provenance:
    del row
    return base.Provenance(
      source=types.Source.REHEARSED if self._trained else types.Source.SIMULATED
    )

  def final_state(self, row: int) -> None:
    del row

  def interventions(self) -> Mapping[str, int]:
    return self.answers.interventions()

  def close(self) -> None:
    self.session = None

  def warm_up(self, batch: base.Batch) -> None:
    """Compiles every program that answering such batches can need."""
    self.open(batch)
    self.session.warm_up()
    self.close()

  def _heard(self, request: base.Request) -> templates.Span:
    ids, authors = templates.join(request.heard)
    copied = np.where(authors == types.Author.ACT, types.Author.COPIED, authors)
    return self._template.without_thoughts(ids, copied.astype(np.int8))

  def _response(
    self, row: int, said: types.Generation | str | None
  ) -> base.Response:
    if isinstance(said, str):  # refused: the row hears what ACT is told
      ids = self._template.observation(said)
      if len(ids) <= self.session.room(row):
        world = np.full(len(ids), types.Author.WORLD, np.int8)
        self.session.extend(row, ids, world)
        return base.Response(text=said)
      said = None
    if said is None:
      return base.Response(stop=types.StopReason.CONTEXT_FULL)
    if self._trained:
      return base.Response(generation=said, in_own_row=True)
    if not said.finished:
      return base.Response(stop=types.StopReason.WORLD_FAILED)
    return base.Response(text=self._template.observation_text(said.ids))
