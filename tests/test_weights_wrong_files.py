"""Every wrong file is refused in one sentence that names what is wrong."""

import json
import shutil

import ml_collections
import numpy as np
import pretrained as fetched
import pytest

from envace_jax import errors
from envace_jax import pretrained as run_pretrained
from envace_jax.text import fast_tokenizer
from envace_jax.weights import export, gguf_tokenizer, names, pretrained

st = pytest.importorskip('safetensors.numpy', reason='writes the files')
gguf = pytest.importorskip('gguf', reason='writes GGUF files')

SINGLE = 'model.safetensors'
INDEX = 'model.safetensors.index.json'
EMBEDDING = 'model.embed_tokens.weight'
KEY = 'model.layers.1.self_attn.k_proj.weight'


@pytest.fixture(scope='module')
def good(make_model, tmp_path_factory):
  """(a directory with one file, one with many), both right."""
  _, params, config = make_model()
  folder = tmp_path_factory.mktemp('good')
  for name, shard_bytes in (('one', export.SHARD_BYTES), ('many', 9_000)):
    export.save(
      params, config, folder / name, dtype='float32', eos_ids=(1,),
      shard_bytes=shard_bytes,
    )  # fmt: skip
    pretrained.open_checkpoint(folder / name).load()
  return folder / 'one', folder / 'many'


def cut(file, share):
  data = file.read_bytes()
  file.write_bytes(data[: int(len(data) * share)])


def edit(file, change):
  value = json.loads(file.read_text())
  change(value)
  file.write_text(json.dumps(value))


def say(**changes):
  """Changes config.json."""
  return lambda folder: edit(
    folder / 'config.json', lambda value: value.update(changes)
  )


def forget(key):
  return lambda folder: edit(
    folder / 'config.json', lambda value: value.pop(key)
  )


def write(name, text):
  return lambda folder: (folder / name).write_text(text)


def hold(**changes):
  """Changes tensors; None takes one away."""

  def change(folder):
    tensors = st.load_file(folder / SINGLE)
    for name, value in changes.items():
      if value is None:
        del tensors[name]
      else:
        tensors[name] = value
    st.save_file(tensors, folder / SINGLE)

  return change


def map_to(file):
  """The index says that KEY lies in `file`."""
  return lambda folder: edit(
    folder / INDEX, lambda value: value['weight_map'].update({KEY: file})
  )


def first_shard(folder):
  return sorted(folder.glob('model-*.safetensors'))[0]


ONE = {
  'cut header': (lambda f: cut(f / SINGLE, 0.001), 'cut short'),
  'cut data': (lambda f: cut(f / SINGLE, 0.9), 'cut short'),
  'empty file': (lambda f: cut(f / SINGLE, 0), 'cut short'),
  'not safetensors': (write(SINGLE, 'x' * 500), 'no safetensors file'),
  'no weights': (lambda f: (f / SINGLE).unlink(), f'neither {SINGLE} nor'),
  'no config': (lambda f: (f / 'config.json').unlink(), 'config.json is miss'),
  'config no JSON': (write('config.json', '{"a": '), 'config.json is no JSON'),
  'config no text': (
    lambda f: (f / 'config.json').write_bytes(b'\xff\xfe'), 'is no JSON'
  ),
  'config too deep': (write('config.json', '[' * 99_999), 'is no JSON'),
  'config a list': (write('config.json', '[]'), 'must hold a JSON object'),
  'architecture': (say(model_type='mamba'), "'mamba' is not one of"),
  'no architecture': (forget('model_type'), 'model_type=None'),
  'of a list': (say(model_type=['llama']), r"model_type=\['llama'\]"),
  'no layers': (forget('num_hidden_layers'), 'num_hidden_layers=None'),
  'a size of text': (say(hidden_size='32'), "hidden_size='32' must be a who"),
  'an infinite size': (say(hidden_size=float('inf')), 'hidden_size=inf'),
  'half a layer': (say(num_hidden_layers=1.5), 'num_hidden_layers=1.5'),
  'no heads': (say(num_attention_heads=0, head_dim=8), 'num_heads=0'),
  'heads': (say(num_key_value_heads=3), 'num_kv_heads=3 must divide'),
  'length': (say(max_position_embeddings='long'), 'no model that can be built'),
  'scaling type': (
    say(rope_scaling={'rope_type': 'dynamic', 'factor': 2.0}),
    "rope scaling type 'dynamic' is not one of",
  ),
  'scaling type a list': (
    say(rope_scaling={'rope_type': ['yarn'], 'factor': 2.0}), 'rope scaling'
  ),
  'scaling, no factor': (
    say(rope_scaling={'type': 'linear'}), 'needs a factor'
  ),
  'scaling by 0': (
    say(rope_scaling={'type': 'linear', 'factor': 0}), 'factor=0.0'
  ),
  'scaling a text': (say(rope_scaling='yarn'), 'must be an object or null'),
  'window': (say(sliding_window=4), 'sliding_window=4 is not supported'),
  'quantised': (say(quantization_config={'bits': 4}), 'quantization_config='),
  'activation': (say(hidden_act='gelu'), 'hidden_act="gelu"'),
  'layer types': (
    say(
      model_type='qwen3', use_sliding_window=True, sliding_window=4,
      layer_types=['sliding_attention'],
    ),
    'layer_types must name 2 layers',
  ),
  'layer types no list': (
    say(model_type='qwen3', use_sliding_window=True, layer_types=7),
    'no model that can be built',
  ),
  'missing tensor': (hold(**{KEY: None}), f'lacks tensor {KEY}'),
  'extra tensor': (
    hold(**{'model.layers.0.self_attn.q_proj.bias': np.zeros(3, np.float32)}),
    'holds tensor model.layers.0.self_attn.q_proj.bias',
  ),
  'a layer too many': (say(num_hidden_layers=1), 'holds tensor model.layers.1'),
  'a layer too few': (say(num_hidden_layers=3), 'lacks tensor model.layers.2'),
  'turned tensor': (
    hold(**{KEY: np.zeros((32, 16), np.float32)}),
    rf'{KEY} has shape \[32, 16\], its config says \[16, 32\]',
  ),
  'vocabulary': (
    say(vocab_size=65), rf'{EMBEDDING} has shape \[64, 32\], .* \[65, 32\]'
  ),
  'whole numbers': (
    hold(**{KEY: np.zeros((16, 32), np.int32)}), f'{KEY} is stored as I32'
  ),
}  # fmt: skip
MANY = {
  'missing shard': (lambda f: first_shard(f).unlink(), '00001-of.* is missing'),
  'cut shard': (lambda f: cut(first_shard(f), 0.8), 'cut short'),
  'outside': (map_to('../one/model.safetensors'), 'is no plain name'),
  'absolute': (map_to('/etc/passwd'), 'is no plain name'),
  'above': (map_to('..'), 'is no plain name'),
  'nameless': (map_to(''), 'is no plain name'),
  'no name': (map_to(3), 'no weight_map'),
  'elsewhere': (
    lambda f: map_to(first_shard(f).name)(f), f'lacks tensor {KEY}, which'
  ),
  'index no JSON': (write(INDEX, '{'), 'no weight_map'),
  'index of nothing': (write(INDEX, '{"weight_map": {}}'), 'lacks tensor'),
  'no index': (lambda f: (f / INDEX).unlink(), 'has neither'),
}  # fmt: skip


