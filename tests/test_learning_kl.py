"""KL estimators: hand numbers, what their gradients pull to, memory."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envace_jax.learning import batch as batches
from envace_jax.learning import kl, objective
from envace_jax.model import logprobs
from envace_jax.types import Role

LENGTHS = np.array([9, 4, 6])
VALID_BT = np.arange(9)[None, :] < LENGTHS[:, None]


@pytest.mark.parametrize(
  'estimate, expected',
  [
    # p = (3/4, 1/4), ref = (1/2, 1/2); d = ln 2/3, ln 2. By hand from
    # http://joschu.net/blog/kl-approx.html:
    (kl.k1, (0.405465, -0.693147)),
    (kl.k2, (0.082201, 0.240227)),
    (kl.k3, (0.072132, 0.306853)),
  ],
)
def test_estimates_by_hand(estimate, expected):
  logp_1V, ref_1V = (
    jnp.log(jnp.asarray([x])) for x in ((0.75, 0.25), (0.5, 0.5))
  )
  for token in range(2):
    only_1V = np.eye(2, dtype=bool)[token][None]
    got = estimate(logp_1V, ref_1V, only_1V)
    np.testing.assert_allclose(got.total, expected[token], atol=1e-6)
    assert got.count == 1
  # 3/4 ln 3/2 + 1/4 ln 1/2: exact, and the mean of the unbiased two.
  exact = logprobs.kl_divergence(logp_1V[None], ref_1V[None])
  np.testing.assert_allclose(exact, [[0.130812]], atol=1e-6)
  if estimate is not kl.k2:
    mean = 0.75 * expected[0] + 0.25 * expected[1]
    np.testing.assert_allclose(mean, 0.130812, atol=1e-6)


def expected_gradient(estimate, logits_V, ref_V):
  """sum_v p(v) d estimate(v) / d logits, p held fixed: on-policy sampling."""
  p_V = jax.nn.softmax(logits_V)

  def mean(logits_V):
    logp_1V = jax.nn.log_softmax(logits_V)[None]
    each = [
      estimate(logp_1V, ref_V[None], only_1V).total
      for only_1V in np.eye(len(ref_V), dtype=bool)[:, None]
    ]
    return jnp.sum(p_V * jnp.stack(each))

  return jax.grad(mean)(logits_V)


def test_what_each_estimator_pulls_towards_as_a_loss():
  rng = np.random.default_rng(0)
  logits_V = jnp.asarray(rng.normal(size=5), jnp.float32)
  ref_V = jax.nn.log_softmax(jnp.asarray(rng.normal(size=5), jnp.float32))
  p_V, q_V = jax.nn.softmax(logits_V), jnp.exp(ref_V)
  log_ratio_V = jnp.log(p_V) - ref_V
  # Analytic, for softmax logits: grad KL(p||q) = p (log p/q - KL), and
  # grad KL(q||p) = p - q.
  reverse_V = p_V * (log_ratio_V - jnp.sum(p_V * log_ratio_V))
  close = lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6)
  close(expected_gradient(kl.k1, logits_V, ref_V), np.zeros(5))
  close(expected_gradient(kl.k2, logits_V, ref_V), reverse_V)
  close(expected_gradient(kl.k3, logits_V, ref_V), p_V - q_V)
  exact_V = jax.grad(
    lambda x_V: logprobs.kl_divergence(jax.nn.log_softmax(x_V), ref_V)
  )(logits_V)
  close(exact_V, reverse_V)


@pytest.mark.parametrize('estimate', kl.SAMPLED.values())
@pytest.mark.parametrize('gap', [80.0, -80.0, 200.0, -200.0])
def test_a_gap_of_80_or_200_nats_is_finite_and_masked_slots_are_silent(
  estimate, gap
):
  mask_BT = VALID_BT & (np.arange(9)[None, :] % 2 == 1)
  ref_BT = np.where(mask_BT, -1.0 + gap, np.nan).astype(np.float32)
  logp_BT = jnp.where(mask_BT, -1.0, -np.inf)
  value = lambda x_BT: estimate(x_BT, ref_BT, mask_BT).total
  total, grad_BT = jax.value_and_grad(value)(logp_BT)
  assert jnp.isfinite(total) and jnp.isfinite(grad_BT).all()
  assert (np.asarray(grad_BT)[~mask_BT] == 0).all()
  if estimate is kl.k2:
    # 20^2 / 2 + 20 x (gap - 20) per token, and a pull of 20 back.
    each = 200 + 20 * (abs(gap) - 20)
    np.testing.assert_allclose(total, each * mask_BT.sum(), rtol=1e-6)
    pull = -np.sign(gap) * 20
    np.testing.assert_allclose(grad_BT[mask_BT], pull, rtol=1e-6)


def shifted(params):
  rng = np.random.default_rng(1)
  shift = lambda x: x + 0.1 * rng.normal(size=x.shape).astype(np.float32)
  return jax.tree.map(shift, params)


def test_exact_kl_in_chunks_equals_all_logits_with_gradients(make_model):
  model, params, _ = make_model(num_layers=1, d_model=16)
  ref_params = shifted(params)
  rng = np.random.default_rng(2)
  tokens_BT = rng.integers(0, 64, (3, 9)).astype(np.int32)
  temperature_BT = rng.uniform(0.5, 1.5, (3, 9)).astype(np.float32)
  weight_BT = rng.normal(size=(3, 9)).astype(np.float32)

  def log_softmax(params):
    hidden_BTD, _ = model.apply({'params': params}, tokens_BT)
    logits_BTV = model.apply({'params': params}, hidden_BTD, method='unembed')
    logits_BTV = logits_BTV[:, :-1] / temperature_BT[:, 1:, None]
    return logits_BTV - jax.nn.logsumexp(logits_BTV, -1, keepdims=True)

  def naive(params):
    logp_BTV, ref_BTV = log_softmax(params), log_softmax(ref_params)
    kl_BT = (jnp.exp(logp_BTV) * (logp_BTV - ref_BTV)).sum(-1)
    kl_BT = jnp.pad(kl_BT, ((0, 0), (1, 0)))
    kl_BT = jnp.where(VALID_BT, kl_BT, 0)
    return (weight_BT * kl_BT).sum(), kl_BT

  def chunked(params):
    _, kl_BT = logprobs.token_logprobs_and_kl(
      model, params, ref_params, tokens_BT, VALID_BT, temperature_BT, chunk=3
    )
    return (weight_BT * kl_BT).sum(), kl_BT

  run = lambda f: jax.jit(jax.value_and_grad(f, has_aux=True))(params)
  ((_, expected_BT), expected), ((_, kl_BT), grads) = run(naive), run(chunked)
  np.testing.assert_allclose(kl_BT, expected_BT, rtol=1e-4, atol=1e-6)
  assert (np.asarray(kl_BT)[~VALID_BT] == 0).all()
  assert (np.asarray(kl_BT)[VALID_BT][1:] >= 0).all() and kl_BT.max() > 1e-3
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5), grads, expected
  )


def test_exact_kl_never_holds_all_logits(make_model):
  # 67 is the size of nothing but the vocabulary.
  model, params, _ = make_model(vocab_size=67, num_layers=1)
  ref_params = shifted(params)
  tokens_BT = np.zeros((3, 33), np.int32)

  def loss(params):
    scored, kl_BT = logprobs.token_logprobs_and_kl(
      model, params, ref_params, tokens_BT, chunk=4
    )
    return jnp.sum(scored.logprob + kl_BT)

  text = str(jax.make_jaxpr(jax.grad(loss))(params))
  shapes = {
    tuple(map(int, dims.split(',')))
    for dims in re.findall(r'f32\[([\d,]+)\]', text)
  }
  logits = {shape for shape in shapes if 67 in shape and len(shape) > 2}
  assert (3, 4, 67) in logits
  assert max(int(np.prod(shape)) for shape in logits) == 3 * 4 * 67


@pytest.mark.parametrize('estimator', kl.KLEstimator)
def test_the_objective_uses_the_estimator_it_is_told_to(monkeypatch, estimator):
  rng = np.random.default_rng(3)
  logp_BT, ref_BT, exact_BT = -1 - rng.uniform(size=(3, 3, 9))
  logp_BT, ref_BT = jnp.asarray(logp_BT), jnp.asarray(ref_BT)
  scores = {'policy': logp_BT, 'reference': ref_BT}
  scored = lambda name: logprobs.TokenLogprobs(scores[name], 0 * logp_BT)
  monkeypatch.setattr(
    logprobs, 'token_logprobs', lambda m, name, *a, **k: scored(name)
  )
  monkeypatch.setattr(
    logprobs,
    'token_logprobs_and_kl',
    lambda m, name, ref, *a, **k: (scored(name), jnp.asarray(exact_BT)),
  )
  rows = batches.TrainBatch(
    tokens=np.zeros((3, 9), np.int32),
    authors=np.tile(np.array([0, 2, 2, 1, 3, 3, 1, 2, 4], np.int32), (3, 1)),
    logprobs=np.asarray(logp_BT, np.float32),
    advantages=np.zeros((3, 9), np.float32),
    positions=np.tile(np.arange(9, dtype=np.int32), (3, 1)),
    lengths=LENGTHS.astype(np.int32),
  )
  config = objective.LossConfig(
    kl_weight_per_role=(0.5, 2.0), kl_estimator=estimator
  )
  divisors = objective.policy_denominators(rows, config)
  value, sums = objective.policy_loss(
    None, 'policy', 'reference', rows, divisors, config
  )
  d_BT = np.asarray(ref_BT - logp_BT, np.float64)
  each_BT = {
    kl.KLEstimator.K1: -d_BT,
    kl.KLEstimator.K2: d_BT**2 / 2,
    kl.KLEstimator.K3: np.exp(d_BT) - 1 - d_BT,
    kl.KLEstimator.EXACT: exact_BT,
  }[estimator]
  masks = {role: np.asarray(batches.role_mask(rows, role)) for role in Role}
  total = {role: each_BT[masks[role]].sum() for role in Role}
  count = sum(mask.sum() for mask in masks.values())
  np.testing.assert_allclose(
    value, (0.5 * total[Role.ACT] + 2 * total[Role.REHEARSE]) / count, rtol=1e-4
  )
  np.testing.assert_allclose(sums['kl/act'].total, total[Role.ACT], rtol=1e-4)
