"""The two train steps: state and data in, state and metrics out.

  make_supervised_step   learns recorded attempts
  make_policy_step       role-wise clipped policy gradient
                         [+ KL to a frozen reference] [+ recorded-world anchor]

`learning.objective` says what is minimised; here gradients are accumulated
over microbatches (one `lax.scan`, whose memory is that of one microbatch),
applied, and reported. 1 or 8 microbatches, 1 or 8 devices: the same update,
because the loss is divided by counts of the whole batch.

An update that is not finite is dropped whole and counted in `skipped`. `step`
then still goes on, as it counts batches and the data cursor follows it, while
parameters and optimizer (with its own count of updates) stay as they were.
"""

from collections.abc import Callable, Mapping
import math
from typing import Any

from flax import linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import optax

from envace_jax import types
from envace_jax.learning import batch as batches
from envace_jax.learning import losses, objective
from envace_jax.model import sharding, transformer

Metrics = Mapping[str, jax.Array]  # flat, float32 scalars

# Share of the peak learning rate left after `progress` in [0, 1] of decay.
SCHEDULES = {
  'constant': lambda progress: jnp.ones_like(progress),
  'linear': lambda progress: 1.0 - progress,
  'cosine': lambda progress: 0.5 * (1.0 + jnp.cos(jnp.pi * progress)),
}


@flax.struct.dataclass
class TrainState:
  """Arrays only."""

  step: jax.Array  # int32, batches consumed
  params: transformer.Params
  opt_state: optax.OptState


def make_optimizer(
  *,
  learning_rate: float,
  warmup_steps: int,
  total_steps: int,
  schedule: str,
  weight_decay: float,
  clip_norm: float | None,
  b1: float,
  b2: float,
) -> optax.GradientTransformation:
  """AdamW with warm-up, decay to 0 and a bound on the gradient's norm.

  Update n (from 0) of the warm-up uses (n + 1) / warmup_steps of the peak, so
  no update is wasted on a rate of 0. Norm scales and other vectors are not
  decayed. `clip_norm=None` does not clip.
  """
  if schedule not in SCHEDULES:
    raise ValueError(f'schedule={schedule!r} is not one of {[*SCHEDULES]}')
  if not 0 <= warmup_steps <= total_steps:
    raise ValueError(
      f'warmup_steps={warmup_steps} must be in [0, total_steps={total_steps}]'
    )
  if clip_norm is not None and clip_norm <= 0:
    raise ValueError(f'clip_norm={clip_norm} must be positive, or None')

  def rate(count):
    warm = jnp.minimum(1.0, (count + 1) / max(warmup_steps, 1))
    decay_steps = max(total_steps - warmup_steps, 1)
    progress = jnp.clip((count - warmup_steps) / decay_steps, 0.0, 1.0)
    return learning_rate * warm * SCHEDULES[schedule](progress)

  adamw = optax.adamw(
    rate, b1=b1, b2=b2, weight_decay=weight_decay, mask=_is_decayed
  )
  if clip_norm is None:
    return adamw
  return optax.chain(optax.clip_by_global_norm(clip_norm), adamw)


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
) -> TrainState:
  """Shapes, dtypes and shardings of `init_state`, to restore into."""
  boxed = jax.eval_shape(
    lambda: _init_partitioned(model, tx, jax.random.key(0))
  )
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    nn.meta.unbox(boxed),
    sharding.state_shardings(boxed, mesh),
  )


def make_supervised_step(
  model: transformer.Transformer,
  tx: optax.GradientTransformation,
  config: objective.LossConfig,
  mesh: Mesh,
) -> Callable[[TrainState, batches.TrainBatch], tuple[TrainState, Metrics]]:
  """`step(state, batch) -> (state, metrics)`; donates the given state."""

  def step(state, batch):
    divisors = objective.supervised_denominators(batch, config)
    loss_fn = lambda params, rows: objective.supervised_loss(
      model, params, rows, divisors, config
    )
    state, metrics = _update(state, loss_fn, batch, tx, config, mesh)
    for role in types.Role:
      mask_BT = batches.loss_mask(batch, objective.RECORDED_AUTHORS[role])
      metrics |= _count(role, mask_BT)
    return state, metrics

  shardings = jax.tree.map(
    lambda x: x.sharding, abstract_state(model, tx, mesh)
  )
  jitted = jax.jit(
    step,
    in_shardings=(shardings, sharding.batch_sharding(mesh)),
    out_shardings=(shardings, sharding.replicated(mesh)),
    donate_argnums=0,
  )

  def supervised_step(state, batch):
    _check_rows('batch', batch, config, mesh)
    with sharding.use_mesh(mesh):
      return jitted(state, batch)

  return supervised_step


