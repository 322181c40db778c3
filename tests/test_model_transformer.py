"""One function, however it is run: cached, scanned, rematerialised, chunked."""

import dataclasses
import functools
import re

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envace_jax.model import kv_cache, layers, logprobs, rope, transformer

LENGTHS = np.array([9, 4, 7])


def ragged_rows(seed=1, vocab=64):
  tokens_BT = np.random.default_rng(seed).integers(0, vocab, (3, 9))
  return tokens_BT, np.arange(9)[None, :] < LENGTHS[:, None]


@functools.partial(jax.jit, static_argnums=0)
def read(model, params, *args):
  return model.apply({'params': params}, *args)


def hidden(model, params, tokens_BT, valid_BT=None):
  return read(model, params, tokens_BT, None, None, valid_BT)[0]


def assert_trees_close(a, b, **tolerance):
  close = lambda x, y: np.testing.assert_allclose(x, y, **tolerance)
  jax.tree.map(close, a, b)


def advance(model, params, cache, rows, counts, width):
  """Feeds the next `counts_b` tokens of each row; returns their hidden."""
  start_B = np.asarray(cache.length)
  offset_T = np.arange(width)
  positions_BT = start_B[:, None] + offset_T[None, :]
  valid_BT = offset_T[None, :] < np.asarray(counts)[:, None]
  tokens_BT = np.full_like(positions_BT, 63)  # what is invalid is garbage
  for b, count in enumerate(counts):
    tokens_BT[b, :count] = rows[b][start_B[b] : start_B[b] + count]
  return read(model, params, tokens_BT, positions_BT, cache, valid_BT)


@pytest.mark.parametrize(
  'changes',
  [{}, {'qk_norm': True, 'tie_embeddings': False}, {'scan_layers': True}],
)
def test_prefill_decode_and_extend_equal_the_full_forward(make_model, changes):
  model, params, _ = make_model(**changes)
  rows = np.random.default_rng(2).integers(0, 64, (3, 20))
  full_BTD = hidden(model, params, rows)
  cache = kv_cache.empty(model.config, 3, 24)
  # Prefill, one token each, several onto live ragged rows, one again.
  schedule = [([5, 2, 4], 6), ([1, 1, 1], 1), ([3, 7, 0], 7), ([1, 0, 1], 1)]
  for counts, width in schedule:
    before_B = np.asarray(cache.length)
    out_BTD, cache = advance(model, params, cache, rows, counts, width)
    np.testing.assert_array_equal(cache.length, before_B + counts)
    for b, (start, count) in enumerate(zip(before_B, counts, strict=True)):
      np.testing.assert_allclose(
        out_BTD[b, :count], full_BTD[b, start : start + count], atol=1e-5
      )


def test_default_positions_continue_each_row(tiny_model):
  model, params, config = tiny_model
  rows = np.random.default_rng(3).integers(0, 64, (3, 12))
  cache = kv_cache.empty(config, 3, 12)
  _, cache = advance(model, params, cache, rows, [4, 1, 2], 4)
  tokens_BT = np.stack([rows[b, n : n + 3] for b, n in enumerate([4, 1, 2])])
  out_BTD, _ = read(model, params, tokens_BT, None, cache)
  full_BTD = hidden(model, params, rows)
  for b, n in enumerate([4, 1, 2]):
    np.testing.assert_allclose(out_BTD[b], full_BTD[b, n : n + 3], atol=1e-5)


def test_repeat_and_grow_change_no_answer(tiny_model):
  model, params, config = tiny_model
  rows = np.random.default_rng(4).integers(0, 64, (3, 8))
  _, small = advance(
    model, params, kv_cache.empty(config, 3, 6), rows, [5, 3, 4], 5
  )
  big = kv_cache.grow(kv_cache.repeat(small, 2), 16)
  assert big.capacity == 16 and small.capacity == 6
  np.testing.assert_array_equal(big.length, [5, 5, 3, 3, 4, 4])
  a_BTD, _ = advance(model, params, small, rows, [1, 1, 1], 1)
  b_BTD, _ = advance(model, params, big, rows.repeat(2, axis=0), [1] * 6, 1)
  np.testing.assert_allclose(b_BTD, np.repeat(a_BTD, 2, axis=0), atol=1e-6)
  with pytest.raises(ValueError, match='cannot grow'):
    kv_cache.grow(big, 8)


