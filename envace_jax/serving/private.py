"""Private rehearsal of a conversation: rehearse, then commit to one reply.

  parallel     N rehearsals of the conversation as it stands, side by side
  sequential   one after the other, each shown what those before left behind

What they leave behind becomes notes by `rollout.private_rehearsal`, the way it
does in-process, and stands behind the user's first message. A conversation is
rehearsed once, by the first request that asks for it; later turns go on with
the notes of that time, so that what the policy knew stays what it knew, and the
tokens of the row stay where they were. Only where those notes are lost
(`Kept`) is a conversation rehearsed again, from where it stands by then.

The budget is one of sampled tokens: side by side each rehearsal has an equal
share, one after the other each has its share of what is left. Notes take at
most a quarter of the room that the conversation leaves in its row.
"""

import collections
from collections.abc import Callable
import dataclasses

import numpy as np

from envace_jax import types
from envace_jax.rollout import private_rehearsal as rehearsing
from envace_jax.serving import conversations, rehearsal
from envace_jax.serving import pending as waiting
from envace_jax.text import template as templates

MAX_ATTEMPTS = 16
_KEPT_LETTERS = 1 << 24
_LETTERS_OF_A_NAME = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """How a request is rehearsed."""

  attempts: int = 0  # N; 0: not at all
  mode: rehearsing.Mode = rehearsing.Mode.PARALLEL
  memory: rehearsing.Memory = rehearsing.Memory.AGREED
  max_tokens: int = 2048  # sampled in all rehearsals of a request
  max_actions: int = 8  # ACT speaks in one rehearsal
  max_notes: int = 4  # remembered calls
  temperature: float = 1.0  # of both roles
  # Tools that change something; None: those that the policy was trained with.
  writes: tuple[str, ...] | None = None
  conversation: str = ''  # whose notes these are, where messages may be alike

  def __post_init__(self):
    if not 0 <= self.attempts <= MAX_ATTEMPTS:
      raise ValueError(
        f'rehearsal.attempts={self.attempts} is not in [0, {MAX_ATTEMPTS}]'
      )
    if self.max_tokens < max(1, self.attempts):
      raise ValueError(
        f'rehearsal.max_tokens={self.max_tokens} must be at least a token for '
        f'each of rehearsal.attempts={self.attempts}'
      )
    if min(self.max_actions, self.max_notes) < 1 or self.temperature < 0:
      raise ValueError(
        'rehearsal.max_actions and rehearsal.max_notes must be at least 1, '
        'rehearsal.temperature at least 0'
      )

  def as_request(self) -> types.Json:
    """As the `rehearsal` of a request; empty for none."""
    if not self.attempts:
      return {}
    fields = dataclasses.asdict(self)
    fields |= {'mode': self.mode.value, 'memory': self.memory.value}
    absent = (None, '')
    return {name: v for name, v in fields.items() if v not in absent}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ability:
  """What a policy brings to rehearsing."""

  refusal: str = ''  # why it cannot; '' where it can
  own_row: rehearsal.OwnRow | None = None  # see `rehearsal`
  is_write: Callable[[str], bool] = lambda name: False  # of its own tools


class Kept:
  """Notes of conversations that were rehearsed, by how these began."""

  def __init__(self):
    self._notes: collections.OrderedDict[str, str] = collections.OrderedDict()
    self._letters = 0

  def recall(
    self, settings: Settings, conversation: conversations.Conversation
  ) -> str | None:
    """The notes of an earlier turn; the latest turn that has any counts."""
    for name in reversed(conversation.keys()[:-1]):
      notes = self._notes.get(_named(settings, name))
      if notes is not None:
        self._notes.move_to_end(_named(settings, name))
        return notes
    return None

  def keep(
    self,
    settings: Settings,
    conversation: conversations.Conversation,
    notes: str,
  ) -> None:
    """Remembers notes of a conversation that goes up to here."""
    name = _named(settings, conversation.keys()[-1])
    self._letters -= _size(self._notes.pop(name, None))
    self._notes[name] = notes
    self._letters += _size(notes)
    while self._letters > _KEPT_LETTERS:
      self._letters -= _size(self._notes.popitem(last=False)[1])


