"""Parsing hostile text: nothing raises, every failure has a name."""

import json

from hypothesis import example, given, settings
from hypothesis import strategies as st
import pytest

from envace_jax import types
from envace_jax.text import tool_calls

OPEN, CLOSE = tool_calls.CALL_OPEN, tool_calls.CALL_CLOSE


def _call(arguments, name='"f"'):
  return f'{OPEN}{{"name": {name}, "arguments": {arguments}}}{CLOSE}'


DEEP = '[' * 100_000 + ']' * 100_000
BAD_ACTIONS = [
  ('', 'no_call'),
  ('It is shipped.', 'no_call'),
  (OPEN, 'unclosed'),
  (OPEN + '{"name": "f", "arguments": {}}', 'unclosed'),
  (OPEN + '{"name": "f</tool_call>', 'unclosed'),
  (OPEN + '{"name": "f", "arguments": {"a": "</tool_call>"}}', 'unclosed'),
  (OPEN + CLOSE, 'empty'),
  (OPEN + ' \n ' + CLOSE, 'empty'),
  (_call('{}') + ' and so on', 'trailing'),
  (_call('{}') + CLOSE, 'trailing'),
  (_call('{}').replace('}}', '}}}'), 'trailing'),
  (_call('{}').replace('}}', '}}""'), 'trailing'),
  (_call('{}') + _call('{}'), 'several_calls'),
  (_call('{"a": 1,}'), 'bad_json'),
  (_call('{"a" 1}'), 'bad_json'),
  (_call("{'a': 1}"), 'bad_json'),
  (_call('{"a": "x\ny"}'), 'bad_json'),
  (_call('{"a": "x\x00y"}'), 'bad_json'),
  (OPEN + 'get_order(O12)' + CLOSE, 'bad_json'),
  (OPEN + OPEN + '{}' + CLOSE, 'bad_json'),
  (_call('{"a": NaN}'), 'bad_number'),
  (_call('{"a": [-Infinity]}'), 'bad_number'),
  (_call('{"a": 1e999}'), 'bad_number'),
  (_call('{"a": ' + '9' * 5000 + '}'), 'bad_number'),
  (_call('{"a": 9223372036854775808}'), 'bad_number'),
  (_call('{"a": 1, "a": 2}'), 'duplicate_key'),
  (_call('{"\\u0000": 1, "\\ud800": 2}'), 'duplicate_key'),
  (_call(DEEP), 'too_deep'),
  (OPEN + '{"a":' * 100_000 + CLOSE, 'too_deep'),
  (OPEN + '[]' + CLOSE, 'not_object'),
  (OPEN + '3' + CLOSE, 'not_object'),
  (OPEN + 'null' + CLOSE, 'not_object'),
  (OPEN + '"hello"' + CLOSE, 'not_object'),
  (
    OPEN + json.dumps('{"name": "f", "arguments": {}}') + CLOSE,
    'double_encoded',
  ),
  (_call(json.dumps('{"a": 1}')), 'double_encoded'),
  (_call('"hello"'), 'bad_arguments'),
  (_call('[1, 2]'), 'bad_arguments'),
  (_call('null'), 'bad_arguments'),
  (OPEN + '{"name": "f"}' + CLOSE, 'bad_arguments'),
  (_call('{}', '3'), 'bad_name'),
  (_call('{}', '" "'), 'bad_name'),
  (OPEN + '{"arguments": {}}' + CLOSE, 'bad_name'),
]


@pytest.mark.parametrize('text, kind', BAD_ACTIONS)
def test_bad_actions_have_names(text, kind):
  error = tool_calls.parse_action(text)
  assert isinstance(error, types.ParseError)
  assert error.kind == kind
  assert len(error.detail) < 300


def test_every_error_kind_is_reached():
  responses = ['{}']
  errors = [tool_calls.parse_action(text) for text, _ in BAD_ACTIONS]
  errors += [tool_calls.parse_response(text) for text in responses]
  assert {e.kind for e in errors} == set(tool_calls.ERROR_KINDS)


