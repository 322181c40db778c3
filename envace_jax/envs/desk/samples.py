"""Desk tasks in the published checklist format, with executed dialogues.

The oracle plan is run in a desk, so every tool message of a reference dialogue
is real. Predicates are kept; ids become C0, C1, ... and weights sum to 1. The
desk that a task was made for goes along, so that whoever reads the samples can
execute them.
"""

from collections.abc import Iterator, Sequence
import contextlib
import dataclasses
import math

from envace_jax import types
from envace_jax.envs.checklist import convert as checklist_convert
from envace_jax.envs.desk import data as desk_data
from envace_jax.envs.desk import environment as desk
from envace_jax.envs.desk import tasks as desk_tasks


def samples(
  tasks: Sequence[types.Task], config: desk_data.DeskConfig
) -> list[types.Json]:
  """Training rows in the published layout, one a task.

  Raises:
    ValueError: a task has later user turns, which no plan answers.
    UserError: a checklist that the format cannot say.
  """
  return [
    checklist_convert.to_sample(
      dataclasses.replace(
        task,
        checklist=_published(task.checklist),
        environment={**task.environment, 'desk': dataclasses.asdict(config)},
      ),
      types.Demonstration(
        task_id=task.id,
        instruction=task.instruction,
        steps=steps,
        reply=task.plan_reply,
        tools=task.tools,
      ),
    )
    for task, steps in _executed(tasks, config)
  ]


def desk_of(environment: types.Json) -> desk_data.DeskConfig:
  """The desk that `samples` wrote down.

  Raises:
    ValueError: it names none, or none that there can be.
  """
  try:
    options = dict(environment['desk'])
    options['goals'] = tuple(options['goals'])
    return desk_data.DeskConfig(**options)
  except (KeyError, TypeError) as error:
    raise ValueError(f'environment.desk is no desk: {error!r}') from error


def grounded(
  tasks: Sequence[types.Task], config: desk_data.DeskConfig
) -> list[types.Task]:
  """The tasks, with the executed plan as their records; raises as `samples`."""
  return [
    dataclasses.replace(
      task,
      records=tuple(
        types.Record(call=s.action, observation_text=s.observation_text)
        for s in steps
      ),
    )
    for task, steps in _executed(tasks, config)
  ]


def _executed(
  tasks: Sequence[types.Task], config: desk_data.DeskConfig
) -> Iterator[tuple[types.Task, tuple[types.Step, ...]]]:
  """Tasks and the steps of their plans, a message each."""
  with contextlib.closing(desk.Desk(config)) as environment:
    for task in tasks:
      if task.user_turns:
        raise ValueError(f'task {task.id}: a plan answers one user turn only')
      steps = desk_tasks.oracle_episode(environment, task)
      yield (
        task,
        tuple(
          dataclasses.replace(step, message=i) for i, step in enumerate(steps)
        ),
      )


def _published(
  criteria: Sequence[types.Criterion],
) -> tuple[types.Criterion, ...]:
  total = math.fsum(criterion.weight for criterion in criteria)
  return tuple(
    dataclasses.replace(criterion, id=f'C{i}', weight=criterion.weight / total)
    for i, criterion in enumerate(criteria)
  )
