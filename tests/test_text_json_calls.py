"""Calls that are an action's whole text, in a template of Llama 3's form."""

import llama
import pytest

from envace_jax import types
from envace_jax.text import (
  chat_format,
  fast_tokenizer,
  json_calls,
  recorded_rows,
  row_reading,
)
from envace_jax.text import template as templates


@pytest.fixture(scope='module')
def made(tmp_path_factory):
  folder = llama.write(tmp_path_factory.mktemp('llama'))
  tokenizer = fast_tokenizer.load(folder)
  chat = chat_format.from_directory(folder, tokenizer)
  return templates.Template(tokenizer, row_format=chat), tokenizer


@pytest.mark.parametrize('rounds', range(1, 6))
def test_rows_are_one_rendering(made, rounds):
  template, tokenizer = made
  call = (
    '<tool_call>{"name": "f", "arguments": {"i": "<|eot_id|>"}}</tool_call>'
  )
  step = types.Step(
    action=types.ToolCall(name='f', arguments={'i': 1}),
    action_text=call,
    observation_text=' \n{"a": 1}\n',
  )
  demo = types.Demonstration(
    task_id='t', instruction='go', steps=[step] * rounds, reply='Done.'
  )
  ((ids, authors),) = recorded_rows.rows(template, demo)
  reading = row_reading.read(template, ids, authors)
  assert [s.action.arguments for s in reading.steps] == [
    {'i': '<|eot_id|>'}
  ] * rounds
  assert reading.reply == 'Done.'
  control = tokenizer.control
  assert set(template.stop_ids[types.Role.ACT]) == {
    control['<|eot_id|>'], control['<|eom_id|>']
  }  # fmt: skip
  assert template.marker.at_start
  assert not template.is_call(tokenizer.encode('See {"name": "f"}'))


def test_several_calls_are_refused_where_none_can_be_shown(made):
  template, tokenizer = made
  with pytest.raises(ValueError, match='max_parallel_calls=1'):
    templates.Template(tokenizer, parallel=True, row_format=template.format)


@pytest.mark.parametrize(
  'text', ['', '{', '[1]', '{"name": 1}', '{"name": "f", "parameters": "{}"}']
)
def test_hostile_calls_are_values(text):
  assert isinstance(json_calls.parse_action(text), types.ParseError)
