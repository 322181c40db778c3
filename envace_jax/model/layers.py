"""Transformer layers: RMSNorm, rotary attention over shared heads, SwiGLU.

  x <- x + attention(norm(x));  x <- x + swiglu(norm(x))

Parameters are float32 and carry logical axis names; compute runs in
`config.dtype`, except where rounding hurts (norms, rotations, softmax), which
is float32. Masks and rotations depend on positions only, so the caller makes
them once and every layer shares them. Not here: dropout, biases, position
interpolation, fused attention kernels.

RoPE: Su et al., arXiv 2104.09864, in the half-split form of Llama and Qwen
weights. Grouped queries: arXiv 2305.13245. SwiGLU: arXiv 2002.05202.
"""

from flax import linen as nn
import jax
import jax.numpy as jnp

from envace_jax.model import attention, kv_cache, lora
from envace_jax.model import config as config_lib

# Standard deviation of a unit normal truncated to [-2, 2].
_TRUNCATED_STD = 0.87962566103423978

KeyValue = tuple[jax.Array, jax.Array]  # k_BKSH, v_BKSH
Rotation = tuple[jax.Array, jax.Array]  # sin_BTh, cos_BTh; h = H / 2


def partitioned_normal(std: float, names: tuple[str, ...]):
  """Truncated normal of exact standard deviation `std`, with axis names."""
  init = nn.initializers.truncated_normal(std / _TRUNCATED_STD)
  return nn.with_logical_partitioning(init, names)


def make_rotation(
  positions_BT: jax.Array, head_dim: int, theta: float
) -> Rotation:
  """Sine and cosine of position * theta^(-2i / H), in float32."""
  exponent_h = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
  frequency_h = theta**-exponent_h
  angle_BTh = (
    positions_BT[:, :, None].astype(jnp.float32) * frequency_h[None, None, :]
  )
  return jnp.sin(angle_BTh), jnp.cos(angle_BTh)


def rotate(x_BTNH: jax.Array, rotation: Rotation) -> jax.Array:
  """Turns the pairs (i, i + H/2) of every head by their angle."""
  sin, cos = (r_BTh[:, :, None, :] for r_BTh in rotation)
  first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
  turned = (first * cos - second * sin, second * cos + first * sin)
  return jnp.concatenate(turned, axis=-1).astype(x_BTNH.dtype)


def linear(
  module: nn.Module,
  name: str,
  equation: str,
  x: jax.Array,
  shape: tuple[int, ...],
  axes: tuple[str, ...],
  std: float,
) -> jax.Array:
  """x times parameter `name` of `module`, in x's dtype; with its adapter."""
  weight = module.param(name, partitioned_normal(std, axes), shape)
  y = jnp.einsum(equation, x, weight.astype(x.dtype))
  adapter = module.get_variable(lora.COLLECTION, name)
  if adapter is None:
    return y
  return y + lora.correction(module.config.lora, adapter, equation, x)


class RMSNorm(nn.Module):
  """x / rms(x) * scale over the last axis, computed in float32."""

  eps: float
  axis_name: str = 'embed'

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    scale = self.param(
      'scale',
      nn.with_logical_partitioning(nn.initializers.ones, (self.axis_name,)),
      (x.shape[-1],),
    )
    x32 = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
    scale = scale.reshape((1,) * (x.ndim - 1) + (-1,))
    return (x32 * jax.lax.rsqrt(mean_square + self.eps) * scale).astype(x.dtype)


