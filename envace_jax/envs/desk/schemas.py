"""The desk's ten tools plus one, as function schemas.

Beside the usual `parameters`, each function has `returns`: the JSON schema of a
successful observation. Ids are plain strings here: an id that does not exist is
a fact about the database (`not_found`), not a malformed call.
"""

from envace_jax import types
from envace_jax.envs.desk import data as desk_data

_TEXT = {'type': 'string', 'maxLength': 32}
_NUMBER = {'type': 'integer', 'minimum': 0}


def _enum(*values: str) -> types.Json:
  return {'type': 'string', 'enum': list(values)}


def _object(properties: types.Json) -> types.Json:
  return {
    'type': 'object',
    'properties': properties,
    'required': list(properties),
    'additionalProperties': False,
  }


def _tool(
  name: str, description: str, parameters: types.Json, returns: types.Json
) -> types.Json:
  return {
    'type': 'function',
    'function': {
      'name': name,
      'description': description,
      'parameters': _object(parameters),
      'returns': _object(returns),
    },
  }


_ORDERS = {
  'type': 'array',
  'items': _object({'order_id': _TEXT, 'item': _TEXT}),
}
_QUANTITY = {'type': 'integer', 'minimum': 1, 'maximum': desk_data.MAX_QUANTITY}
_AMOUNT = {'type': 'integer', 'minimum': 1, 'maximum': 9999}

TOOLS = (
  _tool(
    'find_user',
    'Find a user by name.',
    {'name': _TEXT},
    {'user_id': _TEXT, 'region': _enum(*desk_data.REGIONS)},
  ),
  _tool(
    'list_orders',
    "List a user's orders.",
    {'user_id': _TEXT},
    {'orders': _ORDERS},
  ),
  _tool(
    'get_order',
    'Read an order.',
    {'order_id': _TEXT},
    {
      'order_id': _TEXT,
      'item': _TEXT,
      'status': _enum(*desk_data.STATUSES),
      'paid': _NUMBER,
      'coupon': _TEXT,
    },
  ),
  _tool(
    'get_item',
    'Read the price and stock of an item.',
    {'item': _TEXT},
    {'item': _TEXT, 'price': _NUMBER, 'stock': _NUMBER},
  ),
  _tool(
    'get_coupon',
    'Read a coupon.',
    {'coupon': _TEXT},
    {'coupon': _TEXT, 'percent': _NUMBER, 'state': _enum('valid', 'expired')},
  ),
  _tool(
    'place_order',
    'Order an item for a user.',
    {'user_id': _TEXT, 'item': _TEXT, 'quantity': _QUANTITY},
    {'order_id': _TEXT, 'paid': _NUMBER},
  ),
  _tool(
    'cancel_order',
    'Cancel an order.',
    {'order_id': _TEXT},
    {'order_id': _TEXT, 'status': _enum('cancelled')},
  ),
  _tool(
    'refund_order',
    'Pay money back for an order.',
    {'order_id': _TEXT, 'amount': _AMOUNT},
    {'order_id': _TEXT, 'refunded': _NUMBER},
  ),
  _tool(
    'apply_coupon',
    'Use a coupon on an order.',
    {'order_id': _TEXT, 'coupon': _TEXT},
    {'order_id': _TEXT, 'coupon': _TEXT, 'paid': _NUMBER},
  ),
  _tool(
    'open_ticket',
    'Open a ticket about an order or an item.',
    {'about': _TEXT, 'topic': _enum(*desk_data.TOPICS)},
    {'ticket_id': _TEXT, 'topic': _enum(*desk_data.TOPICS)},
  ),
  _tool(
    'transfer_order',
    'Hand an order over to another user.',
    {'order_id': _TEXT, 'user_id': _TEXT},
    {'order_id': _TEXT, 'user_id': _TEXT},
  ),
)
WRITES = (
  'place_order',
  'cancel_order',
  'refund_order',
  'apply_coupon',
  'open_ticket',
  'transfer_order',
)
