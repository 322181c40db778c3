"""What is recorded is what was sampled from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envace_jax.sampling import samplers

SETTINGS = [
  # temperature, top_k, top_p
  (1.0, 0, 1.0),
  (0.7, 0, 1.0),
  (1.5, 5, 1.0),
  (1.0, 0, 0.8),
  (2.0, 6, 0.7),
  (0.0, 0, 1.0),
  (0.0, 3, 0.5),
  (1.0, 1, 1.0),
]


def settings_for(rows):
  temperature, top_k, top_p = zip(*rows, strict=True)
  return (
    jnp.array(temperature, jnp.float32),
    jnp.array(top_k, jnp.int32),
    jnp.array(top_p, jnp.float32),
  )


def logits_for(num_rows, vocab=11, seed=0):
  generator = np.random.default_rng(seed)
  return jnp.asarray(2 * generator.normal(size=(num_rows, vocab)), jnp.float32)


def reference(logits_V, temperature, top_k, top_p):
  """The distribution by definition, one row, float64."""
  logits_V = np.asarray(logits_V, np.float64)
  if temperature == 0:
    return np.eye(len(logits_V))[logits_V.argmax()]
  prob_V = np.exp((logits_V - logits_V.max()) / temperature)
  order = np.argsort(-prob_V, kind='stable')[: top_k or None]
  mass = prob_V[order] / prob_V[order].sum()
  kept, total = [], 0.0
  for token, m in zip(order, mass, strict=True):
    if top_p < 1 and total >= top_p:
      break
    kept.append(token)
    total += m
  out_V = np.zeros_like(prob_V)
  out_V[kept] = prob_V[kept]
  return out_V / out_V.sum()


def test_distribution_is_the_definition_row_by_row():
  logits_BV = logits_for(len(SETTINGS))
  args = settings_for(SETTINGS)
  logp_BV = samplers.log_distribution(logits_BV, *args, filtered=True)
  for b, setting in enumerate(SETTINGS):
    np.testing.assert_allclose(
      np.exp(logp_BV[b]), reference(logits_BV[b], *setting), atol=1e-6
    )


@pytest.mark.parametrize('setting', SETTINGS)
def test_frequencies_match_probabilities(setting):
  n = 20_000
  logits_BV = jnp.broadcast_to(logits_for(1), (n, 11))
  args = settings_for([setting] * n)
  uniform_B = jax.random.uniform(jax.random.key(1), (n,))
  token_B, _ = samplers.sample(logits_BV, uniform_B, *args, filtered=True)
  expected_V = reference(logits_BV[0], *setting)
  count_V = np.bincount(token_B, minlength=11)
  assert (count_V[expected_V == 0] == 0).all()
  kept = expected_V > 0
  chi2 = (
    (count_V[kept] - n * expected_V[kept]) ** 2 / (n * expected_V[kept])
  ).sum()
  assert chi2 < kept.sum() + 5 * np.sqrt(2 * kept.sum())


def test_sampled_equals_rescored_and_the_fast_path_agrees():
  for filtered in (False, True):
    rows = [s if filtered else (s[0], 0, 1.0) for s in SETTINGS] * 40
    logits_BV = logits_for(len(rows), seed=2)
    args = settings_for(rows)
    uniform_B = jax.random.uniform(jax.random.key(3), (len(rows),))
    token_B, logprob_B = samplers.sample(
      logits_BV, uniform_B, *args, filtered=filtered
    )
    rescored_B = samplers.logprob_of(
      logits_BV, token_B, *args, filtered=filtered
    )
    assert token_B.dtype == jnp.int32 and logprob_B.dtype == jnp.float32
    np.testing.assert_array_equal(logprob_B, rescored_B)
    assert jnp.isfinite(logprob_B).all()
    if not filtered:
      slow = samplers.sample(logits_BV, uniform_B, *args, filtered=True)
      np.testing.assert_array_equal(slow[0], token_B)
      np.testing.assert_allclose(slow[1], logprob_B, atol=1e-6)


def test_greedy_is_argmax_with_logprob_zero_and_outlaws_the_rest():
  logits_BV = logits_for(4, seed=4)
  args = settings_for([(0.0, 0, 1.0)] * 4)
  uniform_B = jnp.array([0.0, 0.3, 0.9, 1.0])
  token_B, logprob_B = samplers.sample(
    logits_BV, uniform_B, *args, filtered=False
  )
  np.testing.assert_array_equal(token_B, logits_BV.argmax(1))
  np.testing.assert_array_equal(logprob_B, np.zeros(4))
  other_B = samplers.logprob_of(
    logits_BV, (token_B + 1) % 11, *args, filtered=False
  )
  assert (other_B == -jnp.inf).all()


@pytest.mark.parametrize('top_k, greedy_first', [(1, 1), (3, 3)])
def test_ties_keep_exactly_k_lowest_ids(top_k, greedy_first):
  logits_BV = jnp.zeros((3, 6))
  args = settings_for([(1.0, top_k, 1.0)] * 3)
  logp_BV = samplers.log_distribution(logits_BV, *args, filtered=True)
  expected_V = np.where(np.arange(6) < greedy_first, 1 / top_k, 0)
  np.testing.assert_allclose(np.exp(logp_BV), [expected_V] * 3, atol=1e-6)


def test_extreme_uniforms_never_pick_an_impossible_token():
  logits_BV = np.full((5, 4096), -np.inf, np.float32)
  logits_BV[:, 7:4000] = np.random.default_rng(5).normal(size=(5, 3993))
  below_one = np.nextafter(np.float32(1), np.float32(0))
  uniform_B = jnp.array([0.0, 1e-38, 0.5, below_one, 1.0], jnp.float32)
  for setting in [(1.0, 0, 1.0), (0.05, 0, 1.0), (1e-6, 0, 1.0), (9.0, 9, 0.9)]:
    token_B, logprob_B = samplers.sample(
      jnp.asarray(logits_BV), uniform_B, *settings_for([setting] * 5),
      filtered=True,
    )  # fmt: skip
    assert ((token_B >= 7) & (token_B < 4000)).all()
    assert jnp.isfinite(logprob_B).all()


@pytest.mark.parametrize('filtered', [False, True])
def test_broken_rows_are_visible_and_stay_alone(filtered):
  logits_BV = np.array(logits_for(7, seed=6))
  logits_BV[1, 3] = np.nan
  logits_BV[2] = -np.inf
  logits_BV[3, 0] = np.inf
  logits_BV[4] = np.nan
  logits_BV[5, 2] = np.nan
  args = settings_for([(1.0, 4, 0.9)] * 4 + [(0.0, 0, 1.0)] * 3)
  token_B, logprob_B = samplers.sample(
    jnp.asarray(logits_BV), jnp.full((7,), 0.6), *args, filtered=filtered
  )
  np.testing.assert_array_equal(np.isnan(logprob_B), [0, 1, 1, 1, 1, 1, 0])
  np.testing.assert_array_equal(token_B[1:6], np.zeros(5))


def test_uniforms_belong_to_row_and_position_not_to_layout():
  keys_B = jax.random.split(jax.random.key(7), 6)
  position_B = jnp.array([3, 0, 9, 3, 4, 5])
  all_B = samplers.uniform_for(keys_B, position_B)
  order = jnp.array([4, 1, 5])
  np.testing.assert_array_equal(
    samplers.uniform_for(keys_B[order], position_B[order]), all_B[order]
  )
  alone = jax.random.uniform(jax.random.fold_in(keys_B[2], 9))
  assert all_B[2] == alone
  many = samplers.uniform_for(
    jnp.broadcast_to(keys_B[:1], (4000,)), jnp.arange(4000)
  )
  assert len(np.unique(many)) > 3990
  np.testing.assert_allclose(many.mean(), 0.5, atol=0.02)
  assert (many >= 0).all() and (many < 1).all()


def test_sampler_config_validates():
  assert not samplers.SamplerConfig().filtered
  assert not samplers.SamplerConfig(temperature=0).filtered
  assert samplers.SamplerConfig(top_k=3).filtered
  assert samplers.SamplerConfig(top_p=0.9).filtered
  for bad in ({'temperature': -1}, {'top_k': -1}, {'top_p': 0}, {'top_p': 1.5}):
    with pytest.raises(ValueError, match=f'sampler.{next(iter(bad))}'):
      samplers.SamplerConfig(**bad)
