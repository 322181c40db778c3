"""What a customer can ask of a desk, and in which words.

An `Instance` is one request to one database. The same templates serve the
families single_write, trap and infeasible, so that a prompt does not tell which
it is; `desk_goals` knows.
"""

import dataclasses

from envace_jax import types
from envace_jax.envs.desk import data as desk_data

FAMILIES = (
  'lookup',
  'single_write',
  'conditional',
  'chain',
  'trap',
  'infeasible',
)
LOOKUPS = ('status', 'paid', 'price', 'stock', 'percent', 'region')
DIRECT = ('cancel', 'refund', 'coupon', 'buy', 'transfer')

# Two ways to ask, at most twelve words, keyed by the kind of task and goal.
_ASK = {
  'status': (
    'What is the status of order {order_id}?',
    'Tell me the status of {order_id}.',
  ),
  'paid': (
    'How much was paid for order {order_id}?',
    'Tell me the paid amount of {order_id}.',
  ),
  'price': ('What is the price of {item}?', 'Tell me the price of {item}.'),
  'stock': ('How many {item} are in stock?', 'Tell me the stock of {item}.'),
  'percent': (
    'What percent is coupon {coupon}?',
    'Tell me the percent of {coupon}.',
  ),
  'region': ('Which region is {name} in?', 'Tell me the region of {name}.'),
  'cancel': ('Please cancel order {order_id}.', 'I want to cancel {order_id}.'),
  'refund': (
    'Please refund order {order_id}.',
    'I want a refund for {order_id}.',
  ),
  'coupon': (
    'Please use coupon {coupon} on order {order_id}.',
    'I want {coupon} on {order_id}.',
  ),
  'buy': (
    'Please order {quantity} {item} for {user_id}.',
    '{user_id} wants to buy {quantity} {item}.',
  ),
  'transfer': (
    'Please transfer order {order_id} to {user_id}.',
    'I want {order_id} moved to {user_id}.',
  ),
}
CONDITIONAL = {
  'cancel': (
    'If order {order_id} is pending cancel it, otherwise open a return ticket.',
    'Cancel {order_id} if it is pending, otherwise open a return ticket.',
  ),
  'coupon': (
    'If {coupon} is valid use it on {order_id}, otherwise cancel {order_id}.',
    'Use {coupon} on {order_id} if it is valid, otherwise cancel {order_id}.',
  ),
  'refund': (
    'If order {order_id} is delivered refund it, otherwise tell me its status.',
    'Refund {order_id} if it is delivered, otherwise tell me its status.',
  ),
  'restock': (
    'If {item} is sold out open a restock ticket, otherwise give price.',
    'Open a restock ticket if {item} is sold out, otherwise give price.',
  ),
  'buy': (
    'If {item} is in stock order 1 for {user_id}, otherwise give price.',
    'Order 1 {item} for {user_id} if in stock, otherwise give price.',
  ),
}
CHAIN = {
  'cancel': (
    '{who} wants to cancel the {item}.',
    'Please cancel the {item} of {who}.',
  ),
  'refund': (
    '{who} wants a refund for the {item}.',
    'Please refund the {item} of {who}.',
  ),
  'status': (
    '{who} wants the status of the {item}.',
    'What is the status of the {item} of {who}?',
  ),
  'paid': (
    '{who} wants the paid amount of the {item}.',
    'How much did {who} pay for the {item}?',
  ),
  'coupon': (
    '{who} wants {coupon} on the {item}.',
    'Please use coupon {coupon} on the {item} of {who}.',
  ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Instance:
  """One thing to ask. Equal `key`s ask for the same in other words."""

  family: str
  goal: str
  stratum: str  # goal and outcome: what sampling balances within a family
  slots: types.Json

  @property
  def key(self) -> str:
    values = '/'.join(str(value) for value in self.slots.values())
    return f'{self.family}/{self.goal}/{values}'

  @property
  def instructions(self) -> tuple[str, ...]:
    asked = {'conditional': CONDITIONAL, 'chain': CHAIN}.get(self.family, _ASK)
    return tuple(text.format(**self.slots) for text in asked[self.goal])


def slots_of(family: str, goal: str, rows: desk_data.Rows) -> list[types.Json]:
  """Everything that could fill the templates of a kind of request."""
  return {
    'lookup': _lookup_slots,
    'direct': _direct_slots,
    'conditional': _conditional_slots,
    'chain': _chain_slots,
  }[family](goal, rows)


def _lookup_slots(goal: str, rows: desk_data.Rows) -> list[types.Json]:
  if goal in ('status', 'paid'):
    return [{'order_id': order.order_id} for order in rows.orders]
  if goal in ('price', 'stock'):
    return [{'item': item.name} for item in rows.items]
  if goal == 'percent':
    return [{'coupon': coupon.coupon} for coupon in rows.coupons]
  return [{'name': user.name} for user in rows.users]


def _direct_slots(goal: str, rows: desk_data.Rows) -> list[types.Json]:
  if goal in ('cancel', 'refund'):
    return [{'order_id': order.order_id} for order in rows.orders]
  if goal == 'coupon':
    return [
      {'coupon': coupon.coupon, 'order_id': order.order_id}
      for coupon in rows.coupons
      for order in rows.orders
      # One reason at a time: an expired coupon on an order that could not
      # take a valid one either has no single right answer.
      if not coupon.expired or (order.status == 'pending' and not order.coupon)
      if order.coupon != coupon.coupon
    ]
  if goal == 'transfer':
    return [
      {'order_id': order.order_id, 'user_id': user.user_id}
      for order in rows.orders
      for user in rows.users
      if order.user_id != user.user_id
    ]
  users = [user.user_id for user in rows.users]
  items = [item.name for item in rows.items]
  strangers = [key for key in desk_data.USER_IDS if key not in rows.user]
  missing = [name for name in desk_data.ITEMS if name not in rows.item]
  in_stock = [item.name for item in rows.items if item.stock >= 2]
  pairs = [
    *((user, item) for user in users for item in [*items, *missing]),
    *((user, item) for user in strangers for item in in_stock),
  ]
  return [
    {'quantity': quantity, 'item': item, 'user_id': user_id}
    for user_id, item in pairs
    for quantity in range(1, desk_data.MAX_QUANTITY + 1)
  ]


def _conditional_slots(goal: str, rows: desk_data.Rows) -> list[types.Json]:
  orders = rows.orders
  if goal == 'restock':
    return [{'item': item.name} for item in rows.items]
  if goal == 'buy':
    return [
      {'item': item.name, 'user_id': user.user_id, 'quantity': 1}
      for item in rows.items
      for user in rows.users
    ]
  if goal == 'coupon':
    orders = [o for o in orders if o.status == 'pending' and not o.coupon]
    return [
      {'coupon': coupon.coupon, 'order_id': order.order_id}
      for coupon in rows.coupons
      for order in orders
    ]
  if goal == 'refund':
    orders = [order for order in orders if not order.refunded]
  return [{'order_id': order.order_id} for order in orders]


def _chain_slots(goal: str, rows: desk_data.Rows) -> list[types.Json]:
  found = []
  for order in rows.orders:
    own = rows.orders_of(order.user_id)
    if len(own) < 2:
      continue  # nothing to choose
    slots = {'item': rows.item_name[order.item_id]}
    names = [order.user_id, rows.user[order.user_id].name]
    if goal == 'coupon':
      coupons = [{'coupon': c.coupon} for c in rows.coupons if not c.expired]
      legal = order.status == 'pending' and not order.coupon
      names = names[:1]  # four calls are enough
    else:
      coupons = [{}]
      legal = {
        'cancel': order.status == 'pending',
        'refund': order.status == 'delivered' and not order.refunded,
      }.get(goal, True)
    if legal:
      found += [
        {'who': who, **slots, **coupon} for who in names for coupon in coupons
      ]
  return found
