"""The real environment, one instance per row, and the null control."""

import collections
from collections.abc import Callable, Mapping, Sequence

from absl import logging

from envace_jax import types
from envace_jax.envs import base as envs
from envace_jax.sampling import generator
from envace_jax.worlds import base

NULL_OBSERVATION = '{"status": "ok"}'


class RealWorld:
  """Executes every call in an environment. Two attempts never share state.

  A row's environment is put in place when it is first needed. One that fails
  ends its own episode, and has no final state.
  """

  def __init__(self, make_environment: Callable[[], envs.Environment]):
    self._make_environment = make_environment
    self._environments: dict[int, envs.Environment] = {}  # kept for reuse
    self._tasks: Sequence[types.Task] = ()
    self._ready: set[int] = set()
    self._failed: set[int] = set()
    self._calls = collections.Counter()  # by row

  def open(self, batch: base.Batch) -> None:
    self._tasks = batch.tasks
    self._ready, self._failed = set(), set()
    self._calls = collections.Counter()

  def respond(
    self, session: generator.Session, requests: Sequence[base.Request]
  ) -> list[base.Response]:
    del session
    return [self._respond(request) for request in requests]

  def warm_up(self, batch: base.Batch) -> None:
    del batch

  def trained_rows(self) -> None:
    return None

  def provenance(self, row: int) -> base.Provenance:
    return base.Provenance(
      source=types.Source.REAL, real_calls=self._calls[row]
    )

  def final_state(self, row: int) -> str | None:
    if row in self._failed:
      return None
    try:
      return self._environment(row).state_hash()
    except Exception as error:
      logging.warning('environment of row %d has no state: %r', row, error)
      return None

  def interventions(self) -> Mapping[str, int]:
    return {}

  def close(self) -> None:
    for environment in self._environments.values():
      environment.close()
    self._environments, self._ready = {}, set()

  def _respond(self, request: base.Request) -> base.Response:
    row = request.row
    try:
      environment = self._environment(row)
      self._calls[row] += 1
      return base.Response(text=environment.call(request.action).text)
    except Exception as error:  # an environment's bug is not the policy's
      logging.warning('environment failed on %s: %r', request.action, error)
      self._failed.add(row)
      return base.Response(stop=types.StopReason.WORLD_FAILED)

  def _environment(self, row: int) -> envs.Environment:
    if row not in self._environments:
      self._environments[row] = self._make_environment()
    if row not in self._ready:
      self._environments[row].reset(self._tasks[row])
      self._ready.add(row)
    return self._environments[row]


class NullWorld:
  """Says the same whatever is done: the control that a claim must beat.

  A transcript checklist names gold calls and facts, so a policy might learn
  from it with no world at all. What this arm gains is not due to rehearsal.
  """

  def open(self, batch: base.Batch) -> None:
    del batch

  def respond(
    self, session: generator.Session, requests: Sequence[base.Request]
  ) -> list[base.Response]:
    del session
    return [base.Response(text=NULL_OBSERVATION)] * len(requests)

  def warm_up(self, batch: base.Batch) -> None:
    del batch

  def trained_rows(self) -> None:
    return None

  def provenance(self, row: int) -> base.Provenance:
    del row
    return base.Provenance(source=types.Source.NULL)

  def final_state(self, row: int) -> None:
    del row

  def interventions(self) -> Mapping[str, int]:
    return {}

  def close(self) -> None:
    pass
