"""Everything a run reads: tasks, demonstrations, and the words for them.

Prepared once per workdir: MiniDesk tasks and demonstrations are generated (or
the user's JSONL is read), stored as a TFDS dataset, and a tokenizer is trained
on the demonstrations' texts. A restart reads what is there.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import pathlib

import ml_collections

from envace_jax import errors
from envace_jax import progress
from envace_jax import tasks as task_sources
from envace_jax import types
from envace_jax.envs import base as envs
from envace_jax.envs import desk
from envace_jax.envs import desk_data
from envace_jax.envs import desk_demos
from envace_jax.envs import desk_tasks
from envace_jax.rewards import checklist
from envace_jax.text import template as templates
from envace_jax.text import tokenizer as tokenizers

WORLDS = ('small', 'resampled', 'jsonl')
SPLITS = desk_tasks.SPLITS
TOKENIZER_FILE = 'tokenizer.model'
_DATASET = 'minidesk'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
  """What training and evaluation are made of."""

  tasks: dict[str, list[types.Task]]  # by split, in order
  demonstrations: list[types.Demonstration]
  tokenizer: tokenizers.Tokenizer
  template: templates.Template
  make_environment: Callable[[], envs.Environment]


def prepare(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> Data:
  """Reads the workdir's data, making it first where it is missing.

  Raises:
    UserError: a user's file is wrong, a split is empty, or an option is.
  """
  if config.data.world not in WORLDS:
    raise errors.UserError(
      f'data.world={config.data.world!r}; use one of {", ".join(WORLDS)}'
    )
  directory = workdir / 'data'
  try:
    records = _records(config, directory)
  except (ValueError, OSError) as error:
    raise errors.UserError(f'data: {error}') from error
  tasks = {split: records[split] for split in SPLITS}
  for task in (task for split in tasks.values() for task in split):
    checklist.validate_task(task)
  demonstrations = records['demonstrations']
  tokenizer = _tokenizer(config, directory, demonstrations)
  return Data(
    tasks=tasks,
    demonstrations=demonstrations,
    tokenizer=tokenizer,
    template=templates.Template(tokenizer, config.prompt.tools),
    make_environment=functools.partial(desk.Desk, desk_config(config)),
  )


def desk_config(config: ml_collections.ConfigDict) -> desk_data.DeskConfig:
  """The desk that tasks are made for and executed on."""
  size = desk.RESAMPLED if config.data.world == 'resampled' else desk.SMALL
  return dataclasses.replace(size, seed=config.data.world_seed)


def rows(data: Data, limit: int) -> list[tuple]:
  """Demonstrations as (ids, authors) rows of at most `limit` tokens.

  A longer one is left out whole, never cut.

  Raises:
    UserError: nothing is left.
  """
  made = [data.template.demonstration(demo) for demo in data.demonstrations]
  kept = [row for row in made if len(row[0]) <= limit]
  if not kept:
    raise errors.UserError(
      f'no demonstration fits in rollout.max_row_tokens={limit} (the shortest '
      f'has {min(len(ids) for ids, _ in made)} tokens); raise it'
    )
  return kept


def longest_prompt(data: Data) -> int:
  """Tokens of the longest prompt without notes, over all splits."""
  return max(
    len(data.template.prompt(task.instruction, tools=task.tools)[0])
    for split in data.tasks.values()
    for task in split
  )


def _records(config, directory) -> dict[str, list]:
  c = config.data
  if c.world == 'jsonl':
    return _user_records(c)
  splits = _generate(config) if not (directory / _DATASET).exists() else None
  return task_sources.store(directory, _DATASET, splits)


def _generate(config) -> dict[str, Sequence]:
  c, world = config.data, desk_config(config)
  counts = {
    'train': c.num_train,
    'dev': c.num_dev,
    'test_iid': c.num_test,
    'test_ood': c.num_test,
  }
  with progress.bar('data: tasks and demonstrations', 2, unit='part') as bar:
    made = desk_tasks.make_tasks(world, counts, c.world_seed)
    bar.advance()
    demonstrations = desk_demos.make_demonstrations(
      world,
      made['train'],
      count=c.num_demonstrations,
      habits=c.habits.to_dict(),
      notes_fraction=c.notes_fraction,
      seed=c.world_seed,
    )
    bar.advance()
  return {**made, 'demonstrations': demonstrations}
