"""What turns a gradient into an update.

AdamW for a network, and for a network per role: each with a state, a schedule
and a bound on the norm of its own gradient, or frozen.
"""

import jax
import jax.numpy as jnp
import optax

from envace_jax.model import per_role

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


def _is_decayed(params):
  # Scanned layers stack their norm scales and biases into matrices: go by name
  # as well.
  def decays(path, x):
    return x.ndim > 1 and not any(
      str(getattr(entry, 'key', None)).endswith(('scale', '_bias'))
      for entry in path
    )

  return jax.tree.map_with_path(decays, params)
