"""From a finished row of tokens to an `Episode`: one way for every rollout."""

from collections.abc import Sequence
import dataclasses

import numpy as np

from envace_jax import types
from envace_jax.text import template as templates


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """What a rollout leaves behind for one attempt."""

  tokens: np.ndarray  # [T] int32
  authors: np.ndarray  # [T] int8
  logprobs: np.ndarray  # [T] float32
  stop_reason: types.StopReason
  real_calls: int = 0
  state_hash: str | None = None


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


def episode_of(
  attempt: Attempt, row: Row, template: templates.Template
) -> types.Episode:
  """Reads a finished row. A reply counts only if the policy finished it."""
  steps, reply = template.read(row.tokens, row.authors)
  replied = row.stop_reason is types.StopReason.REPLIED
  return types.Episode(
    task_id=attempt.task.id,
    group=attempt.group,
    sample_index=attempt.sample_index,
    tokens=row.tokens,
    authors=row.authors,
    logprobs=row.logprobs,
    steps=tuple(steps),
    reply=reply if replied else None,
    stop_reason=row.stop_reason,
    real_calls=row.real_calls,
    state_hash=row.state_hash,
    notes=attempt.notes,
  )


def generation_counts(episode: types.Episode) -> tuple[int, int]:
  """Generations per role (ACT, REHEARSE): the n_i^r of role-wise means."""
  authors = [author for author, _, _ in templates.runs(episode.authors)]
  return (
    authors.count(types.Author.ACT),
    authors.count(types.Author.REHEARSE),
  )
