"""Whoever attends, it is one function; and who does it where.

Splash runs here in Pallas' interpreter, as if the devices were TPUs: the
kernel's own program, step by step. The TPU compiler's word on it is that of
tests/tpu_ahead.py.
"""

import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envace_jax.model import attention, logprobs, sharding, transformer

T = 24
LENGTHS = np.array([24, 24, 1, 0])
VARIANTS = {
  'grouped': {'num_layers': 1},
  'one_key_head': {'num_layers': 1, 'num_kv_heads': 1, 'attention_scale': 0.5},
  'window': {'sliding_layers': (1,), 'sliding_window': 5},
}
variants = pytest.mark.parametrize('changes', VARIANTS.values(), ids=VARIANTS)


@pytest.fixture
def as_on_tpus(monkeypatch):
  monkeypatch.setattr(attention, '_platform', lambda: 'tpu')
  kernel = attention.splash_kernel.make_splash_mha
  monkeypatch.setattr(
    attention.splash_kernel,
    'make_splash_mha',
    functools.partial(kernel, interpret=True),
  )


def packed_rows():
  """Four rows: of three transcripts, padded left, of one token, empty."""
  rng = np.random.default_rng(0)
  positions_BT = np.tile(np.arange(T), (4, 1))
  positions_BT[0] = np.concatenate([np.arange(10), np.arange(3), np.arange(11)])
  positions_BT[1] -= 7
  valid_BT = np.arange(T) < LENGTHS[:, None]
  return {
    'tokens': rng.integers(0, 64, (4, T)),
    'valid': valid_BT & (positions_BT >= 0),
    'positions': positions_BT,
  }


def scored(model, params, rows, mesh):
  """log-probs [B, T] of the rows and their gradient."""

  def loss(params, rows):
    score = logprobs.token_logprobs(
      model,
      params,
      rows['tokens'],
      rows['valid'],
      None,
      rows['positions'],
      chunk=8,
    )
    return jnp.sum(jnp.sin(score.logprob)), score.logprob

  with sharding.use_mesh(mesh):
    rows = sharding.place_batch(rows, mesh)
    both = jax.jit(jax.grad(loss, has_aux=True))(params, rows)
  return jax.tree.map(np.asarray, both)


def with_attention(model, who):
  return transformer.Transformer(
    dataclasses.replace(model.config, attention=who)
  )


def assert_as_reference(model, params, who, mesh=None):
  rows, one = packed_rows(), sharding.make_mesh()
  got = scored(with_attention(model, who), params, rows, mesh or one)
  expected = scored(with_attention(model, 'reference'), params, rows, one)
  assert np.abs(expected[1]).max() > 1
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4, rtol=2e-4),
    got,
    expected,
  )
  return rows


@variants
def test_fused_is_the_reference(make_model, changes):
  model, params, _ = make_model(**changes)
  assert_as_reference(model, params, 'fused')


@variants
def test_splash_is_the_reference(make_model, as_on_tpus, changes):
  model, params, _ = make_model(**changes)
  assert_as_reference(model, params, 'splash')


def test_splash_on_eight_devices_is_the_reference(make_model, as_on_tpus):
  model, params, _ = make_model(scan_layers=True, remat=True)
  mesh = sharding.make_mesh(2, 2, 2)
  assert_as_reference(model, params, 'splash', mesh)


def test_splash_works_in_blocks_and_fills_the_last(make_model, as_on_tpus):
  """More than a block of scores, and not a whole number of them."""
  model, params, _ = make_model(num_layers=1)
  rng = np.random.default_rng(1)
  positions_BT = np.concatenate([np.arange(150), np.arange(30)])[None]
  rows = {
    'tokens': rng.integers(0, 64, (1, 180)),
    'valid': np.arange(180)[None] < 171,
    'positions': positions_BT,
  }
  one = sharding.make_mesh()
  got, expected = (
    scored(with_attention(model, who), params, rows, one)
    for who in ('splash', 'reference')
  )
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=5e-4, rtol=5e-4),
    got,
    expected,
  )


def test_bfloat16_rounds_as_the_reference_does(make_model, as_on_tpus):
  model, params, _ = make_model(dtype='bfloat16')
  exact, _, _ = make_model()
  rows = packed_rows()

  def read(model, who):
    hidden_BTD, _ = jax.jit(with_attention(model, who).apply)(
      {'params': params},
      rows['tokens'],
      rows['positions'],
      None,
      rows['valid'],
    )
    return np.asarray(hidden_BTD, np.float32)[rows['valid']]

  truth = read(exact, 'reference')
  off = lambda who: np.abs(read(model, who) - truth)
  expected = off('reference')
  for who in ('fused', 'splash'):
    assert 0 < off(who).mean() < 1.5 * expected.mean()
    assert off(who).max() < 2 * expected.max()


