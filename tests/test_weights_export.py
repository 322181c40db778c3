"""What is exported is loaded by transformers, and is what was imported.

The reference of every logit is the model that transformers built first, so
nothing here asks our own code whether it is right.
"""

import dataclasses
import json

import jax
import numpy as np
import pytest
import test_weights_pretrained as parity

from envace_jax import errors
from envace_jax.model import config as config_lib
from envace_jax.weights import architectures, export, pretrained

torch = pytest.importorskip('torch', reason='needs torch, the reference')
transformers = pytest.importorskip(
  'transformers', reason='needs transformers, the reference'
)
st = pytest.importorskip('safetensors.numpy', reason='reads the files')

saved = parity.saved  # a fixture: models of transformers and their directories


def tensors_of(directory):
  """Name -> (dtype, shape, bytes), from every file of a directory."""
  return {
    name: (x.dtype.name, x.shape, x.tobytes())
    for file in sorted(directory.glob('*.safetensors'))
    for name, x in st.load_file(file).items()
  }


def their_logits(directory):
  loaded = transformers.AutoModelForCausalLM.from_pretrained(
    directory, attn_implementation='eager', dtype='auto'
  )
  assert loaded.dtype == torch.float32
  return parity.reference_logits(loaded.eval(), *parity.ragged(True))


def through(directory, out, *, scan_layers, params_dtype, dtype, **kwargs):
  """Imports a directory and exports it again."""
  opened = pretrained.open_checkpoint(directory)
  config = dataclasses.replace(opened.config, scan_layers=scan_layers)
  params = opened.load(config, dtype=params_dtype)
  export.save(params, config, out, dtype=dtype, eos_ids=(2, 5), **kwargs)
  return pretrained.open_checkpoint(out)


@pytest.mark.parametrize('name', parity.CASES)
def test_transformers_computes_the_same_from_an_export(saved, name, tmp_path):
  reference, directory = saved(name)
  same = {'params_dtype': 'float32', 'dtype': 'float32'}
  stacked, unrolled = tmp_path / 'stacked', tmp_path / 'unrolled'
  opened = through(directory, stacked, scan_layers=True, **same)
  through(directory, unrolled, scan_layers=False, **same)
  assert tensors_of(stacked) == tensors_of(directory)
  assert tensors_of(unrolled) == tensors_of(directory)
  # Old keys (ours) and new ones (theirs) say the same model.
  assert opened.config == pretrained.open_checkpoint(directory).config
  ours, theirs = (
    json.loads((where / 'config.json').read_text())
    for where in (stacked, directory)
  )
  assert 'rope_theta' in ours and 'rope_parameters' in theirs
  assert ours['architectures'] == theirs['architectures']
  expected = parity.reference_logits(reference, *parity.ragged(True))
  valid_BT = parity.ragged(True)[1]
  assert np.abs(expected[valid_BT]).max() > 0.5
  np.testing.assert_allclose(
    their_logits(stacked)[valid_BT], expected[valid_BT], atol=2e-4, rtol=0
  )


@pytest.mark.parametrize('name', ['llama biases', 'qwen3', 'gemma3'])
def test_bfloat16_comes_back_bit_for_bit(name, tmp_path):
  reference = parity.reference_of(name).to(torch.bfloat16)
  reference.save_pretrained(tmp_path / 'given')
  given = tensors_of(tmp_path / 'given')
  assert {dtype for dtype, _, _ in given.values()} == {'bfloat16'}
  for params_dtype, scan_layers in (('float32', True), ('bfloat16', False)):
    out = tmp_path / params_dtype
    through(
      tmp_path / 'given', out, scan_layers=scan_layers,
      params_dtype=params_dtype, dtype='bfloat16',
    )  # fmt: skip
    assert tensors_of(out) == given
  loaded = transformers.AutoModelForCausalLM.from_pretrained(out, dtype='auto')
  assert loaded.dtype == torch.bfloat16
  assert loaded.generation_config.eos_token_id == [2, 5]


def test_numbered_files_hold_what_one_file_holds(saved, tmp_path):
  reference, directory = saved('qwen2')
  limit = 9_000
  out = tmp_path / 'numbered'
  opened = through(
    directory, out, scan_layers=True, params_dtype='float32',
    dtype='float32', shard_bytes=limit,
  )  # fmt: skip
  files = sorted(out.glob('*.safetensors'))
  assert len(files) > 4 and not (out / 'model.safetensors').exists()
  for file in files:
    held = st.load_file(file)
    assert len(held) == 1 or sum(x.nbytes for x in held.values()) <= limit
  tensors = tensors_of(out)
  assert tensors == tensors_of(directory)
  index = json.loads((out / 'model.safetensors.index.json').read_text())
  assert set(index['weight_map']) == set(tensors)
  total = sum(len(data) for _, _, data in tensors.values())
  assert index['metadata']['total_size'] == total
  jax.tree.map(
    np.testing.assert_array_equal,
    opened.load(),
    pretrained.open_checkpoint(directory).load(),
  )
  valid_BT = parity.ragged(True)[1]
  np.testing.assert_allclose(
    their_logits(out)[valid_BT],
    parity.reference_logits(reference, *parity.ragged(True))[valid_BT],
    atol=2e-4,
    rtol=0,
  )


