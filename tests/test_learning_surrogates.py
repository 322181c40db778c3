"""Surrogates against tables worked by hand, and their gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envace_jax.learning import accumulation, losses, objective, surrogates
from envace_jax.learning import batch as batches
from envace_jax.learning.surrogates import Bounds, Surrogate
from envace_jax.types import Author

LN = np.log
PPO = Bounds(low=0.2, high=0.2)
# Runs of True: row 0 {1, 2} {4}; row 1 {0, 1, 2}; row 2 {5}; row 3 none.
MASK_BT = np.array(
  [
    [0, 1, 1, 0, 1, 0],
    [1, 1, 1, 0, 0, 0],
    [0, 0, 0, 0, 0, 1],
    [0, 0, 0, 0, 0, 0],
  ],
  bool,
)


def objective_and_gradient(ratio_T, adv_T, bounds, surrogate, weight_T=None):
  """Minus the loss of a row of tokens, one by one, and d / d logp."""
  logp_1T = jnp.asarray(LN(np.asarray(ratio_T, np.float32)))[None] - 1.0
  adv_1T = jnp.asarray(adv_T, jnp.float32)[None]
  mask_1T = jnp.ones(logp_1T.shape, bool)
  behaviour_1T = jnp.full(logp_1T.shape, -1.0)
  weight_1T = None if weight_T is None else jnp.asarray(weight_T)[None]

  def value(logp_1T, mask_1T):
    loss, metrics = surrogates.policy_gradient(
      logp_1T, behaviour_1T, adv_1T, mask_1T,
      bounds=bounds, surrogate=surrogate, weight_BT=weight_1T,
    )  # fmt: skip
    return -loss.total, metrics

  each = [
    float(value(logp_1T, only_T[None])[0])
    for only_T in np.eye(logp_1T.shape[1], dtype=bool)
  ]
  grad_1T, metrics = jax.grad(value, has_aux=True)(logp_1T, mask_1T)
  return each, np.asarray(grad_1T[0]), metrics


def test_clip_higher_lets_a_good_token_grow_further():
  # DAPO (arXiv 2503.14476) eq. 10: clip at 1 - 0.2 and 1 + 0.28. By hand:
  #   ratio, A     symmetric 0.2     clip-higher 0.28
  #   1.25, 2      2.4, grad 0       2.5, grad 2.5
  #   1.30, 2      2.4, grad 0       2.56, grad 0
  #   0.70, -1     -0.8, grad 0      -0.8, grad 0
  ratio_T, adv_T = [1.25, 1.30, 0.70], [2.0, 2.0, -1.0]
  each, grad_T, _ = objective_and_gradient(ratio_T, adv_T, PPO, Surrogate.TOKEN)
  np.testing.assert_allclose(each, [2.4, 2.4, -0.8], rtol=1e-6)
  np.testing.assert_allclose(grad_T, [0, 0, 0])
  higher = Bounds(low=0.2, high=0.28)
  each, grad_T, metrics = objective_and_gradient(
    ratio_T, adv_T, higher, Surrogate.TOKEN
  )
  np.testing.assert_allclose(each, [2.5, 2.56, -0.8], rtol=1e-6)
  np.testing.assert_allclose(grad_T, [2.5, 0, 0], rtol=1e-6)
  assert metrics['clip_fraction'].total == 2


def test_dual_clip_bounds_what_a_bad_token_may_cost():
  # Ye et al. 2020 (arXiv 1912.09729) eq. 5, c = 3. By hand:
  #   ratio, A     PPO              dual
  #   5.0, -2      -10, grad -10    -6, grad 0
  #   2.5, -2      -5, grad -5      -5, grad -5
  #   0.5, -2      -1.6, grad 0     -1.6, grad 0
  #   5.0, +2      2.4, grad 0      2.4, grad 0
  ratio_T, adv_T = [5.0, 2.5, 0.5, 5.0], [-2.0, -2.0, -2.0, 2.0]
  each, grad_T, metrics = objective_and_gradient(
    ratio_T, adv_T, PPO, Surrogate.TOKEN
  )
  np.testing.assert_allclose(each, [-10, -5, -1.6, 2.4], rtol=1e-6)
  np.testing.assert_allclose(grad_T, [-10, -5, 0, 0], rtol=1e-6)
  assert 'dual_clip_fraction' not in metrics
  each, grad_T, metrics = objective_and_gradient(
    ratio_T, adv_T, dataclasses.replace(PPO, dual=3.0), Surrogate.TOKEN
  )
  np.testing.assert_allclose(each, [-6, -5, -1.6, 2.4], rtol=1e-6)
  np.testing.assert_allclose(grad_T, [0, -5, 0, 0], rtol=1e-6)
  assert metrics['dual_clip_fraction'].total == 1


def test_sequence_ratio_is_the_geometric_mean_of_a_generation():
  # GSPO (arXiv 2507.18071) eq. 7: s = exp(mean log ratio). By hand, clip 0.2:
  #   row 0  ratios 2, 8 -> s = 4; A = 1: clipped, 1.2 per token, grad 0
  #          ratio 1.1 alone -> s = 1.1, A = 1: 1.1, grad 1.1
  #   row 1  ratios 1, 2, 4 -> s = 2; A = -1: -2 per token, grad -2 each
  #   row 2  ratio 0.5 -> A = -3: clipped at 0.8, -2.4, grad 0
  ratio_BT = np.ones((4, 6))
  ratio_BT[0, [1, 2, 4]] = 2, 8, 1.1
  ratio_BT[1, :3] = 1, 2, 4
  ratio_BT[2, 5] = 0.5
  adv_BT = np.tile(np.array([[1.0], [-1.0], [-3.0], [7.0]]), (1, 6))

  def value(logp_BT):
    loss, metrics = surrogates.policy_gradient(
      logp_BT, jnp.zeros((4, 6)), adv_BT, MASK_BT,
      bounds=PPO, surrogate=Surrogate.SEQUENCE,
    )  # fmt: skip
    return -loss.total, metrics

  (total, metrics), grad_BT = jax.value_and_grad(value, has_aux=True)(
    jnp.asarray(LN(ratio_BT))
  )
  np.testing.assert_allclose(total, 2 * 1.2 + 1.1 - 3 * 2 - 2.4, rtol=1e-6)
  expected_BT = np.zeros((4, 6))
  expected_BT[0, 4], expected_BT[1, :3] = 1.1, -2
  np.testing.assert_allclose(grad_BT, expected_BT, rtol=1e-6)
  assert metrics['clip_fraction'].total == 3
  np.testing.assert_allclose(
    metrics['ratio'].total, 4 + 4 + 1.1 + 3 * 2 + 0.5, rtol=1e-6
  )


def test_cispo_bounds_the_weight_and_silences_nobody():
  # CISPO (arXiv 2506.13585) eq. 4-5: sg(clip(rho, 0.8, 1.2)) A log pi. By hand,
  # grad = clip(rho) A for every token.
  ratio_T, adv_T = [5.0, 1.1, 0.1, 5.0], [2.0, 2.0, -1.0, -3.0]
  each, grad_T, metrics = objective_and_gradient(
    ratio_T, adv_T, dataclasses.replace(PPO, dual=3.0), Surrogate.CISPO
  )
  weight_T = np.array([1.2, 1.1, 0.8, 1.2])
  np.testing.assert_allclose(grad_T, weight_T * adv_T, rtol=1e-6)
  logp_T = LN(ratio_T) - 1
  np.testing.assert_allclose(each, weight_T * adv_T * logp_T, rtol=1e-5)
  assert metrics['clip_fraction'].total == 3


@pytest.mark.parametrize('surrogate', Surrogate)
def test_importance_weights_are_truncated_constant_factors(surrogate):
  # min(pi_trainer / pi_sampler, C), C = 2; by hand 3 -> 2, 0.5 -> 0.5, 1 -> 1.
  proximal_BT = jnp.asarray(LN([[3.0, 0.5, 1.0]])) - 2.0
  mask_BT = jnp.ones((1, 3), bool)
  weigh = lambda x: surrogates.truncated_weights(
    x, jnp.full((1, 3), -2.0), mask_BT, cap=2.0
  )
  weight_BT, metrics = weigh(proximal_BT)
  np.testing.assert_allclose(weight_BT, [[2, 0.5, 1]], rtol=1e-6)
  assert metrics['importance_capped'].total == 1
  np.testing.assert_allclose(metrics['importance_weight'].mean(), 3.5 / 3)
  pull = jax.grad(lambda x: weigh(x)[0].sum())(proximal_BT)
  np.testing.assert_array_equal(pull, np.zeros((1, 3)))
  # The factor multiplies each token's value and gradient; A differ in sign.
  ratio_T, adv_T, weight_T = [1.1, 1.1, 1.1], [1.0, -2.0, 3.0], [2, 0.5, 1]
  each, grad_T, _ = objective_and_gradient(ratio_T, adv_T, PPO, surrogate)
  weighted, weighted_T, _ = objective_and_gradient(
    ratio_T, adv_T, PPO, surrogate, weight_T
  )
  np.testing.assert_allclose(weighted, np.multiply(each, weight_T), rtol=1e-6)
  if surrogate is Surrogate.SEQUENCE:
    # One generation: each token's gradient is the mean of the three.
    mean = 1.1 * np.multiply(adv_T, weight_T).mean()
    np.testing.assert_allclose(weighted_T, [mean] * 3, rtol=1e-6)
  else:
    np.testing.assert_allclose(weighted_T, grad_T * weight_T, rtol=1e-6)


def reference(logp_BT, behaviour_BT, adv_BT, mask_BT, bounds, surrogate):
  """The surrogate in float64, one generation after another."""
  total = 0.0
  for b in range(len(mask_BT)):
    runs, run = [], []
    for t in range(mask_BT.shape[1] + 1):
      if t < mask_BT.shape[1] and mask_BT[b, t]:
        run.append(t)
      elif run:
        runs, run = [*runs, run], []
    for run in runs:
      delta = [logp_BT[b, t] - behaviour_BT[b, t] for t in run]
      if surrogate is Surrogate.SEQUENCE:
        delta = [sum(delta) / len(run)] * len(run)
      for t, d in zip(run, delta, strict=True):
        ratio, adv = np.exp(d), adv_BT[b, t]
        bounded = min(max(ratio, 1 - bounds.low), 1 + bounds.high)
        term = min(ratio * adv, bounded * adv)
        total += max(term, bounds.dual * adv) if adv < 0 else term
  return -total


@pytest.mark.parametrize('surrogate', [Surrogate.TOKEN, Surrogate.SEQUENCE])
def test_gradient_is_the_finite_difference_of_a_second_implementation(
  surrogate,
):
  rng = np.random.default_rng(0)
  logp_BT = -np.abs(rng.normal(size=(4, 6)))
  behaviour_BT = logp_BT + 0.7 * rng.normal(size=(4, 6))
  adv_BT = rng.normal(size=(4, 6))
  bounds = Bounds(low=0.2, high=0.3, dual=1.5)
  rest = (behaviour_BT, adv_BT, MASK_BT, bounds, surrogate)

  def value(x_BT):
    return surrogates.policy_gradient(
      x_BT, behaviour_BT, adv_BT, MASK_BT, bounds=bounds, surrogate=surrogate
    )[0].total

  np.testing.assert_allclose(
    value(logp_BT), reference(logp_BT, *rest), rtol=1e-5
  )
  grad_BT = jax.grad(value)(jnp.asarray(logp_BT, jnp.float32))
  for b, t in np.ndindex(4, 6):
    h_BT = np.zeros((4, 6))
    h_BT[b, t] = 1e-6
    up, down = (reference(logp_BT + s * h_BT, *rest) for s in (1, -1))
    np.testing.assert_allclose(grad_BT[b, t], (up - down) / 2e-6, atol=1e-4)
  assert (np.asarray(grad_BT)[~MASK_BT] == 0).all()


@pytest.mark.parametrize('surrogate', Surrogate)
def test_on_policy_every_surrogate_has_the_gradient_of_the_plain_one(surrogate):
  rng = np.random.default_rng(1)
  logp_BT = -np.abs(rng.normal(size=(4, 6))).astype(np.float32)
  # One advantage per row: a generation has one author.
  adv_BT = np.tile(rng.normal(size=(4, 1)), (1, 6)).astype(np.float32)
  bounds = Bounds(low=0.0, high=0.0, dual=3.0)
  grad_BT = jax.grad(
    lambda x_BT: (
      surrogates.policy_gradient(
        x_BT, logp_BT, adv_BT, MASK_BT, bounds=bounds, surrogate=surrogate
      )[0].total
    )
  )(logp_BT)
  expected_BT = np.where(MASK_BT, -adv_BT, 0)
  np.testing.assert_allclose(grad_BT, expected_BT, rtol=1e-6)


@pytest.mark.parametrize('surrogate', Surrogate)
@pytest.mark.parametrize('gap', [80.0, -80.0, 200.0, -200.0])
@pytest.mark.parametrize('sign', [1.0, -1.0])
@pytest.mark.parametrize('dual', [None, 3.0])
def test_a_ratio_of_e_to_the_80_or_200_is_finite(surrogate, gap, sign, dual):
  behaviour_BT = np.where(MASK_BT, -1.0, np.nan).astype(np.float32)

  def value(logp_BT):
    weight_BT, _ = surrogates.truncated_weights(
      logp_BT, behaviour_BT, MASK_BT, cap=2.0
    )
    loss, metrics = surrogates.policy_gradient(
      logp_BT, behaviour_BT, np.full((4, 6), sign), MASK_BT,
      bounds=Bounds(low=0.2, high=0.2, dual=dual), surrogate=surrogate,
      weight_BT=weight_BT,
    )  # fmt: skip
    return loss.total, metrics

  logp_BT = jnp.where(MASK_BT, behaviour_BT + gap, -np.inf)
  (total, metrics), grad_BT = jax.value_and_grad(value, has_aux=True)(logp_BT)
  assert jnp.isfinite(total) and jnp.isfinite(grad_BT).all()
  assert (np.asarray(grad_BT)[~MASK_BT] == 0).all()
  assert metrics['ratio_overflow'].mean() == 1
  if gap > 0 and sign < 0 and dual:
    # At most c x weight per token, or CISPO's 1.2 x |log p| x weight.
    bound = 1.2 * (gap - 1) if surrogate is Surrogate.CISPO else dual
    assert abs(total) <= 2 * bound * MASK_BT.sum() * 1.001


@pytest.mark.parametrize('surrogate', Surrogate)
@pytest.mark.parametrize('garbage', [np.nan, np.inf, -np.inf, -1e30])
def test_masked_positions_reach_neither_value_nor_gradient(surrogate, garbage):
  rng = np.random.default_rng(2)
  clean = [rng.normal(size=(4, 6)).astype(np.float32) for _ in range(4)]
  dirty = [np.where(MASK_BT, x, np.float32(garbage)) for x in clean]

  def value(logp_BT, behaviour_BT, adv_BT, weight_BT):
    return surrogates.policy_gradient(
      logp_BT, behaviour_BT, adv_BT, MASK_BT,
      bounds=Bounds(low=0.2, high=0.2, dual=3.0),
      surrogate=surrogate, weight_BT=weight_BT,
    )[0].total  # fmt: skip

  expected, expected_BT = jax.value_and_grad(value)(*clean)
  got, got_BT = jax.value_and_grad(value)(*dirty)
  assert got == expected
  np.testing.assert_array_equal(got_BT, expected_BT)
  assert (np.asarray(got_BT)[~MASK_BT] == 0).all()


def table_batch():
  """Eight rows, two of them short, whose policy is a table of log-probs."""
  rng = np.random.default_rng(3)
  cycle = np.array([0, 2, 2, 1, 3, 3, 3, 1, 2, 4], np.int32)
  lengths_B = np.array([10, 4, 7, 10, 9, 0, 10, 6], np.int32)
  authors_BT = np.tile(cycle, (8, 1))
  logprobs_BT = (-3 + 0.3 * rng.normal(size=(8, 10))).astype(np.float32)
  return batches.TrainBatch(
    tokens=rng.integers(0, 5, (8, 10)).astype(np.int32),
    authors=authors_BT,
    logprobs=logprobs_BT,
    advantages=batches.advantage_per_token(authors_BT, rng.normal(size=(8, 2))),
    positions=np.tile(np.arange(10, dtype=np.int32), (8, 1)),
    lengths=lengths_B,
    proximal_logprobs=logprobs_BT + 0.1,
  )


@pytest.fixture
def table_policy(monkeypatch):
  """loss(params, rows, divisors, config): log p(token) = params[token]."""

  def score(model, params, tokens_BT, *args, **kwargs):
    logp_BT = params[tokens_BT]
    return objective.logprobs.TokenLogprobs(logp_BT, 0 * logp_BT)

  monkeypatch.setattr(objective.logprobs, 'token_logprobs', score)
  return lambda params, rows, divisors, config: objective.policy_loss(
    None, params, None, rows, divisors, config
  )


TABLE = jnp.asarray([-3.1, -2.8, -3.3, -2.5, -3.0])


@pytest.mark.parametrize('surrogate', Surrogate)
@pytest.mark.parametrize('buckets', [(), (5, 7)])
def test_microbatches_are_the_whole_batch(table_policy, surrogate, buckets):
  batch = table_batch()

  def run(microbatches, row_buckets):
    config = objective.LossConfig(
      surrogate=surrogate,
      importance_cap=1.05,
      microbatches=microbatches,
      row_buckets=row_buckets,
    )
    divisors = objective.policy_denominators(batch, config)
    loss_fn = lambda params, rows: table_policy(params, rows, divisors, config)
    return accumulation.accumulate(loss_fn, TABLE, batch, config)

  one, many = run(1, ()), run(8, buckets)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6),
    one,
    many,
  )
  assert 0 < one[1]['clip_fraction/act'].total
  assert 0 < one[1]['importance_capped/act'].total


@pytest.mark.parametrize('surrogate', Surrogate)
def test_the_weight_of_a_role_is_the_scale_of_its_advantages(
  table_policy, surrogate
):
  """So there is one switch, and not two that do the same."""
  batch = table_batch()
  config = objective.LossConfig(surrogate=surrogate, dual_clip=3.0)
  divisors = objective.policy_denominators(batch, config)

  def gradient(batch, **changes):
    changed = dataclasses.replace(config, **changes)
    return jax.grad(
      lambda params: table_policy(params, batch, divisors, changed)[0]
    )(TABLE)

  scaled = lambda factor: batch.replace(
    advantages=batch.advantages
    * np.where(batch.authors == Author.REHEARSE, np.float32(factor), 1)
  )
  weighted = gradient(batch, policy_weight_per_role=(1.0, 0.25))
  np.testing.assert_allclose(weighted, gradient(scaled(0.25)), rtol=1e-5)
  # Against the actor: the advantage changes sign, not the clipped loss.
  held = {'nll_weight': 1.0}
  against = gradient(batch, policy_weight_per_role=(1.0, -0.5), **held)
  np.testing.assert_allclose(against, gradient(scaled(-0.5)), rtol=1e-5)
  with pytest.raises(ValueError, match='anchor or a KL weight'):
    dataclasses.replace(config, policy_weight_per_role=(1.0, -0.5))
  with pytest.raises(ValueError, match='only rehearse'):
    dataclasses.replace(config, policy_weight_per_role=(-1.0, 1.0), **held)


def test_importance_weights_move_the_mismatch_out_of_the_ratio(table_policy):
  batch = table_batch()
  config = objective.LossConfig(importance_cap=1.05)
  divisors = objective.policy_denominators(batch, config)
  _, sums = table_policy(TABLE, batch, divisors, config)
  for name, author in (('act', Author.ACT), ('rehearse', Author.REHEARSE)):
    mask_BT = np.asarray(batches.loss_mask(batch, (author,)))
    ratio = np.exp((TABLE[batch.tokens] - batch.proximal_logprobs)[mask_BT])
    np.testing.assert_allclose(
      sums[f'ratio/{name}'].mean(), ratio.mean(), rtol=1e-5
    )
    # exp(0.1) = 1.105 everywhere, above the cap.
    np.testing.assert_allclose(
      sums[f'importance_weight/{name}'].mean(), 1.05, rtol=1e-6
    )
  with pytest.raises(ValueError, match='proximal_logprobs'):
    table_policy(TABLE, batch.replace(proximal_logprobs=None), divisors, config)


def test_settings_that_cannot_work_are_refused():
  for bad in ({'dual_clip': 1.0}, {'importance_cap': 0.5}):
    with pytest.raises(ValueError, match=next(iter(bad))):
      objective.LossConfig(**bad)


def test_generation_means_by_hand():
  values = jnp.asarray([[9.0, 2.0, 4.0, 9.0, 5.0, 9.0]])
  mask = jnp.asarray([[False, True, True, False, True, False]])
  np.testing.assert_array_equal(
    surrogates.generation_means(values, mask), [[0, 3, 3, 0, 5, 0]]
  )
  assert losses.masked_sum(values, mask).total == 11
