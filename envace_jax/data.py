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

from envace_jax import errors, progress, types
from envace_jax.envs import base as envs
from envace_jax.envs import (
  desk,
  desk_data,
  desk_demos,
  desk_reflections,
  desk_samples,
  desk_tasks,
)
from envace_jax.rewards import checklist
from envace_jax.tasks import dataset
from envace_jax.text import template as templates
from envace_jax.text import tokenizer as tokenizers

WORLDS = ('small', 'resampled', 'jsonl')
SPLITS = desk_tasks.SPLITS
TOKENIZER_FILE = 'tokenizer.model'
_DATASET = 'records'
_DEMONSTRATIONS = 'demonstrations'


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
    records = _stored(config, directory)
    tasks = {split: records[split] for split in SPLITS}
    for task in (task for split in tasks.values() for task in split):
      checklist.validate_task(task)
  except (ValueError, OSError) as error:
    raise errors.UserError(f'data: {error}') from error
  demonstrations = records[_DEMONSTRATIONS]
  tokenizer = _tokenizer(config, directory, demonstrations)
  return Data(
    tasks=tasks,
    demonstrations=demonstrations,
    tokenizer=tokenizer,
    template=template(config, tokenizer, config.prompt.tools),
    make_environment=functools.partial(desk.Desk, desk_config(config)),
  )


def desk_config(config: ml_collections.ConfigDict) -> desk_data.DeskConfig:
  """The desk that tasks are made for and executed on."""
  size = desk.RESAMPLED if config.data.world == 'resampled' else desk.SMALL
  return dataclasses.replace(size, seed=config.data.world_seed)


def template(
  config: ml_collections.ConfigDict,
  tokenizer: tokenizers.Tokenizer,
  tools: str,
) -> templates.Template:
  """The row format; prompts say of the tools what `tools` says."""
  parallel = config.rollout.max_parallel_calls > 1
  return templates.Template(tokenizer, tools, parallel=parallel)


def rows(
  data: Data,
  limit: int,
  rehearse_prompt: Callable[[types.Task], templates.Span] | None,
) -> list[templates.Span]:
  """Demonstrations as (ids, authors) rows of at most `limit` tokens.

  One row each; under split views, where `rehearse_prompt` opens REHEARSE's own
  rows, two. A longer one is left out whole, never cut.

  Raises:
    UserError: nothing is left.
  """
  tasks = {task.id: task for task in data.tasks['train']}
  made = []
  for demo in data.demonstrations:
    if rehearse_prompt is None:
      made.append(data.template.demonstration(demo))
      continue
    task = tasks[demo.task_id]
    act_prompt = data.template.prompt(
      demo.instruction, demo.notes, demo.tools, task.system
    )
    made += data.template.demonstration_views(
      demo, (act_prompt, rehearse_prompt(task))
    )
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
    len(data.template.prompt(task.instruction, '', task.tools, task.system)[0])
    for split in data.tasks.values()
    for task in split
  )


def _stored(config, directory: pathlib.Path) -> dict[str, list]:
  """All records by split, from a TFDS dataset that is written if missing."""
  c = config.data
  if c.world == 'jsonl':
    stored = dataset.write_dataset_from_jsonl(
      directory, _DATASET, _user_records(c)
    )
  else:
    stored = dataset.find_dataset(directory, _DATASET)
    if stored is None:
      stored = dataset.write_dataset(directory, _DATASET, _generate(config))
  return {
    split: list(dataset.Records(stored, split))
    for split in (*SPLITS, _DEMONSTRATIONS)
  }


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
    if c.records:
      made['train'] = desk_samples.grounded(made['train'], world)
    bar.advance()
    demonstrations = desk_demos.make_demonstrations(
      world,
      made['train'],
      count=c.num_demonstrations,
      habits=c.habits.to_dict(),
      notes_fraction=c.notes_fraction,
      seed=c.world_seed,
    )
    demonstrations = desk_reflections.reflect(
      world, made['train'], demonstrations, c.reflections, seed=c.world_seed
    )
    bar.advance()
  return {**made, _DEMONSTRATIONS: demonstrations}


def _user_records(c) -> dict[str, str]:
  """The user's files by split name; `{split}` in the path is replaced."""
  if '{split}' not in c.jsonl_tasks or not c.jsonl_demonstrations:
    raise errors.UserError(
      "data.world='jsonl' needs data.jsonl_tasks, a path that contains "
      '{split} (train, dev, test_iid, test_ood), and data.jsonl_demonstrations'
    )
  paths = {split: c.jsonl_tasks.format(split=split) for split in SPLITS}
  return paths | {_DEMONSTRATIONS: c.jsonl_demonstrations}


def _tokenizer(config, directory, demonstrations) -> tokenizers.Tokenizer:
  """The stored tokenizer, trained first where there is none."""
  path = directory / TOKENIZER_FILE
  if not path.exists():
    texts = [text for demo in demonstrations for text in _texts(demo)]
    if config.data.world != 'jsonl':
      texts += desk_data.lexicon()  # values that no demonstration mentions
    trained = tokenizers.SentencePieceTokenizer.train(
      texts, config.data.vocab_size, thoughts=config.prompt.thoughts
    )
    partial = path.with_name(path.name + '.partial')
    trained.save(str(partial))
    partial.replace(path)
  return tokenizers.load(str(path))


def _texts(demo: types.Demonstration) -> list[str]:
  texts = [demo.instruction, demo.notes, demo.reply]
  texts += [*demo.user_turns, *demo.turn_replies]
  for step in demo.steps:
    texts += [step.action_text, step.observation_text]
  return texts
