"""Training adapters alone: what is differentiated, kept, and shared."""

import dataclasses
import re

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from envace_jax.learning import batch as batches
from envace_jax.learning import objective, step
from envace_jax.learning import state as states
from envace_jax.model import config as config_lib
from envace_jax.model import lora, per_role, sharding, transformer

LORA = config_lib.LoraConfig(rank=2, alpha=6.0)
LENGTHS = np.array([12, 5, 9, 12, 7, 3, 10, 0])
CONFIG = objective.LossConfig(
  logprob_chunk=5, microbatches=2, kl_weight_per_role=(0.1, 0.2)
)


def make_batch(seed=0):
  rng = np.random.default_rng(seed)
  shape = (8, 12)
  authors_BT = np.tile(np.array([0, 1, 2, 2, 1, 3, 3, 1, 2, 1, 3, 3]), (8, 1))
  return batches.TrainBatch(
    tokens=rng.integers(0, 64, shape).astype(np.int32),
    authors=authors_BT.astype(np.int32),
    logprobs=(-4 - rng.uniform(size=shape)).astype(np.float32),
    advantages=batches.advantage_per_token(authors_BT, rng.normal(size=(8, 2))),
    positions=np.tile(np.arange(12, dtype=np.int32), (8, 1)),
    lengths=LENGTHS.astype(np.int32),
  )


@pytest.fixture(scope='module')
def net(draw_thin_model):
  """(plain model, model with adapters, base, draw of adapters)."""
  plain, draw = draw_thin_model()
  model = transformer.Transformer(dataclasses.replace(plain.config, lora=LORA))
  shapes = jax.eval_shape(
    lambda: nn.meta.unbox(transformer.init_trained(model, jax.random.key(0)))
  )
  rng = np.random.default_rng(1)
  noise = lambda x: (0.2 * rng.normal(size=x.shape)).astype(np.float32)
  return plain, model, draw(), lambda: jax.tree.map(noise, shapes)


def supervised(model, params):
  rows = make_batch()
  config = dataclasses.replace(CONFIG, microbatches=1)
  divisors = objective.supervised_denominators(rows, config)
  return objective.supervised_loss(model, params, rows, divisors, config)[0]


def test_gradients_of_adapters_follow_from_the_whole_networks(net):
  """With W' = W + s A B: dA = s dW' B^T and dB = s A^T dW'."""
  plain, model, base, draw = net
  adapters = draw()
  grads = jax.jit(jax.grad(lambda a: supervised(model, lora.Adapted(base, a))))(
    adapters
  )
  merged = lora.merge(LORA, lora.Adapted(base, adapters))
  whole = jax.jit(jax.grad(lambda p: supervised(plain, p)))(merged)
  for unit, name in (('attention', 'wo'), ('attention', 'wq'), ('mlp', 'w_up')):
    a, b = (adapters['layers_0'][unit][name][x] for x in ('a', 'b'))
    dw = np.asarray(whole['layers_0'][unit][name]).reshape(
      a[..., 0].size, b[0].size
    )
    got = grads['layers_0'][unit][name]
    da = LORA.scale * dw @ b.reshape(2, -1).T
    db = LORA.scale * a.reshape(-1, 2).T @ dw
    assert np.abs(da).max() > 1e-3 and np.abs(db).max() > 1e-3
    np.testing.assert_allclose(got['a'].reshape(-1, 2), da, atol=1e-5)
    np.testing.assert_allclose(got['b'].reshape(2, -1), db, atol=1e-5)


def test_no_gradient_has_the_shape_of_a_frozen_matrix(net):
  plain, model, base, draw = net

  def products(grad, params):
    text = str(jax.make_jaxpr(grad)(params))
    shapes = re.findall(r'f32\[([\d,]+)\] = dot_general', text)
    return {'16,64', '64,16'} & set(shapes)  # w_gate, w_up, w_down

  ours = jax.grad(lambda a: supervised(model, lora.Adapted(base, a)))
  assert not products(ours, draw())
  assert products(jax.grad(lambda p: supervised(plain, p)), base)


