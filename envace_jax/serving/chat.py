"""The service: conversations in, completions out, for HTTP and in-process.

  service.chat(messages, tools, settings) -> completion.Completion
  service.start(messages, tools, settings, listen) -> Pending

Both are one path: what a benchmark measures in-process is what a client of the
server is given. A conversation may be rehearsed privately first (`private`):
whoever asked is told of the reply alone, and of what the rehearsals cost.
"""

from collections.abc import Sequence
import dataclasses
import threading
import time

import numpy as np

from envace_jax import types
from envace_jax.rollout import private_rehearsal as rehearsing
from envace_jax.serving import (
  completion,
  conversations,
  engine,
  jobs,
  private,
  rehearsal,
  replies,
)
from envace_jax.serving import pending as waiting
from envace_jax.text import formats
from envace_jax.text import template as templates


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """How a conversation is answered."""

  sampling: jobs.Sampling = jobs.Sampling()
  n: int = 1
  stop: tuple[str, ...] = ()
  # 'auto', 'none', 'required', or the name of a tool.
  tool_choice: str = 'auto'
  named: str | None = None  # the tool that must be called
  parallel: bool | None = None  # several calls; None: where the format can
  deadline_s: float | None = None  # None: the service's own
  rehearsal: private.Settings | None = None  # None: the service's own


