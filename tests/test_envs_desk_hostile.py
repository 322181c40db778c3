"""Whatever a model writes comes back as a typed error."""

import json

import pytest

from envace_jax import types
from envace_jax.envs.desk import environment as desk

VALID = {
  'order_id': 'O12',
  'about': 'O12',
  'user_id': 'U07',
  'item': 'lamp',
  'coupon': 'SAVE5',
  'quantity': 1,
  'amount': 5,
  'topic': 'other',
  'name': 'Ana',
}


@pytest.fixture(scope='module')
def world():
  environment = desk.Desk(desk.SMALL)
  yield environment
  environment.close()


def nested(depth):
  value = []
  for _ in range(depth):
    value = [value]
  return value


HOSTILE = [
  '\ud800',
  'O12\x00',
  "O12'; DROP TABLE orders; --",
  '" OR 1=1 --',
  'x' * 100_000,
  '',
  None,
  True,
  -1,
  10**30,
  10**6000,
  1.5,
  float('nan'),
  float('inf'),
  1e300,
  b'O12',
  [],
  ['O12'],
  {'order_id': ['O12']},
  {1: 2},
  nested(50),
  nested(5000),
]


@pytest.mark.parametrize('index', range(len(HOSTILE)))
def test_nothing_a_model_writes_raises(world, index):
  value = HOSTILE[index]
  before = world.state_hash()
  actions = [
    types.ToolCall(name=value, arguments={}),
    types.ParseError(kind=value, detail=value),
  ]
  for tool in desk.TOOLS:
    function = tool['function']
    parameters = function['parameters']['properties']
    name = function['name']
    actions.append(types.ToolCall(name=name, arguments=value))
    actions.append(
      types.ToolCall(name=name, arguments=dict.fromkeys(parameters, value))
    )
    for parameter in parameters:
      arguments = {key: VALID[key] for key in parameters}
      arguments[parameter] = value
      actions.append(types.ToolCall(name=name, arguments=arguments))
  for action in actions:
    observation = world.call(action)
    assert observation.error in desk.ERRORS
    assert len(observation.text.encode()) < 200
    assert json.loads(observation.text)['error'] == observation.error
  assert world.state_hash() == before
