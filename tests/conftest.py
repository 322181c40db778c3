"""Eight host devices, strict shapes, and the stubs that tests share."""

import jax

# Binds when the backend starts, so before any test module touches an array.
jax.config.update('jax_platforms', 'cpu')
jax.config.update('jax_num_cpu_devices', 8)
jax.config.update('jax_numpy_rank_promotion', 'raise')

import pytest  # noqa: E402

from envace_jax.model import config as config_lib  # noqa: E402
from envace_jax.model import transformer  # noqa: E402


@pytest.fixture(scope='session')
def tiny_model():
  """(model, params, config), small enough to compile in a second."""
  config = config_lib.TransformerConfig(
    vocab_size=64,
    d_model=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    d_ff=64,
    max_len=256,
  )
  model = transformer.Transformer(config)
  init = jax.jit(transformer.init_params, static_argnums=0)
  return model, init(model, jax.random.key(0)), config
