"""An episode cut at its user turns, which is how checklists look at it.

A turn begins with a user message and ends with the policy's reply. A message
is what ACT said once: some tool calls with their observations, or the reply.

A turn is reached when its user message was shown. An episode that stopped
between two turns has its last reply in `turn_replies`; only one that REPLIED
has one in `reply`.
"""

from collections.abc import Sequence
import dataclasses
import itertools

from envace_jax import types
from envace_jax.rewards import verifiers
from envace_jax.text import tool_calls


@dataclasses.dataclass(frozen=True, kw_only=True)
class Message:
  """What ACT said once, and what answered it; a reply has no answer."""

  text: str
  observations: Sequence[str] = ()

  @property
  def has_error(self) -> bool:
    """Whether an observation is an object with an error in it."""
    return any(map(tool_calls.reports_error, self.observations))


def reply(episode: types.Episode, turn: int) -> str | None:
  """The reply to one user turn, None where there was none."""
  if turn < len(episode.turn_replies):
    return episode.turn_replies[turn]
  if episode.stop_reason is types.StopReason.REPLIED:
    return episode.reply if turn == len(episode.turn_replies) else None
  return None


def transcript(
  episode: types.Episode,
  tools: Sequence[types.Json],
  turn: int,
  state_hash: str | None = None,
) -> verifiers.Transcript:
  """What verifiers may see of one turn; the state is the episode's last."""
  return verifiers.Transcript(
    steps=[step for step in episode.steps if step.turn == turn],
    reply=reply(episode, turn),
    tools=tools,
    state_hash=state_hash,
  )


def messages(episode: types.Episode, turn: int) -> list[Message]:
  """What ACT said in one turn, in order, the reply last."""
  steps = [step for step in episode.steps if step.turn == turn]
  said = [
    Message(text=text, observations=[s.observation_text for s in calls])
    for (_, text), calls in itertools.groupby(
      steps, key=lambda step: (step.message, step.action_text)
    )
  ]
  answer = reply(episode, turn)
  return said if answer is None else [*said, Message(text=answer)]


def user_message(task: types.Task, turn: int) -> str:
  """What the user said first in a turn; '' beyond the task's script."""
  script = [task.instruction, *task.user_turns]
  return script[turn] if turn < len(script) else ''
