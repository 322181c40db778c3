"""Everything a run reads: tasks, demonstrations, and the words for them.

Prepared once per workdir: MiniDesk tasks and demonstrations are generated, or
the user's files are read, stored as a TFDS dataset, and a tokenizer is trained
on the demonstrations' texts, where a published checkpoint does not bring one. A
restart reads what is there; of the user's files it compares JSONL of ours, and
needs published samples no more.
"""

from collections.abc import Callable, Sequence
import dataclasses
import json
import pathlib

from absl import logging
import ml_collections

from envace_jax import (
  benchmark_worlds,
  desk_worlds,
  errors,
  published,
  types,
  workdirs,
)
from envace_jax.envs import base as envs
from envace_jax.envs.desk import data as desk_data
from envace_jax.envs.desk import environment as desk
from envace_jax.envs.desk import tasks as desk_tasks
from envace_jax.rewards import checklist
from envace_jax.tasks import dataset
from envace_jax.text import (
  chat_format,
  fast_tokenizer,
  formats,
  recorded_rows,
)
from envace_jax.text import template as templates
from envace_jax.text import tokenizer as tokenizers
from envace_jax.weights import pretrained as weights

SPLITS = desk_tasks.SPLITS
TOKENIZER_FILE = 'tokenizer.model'
_DATASET = 'records'
_DEMONSTRATIONS = desk_worlds.DEMONSTRATIONS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Words:
  """A vocabulary, and the chat format that goes with it."""

  tokenizer: tokenizers.Tokenizer
  row_format: formats.Format


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
  """What training and evaluation are made of."""

  tasks: dict[str, list[types.Task]]  # by split, in order
  demonstrations: list[types.Demonstration]
  words: Words
  template: templates.Template
  # None: no task says where it can be executed, so nothing can be measured
  # for real.
  make_environment: Callable[[], envs.Environment] | None
  is_write: Callable[[str], bool]  # whether a tool can change it
  # Paths of an observation that fidelity is judged on.
  determinable: Callable[[types.ToolCall, str], Sequence]


def prepare(
  config: ml_collections.ConfigDict,
  workdir: pathlib.Path,
  published: weights.Pretrained | None = None,
) -> Data:
  """Reads the workdir's data, making it first where it is missing.

  The words are those of `published`, the run's own copy, where it has one.

  Raises:
    UserError: a user's file is wrong, or a split is empty.
  """
  directory = workdir / 'data'
  world = benchmark_worlds.of(config)
  try:
    records = _stored(config, directory, published, world)
    tasks = {split: records[split] for split in SPLITS}
    for task in (task for split in tasks.values() for task in split):
      checklist.validate_task(task)
  except (ValueError, OSError) as error:
    raise errors.UserError(f'data: {error}') from error
  demonstrations = records[_DEMONSTRATIONS]
  words = _words(config, directory, demonstrations, published)
  if world is None:
    make_environment = desk_worlds.environment(config, tasks)
    is_write, determinable = desk_tasks.is_write, desk.determinable
  else:
    make_environment, is_write = world.make_environment, world.is_write
    determinable = lambda call, text: [()]  # the whole of it
  return Data(
    tasks=tasks,
    demonstrations=demonstrations,
    words=words,
    template=template(config, words, config.prompt.tools),
    make_environment=make_environment,
    is_write=is_write,
    determinable=determinable,
  )


