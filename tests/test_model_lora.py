"""An adapted network is its base plus a product of two thin matrices."""

import dataclasses

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envace_jax import types
from envace_jax.model import config as config_lib
from envace_jax.model import kv_cache, logprobs, lora, per_role, transformer
from envace_jax.sampling import decode

LORA = config_lib.LoraConfig(rank=3, alpha=6.0)
LENGTHS = np.array([9, 4, 7])
TOKENS_BT = np.random.default_rng(1).integers(0, 64, (3, 9))
VALID_BT = np.arange(9)[None, :] < LENGTHS[:, None]


def with_adapters(model, seed=0, config=LORA):
  """The model with adapters, and some that are not 0."""
  model = transformer.Transformer(
    dataclasses.replace(model.config, lora=config)
  )
  shapes = jax.eval_shape(
    lambda: transformer.init_trained(model, jax.random.key(0))
  )
  rng = np.random.default_rng(seed)
  noise = lambda x: (0.2 * rng.normal(size=x.shape)).astype(np.float32)
  return model, jax.tree.map(noise, nn.meta.unbox(shapes))


def logits(model, params):
  variables = lora.variables(params)
  hidden_BTD, _ = model.apply(variables, TOKENS_BT, None, None, VALID_BT)
  return model.apply(variables, hidden_BTD, method='unembed')


@pytest.mark.parametrize(
  'changes, targets',
  [
    ({'qk_norm': True}, tuple(config_lib.PROJECTIONS)),
    ({'scan_layers': True, 'remat': True}, ('wq', 'wo', 'w_down')),
  ],
)
def test_merged_equals_unmerged_and_differs_from_the_base(
  make_model, changes, targets
):
  plain, base, _ = make_model(**changes)
  config = dataclasses.replace(LORA, targets=targets)
  model, adapters = with_adapters(plain, config=config)
  adapted = lora.Adapted(base, adapters)
  merged = lora.merge(config, adapted)
  assert jax.tree.structure(merged) == jax.tree.structure(base)
  ours = logits(model, adapted)
  np.testing.assert_allclose(ours, logits(plain, merged), atol=1e-5)
  assert np.abs(ours - logits(plain, base)).max() > 0.01


def test_fresh_adapters_change_nothing_and_are_the_same_in_both_layouts(
  make_model,
):
  fresh = {}
  for scan_layers in (False, True):
    plain, base, _ = make_model(scan_layers=scan_layers)
    model, _ = with_adapters(plain)
    fresh[scan_layers] = transformer.init_trained(model, jax.random.key(5))
    adapters = nn.meta.unbox(fresh[scan_layers])
    np.testing.assert_array_equal(
      logits(model, lora.Adapted(base, adapters)), logits(plain, base)
    )
  jax.tree.map(
    np.testing.assert_array_equal,
    transformer.stack_params(nn.meta.unbox(fresh[False])),
    nn.meta.unbox(fresh[True]),
  )
  a = fresh[True]['layers']['mlp']['w_down']['a']
  assert a.names == ('layers', 'mlp', 'rank')
  assert a.value.shape == (2, 64, 3)
  np.testing.assert_allclose(a.value.std(), 64**-0.5, rtol=0.2)
  b = fresh[False]['layers_1']['attention']['wq']['b']
  assert b.names == ('rank', 'heads', 'head_dim')
  assert b.value.shape == (3, 4, 8)


@pytest.mark.parametrize('scan_layers', [False, True])
def test_the_cached_path_reads_the_adapters(make_model, scan_layers):
  plain, base, _ = make_model(scan_layers=scan_layers)
  model, adapters = with_adapters(plain)
  variables = lora.variables(lora.Adapted(base, adapters))
  full_BTD, _ = model.apply(variables, TOKENS_BT)
  cache = kv_cache.empty(model.config, 3, 12)
  first_BTD, cache = model.apply(variables, TOKENS_BT[:, :5], None, cache)
  then_BTD, _ = model.apply(variables, TOKENS_BT[:, 5:], None, cache)
  cached_BTD = jnp.concatenate([first_BTD, then_BTD], axis=1)
  np.testing.assert_allclose(cached_BTD, full_BTD, atol=1e-5)


def test_sampled_logprobs_are_rescored_for_each_role_over_one_base(tiny_model):
  plain, base, _ = tiny_model
  model, act = with_adapters(plain, 1)
  _, rehearse = with_adapters(plain, 2)
  both = lora.adapt(base, per_role.PerRole(act, rehearse))
  settings = decode.RoleSettings(
    temperature=jnp.ones(2),
    top_k=jnp.zeros(2, jnp.int32),
    top_p=jnp.ones(2),
    max_new=jnp.full(2, 8),
    stop=jnp.zeros((2, 64), bool),
  )
  said = []
  for role in types.Role:
    params = per_role.of(both, role)
    state = decode.prefill(
      model,
      params,
      TOKENS_BT[:, :6],
      np.zeros((3, 6), np.int8),
      np.array([6, 2, 4]),
      jax.random.split(jax.random.key(3), 3),
      group_size=1,
      capacity=16,
      cache_length=16,
    )
    state, _ = decode.generate(
      model, params, state, np.ones(3, bool), np.int32(role), settings,
      filtered=False,
    )  # fmt: skip
    valid_BT = np.arange(16)[None] < np.asarray(state.length)[:, None]
    scored = logprobs.token_logprobs(
      model, params, state.tokens, valid_BT, chunk=5
    )
    sampled_BT = np.asarray(state.logprobs) != 0
    assert sampled_BT.sum() == 24
    np.testing.assert_allclose(
      scored.logprob[sampled_BT], state.logprobs[sampled_BT], atol=1e-4
    )
    said.append(np.asarray(state.tokens))
  assert not np.array_equal(*said)  # each role by its own adapters


def test_a_base_in_half_precision_is_read_as_it_is(tiny_model):
  plain, base, _ = tiny_model
  model, adapters = with_adapters(plain)
  half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), base)
  rounded = jax.tree.map(lambda x: x.astype(jnp.float32), half)
  np.testing.assert_array_equal(
    logits(model, lora.Adapted(half, adapters)),
    logits(model, lora.Adapted(rounded, adapters)),
  )


def test_what_cannot_work_is_one_sentence(tiny_model):
  plain, base, _ = tiny_model
  _, adapters = with_adapters(plain)
  with pytest.raises(ValueError, match='model.lora is None'):
    logits(plain, lora.Adapted(base, adapters))
  for changes in ({'rank': 0}, {'alpha': 0.0}):
    with pytest.raises(ValueError, match='usual values'):
      dataclasses.replace(LORA, **changes)
  for targets in ((), ('wq', 'wz')):
    with pytest.raises(ValueError, match='choose some of'):
      dataclasses.replace(LORA, targets=targets)
