"""Recorded attempts that end in an honest word about themselves.

Asked whether it worked, the recorded employee says the truth, which the desk
knows: the final database is the oracle's, and so is the reply. What is worth
remembering are the facts that were met before anything was changed, as notes.
"""

from collections.abc import Sequence
import contextlib
import dataclasses
import random

from envace_jax import types
from envace_jax.envs.desk import data as desk_data
from envace_jax.envs.desk import environment as desk
from envace_jax.envs.desk import tasks as desk_tasks
from envace_jax.text import notes, reflection


def reflect(
  config: desk_data.DeskConfig,
  tasks: Sequence[types.Task],
  demonstrations: Sequence[types.Demonstration],
  fraction: float,
  *,
  seed: int,
) -> list[types.Demonstration]:
  """The demonstrations; of a share of them, each followed by its assessment.

  Raises:
    ValueError: `fraction` is no share.
  """
  if not 0 <= fraction <= 1:
    raise ValueError(f'data.reflections={fraction} is not in [0, 1]')
  by_id = {task.id: task for task in tasks}
  rng = random.Random(f'reflections/{seed}')
  with contextlib.closing(desk.Desk(config)) as environment:
    return [
      _reflected(environment, by_id[demo.task_id], demo)
      if rng.random() < fraction
      else demo
      for demo in demonstrations
    ]


def _reflected(
  environment: desk.Desk, task: types.Task, demo: types.Demonstration
) -> types.Demonstration:
  met = [
    notes.format_note(call, observation)
    for call, observation in notes.facts(demo.steps, desk_tasks.is_write)
  ]
  said = reflection.Reflection(
    worked=_worked(environment, task, demo), notes=tuple(dict.fromkeys(met))
  )
  return dataclasses.replace(
    demo,
    user_turns=(*demo.user_turns, reflection.REQUEST),
    turn_replies=(*demo.turn_replies, demo.reply),
    reply=reflection.render(said),
  )


def _worked(environment, task, demo) -> bool:
  """Whether the attempt did what the oracle does, and said it."""
  environment.reset(task)
  for step in demo.steps:
    environment.call(step.action)
  mine = environment.state_hash()
  desk_tasks.oracle_episode(environment, task)
  return mine == environment.state_hash() and demo.reply == task.plan_reply
