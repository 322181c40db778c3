"""Calls that are an action's whole text, in a template of Llama 3's form."""

import json

import pytest
import tokenizers as library

from envace_jax import types
from envace_jax.text import (
  chat_format,
  fast_tokenizer,
  json_calls,
  recorded_rows,
)
from envace_jax.text import template as templates

NAMES = (
  '<|begin|>', '<|start_header_id|>', '<|end_header_id|>', '<|eot_id|>',
  '<|eom_id|>',
)  # fmt: skip
TEMPLATE = """{{ bos_token }}{% for m in messages %}
{{- '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) }}
{{- '<|end_header_id|>\n\n' }}
{%- if m.tool_calls %}
{%- if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}
{%- set call = m.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson }}{{ '}<|eom_id|>' }}
{%- else %}{{ m.content | trim }}{{ '<|eot_id|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}"""


@pytest.fixture(scope='module')
def made(tmp_path_factory):
  bpe = library.Tokenizer(library.models.BPE())
  bpe.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
  bpe.decoder = library.decoders.ByteLevel()
  trainer = library.trainers.BpeTrainer(
    vocab_size=400,
    special_tokens=list(NAMES),
    initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
  )
  text = ['{"name": "get_order", "parameters": {"order_id": "O12"}}'] * 9
  bpe.train_from_iterator(text, trainer)
  folder = tmp_path_factory.mktemp('llama')
  bpe.save(str(folder / 'tokenizer.json'))
  config = {'bos_token': NAMES[0], 'eos_token': NAMES[3]}
  config['chat_template'] = TEMPLATE
  (folder / 'tokenizer_config.json').write_text(json.dumps(config))
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
  reading = template.read(ids, authors)
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
