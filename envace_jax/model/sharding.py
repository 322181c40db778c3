"""Where arrays live: three mesh axes, one table of rules.

  data     rows of a batch; parameters replicated
  fsdp     rows of a batch; parameters sharded on their `embed` axis
  tensor   heads, mlp and vocabulary sharded; rows replicated

Layers name the axes of parameters and activations logically; only this file
says which mesh axis a name lands on. One device is the mesh (1, 1, 1), and
goes through the same code.
"""

from collections.abc import Callable, Iterator
import contextlib
import math
from typing import Any

from flax import linen as nn
import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
import numpy as np

AXES = ('data', 'fsdp', 'tensor')
ROWS = ('data', 'fsdp')

RULES = (
  ('batch', ROWS),
  ('time', None),
  ('act_embed', None),
  ('embed', 'fsdp'),
  ('heads', 'tensor'),
  ('kv_heads', 'tensor'),
  ('head_dim', None),
  ('mlp', 'tensor'),
  ('vocab', 'tensor'),
  ('layers', None),
  ('rank', None),
)


def make_mesh(data: int = 1, fsdp: int = 1, tensor: int = 1) -> Mesh:
  """A mesh of data * fsdp * tensor devices.

  One process may leave devices unused; several must use all of them, or some
  process would own no part of the arrays.
  """
  shape = (data, fsdp, tensor)
  want, have = math.prod(shape), jax.device_count()
  name = f'mesh data={data}, fsdp={fsdp}, tensor={tensor}'
  if min(shape) < 1:
    raise ValueError(f'{name}: every axis must be at least 1')
  if want > have or (want < have and jax.process_count() > 1):
    raise ValueError(
      f'{name} needs {want} devices, {have} are visible to '
      f'{jax.process_count()} process(es); choose sizes whose product is '
      f'{have}, for example data={have}, fsdp=1, tensor=1'
    )
  return jax.make_mesh(
    shape,
    AXES,
    # make_mesh defaults to Explicit, which Linen's constraints reject.
    axis_types=(AxisType.Auto,) * len(AXES),
    devices=jax.devices()[:want],
  )


@contextlib.contextmanager
def use_mesh(mesh: Mesh) -> Iterator[Mesh]:
  """Makes mesh and rules current.

  Rules act when a function is traced: trace, lower and first call belong
  inside, or the constraints are silently lost.
  """
  with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
    yield mesh


def state_shardings(abstract_tree: Any, mesh: Mesh) -> Any:
  """Shardings of an `eval_shape`d tree whose parameters are still boxed.

  Has the structure of the unboxed tree. Leaves without names (counters, keys)
  are replicated. Optimizer state made from boxed parameters keeps the boxes.
  """
  specs = nn.get_partition_spec(abstract_tree)
  shardings = nn.logical_to_mesh_sharding(specs, mesh, RULES)
  jax.tree.map_with_path(
    _check_divisible, jax.eval_shape(nn.meta.unbox, abstract_tree), shardings
  )
  return shardings


def initialize(
  init: Callable[[jax.Array], Any], mesh: Mesh, key: jax.Array
) -> Any:
  """Runs `init(key)`, every array born sharded; returns it unboxed.

  No device ever holds a whole copy of what is sharded.
  """
  with use_mesh(mesh):
    shardings = state_shardings(jax.eval_shape(init, key), mesh)
    unboxed_init = lambda key: nn.meta.unbox(init(key))
    return jax.jit(unboxed_init, out_shardings=shardings)(key)


def replicated(mesh: Mesh) -> NamedSharding:
  return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """Rows (axis 0) over data and fsdp, all else replicated."""
  return NamedSharding(mesh, PartitionSpec(ROWS))


def place_batch(batch: Any, mesh: Mesh) -> Any:
  """This process's host rows -> global arrays sharded by row."""
  sharding = batch_sharding(mesh)
  ways = math.prod(mesh.shape[axis] for axis in ROWS)

  def place(x):
    x = np.asarray(x)
    rows = x.shape[0] * jax.process_count()
    if rows % ways:
      raise ValueError(
        f'{rows} rows do not divide over data * fsdp = {ways}; '
        f'pad the batch to {-(-rows // ways) * ways} rows'
      )
    return jax.make_array_from_process_local_data(sharding, x)

  return jax.tree.map(place, batch)


def _check_divisible(path, leaf, sharding: NamedSharding) -> None:
  for dim, axes in enumerate(sharding.spec):
    axes = (axes,) if isinstance(axes, str) else axes or ()
    ways = math.prod(sharding.mesh.shape[axis] for axis in axes)
    if leaf.shape[dim] % ways:
      raise ValueError(
        f'{jax.tree_util.keystr(path)} has shape {leaf.shape}: axis {dim} '
        f'does not divide over mesh {"*".join(axes)}={ways}; '
        f'lower that mesh axis or pad the model to a multiple of {ways}'
      )
