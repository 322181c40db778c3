"""MiniDesk: a service desk over an in-memory SQLite database.

The state is the database, so snapshots, copies and hashes are SQL. Eleven tools
read and write it under business rules that no schema mentions; a broken rule is
a typed observation whose detail carries the fact in the same words a read
would have used:

  cancel_order O12 -> {"error": "not_pending", "detail": "shipped"}

A refused call changes nothing: every rule is checked before the first write.
Errors of form come first (unknown_tool, invalid_arguments), then not_found,
then the rules in the order in which they are written below.
"""

import contextlib
import functools
import hashlib
import json
import sqlite3

import jsonschema

from envace_jax import types
from envace_jax.envs import base
from envace_jax.envs.desk import data as desk_data
from envace_jax.envs.desk import schemas as desk_schemas
from envace_jax.text import tool_calls

DeskConfig = desk_data.DeskConfig
SMALL = desk_data.SMALL
RESAMPLED = desk_data.RESAMPLED
TOOLS = desk_schemas.TOOLS
WRITES = desk_schemas.WRITES

RULES = (
  'out_of_stock',
  'not_pending',
  'not_delivered',
  'already_refunded',
  'exceeds_paid',
  'coupon_expired',
  'coupon_already_used',
  'ticket_exists',
  'region_mismatch',
)
ERRORS = (
  'invalid_call',
  'unknown_tool',
  'invalid_arguments',
  'not_found',
  *RULES,
)

_SCHEMA = """
CREATE TABLE users (user_id TEXT PRIMARY KEY, name TEXT UNIQUE NOT NULL,
  region TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE items (item_id TEXT PRIMARY KEY, name TEXT UNIQUE NOT NULL,
  price INTEGER NOT NULL, stock INTEGER NOT NULL CHECK (stock >= 0))
  WITHOUT ROWID;
CREATE TABLE coupons (coupon TEXT PRIMARY KEY, percent INTEGER NOT NULL,
  expired INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE orders (order_id TEXT PRIMARY KEY,
  user_id TEXT NOT NULL REFERENCES users, item_id TEXT NOT NULL
  REFERENCES items, quantity INTEGER NOT NULL, paid INTEGER NOT NULL,
  status TEXT NOT NULL, coupon TEXT REFERENCES coupons,
  refunded INTEGER NOT NULL CHECK (refunded <= paid)) WITHOUT ROWID;
CREATE TABLE tickets (ticket_id TEXT PRIMARY KEY, about TEXT NOT NULL,
  topic TEXT NOT NULL, status TEXT NOT NULL, UNIQUE (about, topic))
  WITHOUT ROWID;
"""
_TABLES = ('users', 'items', 'coupons', 'orders', 'tickets')
_FUNCTIONS = {tool['function']['name']: tool['function'] for tool in TOOLS}
_VALIDATORS = {
  name: jsonschema.Draft202012Validator(function['parameters'])
  for name, function in _FUNCTIONS.items()
}
# Ids of new rows follow from history, not from arguments and facts.
_NEW_IDS = {'place_order': ('order_id',), 'open_ticket': ('ticket_id',)}