class Attention(nn.Module):
  """Grouped-query attention, over the row itself or over a cache."""

  config: config_lib.TransformerConfig

  @nn.compact
  def __call__(
    self,
    x_BTD: jax.Array,
    rotation: Rotation,
    mask_BTS: jax.Array,
    cache: KeyValue | None = None,
    slots_BT: jax.Array | None = None,
  ) -> tuple[jax.Array, KeyValue | None]:
    c = self.config

    def project(name, heads, axis):
      shape, axes = (c.d_model, heads, c.head_dim), ('embed', axis, 'head_dim')
      return linear(
        self, name, 'BTD,DNH->BTNH', x_BTD, shape, axes, c.d_model**-0.5
      )

    q_BTNH = project('wq', c.num_heads, 'heads')
    k_BTKH = project('wk', c.num_kv_heads, 'kv_heads')
    v_BTKH = project('wv', c.num_kv_heads, 'kv_heads')
    if c.qk_norm:
      q_BTNH = RMSNorm(c.norm_eps, 'head_dim', name='q_norm')(q_BTNH)
      k_BTKH = RMSNorm(c.norm_eps, 'head_dim', name='k_norm')(k_BTKH)
    q_BTNH = rotate(q_BTNH, rotation)
    k_BTKH = rotate(k_BTKH, rotation)
    if cache is None:
      k_BKSH, v_BKSH = (x.swapaxes(1, 2) for x in (k_BTKH, v_BTKH))
    else:
      k_BKSH = kv_cache.write(cache[0], k_BTKH, slots_BT)
      v_BKSH = kv_cache.write(cache[1], v_BTKH, slots_BT)
      cache = (k_BKSH, v_BKSH)
    out_BTNH = attention.attend(q_BTNH, k_BKSH, v_BKSH, mask_BTS)
    # Residual branches add up: keep the sum of 2 * num_layers of them at 1.
    std = (2 * c.num_layers * c.num_heads * c.head_dim) ** -0.5
    shape, axes = (
      (c.num_heads, c.head_dim, c.d_model),
      ('heads', 'head_dim', 'embed'),
    )
    return linear(
      self, 'wo', 'BTNH,NHD->BTD', out_BTNH, shape, axes, std
    ), cache


class SwiGLU(nn.Module):
  """(silu(x w_gate) * x w_up) w_down."""

  config: config_lib.TransformerConfig

  @nn.compact
  def __call__(self, x_BTD: jax.Array) -> jax.Array:
    c = self.config
    inner = 'BTD,DF->BTF', x_BTD, (c.d_model, c.d_ff), ('embed', 'mlp')
    gate_BTF = linear(self, 'w_gate', *inner, c.d_model**-0.5)
    up_BTF = linear(self, 'w_up', *inner, c.d_model**-0.5)
    hidden_BTF = jax.nn.silu(gate_BTF) * up_BTF
    return linear(
      self,
      'w_down',
      'BTF,FD->BTD',
      hidden_BTF,
      (c.d_ff, c.d_model),
      ('mlp', 'embed'),
      (2 * c.num_layers * c.d_ff) ** -0.5,
    )


class Block(nn.Module):
  """One pre-norm layer; the shape `(carry, ...) -> (carry, out)` is scan's."""

  config: config_lib.TransformerConfig

  @nn.compact
  def __call__(
    self,
    x_BTD: jax.Array,
    rotation: Rotation,
    mask_BTS: jax.Array,
    cache: KeyValue | None = None,
    slots_BT: jax.Array | None = None,
  ) -> tuple[jax.Array, KeyValue | None]:
    c = self.config
    norm_BTD = RMSNorm(c.norm_eps, name='attention_norm')(x_BTD)
    attended_BTD, cache = Attention(c, name='attention')(
      norm_BTD, rotation, mask_BTS, cache, slots_BT
    )
    x_BTD = constrain(x_BTD + attended_BTD)
    norm_BTD = RMSNorm(c.norm_eps, name='mlp_norm')(x_BTD)
    return constrain(x_BTD + SwiGLU(c, name='mlp')(norm_BTD)), cache


def constrain(x_BTD: jax.Array) -> jax.Array:
  """Keeps the residual stream sharded by row; no effect without a mesh."""
  return nn.with_logical_constraint(x_BTD, ('batch', 'time', 'act_embed'))
