"""The two train steps: state and data in, state and metrics out.

  make_supervised_step   learns recorded attempts
  make_policy_step       role-wise clipped policy gradient
                         [+ KL to a frozen reference] [+ recorded-world anchor]

`learning.objective` says what is minimised; here gradients are accumulated
over microbatches (one `lax.scan`, whose memory is that of one microbatch),
applied, and reported. 1 or 8 microbatches, 1 or 8 devices: the same update,
because the loss is divided by counts of the whole batch.

The policy step also trains a network per role (`PerRole`), each on its role's
rows. The loss is then the same sum with the same divisors, as if one network
had two copies of its parameters: with equal copies their gradients add up to
that of the one. Each network's own optimizer state and norm make the rest.

Differentiated is what the state holds and nothing else: `state.params` are a
whole network, or, where the model's config has `lora`, adapters. Then the
steps are made with the frozen `base` they correct, which is an argument of the
program that is neither donated nor returned: it exists once, for however many
adapters, and a reference may share it too. Optimizer state and checkpoints are
those of the adapters.

An update that is not finite is dropped whole and counted in `skipped`. `step`
then still goes on, as it counts batches and the data cursor follows it, while
parameters and optimizer (with its own count of updates) stay as they were.
"""

from collections.abc import Callable, Mapping
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import optax

from envace_jax import types
from envace_jax.learning import accumulation, losses, objective
from envace_jax.learning import batch as batches
from envace_jax.learning import state as states
from envace_jax.model import lora, per_role, sharding, transformer

Metrics = Mapping[str, jax.Array]  # flat, float32 scalars


@dataclasses.dataclass(frozen=True)
class Step:
  """A train step: its program, and what its arguments must be like."""

  jitted: Callable[..., tuple[states.TrainState, Metrics]]
  mesh: Mesh
  arguments: Callable[..., tuple[Any, ...]]  # checks the caller's, adds ours

  def __call__(self, *arguments) -> tuple[states.TrainState, Metrics]:
    """Takes the step."""
    with sharding.use_mesh(self.mesh):
      return self.jitted(*self.arguments(*arguments))

  def lower(self, *arguments) -> jax.stages.Lowered:
    """The program for arguments of these shapes, to be compiled ahead.

    The mesh may be of devices that are not there.
    """
    with sharding.use_mesh(self.mesh):
      return self.jitted.lower(*self.arguments(*arguments))


def make_supervised_step(
  model: transformer.Transformer,
  tx: optax.GradientTransformation,
  config: objective.LossConfig,
  mesh: Mesh,
  *,
  base: transformer.Params | None = None,
) -> Step:
  """`step(state, batch) -> (state, metrics)`; donates the given state.

  `base` is what adapters correct, and None for a model without.
  """
  _check_base(model, base)

  def step(state, base, batch):
    divisors = objective.supervised_denominators(batch, config)
    loss_fn = lambda trained, rows: objective.supervised_loss(
      model, lora.adapt(base, trained), rows, divisors, config
    )
    state, metrics = _update(state, loss_fn, batch, tx, config, mesh)
    for role in types.Role:
      mask_BT = batches.loss_mask(batch, objective.RECORDED_AUTHORS[role])
      metrics |= _count(role, mask_BT)
    return state, metrics

  shardings = jax.tree.map(
    lambda x: x.sharding, states.abstract_state(model, tx, mesh)
  )
  jitted = jax.jit(
    step,
    in_shardings=(
      shardings,
      None if base is None else states.network_shardings(model, mesh),
      sharding.batch_sharding(mesh),
    ),
    out_shardings=(shardings, sharding.replicated(mesh)),
    donate_argnums=0,
  )

  def arguments(state, batch):
    _check_rows('batch', batch, config, mesh)
    return state, base, batch

  return Step(jitted, mesh, arguments)