@pytest.mark.parametrize(
  'text, arguments',
  [
    (_call('{}'), {}),
    ('I will look.\n' + _call('{}') + '\n', {}),
    (_call('{"a": "</tool_call>", "b": {"c": [1, {}]}}'), None),
    (_call('{"a": "\\"</tool_call><tool_call>\\\\"}'), None),
    (_call('{"a": "}}{", "b": 1}'), {'a': '}}{', 'b': 1}),
    (_call('{"a": "\\ud800|\\u0000"}'), {'a': '\ufffd|\ufffd'}),
    (_call('{"a": "\\ud83d\\ude00"}'), {'a': '\U0001f600'}),
    (_call('{"a": "\ud800"}'), {'a': '\ufffd'}),
    (_call('{"a": 9223372036854775807}'), {'a': 2**63 - 1}),
    (_call('{"a": ' + '[' * 60 + ']' * 60 + '}'), None),
    (OPEN + '{"id": 7, "arguments": {}, "name": "f"}' + CLOSE, {}),
  ],
)
def test_good_actions(text, arguments):
  call = tool_calls.parse_action(text)
  assert isinstance(call, types.ToolCall)
  assert call.name == 'f'
  if arguments is not None:
    assert call.arguments == arguments
  json.dumps(call.arguments, ensure_ascii=False).encode()


def test_a_cut_call_is_never_a_call():
  text = _call('{"a": "x</tool_call>y", "b": [1, {"c": "\\""}]}')
  for end in range(len(text)):
    assert isinstance(tool_calls.parse_action(text[:end]), types.ParseError)


any_text = st.text(st.characters(exclude_categories=()))
json_like = st.lists(
  st.sampled_from(
    [
      *'{}[]:,"\\ \n',
      '"name"',
      '"arguments"',
      'NaN',
      '1e999',
      '\\ud800',
      '\x00',
    ]
    + [OPEN, CLOSE, '<tool_response>', '</tool_response>', '"f"', '1', 'null']
  )
).map(''.join)


@settings(max_examples=300, deadline=None)
@given(text=st.one_of(any_text, json_like, json_like.map(lambda t: OPEN + t)))
def test_parsers_are_total(text):
  action = tool_calls.parse_action(text)
  response = tool_calls.parse_response(text)
  observation = tool_calls.parse_observation(text)
  wrapped = tool_calls.parse_response(tool_calls.render_response(text))
  assert isinstance(action, types.ToolCall | types.ParseError)
  for value in (response, observation, wrapped):
    assert isinstance(value, dict | list | types.ParseError)
  for value in (action, response, observation, wrapped):
    if isinstance(value, types.ParseError):
      assert value.kind in tool_calls.ERROR_KINDS
      value.detail.encode()
  assert isinstance(tool_calls.is_call(text), bool)


safe_text = st.text(st.characters(codec='utf-8', exclude_characters='\x00'))
scalars = st.one_of(
  st.none(),
  st.booleans(),
  st.integers(-(2**63), 2**63 - 1),
  st.floats(allow_nan=False, allow_infinity=False),
  safe_text,
  st.sampled_from(['</tool_call>', '<tool_call>', '"', '\\', '{"a": 1}']),
)
values = st.recursive(
  scalars,
  lambda v: st.lists(v, max_size=4) | st.dictionaries(safe_text, v, max_size=4),
  max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(
  name=safe_text.filter(str.strip),
  arguments=st.dictionaries(safe_text, values, max_size=4),
)
@example(name='f', arguments={'a': '</tool_call>', 'b': [True, 1, -0.0, '']})
def test_calls_round_trip(name, arguments):
  call = types.ToolCall(name=name, arguments=arguments)
  text = tool_calls.render_call(call)
  assert tool_calls.is_call(text)
  again = tool_calls.parse_action(text)
  assert again == call
  assert tool_calls.render_call(again) == text


@settings(max_examples=100, deadline=None)
@given(value=st.dictionaries(safe_text, values) | st.lists(values, max_size=4))
def test_responses_round_trip(value):
  body = tool_calls.dumps(value)
  text = tool_calls.render_response(body)
  assert tool_calls.parse_response(text) == value
  assert tool_calls.parse_observation(body) == value
  assert tool_calls.parse_observation(text) == value


def test_render_has_the_documented_spelling():
  call = types.ToolCall(name='get_order', arguments={'order_id': 'Ö12'})
  assert tool_calls.render_call(call) == (
    '<tool_call>{"name": "get_order", "arguments": {"order_id": "Ö12"}}'
    '</tool_call>'
  )


@pytest.mark.parametrize(
  'body, kind',
  [
    ('"text"', 'not_object'),
    ('"[1]"', 'double_encoded'),
    ('plain words', 'bad_json'),
    ('{} {}', 'trailing'),
    ('', 'empty'),
  ],
)
def test_bad_responses_have_names(body, kind):
  text = tool_calls.render_response(body)
  assert tool_calls.parse_response(text).kind == kind
  assert tool_calls.parse_observation(body).kind == kind
  assert tool_calls.parse_response(text[:-1]).kind == 'unclosed'
  assert tool_calls.parse_response(text + text).kind == 'trailing'
