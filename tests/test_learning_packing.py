"""Packed rows: nothing is lost, nothing is seen of a neighbour, nothing else
changes, and little is left to pad."""

import dataclasses
import functools
import itertools
import types as python_types

import hypothesis
from hypothesis import strategies as st
import jax
import numpy as np
import pytest

from envace_jax import build, components, data, experience, types
from envace_jax.learning import (
  accumulation,
  kl,
  objective,
  optimizer,
  packing,
  reuse,
  step,
  surrogates,
)
from envace_jax.learning import batch as batches
from envace_jax.learning import state as states
from envace_jax.model import logprobs, sharding
from envace_jax.tasks import order
from experiments import base, quickstart

VOCAB = 64
T = 24
# Packed: 24 | 12 10 | 9 7 5 3, and five rows are left over.
LENGTHS = (12, 5, 9, 24, 7, 3, 10)
ROWS = 8
CYCLE = (0, 1, 2, 2, 1, 3, 4, 3, 1, 2, 3)
BASE = objective.LossConfig(logprob_chunk=9, temperature_per_role=(0.7, 1.3))


def make_episodes(lengths=LENGTHS):
  """One transcript each, of both roles and, now and then, the world."""
  rng = np.random.default_rng(1)
  made = []
  for i, n in enumerate(lengths):
    authors = np.resize(np.roll(CYCLE, -i), n).astype(np.int8)
    sampled = np.isin(authors, [types.Author.ACT, types.Author.REHEARSE])
    row = types.Row(
      tokens=rng.integers(0, VOCAB, n).astype(np.int32),
      authors=authors,
      logprobs=np.where(sampled, -3 - rng.uniform(size=n), 0.0),
    )
    made.append(
      types.Episode(
        task_id=f't{i}',
        group=0,
        sample_index=i,
        rows=(row,),
        steps=(),
        reply=None,
        stop_reason=types.StopReason.MAX_STEPS,
      )  # fmt: skip
    )
  return made


def make_batch(packed, lengths=LENGTHS, microbatches=4):
  rng = np.random.default_rng(2)
  batch = batches.pack_episodes(
    make_episodes(lengths),
    rng.normal(size=(len(lengths), 2)).astype(np.float32),
    length_buckets=(T,),
    batch_size=ROWS,
    microbatches=microbatches,
    packed=packed,
  )
  # A function of the token alone, so that it is the same in either layout.
  return batch.replace(
    proximal_logprobs=np.where(
      batch.logprobs < 0,
      batch.logprobs + 0.2 * np.sin(batch.tokens),
      0,
    ).astype(np.float32)
  )


def transcripts(batch):
  """The arrays of each transcript of a batch, longest first."""
  found = []
  for b, length in enumerate(np.asarray(batch.lengths)):
    starts = np.flatnonzero(np.asarray(batch.positions)[b, :length] == 0)
    for start, end in itertools.pairwise([*starts, length]):
      one = jax.tree.map(
        lambda x: x[b, start:end],  # noqa: B023
        batch.replace(lengths=batch.positions),
      )
      np.testing.assert_array_equal(one.positions, np.arange(end - start))
      found.append((one.tokens, one.authors, one.logprobs, one.advantages))
  return sorted(found, key=lambda x: (-len(x[0]), x[0].tolist()))


@hypothesis.settings(deadline=None, max_examples=200)
@hypothesis.given(st.lists(st.integers(0, 40), max_size=40))
def test_first_fit_places_each_once_and_overfills_no_row(lengths):
  rows = packing.first_fit(lengths, 40)
  assert sorted(i for row in rows for i in row) == [*range(len(lengths))]
  sums = [sum(lengths[i] for i in row) for row in rows]
  assert all(used <= 40 for used in sums)
  # Two rows that would fit in one would have been one.
  assert all(a + b > 40 for a, b in zip(sums, sums[1:], strict=False))
  assert rows == packing.first_fit(lengths, 40)


