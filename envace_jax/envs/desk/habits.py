"""How people work at the desk: each habit plays one attempt out.

A habit knows the oracle's solution and the desk's rows and pretends not to,
each in its own way; `desk_demos` says what each stands for.
"""

from collections.abc import Callable, Sequence
import dataclasses
import json
import random

from envace_jax import types
from envace_jax.envs.desk import data as desk_data
from envace_jax.envs.desk import environment as desk
from envace_jax.envs.desk import goals as desk_goals
from envace_jax.envs.desk import requests as desk_requests
from envace_jax.envs.desk import slips as desk_slips
from envace_jax.envs.desk import tasks as desk_tasks
from envace_jax.text import notes as notes_text


class Attempt:
  """A task under way: the real desk, and what one may know of it."""

  def __init__(
    self,
    config: desk_data.DeskConfig,
    environment: desk.Desk,
    task: types.Task,
    rng: random.Random,
  ):
    self.environment = environment
    self.task = task
    self.rng = rng
    self.goal = task.environment['goal']
    self.slots = task.environment['slots']
    self.rows = desk_data.sample_rows(config, task.environment['seed'])
    self.solution = solution_of(config, task)
    self.steps: list[types.Step] = []
    environment.reset(task)

  def call(self, call: types.ToolCall) -> types.Json:
    self.steps.append(desk_tasks.execute(self.environment, call))
    return json.loads(self.steps[-1].observation_text)

  def call_all(self, calls: Sequence[types.ToolCall]) -> None:
    for call in calls:
      self.call(call)

  def rehearse(self, calls: Sequence[types.ToolCall]) -> list[types.Step]:
    """What calls would meet, from the start; leaves no trace."""
    self.environment.reset(self.task)
    steps = [desk_tasks.execute(self.environment, call) for call in calls]
    self.environment.reset(self.task)
    return steps

  def start_over(self) -> None:
    self.environment.reset(self.task)
    self.steps.clear()


def solution_of(
  config: desk_data.DeskConfig, task: types.Task
) -> desk_goals.Solution:
  """What is right for a task, with the reasons that its plan does not show."""
  where = task.environment
  instance = desk_requests.Instance(
    family=task.family, goal=where['goal'], stratum='', slots=where['slots']
  )
  rows = desk_data.sample_rows(config, where['seed'])
  return desk_goals.solve(instance, rows)


def notes_of(steps: Sequence[types.Step]) -> str:
  return notes_text.join_notes(
    notes_text.format_note(step.action, step.observation_text) for step in steps
  )


# Habits: each plays an attempt out and returns (reply, notes it was shown).


def _expert(attempt: Attempt) -> tuple[str, str]:
  attempt.call_all(attempt.solution.plan)
  return attempt.solution.reply, ''


def _hasty(attempt: Attempt) -> tuple[str, str]:
  goal, slots, rng = attempt.goal, attempt.slots, attempt.rng
  family = attempt.task.family
  if family == 'lookup':
    return f'It is {rng.choice(_plausible(goal))}.', ''
  if family == 'chain':
    find, user_id = desk_goals.find_steps(slots, attempt.rows)
    attempt.call_all(find)
    slots = {'order_id': attempt.rows.orders_of(user_id)[0].order_id}
    if goal in desk_requests.LOOKUPS:
      order = attempt.call(desk_goals.tool_call('get_order', **slots))
      return f'It is {order[goal]}.', ''
  if goal == 'restock':
    call, reply = desk_goals.ticket(slots['item'], 'restock')
    attempt.call(call)
    return reply, ''
  call = desk_goals.obvious_write(goal, slots, attempt.rows)
  if goal == 'refund':
    if rng.random() < 0.5:
      attempt.call(desk_goals.tool_call('get_order', **slots))
    else:
      call = _refund(slots['order_id'], rng.choice(desk_data.MONEY))
  attempt.call(call)
  return 'Done.', ''


def _recover(attempt: Attempt) -> tuple[str, str]:
  solution = attempt.solution
  if attempt.task.family == 'chain':
    attempt.call_all(desk_goals.find_steps(attempt.slots, attempt.rows)[0])
  first = _first_try(attempt)
  if first is None:
    return _expert(attempt)
  answer = attempt.call(first)
  if 'error' not in answer and first != solution.write:
    attempt.start_over()  # no error to learn from
    return _expert(attempt)
  if 'error' in answer and solution.write is not None:
    attempt.call(solution.write)
  return solution.reply, ''


