"""Tensors of a file -> arrays on devices, one at a time.

The host holds the tensor being read and the shard being filled, never the
model: a shard goes to its devices as soon as it is whole. Where layers are
stacked a shard takes its slice of every layer in turn, so a tensor is read
again for each distinct shard.
"""

from collections.abc import Callable
import gc
from typing import Any

import jax
import numpy as np

from envace_jax import errors
from envace_jax.model import config as config_lib
from envace_jax.weights import names

# (parameter, layer or None) -> the tensor as files store it
Read = Callable[[names.Parameter, int | None], np.ndarray]


def load(
  read: Read,
  config: config_lib.TransformerConfig,
  shardings: Any,
  dtype: np.dtype,
) -> dict[str, Any]:
  """The parameter tree of `config`, each leaf placed by `shardings`' leaf.

  `shardings` is a tree of that structure, or None for the default device.
  """
  tree: dict[str, Any] = {}
  for parameter in names.parameters(config):
    for layer, path in enumerate(names.tree_paths(parameter, config)):
      sharding = _sharding_at(shardings, path)
      if not parameter.layered:
        layers = None
      elif config.scan_layers:
        layers = range(config.num_layers)
      else:
        layers = range(layer, layer + 1)
      stacked = parameter.layered and config.scan_layers
      leaf = _place(read, parameter, layers, stacked, sharding, dtype)
      _insert(tree, path, leaf)
  return tree


def _place(read, parameter, layers, stacked, sharding, dtype) -> jax.Array:
  shape = parameter.shape
  if stacked:
    shape = (len(layers), *shape)
  shards: dict[tuple, list] = {}
  indices = sharding.addressable_devices_indices_map(shape)
  for device, index in indices.items():
    bounds = tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
    shards.setdefault(bounds, []).append(device)
  whole = (
    None
    if stacked
    else parameter.from_file(
      read(parameter, None if layers is None else layers[0])
    )
  )
  arrays = []
  for bounds, devices in shards.items():
    cut = tuple(slice(*b) for b in bounds)
    if stacked:
      shard = np.empty([stop - start for start, stop in bounds], dtype)
      for i, layer in enumerate(layers[cut[0]]):
        shard[i] = parameter.from_file(read(parameter, layer))[cut[1:]]
    else:
      shard = np.ascontiguousarray(whole[cut], dtype)
    arrays += [jax.device_put(shard, device) for device in devices]
    # Copies to devices may be under way: the next shard waits for them, or
    # the host would hold many.
    jax.block_until_ready(arrays)
    # Nor this one while the next is filled: JAX lets go of what it has copied
    # when Python collects garbage.
    del shard
    gc.collect(0)
  return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _sharding_at(shardings: Any, path: tuple[str, ...]):
  if shardings is None:
    return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  node = shardings
  for name in path:
    if not hasattr(node, 'keys') or name not in node:
      raise errors.UserError(
        f'shardings have no leaf {"/".join(path)}; make them from a model of '
        "the checkpoint's config"
      )
    node = node[name]
  return node


def _insert(tree: dict, path: tuple[str, ...], leaf: jax.Array) -> None:
  for name in path[:-1]:
    tree = tree.setdefault(name, {})
  tree[path[-1]] = leaf
