"""Low-rank adapters: a small trained correction of a frozen network.

  y = x W + (alpha / rank) (x A) B        A: inputs x rank, B: rank x outputs

The correction is computed in the layer, so that W is only ever read: a
gradient with respect to A and B needs x, x A and what comes back through W,
and no array of W's shape. B starts at 0: an adapted network first computes
what its base does.

`adapters` are a tree like the parameters, with {'a', 'b'} where an adapted
matrix stands and nothing elsewhere. `Adapted` is what samples and scores;
what is trained, and saved, are the adapters alone. A network per role over one
base is a `PerRole` of adapters.

Hu et al., arXiv 2106.09685. Not here: dropout of x, adapted embeddings.
"""

from collections.abc import Mapping
from typing import Any

from flax import linen as nn
from flax import traverse_util
import flax.struct
import jax
import jax.numpy as jnp

from envace_jax.model import config as config_lib
from envace_jax.model import per_role

Tree = Mapping[str, Any]

# The collection of adapters, next to Flax's own 'params'.
COLLECTION = 'lora'


@flax.struct.dataclass
class Adapted:
  """A frozen network and what corrects it."""

  base: Tree
  adapters: Tree


def variables(params: Tree | Adapted) -> Mapping[str, Tree]:
  """What `model.apply` takes, of a plain network or an adapted one."""
  if isinstance(params, Adapted):
    return {'params': params.base, COLLECTION: params.adapters}
  return {'params': params}


def adapt(
  base: Tree | None, trained: Tree | per_role.PerRole
) -> Tree | Adapted | per_role.PerRole:
  """The network or networks that what is trained stands for.

  Without a base these are the parameters themselves; with one, `trained` are
  adapters, which share it.
  """
  if base is None:
    return trained
  if isinstance(trained, per_role.PerRole):
    return per_role.PerRole(
      act=Adapted(base, trained.act), rehearse=Adapted(base, trained.rehearse)
    )
  return Adapted(base, trained)


def correction(
  config: config_lib.LoraConfig | None, adapter: Tree, equation: str, x
) -> jax.Array:
  """scale (x A) B of the projection `equation`, in x's dtype.

  'BTNH,NHD->BTD' is read as 'BTNH,NHr->BTr' and 'BTr,rD->BTD'.
  """
  if config is None:
    raise ValueError(
      'these parameters have adapters and model.lora is None; give the model '
      'the LoraConfig that they were trained with, or merge them'
    )
  operands, outputs = equation.split('->')
  inputs, weights = operands.split(',')
  read = ''.join(axis for axis in weights if axis in inputs)
  written = ''.join(axis for axis in weights if axis not in inputs)
  kept = ''.join(axis for axis in inputs if axis not in read)
  a, b = (adapter[name].astype(x.dtype) for name in ('a', 'b'))
  low = jnp.einsum(f'{inputs},{read}r->{kept}r', x, a)
  return config.scale * jnp.einsum(f'{kept}r,r{written}->{outputs}', low, b)


def init_partitioned(
  config: config_lib.LoraConfig, boxed: Tree, key: jax.Array
) -> Tree:
  """Fresh float32 adapters, boxed with axis names, of a boxed network.

  Only names and shapes of `boxed` are read, so an `eval_shape` of it will do.
  """
  flat = traverse_util.flatten_dict(boxed)
  chosen = sorted(path for path in flat if path[-1] in config.targets)
  keys = jax.random.split(key, len(chosen))
  adapters = {}
  for i, path in enumerate(chosen):
    shape, names = flat[path].value.shape, flat[path].names
    cut = _outputs_from(path)
    stack = cut - config_lib.PROJECTIONS[path[-1]]
    fan_in = 1
    for size in shape[stack:cut]:
      fan_in *= size
    a = jax.random.normal(keys[i], (*shape[:cut], config.rank))
    adapters[*path, 'a'] = nn.LogicallyPartitioned(
      a * fan_in**-0.5, (*names[:cut], 'rank')
    )
    adapters[*path, 'b'] = nn.LogicallyPartitioned(
      jnp.zeros((*shape[:stack], config.rank, *shape[cut:])),
      (*names[:stack], 'rank', *names[cut:]),
    )
  return traverse_util.unflatten_dict(adapters)


def merge(config: config_lib.LoraConfig, adapted: Adapted) -> Tree:
  """Plain float32 parameters that compute what the adapted network does."""
  flat = traverse_util.flatten_dict(adapted.adapters)

  def correct(path, weight):
    weight = weight.astype(jnp.float32)
    if (*path, 'a') not in flat:
      return weight
    product = lambda a, b: jnp.tensordot(a, b, axes=1, precision='highest')
    if _is_stacked(path):
      product = jax.vmap(product)
    return weight + config.scale * product(flat[*path, 'a'], flat[*path, 'b'])

  base = traverse_util.flatten_dict(adapted.base)
  return traverse_util.unflatten_dict(
    {path: correct(path, weight) for path, weight in base.items()}
  )


def _outputs_from(path: tuple[str, ...]) -> int:
  """The first output axis of a matrix, behind layers and inputs."""
  return _is_stacked(path) + config_lib.PROJECTIONS[path[-1]]


def _is_stacked(path: tuple[str, ...]) -> bool:
  return path[0] == 'layers'