def test_first_fit_by_hand():
  assert packing.first_fit([7, 5, 4, 3, 1], 10) == [[0, 3], [1, 2, 4]]
  assert packing.first_fit([4, 5, 4, 5], 9) == [[1, 0], [3, 2]]
  with pytest.raises(ValueError, match='11 tokens do not fit in rows of 10'):
    packing.first_fit([3, 11], 10)


@hypothesis.settings(deadline=None, max_examples=25)
@hypothesis.given(
  st.lists(st.integers(4, T), min_size=1, max_size=ROWS),
  st.sampled_from([1, 2, 4]),
)
def test_no_transcript_is_lost_or_cut(lengths, microbatches):
  one, packed = (
    make_batch(packed, lengths, microbatches) for packed in (False, True)
  )
  assert packed.tokens.shape == one.tokens.shape == (ROWS, T)
  assert packed.lengths.sum() == one.lengths.sum() == sum(lengths)
  assert (packed.lengths > 0).sum() <= (one.lengths > 0).sum()
  found = transcripts(packed)
  assert len(found) == len(lengths)
  jax.tree.map(np.testing.assert_array_equal, found, transcripts(one))
  assert batches.num_transcripts(packed) == len(lengths)
  # Token 0 of a transcript is no target, wherever in the row it lies.
  for author in batches.SAMPLED_AUTHORS:
    counts = [
      batches.loss_mask(batch, (author,)).sum() for batch in (one, packed)
    ]
    assert counts[0] == counts[1]


def test_transcripts_share_rows_and_the_rest_lies_in_microbatches_of_its_own():
  batch = make_batch(True)
  # Microbatch m has rows m and m + 4.
  used = batch.lengths.reshape(2, 4).T
  assert used.tolist() == [[0, 0], [0, 0], [0, 22], [24, 24]]
  assert make_batch(False).lengths.tolist() == [0, 5, 9, 12, 3, 7, 10, 24]


@pytest.fixture(scope='module')
def lab(draw_thin_model):
  model, draw = draw_thin_model()
  params, noise = draw(), draw()
  return model, params, jax.tree.map(lambda x, y: x + 0.1 * y, params, noise)


@functools.cache
def gradient_of(model, config):
  """(params, ref_params, rows, divisors) -> value, sums, gradient."""

  def loss(ref_params, divisors, params, micro):
    rows, anchor = micro
    value, sums = objective.policy_loss(
      model, params, ref_params, rows, divisors[0], config
    )
    if not config.uses_anchor:
      return value, sums
    more, sums['nll'] = objective.anchor_loss(
      model, params, anchor, divisors[1], config
    )
    supervised, more_sums = objective.supervised_loss(
      model, params, anchor, divisors[2], config
    )
    sums |= {f'supervised/{name}': pair for name, pair in more_sums.items()}
    return value + more + supervised, sums

  @jax.jit
  def gradient(params, ref_params, rows, divisors):
    loss_fn = functools.partial(loss, ref_params, divisors)
    return accumulation.accumulate(loss_fn, params, (rows, rows), config)

  return gradient


def run(lab, packed, config, batch=None):
  """The sums and gradients, packed in four microbatches or not in one."""
  model, params, ref_params = lab
  batch = batch or make_batch(packed)
  divisors = (
    objective.policy_denominators(batch, config),
    objective.anchor_denominator(batch, config),
    objective.supervised_denominators(batch, config),
  )
  # Divisors are arguments: one program serves every normaliser.
  shared = dataclasses.replace(
    config,
    packed=packed,
    microbatches=4 if packed else 1,
    normalizer=objective.Normalizer.TOKEN,
  )
  return jax.tree.map(
    np.asarray,
    gradient_of(model, shared)(params, ref_params, batch, divisors),
  )


def assert_close(a, b):
  """To 1e-5 of the largest value of each leaf."""

  def check(x, y):
    atol = 1e-6 + 1e-5 * np.abs(y).max()
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=atol)

  jax.tree.map(check, a, b)


