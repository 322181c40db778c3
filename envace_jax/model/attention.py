"""Attention of queries over keys and values: one call, whoever computes it.

  reference   einsums; scores of all pairs exist, in float32
  fused       `jax.nn.dot_product_attention`: cuDNN's kernel on a GPU, which
              keeps no scores; anywhere else XLA's
  splash      the Pallas kernel for TPUs, which keeps neither scores nor mask:
              it is told which transcript a token is in, and the window

They compute one function up to rounding. `choose` says who does it for rows
without a cache; over a cache (decode, and the prefill that opens it) it is
always the reference. What a query sees is data (`visibility`), and its type
says who reads it.
"""

from flax import linen as nn
import flax.struct
import jax
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_kernel as splash_kernel,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_mask as splash_mask,
)
import jax.numpy as jnp

from envace_jax.model import config as config_lib
from envace_jax.model import sharding

# Finite, so that a query with no visible key averages instead of dividing 0/0.
_MASKED = -1e30

# The transcript, to splash, of what is none; no row starts there.
PADDING = 2**31 - 1

# Splash works on squares of scores: these sizes, the largest that divides.
_BLOCKS = (512, 256, 128)


@flax.struct.dataclass
class FusedMask:
  """A mask for the fused kernel: True where query t may see key s."""

  mask: jax.Array  # [B, T, S]; B may be 1


@flax.struct.dataclass
class Segments:
  """What splash is told in place of a mask; a token sees earlier ones only."""

  segment: jax.Array  # [B, T] int32; tokens of one number see each other
  window: int | None = flax.struct.field(pytree_node=False)  # itself included


Visible = jax.Array | FusedMask | Segments  # an array is the reference's mask


def choose(config: config_lib.TransformerConfig, rows: int, length: int) -> str:
  """Who attends over these rows, on the devices of the current mesh.

  'auto' is splash on TPUs and fused on GPUs where they can run, and else the
  reference. A token alone in its row is always the reference's.

  Raises:
    ValueError: who was asked for cannot do it here.
  """
  wanted = config.attention
  if wanted == 'reference' or length == 1:
    return 'reference'
  platform = _platform()
  if wanted == 'auto':
    wanted = {'tpu': 'splash', 'gpu': 'fused'}.get(platform, 'reference')
    obstacle = _obstacle(wanted, config, platform, rows, length)
    return 'reference' if obstacle else wanted
  obstacle = _obstacle(wanted, config, platform, rows, length)
  if obstacle:
    raise ValueError(
      f"model.attention={wanted!r} {obstacle}; set model.attention='auto', "
      'which then takes the reference'
    )
  return wanted


def attend(
  q_BTNH: jax.Array,
  k_BKHS: jax.Array,
  v_BKSH: jax.Array,
  visible: Visible,
  *,
  scale: float | None = None,
) -> jax.Array:
  """Softmax attention; query heads [g * K...] share key/value heads.

  Query head n uses key head n // (N / K). Scores are multiplied by `scale`, by
  default 1 / sqrt(H).
  """
  scale = q_BTNH.shape[-1] ** -0.5 if scale is None else scale
  if isinstance(visible, Segments):
    return _splash(q_BTNH, k_BKHS.swapaxes(2, 3), v_BKSH, visible, scale)
  if isinstance(visible, FusedMask):
    k_BSKH, v_BSKH = k_BKHS.transpose(0, 3, 1, 2), v_BKSH.swapaxes(1, 2)
    return jax.nn.dot_product_attention(
      q_BTNH,
      k_BSKH,
      v_BSKH,
      mask=visible.mask[:, None],
      scale=scale,
      implementation='cudnn' if _platform() == 'gpu' else 'xla',
    )
  return _reference(q_BTNH, k_BKHS, v_BKSH, visible, scale)


