"""What BFCL's backends really answer, recorded along ground-truth plans.

A plan becomes a demonstration, with the real observation of every call; its
transitions are what a rehearsing policy is asked to predict: a history, a call,
and what came back. Next to no call of a plan fails, so a world that is always
pleased does well on them. `without` leaves one call out: later ones then meet
a state that nobody planned for, and some really fail. Report outcome classes
apart.

These are test tasks. Measure fidelity on them, and train on `bfcl_files`.
"""

from collections.abc import Iterator, Sequence
import dataclasses

from envace_jax import types
from envace_jax.envs import benchmark, bfcl, bfcl_backends
from envace_jax.text import tool_calls

OUTCOMES = ('success', 'refused', 'raised')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transition:
  """One call in its context, and what the backend said."""

  task_id: str
  tools: Sequence[types.Json]  # as shown when the call was made
  instruction: str
  user_turns: Sequence[str]  # said before the call, after the instruction
  history: Sequence[types.Step]  # all calls before it
  record: types.Record
  outcome: str  # one of OUTCOMES


def demonstration(
  source: bfcl.Bfcl, task_id: str, *, without: int | None = None
) -> types.Demonstration:
  """The plan of a multi-turn task, really executed, but for one call."""
  return _walk(source, task_id, without)[0]


def transitions(
  source: bfcl.Bfcl, task_id: str, *, without: int | None = None
) -> Iterator[Transition]:
  """One transition per call of the plan that is executed."""
  recorded, tools = _walk(source, task_id, without)
  for i, step in enumerate(recorded.steps):
    text = step.observation_text
    yield Transition(
      task_id=task_id,
      tools=tools[step.turn],
      instruction=recorded.instruction,
      user_turns=recorded.user_turns[: step.turn],
      history=recorded.steps[:i],
      record=types.Record(call=step.action, observation_text=text),
      outcome=bfcl_backends.error_of(text) or 'success',
    )


def _walk(
  source: bfcl.Bfcl, task_id: str, without: int | None
) -> tuple[types.Demonstration, list[Sequence[types.Json]]]:
  """A demonstration, and the tools that were shown in each turn."""
  replies = source.oracle(task_id)
  if without is not None:
    replies = _leave_out(replies, without)
  attempt = source.open(task_id)
  steps, user_turns, tools = [], [], [attempt.tools]
  try:
    for message, reply in enumerate(replies):
      turn = len(user_turns)
      said = attempt.respond(reply)
      if not reply.calls:
        user_turns += [heard.text for heard in said]
        tools.append(attempt.tools)
        continue
      steps += [
        _step(call, heard, turn=turn, message=message)
        for call, heard in zip(reply.calls, said, strict=True)
      ]
  finally:
    attempt.close()
  done = types.Demonstration(
    task_id=task_id,
    instruction=attempt.instruction,
    steps=tuple(steps),
    reply='Done.',
    habit='ground_truth' if without is None else 'one_call_less',
    tools=tuple(attempt.tools),
    user_turns=tuple(user_turns),
    turn_replies=('Done.',) * len(user_turns),
  )
  return done, tools


def _leave_out(
  replies: Sequence[benchmark.Reply], index: int
) -> list[benchmark.Reply]:
  """Replies without their call number `index`."""
  left, seen = [], 0
  for reply in replies:
    calls = [c for i, c in enumerate(reply.calls, seen) if i != index]
    seen += len(reply.calls)
    if calls or not reply.calls:
      left.append(dataclasses.replace(reply, calls=calls))
  return left


def _step(
  call: types.ToolCall, heard: benchmark.Message, *, turn: int, message: int
) -> types.Step:
  return types.Step(
    action=call,
    action_text=tool_calls.render_call(call),
    observation_text=heard.text,
    turn=turn,
    message=message,
  )
