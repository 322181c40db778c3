"""Optimizers that keep less: how much less, and what it does to an update."""

import dataclasses
import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envace_jax.learning import checkpoints, optimizer
from envace_jax.learning import state as states
from envace_jax.model import per_role, sharding, transformer

SETTINGS = {
  'learning_rate': 1e-2,
  'warmup_steps': 2,
  'total_steps': 100,
  'schedule': 'cosine',
  'weight_decay': 0.1,
  'clip_norm': 1.0,
  'b1': 0.9,
  'b2': 0.99,
}
KEPT = {
  'adamw': {},
  'bfloat16': {'moments_dtype': 'bfloat16'},
  'adafactor': {'kind': 'adafactor'},
}


def make(**changes):
  return optimizer.make_optimizer(**(SETTINGS | changes))


def state_bytes(tx, params):
  state = jax.eval_shape(tx.init, params)
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))


@pytest.fixture(scope='module')
def wide(draw_thin_model):
  """A model with matrices that Adafactor factors."""
  plain, _ = draw_thin_model()
  config = dataclasses.replace(plain.config, vocab_size=256, d_model=128,
                               d_ff=256)  # fmt: skip
  return transformer.Transformer(config)


@functools.cache
def fitted(kept):
  """Where 50 steps lead from noisy gradients of a small regression."""
  rng = np.random.default_rng(0)
  target, start = rng.normal(size=(2, 160, 144)).astype(np.float32)
  tx = make(weight_decay=0.0, **KEPT[kept])
  params = {'w': jnp.asarray(start), 'scale': jnp.ones(7)}

  def loss(params, noise):
    error = params['w'] + 0.3 * noise - target
    return jnp.mean(error**2) + jnp.mean((params['scale'] - 3) ** 2)

  def update(carry, key):
    params, state = carry
    noise = jax.random.normal(key, target.shape)
    grads = jax.grad(loss)(params, noise)
    updates, state = tx.update(grads, state, params)
    return (jax.tree.map(jnp.add, params, updates), state), None

  run = lambda keys: jax.lax.scan(update, (params, tx.init(params)), keys)[0]
  end, state = jax.jit(run)(jax.random.split(jax.random.key(1), 50))
  return params, end, state, loss


def test_bfloat16_moments_are_half_and_adafactor_less(wide):
  shapes = jax.eval_shape(
    lambda: transformer.init_params(wide, jax.random.key(0))
  )
  whole, half, factored = (
    state_bytes(make(**changes), shapes) for changes in KEPT.values()
  )
  count = 4 * 2  # of updates: Adam's and the schedule's
  moments = 2 * 4 * transformer.num_params(shapes)
  assert whole == moments + count
  assert half == moments / 2 + count
  # Queries, keys, values and outputs have axes too short to be factored.
  assert factored < 0.2 * whole


def test_bfloat16_moments_lead_where_float32_ones_do():
  start, whole, _, _ = fitted('adamw')
  _, half, state, _ = fitted('bfloat16')
  dtypes = {x.dtype for x in jax.tree.leaves(state) if x.ndim}
  assert dtypes == {jnp.dtype('bfloat16')}
  for name in start:
    path = np.linalg.norm(whole[name] - start[name])
    assert path > 0.1
    assert 0 < np.linalg.norm(half[name] - whole[name]) < 0.02 * path


def test_adafactor_learns_at_the_same_rate():
  zero = jnp.zeros((160, 144))
  start, end, _, loss = fitted('adafactor')
  _, adam, _, _ = fitted('adamw')
  gained, usual = (
    float(loss(start, zero) - loss(x, zero)) for x in (end, adam)
  )
  assert gained > 0.8 * usual > 0


@pytest.mark.parametrize('kind', optimizer.KINDS)
def test_schedule_decay_and_bound_are_the_same_for_all(kind):
  tx = make(kind=kind, weight_decay=0.5, warmup_steps=4, schedule='constant')
  params = {'w': jnp.full((130, 130), 2.0), 'scale': jnp.full(3, 2.0)}
  zeros, state = jax.tree.map(jnp.zeros_like, params), tx.init(params)
  for n in range(6):
    updates, state = jax.jit(tx.update)(zeros, state, params)
    rate = 1e-2 * min(1, (n + 1) / 4)
    np.testing.assert_allclose(updates['w'], -rate * 0.5 * 2, rtol=1e-5)
    np.testing.assert_array_equal(updates['scale'], jnp.zeros(3))