def test_write_past_capacity_changes_no_earlier_entry(tiny_model):
  model, params, config = tiny_model
  rows = np.random.default_rng(5).integers(0, 64, (3, 12))
  cache = kv_cache.empty(config, 3, 6)
  _, cache = advance(model, params, cache, rows, [6, 5, 2], 6)
  _, after = advance(model, params, cache, rows, [3, 3, 3], 3)
  slots_first = lambda cache: [
    *(np.moveaxis(k_BKHS, 3, 1) for k_BKHS in cache.k),
    *(np.moveaxis(v_BKSH, 2, 1) for v_BKSH in cache.v),
  ]
  for old, new in zip(slots_first(cache), slots_first(after), strict=True):
    for b, length in enumerate([6, 5, 2]):
      np.testing.assert_array_equal(new[b, :length], old[b, :length])
    assert not np.array_equal(new[1, 5], old[1, 5])  # the last slot fits
  np.testing.assert_array_equal(after.length, [9, 8, 5])


def test_negative_positions_do_not_wrap_around():
  slots_BT = kv_cache.write_slots(jnp.array([[-1], [4], [1]]), None, 4)
  new_BTKH = jnp.ones((3, 1, 1, 2))
  keys = kv_cache.write_keys(jnp.zeros((3, 1, 2, 4)), new_BTKH, slots_BT)
  values = kv_cache.write_values(jnp.zeros((3, 1, 4, 2)), new_BTKH, slots_BT)
  expected_BS = [[0, 0, 0, 0], [0, 0, 0, 0], [0, 2, 0, 0]]
  np.testing.assert_array_equal(keys.sum((1, 2)), expected_BS)
  np.testing.assert_array_equal(values.sum((1, 3)), expected_BS)


@pytest.mark.parametrize('scan_layers', [False, True])
def test_padding_does_not_matter(make_model, scan_layers):
  model, params, _ = make_model(scan_layers=scan_layers)
  tokens_BT, valid_BT = ragged_rows()
  a_BTD = hidden(model, params, tokens_BT, valid_BT)
  garbage_BT = np.where(valid_BT, tokens_BT, 7)
  b_BTD = hidden(model, params, garbage_BT, valid_BT)
  np.testing.assert_allclose(a_BTD[valid_BT], b_BTD[valid_BT], atol=1e-6)
  for b, length in enumerate(LENGTHS):
    alone_TD = hidden(model, params, tokens_BT[b : b + 1, :length])[0]
    np.testing.assert_allclose(a_BTD[b, :length], alone_TD, atol=1e-5)


def test_left_padding_is_masked_and_an_all_padding_row_is_finite(tiny_model):
  model, params, _ = tiny_model
  tokens_BT, _ = ragged_rows()
  pad_B = np.array([0, 4, 9])
  valid_BT = np.arange(9)[None, :] >= pad_B[:, None]
  positions_BT = np.maximum(np.arange(9)[None, :] - pad_B[:, None], 0)

  def loss(params):
    out_BTD, _ = model.apply(
      {'params': params}, tokens_BT, positions_BT, valid_BT=valid_BT
    )
    return jnp.sum(out_BTD**2), out_BTD

  grads, out_BTD = jax.jit(jax.grad(loss, has_aux=True))(params)
  alone_TD = hidden(model, params, tokens_BT[1:2, 4:])[0]
  np.testing.assert_allclose(out_BTD[1, 4:], alone_TD, atol=1e-5)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves((grads, out_BTD)))


def test_causality_by_gradient(tiny_model):
  model, params, config = tiny_model
  x_BTD = jax.random.normal(jax.random.key(6), (3, 6, config.d_model))
  rotation = rope.make_rotation(
    jnp.arange(6)[None, :], config.head_dim, config.rope_theta
  )
  mask_BTS = jnp.tril(jnp.ones((6, 6), bool))[None]
  block = layers.Block(config)
  variables = {'params': transformer.layer_params(params, 0)}

  def output_at(x_BTD, t):
    return jnp.sum(block.apply(variables, x_BTD, rotation, mask_BTS)[0][:, t])

  gradient = jax.jit(jax.grad(output_at))
  for t in (0, 3, 5):
    size_T = jnp.abs(gradient(x_BTD, t)).sum((0, 2))
    assert (size_T[: t + 1] > 0).all() and (size_T[t + 1 :] == 0).all()


