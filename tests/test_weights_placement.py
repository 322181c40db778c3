"""Weights are born in their shardings, and never whole on the host."""

import dataclasses
import functools
import tracemalloc

import jax
import numpy as np
import pytest

from envace_jax.model import sharding, transformer
from envace_jax.weights import export, names, pretrained

pytest.importorskip('safetensors', reason='writes and reads the files')


@pytest.fixture(scope='module')
def checkpoint(make_model, tmp_path_factory):
  """(parameters, unrolled; the directory they were written to)."""
  _, params, config = make_model(
    qk_norm=True, attention_bias=True, output_bias=True, tie_embeddings=False
  )
  directory = tmp_path_factory.mktemp('checkpoint') / 'x'
  export.save(
    params, config, directory, dtype='float32', eos_ids=(1,), shard_bytes=20_000
  )
  return params, directory


def shardings_of(config, mesh):
  init = functools.partial(
    transformer.init_partitioned, transformer.Transformer(config)
  )
  shapes = jax.eval_shape(init, jax.random.key(0))
  return sharding.state_shardings(shapes, mesh)


@pytest.mark.parametrize('scan_layers', [False, True])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('mesh', [(2, 2, 2), (1, 8, 1), (4, 1, 2)])
def test_eight_devices_hold_what_one_holds(
  checkpoint, scan_layers, dtype, mesh
):
  params, directory = checkpoint
  opened = pretrained.open_checkpoint(directory)
  config = dataclasses.replace(opened.config, scan_layers=scan_layers)
  shardings = shardings_of(config, sharding.make_mesh(*mesh))
  loaded = opened.load(config, shardings, dtype)
  one = opened.load(config, None, dtype)
  expected = transformer.stack_params(params) if scan_layers else params

  def compare(given, placed, whole, wanted):
    assert placed.sharding == wanted and placed.dtype == whole.dtype == dtype
    assert len(whole.sharding.device_set) == 1
    assert len(placed.sharding.device_set) == np.prod(mesh)
    given = np.asarray(given).astype(placed.dtype)
    np.testing.assert_array_equal(np.asarray(placed), given)
    np.testing.assert_array_equal(np.asarray(whole), given)

  jax.tree.map(compare, expected, loaded, one, shardings)
  layer = loaded['layers' if scan_layers else 'layers_1']
  stack = (2,) if scan_layers else ()
  _, fsdp, tensor = mesh
  for leaf, shape in (
    (loaded['embedding'], (64 // tensor, 32 // fsdp)),
    (layer['attention']['wq'], stack + (32 // fsdp, 4 // tensor, 8)),
    (layer['mlp']['w_down'], stack + (64 // tensor, 32 // fsdp)),
  ):
    assert leaf.addressable_shards[0].data.shape == shape


def test_a_tensor_is_read_once_for_each_shard(checkpoint, monkeypatch):
  """Of a stacked leaf: its tensors are never held together. Others, once."""
  _, directory = checkpoint
  opened = pretrained.open_checkpoint(directory)
  config = dataclasses.replace(opened.config, scan_layers=True)
  shardings = shardings_of(config, sharding.make_mesh(2, 2, 2))
  read = []
  real = pretrained.Pretrained.read

  def count(self, parameter, layer=None):
    read.append(parameter.hf.format(i=layer))
    return real(self, parameter, layer)

  monkeypatch.setattr(pretrained.Pretrained, 'read', count)
  opened.load(config, shardings)
  assert set(read) == set(opened.tensors.shapes)
  # Once for each of the (at most 4) distinct shards.
  assert max(map(read.count, read)) == 4
  assert {
    read.count(p.hf.format(i=0)) for p in names.parameters(config)
    if not p.layered
  } == {1}  # fmt: skip


@pytest.mark.parametrize('scan_layers', [False, True])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('mesh', [None, (1, 4, 2)])
def test_the_host_holds_one_tensor_and_one_shard(
  large, monkeypatch, scan_layers, dtype, mesh
):
  """Of what Python and numpy allocate, by tracemalloc, so to the byte.

  What arrives at a device is copied there at once (a CPU would keep numpy's own
  memory), so arrays that are placed do not count. Not counted either: pages of
  the mapped file, which the system drops when it needs them.
  """
  opened = pretrained.open_checkpoint(large)
  config = dataclasses.replace(opened.config, scan_layers=scan_layers)
  shardings = mesh and shardings_of(config, sharding.make_mesh(*mesh))
  put = jax.device_put
  copy = lambda x, device: jax.block_until_ready(put(x, device).copy())
  monkeypatch.setattr(jax, 'device_put', copy)
  opened.load(config, shardings, dtype)  # compiles the copies
  tracemalloc.start()
  try:
    before, _ = tracemalloc.get_traced_memory()
    params = opened.load(config, shardings, dtype)
    after, peak = tracemalloc.get_traced_memory()
  finally:
    tracemalloc.stop()
  leaves = jax.tree.leaves(params)
  total = sum(x.nbytes for x in leaves)
  shard = max(x.addressable_shards[0].data.nbytes for x in leaves)
  tensor = max(4 * np.prod(shape) for shape in opened.tensors.shapes.values())
  bound = 1.3 * tensor + shard
  assert tensor <= peak - before <= bound
  assert after - before < 0.1 * tensor, 'placed arrays hold host memory'
  if mesh:
    assert bound < 0.7 * total, 'the model is too small to tell'


@pytest.fixture(scope='module')
def large(make_model, tmp_path_factory):
  """A checkpoint whose largest tensor is 4 MiB of 24, in files of 8."""
  _, params, config = make_model(
    vocab_size=4096, d_model=256, d_ff=1024, num_layers=6
  )
  directory = tmp_path_factory.mktemp('large') / 'x'
  export.save(
    params, config, directory, dtype='float32', eos_ids=(1,),
    shard_bytes=8 << 20,
  )  # fmt: skip
  return directory
