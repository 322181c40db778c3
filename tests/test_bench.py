"""The benchmark measures what it says: the script is followed and counted."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from envace_jax import (
  bench,
  components,
  errors,
  logprob_memory,
  roofline,
  types,
)
from envace_jax.model import sharding
from envace_jax.sampling import scripted
from experiments import base

COLUMNS = {
  'workload', 'tokens_per_s', 'fraction_of_limit', 'seconds', 'compiles',
  'compile_seconds', 'peak_bytes', 'params', 'load',
}  # fmt: skip
ROWS = 6


@pytest.fixture(scope='module')
def config():
  c = base.get_config()
  c.data.vocab_size = 61  # a shape no other test has compiled
  c.model.update(
    d_model=32, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=48
  )
  c.rollout.update(
    max_steps=2, max_action_tokens=5, max_observation_tokens=7,
    prompt_tokens=8, max_row_tokens=32, ladder=(16, 32),
  )  # fmt: skip
  c.rl.update(
    tasks_per_step=2, group_size=3, microbatches=2, anchor_batch_size=4,
    row_buckets=(),
  )  # fmt: skip
  return c


@pytest.fixture(scope='module')
def written(config, tmp_path_factory):
  path = tmp_path_factory.mktemp('bench') / 'records.json'
  assert bench.run(config, str(path)) == 0
  *records, memory = json.loads(path.read_text())
  return {r['workload']: r for r in records}, memory


def test_records_count_what_was_sampled_and_compiled(config, written):
  written, _ = written
  assert list(written) == ['generate', 'rehearse', 'train_step']
  new, headers = 28, 4  # 32 - 4 of prompt; 2 turns of 12 + 2, none to spare
  tokens = {n: r['tokens'] for n, r in written.items()}
  assert tokens['generate'] == ROWS * new
  assert tokens['rehearse'] == ROWS * (new - headers)
  for record in written.values():
    assert COLUMNS < set(record)
    rate = record['tokens'] / record['seconds']
    assert record['tokens_per_s'] == pytest.approx(rate)
    assert 0 < record['fraction_of_limit'] < 2
    assert record['peak_bytes'] > 0 and record['params'] > 0
    assert record['compile_seconds'] > 0
  # Prefill, one growth, a generation per rung; else one program each.
  compiles = {n: r['compiles'] for n, r in written.items()}
  assert compiles == {'generate': 4, 'rehearse': 1, 'train_step': 1}


def test_overhead_is_seconds_per_new_token(written):
  written, _ = written
  plain, rehearsed = written['generate'], written['rehearse']
  ratio = rehearsed['seconds'] / plain['seconds']
  assert rehearsed['ratio_to_generate'] == pytest.approx(ratio)
  assert plain['ratio_to_generate'] == 1
  assert written['train_step']['ratio_to_generate'] is None


def test_memory_of_log_probs_is_in_chunks_and_the_promise_is_kept(written):
  _, memory = written
  assert memory['workload'] == 'logprob_memory'
  # A microbatch of 6 / 2 rows, 64 time steps, float32.
  assert memory['chunk_bytes'] == 3 * 64 * 150_000 * 4
  # The logits of a chunk exist; beside them, parts of it.
  assert 1 <= memory['forward_chunks'] <= bench.MEMORY_PROMISE
  assert memory['forward_chunks'] < memory['gradient_chunks'] < 2.5


def test_a_broken_promise_is_a_failure(config, written, monkeypatch, capsys):
  records = [bench.Record(**record) for record in written[0].values()]
  kept = logprob_memory.Record(**written[1])
  broken = dataclasses.replace(kept, forward_chunks=1.51)
  monkeypatch.setattr(bench, 'measure', lambda *_: (records, (1.0, 1.0)))
  for record, code, said in ((kept, 0, '1.1'), (broken, 1, '1.51')):
    monkeypatch.setattr(logprob_memory, 'measure', lambda *_, r=record: r)
    assert bench.run(config, None) == code
    caption = ' '.join(capsys.readouterr().out.split())
    assert f'150,000 pieces: {said}' in caption


def test_scripted_policy_follows_its_script(config):
  model = components.model(config, config.data.vocab_size)
  works = bench.sampled_workloads(config, model, sharding.make_mesh())
  state = works['rehearse'].call()
  action, answer = [3, 7, 8, 9, 4], [10, 11, 12, 13, 14, 15, 4]
  turn = [*action, 2, *answer, 1]
  rows, authors = jax.device_get((state.tokens, state.authors))
  assert rows.shape == (ROWS, 32)
  for row, by in zip(rows, authors, strict=True):
    assert row[4:].tolist() == turn * 2
    assert by[4:].tolist() == ([2] * 5 + [1] + [3] * 7 + [1]) * 2
  sampled = (authors == types.Author.ACT) | (authors == types.Author.REHEARSE)
  assert sampled.sum() == works['rehearse'].tokens
  plain = jax.device_get(works['generate'].call().tokens)
  np.testing.assert_array_equal(plain[:, 4:], np.resize([6, 5], (ROWS, 28)))


def test_leaving_the_script_is_noticed(config, monkeypatch):
  model = components.model(config, config.data.vocab_size)
  follow = scripted.params

  def misled(model, successor):
    return follow(model, successor | {8: 3})

  monkeypatch.setattr(scripted, 'params', misled)
  works = bench.sampled_workloads(config, model, sharding.make_mesh())
  with pytest.raises(RuntimeError, match='left its script'):
    works['rehearse'].call()


def test_flops_are_those_that_xla_counts(config):
  """Of the network alone, without the causal half that is not computed."""
  model = components.model(config, config.data.vocab_size)
  params = scripted.params(model, {5: 6})
  length = 32

  def forward(params, tokens_BT):
    hidden, _ = model.apply({'params': params}, tokens_BT)
    return model.apply({'params': params}, hidden, method='unembed')

  jitted = jax.jit(forward).lower(params, np.zeros((1, length), np.int32))
  counted = jitted.compile().cost_analysis()['flops']
  c = model.config
  unseen = length * (length - 1) / 2 * 4 * c.num_heads * c.head_dim
  ours = roofline.row_flops(c, length) + c.num_layers * unseen
  # Norms, rotations and softmax are work too, but not a matrix product's.
  assert 0.6 * counted < ours < counted


def test_more_rows_or_keys_cost_more_but_weights_are_read_once(config):
  c = components.model(config, config.data.vocab_size).config
  flops, moved = roofline.decode_cost(c, 2, 6, 4, 10)
  more_flops, more_moved = roofline.decode_cost(c, 2, 12, 4, 10)
  np.testing.assert_allclose(more_flops[1:], 2 * flops[1:])
  assert (more_moved[1:] < 2 * moved[1:]).all()
  assert (np.diff(flops[1:]) > 0).all() and (np.diff(moved[1:]) > 0).all()
  half = dataclasses.replace(c, dtype='bfloat16')
  np.testing.assert_allclose(
    2 * roofline.decode_cost(half, 2, 6, 4, 10)[1], moved
  )


def test_script_stays_within_a_small_vocabulary():
  limits = types.Limits(
    max_steps=1, max_actions=30, max_user_turns=30, max_parallel_calls=1,
    max_action_tokens=99, max_observation_tokens=99,
    max_row_tokens=400,
  )  # fmt: skip
  for vocab_size in (9, 20, 61):
    tokens, _, successor = scripted.write(limits, 1, vocab_size)
    assert max([*tokens, *successor, *successor.values()]) < vocab_size


def test_bad_requests_are_one_sentence(config):
  with pytest.raises(errors.UserError, match='no directory'):
    bench.run(config, '/nowhere/at/all.json')
  changed = config.copy_and_resolve_references()
  changed.rollout.max_action_tokens = 1
  with pytest.raises(errors.UserError, match='no turn fits'):
    bench.run(changed, None)
