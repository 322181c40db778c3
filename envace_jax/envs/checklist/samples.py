"""Loads published checklist samples: files in, tasks and their dialogues out.

What is wrong or too long is dropped and counted, with the first message of each
kind kept; weights of a turn that do not sum to 1 are scaled, and counted apart.
Of several checklists for a sample the first is used, as the published launcher
does. No text is ever cut.
"""

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import itertools

from etils import epath

from envace_jax import errors, types
from envace_jax.envs.checklist import convert as convert
from envace_jax.envs.checklist import files as files
from envace_jax.envs.checklist import schema as schema

REASONS = (
  *schema.REASONS,
  'repeated_id',
  'refused',  # by the caller's `validate`
  'overlong',
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loaded:
  """What samples became. The two sequences run in parallel."""

  tasks: Sequence[types.Task]
  demonstrations: Sequence[types.Demonstration]
  dropped: Mapping[str, int]  # reason -> samples that are not in `tasks`
  repaired: Mapping[str, int]  # 'weights' -> samples with normalised weights
  left_out: Mapping[str, int]  # 'variants', 'turns' of the samples in `tasks`
  first: Mapping[str, str]  # reason, or repair -> its first message


def load(
  paths: Sequence[epath.PathLike],
  *,
  too_long: Callable[[types.Task], str] | None = None,
  validate: Callable[[types.Task], None] | None = None,
  strict: bool = False,
) -> Loaded:
  """Reads files of samples; options as in `from_rows`, and the errors too."""
  rows = itertools.chain.from_iterable(map(files.read, paths))
  return from_rows(
    rows,
    too_long=too_long,
    validate=validate,
    strict=strict,
  )


def from_rows(
  rows: Iterable[files.Row],
  *,
  too_long: Callable[[types.Task], str] | None = None,
  validate: Callable[[types.Task], None] | None = None,
  strict: bool = False,
) -> Loaded:
  """Samples as tasks and demonstrations.

  Args:
    rows: the samples, each with the name that messages call it by.
    too_long: says what about a task exceeds the run's limits, '' for nothing;
      such tasks are dropped.
    validate: raises ValueError on a task that cannot be used, say, on a check
      that no verifier decides (`rewards.checklist.validate_task`).
    strict: nothing is dropped or repaired: the first fault is an error.

  Raises:
    UserError: under `strict`; it names the file, the row and the field.
  """
  tasks, demonstrations, ids, first = [], [], set(), {}
  dropped, repaired, left_out = (collections.Counter() for _ in range(3))
  for row in rows:
    try:
      if row.fault:
        raise schema.Invalid('json', '', row.fault)
      sample = convert.from_sample(row.value)
      _admit(sample.task, ids, too_long, validate)
    except schema.Invalid as error:
      if strict:
        raise errors.UserError(f'{row.where}: {error}') from error
      dropped[error.reason] += 1
      first.setdefault(error.reason, f'{row.where}: {error}')
      continue
    if sample.repaired:
      if strict:
        raise errors.UserError(f'{row.where}: {sample.repaired}')
      repaired['weights'] += 1
      first.setdefault('weights', f'{row.where}: {sample.repaired}')
    left_out.update(sample.left_out)
    ids.add(sample.task.id)
    tasks.append(sample.task)
    demonstrations.append(sample.demonstration)
  return Loaded(
    tasks=tasks,
    demonstrations=demonstrations,
    dropped=dropped,
    repaired=repaired,
    left_out=+left_out,  # without zeros
    first=first,
  )


def _admit(task, ids, too_long, validate) -> None:
  """Refuses a task that is well formed but cannot be used."""
  if task.id in ids:
    fault = f'{task.id!r} was met before'
    raise schema.Invalid('repeated_id', 'extra_info.original_index', fault)
  if validate is not None:
    try:
      validate(task)
    except ValueError as error:
      raise schema.Invalid('refused', '', str(error)) from error
  if too_long is not None and (fault := too_long(task)):
    raise schema.Invalid('overlong', '', fault)