def test_future_tokens_do_not_reach_back(tiny_model):
  model, params, _ = tiny_model
  tokens_BT, _ = ragged_rows()
  changed_BT = tokens_BT.copy()
  changed_BT[:, 5] = (changed_BT[:, 5] + 1) % 64
  a_BTD, b_BTD = (hidden(model, params, t) for t in (tokens_BT, changed_BT))
  np.testing.assert_array_equal(a_BTD[:, :5], b_BTD[:, :5])
  assert (jnp.abs(a_BTD - b_BTD).sum(-1)[:, 5:] > 0).all()


def loss_and_grads(model, params, chunk=4):
  tokens_BT, valid_BT = ragged_rows()

  def loss(params):
    scored = logprobs.token_logprobs(
      model, params, tokens_BT, valid_BT, chunk=chunk
    )
    return jnp.sum(scored.logprob) + 0.3 * jnp.sum(scored.entropy)

  return jax.jit(jax.value_and_grad(loss))(params)


@pytest.mark.parametrize('remat', [False, True])
def test_scan_equals_unrolled_in_value_and_gradient(tiny_model, remat):
  model, params, config = tiny_model
  scanned = transformer.Transformer(
    dataclasses.replace(config, scan_layers=True, remat=remat)
  )
  stacked = transformer.stack_params(params)
  fresh = jax.eval_shape(
    functools.partial(transformer.init_params, scanned), jax.random.key(0)
  )
  assert jax.tree.map(jnp.shape, stacked) == jax.tree.map(jnp.shape, fresh)
  assert_trees_close(transformer.unstack_params(stacked), params, atol=0)
  value, grads = loss_and_grads(model, params)
  scanned_value, scanned_grads = loss_and_grads(scanned, stacked)
  np.testing.assert_allclose(scanned_value, value, rtol=1e-5)
  assert_trees_close(
    transformer.unstack_params(scanned_grads), grads, atol=2e-4, rtol=1e-4
  )


def test_remat_changes_nothing(tiny_model):
  model, params, config = tiny_model
  remat = transformer.Transformer(dataclasses.replace(config, remat=True))
  assert_trees_close(
    loss_and_grads(remat, params),
    loss_and_grads(model, params),
    atol=2e-4,
    rtol=1e-4,
  )


def test_theta_is_used(tiny_model):
  model, params, config = tiny_model
  other = transformer.Transformer(dataclasses.replace(config, rope_theta=100.0))
  tokens_BT, _ = ragged_rows()
  a_BTD, b_BTD = (hidden(m, params, tokens_BT) for m in (model, other))
  np.testing.assert_allclose(a_BTD[:, 0], b_BTD[:, 0], atol=1e-6)
  assert jnp.abs(a_BTD - b_BTD)[:, 1:].max() > 1e-3
  # Rotary scores depend on the distance between positions only.
  shifted_BT = np.arange(11, 20)[None, :].repeat(3, axis=0)
  shifted, _ = read(model, params, tokens_BT, shifted_BT)
  np.testing.assert_allclose(shifted, a_BTD, atol=2e-5)


