"""The policy answers its own actions, in the same row, as REHEARSE.

Host-driven twin of `rollout.on_device`: needed where a rehearsal is mixed with
something only the host can do, and to test that program against.
"""

from collections.abc import Mapping, Sequence

from envace_jax import types
from envace_jax.sampling import generator
from envace_jax.worlds import answers as answering
from envace_jax.worlds import base


class RehearsedWorld:
  """Trainable: its tokens carry author REHEARSE and their log-probs."""

  def __init__(self, answers: answering.Answers):
    self.answers = answers
    self._tasks: Sequence[types.Task] = ()

  def open(self, batch: base.Batch) -> None:
    self._tasks = batch.tasks  # the policy's own session holds all the rest

  def respond(
    self, session: generator.Session, requests: Sequence[base.Request]
  ) -> list[base.Response]:
    said = self.answers.draw(session, requests, self._tasks)
    return [
      base.Response(text=said[r.row])
      if isinstance(said[r.row], str)
      else base.Response(generation=said[r.row])
      for r in requests
    ]

  def warm_up(self, batch: base.Batch) -> None:
    del batch

  def trained_rows(self) -> None:
    return None  # they are the rows of ACT

  def provenance(self, row: int) -> base.Provenance:
    del row
    return base.Provenance(source=types.Source.REHEARSED)

  def final_state(self, row: int) -> None:
    del row

  def interventions(self) -> Mapping[str, int]:
    return self.answers.interventions()

  def close(self) -> None:
    pass
