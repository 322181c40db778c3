"""What a good employee does about a request: the semantics of the desk.

None of it is in a prompt; it is learned from demonstrations.

  goal      legal                    trap                     infeasible
  cancel    pending                  shipped: return ticket   other status
  refund    delivered, the paid sum  pending: cancel instead  refunded before,
                                     shipped: return ticket   cancelled
  coupon    pending, valid, first    expired: coupon ticket   second coupon,
                                                              not pending
  buy       enough stock             restock ticket           unknown item
                                                              or user
  transfer  pending, same region     -                        other region

`enumerate_all` lists every request that a database offers; `solve` says what is
right: an expert's calls (reads, then the one write), the reply, and the fact
that decides.
"""

from collections.abc import Iterator
import dataclasses

from envace_jax import types
from envace_jax.envs.desk import data as desk_data
from envace_jax.envs.desk import requests as desk_requests


@dataclasses.dataclass(frozen=True, kw_only=True)
class Solution:
  """What is right, and how one can know."""

  # 'answer', 'done' (right as named), 'branch', 'trap' or 'infeasible'
  outcome: str
  reads: tuple[types.ToolCall, ...]
  reply: str
  fact: tuple[str, ...]  # words of the observation that decides
  about: str  # an argument of the call that yields it
  write: types.ToolCall | None = None
  refused: types.ToolCall | None = None  # a write that must be seen to fail

  @property
  def plan(self) -> tuple[types.ToolCall, ...]:
    return self.reads + tuple(
      call for call in (self.refused, self.write) if call is not None
    )


def tool_call(name: str, /, **arguments) -> types.ToolCall:
  return types.ToolCall(name=name, arguments=arguments)


def enumerate_all(
  rows: desk_data.Rows,
  goals: tuple[str, ...],
  families: tuple[str, ...] = desk_requests.FAMILIES,
) -> Iterator[desk_requests.Instance]:
  """Every instance of some families that this database offers."""
  direct = {'single_write', 'trap', 'infeasible'}.intersection(families)
  for goal in goals:
    kinds = [
      ('lookup' in families and goal in desk_requests.LOOKUPS, 'lookup'),
      (direct and goal in desk_requests.DIRECT, 'direct'),
      (
        'conditional' in families and goal in desk_requests.CONDITIONAL,
        'conditional',
      ),
      ('chain' in families and goal in desk_requests.CHAIN, 'chain'),
    ]
    for kind in [kind for wanted, kind in kinds if wanted]:
      for slots in desk_requests.slots_of(kind, goal, rows):
        family, stratum = _place(kind, goal, slots, rows)
        if family in families:
          yield desk_requests.Instance(
            family=family, goal=goal, stratum=stratum, slots=slots
          )


def solve(instance: desk_requests.Instance, rows: desk_data.Rows) -> Solution:
  """The expert's way through an instance."""
  goal, slots = instance.goal, instance.slots
  if instance.family == 'conditional':
    return _solve_conditional(goal, slots, rows)
  if instance.family == 'chain':
    return _solve_chain(goal, slots, rows)
  if goal in desk_requests.LOOKUPS:
    return _solve_lookup(goal, slots, rows)
  return _solve_direct(goal, slots, rows)


def _place(kind, goal, slots, rows) -> tuple[str, str]:
  """(family, what sampling balances within it)."""
  if kind == 'lookup':
    return kind, goal
  if kind == 'conditional':
    return kind, f'{goal}/{_condition(goal, slots, rows)}'
  if kind == 'chain':
    by = 'id' if slots['who'] in rows.user else 'name'
    return kind, f'{goal}/{by}'
  outcome, rule = _judge(goal, slots, rows)
  family = 'single_write' if outcome == 'done' else outcome
  return family, f'{goal}/{rule}'


# Lookups.


def _solve_lookup(goal, slots, rows) -> Solution:
  ((argument, about),) = slots.items()
  tool, table = {
    'order_id': ('get_order', rows.order),
    'item': ('get_item', rows.item),
    'coupon': ('get_coupon', rows.coupon),
    'name': ('find_user', {user.name: user for user in rows.users}),
  }[argument]
  value = str(getattr(table[about], goal))
  return Solution(
    outcome='answer',
    reads=(tool_call(tool, **slots),),
    reply=f'It is {value}.',
    fact=(value,),
    about=about,
  )


