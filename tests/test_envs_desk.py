"""The desk: its rules, its isolation, its databases."""

import json

import jsonschema
import pytest

from envace_jax import types
from envace_jax.envs.desk import data as desk_data
from envace_jax.envs.desk import environment as desk

ROWS = desk_data.sample_rows(desk.SMALL, 0)
RETURNS = {
  tool['function']['name']: tool['function']['returns'] for tool in desk.TOOLS
}


@pytest.fixture
def world():
  environment = desk.Desk(desk.SMALL)
  yield environment
  environment.close()


def call(name, /, **arguments):
  return types.ToolCall(name=name, arguments=arguments)


def task(seed):
  return types.Task(
    id='t', instruction='', tools=(), checklist=(), environment={'seed': seed}
  )


def order(status, **fields):
  return next(
    o
    for o in ROWS.orders
    if o.status == status
    and all(bool(getattr(o, k)) == v for k, v in fields.items())
  ).order_id


def item(wanted):
  return next(i.name for i in ROWS.items if wanted(i.stock))


def coupon(expired):
  return next(c.coupon for c in ROWS.coupons if c.expired == expired)


USER = ROWS.users[0].user_id
PENDING = order('pending', coupon=False)
TAKEN = next(o for o in ROWS.orders if o.status == 'pending' and o.coupon)
SHIPPED, CANCELLED = order('shipped'), order('cancelled')
DELIVERED = order('delivered', refunded=False)
REFUNDED = ROWS.order[order('delivered', refunded=True)]
HOME = ROWS.user[ROWS.order[PENDING].user_id]
FOREIGN = next(u for u in ROWS.users if u.region != HOME.region)
NEIGHBOUR = next(
  u for u in ROWS.users if u.region == HOME.region and u is not HOME
)
SOLD_OUT = item(lambda stock: stock == 0)
LAST = item(lambda stock: stock == 1)
PAID = ROWS.order[DELIVERED].paid

REFUSALS = [
  (call('cancel_order', order_id=SHIPPED), 'not_pending', 'shipped'),
  (call('cancel_order', order_id='O99'), 'not_found', 'O99'),
  (
    call('refund_order', order_id=PENDING, amount=5),
    'not_delivered',
    'pending',
  ),
  (
    call('refund_order', order_id=REFUNDED.order_id, amount=5),
    'already_refunded',
    str(REFUNDED.refunded),
  ),
  (
    call('refund_order', order_id=DELIVERED, amount=PAID + 1),
    'exceeds_paid',
    str(PAID),
  ),
  (
    call('apply_coupon', order_id=CANCELLED, coupon=coupon(0)),
    'not_pending',
    'cancelled',
  ),
  (
    call('apply_coupon', order_id=PENDING, coupon=coupon(1)),
    'coupon_expired',
    'expired',
  ),
  (
    call('apply_coupon', order_id=TAKEN.order_id, coupon=coupon(0)),
    'coupon_already_used',
    TAKEN.coupon,
  ),
  (
    call('place_order', user_id=USER, item=SOLD_OUT, quantity=1),
    'out_of_stock',
    '0',
  ),
  (
    call('place_order', user_id=USER, item=LAST, quantity=2),
    'out_of_stock',
    '1',
  ),
  (
    call('place_order', user_id='U99', item=SOLD_OUT, quantity=1),
    'not_found',
    'U99',
  ),
  (
    call('open_ticket', about=ROWS.tickets[0].about, topic='other'),
    'ticket_exists',
    'other',
  ),
  (call('open_ticket', about='piano2', topic='other'), 'not_found', 'piano2'),
  (
    call('transfer_order', order_id=PENDING, user_id=FOREIGN.user_id),
    'region_mismatch',
    FOREIGN.region,
  ),
  (
    call('transfer_order', order_id=SHIPPED, user_id=USER),
    'not_pending',
    'shipped',
  ),
  (call('open_ticket', about=PENDING, topic='x'), 'invalid_arguments', 'topic'),
  (call('cancel_order'), 'invalid_arguments', 'order_id'),
  (
    call('cancel_order', order_id=PENDING, sure=True),
    'invalid_arguments',
    'extra',
  ),
  (
    call('place_order', user_id=USER, item=LAST, quantity=True),
    'invalid_arguments',
    'quantity',
  ),
  (call('drop_tables'), 'unknown_tool', 'drop_tables'),
  (types.ParseError(kind='bad_json', detail='?'), 'invalid_call', 'bad_json'),
]


@pytest.mark.parametrize('action,error,detail', REFUSALS)
def test_a_refusal_is_typed_says_the_fact_and_changes_nothing(
  world, action, error, detail
):
  before = world.state_hash()
  observation = world.call(action)
  assert observation.error == error
  assert json.loads(observation.text) == {'error': error, 'detail': detail}
  assert world.state_hash() == before


def test_every_error_is_covered_above():
  assert {error for _, error, _ in REFUSALS} == set(desk.ERRORS)


WRITES = [
  call('cancel_order', order_id=PENDING),
  call('refund_order', order_id=DELIVERED, amount=PAID),
  call('apply_coupon', order_id=PENDING, coupon=coupon(0)),
  call('place_order', user_id=USER, item=LAST, quantity=1),
  call('open_ticket', about=SHIPPED, topic='return'),
  call('open_ticket', about=SOLD_OUT, topic='restock'),
  call(
    'transfer_order',
    order_id=PENDING,
    user_id=NEIGHBOUR.user_id,
  ),
]


