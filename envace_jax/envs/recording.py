"""What a real environment answered, kept: attempts as demonstrations.

A demonstration holds every call with its real observation and the class of its
outcome, so whatever learns from or is measured on recorded worlds can read one
(`tasks.dataset` stores them): fidelity probes, grounding records, anchors. Its
transitions are what REHEARSE is asked to predict: a history, a call, and what
came back.

Next to no call of a gold plan fails, so a world that is always pleased does
well on them. `without` leaves one call out: later ones then meet a state that
nobody planned for, and some really fail. Report outcome classes apart.

What users typed and tools returned may be private. `redact` is given every text
before it is kept, strings inside arguments included; names of tools and of
arguments are kept as they are.
"""

from collections.abc import Callable, Iterator, Sequence
import dataclasses

from envace_jax import types
from envace_jax.envs import benchmark
from envace_jax.text import tool_calls

SUCCESS = 'success'

Redact = Callable[[str], str]


class Recorder:
  """Hears an attempt as it goes."""

  def __init__(
    self, task_id: str, attempt: benchmark.Attempt, redact: Redact | None = None
  ):
    """Begins; `attempt` has heard nothing yet."""
    self._task_id, self._attempt = task_id, attempt
    self._redact = redact or (lambda text: text)
    self._steps: list[types.Step] = []
    self._user_turns: list[str] = []
    self._replies: list[str] = []
    self._messages = 0

  def hear(
    self, reply: benchmark.Reply, messages: Sequence[benchmark.Message]
  ) -> None:
    """A reply, and what it was answered with."""
    answers = [m for m in messages if m.role == 'tool']
    said = [self._redact(m.text) for m in messages if m.role == 'user']
    # Calls may stay unanswered: the last ones, and those beside one that could
    # not be read, where that ends a turn.
    for action, message in zip(reply.calls, answers, strict=False):
      self._steps.append(self._step(action, message))
    if said or not reply.calls:
      self._replies.append(self._redact(reply.text))
      self._user_turns += said
    self._messages += 1

  def demonstration(self, habit: str) -> types.Demonstration:
    """All of it; `habit` says whose attempt it was."""
    turns = len(self._user_turns)
    return types.Demonstration(
      task_id=self._task_id,
      instruction=self._redact(self._attempt.instruction),
      steps=tuple(self._steps),
      reply=self._replies[turns] if len(self._replies) > turns else '',
      habit=habit,
      tools=tuple(self._attempt.tools),
      system=self._redact(self._attempt.system),
      user_turns=tuple(self._user_turns),
      turn_replies=tuple(self._replies[:turns]),
    )

  def _step(self, action, message: benchmark.Message) -> types.Step:
    if isinstance(action, types.ToolCall):
      arguments = _map_text(self._redact, dict(action.arguments))
      action = types.ToolCall(name=action.name, arguments=arguments)
      text = tool_calls.render_call(action)
    else:
      action = dataclasses.replace(action, detail=self._redact(action.detail))
      text = action.detail
    return types.Step(
      action=action,
      action_text=text,
      observation_text=self._redact(message.text),
      outcome=message.error or SUCCESS,
      turn=len(self._user_turns),
      message=self._messages,
    )


def of_plan(
  source: benchmark.Benchmark,
  task_id: str,
  *,
  without: int | None = None,
  redact: Redact | None = None,
) -> types.Demonstration | None:
  """The oracle's replies, really executed, but for one call; None: no oracle.

  Raises:
    AttemptFailed: the benchmark broke down.
  """
  replies = source.oracle(task_id)
  if replies is None:
    return None
  if without is not None:
    replies = _leave_out(replies, without)
  attempt = source.open(task_id)
  try:
    recorder = Recorder(task_id, attempt, redact)
    for reply in replies:
      recorder.hear(reply, attempt.respond(reply))
    habit = 'oracle' if without is None else 'oracle_but_one'
    return recorder.demonstration(habit)
  finally:
    attempt.close()


def transitions(
  demonstration: types.Demonstration,
) -> Iterator[tuple[Sequence[types.Step], types.Record, str]]:
  """(steps before, call and answer, outcome) of every call that was one."""
  for i, step in enumerate(demonstration.steps):
    if isinstance(step.action, types.ToolCall):
      record = types.Record(
        call=step.action, observation_text=step.observation_text
      )
      yield demonstration.steps[:i], record, step.outcome


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


def _map_text(redact: Redact, value):
  """A JSON value with its strings redacted; keys stay."""
  if isinstance(value, str):
    return redact(value)
  if isinstance(value, dict):
    return {key: _map_text(redact, inner) for key, inner in value.items()}
  if isinstance(value, list | tuple):
    return [_map_text(redact, inner) for inner in value]
  return value
