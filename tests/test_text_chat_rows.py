"""Rows of chat formats, token by token, written by hand; Unicode in them."""

from hypothesis import given, settings
from hypothesis import strategies as st
import llama
import numpy as np
import pretrained
import pytest
import tokenizers as library

from envace_jax import types
from envace_jax.text import chat_format, fast_tokenizer, recorded_rows
from envace_jax.text import template as templates

A = types.Author
HERMES = '<tool_call>\n{"name": "f", "arguments": {"i": %d}}\n</tool_call>'
THOUGHT = '<think>\nhm\n</think>\n\n'
END = '<|im_end|>'


def qwen3(thought):
  """What stands behind <tool_response> is the answer's."""
  call = lambda i: (A.ACT, thought + HERMES % i + END)
  joint = (A.FORCED, '\n<|im_start|>user\n<tool_response>')
  again = (A.FORCED, f'{END}\n<|im_start|>assistant\n')
  seen = lambda i: (A.WORLD, f'\n{{"a": {i}}}\n</tool_response>')
  return [
    (A.PROMPT, f'<|im_start|>user\ngo{END}'),
    (A.FORCED, '\n<|im_start|>assistant\n'),
    call(1), joint, seen(1), again, call(2), joint, seen(2), again,
    (A.ACT, f'{thought}Done.{END}'),
  ]  # fmt: skip


def smollm2():
  """Calls are spelt, and answers are turns of `tool`."""
  joint = (A.FORCED, '\n<|im_start|>tool\n')
  again = (A.FORCED, '\n<|im_start|>assistant\n')
  call = lambda i: (A.ACT, HERMES % i + END)
  seen = lambda i: (A.WORLD, f'{{"a": {i}}}{END}')
  system = (
    'You are a helpful AI assistant named SmolLM, trained by Hugging Face'
  )
  return [
    (A.PROMPT, f'<|im_start|>system\n{system}{END}\n<|im_start|>user\ngo{END}'),
    again,
    call(1), joint, seen(1), again, call(2), joint, seen(2), again,
    (A.ACT, f'Done.{END}'),
  ]  # fmt: skip


def llama3():
  """White space in front of an answer is the answer's."""
  head = '<|start_header_id|>%s<|end_header_id|>'
  text = '{"name": "f", "parameters": {"i": %d}}<|eom_id|>'
  call = lambda i: (A.ACT, text % i)
  joint = (A.FORCED, head % 'ipython')
  again = (A.FORCED, head % 'assistant' + '\n\n')
  seen = lambda i: (A.WORLD, f'\n\n{{"a": {i}}}<|eot_id|>')
  return [
    (A.PROMPT, '<|begin|>' + head % 'user' + '\n\ngo<|eot_id|>'),
    again, call(1), joint, seen(1), again, call(2), joint, seen(2), again,
    (A.ACT, 'Done.<|eot_id|>'),
  ]  # fmt: skip


@pytest.fixture(scope='module')
def directories(tmp_path_factory):
  return {
    'qwen3': pretrained.qwen3_tokenizer(),
    'smollm2': pretrained.smollm2_tokenizer(),
    'llama3': llama.write(tmp_path_factory.mktemp('llama')),
  }


@pytest.mark.parametrize(
  'name, thought, expected',
  [
    ('qwen3', THOUGHT, qwen3(THOUGHT)),
    ('smollm2', '', smollm2()),
    ('llama3', '', llama3()),
  ],
  ids=lambda value: value if isinstance(value, str) and value.isalnum() else '',
)
def test_every_token_has_its_author(directories, name, thought, expected):
  directory = directories[name]
  tokenizer = fast_tokenizer.load(directory)
  chat = chat_format.from_directory(directory, tokenizer)
  template = templates.Template(tokenizer, row_format=chat)
  spelt = '<tool_call>{"name": "f", "arguments": {"i": %d}}</tool_call>'
  steps = [
    types.Step(
      action=types.ToolCall(name='f', arguments={'i': i}),
      action_text=thought + spelt % i,
      observation_text=f'{{"a": {i}}}',
      message=i - 1,
    )
    for i in (1, 2)
  ]
  demo = types.Demonstration(
    task_id='t', instruction='go', steps=steps, reply=thought + 'Done.'
  )
  ((ids, authors),) = recorded_rows.rows(template, demo)
  found = [
    (A(author), template.literal(ids[start:stop]))
    for author, start, stop in templates.runs(authors)
  ]
  assert found == expected
  whole = ''.join(text for _, text in expected)
  theirs = library.Tokenizer.from_file(str(directory / 'tokenizer.json'))
  np.testing.assert_array_equal(
    ids, theirs.encode(whole, add_special_tokens=False).ids
  )


@pytest.fixture(scope='module')
def real(directories):
  return [fast_tokenizer.load(directories[n]) for n in ('qwen3', 'smollm2')]


# Any code point, surrogates included, beside what could be taken for a mark.
TEXTS = st.lists(
  st.text(st.characters(), max_size=8)
  | st.sampled_from(['<|im_end|>', '<think>', '</tool_response>', '\n', '  '])
).map(''.join)


@settings(max_examples=150, deadline=None)
@given(TEXTS)
def test_any_text_comes_back_in_ordinary_pieces(real, text):
  whole = ''.join('\ufffd' if '\ud800' <= c <= '\udfff' else c for c in text)
  for tokenizer in real:
    ids = tokenizer.encode(text)
    assert not set(ids) & set(tokenizer.control.values())
    back = tokenizer.decode(ids)
    # One that lacks a byte spells the characters that need it as U+FFFD.
    assert len(back) == len(whole)
    assert all(b in (c, '\ufffd') for b, c in zip(back, whole, strict=True))
    assert tokenizer.encode(back) == ids
  assert real[0].decode(real[0].encode(text)) == whole  # this one lacks none