CASES = {
  'token, anchor': {'nll_weight': 0.3},
  'sequence': {
    'surrogate': surrogates.Surrogate.SEQUENCE,
    'clip_low': 0.05,
    'clip_high': 0.05,
    'kl_weight_per_role': (0.1, 0.2),
    'kl_estimator': kl.KLEstimator.K1,
  },
  'cispo': {
    'surrogate': surrogates.Surrogate.CISPO,
    'importance_cap': 1.1,
    'kl_weight_per_role': (0.1, 0.2),
    'kl_estimator': kl.KLEstimator.K2,
  },
  'sequence, capped': {
    'surrogate': surrogates.Surrogate.SEQUENCE,
    'importance_cap': 1.1,
    'dual_clip': 1.5,
    'kl_weight_per_role': (0.1, 0.2),
    'kl_estimator': kl.KLEstimator.K3,
  },
  'exact': {
    'kl_weight_per_role': (0.1, 0.2),
    'kl_estimator': kl.KLEstimator.EXACT,
  },
}


@pytest.mark.parametrize('normalizer', objective.Normalizer)
@pytest.mark.parametrize('case', CASES)
def test_packed_is_unpacked(lab, case, normalizer):
  config = dataclasses.replace(BASE, normalizer=normalizer, **CASES[case])
  one, packed = run(lab, False, config), run(lab, True, config)
  assert_close(packed, one)
  value, sums, grads = one
  assert all(x.any() for x in jax.tree.leaves(grads))
  assert all(pair.count > 0 for n, pair in sums.items() if pair.total)
  assert np.abs(value) > 0.01


def test_microbatches_left_empty_are_not_computed(lab):
  config = dataclasses.replace(BASE, **CASES['exact'])
  batch = make_batch(True)
  # An id outside the vocabulary is NaN wherever it is read.
  left_out = np.tile(batch.lengths.reshape(2, 4).sum(0) == 0, 2)
  assert left_out.tolist() == 2 * [True, True, False, False]
  poisoned = batch.replace(
    tokens=np.where(left_out[:, None], VOCAB, batch.tokens)
  )
  assert_close(run(lab, True, config, poisoned), run(lab, True, config))
  _, _, grads = run(lab, False, config, poisoned)
  assert np.isnan(grads['embedding']).any()


def test_a_transcript_sees_nothing_of_its_neighbours(lab):
  model, params, _ = lab
  batch = make_batch(True)
  score = jax.jit(
    lambda tokens_BT: logprobs.token_logprobs(
      model,
      params,
      tokens_BT,
      batches.valid(batch),
      None,
      batch.positions,
      chunk=9,
    )  # fmt: skip
  )
  before = score(batch.tokens)
  b = int(np.argmax((batch.positions == 0).sum(1)))
  starts = np.flatnonzero(batch.positions[b] == 0)
  assert starts.tolist() == [0, 9, 16, 21]
  other = batch.tokens.copy()
  other[b, 9:16] = (other[b, 9:16] + 1) % VOCAB
  after = score(other)
  for x_BT, y_BT in zip(before, after, strict=True):
    changed_T = np.asarray(x_BT[b] != y_BT[b])
    assert changed_T[10:16].all()
    assert not changed_T[:10].any() and not changed_T[16:].any()
  assert (np.asarray(before.logprob)[batch.positions == 0] == 0).all()
  assert (np.asarray(before.logprob)[b, 1:9] < 0).all()


