"""A template of Llama 3's form, and a tokenizer with its control pieces."""

import json
import pathlib

import tokenizers as library

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


def write(folder: pathlib.Path) -> pathlib.Path:
  """Writes both into a directory, and returns it."""
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
  bpe.save(str(folder / 'tokenizer.json'))
  config = {'bos_token': NAMES[0], 'eos_token': NAMES[3]}
  config['chat_template'] = TEMPLATE
  (folder / 'tokenizer_config.json').write_text(json.dumps(config))
  return folder
