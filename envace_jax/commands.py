"""`envace evaluate`, `rehearse`, `export`: what a finished run can be asked."""

import dataclasses
import json
import pathlib
import sys

import rich.console
import rich.text

from envace_jax import (
  build,
  errors,
  pretrained,
  restore,
  results,
  types,
  workdirs,
)
from envace_jax.evaluation import private, replay
from envace_jax.evaluation import runner as runners
from envace_jax.model import lora, per_role
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
  params: build.Network
  phase: str  # 'rl' or 'warm_start'
  step: int


def load(workdir: str) -> Trained:
  """Restores the newest checkpoint of a run.

  Raises:
    UserError: no run, or no checkpoint yet.
  """
  setup = build.Setup(workdirs.load_config(workdir), pathlib.Path(workdir))
  phase, step, trained = restore.newest(workdir, setup)
  return Trained(
    setup=setup, params=setup.network(trained), phase=phase, step=step
  )


def study_private_rehearsal(workdir: str) -> int:
  """Measures private rehearsal in full, before and after, and prints it.

  Raises:
    UserError: the run is not finished, has split views, or no environment.
  """
  trained = _executable(workdir)
  setup = trained.setup
  if setup.config.rollout.view == 'split':
    raise errors.UserError(
      f'{workdir} has split views, and rehearsal before each action is made in '
      "ACT's own row; give a run with rollout.view='joint'"
    )
  if not setup.private.rule.attempts:
    raise errors.UserError(f'{workdir} has private.attempts=0; set at least 1')
  measured = results.study_private_rehearsal(
    setup,
    {
      'warm_start': setup.network(
        restore.warm_start_of(
          setup.config.warm_start.workdir or workdir,
          setup,
          setup.config.warm_start.steps,
        )
      ),
      'after': trained.params,
    },
    pathlib.Path(workdir),
  )
  sys.stdout.write(json.dumps(measured, indent=1) + '\n')
  return 0


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
  task = _task(trained, split, index)
  episode = trained.setup.runner.rehearsed(
    trained.params, [task], stream=5, samples=1
  )[0]
  console = rich.console.Console()
  console.print(coloured(trained.setup.data.template, episode))
  make_environment = trained.setup.data.make_environment
  if make_environment is None:
    console.print(rich.text.Text('real world: this task has none', 'dim'))
  else:
    (replayed,) = replay.replay([episode], [task], make_environment)
    for mine, theirs in zip(episode.steps, replayed.real.steps, strict=True):
      same = mine.observation_text == theirs.observation_text
      console.print(
        rich.text.Text('real world: ', 'dim'),
        rich.text.Text(theirs.observation_text, 'green' if same else 'red'),
        sep='',
      )
  console.print(rich.text.Text(f'ended: {episode.stop_reason.value}', 'dim'))
  return 0


def rehearse_privately(workdir: str, split: str, index: int) -> int:
  """Shows a task's private rehearsals, their memory, and what came of it.

  The one committed execution is greedy, in the real world.
  """
  trained = _executable(workdir)
  task = _task(trained, split, index)
  runner, settings = trained.setup.runner, trained.setup.private
  rehearsed = private.rehearse(
    runner,
    [task],
    settings.rule,
    settings,
    private.own_world(runner, trained.params),
  )
  console = rich.console.Console()
  template = trained.setup.data.template
  for number, episode in enumerate(rehearsed.attempts[0], 1):
    console.rule(f'rehearsal {number}: {episode.stop_reason.value}')
    console.print(coloured(template, episode))
  notes = rehearsed.notes()
  console.rule('memory')
  console.print(rich.text.Text(notes[0] or '(empty)'))
  episodes = runner.real(
    trained.params,
    [task],
    stream=private.COMMITTED,
    manner=runners.Manner(temperature=0.0, notes=notes),
  )
  console.rule('committed, in the real world')
  console.print(coloured(template, episodes[0]))
  [(_, succeeded)] = trained.setup.evaluator.judge([task], episodes)
  console.print(
    rich.text.Text(
      f'ended: {episodes[0].stop_reason.value}, '
      f'{"success" if succeeded else "failure"}, '
      f'{episodes[0].real_calls} real calls, '
      f'{rehearsed.sampled_tokens} tokens rehearsed',
      'dim',
    )
  )
  return 0


def export(workdir: str, out: str, dtype: str) -> int:
  """Writes the newest policy as a directory that other tools load, in `dtype`.

  Adapters are merged; a network per role becomes a directory each.
  """
  trained = load(workdir)
  setup, directory = trained.setup, pathlib.Path(out)
  shape = setup.model.config
  networks = {directory: trained.params}
  if isinstance(trained.params, per_role.PerRole):
    networks = {
      directory / role.name.lower(): trained.params[role] for role in types.Role
    }
  for folder, network in networks.items():
    if isinstance(network, lora.Adapted):
      network = lora.merge(shape.lora, network)
    folder.parent.mkdir(parents=True, exist_ok=True)
    pretrained.publish(
      network,
      dataclasses.replace(shape, lora=None),
      setup.data.template,
      setup.data.words.tokenizer,
      setup.path,
      folder,
      dtype,
    )
    sys.stdout.write(f'{folder}: {trained.phase} step {trained.step}\n')
  return 0


def _executable(workdir: str) -> Trained:
  trained = load(workdir)
  if trained.setup.runner.environment is None:
    raise errors.UserError(
      f'the tasks of {workdir} cannot be executed, and private rehearsal ends '
      'in an execution; give a run whose tasks say where'
    )
  return trained


def _task(trained: Trained, split: str, index: int) -> types.Task:
  tasks = trained.setup.data.tasks
  if split not in tasks or index >= len(tasks[split]):
    sizes = {name: len(tasks[name]) for name in tasks}
    raise errors.UserError(f'no task {index} in {split!r}; there are {sizes}')
  return tasks[split][index]


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
