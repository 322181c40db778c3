"""MiniDesk as a run's data: generated tasks, and the desk they are executed in.

Tasks of a user's own are executed in a desk as well, where they name one.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools

from absl import logging
import ml_collections

from envace_jax import errors, progress, types
from envace_jax.envs import base as envs
from envace_jax.envs.desk import data as desk_data
from envace_jax.envs.desk import demos as desk_demos
from envace_jax.envs.desk import environment as desk
from envace_jax.envs.desk import reflections as desk_reflections
from envace_jax.envs.desk import samples as desk_samples
from envace_jax.envs.desk import tasks as desk_tasks

GENERATED = ('small', 'resampled')  # values of data.world that need no files
DEMONSTRATIONS = 'demonstrations'


def records(config: ml_collections.ConfigDict) -> dict[str, Sequence]:
  """Tasks by split, and demonstrations of those that are trained on."""
  c = config.data
  with progress.bar('data: tasks and demonstrations', 2, unit='part') as bar:
    made, world = generate_tasks(config)
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
  return {**made, DEMONSTRATIONS: demonstrations}


def generate_tasks(
  config: ml_collections.ConfigDict,
) -> tuple[dict[str, list[types.Task]], desk_data.DeskConfig]:
  """MiniDesk tasks by split, and the desk that they are made for."""
  c, world = config.data, desk_config(config)
  counts = {
    'train': c.num_train,
    'dev': c.num_dev,
    'test_iid': c.num_test,
    'test_ood': c.num_test,
  }
  return desk_tasks.make_tasks(world, counts, c.world_seed), world


def desk_config(config: ml_collections.ConfigDict) -> desk_data.DeskConfig:
  """The desk that tasks are made for."""
  size = desk.RESAMPLED if config.data.world == 'resampled' else desk.SMALL
  return dataclasses.replace(size, seed=config.data.world_seed)


def environment(
  config: ml_collections.ConfigDict, tasks: dict[str, list[types.Task]]
) -> Callable[[], envs.Environment] | None:
  """The desk that the tasks name; None if there is none that names one.

  Raises:
    UserError: some do and some do not, or they name different ones.
  """
  if config.data.world in GENERATED:
    return functools.partial(desk.Desk, desk_config(config))
  named = {}
  for task in (task for split in tasks.values() for task in split):
    named.setdefault(_desk_of(config, task), task.id)
  if len(named) > 1:
    (one, task), (other, another) = list(named.items())[:2]
    raise errors.UserError(
      f'task {task} is executed in {one or "nothing"} and task {another} in '
      f'{other or "nothing"}; let all of them name one desk, or none'
    )
  (one,) = named
  if one is None:
    logging.warning(
      'no task says where it can be executed: real success, the gap, fidelity, '
      'optimism and private rehearsal are not measured, only success in the '
      "policy's own world"
    )
    return None
  return functools.partial(desk.Desk, one)


def _desk_of(config, task: types.Task) -> desk_data.DeskConfig | None:
  if not task.environment:
    return None
  name, seed = map(task.environment.get, ('name', 'seed'))
  if name != 'desk' or not isinstance(seed, int):
    raise errors.UserError(
      f'task {task.id}: its environment is {name!r} of seed {seed!r}; only '
      "'desk' with a whole number is known, leave it out to train without"
    )
  if config.data.world == 'jsonl':
    return desk_config(config)
  try:
    return desk_samples.desk_of(task.environment)
  except ValueError as error:
    raise errors.UserError(f'task {task.id}: {error}') from error