def test_a_step_on_two_devices_and_proximal_scores_are_those_of_unpacked(lab):
  model, params, _ = lab
  tx = optimizer.make_optimizer(
    learning_rate=1e-2, warmup_steps=0, total_steps=9, schedule='constant',
    weight_decay=0.0, clip_norm=1.0, b1=0.9, b2=0.95,
  )  # fmt: skip
  config = dataclasses.replace(BASE, importance_cap=1.5, nll_weight=0.3)

  def train(packed, mesh_shape):
    ways = mesh_shape[0] * mesh_shape[1]
    mesh = sharding.make_mesh(*mesh_shape)
    parts = 4 // ways
    shared = dataclasses.replace(config, packed=packed, microbatches=parts)
    batch = make_batch(packed, microbatches=parts)
    batch = sharding.place_batch(batch.replace(proximal_logprobs=None), mesh)
    shardings = jax.tree.map(
      lambda x: x.sharding, states.abstract_state(model, tx, mesh)
    )
    state = states.TrainState(
      np.int32(0), params, jax.tree.map(np.array, tx.init(params))
    )
    state = jax.device_put(state, shardings)
    scored = reuse.make_proximal_scorer(model, shared, mesh)(
      state.params, batch
    )
    host = jax.tree.map(np.asarray, scored)
    state, metrics = step.make_policy_step(model, tx, shared, mesh)(
      state, scored, None, scored
    )
    by_token = sorted(
      (int(n), float(x))
      for n, x in zip(
        host.tokens[host.logprobs < 0],
        host.proximal_logprobs[host.logprobs < 0],
        strict=True,
      )
    )
    return jax.tree.map(np.asarray, metrics), by_token

  expected = train(False, (1, 1, 1))
  assert expected[0]['nll'] > 1
  assert_close(train(True, (2, 1, 1)), expected)


def computed_padding(batch, microbatches):
  """Share of padding in the microbatches that are computed."""
  lengths = batch.lengths.reshape(-1, microbatches)
  rows = (lengths.sum(0) > 0).sum() * lengths.shape[0]
  return 1 - lengths.sum() / (rows * batch.tokens.shape[1])


def test_padding_of_the_quick_start_is_below_a_tenth(tmp_path):
  config = quickstart.get_config()
  config.data.num_train, config.data.num_dev, config.data.num_test = 120, 6, 6
  config.data.num_demonstrations = 600
  limit = config.rollout.max_row_tokens
  rows = data.rows(data.prepare(config, tmp_path), limit, None)
  rng = np.random.default_rng(0)
  found = {False: [], True: []}
  for _ in range(20):
    drawn = [rows[i] for i in rng.integers(0, len(rows), 64)]
    for packed, padding in found.items():
      batch = batches.pack_rows(
        drawn, length_buckets=(limit,), batch_size=64, microbatches=16,
        packed=packed,
      )  # fmt: skip
      padding.append(computed_padding(batch, 16))
  assert np.mean(found[False]) > 0.5
  assert np.mean(found[True]) < 0.1


def packing_config(**changes):
  config = base.get_config()
  config.update_from_flattened_dict(
    {'rl.packing': True, 'rl.microbatches': 4, **changes}
  )
  return config


def test_the_option_reaches_both_losses_and_all_batches():
  config = packing_config()
  config.rollout.max_row_tokens = T
  loss = components.policy_loss(config)
  assert loss.packed and loss.row_buckets == ()
  loss = components.supervised_loss(config, config.warm_start)
  assert loss.packed and loss.row_buckets == ()
  default = components.policy_loss(base.get_config())
  assert not default.packed and default.row_buckets == (64, 96)

  episodes = make_episodes()
  score = types.Score(verdicts={}, reward=1.0, success=True)
  gathered = experience.Gathered(
    groups=[[(episode, score) for episode in episodes]],
    cursor=0,
    metrics={},
    spend={},
  )
  config.rl.microbatches = 7
  (part,), _ = experience.pack(
    python_types.SimpleNamespace(config=config), gathered, 0
  )
  assert sorted(part.lengths) == [0, 0, 0, 0, 22, 24, 24]
  setup = python_types.SimpleNamespace(
    config=config,
    rows=[(e.rows[0].tokens, e.rows[0].authors) for e in episodes],
    _row_orders={'anchor': order.Order(7, seed=0)},
  )
  recorded = build.Setup.demonstrations_at(setup, 'anchor', 0, 7, 7)
  assert sorted(recorded.lengths) == [0, 0, 0, 0, 22, 24, 24]
