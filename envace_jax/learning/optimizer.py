"""What turns a gradient into an update.

  adamw      two moments as large as the parameters, in float32 or bfloat16
  adafactor  no first moment, and of the second, where a matrix has two axes of
             128 or more, its means over rows and columns (arXiv 1804.04235)

for a network, or for a network per role: each with a state, a schedule and a
bound on the norm of its own gradient, or frozen. Both take the same learning
rate, warm-up, decay of weights and bound. Not Adafactor's own here: rates
relative to the size of a parameter, which low-rank adapters have none of at
first.
"""

from flax import linen as nn
import jax
import jax.numpy as jnp
import optax

from envace_jax.model import per_role

KINDS = ('adamw', 'adafactor')
MOMENTS = {'float32': jnp.float32, 'bfloat16': jnp.bfloat16}

# Half the distance between neighbours in bfloat16, at worst, of the larger.
_BFLOAT16_ROUNDING = 2.0**-8

# Share of the peak learning rate left after `progress` in [0, 1] of decay.
SCHEDULES = {
  'constant': lambda progress: jnp.ones_like(progress),
  'linear': lambda progress: 1.0 - progress,
  'cosine': lambda progress: 0.5 * (1.0 + jnp.cos(jnp.pi * progress)),
}


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
  kind: str = 'adamw',
  moments_dtype: str = 'float32',
) -> optax.GradientTransformation:
  """An optimizer with warm-up, decay to 0 and a bound on the gradient's norm.

  Update n (from 0) of the warm-up uses (n + 1) / warmup_steps of the peak, so
  no update is wasted on a rate of 0. Norm scales and other vectors are not
  decayed. `clip_norm=None` does not clip. `b1`, `b2` and `moments_dtype` are
  those of AdamW and mean nothing to Adafactor.
  """
  if kind not in KINDS:
    raise ValueError(f'kind={kind!r} is not one of {[*KINDS]}')
  if moments_dtype not in MOMENTS:
    raise ValueError(
      f'moments_dtype={moments_dtype!r} is not one of {[*MOMENTS]}'
    )
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

  if kind == 'adamw':
    scale = _adam(b1, b2, moments_dtype)
  else:
    scale = optax.chain(_factored_rms(), optax.clip_by_block_rms(1.0))
  tx = optax.chain(
    scale,
    optax.add_decayed_weights(weight_decay, mask=_is_decayed),
    optax.scale_by_learning_rate(rate),
  )
  if clip_norm is None:
    return tx
  return optax.chain(optax.clip_by_global_norm(clip_norm), tx)


def for_each_role(
  act: optax.GradientTransformation | None,
  rehearse: optax.GradientTransformation | None,
) -> optax.GradientTransformation:
  """Updates `PerRole` parameters, each network by its own; None freezes it.

  A frozen network stays bit-equal: a gradient of 0 would not do that, as
  weights decay without one.
  """
  txs = per_role.PerRole(
    act=act or optax.set_to_zero(), rehearse=rehearse or optax.set_to_zero()
  )

  def init(params):
    return per_role.PerRole(
      act=txs.act.init(params.act), rehearse=txs.rehearse.init(params.rehearse)
    )

  def update(grads, state, params):
    updates, states = zip(
      txs.act.update(grads.act, state.act, params.act),
      txs.rehearse.update(grads.rehearse, state.rehearse, params.rehearse),
      strict=True,
    )
    return per_role.PerRole(*updates), per_role.PerRole(*states)

  return optax.GradientTransformation(init, update)


def _adam(b1, b2, moments_dtype):
  """Adam's direction; computed in float32, whatever its moments are kept in.

  Rounding is to nearest, so a bfloat16 moment stays where it is while a step
  would move it by less than half its spacing, 0.2 to 0.4 %: of b2 = 0.99 that
  is while the squared gradient is within some 40 % of its mean. Nearer to 1
  it would never decay at all, which is refused.
  """
  adam = optax.scale_by_adam(b1=b1, b2=b2)
  if moments_dtype == 'float32':
    return adam
  slowest = max(b1, b2)
  if 1.0 - slowest <= _BFLOAT16_ROUNDING:
    raise ValueError(
      f'moments_dtype={moments_dtype!r} cannot hold a moment that decays by '
      f'1 - {slowest} a step, which rounds to nothing; set b1 and b2 below '
      f"{1.0 - _BFLOAT16_ROUNDING:.3f}, or moments_dtype='float32'"
    )

  def kept_as(dtype, state):
    cast = lambda tree: jax.tree.map(lambda x: x.astype(dtype), tree)
    return state._replace(mu=cast(state.mu), nu=cast(state.nu))

  def init(params):
    return kept_as(MOMENTS[moments_dtype], adam.init(params))

  def update(grads, state, params):
    updates, state = adam.update(grads, kept_as(jnp.float32, state), params)
    return updates, kept_as(MOMENTS[moments_dtype], state)

  return optax.GradientTransformation(init, update)


def _factored_rms():
  """Adafactor's direction; what is not shaped like its parameter has no names.

  Statistics of rows and columns are vectors: every device holds them whole.
  """
  tx = optax.scale_by_factored_rms()

  def init(params):
    state = tx.init(params)
    is_box = lambda x: isinstance(x, nn.meta.AxisMetadata)

    def named(tree):
      shape = lambda x: nn.meta.unbox(x).shape
      return jax.tree.map(
        lambda x, like: x if shape(x) == shape(like) else nn.meta.unbox(x),
        tree,
        params,
        is_leaf=is_box,
      )

    return state._replace(
      v_row=named(state.v_row), v_col=named(state.v_col), v=named(state.v)
    )

  return optax.GradientTransformation(init, tx.update)


def _is_decayed(params):
  # Scanned layers stack their norm scales and biases into matrices: go by name
  # as well.
  def decays(path, x):
    return x.ndim > 1 and not any(
      str(getattr(entry, 'key', None)).endswith(('scale', '_bias'))
      for entry in path
    )

  return jax.tree.map_with_path(decays, params)
