"""Telecom tickets solved by somebody who does not know what is broken.

A ticket's own plan goes straight to its faults, which nobody can know who has
only read the ticket. What is shown to a policy is the reading script of
`baselines` instead: it looks, mends what is not as it should be, and after each
repair tries whether the customer is helped by now, which ends it.
"""

from collections.abc import Sequence
import json

from envace_jax import types
from envace_jax.envs import benchmark
from envace_jax.envs.tau2 import baselines as tau2_baselines
from envace_jax.envs.tau2 import telecom as tau2_telecom


class _Helped(Exception):
  """The customer is."""


class _Phone:
  """What a script asks: the line of one ticket, and what was called on it."""

  def __init__(
    self, environment: tau2_telecom.TelecomEnvironment, task: types.Task
  ):
    self.instruction, self.calls = task.instruction, []
    self._environment = environment
    self._proof, self._words = tau2_telecom.proof(task.environment['ticket'])
    environment.reset(task)

  def respond(self, reply: benchmark.Reply) -> Sequence[benchmark.Message]:
    """Executes the calls, and answers as the package does."""
    answers = []
    for call in reply.calls:
      if call.name == 'done':  # a reply ends an episode, no call
        break
      answers.append(self._call(call))
      if tau2_telecom.is_write(call.name) and self.is_helped():
        raise _Helped
    return answers

  def is_helped(self) -> bool:
    """Asks the device; the asking is part of the episode."""
    proof = types.ToolCall(name=self._proof, arguments={})
    return self._words in self._call(proof).text

  def _call(self, call: types.ToolCall) -> benchmark.Message:
    self.calls.append(call)
    seen = self._environment.call(call)
    text = seen.text
    if seen.error is None:
      value = json.loads(text)['result']
      text = value if isinstance(value, str) else json.dumps(value)
    return benchmark.Message(role='tool', text=text, error=seen.error)


def calls(
  environment: tau2_telecom.TelecomEnvironment, task: types.Task
) -> Sequence[types.ToolCall] | None:
  """What the script calls to solve a ticket; None: it does not solve it.

  Resets the environment.
  """
  phone = _Phone(environment, task)
  try:
    tau2_baselines.scripts(tau2_telecom.CATEGORY)['reading'](phone)
    if not tau2_telecom.is_handed_over(phone.calls):
      phone.is_helped()
  except _Helped:
    pass
  solved = environment.state_hash() == tau2_telecom.goal_hash(
    task.environment['ticket']
  )
  alike = tau2_telecom.is_handed_over(phone.calls) == (
    task.plan_reply == tau2_telecom.HANDED_OVER
  )
  return tuple(phone.calls) if solved and alike else None
