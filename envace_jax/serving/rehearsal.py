"""One private rehearsal: a conversation that the policy goes on with alone.

  ACT --calls--> REHEARSE answers each --> ACT ... --> ACT replies

As in `rollout.alternation`, for the engine's jobs: it says what is to be
sampled next, hears what that came to, and runs nothing itself. A budget of
tokens that runs out ends it where it stands, and what was answered by then was
rehearsed.

Under split views REHEARSE reads a row of its own, where ACT's thoughts are not
(`worlds.own_row`). Not here: answers drawn again where they are impossible, and
records of real calls, of which a client's task has none.
"""

import dataclasses

import numpy as np

from envace_jax import types
from envace_jax.serving import conversations, jobs
from envace_jax.text import formats, reflection, row_reading
from envace_jax.text import template as templates

_CHOICE = 1 << 16  # from here on, streams of random numbers are no reply's


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnRow:
  """How REHEARSE's own row opens under split views."""

  template: templates.Template
  instructions: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
  """How a conversation is rehearsed."""

  template: templates.Template
  own_row: OwnRow | None  # None: REHEARSE reads the row of ACT
  forced: tuple[int, ...]  # what the first action begins with
  parallel: bool  # an action may call several tools
  reflects: bool  # ACT is asked at the end what is to be remembered
  temperature: float
  seed: int | None
  max_actions: int
  context: int  # tokens in a row
  deadline: float  # in `time.monotonic()`


class Rehearsal:
  """Not safe to use from several threads."""

  def __init__(
    self,
    rules: Rules,
    conversation: conversations.Conversation,
    prompt: np.ndarray,
    *,
    number: int,
    max_tokens: int,
  ):
    """Begins one.

    Args:
      rules: what all of a request have in common.
      conversation: as it stands.
      prompt: its tokens, up to where ACT speaks, without what is forced.
      number: which one of the request's it is.
      max_tokens: that may be sampled, in both roles.
    """
    self._rules, self._conversation = rules, conversation
    self._number, self._budget = number, max_tokens
    self._turns = list(conversation.turns)
    self._said: list[templates.Span] = []
    self._act, self._rehearse = np.asarray(prompt, np.int32), None
    if rules.own_row is not None:
      self._rehearse = _opened(rules.own_row, conversation)
    self._action: list[int] = []  # what ACT has begun to say
    self._calls: list = []  # yet to be answered
    self._role, self._actions, self._is_asked = types.Role.ACT, 0, False
    self.sampled_tokens = 0
    self.stop: types.StopReason | None = None
    if rules.forced:
      self._say(np.asarray(rules.forced, np.int32), types.Author.ACT)
      self._action = list(rules.forced)

  def job(self) -> jobs.Job | None:
    """What is to be sampled next; None: it is over."""
    row, rules = self._act, self._rules
    if self._role is types.Role.REHEARSE and self._rehearse is not None:
      row = self._rehearse
    left, room = self._budget - self.sampled_tokens, rules.context - len(row)
    if self.stop is None and min(left, room) < 1:
      self.stop = self._cut()
    if self.stop is not None:
      return None
    return jobs.Job(
      prompt=row,
      sampling=jobs.Sampling(
        temperature=rules.temperature,
        max_tokens=min(left, room),
        seed=rules.seed,
      ),
      stop_ids=rules.template.stop_ids[self._role],
      author=types.AUTHOR_OF_ROLE[self._role],
      choice=_CHOICE + self._number,
      deadline=rules.deadline,
    )

  def hear(self, generated: jobs.Generated) -> None:
    """What the last job came to."""
    ids = generated.tokens.ids
    self.sampled_tokens += len(ids)
    self._say(ids, types.AUTHOR_OF_ROLE[self._role])
    if generated.ended is not jobs.Ended.STOPPED:
      self.stop = self._cut()
    elif self._role is types.Role.ACT:
      self._acted([*self._action, *map(int, ids)])
    else:
      self._answered(ids)

  def episode(self) -> types.Episode:
    """What was said, as every rollout leaves it."""
    ids, authors = templates.join(self._said)
    reading = row_reading.read(self._rules.template, ids, authors)
    replied = self.stop is types.StopReason.REPLIED
    logprobs = np.zeros(len(ids), np.float32)
    return types.Episode(
      task_id='',
      group=0,
      sample_index=self._number,
      rows=(types.Row(tokens=ids, authors=authors, logprobs=logprobs),),
      steps=reading.steps,
      reply=reading.reply if replied else None,
      stop_reason=self.stop,
      turn_replies=reading.turn_replies,
      num_turns=reading.num_turns,
      sampled_tokens=self.sampled_tokens,
      notes=self._conversation.notes,
    )

  def _acted(self, action: list[int]) -> None:
    template, joints = self._rules.template, formats.Joint
    self._action, self._actions = [], self._actions + 1
    self._turns.append(
      formats.Turn(author=types.Author.ACT, text=template.text(action))
    )
    if template.is_call(action):
      self._calls = template.calls(action)
      if len(self._calls) > 1 and not self._rules.parallel:
        self.stop = types.StopReason.PARALLEL_CALLS
      elif self._actions >= self._rules.max_actions:
        self.stop = types.StopReason.MAX_ACTIONS
      else:
        self._open(types.Role.REHEARSE, joints.CALLED)
    elif self._rules.reflects and not self._is_asked:
      self._is_asked, asked = True, reflection.REQUEST
      self._turns.append(formats.Turn(author=types.Author.USER, text=asked))
      self._say(template.user_turn(asked), types.Author.USER)
      self._open(types.Role.ACT, joints.ASKED)
    else:
      self.stop = types.StopReason.REPLIED

  def _answered(self, ids: np.ndarray) -> None:
    text = self._rules.template.observation_text(ids)
    self._turns.append(formats.Turn(author=types.Author.WORLD, text=text))
    self._calls.pop(0)
    if self._calls:
      self._open(types.Role.REHEARSE, formats.Joint.AGAIN)
    else:
      self._open(types.Role.ACT, formats.Joint.ANSWERED)

  def _open(self, role: types.Role, joint: formats.Joint) -> None:
    """Lets a role speak next."""
    template, self._role = self._rules.template, role
    self._say(template.header(joint)[0], types.Author.FORCED)
    if role is types.Role.ACT:
      so_far = dataclasses.replace(self._conversation, turns=tuple(self._turns))
      try:
        self._act = conversations.follow(template, self._act, so_far)
      except ValueError:  # the chat template does not show what was said
        self.stop = types.StopReason.WORLD_FAILED

  def _say(self, ids: np.ndarray, author: types.Author) -> None:
    authors = np.full(len(ids), author, np.int8)
    self._said.append((ids, authors))
    self._act = np.concatenate([self._act, ids])
    if self._rehearse is not None:
      if author is types.Author.ACT:
        copied = np.full(len(ids), types.Author.COPIED, np.int8)
        ids, _ = self._rules.template.without_thoughts(ids, copied)
      self._rehearse = np.concatenate([self._rehearse, ids])

  def _cut(self) -> types.StopReason:
    if self._budget > self.sampled_tokens:
      return types.StopReason.CONTEXT_FULL
    if self._role is types.Role.ACT:
      return types.StopReason.ACTION_TRUNCATED
    return types.StopReason.OBSERVATION_TRUNCATED


def _opened(
  own_row: OwnRow, conversation: conversations.Conversation
) -> np.ndarray:
  """REHEARSE's own row of a conversation, up to where ACT speaks."""
  shown = dataclasses.replace(
    conversation, system=own_row.instructions, notes=''
  )
  return conversations.anew(own_row.template, shown)