def _reference(q_BTNH, k_BKHS, v_BKSH, mask_BTS, scale):
  B, T, N, H = q_BTNH.shape
  K = k_BKHS.shape[1]
  # One matrix per key head, [G * T, H] x [H, S]: XLA on CPU runs the einsum
  # with separate G and T axes three times slower at T = 1.
  q_BKMH = q_BTNH.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4)
  q_BKMH = q_BKMH.reshape(B, K, N // K * T, H)
  score_BKMS = jnp.einsum(
    'BKMH,BKHS->BKMS', q_BKMH, k_BKHS, preferred_element_type=jnp.float32
  )
  score_BKGTS = score_BKMS.reshape(B, K, N // K, T, -1) * scale
  score_BKGTS = jnp.where(mask_BTS[:, None, None], score_BKGTS, _MASKED)
  weight_BKGTS = jax.nn.softmax(score_BKGTS, axis=-1).astype(v_BKSH.dtype)
  out_BKMH = jnp.einsum(
    'BKMS,BKSH->BKMH', weight_BKGTS.reshape(score_BKMS.shape), v_BKSH
  )
  out_BKGTH = out_BKMH.reshape(B, K, N // K, T, H)
  return out_BKGTH.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


def _splash(q_BTNH, k_BKTH, v_BKTH, visible, scale):
  """Each device computes its own rows and heads; nothing is exchanged."""
  T = q_BTNH.shape[1]
  q_BNTH = (q_BTNH * scale).astype(q_BTNH.dtype).swapaxes(1, 2)
  # Rows are filled up to whole blocks. Nobody looks ahead, so nobody sees it.
  pad = -T % _BLOCKS[-1]
  grow = lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, pad), (0, 0)))
  segment_BT = jnp.pad(visible.segment, ((0, 0), (0, pad)))

  def attend_rows(q_BNTH, k_BKTH, v_BKTH, segment_BT):
    kernel = _splash_kernel(q_BNTH.shape[1], T + pad, visible.window)
    segments = splash_kernel.SegmentIds(q=segment_BT, kv=segment_BT)
    return jax.vmap(kernel)(q_BNTH, k_BKTH, v_BKTH, segments)

  inputs = (*map(grow, (q_BNTH, k_BKTH, v_BKTH)), segment_BT)
  if not jax.sharding.get_abstract_mesh().empty:
    heads, kv_heads = _spec('batch', 'heads'), _spec('batch', 'kv_heads')
    attend_rows = jax.shard_map(
      attend_rows,
      in_specs=(heads, kv_heads, kv_heads, _spec('batch')),
      out_specs=heads,
      check_vma=False,  # a kernel does not say along which axes it varies
    )
  return attend_rows(*inputs)[:, :, :T].swapaxes(1, 2)


def _splash_kernel(heads, length, window):
  if window is None:
    mask = splash_mask.CausalMask((length, length))
  else:
    mask = splash_mask.LocalMask((length, length), (window - 1, 0), offset=0)
  block = next(size for size in _BLOCKS if length % size == 0)
  names = ('q', 'kv', 'kv_compute', 'q_dkv', 'kv_dkv', 'kv_dkv_compute',
           'q_dq', 'kv_dq')  # fmt: skip
  sizes = splash_kernel.BlockSizes(**{f'block_{name}': block for name in names})
  return splash_kernel.make_splash_mha(
    splash_mask.MultiHeadMask([mask] * heads),
    block_sizes=sizes,
    head_shards=1,
    q_seq_shards=1,
  )


def _platform() -> str:
  """Of the devices that the program is for, which may not be those here."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return jax.default_backend()
  return mesh.abstract_device.platform


def _obstacle(wanted, config, platform, rows, length) -> str | None:
  """Why it cannot be computed so; None: it can."""
  c = config
  if wanted == 'fused' and platform == 'gpu':
    if c.dtype != 'bfloat16':
      return f'needs bfloat16 on a GPU, and model.dtype={c.dtype!r}'
    if c.head_dim % 8 or c.head_dim > 128:
      return (
        'needs heads of a multiple of 8 numbers, 128 at most, and '
        f'model.head_dim={c.head_dim}'
      )
    if length % 2:
      return f'needs rows of an even length, and these have {length} tokens'
  if wanted == 'splash':
    if platform != 'tpu':
      return f'is a kernel for TPUs, and this is {platform!r}'
    if c.scan_layers and c.sliding_layers:
      return (
        'is compiled for one window, and model.scan_layers=True runs layers '
        'with and without one by the same code'
      )
    ways, heads = _ways('batch'), _ways('kv_heads')
    if rows % ways or c.num_kv_heads % heads:
      return (
        f'needs {rows} rows and model.num_kv_heads={c.num_kv_heads} to divide '
        f'over {ways} and {heads} devices'
      )
  return None


def _ways(name) -> int:
  """Over how many devices a logical axis is divided."""
  mesh, ways = jax.sharding.get_abstract_mesh(), 1
  if mesh.empty:
    return ways
  (axes,) = _spec(name)
  for axis in (axes,) if isinstance(axes, str) else axes or ():
    ways *= mesh.shape[axis]
  return ways


def _spec(*names):
  return nn.logical_to_mesh_axes(names, sharding.RULES)