def train(net, mesh_shape, tx):
  """Two policy steps of adapters per role, over one base that is placed."""
  _, model, base, _ = net
  rng = np.random.default_rng(2)
  mesh = sharding.make_mesh(*mesh_shape)
  base = jax.device_put(base, states.network_shardings(model, mesh))
  abstract = states.abstract_state(model, tx, mesh, share_roles=False)
  trained = jax.tree.map(
    lambda x: jax.device_put(
      (0.2 * rng.normal(size=x.shape)).astype(np.float32), x.sharding
    ),
    abstract.params,
  )
  start = states.TrainState(jnp.int32(0), trained, ())
  state = states.restart(start, tx, mesh)
  update = step.make_policy_step(
    model, tx, CONFIG, mesh, share_roles=False, base=base
  )
  reference = lora.Adapted(base, trained.act)
  rows = sharding.place_batch(make_batch(), mesh)
  for _ in range(2):
    state, metrics = update(
      state, per_role.PerRole(act=rows, rehearse=rows), reference, None
    )
  return base, trained, state, metrics


def test_a_step_trains_adapters_alone_and_the_base_exists_once(net):
  tables = lambda: {
    x.unsafe_buffer_pointer()
    for x in jax.live_arrays()
    if x.shape == (64, 16) and len(x.devices()) == 1
  }
  before = tables()
  base, start, state, metrics = train(net, (1, 1, 1), optax.sgd(1.0))
  assert metrics['skipped'] == 0 and metrics['kl/act'] > 0
  assert jax.tree.structure(state.params) == jax.tree.structure(start)
  moved = jax.tree.map(lambda x, y: jnp.abs(x - y).max(), state.params, start)
  assert min(jax.tree.leaves(moved)) > 0
  jax.tree.map(np.testing.assert_array_equal, base, net[2])
  # Both networks and the reference read it, and no step has made another.
  table = base['embedding']
  alive = tables() - before
  down = base['layers_0']['mlp']['w_down']  # as large, by chance
  assert alive == {x.unsafe_buffer_pointer() for x in (table, down)}
  both = lora.adapt(base, state.params)
  assert both.act.base['embedding'] is both.rehearse.base['embedding'] is table


def test_eight_devices_equal_one(net):
  tx = optax.sgd(1.0)
  *_, one, metrics_1 = train(net, (1, 1, 1), tx)
  *_, eight, metrics_8 = train(net, (2, 2, 2), tx)
  close = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
  jax.tree.map(
    close,
    *jax.tree.map(
      np.asarray, ((one.params, metrics_1), (eight.params, metrics_8))
    ),
  )
  a = eight.params.act['layers_0']['mlp']['w_down']['a']
  assert a.addressable_shards[0].data.shape == (32, 2)


def test_a_fresh_state_holds_adapters_as_the_abstract_state_says(net):
  _, model, _, _ = net
  mesh, tx = sharding.make_mesh(1, 2, 1), optax.adam(1e-3)
  state = states.init_state(model, tx, jax.random.key(0), mesh)
  abstract = states.abstract_state(model, tx, mesh)
  assert jax.tree.structure(state) == jax.tree.structure(abstract)
  for x, y in zip(*map(jax.tree.leaves, (state, abstract)), strict=True):
    assert (x.shape, x.dtype, x.sharding) == (y.shape, y.dtype, y.sharding)
  assert set(state.params) == {'layers_0'}
  per_layer = 2 * (4 * (16 + 32) - 32 + 3 * (16 + 64))
  assert transformer.num_params(state.params) == per_layer


def test_a_model_and_a_base_that_do_not_belong_together_are_refused(net):
  plain, model, base, _ = net
  mesh, tx = sharding.make_mesh(), optax.sgd(1.0)
  for make in (step.make_supervised_step, step.make_policy_step):
    with pytest.raises(ValueError, match='base is None'):
      make(model, tx, CONFIG, mesh)
    with pytest.raises(ValueError, match='base is given'):
      make(plain, tx, CONFIG, mesh, base=base)