@pytest.mark.parametrize('kind', KEPT)
@pytest.mark.parametrize('share_roles', [True, False])
def test_states_live_where_the_abstract_state_says(wide, kind, share_roles):
  tx = make(**KEPT[kind])
  if not share_roles:
    tx = optimizer.for_each_role(act=tx, rehearse=tx)
  mesh = sharding.make_mesh(2, 2, 2)
  abstract = states.abstract_state(wide, tx, mesh, share_roles=share_roles)
  specs = jax.tree.map(lambda x: x.sharding, abstract.opt_state)
  shapes = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract.params)
  state = jax.jit(tx.init, out_shardings=specs)(shapes)
  assert jax.tree.structure(state) == jax.tree.structure(abstract.opt_state)
  leaves = zip(*map(jax.tree.leaves, (state, abstract.opt_state)), strict=True)
  for x, y in leaves:
    assert (x.shape, x.dtype, x.sharding) == (y.shape, y.dtype, y.sharding)
  assert not any(isinstance(x, nn.meta.AxisMetadata)
                 for x in jax.tree.leaves(state))  # fmt: skip
  # As large as a parameter, and so in parts, as it is.
  heads = [x for x in jax.tree.leaves(state) if x.ndim == 3]
  assert heads
  for x in heads:
    assert x.addressable_shards[0].data.size == x.size // 4


@pytest.mark.parametrize('kind', ['bfloat16', 'adafactor'])
def test_eight_devices_update_as_one(wide, kind):
  tx = make(**KEPT[kind])
  shapes = jax.eval_shape(
    lambda: transformer.init_params(wide, jax.random.key(0))
  )
  rng = np.random.default_rng(3)
  draw = lambda: jax.tree.map(
    lambda x: rng.normal(size=x.shape).astype(np.float32), shapes
  )
  params, grads = draw(), [draw() for _ in range(2)]
  ends = []
  for mesh in (sharding.make_mesh(), sharding.make_mesh(2, 2, 2)):
    at = jax.tree.map(
      lambda x: x.sharding, states.abstract_state(wide, tx, mesh)
    )

    def run(params, grads):
      state, total = tx.init(params), None
      for grad in grads:
        total, state = tx.update(grad, state, params)
      return total, state

    run = jax.jit(run, in_shardings=(at.params, [at.params] * 2),
                  out_shardings=(at.params, at.opt_state))  # fmt: skip
    ends.append(jax.tree.map(np.asarray, run(params, grads)))
  close = lambda x, y: np.testing.assert_allclose(
    x.astype(np.float32), y.astype(np.float32), rtol=1e-2, atol=1e-6
  )
  jax.tree.map(close, *ends)


@pytest.mark.parametrize('kind', KEPT)
def test_a_resumed_state_has_the_dtypes_and_values_saved(wide, kind, tmp_path):
  tx = optimizer.for_each_role(act=make(**KEPT[kind]), rehearse=None)
  mesh = sharding.make_mesh(1, 2, 1)
  abstract = states.abstract_state(wide, tx, mesh, share_roles=False)
  rng = np.random.default_rng(4)
  state = jax.tree.map(
    lambda x: jax.device_put(
      rng.uniform(1, 9, x.shape).astype(x.dtype), x.sharding
    ),
    abstract,
  )
  assert isinstance(state.opt_state, per_role.PerRole)
  with checkpoints.Checkpointer(tmp_path, max_to_keep=1) as checkpointer:
    checkpointer.save(1, state, {})
    restored, _ = checkpointer.restore(abstract)
  for x, y in zip(*map(jax.tree.leaves, (restored, state)), strict=True):
    assert (x.dtype, x.sharding) == (y.dtype, y.sharding)
    np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize(
  'changes, remedy',
  [
    ({'kind': 'adam'}, "'adam' is not one of .*adafactor"),
    ({'moments_dtype': 'float16'}, "'float16' is not one of .*bfloat16"),
    ({'moments_dtype': 'bfloat16', 'b2': 0.999}, 'set b1 and b2 below 0.996'),
  ],
)
def test_what_cannot_work_is_refused(changes, remedy):
  with pytest.raises(ValueError, match=remedy):
    make(**changes)


def test_a_moment_next_to_the_refused_ones_still_decays():
  tx = make(moments_dtype='bfloat16', b2=0.996, clip_norm=None)
  params = {'w': jnp.ones((64, 2))}
  state = tx.init(params)
  grads = {'w': jnp.geomspace(1e-3, 1e3, 128).reshape(64, 2)}
  _, state = tx.update(grads, state, params)
  first, zeros = state[0].nu['w'], jax.tree.map(jnp.zeros_like, params)
  for _ in range(3):
    before = state[0].nu['w']
    _, state = tx.update(zeros, state, params)
    assert (state[0].nu['w'] < before).all()
  assert (first > 0).all()
