"""The service: conversations in, completions out, for HTTP and in-process.

  service.chat(messages, tools, settings) -> Completion
  service.start(messages, tools, settings, listen) -> Pending

Both are one path: what a benchmark measures in-process is what a client of the
server is given.
"""

from collections.abc import Callable, Sequence
import concurrent.futures
import dataclasses
import threading
import time
from typing import Literal

import numpy as np

from envace_jax import types
from envace_jax.serving import conversations, engine, jobs, replies
from envace_jax.text import formats
from envace_jax.text import template as templates

Finish = Literal['stop', 'length', 'tool_calls']


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
  """One answer."""

  reply: replies.Reply
  finish: Finish
  tokens: jobs.Tokens  # as sampled, without what a stop string cut off
  shown: int  # how many of them are part of the reply: not the stop token


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
  """All answers to a conversation, and what they cost."""

  choices: Sequence[Choice]
  prompt_ids: np.ndarray
  cached_tokens: int  # of the prompt, not read again
  completion_tokens: int  # sampled, stop tokens and rehearsals included
  rehearsal_tokens: int = 0


class Pending:
  """Answers under way."""

  def __init__(self, group: Sequence[jobs.Job], wake: Callable[[], None]):
    self._group, self._wake = group, wake
    self.done: concurrent.futures.Future = concurrent.futures.Future()
    # Nobody cancels what is waited for, only the jobs behind it.
    self.done.set_running_or_notify_cancel()

  def cancel(self) -> None:
    """Nobody waits for them."""
    for job in self._group:
      job.cancel()
    self._wake()


# Told (choice, what is certain of it by now), by the engine's thread.
Listen = Callable[[int, replies.Reply], None]


class Service:
  """Answers with one policy."""

  def __init__(
    self,
    motor: engine.Engine,
    template: templates.Template,
    *,
    deadline_s: float,
  ):
    """Makes one; `template` must read parallel calls where its format can."""
    self.engine, self.template = motor, template
    self._deadline_s = deadline_s
    self._kept = conversations.Conversations(template)
    self._lock = threading.Lock()
    self._can_answer_several = formats.Joint.AGAIN in template.format.joints

  def chat(
    self,
    messages: Sequence[types.Json],
    tools: Sequence[types.Json] = (),
    settings: Settings = Settings(),  # noqa: B008 (it is frozen)
  ) -> Completion:
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
    listen: Listen | None = None,
  ) -> Pending:
    """Begins to answer a conversation.

    Raises:
      Refused: the request is wrong, too long, or there is no room to wait.
    """
    conversation = conversations.read(messages, tools)
    rules = self._rules(conversation, settings)
    with self._lock:
      prompt = self._kept.prompt(conversation)
    prompt = np.concatenate([prompt, np.asarray(rules.forced, np.int32)])
    finish = lambda job, generated, reader: self._choice(
      conversation, prompt, generated, reader
    )
    return self._begin(prompt, settings, rules, finish, listen)

  def complete(
    self, prompt: np.ndarray, settings: Settings, listen: Listen | None = None
  ) -> Pending:
    """Begins to go on from tokens that are no conversation.

    Raises:
      Refused: as `start`.
    """
    rules = replies.Rules(
      template=self.template, may_call=False, parallel=False,
      stop=settings.stop,
    )  # fmt: skip
    finish = lambda job, generated, reader: _choice(generated, reader)
    return self._begin(prompt, settings, rules, finish, listen)

  def _begin(self, prompt, settings, rules, finish, listen) -> Pending:
    context = self.engine.capacity.context
    if len(prompt) >= context:
      raise jobs.Refused(
        400,
        'context_length_exceeded',
        f'the prompt has {len(prompt)} tokens, and rows hold {context}, the '
        'answer included; shorten the messages',
        'messages',
      )
    seconds = settings.deadline_s or self._deadline_s
    group, readers = [], [replies.Reader(rules) for _ in range(settings.n)]
    for i, reader in enumerate(readers):
      group.append(
        jobs.Job(
          prompt=prompt,
          sampling=settings.sampling,
          stop_ids=self.template.stop_ids[types.Role.ACT],
          choice=i,
          leader=group[0] if group else None,
          deadline=time.monotonic() + seconds,
          listen=_listener(i, reader, listen),
        )
      )
    pending = Pending(group, self.engine.wake)
    left = threading.Semaphore(len(group) - 1)

    def ended(_) -> None:
      if left.acquire(blocking=False):
        return  # others are not over
      try:
        generated = [job.done.result() for job in group]
        choices = [
          finish(job, one, reader)
          for job, one, reader in zip(group, generated, readers, strict=True)
        ]
      except (Exception, concurrent.futures.CancelledError) as error:
        pending.done.set_exception(error)
        return
      pending.done.set_result(
        Completion(
          choices=choices,
          prompt_ids=prompt,
          cached_tokens=generated[0].reused,
          completion_tokens=sum(len(g.tokens.ids) for g in generated),
        )
      )

    for job in group:
      job.done.add_done_callback(ended)
    self.engine.submit(group)
    return pending

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

  def _choice(self, conversation, prompt, generated, reader) -> Choice:
    choice = _choice(generated, reader)
    if generated.ended is jobs.Ended.STOPPED and not reader.is_cut:
      said = formats.Turn(
        author=types.Author.ACT,
        text=choice.reply.content,
        calls=tuple(choice.reply.calls),
      )
      row = np.concatenate([prompt, generated.tokens.ids])
      with self._lock:
        self._kept.keep(conversation, said, row)
    return choice


def _choice(generated: jobs.Generated, reader: replies.Reader) -> Choice:
  reply, tokens = reader.whole(), generated.tokens
  stopped = generated.ended is jobs.Ended.STOPPED
  shown = reader.kept(tokens.ids)
  if stopped and shown == len(tokens.ids):
    shown -= 1
  finish = 'length' if generated.ended is jobs.Ended.LENGTH else 'stop'
  if reader.is_cut:
    finish = 'stop'
  return Choice(
    reply=reply,
    finish='tool_calls' if reply.calls else finish,
    tokens=tokens,
    shown=shown,
  )


def _listener(index: int, reader: replies.Reader, listen: Listen | None):
  def hear(tokens: jobs.Tokens) -> bool:
    reader.hear(tokens.ids)
    if listen is not None:
      listen(index, reader.so_far())
    return reader.is_cut

  return hear


def _refused(param: str, message: str) -> jobs.Refused:
  return jobs.Refused(400, 'invalid_value', message, param)