def make_policy_step(
  model: transformer.Transformer,
  tx: optax.GradientTransformation,
  config: objective.LossConfig,
  mesh: Mesh,
) -> Callable[
  [
    TrainState,
    batches.TrainBatch,
    transformer.Params | None,
    batches.TrainBatch | None,
  ],
  tuple[TrainState, Metrics],
]:
  """`step(state, batch, ref_params, anchor_batch) -> (state, metrics)`.

  `ref_params` is read only if there is a KL weight and `anchor_batch` only if
  there is an NLL weight; None will do otherwise. The given state is donated,
  so the reference must be a copy of its parameters, not an alias.
  """

  def step(state, batch, ref_params, anchor):
    divisors = objective.policy_denominators(batch, config)
    if config.uses_anchor:
      anchor_divisor = objective.anchor_denominator(anchor, config)

    def loss_fn(params, micro):
      rows, anchor_rows = micro
      value, sums = objective.policy_loss(
        model, params, ref_params, rows, divisors, config
      )
      sums['nll'] = losses.ZERO
      if config.uses_anchor:
        anchor_value, sums['nll'] = objective.anchor_loss(
          model, params, anchor_rows, anchor_divisor, config
        )
        value += anchor_value
      return value, sums

    state, metrics = _update(state, loss_fn, (batch, anchor), tx, config, mesh)
    for role in types.Role:
      metrics |= _count(role, batches.role_mask(batch, role))
    return state, metrics

  shardings = jax.tree.map(
    lambda x: x.sharding, abstract_state(model, tx, mesh)
  )
  rows = sharding.batch_sharding(mesh)
  ref = shardings.params if config.uses_reference else None
  jitted = jax.jit(
    step,
    in_shardings=(shardings, rows, ref, rows if config.uses_anchor else None),
    out_shardings=(shardings, sharding.replicated(mesh)),
    donate_argnums=0,
  )

  def policy_step(state, batch, ref_params, anchor_batch):
    _check_rows('batch', batch, config, mesh)
    ref_params = ref_params if config.uses_reference else None
    anchor_batch = anchor_batch if config.uses_anchor else None
    if config.uses_reference:
      _check_reference(state, ref_params)
    if config.uses_anchor:
      if anchor_batch is None:
        raise ValueError(f'nll_weight={config.nll_weight} needs anchor_batch')
      _check_rows('anchor_batch', anchor_batch, config, mesh)
    with sharding.use_mesh(mesh):
      return jitted(state, batch, ref_params, anchor_batch)

  return policy_step


def accumulate(
  loss_fn: Callable[[transformer.Params, Any], tuple[jax.Array, Any]],
  params: transformer.Params,
  rows: Any,
  config: objective.LossConfig,
) -> tuple[jax.Array, Any, transformer.Params]:
  """Sums of `loss_fn`'s value, its auxiliary sums and its gradient.

  Microbatch m takes rows m, m + M, m + 2M, ...: each device keeps its own
  rows, where a contiguous cut would move them between devices. Each microbatch
  runs at the shortest of `row_buckets` that holds its rows, so that with rows
  laid out by length (`batch.pack_*`) little of the work is padding, and the
  program is still one.
  """
  M = config.microbatches
  split = jax.tree.map(
    lambda x: x.reshape(-1, M, *x.shape[1:]).swapaxes(0, 1), rows
  )

  def gradient(micro, params):
    (value, sums), grads = jax.value_and_grad(loss_fn, has_aux=True)(
      params, micro
    )
    return value, sums, grads

  def cut_gradient(length):
    return lambda micro, params: gradient(batches.cut(micro, length), params)

  longest = batches.row_tokens(rows)
  shorter = sorted(b for b in set(config.row_buckets) if b < longest)
  branches = [*map(cut_gradient, shorter), gradient]

  def body(carry, micro):
    used = batches.longest(micro)
    branch = jnp.sum(used > jnp.asarray(shorter, jnp.int32))
    new = jax.lax.switch(branch, branches, micro, params)
    return jax.tree.map(jnp.add, carry, new), None

  first = jax.tree.map(lambda x: x[0], split)
  zeros = jax.tree.map(
    lambda x: jnp.zeros(x.shape, x.dtype),
    jax.eval_shape(gradient, first, params),
  )
  (value, sums, grads), _ = jax.lax.scan(body, zeros, split)
  return value, sums, grads


def _update(state, loss_fn, rows, tx, config, mesh):
  """One optimizer update, or none where it would not be finite."""
  value, sums, grads = accumulate(loss_fn, state.params, rows, config)
  grad_norm = optax.tree.norm(grads)
  updates, opt_state = tx.update(grads, state.opt_state, state.params)
  params = optax.apply_updates(state.params, updates)
  is_finite = jnp.isfinite(value) & jnp.isfinite(grad_norm)
  keep = lambda new, old: jnp.where(is_finite, new, old)
  state = TrainState(
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


def _init_partitioned(model, tx, key):
  params = transformer.init_partitioned(model, key)
  return TrainState(jnp.int32(0), params, tx.init(params))


def _is_decayed(params):
  # Scanned layers stack their norm scales into matrices: go by name as well.
  def decays(path, x):
    return x.ndim > 1 and not any(
      getattr(entry, 'key', None) == 'scale' for entry in path
    )

  return jax.tree.map_with_path(decays, params)


def _count(role, mask_BT):
  key = f'tokens/{objective.role_name(role)}'
  return {key: mask_BT.sum(dtype=jnp.float32)}


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
