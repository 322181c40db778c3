"""Logits of loaded checkpoints equal those of transformers, in float32."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envace_jax.model import kv_cache, transformer
from envace_jax.weights import pretrained

torch = pytest.importorskip('torch', reason='needs torch, the reference')
transformers = pytest.importorskip(
  'transformers', reason='needs transformers, the reference'
)

SIZES = {
  'vocab_size': 61,
  'hidden_size': 32,
  'num_hidden_layers': 3,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'intermediate_size': 48,
  'max_position_embeddings': 64,
}
LINEAR = {'rope_type': 'linear', 'factor': 3.0}
LLAMA3 = {
  'rope_type': 'llama3',
  'factor': 8.0,
  'low_freq_factor': 1.0,
  'high_freq_factor': 4.0,
  'original_max_position_embeddings': 32,
}
YARN = {
  'rope_type': 'yarn',
  'factor': 4.0,
  'original_max_position_embeddings': 16,
}
SLIDING = {'use_sliding_window': True, 'sliding_window': 3}
# name -> (class, what it adds to SIZES)
CASES = {
  'llama': ('LlamaConfig', {'rope_theta': 500.0, 'head_dim': 12}),
  'llama linear': ('LlamaConfig', {'rope_scaling': LINEAR}),
  'llama llama3': (
    'LlamaConfig',
    {'rope_theta': 500.0, 'rope_scaling': LLAMA3, 'num_key_value_heads': 4},
  ),
  'llama yarn': ('LlamaConfig', {'rope_scaling': YARN, 'head_dim': 16}),
  'llama biases': (
    'LlamaConfig',
    {'attention_bias': True, 'tie_word_embeddings': True},
  ),
  'smollm2': (
    'LlamaConfig',
    {
      'rope_theta': 100_000.0,
      'rms_norm_eps': 1e-5,
      'tie_word_embeddings': True,
      'num_attention_heads': 8,
      'num_key_value_heads': 1,
    },
  ),
  'qwen2': ('Qwen2Config', {'rope_theta': 1e6}),
  'qwen2 sliding': (
    'Qwen2Config',
    {**SLIDING, 'max_window_layers': 1, 'tie_word_embeddings': True},
  ),
  'qwen3': ('Qwen3Config', {'rope_theta': 1e6, 'head_dim': 12}),
  'qwen3 yarn': (
    'Qwen3Config',
    {'rope_scaling': YARN, 'head_dim': 16, 'tie_word_embeddings': True},
  ),
  'gemma3': (
    'Gemma3TextConfig',
    {
      'head_dim': 12,
      'query_pre_attn_scalar': 20,
      'sliding_window': 3,
      'sliding_window_pattern': 2,
    },
  ),
}


def reference_of(name):
  """A transformers model of random weights, large enough to be seen."""
  kind, changes = CASES[name]
  config = getattr(transformers, kind)(**SIZES | changes)
  torch.manual_seed(0)
  model = transformers.AutoModelForCausalLM.from_config(
    config, attn_implementation='eager'
  ).float()
  generator = torch.Generator().manual_seed(1)
  with torch.no_grad():
    for key, value in model.named_parameters():
      noise = torch.randn(value.shape, generator=generator)
      # Norm scales and biases differ from their initial values as well.
      value.copy_(value + 0.1 * noise if 'norm' in key else 0.2 * noise)
  return model.eval()


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
  """Name -> (reference model, directory), made once each."""
  made = {}

  def get(name):
    if name not in made:
      reference = reference_of(name)
      directory = tmp_path_factory.mktemp('checkpoint')
      reference.save_pretrained(directory)
      made[name] = reference, directory
    return made[name]

  return get


def ragged(left):
  """tokens_BT, valid_BT and positions_BT of three rows, padded on one side."""
  tokens_BT = np.random.default_rng(3).integers(0, 61, (3, 9))
  length_B1 = np.array([[9], [4], [7]])
  time_T = np.arange(9)[None, :]
  if not left:
    return tokens_BT, time_T < length_B1, np.repeat(time_T, 3, axis=0)
  start_B1 = 9 - length_B1
  return tokens_BT, time_T >= start_B1, np.maximum(time_T - start_B1, 0)


def reference_logits(reference, tokens_BT, valid_BT, positions_BT):
  with torch.no_grad():
    return reference(
      input_ids=torch.tensor(tokens_BT),
      attention_mask=torch.tensor(valid_BT.astype(np.int64)),
      position_ids=torch.tensor(positions_BT),
    ).logits.numpy()


def logits_of(model, params, tokens_BT, valid_BT, positions_BT):
  @jax.jit
  def run(params):
    hidden_BTD, _ = model.apply(
      {'params': params}, tokens_BT, positions_BT, None, valid_BT
    )
    return model.apply({'params': params}, hidden_BTD, method='unembed')

  return run(params)


@pytest.mark.parametrize('name', CASES)
def test_logits_equal_those_of_transformers(saved, name):
  reference, directory = saved(name)
  opened = pretrained.open_checkpoint(directory)
  for scan_layers, left in ((False, False), (True, True)):
    config = dataclasses.replace(opened.config, scan_layers=scan_layers)
    model = transformer.Transformer(config)
    inputs = ragged(left)
    ours_BTV = logits_of(model, opened.load(config), *inputs)
    theirs_BTV = reference_logits(reference, *inputs)
    valid_BT = inputs[1]
    assert np.abs(theirs_BTV[valid_BT]).max() > 0.5
    np.testing.assert_allclose(
      ours_BTV[valid_BT], theirs_BTV[valid_BT], atol=2e-4, rtol=0
    )


@pytest.mark.parametrize('name', ['qwen2 sliding', 'llama yarn', 'gemma3'])
def test_cached_decoding_equals_transformers(saved, name):
  reference, directory = saved(name)
  opened = pretrained.open_checkpoint(directory)
  config = dataclasses.replace(opened.config, scan_layers=True)
  model, params = transformer.Transformer(config), opened.load(config)
  tokens_BT, _, positions_BT = ragged(False)
  all_BT = np.ones_like(tokens_BT, bool)
  cache = kv_cache.empty(config, 3, 12)
  hidden = []
  for start, stop in ((0, 5), (5, 6), (6, 9)):
    out_BTD, cache = model.apply(
      {'params': params}, tokens_BT[:, start:stop], None, cache
    )
    hidden.append(out_BTD)
  logits_BTV = model.apply(
    {'params': params}, jnp.concatenate(hidden, 1), method='unembed'
  )
  np.testing.assert_allclose(
    logits_BTV,
    reference_logits(reference, tokens_BT, all_BT, positions_BT),
    atol=2e-4,
    rtol=0,
  )
