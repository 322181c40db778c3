"""The update: who is trained, by what divisor, on any number of devices.

Compiling a train step takes seconds, so a few steps are shared by all tests
and differ in as many ways as they can.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envace_jax.learning import batch as batches
from envace_jax.learning import kl, objective, optimizer, step
from envace_jax.learning import state as states
from envace_jax.model import logprobs, sharding, transformer
from envace_jax.types import Author, Role

VOCAB = 64
LENGTHS = np.array([12, 5, 9, 12, 7, 3, 10, 0])
BASE = objective.LossConfig(logprob_chunk=5)


def make_optimizer(**changes):
  defaults = {
    'learning_rate': 1e-2,
    'warmup_steps': 0,
    'total_steps': 100,
    'schedule': 'constant',
    'weight_decay': 0.1,
    'clip_norm': 1.0,
    'b1': 0.9,
    'b2': 0.95,
  }
  return optimizer.make_optimizer(**(defaults | changes))


def make_batch(seed=0, *, world=False):
  """Eight ragged rows (one empty) of alternating authors."""
  rng = np.random.default_rng(seed)
  shape = (8, 12)
  cycle = [0, 1, 2, 2, 1, 4 if world else 3, 4, 2, 1, 3, 3, 2]
  authors_BT = np.tile(np.array(cycle, np.int32), (8, 1))
  for b in range(8):
    authors_BT[b, 2:] = np.roll(authors_BT[b, 2:], b)
  return batches.TrainBatch(
    tokens=rng.integers(0, VOCAB, shape).astype(np.int32),
    authors=authors_BT,
    logprobs=(-4 - rng.uniform(size=shape)).astype(np.float32),
    advantages=batches.advantage_per_token(authors_BT, rng.normal(size=(8, 2))),
    positions=np.tile(np.arange(12, dtype=np.int32), (8, 1)),
    lengths=LENGTHS.astype(np.int32),
  )


FULL = dataclasses.replace(
  BASE,
  policy_weight_per_role=(1.0, 0.5),
  kl_weight_per_role=(0.1, 0.2),
  nll_weight=0.3,
  temperature_per_role=(0.7, 1.3),
)


class Lab:
  """A model, its parameters and a reference, and compiled steps by setting."""

  def __init__(self, config):
    self.model_config = dataclasses.replace(config, num_layers=1, d_model=16)
    self.model = transformer.Transformer(self.model_config)
    self.tx = make_optimizer()
    shapes = jax.eval_shape(
      lambda: transformer.init_params(self.model, jax.random.key(0))
    )
    rng = np.random.default_rng(0)
    draw = lambda x: (0.2 * rng.normal(size=x.shape)).astype(np.float32)
    self.params = jax.tree.map(draw, shapes)
    self.ref_params = jax.tree.map(lambda x: x + 0.1 * draw(x), self.params)
    self._steps = {}

  def step(
    self,
    batch,
    *,
    anchor=None,
    config=FULL,
    dtype='float32',
    mesh_shape=(1, 1, 1),
  ):
    """One policy step from a fresh copy of the parameters, as numpy."""
    key = (config, dtype, mesh_shape)
    mesh = sharding.make_mesh(*mesh_shape)
    model = transformer.Transformer(
      dataclasses.replace(self.model_config, dtype=dtype)
    )
    if key not in self._steps:
      self._steps[key] = step.make_policy_step(model, self.tx, config, mesh)
    state, ref_params = self.placed(mesh)
    state, metrics = self._steps[key](
      state, batch, ref_params, anchor or make_batch(1, world=True)
    )
    self.last_state = state
    return jax.tree.map(np.asarray, (state, metrics))

  def placed(self, mesh):
    """Fresh arrays: a step donates its state, and params are shared."""
    shardings = jax.tree.map(
      lambda x: x.sharding, states.abstract_state(self.model, self.tx, mesh)
    )
    state = states.TrainState(
      np.int32(0),
      self.params,
      jax.tree.map(np.array, self.tx.init(self.params)),
    )
    return jax.device_put(
      (state, self.ref_params), (shardings, shardings.params)
    )


@pytest.fixture(scope='module')
def lab(tiny_model):
  return Lab(tiny_model[2])


def assert_close(a, b, **tolerance):
  tolerance = {'rtol': 1e-4, 'atol': 1e-6} | tolerance
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), a, b)


def assert_same(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


def test_what_is_stored_beside_trained_tokens_reaches_nothing(lab):
  batch = make_batch()
  state, metrics = lab.step(batch)
  target_BT = np.asarray(batches.loss_mask(batch, batches.SAMPLED_AUTHORS))
  garbage_BT = np.where(target_BT, batch.logprobs, np.float32(np.nan))
  padding_BT = np.arange(12)[None, :] >= LENGTHS[:, None]
  dirty = batch.replace(
    logprobs=garbage_BT,
    tokens=np.where(padding_BT, (batch.tokens + 7) % VOCAB, batch.tokens),
    authors=np.where(padding_BT, 2, batch.authors),
    advantages=np.where((LENGTHS == 0)[:, None], np.nan, batch.advantages),
  )
  assert_same((state, metrics), lab.step(dirty))
  # The same change on a trained token is seen.
  dirty = batch.replace(logprobs=np.where(target_BT, -4.2, batch.logprobs))
  with pytest.raises(AssertionError):
    assert_close(state.params, lab.step(dirty)[0].params, atol=1e-4)


def test_the_anchor_adds_its_recorded_observations_to_the_loss(lab):
  batch, anchor = make_batch(), make_batch(1, world=True)
  score = jax.jit(
    lambda params, rows: (
      logprobs.token_logprobs(
        lab.model, params, rows.tokens, batches.valid(rows), chunk=64
      ).logprob
    )
  )
  world_BT = np.asarray(batches.loss_mask(anchor, (Author.WORLD,)))
  nll = -np.asarray(score(lab.params, anchor))[world_BT].mean()
  _, metrics = lab.step(batch)
  assert_close(metrics['nll'], nll)
  more = anchor.replace(authors=np.full((8, 12), Author.REHEARSE, np.int32))
  _, without = lab.step(batch, anchor=more)  # nothing in it is the world's
  assert without['nll'] == 0
  assert_close(metrics['loss'] - without['loss'], 0.3 * nll, atol=1e-5)
  for role in Role:
    count = batches.role_mask(batch, role).sum()
    assert metrics[f'tokens/{role.name.lower()}'] == count


def test_one_microbatch_equals_eight_cut_to_their_lengths(lab):
  state_1, metrics_1 = lab.step(make_batch())
  # Rows of up to 7 tokens run at that length, the others at 12.
  many = dataclasses.replace(FULL, microbatches=8, row_buckets=(7,))
  state_8, metrics_8 = lab.step(make_batch(), config=many)
  assert_close(metrics_1, metrics_8)
  # AdamW's first update is +-rate wherever the gradient is not tiny.
  assert_close(state_1.params, state_8.params, atol=1e-4)
  assert metrics_1['grad_norm'] > 0


def test_eight_devices_with_microbatches_equal_one_device(lab):
  state_1, metrics_1 = lab.step(make_batch())
  config = dataclasses.replace(FULL, microbatches=2)
  state_8, metrics_8 = lab.step(
    make_batch(), config=config, mesh_shape=(2, 2, 2)
  )
  assert_close(metrics_1, metrics_8)
  assert_close(state_1.params, state_8.params, atol=1e-4)
  mlp = lab.last_state.params['layers_0']['mlp']['w_gate']
  assert mlp.shape == (16, 64)
  assert mlp.addressable_shards[0].data.shape == (8, 32)
  with pytest.raises(ValueError, match='batch has 8 rows.*pad it to 32'):
    lab.step(
      make_batch(),
      config=dataclasses.replace(FULL, microbatches=8),
      mesh_shape=(2, 2, 2),
    )


# Everything off, half precision, microbatches: one more program.
HALF = {
  'config': dataclasses.replace(BASE, microbatches=2),
  'dtype': 'bfloat16',
}


def test_options_that_are_off_are_not_computed(lab, monkeypatch):
  def forbidden(*_):
    raise AssertionError('computed, but off')

  monkeypatch.setitem(kl.SAMPLED, kl.KLEstimator.K3, forbidden)
  monkeypatch.setattr(objective, 'anchor_loss', forbidden)
  _, metrics = lab.step(make_batch(), **HALF)
  assert metrics['kl/act'] == metrics['nll'] == 0
  step_fn = lab._steps[HALF['config'], 'bfloat16', (1, 1, 1)]
  state, _ = lab.placed(sharding.make_mesh())
  _, without = step_fn(state, make_batch(), None, None)
  assert_same(metrics, jax.tree.map(np.asarray, without))


def test_bfloat16_compute_keeps_float32_state_and_the_same_metrics(lab):
  state, metrics = lab.step(make_batch(), **HALF)
  assert {x.dtype for x in jax.tree.leaves(state.params)} == {
    np.dtype('float32')
  }
  assert {(x.dtype, x.shape) for x in metrics.values()} == {
    (np.dtype('float32'), ())
  }
  assert metrics['skipped'] == 0 and np.isfinite(metrics['loss'])
  assert metrics.keys() == lab.step(make_batch())[1].keys()


@pytest.mark.parametrize('options', [{}, HALF], ids=['full', 'half'])
def test_an_update_that_is_not_finite_is_dropped_and_counted(lab, options):
  batch = make_batch()
  batch.advantages[2] = np.inf
  state, metrics = lab.step(batch, **options)
  assert metrics['skipped'] == 1 and state.step == 1
  assert_same(state.params, lab.params)
  assert not any(np.any(x) for x in jax.tree.leaves(state.opt_state))
  state, metrics = lab.step(make_batch(), **options)
  assert metrics['skipped'] == 0 and state.step == 1
  with pytest.raises(AssertionError):
    assert_same(state.params, lab.params)


def test_what_is_on_but_missing_is_an_error(lab):
  mesh = sharding.make_mesh()
  state, ref_params = lab.placed(mesh)
  policy_step = step.make_policy_step(lab.model, lab.tx, FULL, mesh)
  with pytest.raises(ValueError, match='needs ref_params'):
    policy_step(state, make_batch(), None, make_batch(1))
  with pytest.raises(ValueError, match='aliases'):
    policy_step(state, make_batch(), state.params, make_batch(1))
  with pytest.raises(ValueError, match='needs anchor_batch'):
    policy_step(state, make_batch(), ref_params, None)


def test_supervised_steps_learn_both_roles_from_one_mean(lab):
  config = dataclasses.replace(BASE, microbatches=2)
  mesh = sharding.make_mesh()
  train = step.make_supervised_step(lab.model, lab.tx, config, mesh)
  state, _ = lab.placed(mesh)
  batch = make_batch(world=True)
  history = []
  for _ in range(60):
    state, metrics = train(state, batch)
    history.append({name: float(x) for name, x in metrics.items()})
  assert state.step == 60
  first, last = history[0], history[-1]
  total = sum(
    first[f'tokens/{name}'] * first[f'nll/{name}']
    for name in ('act', 'rehearse')
  )
  count = first['tokens/act'] + first['tokens/rehearse']
  assert count == batches.loss_mask(batch, batches.SUPERVISED_AUTHORS).sum()
  assert_close(first['loss'], total / count)
  for name in ('act', 'rehearse'):
    assert last[f'nll/{name}'] < 0.5 * first[f'nll/{name}']


def test_a_fresh_state_is_what_the_abstract_state_says(lab):
  mesh = sharding.make_mesh(2, 2, 2)
  state = states.init_state(lab.model, lab.tx, jax.random.key(0), mesh)
  abstract = states.abstract_state(lab.model, lab.tx, mesh)
  assert jax.tree.structure(state) == jax.tree.structure(abstract)
  for x, y in zip(*map(jax.tree.leaves, (state, abstract)), strict=True):
    assert (x.shape, x.dtype, x.sharding) == (y.shape, y.dtype, y.sharding)


@pytest.mark.parametrize('scan_layers', [False, True])
def test_norms_are_not_decayed_in_either_layout(lab, scan_layers):
  config = dataclasses.replace(lab.model_config, scan_layers=scan_layers)
  model = transformer.Transformer(config)
  params = jax.tree.map(
    lambda x: np.ones(x.shape, np.float32),
    jax.eval_shape(lambda: transformer.init_params(model, jax.random.key(0))),
  )
  tx = make_optimizer(clip_norm=None, weight_decay=0.5)
  zeros = jax.tree.map(jnp.zeros_like, params)
  updates, _ = jax.jit(tx.update)(zeros, jax.jit(tx.init)(params), params)

  def check(path, update, x):
    is_norm = path[-1].key == 'scale'
    np.testing.assert_allclose(
      update, 0 * x if is_norm else -1e-2 * 0.5 * x, rtol=1e-5
    )

  jax.tree.map_with_path(check, updates, params)


@pytest.mark.parametrize(
  'schedule, expected',
  [
    ('constant', [0.5, 1, 1, 1, 1, 1]),
    ('linear', [0.5, 1, 1, 0.75, 0.5, 0.25]),
    ('cosine', [0.5, 1, 1, 0.85355, 0.5, 0.14645]),
  ],
)
def test_schedule_warms_up_from_the_first_update_and_decays(schedule, expected):
  tx = make_optimizer(
    schedule=schedule,
    warmup_steps=2,
    total_steps=6,
    learning_rate=1.0,
    weight_decay=0.0,
    clip_norm=None,
  )
  params = {'w': jnp.zeros((1, 1))}
  state, rates = tx.init(params), []
  for _ in range(6):
    # A constant gradient: Adam's update is the rate.
    updates, state = tx.update({'w': jnp.ones((1, 1))}, state, params)
    rates.append(-float(updates['w'][0, 0]))
  np.testing.assert_allclose(rates, expected, atol=1e-4)


def test_settings_that_cannot_work_are_refused():
  with pytest.raises(ValueError, match="'cosin' is not one of"):
    make_optimizer(schedule='cosin')
  with pytest.raises(ValueError, match='warmup_steps=200'):
    make_optimizer(warmup_steps=200)
  with pytest.raises(ValueError, match='clip_norm=0'):
    make_optimizer(clip_norm=0.0)
