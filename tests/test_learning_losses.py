"""Losses: closed forms, and nothing enters through a masked position."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envace_jax import types
from envace_jax.learning import batch as batches
from envace_jax.learning import kl, losses, surrogates
from envace_jax.types import Author

BOUNDS = surrogates.Bounds(low=0.2, high=0.3)
LENGTHS = np.array([6, 3, 5])
MASK_BT = (np.arange(6)[None, :] < LENGTHS[:, None]) & (
  np.random.default_rng(0).uniform(size=(3, 6)) < 0.7
)


def random_BT(seed, scale=1.0):
  return scale * np.random.default_rng(seed).normal(size=(3, 6))


def inputs():
  logp_BT = -np.abs(random_BT(1)).astype(np.float32)
  behaviour_BT = (logp_BT + random_BT(2, 0.8)).astype(np.float32)
  return logp_BT, behaviour_BT, random_BT(3).astype(np.float32)


def policy_gradient(logp_BT, behaviour_BT, adv_BT, mask_BT=MASK_BT):
  return surrogates.policy_gradient(
    logp_BT, behaviour_BT, adv_BT, mask_BT, bounds=BOUNDS
  )


LOSSES = {
  'policy_gradient': lambda x, y, a, m: policy_gradient(x, y, a, m)[0],
  'kl_k3': lambda x, y, a, m: kl.k3(x, y, m),
  'nll': lambda x, y, a, m: losses.negative_log_likelihood(x, m),
}


def test_policy_gradient_is_the_clipped_surrogate_token_by_token():
  logp_BT, behaviour_BT, adv_BT = inputs()
  expected, clipped, k3 = 0.0, 0, 0.0
  for b, t in zip(*np.nonzero(MASK_BT), strict=True):
    delta = float(logp_BT[b, t]) - float(behaviour_BT[b, t])
    ratio, adv = np.exp(delta), float(adv_BT[b, t])
    bounded = min(max(ratio, 0.8), 1.3)
    expected -= min(ratio * adv, bounded * adv)
    clipped += bounded * adv < ratio * adv
    k3 += ratio - 1 - delta
  loss, metrics = policy_gradient(logp_BT, behaviour_BT, adv_BT)
  assert 0 < clipped < MASK_BT.sum()
  assert loss.count == MASK_BT.sum()
  np.testing.assert_allclose(loss.total, expected, rtol=1e-5)
  assert metrics['clip_fraction'].total == clipped
  np.testing.assert_allclose(metrics['behaviour_kl'].total, k3, rtol=1e-4)


@pytest.mark.parametrize('clip', [0.2, 0.0])
def test_on_policy_gradient_is_minus_advantage_at_ratio_one(clip):
  logp_BT, _, adv_BT = inputs()

  def loss(x_BT):
    bounds = surrogates.Bounds(low=clip, high=clip)
    return surrogates.policy_gradient(
      x_BT, logp_BT, adv_BT, MASK_BT, bounds=bounds
    )

  grad_BT = jax.grad(lambda x_BT: loss(x_BT)[0].total)(logp_BT)
  # Exactly, not half: every token is a tie between the clipped arms.
  np.testing.assert_array_equal(grad_BT, np.where(MASK_BT, -adv_BT, 0))
  _, metrics = loss(logp_BT)
  assert metrics['ratio'].mean() == 1
  assert metrics['clip_fraction'].total == 0


def test_a_clipped_token_has_no_gradient_and_only_on_the_bounded_side():
  #            too likely, A>0 | too likely, A<0 | too rare, A>0 | rare, A<0
  delta_BT = jnp.array([[1.0, 1.0, -1.0, -1.0]])
  adv_BT = jnp.array([[1.0, -1.0, 1.0, -1.0]])
  zeros_BT, mask_BT = jnp.zeros((1, 4)), jnp.ones((1, 4), bool)
  grad_BT = jax.grad(
    lambda x: policy_gradient(x, zeros_BT, adv_BT, mask_BT)[0].total
  )(delta_BT)
  np.testing.assert_allclose(
    grad_BT, [[0, np.exp(1), -np.exp(-1), 0]], rtol=1e-6
  )


def test_k3_is_an_unbiased_nonnegative_kl_with_the_right_gradient():
  logits_V = np.random.default_rng(4).normal(size=(2, 7))
  logp_V, ref_V = (jax.nn.log_softmax(jnp.asarray(x)) for x in logits_V)
  mask_1V = jnp.ones((1, 7), bool)
  each = [
    kl.k3(logp_V[None], ref_V[None], only_1V).total
    for only_1V in np.eye(7, dtype=bool)[:, None]
  ]
  assert min(each) >= 0
  exact = jnp.sum(jnp.exp(logp_V) * (logp_V - ref_V))
  np.testing.assert_allclose(
    jnp.sum(jnp.exp(logp_V) * jnp.array(each)), exact, rtol=1e-5
  )
  grad_1V = jax.grad(lambda x: kl.k3(x, ref_V[None], mask_1V).total)(
    logp_V[None]
  )
  np.testing.assert_allclose(grad_1V[0], 1 - jnp.exp(ref_V - logp_V), rtol=1e-4)


@pytest.mark.parametrize('name', LOSSES)
@pytest.mark.parametrize('garbage', [np.nan, np.inf, -np.inf, 1.0, -1e30])
def test_masked_positions_reach_neither_value_nor_gradient(name, garbage):
  loss = LOSSES[name]
  clean = inputs()
  dirty = [np.where(MASK_BT, x, np.float32(garbage)) for x in clean]
  value_and_grad = jax.value_and_grad(lambda x, *r: loss(x, *r).total)
  expected, expected_BT = value_and_grad(*clean, MASK_BT)
  value, grad_BT = value_and_grad(*dirty, MASK_BT)
  assert value == expected
  np.testing.assert_array_equal(grad_BT, expected_BT)
  assert (np.asarray(grad_BT)[~MASK_BT] == 0).all()
  assert (np.asarray(grad_BT)[MASK_BT] != 0).any()


@pytest.mark.parametrize('name', LOSSES)
def test_nothing_selected_is_zero_and_not_nan(name):
  empty = np.zeros_like(MASK_BT)
  got = LOSSES[name](*inputs(), empty)
  assert got.total == 0 and got.count == 0 and got.mean() == 0


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize('gap', [100.0, -100.0])
@pytest.mark.parametrize('sign', [1.0, -1.0])
def test_a_ratio_of_e_to_the_100_is_finite(dtype, gap, sign):
  logp_BT = jnp.zeros((3, 6), dtype)
  other_BT = logp_BT - jnp.asarray(gap, dtype)
  adv_BT = jnp.full((3, 6), sign)
  for loss in LOSSES.values():
    value, grad_BT = jax.value_and_grad(
      lambda x, loss=loss: loss(x, other_BT, adv_BT, MASK_BT).total
    )(logp_BT)
    assert value.dtype == jnp.float32
    assert jnp.isfinite(value) and jnp.isfinite(grad_BT).all()
  _, metrics = policy_gradient(logp_BT, other_BT, adv_BT)
  assert metrics['ratio_overflow'].mean() == 1


@pytest.mark.parametrize('name', LOSSES)
def test_parts_merge_into_the_whole(name):
  whole = LOSSES[name](*inputs(), MASK_BT)
  parts = [
    LOSSES[name](*(x[b : b + 1] for x in (*inputs(), MASK_BT)))
    for b in range(3)
  ]
  total, count = (sum(field) for field in zip(*parts, strict=True))
  np.testing.assert_allclose(total, whole.total, rtol=1e-6)
  assert count == whole.count


def episode(authors, seed=0):
  authors = np.array(authors, np.int8)
  rng = np.random.default_rng(seed)
  sampled = np.isin(authors, [Author.ACT, Author.REHEARSE])
  return types.Episode(
    task_id=f't{seed}',
    group=0,
    sample_index=seed,
    rows=(
      types.Row(
        tokens=rng.integers(0, 9, len(authors)).astype(np.int32),
        authors=authors,
        logprobs=np.where(sampled, -rng.uniform(size=len(authors)), 0.0),
      ),
    ),
    steps=(),
    reply=None,
    stop_reason=types.StopReason.MAX_STEPS,
  )


# author codes: 0 prompt, 1 forced, 2 act, 3 rehearse, 4 world, 5 user
EPISODES = [
  episode([0, 0, 1, 2, 2, 1, 3, 1, 2], 0),
  episode([0, 1, 2, 1, 4, 4, 5], 1),
  episode([2, 3, 2], 2),
]
ADVANTAGES = np.array([[0.5, -0.25], [-1.0, 2.0], [3.0, 4.0]], np.float32)


def packed(batch_size=4, length_buckets=(8, 12, 16)):
  return batches.pack_episodes(
    EPISODES,
    ADVANTAGES,
    length_buckets=length_buckets,
    batch_size=batch_size,
  )


def test_packing_pads_to_the_smallest_bucket_and_keeps_every_token():
  batch = packed()
  assert batch.tokens.shape == (4, 12)
  assert batch.lengths.tolist() == [9, 7, 3, 0]
  for b, (row,) in enumerate(e.rows for e in EPISODES):
    n = len(row.tokens)
    np.testing.assert_array_equal(batch.tokens[b, :n], row.tokens)
    np.testing.assert_array_equal(batch.authors[b, :n], row.authors)
    np.testing.assert_array_equal(
      batch.logprobs[b, :n], row.logprobs.astype(np.float32)
    )
  assert {batch.tokens.dtype, batch.authors.dtype} == {np.dtype(np.int32)}


def test_masks_and_advantages_follow_the_author():
  batch = packed()
  authors_BT = np.asarray(batch.authors)
  act_BT = np.asarray(batches.role_mask(batch, types.Role.ACT))
  rehearse_BT = np.asarray(batches.role_mask(batch, types.Role.REHEARSE))
  assert act_BT.sum(1).tolist() == [3, 1, 1, 0]  # token 0 has no context
  assert rehearse_BT.sum(1).tolist() == [1, 0, 1, 0]
  assert (authors_BT[act_BT] == Author.ACT).all()
  recorded_BT = batches.loss_mask(batch, batches.SUPERVISED_AUTHORS)
  assert recorded_BT.sum(1).tolist() == [4, 3, 2, 0]
  adv_BT = np.asarray(batch.advantages)
  for b in range(3):
    assert (adv_BT[b][act_BT[b]] == ADVANTAGES[b, 0]).all()
    assert (adv_BT[b][rehearse_BT[b]] == ADVANTAGES[b, 1]).all()
  sampled_BT = np.isin(authors_BT, [Author.ACT, Author.REHEARSE])
  assert (adv_BT[~sampled_BT] == 0).all()


def test_packing_refuses_what_would_train_on_nothing_or_on_nonsense():
  with pytest.raises(ValueError, match='row 0 has 9 tokens.*8'):
    packed(length_buckets=(4, 8))
  with pytest.raises(ValueError, match='3 rows do not fit batch_size=2'):
    packed(batch_size=2)
  options = {'length_buckets': (8,), 'batch_size': 3}
  (row,) = EPISODES[1].rows
  only_world = np.where(row.authors == Author.ACT, Author.FORCED, row.authors)
  with pytest.raises(ValueError, match='0 trainable tokens'):
    batches.pack_episodes([episode(only_world)], ADVANTAGES[:1], **options)
  assert batches.pack_rows([(row.tokens, only_world)], **options)
  with pytest.raises(ValueError, match='0 trainable tokens'):
    batches.pack_rows([(row.tokens, np.zeros(7, int))], **options)
  broken = episode([0, 2, 2])
  broken.rows[0].logprobs[1] = np.nan
  with pytest.raises(ValueError, match='behaviour log-probs'):
    batches.pack_episodes([broken], ADVANTAGES[:1], **options)
  with pytest.raises(ValueError, match='need'):
    batches.pack_episodes([EPISODES[2]], ADVANTAGES, **options)
