"""Rehearsed episodes tried for real: same calls, same order, open loop.

The environment is reset to the task and given exactly the calls of the
rehearsal, whatever it answers. Each answer pairs with the rehearsed one; the
rehearsed actions and reply over the real answers make the replay, which splits
a gap between rehearsed and real success into its causes.

Only the answers up to and including the first that differs answer the same
call on the same history; `same_history` gives those, and fidelity and error
recall are about nothing else.
"""

from collections.abc import Callable, Sequence
import contextlib
import dataclasses

from envace_jax import types
from envace_jax.envs import base as envs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replay:
  """One rehearsed episode and what the real world says to it."""

  rehearsed: types.Episode
  real: types.Episode  # same actions and reply, real observations and state

  def same_history(self) -> list[tuple[types.Step, types.Step]]:
    """(rehearsed, real) steps until the two worlds first disagree."""
    pairs = []
    for mine, theirs in zip(self.rehearsed.steps, self.real.steps, strict=True):
      pairs.append((mine, theirs))
      if mine.observation_text != theirs.observation_text:
        break
    return pairs


def replay(
  episodes: Sequence[types.Episode],
  tasks: Sequence[types.Task],
  make_environment: Callable[[], envs.Environment],
) -> list[Replay]:
  """Replays each episode in a fresh state of its task."""
  replays = []
  with contextlib.closing(make_environment()) as environment:
    for episode, task in zip(episodes, tasks, strict=True):
      environment.reset(task)
      steps = [
        dataclasses.replace(
          step,
          observation_text=environment.call(step.action).text,
          author=types.Author.WORLD,
        )
        for step in episode.steps
      ]
      real = dataclasses.replace(
        episode,
        steps=tuple(steps),
        state_hash=environment.state_hash(),
        source=types.Source.REAL,
        real_calls=len(steps),
      )
      replays.append(Replay(rehearsed=episode, real=real))
  return replays
