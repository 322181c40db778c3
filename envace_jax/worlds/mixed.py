"""Some episodes, or some steps, are answered by the real environment.

Whole episodes: in each group the first `real_episodes` attempts meet the
environment alone, the others another world. Both lie in one batch.

Single steps: in the other episodes a call is answered for real with probability
`real_steps`. A real answer is right only in a state in which everything before
it has been done, so *every* call of such an episode is executed, and counted as
a real call, whoever's answer is shown: mixing by steps saves none. It is for
keeping a rehearsal near the truth, not for sparing the environment. What the
other world said on the way need not agree with the state of the environment,
and a later real answer may contradict it.

A wholly real episode leaves the other world's own row, if it has one, at its
prompt.
"""

import collections
from collections.abc import Mapping, Sequence
import random

from envace_jax import types
from envace_jax.sampling import generator, keys
from envace_jax.text import template as templates
from envace_jax.worlds import base, intercepting


class MixedWorld(intercepting.InterceptingWorld):
  """Two worlds over the same rows."""

  def __init__(
    self,
    inner: base.World,
    real: base.World,
    template: templates.Template,
    *,
    real_episodes: int,
    real_steps: float,
  ):
    """Makes such a world.

    Args:
      inner: answers what the real one does not.
      real: executes calls; keeps a state per row.
      template: the row format.
      real_episodes: attempts of each group that are wholly real.
      real_steps: probability of a real answer in the others; above 0, all
        their calls are executed.
    """
    super().__init__(inner, template)
    self._real = real
    self._real_episodes, self._real_steps = real_episodes, real_steps

  def open(self, batch: base.Batch) -> None:
    self._group_size = batch.group_size
    self._names = keys.names(batch.row_keys)
    self._calls = collections.Counter()  # by row
    super().open(batch)
    self._real.open(batch)

  def intercept(
    self, session: generator.Session, requests: Sequence[base.Request]
  ) -> Mapping[int, base.Response]:
    executed = [r for r in requests if self._is_executed(r.row)]
    if not executed:
      return {}
    said = self._real.respond(session, executed)
    true = dict(zip([r.row for r in executed], said, strict=True))
    # A failed environment has lost the state of every later answer.
    return {
      row: answer
      for row, answer in true.items()
      if answer.stop is not None or self._shows_real(row)
    }

  def warm_up(self, batch: base.Batch) -> None:
    super().warm_up(batch)
    self._real.warm_up(batch)

  def provenance(self, row: int) -> base.Provenance:
    if self._is_real(row):
      return self._real.provenance(row)
    if self._real_steps > 0:
      spent = self._real.provenance(row).real_calls
      return base.Provenance(source=types.Source.MIXED, real_calls=spent)
    return self._inner.provenance(row)

  def final_state(self, row: int) -> str | None:
    world = self._real if self._is_executed(row) else self._inner
    return world.final_state(row)

  def close(self) -> None:
    super().close()
    self._real.close()

  def _is_real(self, row: int) -> bool:
    return row % self._group_size < self._real_episodes

  def _is_executed(self, row: int) -> bool:
    return self._is_real(row) or self._real_steps > 0

  def _shows_real(self, row: int) -> bool:
    """Whether the row's next call is answered for real; one draw a call."""
    number = self._calls[row]
    self._calls[row] += 1
    draw = random.Random(f'mixed {self._names[row]} {number}').random()
    return self._is_real(row) or draw < self._real_steps