def numpy_attention(x_TD, p, theta):
  """Attention with one key head per query head, in float64 and loops."""
  T, H = len(x_TD), p['wq'].shape[2]
  out_TD = np.zeros_like(x_TD)
  for n in range(p['wq'].shape[1]):
    q_TH, k_TH, v_TH = (x_TD @ p[w][:, n] for w in ('wq', 'wk', 'wv'))
    for t in range(T):
      for i in range(H // 2):
        angle = t * theta ** (-2 * i / H)
        turn = np.array(
          [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
        )
        pair = [i, i + H // 2]
        q_TH[t, pair] = turn @ q_TH[t, pair]
        k_TH[t, pair] = turn @ k_TH[t, pair]
    for t in range(T):
      score_S = q_TH[t] @ k_TH[: t + 1].T / np.sqrt(H)
      weight_S = np.exp(score_S - score_S.max())
      out_TD[t] += weight_S @ v_TH[: t + 1] / weight_S.sum() @ p['wo'][n]
  return out_TD


@pytest.mark.parametrize('num_kv_heads', [4, 2])
def test_attention_equals_multi_head_attention_in_numpy(
  tiny_model, num_kv_heads
):
  config = dataclasses.replace(tiny_model[2], num_kv_heads=num_kv_heads)
  attention = layers.Attention(config)
  x_BTD = jax.random.normal(jax.random.key(7), (3, 5, config.d_model))
  rotation = rope.make_rotation(jnp.arange(5)[None, :], 8, config.rope_theta)
  mask_BTS = jnp.tril(jnp.ones((5, 5), bool))[None]
  init = jax.jit(attention.init)
  variables = init(jax.random.key(8), x_BTD, rotation, mask_BTS)
  variables = jax.tree.map(lambda x: 4 * x, nn.meta.unbox(variables))
  out_BTD, _ = jax.jit(attention.apply)(variables, x_BTD, rotation, mask_BTS)
  p = jax.tree.map(lambda x: np.asarray(x, np.float64), variables['params'])
  for name in ('wk', 'wv'):  # query head n reads key head n // (N / K)
    p[name] = np.repeat(p[name], 4 // num_kv_heads, axis=1)
  for b in range(3):
    reference_TD = numpy_attention(
      np.asarray(x_BTD[b], np.float64), p, config.rope_theta
    )
    np.testing.assert_allclose(out_BTD[b], reference_TD, atol=2e-5, rtol=1e-4)


def test_bfloat16_is_finite_and_close_with_float32_parameters(tiny_model):
  model, params, config = tiny_model
  half = transformer.Transformer(dataclasses.replace(config, dtype='bfloat16'))
  tokens_BT, valid_BT = ragged_rows()
  value, grads = loss_and_grads(half, params)
  assert np.isfinite(value)
  assert all(
    x.dtype == jnp.float32 and np.isfinite(x).all()
    for x in jax.tree.leaves(grads)
  )
  cache = kv_cache.empty(half.config, 3, 12)
  out_BTD, cache = read(half, params, tokens_BT, None, cache, valid_BT)
  assert out_BTD.dtype == cache.k[0].dtype == jnp.bfloat16
  exact_BTD = hidden(model, params, tokens_BT, valid_BT)
  np.testing.assert_allclose(
    out_BTD[valid_BT].astype(jnp.float32), exact_BTD[valid_BT], atol=0.15
  )
  logits = half.apply({'params': params}, out_BTD, method='unembed')
  assert logits.dtype == jnp.float32


@pytest.mark.parametrize('chunk', [1, 3, 8, 50])
def test_token_logprobs_equal_naive_with_gradients(tiny_model, chunk):
  model, params, _ = tiny_model
  tokens_BT, valid_BT = ragged_rows()

  def naive(params):
    hidden_BTD = hidden(model, params, tokens_BT, valid_BT)
    logits_BTV = model.apply({'params': params}, hidden_BTD, method='unembed')
    logp_BTV = jax.nn.log_softmax(logits_BTV[:, :-1])
    picked_BT = jnp.take_along_axis(
      logp_BTV, jnp.asarray(tokens_BT)[:, 1:, None], axis=-1
    )[..., 0]
    entropy_BT = -jnp.sum(jnp.exp(logp_BTV) * logp_BTV, axis=-1)
    first_B1 = jnp.zeros((3, 1))
    return tuple(
      jnp.where(valid_BT, jnp.concatenate([first_B1, x], axis=1), 0)
      for x in (picked_BT, entropy_BT)
    )

  def chunked(params):
    scored = logprobs.token_logprobs(
      model, params, tokens_BT, valid_BT, chunk=chunk
    )
    return scored.logprob, scored.entropy

  weight_BT = np.random.default_rng(9).normal(size=(3, 9)).astype(np.float32)
  cotangent = (jnp.asarray(weight_BT), 0.5 * jnp.asarray(weight_BT))

  @functools.partial(jax.jit, static_argnums=0)
  def value_and_pull(score, params):
    value, pull = jax.vjp(score, params)
    return value, pull(cotangent)

  value, grads = value_and_pull(chunked, params)
  naive_value, naive_grads = value_and_pull(naive, params)
  assert value[0].dtype == jnp.float32 and (value[0][:, 0] == 0).all()
  assert_trees_close(value, naive_value, atol=1e-5)
  assert_trees_close(grads, naive_grads, atol=2e-5)


def test_token_logprobs_never_hold_all_logits(make_model):
  # 67 is the size of nothing but the vocabulary.
  model, params, _ = make_model(vocab_size=67)
  tokens_BT = np.zeros((3, 33), np.int32)

  def loss(params):
    scored = logprobs.token_logprobs(model, params, tokens_BT, chunk=4)
    return jnp.sum(scored.logprob + scored.entropy)

  text = str(jax.make_jaxpr(jax.grad(loss))(params))
  shapes = {
    tuple(map(int, dims.split(',')))
    for dims in re.findall(r'f32\[([\d,]+)\]', text)
  }
  logits = {shape for shape in shapes if 67 in shape and len(shape) > 2}
  assert (3, 4, 67) in logits
  assert max(int(np.prod(shape)) for shape in logits) == 3 * 4 * 67


def test_token_logprobs_at_150k_pieces_stay_below_one_and_a_half_chunks(
  make_model,
):
  model, _, _ = make_model(vocab_size=151_936)
  params = jax.eval_shape(
    functools.partial(transformer.init_params, model), jax.random.key(0)
  )
  tokens_BT = jax.ShapeDtypeStruct((4, 65), jnp.int32)
  temperature_BT = jax.ShapeDtypeStruct((4, 65), jnp.float32)

  def score(params, tokens_BT, temperature_BT):
    return logprobs.token_logprobs(
      model, params, tokens_BT, None, temperature_BT, chunk=16
    )

  program = jax.jit(score).lower(params, tokens_BT, temperature_BT).compile()
  chunk_bytes = 4 * 16 * 151_936 * 4
  temporary = program.memory_analysis().temp_size_in_bytes
  assert temporary < 1.5 * chunk_bytes


def test_token_logprobs_of_one_token_rows(tiny_model):
  model, params, _ = tiny_model
  scored = logprobs.token_logprobs(
    model, params, np.zeros((3, 1), np.int32), chunk=4
  )
  np.testing.assert_array_equal(scored.logprob, np.zeros((3, 1)))


def test_num_params_is_the_hand_count(tiny_model):
  attention = 32 * (4 + 2 + 2) * 8 + 4 * 8 * 32
  per_layer = attention + 3 * 32 * 64 + 2 * 32
  total = 64 * 32 + 2 * per_layer + 32
  assert transformer.num_params(tiny_model[1]) == total


def test_initialisation_is_sensible_and_the_same_in_both_layouts(make_model):
  init = jax.jit(transformer.init_params, static_argnums=0)
  size = {'num_layers': 8, 'd_model': 64, 'd_ff': 256}
  model, _, _ = make_model(**size)
  scanned, _, _ = make_model(scan_layers=True, **size)
  params = init(model, jax.random.key(0))
  stacked = init(scanned, jax.random.key(0))
  assert_trees_close(transformer.stack_params(params), stacked, atol=0)
  tokens_BT, _ = ragged_rows()
  score = functools.partial(logprobs.token_logprobs, scanned, chunk=8)
  entropy_BT = jax.jit(score)(stacked, tokens_BT).entropy
  np.testing.assert_allclose(entropy_BT[:, 1:].mean(), np.log(64), atol=0.8)
  std_L = stacked['layers']['mlp']['w_down'].std((1, 2))
  np.testing.assert_allclose(std_L, (2 * 8 * 256) ** -0.5, rtol=0.05)
  assert len(np.unique(std_L)) == 8  # layers differ


@pytest.mark.parametrize(
  'changes, fix',
  [
    ({'num_kv_heads': 3}, 'divisor'),
    ({'head_dim': 7}, 'set head_dim=8'),
    ({'dtype': 'float16'}, 'bfloat16'),
    ({'num_layers': 0}, 'at least 1'),
    ({'rope_theta': 0.0}, 'must exceed 1'),
  ],
)
def test_impossible_configs_say_how_to_fix_them(tiny_model, changes, fix):
  with pytest.raises(ValueError, match=fix):
    dataclasses.replace(tiny_model[2], **changes)


def test_rows_longer_than_max_len_are_refused(make_model):
  model, params, _ = make_model(max_len=8)
  with pytest.raises(ValueError, match='raise max_len'):
    hidden(model, params, np.zeros((3, 9), np.int32))
  with pytest.raises(ValueError, match='raise max_len'):
    kv_cache.empty(model.config, 3, 9)
