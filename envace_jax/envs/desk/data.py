"""What a service desk holds: rows drawn from small, closed sets of words.

Every id, name and number is one of `lexicon()`, so that a word-level tokenizer
can give each a single piece and so that a tiny model can copy it. Money is a
multiple of five up to MAX_MONEY; a discount is rounded down to a multiple of
five and so stays inside the set. Statuses, coupons in use and empty shelves are
dealt out in fixed shares instead of drawn one by one, so that every database
has something of each kind.
"""

from collections.abc import Sequence
import dataclasses
import functools
import random
from typing import NamedTuple

USER_IDS = tuple(f'U{i:02d}' for i in range(1, 28))
ORDER_IDS = tuple(f'O{i:02d}' for i in range(1, 76))
TICKET_IDS = tuple(f'T{i:02d}' for i in range(1, 16))
COUPONS = tuple(f'SAVE{i}' for i in range(1, 9))  # the number says nothing
NAMES = tuple(
  'Ana Ben Cleo Dan Eva Finn Gina Hugo Iris Jack Kira Leo Mia Nora Otto Pia '
  'Quin Rosa Sam Tina Ugo Vera Walt Xena Yann Zoe Alba'.split()
)
ITEMS = tuple(
  'lamp chair desk sofa clock mug tent bike piano drum globe vase'.split()
)
REGIONS = ('north', 'south', 'east', 'west')
STATUSES = ('pending', 'shipped', 'delivered', 'cancelled')
TOPICS = ('return', 'restock', 'coupon', 'other')
PRICES = tuple(range(10, 65, 5))
PERCENTS = (5, 10, 15, 20, 25, 30, 40, 50)
STOCKS = (0, 1, 2, 3, 4, 6, 7, 8)
MAX_QUANTITY = 2
MAX_MONEY = PRICES[-1] * MAX_QUANTITY
MONEY = tuple(range(5, MAX_MONEY + 5, 5))
MAX_ORDERS = 3  # per user, never two of the same item
GOALS = tuple(
  (
    'status paid price stock percent region cancel refund coupon buy restock'
  ).split()
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeskConfig:
  """Size of the desk, and whether tasks share one database."""

  seed: int = 0
  num_users: int = 24
  num_items: int = 10
  num_orders: int = 60
  num_coupons: int = 6
  goals: tuple[str, ...] = GOALS  # 'transfer' may be added
  resample: bool = False  # True: each task has a database of its own

  def __post_init__(self):
    # One id of each kind is left out, so that unknown ids exist.
    for field, pool in (
      ('num_users', USER_IDS),
      ('num_items', ITEMS),
      ('num_coupons', COUPONS),
    ):
      if not 1 <= getattr(self, field) < len(pool):
        raise ValueError(
          f'desk.{field}={getattr(self, field)} must be in 1..{len(pool) - 1}'
        )
    limit = min(60, self.num_users * min(MAX_ORDERS, self.num_items))
    if not 10 <= self.num_orders <= limit:
      raise ValueError(f'desk.num_orders={self.num_orders}; use 10..{limit}')
    unknown = set(self.goals) - {*GOALS, 'transfer'}
    if unknown:
      raise ValueError(f'desk.goals has unknown goals {sorted(unknown)}')


SMALL = DeskConfig()
RESAMPLED = DeskConfig(
  num_users=8, num_items=6, num_orders=14, num_coupons=4, resample=True
)


class User(NamedTuple):
  user_id: str
  name: str
  region: str


class Item(NamedTuple):
  item_id: str
  name: str
  price: int
  stock: int


class Coupon(NamedTuple):
  coupon: str
  percent: int
  expired: int


class Order(NamedTuple):
  order_id: str
  user_id: str
  item_id: str
  quantity: int
  paid: int
  status: str
  coupon: str | None
  refunded: int  # the amount, 0 for none


class Ticket(NamedTuple):
  ticket_id: str
  about: str
  topic: str
  status: str


@dataclasses.dataclass(frozen=True)
class Rows:
  """A database as plain rows: what tasks are made from."""

  users: tuple[User, ...]
  items: tuple[Item, ...]
  coupons: tuple[Coupon, ...]
  orders: tuple[Order, ...]
  tickets: tuple[Ticket, ...]

  @functools.cached_property
  def user(self) -> dict[str, User]:
    return {user.user_id: user for user in self.users}

  @functools.cached_property
  def item(self) -> dict[str, Item]:
    """By name."""
    return {item.name: item for item in self.items}

  @functools.cached_property
  def coupon(self) -> dict[str, Coupon]:
    return {coupon.coupon: coupon for coupon in self.coupons}

  @functools.cached_property
  def order(self) -> dict[str, Order]:
    return {order.order_id: order for order in self.orders}

  @functools.cached_property
  def item_name(self) -> dict[str, str]:
    return {item.item_id: item.name for item in self.items}

  def orders_of(self, user_id: str) -> list[Order]:
    return [order for order in self.orders if order.user_id == user_id]


@functools.lru_cache(maxsize=1024)
def sample_rows(config: DeskConfig, seed: int) -> Rows:
  """Draws a database; equal arguments give equal rows on every machine."""
  rng = random.Random(f'desk/{seed}')
  names = rng.sample(NAMES, config.num_users)
  users = tuple(
    User(user_id, name, rng.choice(REGIONS))
    for user_id, name in zip(
      _subset(rng, USER_IDS, config.num_users), names, strict=True
    )
  )
  stocks = _dealt(rng, config.num_items, ((0, 0.3), (1, 0.15)), None)
  items = tuple(
    Item(
      f'I{i:02d}',
      name,
      rng.choice(PRICES),
      rng.choice(STOCKS[2:]) if stock is None else stock,
    )
    for i, (name, stock) in enumerate(
      zip(rng.sample(ITEMS, config.num_items), stocks, strict=True), 1
    )
  )
  expired = _dealt(rng, config.num_coupons, ((1, 0.5),), 0)
  coupons = tuple(
    Coupon(code, rng.choice(PERCENTS), flag)
    for code, flag in zip(
      _subset(rng, COUPONS, config.num_coupons), expired, strict=True
    )
  )
  orders = _sample_orders(rng, config, users, items, coupons)
  shipped_back = [o.order_id for o in orders if o.status == 'delivered'][:2]
  tickets = tuple(
    Ticket(TICKET_IDS[i], order_id, 'other', 'open')
    for i, order_id in enumerate(shipped_back)
  )
  return Rows(users, items, coupons, orders, tickets)


def discounted(paid: int, percent: int) -> int:
  """What is left to pay, rounded down to money that exists."""
  return max(5, paid * (100 - percent) // 100 // 5 * 5)


def lexicon() -> tuple[str, ...]:
  """Every id, name, word and number that a desk of any size can say."""
  numbers = sorted({*MONEY, *PERCENTS, *STOCKS, *range(1, MAX_QUANTITY + 1)})
  words = (
    *USER_IDS,
    *ORDER_IDS,
    *TICKET_IDS,
    *COUPONS,
    *NAMES,
    *ITEMS,
    *REGIONS,
    *STATUSES,
    *TOPICS,
    'none',
    'valid',
    'expired',
    *map(str, numbers),
  )
  return tuple(dict.fromkeys(words))


def _sample_orders(rng, config, users, items, coupons) -> tuple[Order, ...]:
  pairs = []
  for user in users:
    own = rng.sample(items, min(MAX_ORDERS, len(items)))
    pairs += [(user.user_id, item) for item in own]
  pairs = rng.sample(pairs, config.num_orders)
  statuses = _dealt(
    rng,
    config.num_orders,
    (('pending', 0.4), ('shipped', 0.2), ('delivered', 0.3)),
    'cancelled',
  )
  seen, orders = {}, []
  ids = _subset(rng, ORDER_IDS[:60], config.num_orders)
  for order_id, status, (user_id, item) in zip(
    ids, statuses, pairs, strict=True
  ):
    # Every third order of a status carries a coupon, every third delivered
    # one was refunded.
    nth = seen[status] = seen.get(status, -1) + 1
    quantity = rng.randint(1, MAX_QUANTITY)
    coupon = rng.choice(coupons) if nth % 3 == 1 else None
    paid = item.price * quantity
    if coupon:
      paid = discounted(paid, coupon.percent)
    refunded = paid if status == 'delivered' and nth % 3 == 2 else 0
    orders.append(
      Order(
        order_id,
        user_id,
        item.item_id,
        quantity,
        paid,
        status,
        coupon.coupon if coupon else None,
        refunded,
      )
    )
  return tuple(orders)


def _subset(rng: random.Random, pool: Sequence[str], count: int) -> list[str]:
  return sorted(rng.sample(pool, count), key=pool.index)


def _dealt(rng, count, shares, rest) -> list:
  """`count` values in fixed shares, the rest `rest`, shuffled."""
  values = []
  for value, share in shares:
    values += [value] * round(share * count)
  values = (values + [rest] * count)[:count]
  rng.shuffle(values)
  return values