class Desk:
  """One copy of the desk. `reset` takes its database from the task."""

  tools = TOOLS

  def __init__(self, config: desk_data.DeskConfig):
    self._config = config
    self._database = sqlite3.connect(
      ':memory:', isolation_level=None, check_same_thread=False
    )
    self.restore(_image(config, config.seed))

  def reset(self, task: types.Task) -> None:
    self.restore(_image(self._config, task.environment['seed']))

  def snapshot(self) -> bytes:
    return self._database.serialize()

  def restore(self, snapshot: bytes) -> None:
    self._database.deserialize(snapshot)
    self._database.execute('PRAGMA foreign_keys = ON')

  def state_hash(self) -> str:
    # WITHOUT ROWID tables are stored, and so scanned, by primary key; ORDER BY
    # makes that a promise instead of a habit.
    state = [
      self._database.execute(f'SELECT * FROM {table} ORDER BY 1').fetchall()
      for table in _TABLES
    ]
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()

  def close(self) -> None:
    self._database.close()

  def call(self, action: types.ToolCall | types.ParseError) -> base.Observation:
    if isinstance(action, types.ParseError):
      return base.failure('invalid_call', _printable(action.kind))
    name = action.name
    if not isinstance(name, str) or name not in _FUNCTIONS:
      return base.failure('unknown_tool', _printable(name))
    fault = _fault(name, action.arguments)
    if fault is not None:
      return base.failure('invalid_arguments', fault)
    arguments = {
      key: _printable(value) if isinstance(value, str) else int(value)
      for key, value in action.arguments.items()
    }
    try:
      return base.success(getattr(self, f'_{name}')(**arguments))
    except _Refusal as refusal:
      return base.failure(refusal.rule, refusal.detail)

  # Reads.

  def _find_user(self, name: str) -> types.Json:
    user_id, _, region = self._row('users', 'name', name)
    return {'user_id': user_id, 'region': region}

  def _list_orders(self, user_id: str) -> types.Json:
    self._user(user_id)
    orders = self._database.execute(
      'SELECT order_id, name FROM orders JOIN items USING (item_id)'
      ' WHERE user_id = ? ORDER BY order_id',
      (user_id,),
    )
    return {'orders': [{'order_id': key, 'item': item} for key, item in orders]}

  def _get_order(self, order_id: str) -> types.Json:
    order = self._order(order_id)
    item = self._row('items', 'item_id', order.item_id)
    return {
      'order_id': order_id,
      'item': item[1],
      'status': order.status,
      'paid': order.paid,
      'coupon': order.coupon or 'none',
    }

  def _get_item(self, item: str) -> types.Json:
    row = self._item(item)
    return {'item': item, 'price': row.price, 'stock': row.stock}

  def _get_coupon(self, coupon: str) -> types.Json:
    row = self._coupon(coupon)
    state = 'expired' if row.expired else 'valid'
    return {'coupon': coupon, 'percent': row.percent, 'state': state}

  # Writes. Rules first, in the order they are reported; then the change.

  def _place_order(self, user_id: str, item: str, quantity: int) -> types.Json:
    self._user(user_id)
    row = self._item(item)
    _rule(quantity <= row.stock, 'out_of_stock', row.stock)
    order_id = self._next_id('orders', 'order_id')
    paid = row.price * quantity
    self._database.execute(
      "INSERT INTO orders VALUES (?, ?, ?, ?, ?, 'pending', NULL, 0)",
      (order_id, user_id, row.item_id, quantity, paid),
    )
    self._database.execute(
      'UPDATE items SET stock = stock - ? WHERE item_id = ?',
      (quantity, row.item_id),
    )
    return {'order_id': order_id, 'paid': paid}

  def _cancel_order(self, order_id: str) -> types.Json:
    order = self._order(order_id)
    _rule(order.status == 'pending', 'not_pending', order.status)
    self._update_order(order_id, 'status', 'cancelled')
    return {'order_id': order_id, 'status': 'cancelled'}

  def _refund_order(self, order_id: str, amount: int) -> types.Json:
    order = self._order(order_id)
    _rule(order.status == 'delivered', 'not_delivered', order.status)
    _rule(not order.refunded, 'already_refunded', order.refunded)
    _rule(amount <= order.paid, 'exceeds_paid', order.paid)
    self._update_order(order_id, 'refunded', amount)
    return {'order_id': order_id, 'refunded': amount}

  def _apply_coupon(self, order_id: str, coupon: str) -> types.Json:
    order, row = self._order(order_id), self._coupon(coupon)
    _rule(order.status == 'pending', 'not_pending', order.status)
    _rule(not row.expired, 'coupon_expired', 'expired')
    _rule(order.coupon is None, 'coupon_already_used', order.coupon)
    paid = desk_data.discounted(order.paid, row.percent)
    self._update_order(order_id, 'coupon', coupon)
    self._update_order(order_id, 'paid', paid)
    return {'order_id': order_id, 'coupon': coupon, 'paid': paid}

  def _open_ticket(self, about: str, topic: str) -> types.Json:
    if not self._exists('orders', 'order_id', about):
      self._item(about)
    same = self._database.execute(
      'SELECT 1 FROM tickets WHERE about = ? AND topic = ?', (about, topic)
    )
    _rule(same.fetchone() is None, 'ticket_exists', topic)
    ticket_id = self._next_id('tickets', 'ticket_id')
    self._database.execute(
      "INSERT INTO tickets VALUES (?, ?, ?, 'open')", (ticket_id, about, topic)
    )
    return {'ticket_id': ticket_id, 'topic': topic}

  def _transfer_order(self, order_id: str, user_id: str) -> types.Json:
    order, user = self._order(order_id), self._user(user_id)
    _rule(order.status == 'pending', 'not_pending', order.status)
    home = self._user(order.user_id).region
    _rule(user.region == home, 'region_mismatch', user.region)
    self._update_order(order_id, 'user_id', user_id)
    return {'order_id': order_id, 'user_id': user_id}

  # Rows. Table and column names are literals of this file, values parameters.

  def _row(self, table: str, column: str, value: str) -> tuple:
    found = self._database.execute(
      f'SELECT * FROM {table} WHERE {column} = ?', (value,)
    ).fetchone()
    _rule(found is not None, 'not_found', value)
    return found

  def _exists(self, table: str, column: str, value: str) -> bool:
    with contextlib.suppress(_Refusal):
      self._row(table, column, value)
      return True
    return False

  def _user(self, user_id: str) -> desk_data.User:
    return desk_data.User(*self._row('users', 'user_id', user_id))

  def _item(self, name: str) -> desk_data.Item:
    return desk_data.Item(*self._row('items', 'name', name))

  def _coupon(self, coupon: str) -> desk_data.Coupon:
    return desk_data.Coupon(*self._row('coupons', 'coupon', coupon))

  def _order(self, order_id: str) -> desk_data.Order:
    return desk_data.Order(*self._row('orders', 'order_id', order_id))

  def _update_order(self, order_id: str, column: str, value) -> None:
    self._database.execute(
      f'UPDATE orders SET {column} = ? WHERE order_id = ?', (value, order_id)
    )

  def _next_id(self, table: str, column: str) -> str:
    (last,) = self._database.execute(
      f'SELECT MAX(CAST(SUBSTR({column}, 2) AS INTEGER)) FROM {table}'
    ).fetchone()
    return f'{column[0].upper()}{(last or 0) + 1:02d}'


