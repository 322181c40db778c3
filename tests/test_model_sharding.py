"""Eight devices compute what one computes, and really hold shards."""

import dataclasses
import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from envace_jax.model import kv_cache, logprobs, sharding, transformer


def rows():
  generator = np.random.default_rng(0)
  lengths_B = generator.integers(3, 12, 8)
  return {
    'tokens': generator.integers(0, 64, (8, 11)),
    'valid': np.arange(11)[None, :] < lengths_B[:, None],
  }


def loss_fn(model, params, batch):
  scored = logprobs.token_logprobs(
    model, params, batch['tokens'], batch['valid'], chunk=4
  )
  return -jnp.sum(scored.logprob) / jnp.sum(batch['valid'])


def boxed_shapes(model):
  init = functools.partial(transformer.init_partitioned, model)
  return jax.eval_shape(init, jax.random.key(0))


def place(model, params, mesh):
  shardings = sharding.state_shardings(boxed_shapes(model), mesh)
  return jax.device_put(jax.tree.map(np.asarray, params), shardings)


def run(model, params, mesh):
  """Parameters, loss and gradients; everything through the public path."""
  params = place(model, params, mesh)
  with sharding.use_mesh(mesh):
    batch = sharding.place_batch(rows(), mesh)
    step = jax.jit(
      jax.value_and_grad(lambda params, batch: loss_fn(model, params, batch))
    )
    return params, *step(params, batch)


@pytest.mark.parametrize('scan_layers', [False, True])
def test_eight_devices_equal_one(make_model, scan_layers):
  model, params, _ = make_model(scan_layers=scan_layers, remat=scan_layers)
  one, eight = sharding.make_mesh(), sharding.make_mesh(2, 2, 2)
  params_1, loss_1, grads_1 = run(model, params, one)
  params_8, loss_8, grads_8 = run(model, params, eight)
  host = jax.tree.map(np.asarray, (params_1, grads_1))
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6, rtol=2e-4),
    host,
    jax.tree.map(np.asarray, (params_8, grads_8)),
  )
  np.testing.assert_allclose(loss_8, loss_1, rtol=1e-5)

  layer = params_8['layers' if scan_layers else 'layers_0']
  stack = (2,) if scan_layers else ()
  for leaf, shape in (
    (params_8['embedding'], (32, 16)),
    (layer['attention']['wq'], stack + (16, 2, 8)),
    (layer['attention']['wk'], stack + (16, 1, 8)),
    (layer['mlp']['w_down'], stack + (32, 16)),
  ):
    assert leaf.addressable_shards[0].data.shape == shape


def test_sharded_decode_equals_one_device(tiny_model):
  model, host_params, config = tiny_model
  batch = rows()
  outputs = []
  for mesh in (sharding.make_mesh(), sharding.make_mesh(2, 2, 2)):
    params = place(model, host_params, mesh)
    with sharding.use_mesh(mesh):
      placed = sharding.place_batch(batch, mesh)

      @jax.jit
      def decode(params, tokens_BT, valid_BT):
        cache = kv_cache.empty(config, 8, 16)
        apply = lambda *args: model.apply({'params': params}, *args)
        _, cache = apply(tokens_BT, None, cache, valid_BT)
        return apply(tokens_BT[:, :1], None, cache)

      out_BTD, cache = decode(params, placed['tokens'], placed['valid'])
      outputs.append(jax.tree.map(np.asarray, (out_BTD, cache)))
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), *outputs
  )
  shard = lambda x: x.addressable_shards[0].data.shape
  assert shard(cache.k[0]) == (2, 1, 8, 16)
  assert shard(cache.v[0]) == (2, 1, 16, 8)


def test_initialize_shards_state_and_draws_the_same_on_any_mesh(make_model):
  model, _, _ = make_model(scan_layers=True)

  def init(key):
    params = transformer.init_partitioned(model, key)
    return params, optax.adam(1e-3).init(params)

  one, eight = (
    sharding.initialize(init, mesh, jax.random.key(0))
    for mesh in (sharding.make_mesh(), sharding.make_mesh(2, 2, 2))
  )
  jax.tree.map(np.testing.assert_array_equal, one, eight)
  params, state = eight
  for param, moment in zip(
    jax.tree.leaves(params), jax.tree.leaves(state[0].mu), strict=True
  ):
    assert moment.sharding.is_equivalent_to(param.sharding, param.ndim)
  wq = params['layers']['attention']['wq']
  assert wq.addressable_shards[0].data.shape == (2, 16, 2, 8)
  assert state[0].count.sharding.is_fully_replicated


def test_every_parameter_names_every_axis_by_a_rule(tiny_model):
  known = {name for name, _ in sharding.RULES}
  for scan_layers in (False, True):
    config = dataclasses.replace(
      tiny_model[2],
      scan_layers=scan_layers,
      qk_norm=True,
      tie_embeddings=False,
    )
    model = transformer.Transformer(config)
    boxed = boxed_shapes(model)
    is_box = lambda x: isinstance(x, nn.LogicallyPartitioned)
    for leaf in jax.tree.leaves(boxed, is_leaf=is_box):
      assert is_box(leaf) and len(leaf.names) == leaf.value.ndim
      assert set(leaf.names) <= known


def test_plain_calls_need_no_mesh(tiny_model):
  model, params, _ = tiny_model
  plain = jax.jit(lambda params: loss_fn(model, params, rows()))(params)
  _, loss, _ = run(model, params, sharding.make_mesh())
  np.testing.assert_allclose(plain, loss, rtol=1e-5)


def test_errors_name_the_count_and_the_fix(tiny_model):
  with pytest.raises(ValueError, match='needs 16 devices, 8 are visible'):
    sharding.make_mesh(4, 2, 2)
  with pytest.raises(ValueError, match='at least 1'):
    sharding.make_mesh(0, 1, 1)
  with pytest.raises(ValueError, match='pad the batch to 8 rows'):
    sharding.place_batch(np.zeros((6, 3)), sharding.make_mesh(2, 2, 2))
  model = tiny_model[0]
  boxed = boxed_shapes(model)
  with pytest.raises(ValueError, match=r'wk.*does not divide.*tensor=4'):
    sharding.state_shardings(boxed, sharding.make_mesh(1, 1, 4))