@pytest.mark.parametrize('action', WRITES)
def test_a_legal_write_changes_the_state_as_announced(world, action):
  before = world.state_hash()
  observation = world.call(action)
  assert observation.error is None
  jsonschema.validate(json.loads(observation.text), RETURNS[action.name])
  assert world.state_hash() != before
  assert action.name in desk.WRITES


def test_a_discount_is_what_the_next_read_shows(world):
  told = json.loads(world.call(WRITES[2]).text)
  seen = json.loads(world.call(call('get_order', order_id=PENDING)).text)
  assert seen['paid'] == told['paid'] < ROWS.order[PENDING].paid
  assert seen['coupon'] == told['coupon']
  assert told['paid'] in desk_data.MONEY


def test_buying_takes_from_the_stock_and_lists_the_order(world):
  order_id = json.loads(world.call(WRITES[3]).text)['order_id']
  stock = json.loads(world.call(call('get_item', item=LAST)).text)['stock']
  orders = json.loads(world.call(call('list_orders', user_id=USER)).text)
  assert stock == 0
  assert {'order_id': order_id, 'item': LAST} in orders['orders']


def test_reads_change_nothing_and_satisfy_their_schema(world):
  before = world.state_hash()
  reads = [
    *(call('get_order', order_id=o.order_id) for o in ROWS.orders),
    *(call('list_orders', user_id=u.user_id) for u in ROWS.users),
    *(call('find_user', name=u.name) for u in ROWS.users),
    *(call('get_item', item=i.name) for i in ROWS.items),
    *(call('get_coupon', coupon=c.coupon) for c in ROWS.coupons),
  ]
  for read in reads:
    observation = world.call(read)
    assert observation.error is None
    jsonschema.validate(json.loads(observation.text), RETURNS[read.name])
  assert world.state_hash() == before


@pytest.mark.parametrize('action', WRITES)
def test_restore_undoes_and_two_desks_share_nothing(world, action):
  other = desk.Desk(desk.SMALL)
  start = world.state_hash()
  snapshot = world.snapshot()
  first = world.call(action).text
  changed = world.state_hash()
  assert other.state_hash() == start
  world.restore(snapshot)
  assert world.state_hash() == start
  assert world.call(action).text == first
  other.restore(world.snapshot())
  assert other.state_hash() == changed
  other.reset(task(0))
  assert other.state_hash() == start
  assert world.state_hash() == changed
  other.close()


def test_the_hash_depends_on_every_table_and_not_on_history(world):
  start = world.state_hash()
  hashes = {start}
  for action in WRITES:
    world.reset(task(0))
    world.call(action)
    hashes.add(world.state_hash())
  assert len(hashes) == len(WRITES) + 1
  # Two independent changes commute.
  one, two = WRITES[0], WRITES[1]
  ends = []
  for order_ in ((one, two), (two, one)):
    world.reset(task(0))
    for action in order_:
      world.call(action)
    ends.append(world.state_hash())
  assert ends[0] == ends[1]


def test_a_database_follows_from_its_seed(world):
  world.reset(task(5))
  fifth = world.state_hash()
  world.reset(task(6))
  assert world.state_hash() != fifth
  again = desk.Desk(desk.SMALL)
  again.reset(task(5))
  assert again.state_hash() == fifth
  again.close()


def test_a_whole_number_may_be_written_as_a_float(world):
  action = call('refund_order', order_id=DELIVERED, amount=float(PAID))
  assert json.loads(world.call(action).text)['refunded'] == PAID


def test_new_ids_are_not_determinable(world):
  def paths(action):
    return desk.determinable(action, world.call(action).text)

  assert paths(WRITES[3]) == [('paid',)]
  assert paths(WRITES[4]) == [('topic',)]
  assert paths(WRITES[4]) == [('error',), ('detail',)]  # ticket_exists
  assert paths(WRITES[0]) == [('order_id',), ('status',)]
  owner = ROWS.order[PENDING].user_id
  listed = paths(call('list_orders', user_id=owner))
  assert listed[:2] == [('orders', 0, 'order_id'), ('orders', 0, 'item')]


def test_determinable_facts_are_equal_in_every_copy_of_the_desk(world):
  """Ids of new rows may differ with history, nothing else may."""
  other = desk.Desk(desk.SMALL)
  other.call(call('open_ticket', about=SHIPPED, topic='other'))
  action = WRITES[5]
  mine, theirs = world.call(action).text, other.call(action).text
  assert mine != theirs
  for path in desk.determinable(action, mine):
    assert json.loads(mine)[path[0]] == json.loads(theirs)[path[0]]
  other.close()


@pytest.mark.parametrize('config', [desk.SMALL, desk.RESAMPLED])
@pytest.mark.parametrize('seed', range(5))
def test_a_database_is_made_of_known_words_and_unambiguous(config, seed):
  rows = desk_data.sample_rows(config, seed)
  known = set(desk_data.lexicon())
  for user in rows.users:
    own = [o.item_id for o in rows.orders_of(user.user_id)]
    assert len(own) == len(set(own)) <= desk_data.MAX_ORDERS
    assert {*user} <= known
  for entry in rows.orders:
    assert {entry.order_id, entry.status, str(entry.paid)} <= known
  for entry in rows.items:
    assert {entry.name, str(entry.price), str(entry.stock)} <= known
  assert {order.status for order in rows.orders} == set(desk_data.STATUSES)
  assert {coupon.expired for coupon in rows.coupons} == {0, 1}
  assert any(not i.stock for i in rows.items)


def test_impossible_sizes_are_refused():
  with pytest.raises(ValueError, match='num_orders'):
    desk.DeskConfig(num_users=3, num_orders=20)
  with pytest.raises(ValueError, match='goals'):
    desk.DeskConfig(goals=('cancel', 'steal'))
