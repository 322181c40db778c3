"""Transformer layers: RMSNorm, rotary attention over shared heads, gated MLP.

  x <- x + attention(norm(x));  x <- x + mlp(norm(x))

Parameters are float32 and carry logical axis names; compute runs in
`config.dtype`, except where rounding hurts (norms, rotations, softmax), which
is float32. Masks and rotations depend on positions only, so the caller makes
them once and layers share them: all of them, or those with a sliding window
and those without. Not here: dropout; who computes attention (`attention`).

Grouped queries: arXiv 2305.13245. SwiGLU, and its variant that gates by GELU:
arXiv 2002.05202.
"""

import functools

from flax import linen as nn
import jax
import jax.numpy as jnp

from envace_jax.model import attention, kv_cache, lora, rope, visibility
from envace_jax.model import config as config_lib

_ACTIVATIONS = {
  'silu': jax.nn.silu,
  'gelu_tanh': functools.partial(jax.nn.gelu, approximate=True),
}

# Standard deviation of a unit normal truncated to [-2, 2].
_TRUNCATED_STD = 0.87962566103423978

KeyValue = tuple[jax.Array, jax.Array]  # k_BKHS, v_BKSH


def partitioned_normal(std: float, names: tuple[str, ...]):
  """Truncated normal of exact standard deviation `std`, with axis names."""
  init = nn.initializers.truncated_normal(std / _TRUNCATED_STD)
  return nn.with_logical_partitioning(init, names)


def linear(
  module: nn.Module,
  name: str,
  equation: str,
  x: jax.Array,
  shape: tuple[int, ...],
  axes: tuple[str, ...],
  std: float,
  bias: bool = False,
) -> jax.Array:
  """x times parameter `name` of `module`, in x's dtype; with its adapter.

  With `bias`, plus parameter `<name>_bias` over the weight's output axes.
  """
  weight = module.param(name, partitioned_normal(std, axes), shape)
  out = jnp.einsum(equation, x, weight.astype(x.dtype))
  adapter = module.get_variable(lora.COLLECTION, name)
  if adapter is not None:
    out += lora.correction(module.config.lora, adapter, equation, x)
  if not bias:
    return out
  letters, output = equation.split(',')[1].split('->')
  kept = [i for i, letter in enumerate(letters) if letter in output]
  zeros = nn.with_logical_partitioning(
    nn.initializers.zeros, tuple(axes[i] for i in kept)
  )
  offset = module.param(f'{name}_bias', zeros, tuple(shape[i] for i in kept))
  lead = (1,) * (out.ndim - offset.ndim)
  return out + offset.reshape(lead + offset.shape).astype(x.dtype)


class RMSNorm(nn.Module):
  """x / rms(x) * scale over the last axis, computed in float32.

  With `zero_centered`, times 1 + scale: the parameter is then 0 where the norm
  does nothing.
  """

  eps: float
  axis_name: str = 'embed'
  zero_centered: bool = False

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    init = nn.initializers.zeros if self.zero_centered else nn.initializers.ones
    scale = self.param(
      'scale',
      nn.with_logical_partitioning(init, (self.axis_name,)),
      (x.shape[-1],),
    )
    x32 = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
    # A frozen base may be stored in bfloat16; 1 + scale must not round in it.
    scale = scale.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
    if self.zero_centered:
      scale = 1.0 + scale
    return (x32 * jax.lax.rsqrt(mean_square + self.eps) * scale).astype(x.dtype)


def norm(
  config: config_lib.TransformerConfig, name: str, axis_name: str = 'embed'
) -> RMSNorm:
  """The RMSNorm of a config, as submodule `name`."""
  return RMSNorm(
    config.norm_eps, axis_name, config.zero_centered_norms, name=name
  )


