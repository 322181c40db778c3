"""From a finished row of tokens to an `Episode`: one way for every rollout."""

from collections.abc import Sequence
import dataclasses

import numpy as np

from envace_jax import types
from envace_jax.text import formats, row_breaks, row_reading
from envace_jax.text import template as templates
from envace_jax.worlds import base as worlds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finished:
  """What a rollout leaves behind for one attempt."""

  rows: Sequence[types.Row]  # see types.Episode
  stop_reason: types.StopReason
  provenance: worlds.Provenance
  sampled_tokens: int = 0
  state_hash: str | None = None
  opened_at: Sequence[int] = (0,)  # see types.Episode


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attempt:
  """What a rollout is asked for: one task, once, under a global index."""

  task: types.Task
  group: int
  sample_index: int
  notes: str = ''


def attempts_of(
  tasks: Sequence[types.Task],
  group_size: int,
  *,
  first_index: int = 0,
  notes: Sequence[str] | None = None,
) -> list[Attempt]:
  """`group_size` attempts per task, numbered globally from `first_index`."""
  notes = notes if notes is not None else [''] * len(tasks)
  return [
    Attempt(
      task=task,
      group=i,
      sample_index=first_index + i * group_size + j,
      notes=notes[i],
    )
    for i, task in enumerate(tasks)
    for j in range(group_size)
  ]


def opening(attempt: Attempt, template: templates.Template) -> formats.Opening:
  """What an attempt's prompt says."""
  task = attempt.task
  return template.opening(
    task.instruction, attempt.notes, task.tools, task.system
  )


def stream(rows: Sequence[types.Row], opened_at: Sequence[int]) -> types.Row:
  """All that was said in ACT's rows of an episode, each turn once."""
  if len(opened_at) == 1:
    return rows[0]
  parts = list(zip(rows, opened_at, strict=False))
  joined = lambda name: np.concatenate(
    [getattr(row, name)[start:] for row, start in parts]
  )
  return types.Row(
    tokens=joined('tokens'),
    authors=joined('authors'),
    logprobs=joined('logprobs'),
  )


def episode_of(
  attempt: Attempt, finished: Finished, template: templates.Template
) -> types.Episode:
  """Reads the rows.

  A last reply that did not end the episode is one to a turn before the last:
  the user would have gone on.
  """
  said = stream(finished.rows, finished.opened_at)
  reading = row_reading.read(template, said.tokens, said.authors)
  replied = finished.stop_reason is types.StopReason.REPLIED
  turn_replies = list(reading.turn_replies)
  if not replied and reading.reply is not None:
    turn_replies.append(reading.reply)
  return types.Episode(
    task_id=attempt.task.id,
    group=attempt.group,
    sample_index=attempt.sample_index,
    rows=tuple(finished.rows),
    steps=reading.steps,
    turn_replies=tuple(turn_replies),
    num_turns=reading.num_turns,
    reply=reading.reply if replied else None,
    stop_reason=finished.stop_reason,
    source=finished.provenance.source,
    real_calls=finished.provenance.real_calls,
    sampled_tokens=finished.sampled_tokens,
    state_hash=finished.state_hash,
    notes=attempt.notes,
    opened_at=tuple(finished.opened_at),
    breaks=_breaks(attempt, finished, template),
  )


def generation_counts(episode: types.Episode) -> tuple[int, int]:
  """Generations per role (ACT, REHEARSE): the n_i^r of role-wise means."""
  authors = [
    author
    for row in episode.rows
    for author, _, _ in templates.runs(row.authors)
  ]
  return (
    authors.count(types.Author.ACT),
    authors.count(types.Author.REHEARSE),
  )


def _breaks(attempt, finished, template) -> int:
  """Prompts that broke a row: it was opened anew, or let stand."""
  if len(finished.opened_at) > 1:
    return len(finished.opened_at) - 1
  row = finished.rows[0]
  return row_breaks.count(
    template,
    opening(attempt, template),
    (row.tokens, row.authors),
    attempt.task.user_turns,
  )
