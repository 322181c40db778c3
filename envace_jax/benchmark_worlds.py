"""Benchmarks as a run's data: tasks to train on, recorded attempts, a world.

  tau2_telecom   τ²-Bench's telecom tickets in solo mode. Trained on are tickets
                 of at most `data.max_faults` faults that are none of the
                 benchmark's; the official test tickets are held out, those with
                 as few faults as test_iid, those with more as test_ood.
  bfcl_files     generated tasks over BFCL's file system. Held out are other
                 trees (test_iid) and chains of what is trained (test_ood). The
                 official tasks are measured by `envace evaluate --benchmark`.

A recorded attempt is really executed: a file task's plan, and of a ticket what
a script calls that does not know its faults. In a share of them,
`data.left_out`, one call is missing: what follows then meets a state that
nobody planned for, and some calls really fail. A rehearser that has only seen
successes would have seen no refusal.
"""

from collections.abc import Callable, Sequence
import dataclasses
import random

from absl import logging
import ml_collections

from envace_jax import errors, progress, types
from envace_jax.envs import base as envs
from envace_jax.envs import recording
from envace_jax.text import tool_calls

DEMONSTRATIONS = 'demonstrations'


@dataclasses.dataclass(frozen=True, kw_only=True)
class World:
  """What a benchmark brings to a run."""

  make_tasks: Callable[[ml_collections.ConfigDict], dict[str, list[types.Task]]]
  make_environment: Callable[[], envs.Environment]
  # What is shown of a task; None: nothing, nobody here solves it. May reset.
  shown: Callable[
    [envs.Environment, types.Task], Sequence[types.ToolCall] | None
  ]
  is_write: Callable[[str], bool]


def tau2_telecom() -> World:
  """Raises UserError where the package is not installed."""
  from envace_jax.envs.tau2 import demonstrations as tau2_demonstrations
  from envace_jax.envs.tau2 import package as tau2_package
  from envace_jax.envs.tau2 import telecom as tau2_telecom

  tau2_package.load()
  return World(
    make_tasks=_tickets,
    make_environment=tau2_telecom.TelecomEnvironment,
    shown=tau2_demonstrations.calls,
    is_write=tau2_telecom.is_write,
  )


def bfcl_files() -> World:
  """Raises UserError where the package is not installed."""
  from envace_jax.envs.bfcl import files as bfcl_files
  from envace_jax.envs.bfcl import package as bfcl_package

  bfcl_package.load()
  return World(
    make_tasks=_file_tasks,
    make_environment=bfcl_files.Files,
    shown=lambda environment, task: task.plan,
    is_write=lambda name: name in bfcl_files.WRITES,
  )


WORLDS = {'tau2_telecom': tau2_telecom, 'bfcl_files': bfcl_files}


def of(config: ml_collections.ConfigDict) -> World | None:
  """The benchmark that `data.world` names; None for data of another origin."""
  make = WORLDS.get(config.data.world)
  return make and make()


def records(
  world: World, config: ml_collections.ConfigDict
) -> dict[str, Sequence]:
  """Tasks by split, and demonstrations of those that are trained on.

  Raises:
    UserError: the benchmark has fewer tasks than are asked for.
  """
  tasks = world.make_tasks(config)
  return tasks | {DEMONSTRATIONS: demonstrations(world, config, tasks['train'])}


def demonstrations(
  world: World, config: ml_collections.ConfigDict, tasks: Sequence[types.Task]
) -> list[types.Demonstration]:
  """`data.num_demonstrations` attempts at the tasks in turn, executed.

  Raises:
    UserError: there is no attempt to show at any of the tasks.
  """
  c, environment, shown = config.data, world.make_environment(), []
  tasks = tasks[: c.num_demonstrations]
  try:
    with progress.bar('data: attempts to show', len(tasks), unit='task') as bar:
      for task in tasks:
        shown.append((task, world.shown(environment, task)))
        bar.advance()
    solved = [(task, calls) for task, calls in shown if calls]
    if not solved and c.num_demonstrations:
      raise errors.UserError(
        f'data.world={c.world!r}: none of {len(tasks)} tasks is solved by what '
        'makes its demonstrations; raise data.num_train'
      )
    logging.info(
      'data: attempts to show at %d of %d tasks', len(solved), len(tasks)
    )
    return [
      _executed(environment, *solved[i % len(solved)], _missing(c, i))
      for i in range(c.num_demonstrations)
    ]
  finally:
    environment.close()


