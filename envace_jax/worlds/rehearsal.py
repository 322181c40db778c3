"""The policy answers its own actions, in the same row, as REHEARSE.

Host-driven twin of `rollout.on_device`: needed where a rehearsal is mixed with
something only the host can do, and to test that program against.
"""

from collections.abc import Sequence

from envace_jax import types
from envace_jax.sampling import generator
from envace_jax.worlds import base


class RehearsedWorld:
  """Trainable: its tokens carry author REHEARSE and their log-probs."""

  def open(self, batch: base.Batch) -> None:
    del batch  # the policy's own session holds everything

  def respond(
    self, session: generator.Session, requests: Sequence[base.Request]
  ) -> list[base.Response]:
    rows = [request.row for request in requests]
    generations = session.generate(types.Role.REHEARSE, rows)
    return [base.Response(generation=generations[row]) for row in rows]

  def trained_rows(self) -> None:
    return None  # they are the rows of ACT

  def final_state(self, row: int) -> None:
    del row

  def close(self) -> None:
    pass
