"""Published checklist files as a run's records, and what they lost on the way.

The files of each split are read sample by sample. What is wrong, repeated or
too long is left out whole and counted; weights are scaled, and counted apart;
both are said in one line a reason, with the first message of each. Under
`strict` the first of them is an error instead. Nothing is ever cut.
"""

from collections.abc import Callable, Mapping, Sequence

from etils import epath

from envace_jax import errors, types
from envace_jax.envs.checklist import samples as checklist_samples
from envace_jax.rewards import checklist

REPORT_FILE = 'samples.json'  # beside the data, so that a restart repeats it

# What is too long about a task, '' for nothing.
TooLong = Callable[[types.Task], str]
Splits = Mapping[str, checklist_samples.Loaded]


def read(
  pattern: str,
  splits: Sequence[str],
  too_long_after: Callable[[Sequence[types.Demonstration]], TooLong],
  *,
  strict: bool,
) -> Splits:
  """The samples of each split.

  Args:
    pattern: a path; {split} in it is replaced, * in its last part is anything.
    splits: their names; dialogues of the first are the demonstrations.
    too_long_after: makes the measure of tasks from all the demonstrations,
      also those that it then finds too long: a tokenizer is trained on them.
    strict: nothing is left out or scaled.

  Raises:
    UserError: no file of a split, or none of its samples, is left; a file
      cannot be read; under `strict`, any fault, by file, row and field.
  """
  paths = {split: _files(pattern, split) for split in splits}
  first = _load(paths[splits[0]], None, strict)
  too_long = too_long_after(first.demonstrations)
  loaded = {split: _load(paths[split], too_long, strict) for split in splits}
  for split, samples in loaded.items():
    if not samples.tasks:
      said = '; '.join(_faults(samples)) or 'the files are empty'
      raise errors.UserError(f'data.files: no {split} sample is left: {said}')
  return loaded


def report(loaded: Splits) -> types.Json:
  """Counts and first messages by split, as JSON."""
  return {
    split: {
      'samples': len(samples.tasks),
      'dropped': dict(samples.dropped),
      'repaired': dict(samples.repaired),
      'left_out': dict(samples.left_out),
      'first': dict(samples.first),
    }
    for split, samples in loaded.items()
  }


def lines(reported: types.Json) -> list[str]:
  """A report for a person: one line per split and thing that was lost."""
  said = []
  for split, of in reported.items():
    for what in ('dropped', 'repaired'):
      said += [
        f'{split}: {count} samples {what} ({reason}), first '
        f'{of["first"][reason]}'
        for reason, count in sorted(of[what].items())
      ]
    said += [
      f'{split}: {count} {what} left out of the {of["samples"]} samples'
      for what, count in sorted(of['left_out'].items())
    ]
  return said


def _files(pattern: str, split: str) -> list[epath.Path]:
  path = epath.Path(pattern.replace('{split}', split))
  found = sorted(path.parent.glob(path.name)) if path.parent.is_dir() else []
  if not found:
    raise errors.UserError(
      f'data.files: no file {path}; name an existing one for each split'
    )
  return found


def _load(paths, too_long, strict: bool) -> checklist_samples.Loaded:
  return checklist_samples.load(
    paths,
    too_long=too_long,
    validate=checklist.validate_task,
    strict=strict,
  )


def _faults(samples: checklist_samples.Loaded) -> list[str]:
  return [
    f'{count} dropped ({reason}), first {samples.first[reason]}'
    for reason, count in sorted(samples.dropped.items())
  ]
