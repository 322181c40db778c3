"""Several updates from one rollout, and the trainer's own log-probs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envace_jax.learning import batch as batches
from envace_jax.learning import objective, optimizer, reuse, step, surrogates
from envace_jax.learning import state as states
from envace_jax.model import sharding, transformer

LENGTHS = np.array([12, 5, 9, 12, 7, 3, 10, 8])


@pytest.mark.parametrize('parts', [1, 2, 4])
def test_parts_are_a_partition_that_depends_on_the_seed_alone(parts):
  items = [f'episode {i}' for i in range(8)]
  got = reuse.partition(items, parts, seed=(0, 3))
  assert [len(part) for part in got] == [8 // parts] * parts
  assert sorted(sum(got, [])) == items
  assert got == reuse.partition(items, parts, seed=(0, 3))
  others = [reuse.partition(items, parts, seed=(0, n)) for n in range(4, 9)]
  assert (got in others) == (parts == 1)
  with pytest.raises(ValueError, match='8 rows do not divide into 3'):
    reuse.partition(items, 3, seed=(0,))


def fake_state():
  return states.TrainState(jnp.int32(4), {'w': jnp.float32(0)}, ())


@pytest.mark.parametrize(
  'parts, updates, order',
  [
    (1, 1, [0]),
    (1, 3, [0, 0, 0]),
    (2, 2, [0, 1]),
    (2, 6, [0, 1, 0, 1, 0, 1]),
  ],
)
def test_updates_go_round_the_parts_and_count_as_one_step(
  parts, updates, order
):
  seen = []

  def update(state, part, index):
    seen.append((part, index))
    metrics = {'loss': jnp.float32(2 * index), 'skipped': jnp.float32(1)}
    return state.replace(step=state.step + 1), metrics

  state, metrics = reuse.update_repeatedly(
    update, fake_state(), range(parts), updates=updates
  )
  assert seen == list(zip(order, range(updates), strict=True))
  assert state.step == 5 and state.step.dtype == jnp.int32
  assert metrics == {'loss': updates - 1, 'skipped': 1}
  with pytest.raises(ValueError, match='multiple of minibatches=3'):
    reuse.update_repeatedly(update, fake_state(), range(3), updates=4)


def make_batch(seed=0):
  rng = np.random.default_rng(seed)
  cycle = [0, 1, 2, 2, 1, 3, 3, 2, 1, 3, 3, 2]
  authors_BT = np.tile(np.array(cycle, np.int32), (8, 1))
  for b in range(8):
    authors_BT[b, 2:] = np.roll(authors_BT[b, 2:], b)
  return batches.TrainBatch(
    tokens=rng.integers(0, 64, (8, 12)).astype(np.int32),
    authors=authors_BT,
    logprobs=np.full((8, 12), -4.0, np.float32),
    advantages=batches.advantage_per_token(authors_BT, rng.normal(size=(8, 2))),
    positions=np.tile(np.arange(12, dtype=np.int32), (8, 1)),
    lengths=LENGTHS.astype(np.int32),
  )


def test_the_second_update_is_off_policy_and_the_first_is_not(tiny_model):
  model = transformer.Transformer(
    dataclasses.replace(tiny_model[2], num_layers=1, d_model=16)
  )
  config = objective.LossConfig(
    temperature_per_role=(0.7, 1.3),
    surrogate=surrogates.Surrogate.SEQUENCE,
    clip_low=0.01,
    clip_high=0.01,
    dual_clip=3.0,
    importance_cap=2.0,
    logprob_chunk=5,
    microbatches=2,
  )
  mesh = sharding.make_mesh()
  tx = optimizer.make_optimizer(
    learning_rate=1e-2, warmup_steps=0, total_steps=9, schedule='constant',
    weight_decay=0.0, clip_norm=None, b1=0.9, b2=0.95,
  )  # fmt: skip
  rng = np.random.default_rng(0)
  shapes = jax.eval_shape(
    lambda: transformer.init_params(model, jax.random.key(0))
  )
  params = jax.tree.map(
    lambda x: jnp.asarray(0.2 * rng.normal(size=x.shape), jnp.float32), shapes
  )
  score = reuse.make_proximal_scorer(model, config, mesh)
  rows = score(params, make_batch())
  expected_BT = jax.jit(
    lambda params: objective.proximal_logprobs(
      model, params, make_batch(), config
    )
  )(params)
  np.testing.assert_allclose(
    rows.proximal_logprobs, expected_BT, rtol=1e-4, atol=1e-5
  )
  fixed_BT = np.asarray(rows.proximal_logprobs)

  train = step.make_policy_step(model, tx, config, mesh)
  history = []

  def update(state, part, index):
    state, metrics = train(state, part, None, None)
    history.append({name: float(x) for name, x in metrics.items()})
    return state, metrics

  state = states.TrainState(
    jnp.int32(7), jax.tree.map(jnp.copy, params), jax.jit(tx.init)(params)
  )
  state, metrics = reuse.update_repeatedly(update, state, [rows], updates=3)
  for name in ('act', 'rehearse'):
    ratio = [line[f'ratio/{name}'] for line in history]
    np.testing.assert_allclose(ratio[0], 1, atol=1e-5)
    assert abs(ratio[1] - 1) > 1e-4 and abs(ratio[2] - 1) > 1e-4
    clipped = [line[f'clip_fraction/{name}'] for line in history]
    assert clipped[0] == 0 and clipped[2] > 0
    # What the sampler said does not change either: one weight for all.
    weights = [line[f'importance_weight/{name}'] for line in history]
    assert weights[0] == weights[1] == weights[2] != 1
    np.testing.assert_allclose(
      metrics[f'ratio/{name}'], np.mean(ratio), rtol=1e-6
    )
  np.testing.assert_array_equal(rows.proximal_logprobs, fixed_BT)
  assert state.step == 8
  counts = {
    int(x) for x in jax.tree.leaves(state.opt_state) if x.dtype == jnp.int32
  }
  assert counts == {3}