# Direct requests: single_write, trap, infeasible.


def _judge(
  goal: str, slots: types.Json, rows: desk_data.Rows
) -> tuple[str, str]:
  """(family outcome, the rule or status that makes it so)."""
  if goal == 'buy':
    item = rows.item.get(slots['item'])
    if item is None or slots['user_id'] not in rows.user:
      return 'infeasible', 'not_found'
    if slots['quantity'] > item.stock:
      return 'trap', 'out_of_stock'
    return 'done', 'in_stock'
  order = rows.order[slots['order_id']]
  if goal == 'refund':
    if order.refunded:
      return 'infeasible', 'already_refunded'
    return {
      'delivered': ('done', 'delivered'),
      'pending': ('trap', 'pending'),
      'shipped': ('trap', 'shipped'),
      'cancelled': ('infeasible', 'not_delivered'),
    }[order.status]
  if order.status != 'pending':
    if goal == 'cancel' and order.status == 'shipped':
      return 'trap', 'shipped'
    return 'infeasible', 'not_pending'
  if goal == 'coupon':
    if rows.coupon[slots['coupon']].expired:
      return 'trap', 'coupon_expired'
    if order.coupon:
      return 'infeasible', 'coupon_already_used'
  if goal == 'transfer':
    home = rows.user[order.user_id].region
    if rows.user[slots['user_id']].region != home:
      return 'infeasible', 'region_mismatch'
  return 'done', 'pending'


def _solve_direct(goal, slots, rows) -> Solution:
  outcome, rule = _judge(goal, slots, rows)
  reads, fact, about = _evidence(goal, slots, rows, rule)
  refused = write = None
  if outcome == 'done':
    write, reply = obvious_write(goal, slots, rows), 'Done.'
  elif outcome == 'trap':
    write, reply = _detour(goal, slots)[rule]
  else:
    reply = f'Not possible: {rule}.'
    # Some reasons show in no read: only the refused write tells.
    unseen = rule in ('already_refunded', 'region_mismatch')
    if unseen or (rule == 'not_found' and about == slots.get('user_id')):
      refused = obvious_write(goal, slots, rows)
  return Solution(
    outcome=outcome,
    reads=reads,
    reply=reply,
    fact=fact,
    about=about,
    write=write,
    refused=refused,
  )


def _evidence(goal, slots, rows, rule):
  """(reads, words of the deciding fact, what it is about)."""
  if goal == 'buy':
    reads = (tool_call('get_item', item=slots['item']),)
    item = rows.item.get(slots['item'])
    if item is None:
      return reads, ('not_found', slots['item']), slots['item']
    if rule == 'not_found':
      return reads, ('not_found', slots['user_id']), slots['user_id']
    return reads, (str(item.stock),), item.name
  order = rows.order[slots['order_id']]
  reads = (tool_call('get_order', order_id=order.order_id),)
  if rule in ('already_refunded', 'region_mismatch'):
    return reads, (rule,), order.order_id
  if rule == 'coupon_already_used':
    return reads, (order.coupon,), order.order_id
  if goal == 'coupon' and order.status == 'pending':
    state = 'expired' if rows.coupon[slots['coupon']].expired else 'valid'
    reads += (tool_call('get_coupon', coupon=slots['coupon']),)
    return reads, (state,), slots['coupon']
  return reads, (order.status,), order.order_id


def obvious_write(
  goal: str, slots: types.Json, rows: desk_data.Rows
) -> types.ToolCall:
  """What the words of the request name, legal or not."""
  if goal == 'buy':
    names = ('user_id', 'item', 'quantity')
    return tool_call('place_order', **{name: slots[name] for name in names})
  order_id = slots['order_id']
  if goal == 'refund':
    paid = rows.order[order_id].paid
    return tool_call('refund_order', order_id=order_id, amount=paid)
  if goal == 'coupon':
    return tool_call('apply_coupon', order_id=order_id, coupon=slots['coupon'])
  if goal == 'transfer':
    user_id = slots['user_id']
    return tool_call('transfer_order', order_id=order_id, user_id=user_id)
  return tool_call('cancel_order', order_id=order_id)


