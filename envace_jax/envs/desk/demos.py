"""Recorded attempts at the desk: sound primitives, mostly bad habits.

Every observation is real. What the attempts teach is every tool, every error
and every right answer; what they mostly show is an employee in a hurry, so that
a policy cloned from them knows better than it does. Habits:

  expert   looks first, then acts right
  hasty    does what the words name at once; claims success whatever came back;
           takes the first order of a list, the first branch of a condition,
           and answers questions from the top of the head
  recover  starts hastily, but reads the error and then does what is right
  dither   expert with one superfluous read
  slip     expert with one malformed or misdirected call that is refused

Some attempts see notes of a rehearsal (`text.notes`): mostly facts about their
own task, which they use instead of looking ('noted'); sometimes about another
task, which they ignore; sometimes with one wrong fact, which they believe until
the desk refuses, and then recover ('misled').
"""

from collections.abc import Mapping, Sequence
import contextlib
import itertools
import random
import re

from envace_jax import types
from envace_jax.envs.desk import data as desk_data
from envace_jax.envs.desk import environment as desk
from envace_jax.envs.desk import habits as desk_habits
from envace_jax.envs.desk import tasks as desk_tasks

DEFAULT_HABITS = {
  'expert': 0.22,
  'hasty': 0.50,
  'recover': 0.10,
  'dither': 0.08,
  'slip': 0.10,
}
NOTES_SHARES = (('noted', 0.7), ('misled', 0.1))  # the rest: of another task


def make_demonstrations(
  config: desk_data.DeskConfig,
  tasks: Sequence[types.Task],
  *,
  count: int,
  habits: Mapping[str, float] = DEFAULT_HABITS,
  notes_fraction: float = 0.0,
  seed: int = 0,
) -> list[types.Demonstration]:
  """`count` attempts at training tasks, habits in proportion to their weights.

  Raises:
    ValueError: an unknown habit, or a task of a held-out combination.
  """
  _validate(tasks, habits, notes_fraction)
  rng = random.Random(f'demonstrations/{seed}')
  pools = {
    'any': list(tasks),
    'recover': [t for t in tasks if _can_recover(t)],
    'misled': [t for t in tasks if _can_be_misled(config, t)],
  }
  turns = {}
  for name, pool in pools.items():
    rng.shuffle(pool)
    turns[name] = itertools.cycle(pool)
  demonstrations = []
  with contextlib.closing(desk.Desk(config)) as environment:
    for habit, distracted in _agenda(rng, count, habits, notes_fraction):
      if habit in pools and not pools[habit]:
        habit = 'expert'  # no task of these offers the occasion
      task = next(turns[habit if habit in turns else 'any'])
      attempt = desk_habits.Attempt(config, environment, task, rng)
      reply, notes = desk_habits.HABITS[habit](attempt)
      if distracted:
        notes = _distraction(config, environment, task, tasks, rng)
      demonstrations.append(
        types.Demonstration(
          task_id=task.id,
          instruction=task.instruction,
          steps=tuple(attempt.steps),
          reply=reply,
          notes=notes,
          habit=habit,
          tools=task.tools,
        )
      )
  return demonstrations


def _can_recover(task: types.Task) -> bool:
  """Whether haste meets an error that leads to the right answer."""
  goal, outcome = task.environment['goal'], task.environment['outcome']
  if outcome == 'branch':
    return goal != 'restock'  # there haste meets no error
  return outcome in ('trap', 'infeasible') or goal == 'refund'


def _can_be_misled(config: desk_data.DeskConfig, task: types.Task) -> bool:
  """Whether one wrong fact in the notes would make haste look legal."""
  goal, outcome = task.environment['goal'], task.environment['outcome']
  if goal not in ('cancel', 'refund', 'coupon'):
    return False
  if outcome not in ('branch', 'trap', 'infeasible'):
    return False
  return desk_habits.solution_of(config, task).refused is None


def _distraction(config, environment, task, tasks, rng) -> str:
  """Notes of a task that has nothing in common with this one."""
  mine = _subjects(task)
  for other in rng.sample(tasks, min(len(tasks), 20)):
    environment.reset(other)
    reads = desk_habits.solution_of(config, other).reads
    notes = desk_habits.notes_of(
      [desk_tasks.execute(environment, call) for call in reads]
    )
    # In another database the same id is another order: not even a mention.
    if mine.isdisjoint(re.findall(r'\w+', notes)):
      return notes
  return ''


def _subjects(task: types.Task) -> set[str]:
  """Ids and names that a task is about, also those found on the way."""
  values = [v for call in task.plan for v in call.arguments.values()]
  values += task.environment['slots'].values()
  words = {value for value in values if isinstance(value, str)}
  return words.difference(desk_data.TOPICS)


def _agenda(rng, count, habits, notes_fraction) -> list[tuple[str, bool]]:
  """(habit, whether it is shown another task's notes), in fixed shares."""
  with_notes = round(count * notes_fraction)
  special = [
    name
    for name, share in NOTES_SHARES
    for _ in range(round(share * with_notes))
  ]
  total = sum(habits.values())
  plain, done = [], 0.0
  for name, weight in habits.items():
    done += weight / total
    end = round(done * (count - len(special)))
    plain += [name] * (end - len(plain))
  rng.shuffle(plain)
  distracted = with_notes - len(special)
  agenda = [(name, i < distracted) for i, name in enumerate(plain)]
  agenda += [(name, False) for name in special]
  rng.shuffle(agenda)
  return agenda


def _validate(tasks, habits, notes_fraction) -> None:
  unknown = set(habits) - set(DEFAULT_HABITS)
  if unknown or not sum(habits.values()) > 0 or min(habits.values()) < 0:
    raise ValueError(f'demos.habits={dict(habits)}; use {[*DEFAULT_HABITS]}')
  if not 0 <= notes_fraction <= 1:
    raise ValueError(f'demos.notes_fraction={notes_fraction} is not in [0, 1]')
  if not tasks:
    raise ValueError('demonstrations need tasks')
  for task in tasks:
    if (task.family, task.environment['goal']) in desk_tasks.HELD_OUT:
      raise ValueError(f'task {task.id} is held out')
