"""What τ²-Bench's tools really answered, call by call, along its gold plans.

A transition is a call after a history and its real answer: what a policy that
rehearses is to reproduce. Plans are executed as they stand, from the initial
state of their task; nothing is invented.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import enum

from envace_jax import types
from envace_jax.envs import benchmark, tau2, tau2_attempts
from envace_jax.text import tool_calls


class Kind(enum.Enum):
  """What became of a call."""

  ANSWERED = 'answered'
  REFUSED = 'refused'  # an error was the answer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transition:
  """One call of a plan."""

  task_id: str
  instruction: str
  tools: Sequence[types.Json]
  history: Sequence[types.Step]  # before the call
  record: types.Record  # the call, and what answered it
  kind: Kind


def transitions(
  bench: tau2.Tau2, task_ids: Sequence[str]
) -> Iterator[Transition]:
  """Of the plans of some tasks, in order; a task without a plan has none."""
  for task_id in task_ids:
    attempt = bench.open(task_id)
    history: list[types.Step] = []
    for reply in bench.oracle(task_id) or ():
      messages = attempt.respond(reply)
      for call, message in zip(reply.calls, messages, strict=False):
        found = _transition(task_id, attempt, tuple(history), call, message)
        yield found
        history.append(
          types.Step(
            action=call,
            action_text=tool_calls.render_call(call),
            observation_text=message.text,
          )
        )
    attempt.close()


def _transition(
  task_id: str,
  attempt: tau2_attempts.Tau2Attempt,
  history: Sequence[types.Step],
  call: types.ToolCall,
  message: benchmark.Message,
) -> Transition:
  return Transition(
    task_id=task_id,
    instruction=attempt.instruction,
    tools=attempt.tools,
    history=history,
    record=types.Record(call=call, observation_text=message.text),
    kind=Kind.ANSWERED if message.error is None else Kind.REFUSED,
  )
