"""Answers to one prompt: what is sampled for it, and what it comes to."""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Literal

import numpy as np

from envace_jax import types
from envace_jax.serving import jobs, replies
from envace_jax.serving import pending as waiting

Finish = Literal['stop', 'length', 'tool_calls']


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


# Told (choice, what is certain of it by now), by the engine's thread.
Listen = Callable[[int, replies.Reply], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wanted:
  """What is asked of the answers."""

  sampling: jobs.Sampling
  n: int
  rules: replies.Rules
  deadline: float  # in `time.monotonic()`
  listen: Listen | None = None


def run(
  pending: waiting.Pending,
  wanted: Wanted,
  prompt: np.ndarray,
  finish: Callable[[jobs.Generated, replies.Reader], Choice],
  *,
  spent: int = 0,
  goes_on: bool = False,
) -> None:
  """Lets answers be sampled; `pending` is finished with a Completion.

  Args:
    pending: whose answers they are.
    wanted: how many, and how.
    prompt: what they answer, [T] int32.
    finish: makes a choice of what was sampled and heard.
    spent: tokens that were sampled in rehearsals before.
    goes_on: the request was let in before.

  Raises:
    Refused: there is no room to wait.
  """
  readers = [replies.Reader(wanted.rules) for _ in range(wanted.n)]
  group: list[jobs.Job] = []
  for i, reader in enumerate(readers):
    group.append(
      jobs.Job(
        prompt=prompt,
        sampling=wanted.sampling,
        stop_ids=wanted.rules.template.stop_ids[types.Role.ACT],
        choice=i,
        leader=group[0] if group else None,
        deadline=wanted.deadline,
        listen=_listener(i, reader, wanted.listen),
      )
    )
  generated = {}

  def then(job: jobs.Job, one: jobs.Generated) -> None:
    generated[job] = one
    if len(generated) < len(group):
      return  # others are not over
    tokens = sum(len(one.tokens.ids) for one in generated.values())
    pending.finish(
      Completion(
        choices=[
          finish(generated[job], reader)
          for job, reader in zip(group, readers, strict=True)
        ],
        prompt_ids=prompt,
        cached_tokens=generated[group[0]].reused,
        completion_tokens=tokens + spent,
        rehearsal_tokens=spent,
      )
    )

  pending.submit(group, then, goes_on=goes_on)


def read(generated: jobs.Generated, reader: replies.Reader) -> Choice:
  """What was sampled, as a choice."""
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