@pytest.mark.parametrize('kind', ['type', 'rope_type'])
def test_scaling_of_old_files_is_read(saved, kind, tmp_path):
  _, directory = saved('llama llama3')
  source = json.loads((directory / 'config.json').read_text())
  table = source.pop('rope_parameters')
  source['rope_theta'] = table.pop('rope_theta')
  source['rope_scaling'] = {kind: table.pop('rope_type'), **table}
  read = architectures.read(source, tmp_path)
  assert read == pretrained.open_checkpoint(directory).config
  assert read.rope_theta == 500.0 and read.rope_scaling.factor == 8.0


def test_a_model_of_ours_is_theirs(make_model, tmp_path):
  """One that no checkpoint had a hand in."""
  changes = {'qk_norm': True, 'tie_embeddings': False, 'rope_theta': 300.0}
  model, params, config = make_model(**changes)
  export.save(params, config, tmp_path / 'x', dtype='float32', eos_ids=(1,))
  inputs = parity.ragged(True)
  ours_BTV = parity.logits_of(model, params, *inputs)
  np.testing.assert_allclose(
    ours_BTV[inputs[1]],
    their_logits(tmp_path / 'x')[inputs[1]],
    atol=2e-4,
    rtol=0,
  )


def test_a_failure_leaves_nothing(make_model, tmp_path):
  _, params, config = make_model()
  broken = {**params, 'layers_1': {**params['layers_1']}}
  del broken['layers_1']['mlp_norm']  # written last
  written = []
  real = export._save_file

  def count(tensors, path):
    real(tensors, path)
    written.append(path)
    assert path.exists()

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(export, '_save_file', count)
    with pytest.raises(KeyError, match='mlp_norm'):
      export.save(
        broken, config, tmp_path / 'x', dtype='float32', eos_ids=(1,),
        shard_bytes=1000,
      )  # fmt: skip
  assert len(written) > 5
  assert not list(tmp_path.iterdir())


LORA = config_lib.LoraConfig(rank=2, alpha=4.0)
GEMMA = {
  'qk_norm': True, 'zero_centered_norms': True, 'post_norms': True,
  'activation': 'gelu_tanh', 'scale_embeddings': True,
  'sliding_window': 3, 'sliding_layers': (0,),
}  # fmt: skip


@pytest.mark.parametrize(
  'changes, arguments, said',
  [
    ({}, {'dtype': 'float16'}, "'float16' of an export is not one of"),
    ({}, {'eos_ids': ()}, r'eos_ids=\[\] must be at least one'),
    ({}, {'eos_ids': (64,)}, r'eos_ids=\[64\] must be .* of 64'),
    ({'lora': LORA}, {}, 'merge them'),
    ({'post_norms': True}, {}, 'no Hugging Face .*post_norms=True'),
    ({'activation': 'gelu_tanh'}, {}, "activation='gelu_tanh'"),
    ({'output_bias': True}, {}, 'output_bias=True'),
    ({'attention_scale': 0.3}, {}, 'attention_scale=0.3'),
    # Theirs has 1 / sqrt(a whole number).
    (GEMMA | {'attention_scale': 0.3}, {}, 'attention_scale=0.3'),
    ({'sliding_window': 3, 'sliding_layers': (1,)}, {}, 'sliding_window=3'),
  ],
)
def test_what_cannot_be_exported_is_refused(
  make_model, tmp_path, changes, arguments, said
):
  config = dataclasses.replace(make_model()[2], **changes)
  arguments = {'dtype': 'float32', 'eos_ids': (1,)} | arguments
  with pytest.raises(errors.UserError, match=said) as caught:
    export.save({}, config, tmp_path / 'x', **arguments)
  assert '\n' not in str(caught.value)
  assert not list(tmp_path.iterdir())


def test_a_directory_is_never_overwritten(make_model, tmp_path):
  _, params, config = make_model()
  (tmp_path / 'x').mkdir()
  with pytest.raises(errors.UserError, match='x exists already'):
    export.save(params, config, tmp_path / 'x', dtype='float32', eos_ids=(1,))
  assert [file.name for file in tmp_path.iterdir()] == ['x']


def test_gemma_without_a_scale_of_its_own_is_exported(make_model):
  config = dataclasses.replace(make_model()[2], **GEMMA)
  again = architectures.read(architectures.write(config, 'float32'), 'x')
  assert again.attention_scale == pytest.approx(config.head_dim**-0.5, rel=1e-6)
  assert again.sliding_rope_theta == config.rope_theta
