"""Eight host devices, strict shapes, and the stubs that tests share."""

import dataclasses
import functools

import jax

# Binds when the backend starts, so before any test module touches an array.
jax.config.update('jax_platforms', 'cpu')
jax.config.update('jax_num_cpu_devices', 8)
jax.config.update('jax_numpy_rank_promotion', 'raise')

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import serving  # noqa: E402
import talkative  # noqa: E402

from envace_jax.model import config as config_lib  # noqa: E402
from envace_jax.model import transformer  # noqa: E402
from envace_jax.serving import engine  # noqa: E402

TINY = config_lib.TransformerConfig(
  vocab_size=64,
  d_model=32,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  d_ff=64,
  max_len=256,
)


# A file stays on one worker; the longest are to begin first.
LONGEST = (
  'test_train',
  'test_pretrained_run',
  'test_learning_lora',
  'test_published_run',
  'test_serving_http',
  'test_per_role',
  'test_notebook',
  'test_model_attention',
  'test_main',
  'test_serving_chat',
  'test_serving_engine',
  'test_weights_gguf',
  'test_rollout_reopening',
)


def pytest_collection_modifyitems(items):
  """Longest files first, and the others as they come."""
  order = {name: i for i, name in enumerate(LONGEST)}
  items.sort(key=lambda item: order.get(item.path.stem, len(order)))


@pytest.fixture(scope='session')
def make_model():
  """Builds (model, params, config): the tiny config with some changes.

  Parameters come from numpy: initialisers cost ten seconds of compilation,
  and leave every norm scale at 1, where it cannot be seen to work.
  """

  def make(**changes):
    config = dataclasses.replace(TINY, **changes)
    model = transformer.Transformer(config)
    shapes = jax.eval_shape(
      functools.partial(transformer.init_params, model), jax.random.key(0)
    )
    generator = np.random.default_rng(0)

    def draw(path, leaf):
      noise = generator.normal(size=leaf.shape).astype(leaf.dtype)
      is_scale = path[-1].key == 'scale'
      return jax.numpy.asarray(1 + 0.1 * noise if is_scale else 0.2 * noise)

    return model, jax.tree.map_with_path(draw, shapes), config

  return make


@pytest.fixture(scope='session')
def tiny_model(make_model):
  """(model, params, config), small enough to compile in a second."""
  return make_model()


@pytest.fixture(scope='session')
def draw_thin_model():
  """Makes (model, draw): one thin layer, and new parameters at every draw."""

  def make():
    config = dataclasses.replace(TINY, num_layers=1, d_model=16)
    model = transformer.Transformer(config)
    shapes = jax.eval_shape(
      lambda: transformer.init_params(model, jax.random.key(0))
    )
    rng = np.random.default_rng(0)
    noise = lambda x: (0.2 * rng.normal(size=x.shape)).astype(np.float32)
    return model, lambda: jax.tree.map(noise, shapes)

  return make


@pytest.fixture(scope='session')
def policy():
  """(model, params) that call tools, answer and stop, by chance."""
  return talkative.policy()


@pytest.fixture(scope='module')
def rehearsing():
  """An engine whose policy answers itself; it compiles what it is asked for."""
  motor = engine.Engine(*serving.rehearser(), serving.REHEARSING)
  motor.start()
  yield motor
  motor.close(drain=False)