def ticket(about: str, topic: str) -> tuple[types.ToolCall, str]:
  call = tool_call('open_ticket', about=about, topic=topic)
  return call, f'I opened a {topic} ticket.'


def _detour(goal, slots) -> dict[str, tuple[types.ToolCall, str]]:
  """What to do instead, by the reason the obvious write is illegal."""
  if goal == 'buy':
    return {'out_of_stock': ticket(slots['item'], 'restock')}
  order_id = slots['order_id']
  cancel = tool_call('cancel_order', order_id=order_id)
  return {
    'shipped': ticket(order_id, 'return'),
    'coupon_expired': ticket(order_id, 'coupon'),
    'pending': (cancel, 'I cancelled the order.'),
  }


# Conditionals.


def _condition(goal: str, slots: types.Json, rows: desk_data.Rows) -> bool:
  if goal == 'restock':
    return rows.item[slots['item']].stock == 0
  if goal == 'buy':
    return rows.item[slots['item']].stock > 0
  if goal == 'coupon':
    return not rows.coupon[slots['coupon']].expired
  wanted = {'cancel': 'pending', 'refund': 'delivered'}[goal]
  return rows.order[slots['order_id']].status == wanted


def _solve_conditional(goal, slots, rows) -> Solution:
  holds = _condition(goal, slots, rows)
  write, reply = _branch(goal, holds, slots, rows)
  if goal in ('restock', 'buy'):
    item = rows.item[slots['item']]
    read, about = tool_call('get_item', item=item.name), item.name
    fact = (str(item.stock),)
    if write is None:
      fact += (str(item.price),)  # the answer
  elif goal == 'coupon':
    about = slots['coupon']
    read = tool_call('get_coupon', coupon=about)
    fact = ('valid' if holds else 'expired',)
  else:
    about = slots['order_id']
    read = tool_call('get_order', order_id=about)
    fact = (rows.order[about].status,)
  return Solution(
    # The desk itself refuses such a write if the condition does not hold.
    outcome='done' if holds and goal != 'restock' else 'branch',
    reads=(read,),
    reply=reply,
    fact=fact,
    about=about,
    write=write,
  )


def _branch(goal, holds, slots, rows) -> tuple[types.ToolCall | None, str]:
  if holds:
    if goal == 'restock':
      return ticket(slots['item'], 'restock')
    return obvious_write(goal, slots, rows), 'Done.'
  if goal == 'cancel':
    return ticket(slots['order_id'], 'return')
  if goal == 'coupon':
    return tool_call('cancel_order', order_id=slots['order_id']), 'Done.'
  if goal == 'refund':
    return None, f'It is {rows.order[slots["order_id"]].status}.'
  return None, f'It is {rows.item[slots["item"]].price}.'


# Chains: the order is named by its owner and its item.


def find_steps(
  slots: types.Json, rows: desk_data.Rows
) -> tuple[tuple[types.ToolCall, ...], str]:
  """The calls that list the orders of whom a chain is about, and who it is."""
  who, calls = slots['who'], ()
  if who not in rows.user:
    calls = (tool_call('find_user', name=who),)
    who = next(user.user_id for user in rows.users if user.name == who)
  return (*calls, tool_call('list_orders', user_id=who)), who


def _solve_chain(goal, slots, rows) -> Solution:
  find, user_id = find_steps(slots, rows)
  item_id = rows.item[slots['item']].item_id
  order_id = next(
    order.order_id
    for order in rows.orders_of(user_id)
    if order.item_id == item_id
  )
  slots = {**slots, 'order_id': order_id}
  if goal in desk_requests.LOOKUPS:
    end = _solve_lookup(goal, {'order_id': order_id}, rows)
    return dataclasses.replace(end, reads=find + end.reads)
  end = _solve_direct(goal, slots, rows)
  return dataclasses.replace(
    end,
    reads=find + end.reads,
    fact=(order_id, slots['item']),
    about=user_id,
  )