def refused(said, call, *args):
  with pytest.raises(errors.UserError, match=said) as caught:
    call(*args)
  text = str(caught.value)
  assert '\n' not in text and len(text) < 500
  return text


@pytest.mark.parametrize('wrong', [*ONE, *MANY])
def test_a_wrong_directory_is_refused(good, tmp_path, wrong):
  change, said = (ONE | MANY)[wrong]
  folder = tmp_path / 'copy'
  shutil.copytree(good[wrong in MANY], folder)
  change(folder)
  text = refused(said, pretrained.open_checkpoint, folder)
  assert str(folder) in text


def test_a_path_to_nothing_is_refused(tmp_path):
  refused('none does not exist', pretrained.open_checkpoint, tmp_path / 'none')


def test_another_architecture_than_the_files_is_refused(good, make_model):
  opened = pretrained.open_checkpoint(good[0])
  config = make_model(rope_theta=5.0)[2]
  refused('model.rope_theta=5.0 but', opened.load, config)
  refused("dtype='int8'", opened.load, None, None, 'int8')
  refused('no leaf embedding', opened.load, None, {})


def test_a_checkpoint_without_tokenizer_is_refused(good, tmp_path):
  config = ml_collections.ConfigDict({'pretrained': {'path': str(good[0])}})
  refused('has no tokenizer.json', run_pretrained.keep, config, tmp_path)
  assert not list(tmp_path.iterdir())


def test_a_tokenizer_larger_than_the_vocabulary_is_refused():
  folder = fetched.smollm2_tokenizer()
  assert fast_tokenizer.load(folder, 49_152).vocab_size == 49_152
  refused(
    '49152 pieces but the model knows 49151',
    fast_tokenizer.load, folder, 49_151,
  )  # fmt: skip