def make_policy_step(
  model: transformer.Transformer,
  tx: optax.GradientTransformation,
  config: objective.LossConfig,
  mesh: Mesh,
  *,
  share_roles: bool = True,
  base: transformer.Params | None = None,
) -> Step:
  """`step(state, batch, ref_params, anchor_batch) -> (state, metrics)`.

  `ref_params` is read only if there is a KL weight and `anchor_batch` only if
  there is an NLL weight; None will do otherwise. The given state is donated,
  so the reference must be a copy of its parameters, not an alias.

  With `share_roles=False`, state and batch are those of a network per role
  (`state.separate`, `batches.pack_views`). The reference is one network all the
  same, and the anchor, which REHEARSE's network learns, one batch.

  `base` is what adapters correct, and None for a model without. Of adapters,
  the reference may be the base itself, or `Adapted` from it.
  """
  _check_base(model, base)

  def step(state, base, batch, ref_params, anchor):
    divisors = objective.policy_denominators(batch, config)
    if config.uses_anchor:
      anchor_divisor = objective.anchor_denominator(anchor, config)

    def loss_fn(trained, micro):
      params = lora.adapt(base, trained)
      rows, anchor_rows = micro
      value, sums = _policy_loss(
        model, params, ref_params, rows, divisors, config
      )
      sums['nll'] = losses.ZERO
      if config.uses_anchor:
        world = per_role.of(params, types.Role.REHEARSE)
        anchor_value, sums['nll'] = objective.anchor_loss(
          model, world, anchor_rows, anchor_divisor, config
        )
        value += anchor_value
      return value, sums

    state, metrics = _update(state, loss_fn, (batch, anchor), tx, config, mesh)
    for role in types.Role:
      rows = per_role.of(batch, role)
      metrics |= _count(role, batches.role_mask(rows, role))
    return state, metrics

  shardings = jax.tree.map(
    lambda x: x.sharding,
    states.abstract_state(model, tx, mesh, share_roles=share_roles),
  )
  rows = sharding.batch_sharding(mesh)
  ref = None
  if config.uses_reference and base is None:
    ref = per_role.of(shardings.params, types.Role.ACT)
  jitted = jax.jit(
    step,
    # Without a sharding of its own a reference stays where it has been placed.
    in_shardings=(
      shardings,
      None if base is None else states.network_shardings(model, mesh),
      rows,
      ref,
      rows if config.uses_anchor else None,
    ),
    out_shardings=(shardings, sharding.replicated(mesh)),
    donate_argnums=0,
  )

  def arguments(state, batch, ref_params, anchor_batch):
    for rows in batches.all_of(batch):
      _check_rows('batch', rows, config, mesh)
    ref_params = ref_params if config.uses_reference else None
    anchor_batch = anchor_batch if config.uses_anchor else None
    if config.uses_reference:
      _check_reference(state, ref_params)
    if config.uses_anchor:
      if anchor_batch is None:
        raise ValueError(f'nll_weight={config.nll_weight} needs anchor_batch')
      _check_rows('anchor_batch', anchor_batch, config, mesh)
    return state, base, batch, ref_params, anchor_batch

  return Step(jitted, mesh, arguments)


def _policy_loss(model, params, ref_params, rows, divisors, config):
  """That of the one network, or of both, each on the rows of its role."""
  if not isinstance(params, per_role.PerRole):
    return objective.policy_loss(
      model, params, ref_params, rows, divisors, config
    )
  parts = [
    objective.policy_loss(
      model, params[role], ref_params, rows[role], divisors, config
    )
    for role in types.Role
  ]
  return jax.tree.map(jnp.add, *parts)


def _update(state, loss_fn, rows, tx, config, mesh):
  """One optimizer update, or none where it would not be finite."""
  value, sums, grads = accumulation.accumulate(
    loss_fn, state.params, rows, config
  )
  grad_norm = optax.tree.norm(grads)
  updates, opt_state = tx.update(grads, state.opt_state, state.params)
  params = optax.apply_updates(state.params, updates)
  is_finite = jnp.isfinite(value) & jnp.isfinite(grad_norm)
  keep = lambda new, old: jnp.where(is_finite, new, old)
  state = states.TrainState(
    step=state.step + 1,
    params=jax.tree.map(keep, params, state.params),
    opt_state=jax.tree.map(keep, opt_state, state.opt_state),
  )
  metrics = {name: pair.mean() for name, pair in sums.items()}
  metrics |= {
    'loss': value,
    'grad_norm': grad_norm,
    'skipped': (~is_finite).astype(jnp.float32),
  }
  return state, metrics


def _count(role, mask_BT):
  key = f'tokens/{objective.role_name(role)}'
  return {key: mask_BT.sum(dtype=jnp.float32)}


def _check_base(model, base):
  if (base is None) != (model.config.lora is None):
    raise ValueError(
      'a model whose config has lora is trained with the base that its '
      'adapters correct, and any other without one; '
      f'lora={model.config.lora} and base is '
      f'{"None" if base is None else "given"}'
    )


def _check_rows(name, batch, config, mesh):
  rows = batch.tokens.shape[0]
  ways = math.prod(mesh.shape[axis] for axis in sharding.ROWS)
  multiple = config.microbatches * ways
  if rows % multiple:
    raise ValueError(
      f'{name} has {rows} rows, not a multiple of microbatches='
      f'{config.microbatches} times {ways} devices that share rows; '
      f'pad it to {-(-rows // multiple) * multiple}'
    )


def _check_reference(state, ref_params):
  if ref_params is None:
    raise ValueError('a KL weight above 0 needs ref_params')
  owned = {id(x) for x in jax.tree.leaves(state.params)}
  if any(id(x) in owned for x in jax.tree.leaves(ref_params)):
    raise ValueError(
      'ref_params aliases state.params, which are donated; pass a copy'
    )
