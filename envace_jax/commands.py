"""`envace evaluate` and `envace rehearse`: what a finished run can be asked."""

import dataclasses
import json
import pathlib
import sys

import rich.console
import rich.text

from envace_jax import build, errors, restore, results, types, workdirs
from envace_jax.evaluation import replay
from envace_jax.text import template as templates

_STYLES = {
  types.Author.PROMPT: 'dim',
  types.Author.FORCED: 'dim',
  types.Author.ACT: 'magenta',
  types.Author.REHEARSE: 'yellow',
  types.Author.WORLD: 'blue',
  types.Author.USER: 'green',
  types.Author.COPIED: 'cyan',
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
  """A run's newest parameters, and what they were trained with."""

  setup: build.Setup
  params: dict
  phase: str  # 'rl' or 'warm_start'
  step: int


def load(workdir: str) -> Trained:
  """Restores the newest checkpoint of a run.

  Raises:
    UserError: no run, or no checkpoint yet.
  """
  setup = build.Setup(workdirs.load_config(workdir), pathlib.Path(workdir))
  phase, step, params = restore.newest(workdir, setup)
  return Trained(setup=setup, params=params, phase=phase, step=step)


def evaluate(workdir: str) -> int:
  """Measures the newest checkpoint on the test tasks and prints it."""
  trained = load(workdir)
  name = f'{trained.phase}_{trained.step}'
  measured = results.measure(
    trained.setup, trained.params, pathlib.Path(workdir), name
  )
  shown = {key: value for key, value in measured.items() if key != 'outcomes'}
  sys.stdout.write(json.dumps(shown, indent=1) + '\n')
  return 0


def rehearse(workdir: str, split: str, index: int) -> int:
  """Shows one rehearsed episode, coloured by author, and what is real."""
  trained = load(workdir)
  tasks = trained.setup.data.tasks
  if split not in tasks or index >= len(tasks[split]):
    sizes = {name: len(tasks[name]) for name in tasks}
    raise errors.UserError(f'no task {index} in {split!r}; there are {sizes}')
  task = tasks[split][index]
  episode = trained.setup.runner.rehearsed(
    trained.params, [task], stream=5, samples=1
  )[0]
  console = rich.console.Console()
  console.print(coloured(trained.setup.data.template, episode))
  replayed = replay.replay(
    [episode], [task], trained.setup.data.make_environment
  )[0]
  for mine, theirs in zip(episode.steps, replayed.real.steps, strict=True):
    same = mine.observation_text == theirs.observation_text
    console.print(
      rich.text.Text('real world: ', 'dim'),
      rich.text.Text(theirs.observation_text, 'green' if same else 'red'),
      sep='',
    )
  console.print(rich.text.Text(f'ended: {episode.stop_reason.value}', 'dim'))
  return 0


def coloured(
  template: templates.Template, episode: types.Episode
) -> rich.text.Text:
  """What ACT read as text, one line a span, coloured by author."""
  text, row = rich.text.Text(), episode.rows[0]
  for author, start, stop in templates.runs(row.authors):
    author = types.Author(author)
    span = template.literal(row.tokens[start:stop])
    ending = ' ' if author is types.Author.FORCED else '\n'
    text.append(span + ending, _STYLES[author])
  return text