def determinable(
  call: types.ToolCall, observation_text: str
) -> list[tuple[str | int, ...]]:
  """Paths of an observation that arguments and database facts determine.

  Each path is a tuple of keys and indices that ends in a scalar, or in an empty
  list; ids of rows that the call created are left out, as no one could know
  them. Score fidelity on these paths only.
  """
  observation = json.loads(observation_text)
  hidden = () if 'error' in observation else _NEW_IDS.get(call.name, ())
  return [path for path in _leaves(observation) if path[0] not in hidden]


class _Refusal(Exception):
  """A call broke a rule. Never leaves this file."""

  def __init__(self, rule: str, detail: str):
    super().__init__(rule)
    self.rule, self.detail = rule, detail


def _rule(holds: bool, rule: str, detail) -> None:
  if not holds:
    raise _Refusal(rule, str(detail))


@functools.lru_cache(maxsize=4096)
def _image(config: desk_data.DeskConfig, seed: int) -> bytes:
  """A serialised database; an episode starts by copying it."""
  rows = desk_data.sample_rows(config, seed)
  with contextlib.closing(sqlite3.connect(':memory:')) as database:
    database.execute('PRAGMA page_size = 1024')
    database.executescript(_SCHEMA)
    for table in _TABLES:
      values = getattr(rows, table)
      if values:
        marks = ', '.join('?' * len(values[0]))
        database.executemany(f'INSERT INTO {table} VALUES ({marks})', values)
    database.commit()
    return database.serialize()


def _fault(name: str, arguments) -> str | None:
  """The argument a call is malformed in, None if it is well formed."""
  try:
    errors = list(_VALIDATORS[name].iter_errors(arguments))
  except (RecursionError, ValueError, TypeError):
    # The library prints what it rejects, and some values cannot be printed: a
    # list too deep, an integer too long.
    return 'arguments'
  if not errors:
    return None
  known = _FUNCTIONS[name]['parameters']['properties']
  faults = set()
  for error in errors:
    if error.validator == 'required':
      faults |= {key for key in known if key not in error.instance}
    elif error.validator == 'additionalProperties':
      faults.add('extra')
    else:
      faults.add(error.path[0] if error.path else 'arguments')
  return next((key for key in known if key in faults), min(faults))


def _printable(value) -> str:
  """What a model wrote, in short and free of what SQL cannot hold."""
  if not isinstance(value, str):
    return type(value).__name__
  return tool_calls.clean(value[:32])


def _leaves(value, path=()) -> list[tuple[str | int, ...]]:
  if isinstance(value, dict):
    pairs = value.items()
  elif isinstance(value, list):
    pairs = enumerate(value)
  else:
    return [path]
  below = [leaf for key, item in pairs for leaf in _leaves(item, (*path, key))]
  return below or [path]