def template(
  config: ml_collections.ConfigDict, words: Words, tools: str
) -> templates.Template:
  """How rows are written; prompts say of the tools what `tools` says."""
  return templates.Template(
    words.tokenizer,
    tools,
    parallel=config.rollout.max_parallel_calls > 1,
    row_format=words.row_format,
  )


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
      made += recorded_rows.rows(data.template, demo)
      continue
    task = tasks[demo.task_id]
    act_prompt = data.template.prompt(
      demo.instruction, demo.notes, demo.tools, demo.system
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


def _stored(
  config,
  directory: pathlib.Path,
  published_policy,
  world: benchmark_worlds.World | None,
) -> dict[str, list]:
  """All records by split, from a TFDS dataset that is written if missing."""
  c = config.data
  if c.world == 'jsonl':
    stored = dataset.write_dataset_from_jsonl(
      directory,
      _DATASET,
      {
        split: c.files.replace('{split}', split)
        for split in (*SPLITS, _DEMONSTRATIONS)
      },
    )
  else:
    stored = dataset.find_dataset(directory, _DATASET)
    if stored is None:
      if c.world == 'published':
        records = _read_published(config, directory, published_policy)
      elif world is not None:
        records = benchmark_worlds.records(world, config)
      else:
        records = desk_worlds.records(config)
      stored = dataset.write_dataset(directory, _DATASET, records)
  if c.world == 'published':
    reported = json.loads((directory / published.REPORT_FILE).read_text())
    for line in published.lines(reported):
      logging.info('data: %s', line)
  return {
    split: list(dataset.Records(stored, split))
    for split in (*SPLITS, _DEMONSTRATIONS)
  }


def _read_published(
  config, directory: pathlib.Path, published_policy
) -> dict[str, Sequence]:
  """The user's samples; what was lost is written down before they are."""

  def too_long_after(demonstrations) -> published.TooLong:
    directory.mkdir(parents=True, exist_ok=True)
    words = _words(config, directory, demonstrations, published_policy)
    return lambda task: _too_long(config, words, task)

  loaded = published.read(
    config.data.files, SPLITS, too_long_after, strict=config.data.strict
  )
  workdirs.write_json(
    directory / published.REPORT_FILE, published.report(loaded)
  )
  tasks = {split: samples.tasks for split, samples in loaded.items()}
  return tasks | {_DEMONSTRATIONS: loaded['train'].demonstrations}


def _too_long(config, words: Words, task: types.Task) -> str:
  """Which of a task's prompts does not fit, '' if all do."""
  rollout, prompt = config.rollout, config.prompt
  prompts = [('prompt_tokens', prompt.tools, task.system)]
  if rollout.view == 'split':
    c = prompt.rehearse
    prompts.append(('rehearse_prompt_tokens', c.tools, c.instructions))
  for limit, tools, system in prompts:
    rows = template(config, words, tools)
    ids, _ = rows.prompt(task.instruction, '', task.tools, system)
    if len(ids) > rollout[limit]:
      return f'{len(ids)} tokens are more than rollout.{limit}={rollout[limit]}'
  return ''


def _words(config, directory, demonstrations, published_policy) -> Words:
  """Those of the published policy, or ours, learned where there are none."""
  if published_policy is not None:
    folder = published_policy.path
    tokenizer = fast_tokenizer.load(folder, published_policy.config.vocab_size)
    row_format = chat_format.from_directory(
      folder, tokenizer, thinking=config.prompt.thoughts
    )
    return Words(tokenizer=tokenizer, row_format=row_format)
  path = directory / TOKENIZER_FILE
  if not path.exists():
    texts = [
      text
      for demo in demonstrations
      for text in _texts(demo, config.prompt.tools)
    ]
    if config.data.world in desk_worlds.GENERATED:
      texts += desk_data.lexicon()  # values that no demonstration mentions
    trained = tokenizers.SentencePieceTokenizer.train(
      texts, config.data.vocab_size, thoughts=config.prompt.thoughts
    )
    partial = path.with_name(path.name + '.partial')
    trained.save(str(partial))
    partial.replace(path)
  tokenizer = tokenizers.load(str(path))
  return Words(tokenizer=tokenizer, row_format=formats.Own(tokenizer))


def _texts(demo: types.Demonstration, shown: str) -> list[str]:
  """What rows say, but for the words of a split view's own prompts."""
  tools = formats.tools_text(demo.tools, shown)
  texts = [demo.system, tools, demo.instruction, demo.notes, demo.reply]
  texts += [*demo.user_turns, *demo.turn_replies]
  for step in demo.steps:
    texts += [step.action_text, step.observation_text]
  return texts