class Rehearsals:
  """All rehearsals of one request."""

  def __init__(
    self,
    settings: Settings,
    rules: rehearsal.Rules,
    conversation: conversations.Conversation,
    prompt_of: Callable[[conversations.Conversation], np.ndarray],
    is_write: Callable[[str], bool],
  ):
    """Prepares them.

    Args:
      settings: how many, and how.
      rules: of each.
      conversation: as it stands, without notes.
      prompt_of: a conversation's tokens.
      is_write: whether a tool changes something, by name.
    """
    self._settings, self._rules = settings, rules
    self._conversation, self._prompt_of = conversation, prompt_of
    self.prompt = prompt_of(conversation)
    self._episodes: list[types.Episode] = []
    self._wave: list[rehearsal.Rehearsal] = []
    self._left = 0  # of the wave
    task = types.Task(
      id='', instruction='', tools=conversation.tools, checklist=()
    )
    self.rehearsed = rehearsing.Rehearsed(
      tasks=[task],
      attempts=[self._episodes],
      rule=rehearsing.Rule(
        attempts=settings.attempts,
        mode=settings.mode,
        memory=settings.memory,
        max_notes=settings.max_notes,
      ),
      context=rehearsing.Context(
        is_write=is_write, fits=self._fits(rules.template)
      ),
    )

  def run(
    self,
    pending: waiting.Pending,
    finish: Callable[[], None],
    *,
    goes_on: bool = False,
  ) -> None:
    """Begins with them, or with the next of them; `finish` is what comes then.

    Raises:
      Refused: there is no room to wait.
    """
    if not self._begin_wave():
      finish()
      return
    group, at = [], {}
    for one in self._wave:
      if (job := one.job()) is not None:
        job.leader = group[0] if group else None
        at[job] = one
        group.append(job)

    def then(job, generated):
      one = at.pop(job)
      one.hear(generated)
      if (more := one.job()) is not None:
        at[more] = one
        pending.submit([more], then, goes_on=True)
      elif not at:
        self._end_wave()
        self.run(pending, finish, goes_on=True)

    if group:
      pending.submit(group, then, goes_on=goes_on)
    else:  # no row has room for a token
      finish()

  @property
  def notes(self) -> str:
    return self.rehearsed.notes()[0]

  @property
  def sampled_tokens(self) -> int:
    return self.rehearsed.sampled_tokens

  def _begin_wave(self) -> bool:
    """Makes the next rehearsals; False where there are no more."""
    settings, done = self._settings, len(self._episodes)
    more = settings.attempts - done
    budget = settings.max_tokens - self.sampled_tokens
    share, extra = divmod(budget, max(more, 1))
    if not more or budget < 1:
      return False
    side_by_side = settings.mode is rehearsing.Mode.PARALLEL
    conversation, prompt = self._conversation, self.prompt
    if done and (notes := self.notes):
      conversation = dataclasses.replace(conversation, notes=notes)
      prompt = self._prompt_of(conversation)
    self._wave = [
      rehearsal.Rehearsal(
        self._rules,
        conversation,
        prompt,
        number=done + i,
        max_tokens=share + (i < extra),
      )
      for i in range(more if side_by_side else 1)
    ]
    return True

  def _end_wave(self) -> None:
    self._episodes += [one.episode() for one in self._wave]

  def _fits(
    self, template: templates.Template
  ) -> Callable[[types.Task, str], bool]:
    # Without the tools, of which there may be a lot: they cost the same again.
    size = lambda notes: len(template.prompt('', notes)[0])
    nothing = size('')
    most = (self._rules.context - len(self.prompt)) // 4
    return lambda task, notes: size(notes) - nothing <= most


def _named(settings: Settings, name: str) -> str:
  return f'{settings.conversation}/{name}'


def _size(notes: str | None) -> int:
  return 0 if notes is None else len(notes) + _LETTERS_OF_A_NAME
