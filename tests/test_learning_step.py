"""The update: who is trained, by what divisor, on any number of devices."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envace_jax import types
from envace_jax.learning import batch as batches
from envace_jax.learning import objective, step
from envace_jax.model import sharding, transformer
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
  return step.make_optimizer(**(defaults | changes))


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
    advantages=rng.normal(size=(8, 2)).astype(np.float32),
    lengths=LENGTHS.astype(np.int32),
  )


@pytest.fixture(scope='module')
def setting(tiny_model):
  model, params, _ = tiny_model
  ref_params = transformer.init_params(model, jax.random.key(9))
  return model, params, ref_params


def run(setting, config, batch, *, anchor=None, mesh=None, kind='policy'):
  """One step from a fresh copy of the parameters."""
  model, params, ref_params = setting
  mesh = mesh or sharding.make_mesh()
  tx = make_optimizer()
  state = step.TrainState(
    np.int32(0), jax.tree.map(np.array, params), tx.init(params)
  )
  shardings = jax.tree.map(
    lambda x: x.sharding, step.abstract_state(model, tx, mesh)
  )
  # Through numpy: the step donates, and params are shared by all tests.
  state = jax.device_put(jax.tree.map(np.array, state), shardings)
  if kind == 'supervised':
    return step.make_supervised_step(model, tx, config, mesh)(state, batch)
  ref_params = jax.device_put(
    jax.tree.map(np.array, ref_params), shardings.params
  )
  return step.make_policy_step(model, tx, config, mesh)(
    state, batch, ref_params, anchor
  )


def gradient(setting, config, batch):
  model, params, ref_params = setting
  divisors = objective.policy_denominators(batch, config)
  return jax.grad(
    lambda p: objective.policy_loss(
      model, p, ref_params, batch, divisors, config
    )[0]
  )(params)


def assert_close(a, b, **tolerance):
  tolerance = {'rtol': 1e-4, 'atol': 1e-6} | tolerance
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), a, b)


def assert_same(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


FULL = dataclasses.replace(
  BASE,
  policy_weight_per_role=(1.0, 0.5),
  kl_weight_per_role=(0.1, 0.2),
  nll_weight=0.3,
  temperature_per_role=(0.7, 1.3),
)


@pytest.mark.parametrize('trained', list(Role))
def test_tokens_of_other_authors_have_exactly_no_gradient(setting, trained):
  weights = tuple(float(role == trained) for role in Role)
  config = dataclasses.replace(BASE, policy_weight_per_role=weights)
  batch = make_batch()
  expected = gradient(setting, config, batch)
  mask_BT = np.asarray(batches.role_mask(batch, trained))
  # Whatever is stored beside the trained tokens reaches nothing ...
  logprobs_BT = np.where(mask_BT, batch.logprobs, np.float32(np.nan))
  other = 1 - trained
  adv_BR = batch.advantages.copy()
  adv_BR[:, other] = np.nan
  dirty = batch.replace(logprobs=logprobs_BT, advantages=adv_BR)
  assert_same(gradient(setting, config, dirty), expected)
  # ... and what is stored there does.
  dirty = batch.replace(logprobs=np.where(mask_BT, -1.0, batch.logprobs))
  with pytest.raises(AssertionError):
    assert_same(gradient(setting, config, dirty), expected)


def test_only_targets_reach_the_gradient_of_the_scores(setting):
  batch = make_batch()
  model, params, _ = setting
  divisors = objective.policy_denominators(batch, BASE)

  def loss(shift_BT, monkey):
    scored = transformer.token_logprobs(
      model, params, batch.tokens, batches.valid(batch), chunk=5
    )
    shifted = scored._replace(logprob=scored.logprob + shift_BT)
    monkey.setattr(transformer, 'token_logprobs', lambda *a, **k: shifted)
    return objective.policy_loss(model, params, None, batch, divisors, BASE)[0]

  with pytest.MonkeyPatch.context() as monkey:
    grad_BT = jax.grad(loss)(jnp.zeros(batch.tokens.shape), monkey)
  target_BT = np.asarray(batches.loss_mask(batch, batches.SAMPLED_AUTHORS))
  assert (np.asarray(grad_BT)[~target_BT] == 0).all()
  assert not target_BT[7].any() and (np.asarray(grad_BT)[target_BT] != 0).any()


@pytest.mark.parametrize('normalizer', list(objective.Normalizer))
@pytest.mark.parametrize('kind', ['policy', 'supervised'])
def test_one_microbatch_equals_eight(setting, normalizer, kind):
  config = dataclasses.replace(FULL, normalizer=normalizer)
  many = dataclasses.replace(config, microbatches=8)
  anchor = make_batch(1, world=True)
  args = {'anchor': anchor, 'kind': kind}
  state_1, metrics_1 = run(setting, config, make_batch(), **args)
  state_8, metrics_8 = run(setting, many, make_batch(), **args)
  assert_close(metrics_1, metrics_8)
  # AdamW's first update is +-rate wherever the gradient is not tiny.
  assert_close(state_1.params, state_8.params, atol=1e-4)
  assert metrics_1['grad_norm'] > 0


@pytest.mark.parametrize('normalizer', list(objective.Normalizer))
def test_the_loss_is_the_documented_formula(setting, normalizer):
  config = dataclasses.replace(FULL, normalizer=normalizer)
  batch, anchor = make_batch(), make_batch(1, world=True)
  model, params, ref_params = setting
  _, metrics = run(setting, config, batch, anchor=anchor)

  def score(params, rows, temperature):
    return np.asarray(
      transformer.token_logprobs(
        model,
        params,
        rows.tokens,
        batches.valid(rows),
        jnp.full(rows.tokens.shape, temperature),
        chunk=64,
      ).logprob
    )

  count, loss = {}, {}
  for role in Role:
    tau = config.temperature_per_role[role]
    mask_BT = np.asarray(batches.role_mask(batch, role))
    count[role] = mask_BT.sum()
    logp = score(params, batch, tau)[mask_BT]
    ref = score(ref_params, batch, tau)[mask_BT]
    adv = np.broadcast_to(batch.advantages[:, role, None], (8, 12))[mask_BT]
    ratio = np.exp(logp - batch.logprobs[mask_BT])
    pg = -np.minimum(ratio * adv, np.clip(ratio, 0.8, 1.2) * adv)
    kl = np.exp(ref - logp) - 1 - (ref - logp)
    loss[role] = (
      config.policy_weight_per_role[role] * pg.sum()
      + config.kl_weight_per_role[role] * kl.sum()
    )
    name = role.name.lower()
    np.testing.assert_allclose(metrics[f'kl/{name}'], kl.mean(), rtol=1e-4)
    np.testing.assert_allclose(metrics[f'ratio/{name}'], ratio.mean(), 1e-4)
    assert metrics[f'tokens/{name}'] == count[role]
  world_BT = np.asarray(batches.loss_mask(anchor, (Author.WORLD,)))
  nll = -score(params, anchor, 1.0)[world_BT]
  np.testing.assert_allclose(metrics['nll'], nll.mean(), rtol=1e-4)
  match normalizer:
    case objective.Normalizer.TOKEN:
      divisor, anchor_divisor = dict.fromkeys(Role, sum(count.values())), None
    case objective.Normalizer.ROLE_TOKEN:
      divisor, anchor_divisor = count, None
    case objective.Normalizer.ROW:
      divisor, anchor_divisor = dict.fromkeys(Role, 7), 7  # one row is empty
  expected = sum(loss[r] / divisor[r] for r in Role)
  expected += 0.3 * nll.sum() / (anchor_divisor or world_BT.sum())
  np.testing.assert_allclose(metrics['loss'], expected, rtol=1e-4)


def test_padding_changes_nothing(setting):
  batch, anchor = make_batch(), make_batch(1, world=True)

  def pad(batch, rows=8, columns=5):
    rng = np.random.default_rng(3)

    def fill(x, high):
      widths = ((0, rows), (0, columns))
      garbage = rng.integers(1, high, np.array(x.shape) + [rows, columns])
      garbage = garbage.astype(x.dtype)
      return np.where(
        np.pad(np.ones(x.shape, bool), widths), np.pad(x, widths), garbage
      )

    return batch.replace(
      tokens=fill(batch.tokens, VOCAB),
      authors=fill(batch.authors, 6),
      logprobs=fill(batch.logprobs, 9),
      advantages=np.pad(
        batch.advantages, ((0, rows), (0, 0)), constant_values=9.0
      ),
      lengths=np.pad(batch.lengths, (0, rows)),
    )

  _, expected = run(setting, FULL, batch, anchor=anchor)
  _, got = run(setting, FULL, pad(batch), anchor=pad(anchor))
  assert_close(got, expected)


@pytest.mark.parametrize(
  'axes', [{'data': 2, 'fsdp': 2, 'tensor': 2}, {'data': 8}]
)
def test_eight_devices_equal_one(setting, axes):
  config = FULL
  anchor = make_batch(1, world=True)
  mesh = sharding.make_mesh(**axes)
  state_1, metrics_1 = run(setting, config, make_batch(), anchor=anchor)
  state_8, metrics_8 = run(
    setting, config, make_batch(), anchor=anchor, mesh=mesh
  )
  assert_close(
    jax.tree.map(np.asarray, metrics_1), jax.tree.map(np.asarray, metrics_8)
  )
  assert_close(
    jax.tree.map(np.asarray, state_1.params),
    jax.tree.map(np.asarray, state_8.params),
    atol=1e-4,
  )
  assert {len(x.sharding.device_set) for x in jax.tree.leaves(state_8)} == {8}


def test_microbatches_and_devices_together(setting):
  config = dataclasses.replace(FULL, microbatches=2)
  anchor = make_batch(1, world=True)
  mesh = sharding.make_mesh(data=2, fsdp=2)
  _, expected = run(setting, FULL, make_batch(), anchor=anchor)
  _, got = run(setting, config, make_batch(), anchor=anchor, mesh=mesh)
  assert_close(
    jax.tree.map(np.asarray, got), jax.tree.map(np.asarray, expected)
  )
  with pytest.raises(ValueError, match='pad it to 32'):
    many = dataclasses.replace(config, microbatches=8)
    run(setting, many, make_batch(), anchor=anchor, mesh=mesh)


def test_on_policy_ratio_is_one_under_the_sampling_temperature(setting):
  model, params, _ = setting
  batch = make_batch()
  temperature = (0.6, 1.7)
  logits_BTV = model.apply(
    {'params': params},
    model.apply({'params': params}, batch.tokens)[0],
    method='unembed',
  )
  for b in range(8):
    for t in range(1, LENGTHS[b]):
      author = batch.authors[b, t]
      tau = {Author.ACT: 0.6, Author.REHEARSE: 1.7}.get(author, 1.0)
      logp_V = jax.nn.log_softmax(logits_BTV[b, t - 1] / tau)
      batch.logprobs[b, t] = logp_V[batch.tokens[b, t]]
  config = dataclasses.replace(BASE, temperature_per_role=temperature)
  _, metrics = run(setting, config, batch)
  for name in ('act', 'rehearse'):
    np.testing.assert_allclose(metrics[f'ratio/{name}'], 1, atol=1e-5)
    np.testing.assert_allclose(metrics[f'behaviour_kl/{name}'], 0, atol=1e-6)
    assert metrics[f'clip_fraction/{name}'] == 0
  _, metrics = run(setting, BASE, batch)
  assert abs(metrics['ratio/act'] - 1) > 1e-3


def test_options_that_are_off_are_not_computed(setting, monkeypatch):
  calls = []
  scored = transformer.token_logprobs

  def counting(*args, **kwargs):
    calls.append(1)
    return scored(*args, **kwargs)

  monkeypatch.setattr(transformer, 'token_logprobs', counting)
  state, metrics = run(setting, BASE, make_batch(), anchor=make_batch(1))
  off = len(calls)
  _, full_metrics = run(setting, FULL, make_batch(), anchor=make_batch(1))
  assert len(calls) - off == 3 * off  # policy, reference, anchor
  assert metrics.keys() == full_metrics.keys()
  model, params, _ = setting
  tx = make_optimizer()
  bare = step.make_policy_step(model, tx, BASE, sharding.make_mesh())
  fresh = step.TrainState(jnp.int32(0), params, tx.init(params))
  fresh = jax.tree.map(lambda x: jnp.array(np.array(x)), fresh)
  state_none, metrics_none = bare(fresh, make_batch(), None, None)
  assert_same(metrics, metrics_none)
  assert_same(state.params, state_none.params)


def test_what_is_on_but_missing_is_an_error(setting):
  model, params, _ = setting
  tx = make_optimizer()
  mesh = sharding.make_mesh()
  state = step.TrainState(jnp.int32(0), params, tx.init(params))
  policy_step = step.make_policy_step(model, tx, FULL, mesh)
  with pytest.raises(ValueError, match='needs ref_params'):
    policy_step(state, make_batch(), None, make_batch(1))
  with pytest.raises(ValueError, match='aliases'):
    policy_step(state, make_batch(), params, make_batch(1))
  other = jax.tree.map(jnp.copy, params)
  with pytest.raises(ValueError, match='needs anchor_batch'):
    policy_step(state, make_batch(), other, None)


@pytest.mark.parametrize('microbatches', [1, 4])
def test_an_update_that_is_not_finite_is_dropped_and_counted(
  setting, microbatches
):
  config = dataclasses.replace(BASE, microbatches=microbatches)
  batch = make_batch()
  batch.advantages[2] = np.inf
  state, metrics = run(setting, config, batch)
  assert metrics['skipped'] == 1 and state.step == 1
  assert_same(state.params, setting[1])
  assert all(
    (np.asarray(x) == 0).all() for x in jax.tree.leaves(state.opt_state)
  )
  state, metrics = run(setting, config, make_batch())
  assert metrics['skipped'] == 0
  with pytest.raises(AssertionError):
    assert_same(state.params, setting[1])


def test_bfloat16_compute_keeps_float32_state_and_metrics(setting):
  model, params, ref_params = setting
  half = transformer.Transformer(
    dataclasses.replace(model.config, dtype='bfloat16')
  )
  config = dataclasses.replace(FULL, microbatches=2)
  state, metrics = run(
    (half, params, ref_params), config, make_batch(), anchor=make_batch(1)
  )
  assert {x.dtype for x in jax.tree.leaves(state.params)} == {
    np.dtype('float32')
  }
  assert {x.dtype for x in metrics.values()} == {np.dtype('float32')}
  assert {x.shape for x in metrics.values()} == {()}
  assert metrics['skipped'] == 0 and np.isfinite(metrics['loss'])


def test_supervised_steps_learn_both_roles(tiny_model):
  model, _, _ = tiny_model
  mesh, tx = sharding.make_mesh(), make_optimizer()
  state = step.init_state(model, tx, jax.random.key(0), mesh)
  train = step.make_supervised_step(model, tx, BASE, mesh)
  batch = make_batch(world=True)
  history = []
  for _ in range(40):
    state, metrics = train(state, batch)
    history.append(metrics)
  assert state.step == 40
  for name in ('act', 'rehearse'):
    first, last = (float(m[f'nll/{name}']) for m in (history[0], history[-1]))
    assert first == pytest.approx(np.log(VOCAB), abs=0.7)
    assert last < 0.5 * first


def test_a_role_without_supervised_weight_is_not_learnt(setting):
  config = dataclasses.replace(BASE, supervised_weight_per_role=(1.0, 0.0))
  batch = make_batch(world=True)
  _, metrics = run(setting, config, batch, kind='supervised')
  np.testing.assert_allclose(metrics['loss'], metrics['nll/act'], rtol=1e-6)
  assert metrics['nll/rehearse'] > 0  # still measured


@pytest.mark.parametrize('scan_layers', [False, True])
def test_norms_are_not_decayed_in_either_layout(tiny_model, scan_layers):
  config = dataclasses.replace(tiny_model[2], scan_layers=scan_layers)
  params = transformer.init_params(
    transformer.Transformer(config), jax.random.key(0)
  )
  tx = make_optimizer(clip_norm=None, weight_decay=0.5)
  zeros = jax.tree.map(jnp.zeros_like, params)
  updates, _ = tx.update(zeros, tx.init(params), params)

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
  for bad in (
    {'temperature_per_role': (0.0, 1.0)},
    {'policy_weight_per_role': (1.0,)},
    {'kl_weight_per_role': (-1.0, 0.0)},
    {'clip_low': 1.5},
    {'nll_weight': -1.0},
    {'microbatches': 0},
  ):
    with pytest.raises(ValueError, match=next(iter(bad))):
      dataclasses.replace(BASE, **bad)
  assert (
    types.Role.REHEARSE
    not in dataclasses.replace(
      BASE, policy_weight_per_role=(1.0, 0.0)
    ).trained_roles
  )
