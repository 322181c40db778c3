"""The real environment, one instance per row, and the null control."""

from collections.abc import Callable, Mapping, Sequence

from absl import logging

from envace_jax import types
from envace_jax.envs import base as envs
from envace_jax.sampling import generator
from envace_jax.worlds import base

NULL_OBSERVATION = '{"status": "ok"}'


class RealWorld:
  """Executes every call in an environment. Two attempts never share state."""

  def __init__(self, make_environment: Callable[[], envs.Environment]):
    self._make_environment = make_environment
    self._environments: list[envs.Environment] = []

  def open(self, batch: base.Batch) -> None:
    while len(self._environments) < len(batch.tasks):
      self._environments.append(self._make_environment())
    for environment, task in zip(self._environments, batch.tasks, strict=False):
      environment.reset(task)

  def respond(
    self, session: generator.Session, requests: Sequence[base.Request]
  ) -> list[base.Response]:
    del session
    responses = []
    for request in requests:
      try:
        observation = self._environments[request.row].call(request.action)
        responses.append(base.Response(text=observation.text, executed=True))
      except Exception as error:  # an environment's bug is not the policy's
        logging.warning('environment failed on %s: %r', request.action, error)
        responses.append(
          base.Response(stop=types.StopReason.WORLD_FAILED, executed=True)
        )
    return responses

  def warm_up(self, batch: base.Batch) -> None:
    del batch

  def trained_rows(self) -> None:
    return None

  def final_state(self, row: int) -> str | None:
    return self._environments[row].state_hash()

  def interventions(self) -> Mapping[str, int]:
    return {}

  def close(self) -> None:
    for environment in self._environments:
      environment.close()
    self._environments = []


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

  def final_state(self, row: int) -> None:
    del row

  def interventions(self) -> Mapping[str, int]:
    return {}

  def close(self) -> None:
    pass