def write_gguf(path, config, *, metadata=None, tensors=None):
  """A GGUF file of zeros; None takes a key or a tensor away."""
  arch = (metadata or {}).get('general.architecture', 'llama')
  writer = gguf.GGUFWriter(path, arch)
  values = {
    'embedding_length': config.d_model,
    'block_count': config.num_layers,
    'attention.head_count': config.num_heads,
    'attention.head_count_kv': config.num_kv_heads,
    'attention.key_length': config.head_dim,
    'feed_forward_length': config.d_ff,
    'attention.layer_norm_rms_epsilon': config.norm_eps,
    'context_length': config.max_len,
  }
  values = {f'{arch}.{key}': value for key, value in values.items()}
  values |= {
    'tokenizer.ggml.model': 'gpt2',
    'tokenizer.ggml.pre': 'smollm',
    'tokenizer.ggml.tokens': ['a', 'b', 'ab'],
    'tokenizer.ggml.token_type': [1, 1, 1],
    'tokenizer.ggml.merges': ['a b'],
    'tokenizer.ggml.eos_token_id': 2,
  }
  values |= metadata or {}
  for key, value in values.items():
    if isinstance(value, str) and key != 'general.architecture':
      writer.add_string(key, value)
    elif isinstance(value, int):
      writer.add_uint32(key, value)
    elif isinstance(value, float):
      writer.add_float32(key, value)
    elif isinstance(value, list):
      writer.add_array(key, value)
  held = {
    parameter.gguf.format(i=layer): parameter.stored_shape
    for parameter in names.parameters(config)
    for layer in (range(config.num_layers) if parameter.layered else [0])
  } | (tensors or {})
  for name, shape in held.items():
    if shape is not None:
      writer.add_tensor(name, np.zeros(shape, np.float32))
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()


GGUF = {
  'architecture': ({'general.architecture': 'rwkv7'}, {}, "'rwkv7' is not one"),
  'no layers': ({'llama.block_count': None}, {}, 'llama.block_count=None must'),
  'no eps': (
    {'llama.attention.layer_norm_rms_epsilon': None}, {}, 'rms_epsilon=None'
  ),
  'a text': ({'llama.embedding_length': 'wide'}, {}, "='wide' must be a int"),
  'heads': ({'llama.attention.head_count': 3}, {}, 'must divide'),
  'scaling': (
    {'llama.rope.scaling.type': 'yarn'}, {}, "rope scaling type 'yarn'"
  ),
  'factor': (
    {'llama.rope.scaling.type': 'linear'}, {}, 'rope.scaling.factor=None'
  ),
  'window': ({'llama.attention.sliding_window': 8}, {}, 'sliding window'),
  'partly': ({'llama.rope.dimension_count': 4}, {}, 'partly rotated'),
  'frequencies': ({}, {'rope_freqs.weight': (4,)}, 'scales RoPE by a tensor'),
  'no table': ({}, {'token_embd.weight': None}, 'lacks tensor token_embd'),
  'missing': ({}, {'blk.1.attn_k.weight': None}, 'lacks tensor blk.1.attn_k'),
  'extra': ({}, {'blk.0.attn_k.scale': (3,)}, 'holds tensor blk.0.attn_k.sc'),
  'turned': (
    {}, {'blk.0.attn_k.weight': (32, 16)}, r'shape \[32, 16\], .* \[16, 32\]'
  ),
}  # fmt: skip


@pytest.mark.parametrize('wrong', GGUF)
def test_a_wrong_gguf_file_is_refused(make_model, tmp_path, wrong):
  metadata, tensors, said = GGUF[wrong]
  path = tmp_path / 'x.gguf'
  write_gguf(path, make_model()[2], metadata=metadata, tensors=tensors)
  assert str(path) in refused(said, pretrained.open_checkpoint, path)


@pytest.mark.parametrize('share', [0, 0.0001, 0.01, 0.3, 0.9, 0.99])
def test_a_cut_gguf_file_is_refused(make_model, tmp_path, share):
  path = tmp_path / 'x.gguf'
  write_gguf(path, make_model()[2])
  pretrained.open_checkpoint(path)
  cut(path, share)
  refused('is cut short or no GGUF', pretrained.open_checkpoint, path)


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
  path = tmp_path / 'x.gguf'
  path.write_text('weights\n' * 99)
  refused('is cut short or no GGUF', pretrained.open_checkpoint, path)
  refused(
    'cannot be read', gguf_tokenizer.write_tokenizer, tmp_path / 'none', path
  )


TOKENIZERS = {
  'cut': ({'tokenizer.ggml.pre': 'falcon'}, "'gpt2', cut as 'falcon'"),
  'no cut': ({'tokenizer.ggml.pre': None}, "cut as 'default'"),
  'kind': ({'tokenizer.ggml.model': 'llama'}, "'llama', cut as 'smollm'"),
  'no pieces': ({'tokenizer.ggml.tokens': None}, 'tokens=None must be a list'),
  'no merges': ({'tokenizer.ggml.merges': None}, 'merges=None must be a list'),
  'twice': ({'tokenizer.ggml.tokens': ['a', 'b', 'a']}, '2 of them different'),
  'few kinds': ({'tokenizer.ggml.token_type': [1]}, 'and 1 kinds'),
}  # fmt: skip


@pytest.mark.parametrize('wrong', TOKENIZERS)
def test_a_wrong_tokenizer_of_a_gguf_file_is_refused(
  make_model, tmp_path, wrong
):
  metadata, said = TOKENIZERS[wrong]
  path = tmp_path / 'x.gguf'
  write_gguf(path, make_model()[2], metadata=metadata)
  out = tmp_path / 'out'
  assert str(path) in refused(said, gguf_tokenizer.write_tokenizer, path, out)
  assert not out.exists()
