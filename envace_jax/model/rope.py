"""Rotary positions: which angle a pair of a head turns by at each position.

  frequency_i = theta^(-2i / H);  angle = position * frequency_i

Models trained on short rows and stretched to long ones change the frequencies
(`RopeScaling`): 'linear' divides all of them; 'llama3' divides the slow ones
and blends those in between; 'yarn' divides by a ramp over the number of turns
a pair makes within the original length, and multiplies sine and cosine.

RoPE: Su et al., arXiv 2104.09864, in the half-split form of Llama and Qwen
weights. Linear: arXiv 2306.15595. YaRN: arXiv 2309.00071. Not here: scalings
that depend on the length of the row (dynamic NTK, LongRoPE).
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

KINDS = ('linear', 'llama3', 'yarn')

Rotation = tuple[jax.Array, jax.Array]  # sin_BTh, cos_BTh; h = H / 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
  """How trained frequencies are stretched to longer rows."""

  kind: str  # one of KINDS
  factor: float
  original_max_len: int = 0  # llama3, yarn: length before stretching, tokens
  low_freq_factor: float = 1.0  # llama3: fewer turns than this are divided
  high_freq_factor: float = 4.0  # llama3: more turns than this are kept
  beta_fast: float = 32.0  # yarn: pairs of more turns than this are kept
  beta_slow: float = 1.0  # yarn: pairs of fewer turns than this are divided
  attention_factor: float = 1.0  # yarn: multiplies sine and cosine
  truncate: bool = True  # yarn: the ramp starts and ends at whole pairs

  def __post_init__(self):
    if self.kind not in KINDS:
      raise ValueError(
        f'model.rope_scaling.kind={self.kind!r} is not one of {list(KINDS)}'
      )
    if not self.factor > 0 or not self.attention_factor > 0:
      raise ValueError(
        f'model.rope_scaling.factor={self.factor} and attention_factor='
        f'{self.attention_factor} must be positive'
      )
    if self.kind != 'linear' and self.original_max_len < 1:
      raise ValueError(
        f'model.rope_scaling.original_max_len={self.original_max_len} must be '
        f'the length that {self.kind} stretches, in tokens'
      )
    if self.kind == 'llama3' and not (
      0 < self.low_freq_factor < self.high_freq_factor
    ):
      raise ValueError(
        f'model.rope_scaling.low_freq_factor={self.low_freq_factor} must be '
        f'positive and below high_freq_factor={self.high_freq_factor}'
      )
    if self.kind == 'yarn' and not 0 < self.beta_slow < self.beta_fast:
      raise ValueError(
        f'model.rope_scaling.beta_slow={self.beta_slow} must be positive and '
        f'below beta_fast={self.beta_fast}'
      )


def make_rotation(
  positions_BT: jax.Array,
  head_dim: int,
  theta: float,
  scaling: RopeScaling | None = None,
) -> Rotation:
  """Sine and cosine of position * frequency, in float32."""
  exponent_h = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
  frequency_h = theta**-exponent_h
  if scaling is not None:
    frequency_h = _stretch(frequency_h, head_dim, theta, scaling)
  angle_BTh = (
    positions_BT[:, :, None].astype(jnp.float32) * frequency_h[None, None, :]
  )
  sin_BTh, cos_BTh = jnp.sin(angle_BTh), jnp.cos(angle_BTh)
  if scaling is None or scaling.attention_factor == 1:
    return sin_BTh, cos_BTh
  return scaling.attention_factor * sin_BTh, scaling.attention_factor * cos_BTh


def rotate(x_BTNH: jax.Array, rotation: Rotation) -> jax.Array:
  """Turns the pairs (i, i + H/2) of every head by their angle."""
  sin, cos = (r_BTh[:, :, None, :] for r_BTh in rotation)
  first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
  turned = (first * cos - second * sin, second * cos + first * sin)
  return jnp.concatenate(turned, axis=-1).astype(x_BTNH.dtype)


def _stretch(frequency_h, head_dim, theta, scaling: RopeScaling) -> jax.Array:
  """frequency_h, or frequency_h / factor, or a blend of both."""
  slow_h = frequency_h / scaling.factor
  if scaling.kind == 'linear':
    return slow_h
  if scaling.kind == 'llama3':
    turns_h = scaling.original_max_len * frequency_h / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep_h = jnp.clip((turns_h - low) / (high - low), 0.0, 1.0)
  else:
    keep_h = 1.0 - _yarn_ramp(head_dim, theta, scaling)
  return slow_h * (1.0 - keep_h) + frequency_h * keep_h


def _yarn_ramp(head_dim, theta, scaling: RopeScaling) -> jax.Array:
  """0 at pairs of at least beta_fast turns, 1 at those of beta_slow or less."""

  def pair(turns):  # the index, not whole, of the pair that turns so often
    ratio = scaling.original_max_len / (turns * 2 * math.pi)
    return head_dim * math.log(ratio) / (2 * math.log(theta))

  low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
  if scaling.truncate:
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, head_dim - 1)
  # A ramp of no width would divide by zero.
  width = high - low or 0.001
  pair_h = jnp.arange(head_dim // 2, dtype=jnp.float32)
  return jnp.clip((pair_h - low) / width, 0.0, 1.0)
