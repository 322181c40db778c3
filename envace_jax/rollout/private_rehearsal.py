"""Rehearse privately, then commit once.

N rehearsals of a task cost no real call. What they leave behind is written down
as notes, and the one committed execution sees the notes in its prompt.

  parallel     N rehearsals of the bare task
  sequential   each rehearsal is shown what those before it left behind

Test-time rehearsal of EnvACE (arXiv 2608.06197, eq. 9); the released code has
no test-time part, so how a memory is made and shown is ours (`memory`). With
`memory='written'` every attempt is followed by the question of
`text.reflection`: its self-evaluation and advice, f^(n) of that equation.
"""

from collections.abc import Callable, Sequence
import dataclasses
import enum

from envace_jax import types
from envace_jax.rollout import memory as memories
from envace_jax.text import notes as notes_text
from envace_jax.text import reflection


class Mode(enum.Enum):
  PARALLEL = 'parallel'
  SEQUENTIAL = 'sequential'


class Memory(enum.Enum):
  AGREED = 'agreed'  # by rule
  WRITTEN = 'written'  # by the policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
  """How rehearsals become a memory."""

  attempts: int  # rehearsals per task, N
  mode: Mode
  memory: Memory
  max_notes: int  # remembered calls

  def __post_init__(self):
    if self.attempts < 0 or self.max_notes < 1:
      raise ValueError(
        f'private.attempts={self.attempts} must not be negative and '
        f'private.max_notes={self.max_notes} at least 1'
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
  """What making a memory needs to know of the tools and of the prompt."""

  is_write: Callable[[str], bool]  # by tool name
  fits: Callable[[types.Task, str], bool]  # whether a prompt holds these notes


# (tasks, notes per task or None, samples, number of the first attempt) ->
# episodes, task by task.
Rehearse = Callable[
  [Sequence[types.Task], Sequence[str] | None, int, int], list[types.Episode]
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rehearsed:
  """The rehearsals of some tasks."""

  tasks: Sequence[types.Task]
  attempts: Sequence[Sequence[types.Episode]]  # of each task
  rule: Rule
  context: Context

  def first(self, attempts: int) -> 'Rehearsed':
    """As if there had been fewer."""
    return dataclasses.replace(
      self,
      attempts=[episodes[:attempts] for episodes in self.attempts],
      rule=dataclasses.replace(self.rule, attempts=attempts),
    )

  def facts(self) -> list[list[notes_text.Fact]]:
    """What the attempts at each task agree on, however memory is made."""
    return [
      memories.agreed(episodes, self.rule.max_notes, self.context.is_write)
      for episodes in self.attempts
    ]

  def reflections(self) -> list[list[reflection.Reflection | None]]:
    """What was said of each attempt; None where nothing clear was."""
    return [
      [reflection.read(episode, task) for episode in episodes]
      for task, episodes in zip(self.tasks, self.attempts, strict=True)
    ]

  def notes(self) -> list[str]:
    """What is shown of each task's rehearsals."""
    if self.rule.memory is Memory.AGREED:
      return self.show(self.facts())
    return [
      self._fitting(task, memories.written(said, self.rule.max_notes))
      for task, said in zip(self.tasks, self.reflections(), strict=True)
    ]

  def show(self, facts: Sequence[Sequence[notes_text.Fact]]) -> list[str]:
    """Facts about each task, as it would be shown them."""
    return [
      self._fitting(task, memories.render(known))
      for task, known in zip(self.tasks, facts, strict=True)
    ]

  @property
  def sampled_tokens(self) -> int:
    """What the rehearsals cost."""
    return sum(
      episode.sampled_tokens
      for episodes in self.attempts
      for episode in episodes
    )

  def _fitting(self, task: types.Task, notes: Sequence[str]) -> str:
    return memories.show(notes, lambda shown: self.context.fits(task, shown))


def rehearse(
  tasks: Sequence[types.Task], rule: Rule, context: Context, run: Rehearse
) -> Rehearsed:
  """N rehearsals of each task."""
  asked = tasks
  if rule.memory is Memory.WRITTEN:
    asked = [reflection.ask(task) for task in tasks]
  attempts = [[] for _ in tasks]
  rehearsed = Rehearsed(
    tasks=tasks, attempts=attempts, rule=rule, context=context
  )
  if rule.mode is Mode.PARALLEL:
    episodes = iter(run(asked, None, rule.attempts, 0))
    for mine in attempts:
      mine += [next(episodes) for _ in range(rule.attempts)]
    return rehearsed
  for number in range(rule.attempts):
    episodes = run(asked, rehearsed.notes(), 1, number)
    for mine, episode in zip(attempts, episodes, strict=True):
      mine.append(episode)
  return rehearsed