@pytest.mark.parametrize(
  ('platform', 'wanted', 'changes', 'who'),
  [
    ('cpu', 'auto', {}, 'reference'),
    ('gpu', 'auto', {'dtype': 'bfloat16'}, 'fused'),
    ('gpu', 'auto', {}, 'reference'),
    ('gpu', 'reference', {'dtype': 'bfloat16'}, 'reference'),
    ('gpu', 'auto', {'dtype': 'bfloat16', 'head_dim': 136}, 'reference'),
    ('tpu', 'auto', {}, 'splash'),
    ('tpu', 'fused', {}, 'fused'),
    ('cpu', 'fused', {}, 'fused'),
    (
      'tpu',
      'auto',
      {'sliding_layers': (1,), 'sliding_window': 5, 'scan_layers': True},
      'reference',
    ),
  ],
)
def test_who_attends(make_model, monkeypatch, platform, wanted, changes, who):
  monkeypatch.setattr(attention, '_platform', lambda: platform)
  config = make_model(attention=wanted, **changes)[2]
  assert attention.choose(config, 4, T) == who
  assert attention.choose(config, 4, 1) == 'reference'


@pytest.mark.parametrize(
  ('platform', 'wanted', 'changes', 'why'),
  [
    ('cpu', 'splash', {}, "kernel for TPUs, and this is 'cpu'"),
    ('gpu', 'fused', {}, "needs bfloat16 on a GPU, and model.dtype='float32'"),
    (
      'gpu',
      'fused',
      {'dtype': 'bfloat16', 'head_dim': 12},
      'model.head_dim=12',
    ),
    (
      'tpu',
      'splash',
      {'sliding_layers': (1,), 'sliding_window': 5, 'scan_layers': True},
      'model.scan_layers=True',
    ),
  ],
)
def test_what_cannot_be_is_said(
  make_model, monkeypatch, platform, wanted, changes, why
):
  monkeypatch.setattr(attention, '_platform', lambda: platform)
  model, params, _ = make_model(attention=wanted, **changes)
  with pytest.raises(ValueError, match=why) as refused:
    model.apply({'params': params}, np.zeros((2, T), np.int32))
  assert "set model.attention='auto'" in str(refused.value)


def test_rows_that_do_not_divide_over_devices(make_model, monkeypatch):
  monkeypatch.setattr(attention, '_platform', lambda: 'tpu')
  auto, forced = (make_model(attention=a)[2] for a in ('auto', 'splash'))
  with sharding.use_mesh(sharding.make_mesh(2, 2, 2)):
    assert attention.choose(forced, 8, T) == 'splash'
    assert attention.choose(auto, 6, T) == 'reference'
    with pytest.raises(ValueError, match='6 rows .* over 4 and 2 devices'):
      attention.choose(forced, 6, T)


def test_auto_is_the_reference_here_to_the_last_bit(make_model):
  model, params, _ = make_model()
  rows, one = packed_rows(), sharding.make_mesh()
  jax.tree.map(
    np.testing.assert_array_equal,
    scored(with_attention(model, 'auto'), params, rows, one),
    scored(with_attention(model, 'reference'), params, rows, one),
  )


@pytest.mark.nightly  # three minutes of a compiler
def test_the_tpu_compiler_takes_the_train_step():
  """Sixteen chips that are not here: a train step, and a forward alone."""
  pytest.importorskip('libtpu', reason='needs libtpu, the TPU compiler')
  script = pathlib.Path(__file__).parent / 'tpu_ahead.py'
  environment = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(('TPU_', 'XLA_', 'LIBTPU', 'JAX_', 'PYTEST'))
  }
  done = subprocess.run(
    [sys.executable, script],
    env=environment,
    capture_output=True,
    text=True,
    timeout=600,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  said = json.loads(done.stdout.splitlines()[-1])
  assert said['devices'] == 16
  splash, reference = said['splash'], said['reference']
  # Forward, and for the backward pass the forward again, dq and dkv.
  assert splash['kernels'] >= 3 and said['forward_kernels'] == 1
  assert reference['kernels'] == 0
  # The squares of scores are what the kernel is there to avoid.
  assert splash['squares'] == 0 < reference['squares']
  assert splash['temp_bytes'] < reference['temp_bytes']
