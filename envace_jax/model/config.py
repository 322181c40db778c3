"""The shape of the policy network, checked once, before anything compiles."""

import dataclasses

import jax.numpy as jnp

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

  `dtype` is the compute dtype; parameters are always float32. `scan_layers`
  changes how parameters are stored (one stacked tree) and how training is
  compiled, never the function that is computed.
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
  qk_norm: bool = False
  tie_embeddings: bool = True
  dtype: str = 'float32'
  scan_layers: bool = False
  remat: bool = False
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