def _missing(c: ml_collections.ConfigDict, i: int) -> float | None:
  """Where in demonstration i a call is left out, in [0, 1); None: nowhere."""
  rng = random.Random(f'demonstration/{c.world_seed}/{i}')
  return rng.random() if rng.random() < c.left_out else None


def _executed(
  environment: envs.Environment,
  task: types.Task,
  calls: Sequence[types.ToolCall],
  missing: float | None,
) -> types.Demonstration:
  lacks = missing is not None and len(calls) > 1
  without = int(missing * len(calls)) if lacks else None
  environment.reset(task)
  steps = []
  for call in (call for i, call in enumerate(calls) if i != without):
    seen = environment.call(call)
    steps.append(
      types.Step(
        action=call,
        action_text=tool_calls.render_call(call),
        observation_text=seen.text,
        message=len(steps),
        outcome=seen.error or recording.SUCCESS,
      )
    )
  return types.Demonstration(
    task_id=task.id,
    instruction=task.instruction,
    steps=tuple(steps),
    reply=task.plan_reply,
    habit='one_call_less' if lacks else 'expert',
    tools=task.tools,
    system=task.system,
  )


def _tickets(config: ml_collections.ConfigDict) -> dict[str, list[types.Task]]:
  from envace_jax.envs.tau2 import telecom as tau2_telecom

  c = config.data
  few = lambda task: _faults(task) <= c.max_faults
  held_out = tau2_telecom.make_tasks('test')
  known = [task for task in tau2_telecom.make_tasks('train') if few(task)]
  # Not by number of faults, as they come: dev is to look like train.
  random.Random(f'tickets/{c.world_seed}').shuffle(known)
  return {
    **_cut(known, c),
    'test_iid': [task for task in held_out if few(task)],
    'test_ood': [task for task in held_out if not few(task)],
  }


def _faults(task: types.Task) -> int:
  return int(task.family.removeprefix('faults_'))


def _file_tasks(
  config: ml_collections.ConfigDict,
) -> dict[str, list[types.Task]]:
  from envace_jax.envs.bfcl import file_tasks as bfcl_file_tasks

  c = config.data
  kinds = len(bfcl_file_tasks.FAMILIES)
  # One family in turn is the chain, and held out.
  some = lambda count: count * kinds // (kinds - 1) + kinds
  made = bfcl_file_tasks.make_tasks(
    {'train': some(c.num_train + c.num_dev), 'test': kinds * c.num_test},
    c.world_seed,
  )
  chain = bfcl_file_tasks.FAMILIES[-1]
  simple = [task for task in made['train'] if task.family != chain]
  test = made['test']
  return {
    **_cut(simple, c),
    'test_iid': [t for t in test if t.family != chain][: c.num_test],
    'test_ood': [t for t in test if t.family == chain],
  }


def _cut(
  tasks: Sequence[types.Task], c: ml_collections.ConfigDict
) -> dict[str, list[types.Task]]:
  wanted = c.num_train + c.num_dev
  if len(tasks) < wanted:
    raise errors.UserError(
      f'data.world={c.world!r} has {len(tasks)} tasks to train on, and '
      f'data.num_train + data.num_dev = {wanted}; lower them'
    )
  return {
    'train': list(tasks[: c.num_train]),
    'dev': list(tasks[c.num_train : wanted]),
  }
