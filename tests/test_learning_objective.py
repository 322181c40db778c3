"""The objective: its formula, and who has a say in it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envace_jax.learning import batch as batches
from envace_jax.learning import objective, surrogates
from envace_jax.model import logprobs
from envace_jax.types import Author, Role

VOCAB = 64
LENGTHS = np.array([12, 5, 9, 12, 7, 3, 10, 0])
BASE = objective.LossConfig(logprob_chunk=5)


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


@pytest.fixture(scope='module')
def lab(tiny_model):
  """(policy_loss, by_definition) of one model and reference, compiled once."""
  model, params, _ = tiny_model
  rng = np.random.default_rng(0)
  shift = lambda x: x + 0.1 * rng.normal(size=x.shape).astype(np.float32)
  ref_params = jax.tree.map(shift, params)

  # The divisors are arguments: one program serves every normaliser.
  @jax.jit
  def loss(params, ref_params, rows, divisors):
    return objective.policy_loss(
      model, params, ref_params, rows, divisors, FULL
    )

  @jax.jit
  def logits(params, tokens_BT):
    hidden_BTD, _ = model.apply({'params': params}, tokens_BT)
    return model.apply({'params': params}, hidden_BTD, method='unembed')

  def policy_loss(rows, config=FULL):
    divisors = objective.policy_denominators(rows, config)
    return loss(params, ref_params, rows, divisors)

  def by_definition(rows, temperature, *, of_reference=False):
    """From all logits, one temperature for all tokens."""
    scores_BTV = logits(ref_params if of_reference else params, rows.tokens)
    logp_BTV = np.asarray(jax.nn.log_softmax(scores_BTV / temperature))
    logp_BT1 = np.take_along_axis(
      logp_BTV[:, :-1], rows.tokens[:, 1:, None], axis=-1
    )
    return np.pad(logp_BT1[..., 0], ((0, 0), (1, 0)))

  return policy_loss, by_definition


def assert_close(a, b, **tolerance):
  tolerance = {'rtol': 1e-4, 'atol': 1e-6} | tolerance
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), a, b)


def score_gradient(monkeypatch, loss, batch, config):
  """d loss / d logprob_BT, with the model replaced by given scores."""
  scores_BT = jnp.asarray(-4.0 - np.sin(np.arange(96.0)).reshape(8, 12))

  def value(logp_BT):
    scored = logprobs.TokenLogprobs(logp_BT, jnp.zeros_like(logp_BT))
    monkeypatch.setattr(logprobs, 'token_logprobs', lambda *a, **k: scored)
    return loss(batch, config)[0]

  return np.asarray(jax.grad(value)(scores_BT))


def policy_loss(batch, config):
  divisors = objective.policy_denominators(batch, config)
  return objective.policy_loss(None, None, None, batch, divisors, config)


def supervised_loss(batch, config):
  divisors = objective.supervised_denominators(batch, config)
  return objective.supervised_loss(None, None, batch, divisors, config)


def anchor_loss(batch, config):
  divisor = objective.anchor_denominator(batch, config)
  return objective.anchor_loss(None, None, batch, divisor, config)


@pytest.mark.parametrize(
  'loss, changes, authors',
  [
    (policy_loss, {}, {Author.ACT, Author.REHEARSE}),
    (policy_loss, {'policy_weight_per_role': (1.0, 0.0)}, {Author.ACT}),
    (policy_loss, {'policy_weight_per_role': (0.0, 1.0)}, {Author.REHEARSE}),
    *(
      (policy_loss, {**changes, 'policy_weight_per_role': weights}, authors)
      for changes in (
        {'surrogate': surrogates.Surrogate.SEQUENCE},
        {'surrogate': surrogates.Surrogate.CISPO},
        {'dual_clip': 1e6, 'importance_cap': 2.0},
      )
      for weights, authors in (
        ((1.0, 0.0), {Author.ACT}),
        ((0.0, 1.0), {Author.REHEARSE}),
      )
    ),
    (supervised_loss, {}, {Author.ACT, Author.REHEARSE, Author.WORLD}),
    (
      supervised_loss,
      {'supervised_weight_per_role': (0.0, 1.0)},
      {Author.REHEARSE, Author.WORLD},
    ),
    (anchor_loss, {'nll_weight': 0.3}, {Author.WORLD}),
  ],
)
def test_only_tokens_of_trained_authors_have_a_gradient(
  monkeypatch, loss, changes, authors
):
  batch = make_batch(world=True)
  batch = batch.replace(proximal_logprobs=batch.logprobs + np.float32(0.1))
  config = dataclasses.replace(BASE, clip_low=1.0, clip_high=1e3, **changes)
  grad_BT = score_gradient(monkeypatch, loss, batch, config)
  position_T = np.arange(12)
  expected_BT = (
    np.isin(batch.authors, [int(author) for author in authors])
    & (position_T[None, :] < LENGTHS[:, None])
    & (position_T[None, :] > 0)
  )
  np.testing.assert_array_equal(grad_BT != 0, expected_BT)


@pytest.mark.parametrize('normalizer', list(objective.Normalizer))
def test_the_loss_is_the_documented_formula(lab, normalizer):
  config = dataclasses.replace(FULL, normalizer=normalizer)
  batch = make_batch()
  policy_loss, by_definition = lab
  value, sums = policy_loss(batch, config)
  count, loss = {}, {}
  for role in Role:
    tau = FULL.temperature_per_role[role]
    mask_BT = np.asarray(batches.role_mask(batch, role))
    logp = by_definition(batch, tau)[mask_BT]
    ref = by_definition(batch, tau, of_reference=True)[mask_BT]
    adv = batch.advantages[mask_BT]
    ratio = np.exp(logp - batch.logprobs[mask_BT])
    pg = -np.minimum(ratio * adv, np.clip(ratio, 0.8, 1.2) * adv)
    kl = np.exp(ref - logp) - 1 - (ref - logp)
    count[role] = mask_BT.sum()
    loss[role] = (
      FULL.policy_weight_per_role[role] * pg.sum()
      + FULL.kl_weight_per_role[role] * kl.sum()
    )
    name = role.name.lower()
    assert_close(sums[f'kl/{name}'].mean(), kl.mean())
    assert_close(sums[f'ratio/{name}'].mean(), ratio.mean())
  divisor = {
    objective.Normalizer.TOKEN: dict.fromkeys(Role, sum(count.values())),
    objective.Normalizer.ROLE_TOKEN: count,
    objective.Normalizer.ROW: dict.fromkeys(Role, 7),  # one row is empty
  }[normalizer]
  assert_close(value, sum(loss[r] / divisor[r] for r in Role))


def test_padding_changes_nothing(lab):
  def pad(x, fill, rows=8, columns=5):
    widths = ((0, rows), (0, columns))[: x.ndim]
    return np.pad(x, widths, constant_values=fill)

  batch = make_batch()
  padded = batch.replace(
    tokens=pad(batch.tokens, 11),
    authors=pad(batch.authors, Author.ACT),
    logprobs=pad(batch.logprobs, np.nan),
    advantages=pad(batch.advantages, 9.0),
    positions=np.tile(np.arange(17, dtype=np.int32), (16, 1)),
    lengths=pad(batch.lengths, 0),
  )
  for normalizer in objective.Normalizer:
    config = dataclasses.replace(FULL, normalizer=normalizer)
    expected, got = (lab[0](rows, config) for rows in (batch, padded))
    assert_close(got, expected, rtol=1e-5)


def test_on_policy_ratio_is_one_under_the_sampling_temperature(lab):
  policy_loss, by_definition = lab
  batch = make_batch()
  for role in Role:
    logp_BT = by_definition(batch, FULL.temperature_per_role[role])
    mask_BT = np.asarray(batches.role_mask(batch, role))
    batch = batch.replace(logprobs=np.where(mask_BT, logp_BT, batch.logprobs))
  _, sums = policy_loss(batch)
  _, untempered = policy_loss(batch.replace(logprobs=by_definition(batch, 1.0)))
  for name in ('act', 'rehearse'):
    assert_close(sums[f'ratio/{name}'].mean(), 1, atol=1e-5)
    assert_close(sums[f'behaviour_kl/{name}'].mean(), 0, atol=1e-6)
    assert sums[f'clip_fraction/{name}'].total == 0
    assert untempered[f'behaviour_kl/{name}'].mean() > 1e-3


def test_settings_that_cannot_work_are_refused():
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
    Role.REHEARSE
    not in dataclasses.replace(
      BASE, policy_weight_per_role=(1.0, 0.0)
    ).trained_roles
  )
