"""The shape of the policy network, checked once, before anything compiles."""

import dataclasses

import jax.numpy as jnp

from envace_jax.model import rope

ACTIVATIONS = ('silu', 'gelu_tanh')
# Who computes attention over a row; 'auto' chooses by platform.
ATTENTIONS = ('auto', 'reference', 'fused', 'splash')
DTYPES = {'float32': jnp.float32, 'bfloat16': jnp.bfloat16}

# The matrices of a layer, and how many of their axes are inputs.
PROJECTIONS = {
  'wq': 1,
  'wk': 1,
  'wv': 1,
  'wo': 2,
  'w_gate': 1,
  'w_up': 1,
  'w_down': 1,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
  """Which matrices have low-rank adapters, of which rank and strength."""

  rank: int
  alpha: float  # a correction is scaled by alpha / rank
  targets: tuple[str, ...] = tuple(PROJECTIONS)

  def __post_init__(self):
    if self.rank < 1 or self.alpha <= 0:
      raise ValueError(
        f'model.lora.rank={self.rank} must be at least 1 and '
        f'model.lora.alpha={self.alpha} above 0; usual values are 16 and 32.0'
      )
    unknown = sorted(set(self.targets) - set(PROJECTIONS))
    if unknown or not self.targets:
      raise ValueError(
        f'model.lora.targets={self.targets}: choose some of {[*PROJECTIONS]}'
      )

  @property
  def scale(self) -> float:
    return self.alpha / self.rank


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
  """Sizes and numerics of a decoder-only transformer.

  `dtype` is the compute dtype; parameters that are trained are float32.
  `scan_layers` changes how parameters are stored (one stacked tree) and how
  training is compiled, never the function that is computed. The defaults are
  Llama's architecture; weights/architectures.py says which fields make which.
  """

  vocab_size: int
  d_model: int  # D
  num_layers: int
  num_heads: int  # N, query heads
  num_kv_heads: int  # K, each shared by N / K query heads
  head_dim: int  # H, independent of D / N
  d_ff: int  # F
  rope_theta: float = 10_000.0
  norm_eps: float = 1e-6
  rope_scaling: rope.RopeScaling | None = None  # of layers without a window
  qk_norm: bool = False
  attention_bias: bool = False  # of the projections to queries, keys, values
  output_bias: bool = False  # of the projection out of attention
  attention_scale: float | None = None  # of scores; None: 1 / sqrt(head_dim)
  sliding_window: int = 0  # tokens a sliding layer sees, itself included
  sliding_layers: tuple[int, ...] = ()  # which layers slide, from 0, ascending
  sliding_rope_theta: float | None = None  # theirs, unscaled; None: as others
  zero_centered_norms: bool = False  # norms multiply by 1 + scale
  post_norms: bool = False  # norms after attention and mlp too
  activation: str = 'silu'  # of the gate
  scale_embeddings: bool = False  # by sqrt(d_model), when tokens are read
  tie_embeddings: bool = True
  dtype: str = 'float32'
  scan_layers: bool = False
  remat: bool = False
  attention: str = 'auto'
  max_len: int = 4096  # longest row the model is ever asked for, in tokens
  lora: LoraConfig | None = None  # adapters of what is otherwise frozen

  def __post_init__(self):
    for name in (
      'vocab_size',
      'd_model',
      'num_layers',
      'num_heads',
      'num_kv_heads',
      'head_dim',
      'd_ff',
      'max_len',
    ):
      if getattr(self, name) < 1:
        raise ValueError(
          f'model.{name}={getattr(self, name)} must be at least 1'
        )
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f'model.num_kv_heads={self.num_kv_heads} must divide '
        f'model.num_heads={self.num_heads}; set num_kv_heads to a divisor '
        '(num_heads itself is plain multi-head attention)'
      )
    if self.head_dim % 2:
      raise ValueError(
        f'model.head_dim={self.head_dim} must be even, RoPE rotates pairs; '
        f'set head_dim={self.head_dim + 1}'
      )
    if self.rope_theta <= 1 or self.norm_eps <= 0:
      raise ValueError(
        f'model.rope_theta={self.rope_theta} must exceed 1 and '
        f'model.norm_eps={self.norm_eps} must be positive; '
        'usual values are 10000.0 and 1e-6'
      )
    self._check_sliding()
    if self.activation not in ACTIVATIONS:
      raise ValueError(
        f'model.activation={self.activation!r} is not one of '
        f'{list(ACTIVATIONS)}'
      )
    if self.attention_scale is not None and not self.attention_scale > 0:
      raise ValueError(
        f'model.attention_scale={self.attention_scale} must be positive; '
        'None is 1 / sqrt(head_dim)'
      )
    if self.attention not in ATTENTIONS:
      raise ValueError(
        f'model.attention={self.attention!r} is not one of {list(ATTENTIONS)}'
      )
    if self.dtype not in DTYPES:
      raise ValueError(
        f'model.dtype={self.dtype!r} is not one of {sorted(DTYPES)}'
      )

  @property
  def compute_dtype(self):
    return DTYPES[self.dtype]

  @property
  def group_size(self) -> int:
    """Query heads that share one key/value head."""
    return self.num_heads // self.num_kv_heads

  def _check_sliding(self):
    layers = self.sliding_layers
    if list(layers) != sorted(set(layers)) or any(
      not 0 <= layer < self.num_layers for layer in layers
    ):
      raise ValueError(
        f'model.sliding_layers={layers} must be ascending numbers of layers '
        f'in 0..{self.num_layers - 1}'
      )
    if bool(layers) != (self.sliding_window > 0):
      raise ValueError(
        f'model.sliding_window={self.sliding_window} and model.sliding_layers='
        f'{layers} go together; set a window of at least 1 and the layers '
        'that have it, or neither'
      )
    if self.sliding_rope_theta is not None and (
      not layers or self.sliding_rope_theta <= 1
    ):
      raise ValueError(
        f'model.sliding_rope_theta={self.sliding_rope_theta} must exceed 1 '
        'and needs sliding_layers; None is rope_theta'
      )