class Attention(nn.Module):
  """Grouped-query attention, over the row itself or over a cache."""

  config: config_lib.TransformerConfig

  @nn.compact
  def __call__(
    self,
    x_BTD: jax.Array,
    rotation: rope.Rotation,
    visible: attention.Visible,
    cache: KeyValue | None = None,
    slots_BT: jax.Array | None = None,
  ) -> tuple[jax.Array, KeyValue | None]:
    c = self.config

    def project(name, heads, axis):
      shape, axes = (c.d_model, heads, c.head_dim), ('embed', axis, 'head_dim')
      return linear(
        self,
        name,
        'BTD,DNH->BTNH',
        x_BTD,
        shape,
        axes,
        c.d_model**-0.5,
        bias=c.attention_bias,
      )

    q_BTNH = project('wq', c.num_heads, 'heads')
    k_BTKH = project('wk', c.num_kv_heads, 'kv_heads')
    v_BTKH = project('wv', c.num_kv_heads, 'kv_heads')
    if c.qk_norm:
      q_BTNH = norm(c, 'q_norm', 'head_dim')(q_BTNH)
      k_BTKH = norm(c, 'k_norm', 'head_dim')(k_BTKH)
    q_BTNH = rope.rotate(q_BTNH, rotation)
    k_BTKH = rope.rotate(k_BTKH, rotation)
    if cache is None:
      k_BKHS = k_BTKH.transpose(0, 2, 3, 1)
      v_BKSH = v_BTKH.swapaxes(1, 2)
    else:
      k_BKHS = kv_cache.write_keys(cache[0], k_BTKH, slots_BT)
      v_BKSH = kv_cache.write_values(cache[1], v_BTKH, slots_BT)
      cache = (k_BKHS, v_BKSH)
    out_BTNH = attention.attend(
      q_BTNH, k_BKHS, v_BKSH, visible, scale=c.attention_scale
    )
    # Residual branches add up: keep the sum of 2 * num_layers of them at 1.
    std = (2 * c.num_layers * c.num_heads * c.head_dim) ** -0.5
    shape, axes = (
      (c.num_heads, c.head_dim, c.d_model),
      ('heads', 'head_dim', 'embed'),
    )
    out_BTD = linear(
      self,
      'wo',
      'BTNH,NHD->BTD',
      out_BTNH,
      shape,
      axes,
      std,
      bias=c.output_bias,
    )
    return out_BTD, cache


class GatedMLP(nn.Module):
  """(activation(x w_gate) * x w_up) w_down."""

  config: config_lib.TransformerConfig

  @nn.compact
  def __call__(self, x_BTD: jax.Array) -> jax.Array:
    c = self.config
    inner = 'BTD,DF->BTF', x_BTD, (c.d_model, c.d_ff), ('embed', 'mlp')
    gate_BTF = linear(self, 'w_gate', *inner, c.d_model**-0.5)
    up_BTF = linear(self, 'w_up', *inner, c.d_model**-0.5)
    hidden_BTF = _ACTIVATIONS[c.activation](gate_BTF) * up_BTF
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
  """One pre-norm layer; the shape `(carry, ...) -> (carry, out)` is scan's.

  Where a scan runs layers of both kinds, `is_sliding` (a scalar) says which
  one this is, and `sliding` is what a layer with a window sees.
  """

  config: config_lib.TransformerConfig

  @nn.compact
  def __call__(
    self,
    x_BTD: jax.Array,
    rotation: rope.Rotation,
    visible: attention.Visible,
    cache: KeyValue | None = None,
    slots_BT: jax.Array | None = None,
    is_sliding: jax.Array | None = None,
    sliding: visibility.View | None = None,
  ) -> tuple[jax.Array, KeyValue | None]:
    c = self.config
    if is_sliding is not None:
      rotation, visible = jax.tree.map(
        lambda x, y: jnp.where(is_sliding, x, y), sliding, (rotation, visible)
      )
    norm_BTD = norm(c, 'attention_norm')(x_BTD)
    branch_BTD, cache = Attention(c, name='attention')(
      norm_BTD, rotation, visible, cache, slots_BT
    )
    if c.post_norms:
      branch_BTD = norm(c, 'attention_post_norm')(branch_BTD)
    x_BTD = constrain(x_BTD + branch_BTD)
    norm_BTD = norm(c, 'mlp_norm')(x_BTD)
    branch_BTD = GatedMLP(c, name='mlp')(norm_BTD)
    if c.post_norms:
      branch_BTD = norm(c, 'mlp_post_norm')(branch_BTD)
    return constrain(x_BTD + branch_BTD), cache


def constrain(x_BTD: jax.Array) -> jax.Array:
  """Keeps the residual stream sharded by row; no effect without a mesh."""
  return nn.with_logical_constraint(x_BTD, ('batch', 'time', 'act_embed'))
