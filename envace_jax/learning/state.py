"""What a train step changes, and where it lives.

`params` are all that is trained: a whole network, or, where the model's config
has `lora`, the adapters of a frozen one; a pair of either where each role has
its own. The optimizer's state is theirs, and a checkpoint is this state.
"""

from typing import Any

from flax import linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import optax

from envace_jax.model import per_role, sharding, transformer


@flax.struct.dataclass
class TrainState:
  """Arrays only."""

  step: jax.Array  # int32, batches consumed
  params: transformer.Params | per_role.PerRole  # trained: network or adapters
  opt_state: optax.OptState | per_role.PerRole


def init_state(
  model: transformer.Transformer,
  tx: optax.GradientTransformation,
  key: jax.Array,
  mesh: Mesh,
) -> TrainState:
  """A fresh state; no array ever exists unsharded."""
  return sharding.initialize(
    lambda key: _init_partitioned(model, tx, key), mesh, key
  )


def start_from(
  params: transformer.Params,
  model: transformer.Transformer,
  tx: optax.GradientTransformation,
  mesh: Mesh,
) -> TrainState:
  """Step 0 from weights that are placed already, which the state takes over."""
  shardings = jax.tree.map(
    lambda x: x.sharding, abstract_state(model, tx, mesh)
  )
  with sharding.use_mesh(mesh):
    begin = jax.jit(
      lambda params: (jnp.int32(0), tx.init(params)),
      out_shardings=(shardings.step, shardings.opt_state),
    )
    step, opt_state = begin(params)
  return TrainState(step, params, opt_state)


def separate(state: TrainState) -> TrainState:
  """The state with its network standing for both roles' own.

  Both are the same arrays: `restart` from it before anything is donated.
  """
  params = per_role.PerRole(act=state.params, rehearse=state.params)
  return state.replace(params=params)


def restart(
  state: TrainState, tx: optax.GradientTransformation, mesh: Mesh
) -> TrainState:
  """Step 0 of a new phase: a copy of the parameters, a fresh optimizer."""

  def begin(params):
    params = jax.tree.map(jnp.copy, params)
    return TrainState(jnp.int32(0), params, tx.init(params))

  with sharding.use_mesh(mesh):
    return jax.jit(begin)(state.params)


def abstract_state(
  model: transformer.Transformer,
  tx: optax.GradientTransformation,
  mesh: Mesh,
  *,
  share_roles: bool = True,
) -> TrainState:
  """Shapes, dtypes and shardings of `init_state`, to restore into.

  `share_roles=False` is a state with a network per role, and `tx` one for it.
  """
  boxed = jax.eval_shape(
    lambda: _init_partitioned(model, tx, jax.random.key(0), share_roles)
  )
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    nn.meta.unbox(boxed),
    sharding.state_shardings(boxed, mesh),
  )


def network_shardings(model: transformer.Transformer, mesh: Mesh) -> Any:
  """Where the weights of a network live, whether they are trained or not."""
  return sharding.state_shardings(
    jax.eval_shape(
      lambda: transformer.init_partitioned(model, jax.random.key(0))
    ),
    mesh,
  )


def _init_partitioned(model, tx, key, share_roles=True):
  params = transformer.init_trained(model, key)
  if not share_roles:
    params = per_role.PerRole(act=params, rehearse=params)
  return TrainState(jnp.int32(0), params, tx.init(params))