class Service:
  """Answers with one policy."""

  def __init__(
    self,
    motor: engine.Engine,
    template: templates.Template,
    *,
    deadline_s: float,
    ability: private.Ability = private.Ability(),  # noqa: B008 (it is frozen)
    rehearsal: private.Settings = private.Settings(),  # noqa: B008
  ):
    """Makes one.

    Args:
      motor: samples.
      template: must read parallel calls where its format can.
      deadline_s: for an answer, rehearsals included.
      ability: to rehearse.
      rehearsal: of requests with tools that say nothing of it.
    """
    self.engine, self.template, self.rehearsal = motor, template, rehearsal
    self._deadline_s, self._ability = deadline_s, ability
    self._kept = conversations.Conversations(template)
    self._notes = private.Kept()
    self._lock = threading.Lock()
    self._can_answer_several = formats.Joint.AGAIN in template.format.joints

  def chat(
    self,
    messages: Sequence[types.Json],
    tools: Sequence[types.Json] = (),
    settings: Settings = Settings(),  # noqa: B008 (it is frozen)
  ) -> completion.Completion:
    """Answers a conversation, and waits for it.

    Raises:
      Refused: it cannot be answered, or was not in time.
    """
    return self.start(messages, tools, settings).done.result()

  def start(
    self,
    messages: Sequence[types.Json],
    tools: Sequence[types.Json],
    settings: Settings,
    listen: completion.Listen | None = None,
  ) -> waiting.Pending:
    """Begins to answer a conversation.

    Raises:
      Refused: the request is wrong, too long, or there is no room to wait.
    """
    conversation = conversations.read(messages, tools)
    rules = self._rules(conversation, settings)
    wanted = self._rehearsal(conversation, settings)
    answer = self._answer(settings, rules, listen)
    pending = waiting.Pending(self.engine)

    def commit(notes: str, spent: int, *, goes_on: bool) -> None:
      noted = dataclasses.replace(conversation, notes=notes)
      with self._lock:
        if wanted is not None:
          self._notes.keep(wanted, conversation, notes)
        prompt = self._kept.prompt(noted)
      prompt = np.concatenate([prompt, np.asarray(rules.forced, np.int32)])
      self._check_length(prompt)
      finish = lambda generated, reader: self._choice(
        noted, prompt, generated, reader, wanted
      )
      completion.run(
        pending, answer, prompt, finish, spent=spent, goes_on=goes_on
      )

    known = ''
    if wanted is not None:
      with self._lock:
        known = self._notes.recall(wanted, conversation)
    if known is not None:
      commit(known, 0, goes_on=False)
    else:
      rehearsals = self._rehearsals(wanted, conversation, settings, answer)
      commit_them = lambda: commit(
        rehearsals.notes, rehearsals.sampled_tokens, goes_on=True
      )
      rehearsals.run(pending, commit_them)
    return pending

  def complete(
    self,
    prompt: np.ndarray,
    settings: Settings,
    listen: completion.Listen | None = None,
  ) -> waiting.Pending:
    """Begins to go on from tokens that are no conversation.

    Raises:
      Refused: as `start`.
    """
    rules = replies.Rules(
      template=self.template, may_call=False, parallel=False,
      stop=settings.stop,
    )  # fmt: skip
    self._check_length(prompt)
    pending = waiting.Pending(self.engine)
    answer = self._answer(settings, rules, listen)
    completion.run(pending, answer, prompt, completion.read)
    return pending

  def _answer(self, settings, rules, listen) -> completion.Wanted:
    """What is asked of the answers to any prompt."""
    return completion.Wanted(
      sampling=settings.sampling,
      n=settings.n,
      rules=rules,
      deadline=time.monotonic() + (settings.deadline_s or self._deadline_s),
      listen=listen,
    )

  def _rehearsals(
    self, wanted, conversation, settings, answer
  ) -> private.Rehearsals:
    """The rehearsals of a conversation, to be run."""

    def prompt_of(conversation):
      with self._lock:
        return self._kept.prompt(conversation)

    is_write = self._ability.is_write
    if wanted.writes is not None:
      is_write = lambda name: name in wanted.writes
    rehearsals = private.Rehearsals(
      wanted,
      rehearsal.Rules(
        template=self.template,
        own_row=self._ability.own_row,
        forced=answer.rules.forced,
        parallel=answer.rules.parallel,
        reflects=wanted.memory is rehearsing.Memory.WRITTEN,
        temperature=wanted.temperature,
        seed=settings.sampling.seed,
        max_actions=wanted.max_actions,
        context=self.engine.capacity.context,
        deadline=answer.deadline,
      ),
      conversation,
      prompt_of,
      is_write,
    )
    self._check_length(rehearsals.prompt, len(answer.rules.forced))
    return rehearsals

  def _rehearsal(self, conversation, settings) -> private.Settings | None:
    """How this conversation is rehearsed; None: not at all.

    Raises:
      Refused: it was asked for, and cannot be.
    """
    wanted = settings.rehearsal or self.rehearsal
    if not wanted.attempts:
      return None
    if settings.tool_choice == 'none' or not conversation.tools:
      wrong = 'rehearsal needs tools that may be called'
    elif [t.author for t in conversation.turns[:1]] != [types.Author.USER]:
      wrong = 'rehearsal needs a conversation that a user begins'
    else:
      wrong = self._ability.refusal
    if not wrong:
      return wanted
    if settings.rehearsal is None:  # nobody asked for it
      return None
    raise _refused('rehearsal', wrong)

  def _check_length(self, prompt: np.ndarray, more: int = 0) -> None:
    context = self.engine.capacity.context
    if len(prompt) + more >= context:
      raise jobs.Refused(
        400,
        'context_length_exceeded',
        f'the prompt has {len(prompt)} tokens, and rows hold {context}, the '
        'answer included; shorten the messages',
        'messages',
      )

  def _rules(self, conversation, settings) -> replies.Rules:
    """How the answer is read, and what it must begin with.

    Raises:
      Refused: what is wanted of the tools cannot be had.
    """
    tools = [tool['function']['name'] for tool in conversation.tools]
    choice = settings.tool_choice
    if choice in ('required', 'named') and not tools:
      raise _refused('tool_choice', f'tool_choice {choice!r} needs tools')
    if choice == 'named' and settings.named not in tools:
      raise _refused(
        'tool_choice', f'{settings.named!r} is none of the tools {tools}'
      )
    if settings.parallel and not self._can_answer_several:
      raise _refused(
        'parallel_tool_calls',
        'the chat template of this model cannot show several answers to one '
        'message; set parallel_tool_calls to false',
      )
    forced = ()
    if choice in ('required', 'named'):
      name = settings.named if choice == 'named' else None
      try:
        forced = tuple(self.template.format.call_opening(name))
      except ValueError as error:
        raise _refused('tool_choice', str(error)) from error
    return replies.Rules(
      template=self.template,
      may_call=bool(tools) and choice != 'none',
      parallel=self._can_answer_several and settings.parallel is not False,
      stop=settings.stop,
      forced=forced,
    )

  def _choice(
    self, conversation, prompt, generated, reader, wanted
  ) -> completion.Choice:
    choice = completion.read(generated, reader)
    said = formats.Turn(
      author=types.Author.ACT,
      text=choice.reply.content,
      calls=tuple(choice.reply.calls),
    )
    if wanted is not None:
      with self._lock:
        self._notes.keep(
          wanted,
          dataclasses.replace(
            conversation, turns=(*conversation.turns, said), notes=''
          ),
          conversation.notes,
        )
    if generated.ended is jobs.Ended.STOPPED and not reader.is_cut:
      row = np.concatenate([prompt, generated.tokens.ids])
      with self._lock:
        self._kept.keep(conversation, said, row)
    return choice


def _refused(param: str, message: str) -> jobs.Refused:
  return jobs.Refused(400, 'invalid_value', message, param)
