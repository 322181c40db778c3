"""Calls that should not have been made: superfluous, misdirected, malformed.

A slip is drawn as a list of candidates; the first that the desk refuses is
recorded, so that a slip never changes anything.
"""

from collections.abc import Sequence
import dataclasses
import random

from envace_jax import types
from envace_jax.envs.desk import data as desk_data
from envace_jax.envs.desk import environment as desk
from envace_jax.envs.desk import goals as desk_goals
from envace_jax.text import tool_calls

_NO_SUCH_TOOLS = ('get_user', 'find_order', 'delete_order', 'close_ticket')
_KINDS = {
  'unknown_id': 2,
  'wrong_object': 4,
  'malformed': 2,
  'unknown_tool': 1,
  'unreadable': 1,
  'repeat': 2,
}


@dataclasses.dataclass(frozen=True)
class Slip:
  index: int  # how many calls of the plan come before it
  texts: Sequence[str]  # rendered candidates, in order of preference


def superfluous_read(
  rows: desk_data.Rows, solution: desk_goals.Solution, rng: random.Random
) -> types.ToolCall:
  """A read that was not needed: made already, or about something else."""
  make = desk_goals.tool_call
  return rng.choice(
    [
      rng.choice(solution.reads),
      make('get_order', order_id=rng.choice(rows.orders).order_id),
      make('list_orders', user_id=rng.choice(rows.users).user_id),
      make('get_item', item=rng.choice(rows.items).name),
      make('get_coupon', coupon=rng.choice(rows.coupons).coupon),
    ]
  )


def draw(
  rows: desk_data.Rows, plan: Sequence[types.ToolCall], rng: random.Random
) -> Slip:
  """One way to get one call of a plan wrong."""
  kind = rng.choices(list(_KINDS), _KINDS.values())[0]
  index = rng.randrange(len(plan))
  call = plan[-1] if kind in ('wrong_object', 'repeat') else plan[index]
  # An id that does not exist is always refused.
  fallback = tool_calls.render_call(_unknown_id(rows, call, rng))
  if kind == 'repeat':
    return Slip(len(plan), [tool_calls.render_call(call), fallback])
  if kind == 'unreadable':
    return Slip(index, [_unreadable(call, rng), fallback])
  if kind == 'wrong_object':
    index = len(plan) - 1
    wrong = [_wrong_object(rows, call, rng) for _ in range(8)]
    return Slip(index, [*map(tool_calls.render_call, wrong), fallback])
  wrong = {
    'unknown_id': _unknown_id(rows, call, rng),
    'malformed': _malformed(call, rng),
    'unknown_tool': dataclasses.replace(call, name=rng.choice(_NO_SUCH_TOOLS)),
  }[kind]
  return Slip(index, [tool_calls.render_call(wrong), fallback])


def refused(environment: desk.Desk, slip: Slip) -> list[types.Step]:
  """Makes the first of the candidates that is refused."""
  for text in slip.texts:
    before = environment.snapshot()
    action = tool_calls.parse_action(text)
    observation = environment.call(action)
    if observation.error is not None:
      return [
        types.Step(
          action=action, action_text=text, observation_text=observation.text
        )
      ]
    environment.restore(before)
  return []


def _unknown_id(rows, call, rng) -> types.ToolCall:
  known = {
    'order_id': (desk_data.ORDER_IDS, rows.order),
    'about': (desk_data.ORDER_IDS, rows.order),
    'user_id': (desk_data.USER_IDS, rows.user),
    'item': (desk_data.ITEMS, rows.item),
    'coupon': (desk_data.COUPONS, rows.coupon),
    'name': (desk_data.NAMES, [user.name for user in rows.users]),
  }
  argument = rng.choice([key for key in call.arguments if key in known])
  pool, taken = known[argument]
  wrong = rng.choice([key for key in pool if key not in taken])
  return _with(call, **{argument: wrong})


def _wrong_object(rows, call, rng) -> types.ToolCall:
  """The same call about something else that exists, or another order write."""
  others = {
    'order_id': [order.order_id for order in rows.orders],
    'about': [order.order_id for order in rows.orders],
    'user_id': [user.user_id for user in rows.users],
    'item': [item.name for item in rows.items],
    'coupon': [coupon.coupon for coupon in rows.coupons],
    'name': [user.name for user in rows.users],
  }
  argument = rng.choice([key for key in call.arguments if key in others])
  wrong = _with(call, **{argument: rng.choice(others[argument])})
  if call.name == 'get_order':
    order_id = wrong.arguments['order_id']
    return desk_goals.tool_call('cancel_order', order_id=order_id)
  return wrong


def _malformed(call, rng) -> types.ToolCall:
  argument = rng.choice(list(call.arguments))
  value = call.arguments[argument]
  kind = rng.choice(['missing', 'renamed', 'retyped', 'extra'])
  if kind == 'extra':
    return _with(call, status='pending')
  if kind == 'retyped':
    wrong = str(value) if isinstance(value, int) else [value]
    return _with(call, **{argument: wrong})
  rest = {key: val for key, val in call.arguments.items() if key != argument}
  if kind == 'renamed':
    rest['status'] = value
  return dataclasses.replace(call, arguments=rest)


def _unreadable(call, rng) -> str:
  text = tool_calls.render_call(call)
  return rng.choice(
    [
      text.replace('}}', '}'),  # never closed
      tool_calls.CALL_OPEN + call.name + tool_calls.CALL_CLOSE,
      text.replace('"arguments"', '"status"'),
    ]
  )


def _with(call: types.ToolCall, **arguments) -> types.ToolCall:
  return dataclasses.replace(call, arguments={**call.arguments, **arguments})
