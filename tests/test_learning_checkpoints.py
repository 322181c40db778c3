"""Checkpoints: bit-exact, complete or passed over, and errors that surface."""

import json
import logging as std_logging
import os
import pathlib
import signal
import subprocess
import sys
import textwrap

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from envace_jax.learning import checkpoints
from envace_jax.model import sharding

ROOT = pathlib.Path(checkpoints.__file__).parents[2]
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


@flax.struct.dataclass
class State:
  step: jax.Array
  params: dict
  opt_state: optax.OptState


def make_state(seed=0, size=8):
  rng = np.random.default_rng(seed)
  params = {
    'w': jnp.asarray(rng.normal(size=(size, 4)), jnp.float32),
    'half': jnp.asarray(rng.normal(size=(5,)), jnp.bfloat16),
  }
  opt_state = jax.tree.map(lambda x: x + 3, TX.init(params))
  return State(jnp.int32(seed), params, opt_state)


def abstract(state, placement=None):
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=placement or x.sharding
    ),
    state,
  )


def assert_same(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    assert x.dtype == y.dtype
    np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def open_at(directory, **options):
  return checkpoints.Checkpointer(directory, **({'max_to_keep': 3} | options))


def saved(directory, *steps):
  with open_at(directory) as checkpointer:
    for step in steps:
      checkpointer.save(step, make_state(step), {'cursor': 10 * step})


def test_a_restored_state_is_the_saved_one_bit_for_bit(tmp_path):
  saved(tmp_path, 1, 2)
  with open_at(tmp_path) as checkpointer:
    assert checkpointer.latest_step() == 2
    state, meta = checkpointer.restore(abstract(make_state()))
  assert_same(state, make_state(2))
  assert meta == {'cursor': 20}
  # The tree is not merely alike: a jitted update takes it.
  grads = jax.tree.map(jnp.ones_like, state.params)
  TX.update(grads, state.opt_state, state.params)


def test_a_state_may_be_donated_as_soon_as_save_returns(tmp_path):
  spoil = jax.jit(lambda s: jax.tree.map(lambda x: -x - 1, s), donate_argnums=0)
  state = make_state(5, size=500_000)
  expected = jax.tree.map(lambda x: np.array(x, copy=True), state)
  with open_at(tmp_path) as checkpointer:
    checkpointer.save(5, state, {})
    for _ in range(3):
      state = spoil(state)
    restored, _ = checkpointer.restore(abstract(state))
  assert_same(restored, expected)


def test_another_mesh_may_restore_the_state_or_the_params_alone(tmp_path):
  mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
  rows = jax.device_put(make_state(3), sharding.replicated(mesh))
  rows = rows.replace(
    params=rows.params
    | {'w': jax.device_put(rows.params['w'], sharding.batch_sharding(mesh))}
  )
  with open_at(tmp_path) as checkpointer:
    checkpointer.save(3, rows, {})
    checkpointer.wait()
    one = sharding.replicated(sharding.make_mesh())
    state, _ = checkpointer.restore(abstract(make_state(), one))
    assert_same(state, make_state(3))
    two = sharding.replicated(sharding.make_mesh(data=2))
    params = abstract(make_state().params, two)
    step, params = checkpointer.restore_params(params)
  assert step == 3
  assert_same(params, make_state(3).params)
  assert params['w'].sharding.is_equivalent_to(two, 2)


@pytest.mark.parametrize(
  'damage',
  [
    lambda d: (d / 'meta' / 'metadata').write_text('{'),
    lambda d: _remove(d / 'meta'),
    lambda d: _remove(d / 'state'),
    lambda d: _truncate_arrays(d / 'state'),
  ],
  ids=['torn_meta', 'no_meta', 'no_state', 'torn_arrays'],
)
def test_a_damaged_newest_step_is_passed_over_and_set_aside(
  tmp_path, caplog, damage
):
  saved(tmp_path, 1, 2, 3)
  damage(tmp_path / '3')
  with open_at(tmp_path) as checkpointer:
    with caplog.at_level(std_logging.WARNING):
      state, meta = checkpointer.restore(abstract(make_state()))
    assert meta == {'cursor': 20}
    assert_same(state, make_state(2))
    assert 'restored step 2' in caplog.text and 'step 3: ' in caplog.text
    # Training reaches step 3 again: it is saved, the old one kept apart.
    checkpointer.save(3, make_state(33), {'cursor': 33})
    state, meta = checkpointer.restore(abstract(make_state()))
  assert meta == {'cursor': 33}
  assert_same(state, make_state(33))
  assert (tmp_path / '3.unreadable').exists()


def _remove(directory):
  for path in sorted(directory.rglob('*'), reverse=True):
    path.rmdir() if path.is_dir() else path.unlink()
  directory.rmdir()


def _truncate_arrays(directory):
  for path in directory.rglob('d/*'):
    path.write_bytes(path.read_bytes()[:-7])


def test_nothing_there_and_nothing_readable_are_different_errors(tmp_path):
  target = abstract(make_state())
  with open_at(tmp_path) as checkpointer:
    assert checkpointer.latest_step() is None
    with pytest.raises(checkpoints.CheckpointError, match='no checkpoint'):
      checkpointer.restore(target)
  saved(tmp_path, 1, 2)
  other_model = abstract(make_state(size=6))
  with open_at(tmp_path) as checkpointer:
    with pytest.raises(
      checkpoints.CheckpointError, match='no readable.*step 2: .*step 1: '
    ):
      checkpointer.restore(other_model)
    # The caller was wrong, not the files: nothing is set aside for that.
    checkpointer.save(4, make_state(4), {})
    assert checkpointer.latest_step() == 4
  assert {'1', '2', '4'} <= set(os.listdir(tmp_path))


def test_a_failed_background_save_reaches_the_caller(tmp_path, monkeypatch):
  def broken(*_, **__):
    raise OSError('disk full')

  for surface in ('save', 'wait', 'close'):
    checkpointer = open_at(tmp_path / surface)
    checkpointer.save(1, make_state(1), {})
    checkpointer.wait()
    with monkeypatch.context() as patch:
      # The last act of a save, in the background: the rename to its step.
      patch.setattr(pathlib.Path, 'rename', broken)
      patch.setattr(os, 'rename', broken)
      patch.setattr(os, 'replace', broken)
      checkpointer.save(2, make_state(2), {})
      call = getattr(checkpointer, surface)
      args = (3, make_state(3), {}) if surface == 'save' else ()
      with pytest.raises(checkpoints.CheckpointError, match='disk full'):
        call(*args)
  with open_at(tmp_path / 'close') as checkpointer:
    assert checkpointer.latest_step() == 1


def test_saving_again_is_one_save_and_saving_the_past_is_an_error(tmp_path):
  with open_at(tmp_path, max_to_keep=2) as checkpointer:
    for step in (1, 2, 3):
      checkpointer.save(step, make_state(step), {})
    checkpointer.save(3, make_state(99), {})
    with pytest.raises(checkpoints.CheckpointError, match='holds step 3'):
      checkpointer.save(2, make_state(2), {})
    state, _ = checkpointer.restore(abstract(make_state()))
    assert_same(state, make_state(3))
  with open_at(tmp_path, max_to_keep=2) as checkpointer:
    checkpointer.restore(abstract(make_state()))
    checkpointer.save(3, make_state(99), {})  # resumed at the end: nothing new
  assert sorted(p.name for p in tmp_path.iterdir()) == ['2', '3']


def test_a_reader_leaves_the_writer_alone(tmp_path):
  with open_at(tmp_path / 'nothing', read_only=True) as reader:
    assert reader.latest_step() is None
  assert not (tmp_path / 'nothing').exists()
  saved(tmp_path, 1)
  leftover = tmp_path / '2.orbax-checkpoint-tmp'
  leftover.mkdir()
  with open_at(tmp_path, read_only=True) as reader:
    assert reader.latest_step() == 1
    assert leftover.exists()
    saved(tmp_path, 3)
    assert reader.latest_step() == 3
  assert not leftover.exists()  # the writer cleaned up


_KILLED = """
  import os, signal, sys, jax
  jax.config.update('jax_platforms', 'cpu')
  import numpy as np
  from envace_jax.learning import checkpoints
  directory, megabytes = sys.argv[1], int(sys.argv[2])
  checkpointer = checkpoints.Checkpointer(directory, max_to_keep=3)
  for step in (1, 2):
    rng = np.random.default_rng(step)
    size = 2 if step == 1 else megabytes * 250_000
    state = {'small': rng.normal(size=3).astype('f'),
             'big': rng.normal(size=size).astype('f')}
    checkpointer.save(step, jax.tree.map(jax.numpy.asarray, state),
                      {'cursor': step})
    if step == 1:
      checkpointer.wait()
  os.kill(os.getpid(), signal.SIGKILL)
"""


def test_kill_minus_nine_during_a_save_leaves_the_last_complete_step(tmp_path):
  killed = subprocess.run(
    [sys.executable, '-c', textwrap.dedent(_KILLED), str(tmp_path), '48'],
    cwd=ROOT,
    env=os.environ | {'PYTHONPATH': str(ROOT)},
    capture_output=True,
    timeout=120,
  )
  assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()[-2000:]
  assert any('tmp' in name for name in os.listdir(tmp_path))
  with open_at(tmp_path) as checkpointer:
    assert checkpointer.latest_step() == 1
    state, meta = checkpointer.restore(
      {
        'small': jax.ShapeDtypeStruct((3,), jnp.float32),
        'big': jax.ShapeDtypeStruct((2,), jnp.float32),
      }
    )
    assert json.dumps(meta) == '{"cursor": 1}'
    rng = np.random.default_rng(1)
    assert_same(state['small'], rng.normal(size=3).astype('f'))
    checkpointer.save(2, state, {})  # and the step that was lost can be saved
    assert checkpointer.latest_step() == 2