def _dither(attempt: Attempt) -> tuple[str, str]:
  solution = attempt.solution
  extra = desk_slips.superfluous_read(attempt.rows, solution, attempt.rng)
  index = attempt.rng.randint(0, len(solution.reads))
  calls = list(solution.plan)
  attempt.call_all([*calls[:index], extra, *calls[index:]])
  return solution.reply, ''


def _slip(attempt: Attempt) -> tuple[str, str]:
  plan, rng = attempt.solution.plan, attempt.rng
  slip = desk_slips.draw(attempt.rows, plan, rng)
  for call in plan[: slip.index]:
    attempt.call(call)
  attempt.steps += desk_slips.refused(attempt.environment, slip)
  attempt.call_all(plan[slip.index :])
  return attempt.solution.reply, ''


def _noted(attempt: Attempt) -> tuple[str, str]:
  solution, rng = attempt.solution, attempt.rng
  known = len(solution.plan) - (solution.write is not None)
  first = _first_try(attempt)
  if first is not None and attempt.task.family != 'chain':
    tried = attempt.rehearse([first])
    # That an earlier attempt was refused tells as much as looking.
    if rng.random() < 0.5 and 'error' in _json(tried[0]):
      attempt.call_all(solution.plan[known:])
      return solution.reply, notes_of(tried)
  if known > 1 and rng.random() < 0.3:
    known = rng.randint(1, known - 1)  # the rest is looked up
  notes = notes_of(attempt.rehearse(solution.plan[:known]))
  attempt.call_all(solution.plan[known:])
  return solution.reply, notes


def _misled(attempt: Attempt) -> tuple[str, str]:
  solution, goal = attempt.solution, attempt.goal
  seen = attempt.rehearse(solution.reads)
  attempt.call(desk_goals.obvious_write(goal, attempt.slots, attempt.rows))
  if solution.write is not None:
    attempt.call(solution.write)
  return solution.reply, notes_of([_flattered(step, goal) for step in seen])


HABITS: dict[str, Callable[[Attempt], tuple[str, str]]] = {
  'expert': _expert,
  'hasty': _hasty,
  'recover': _recover,
  'dither': _dither,
  'slip': _slip,
  'noted': _noted,
  'misled': _misled,
}


# What the habits are made of.


def _first_try(attempt: Attempt) -> types.ToolCall | None:
  """What haste would write, None where there is nothing to write."""
  goal, slots, rows = attempt.goal, attempt.slots, attempt.rows
  if goal in desk_requests.LOOKUPS:
    return None
  if goal == 'restock':
    return desk_goals.ticket(slots['item'], 'restock')[0]
  if attempt.task.family == 'chain':
    slots = {'order_id': attempt.solution.write.arguments['order_id']}
  if goal == 'refund':
    # Too much on purpose: too little would be accepted.
    paid = rows.order[slots['order_id']].paid
    guesses = [money for money in desk_data.MONEY if money > paid] or [paid]
    return _refund(slots['order_id'], attempt.rng.choice(guesses))
  return desk_goals.obvious_write(goal, slots, rows)


def _refund(order_id: str, amount: int) -> types.ToolCall:
  return desk_goals.tool_call('refund_order', order_id=order_id, amount=amount)


def _plausible(goal: str) -> Sequence:
  return {
    'status': desk_data.STATUSES,
    'paid': desk_data.MONEY,
    'price': desk_data.PRICES,
    'stock': desk_data.STOCKS,
    'percent': desk_data.PERCENTS,
    'region': desk_data.REGIONS,
  }[goal]


def _flattered(step: types.Step, goal: str) -> types.Step:
  """The step with its deciding fact turned into what one would hope for."""
  fields = _json(step)
  if fields.get('state') == 'expired':
    fields['state'] = 'valid'
  elif 'status' in fields:
    hoped = 'delivered' if goal == 'refund' else 'pending'
    if fields['status'] != hoped:
      fields['status'] = hoped
    elif goal == 'coupon':
      fields['coupon'] = 'none'
  text = json.dumps(fields, ensure_ascii=False)
  return dataclasses.replace(step, observation_text=text)


def _json(step: types.Step) -> dict:
  return json.loads(step.observation_text)
