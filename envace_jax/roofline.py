"""What a workload must cost, and what this machine allows: the roofline model.

With W weights in matrices and n keys per token:

  forward        2 W + 4 n * query heads * head_dim * layers  FLOPs a token
  train          3 x forward, + 1 x for a KL reference; bytes not counted
  decode step    W + 2 n * kv heads * head_dim * layers * rows  numbers read

Padding and recomputation are not useful work, and are not counted; small
weights may stay in a processor cache and beat the bandwidth.
"""

from collections.abc import Callable
import time

import jax
import jax.numpy as jnp
import numpy as np


def row_flops(c, length, *, scored: bool = True):
  """Of one forward pass over rows of these lengths, logits included."""
  weights, logits, queries, _ = _sizes(c)
  pairs = length * (length + 1) / 2
  return 2 * (weights + scored * logits) * length + 4 * queries * pairs


def decode_cost(c, prompts, rows, before, new) -> tuple[np.ndarray, np.ndarray]:
  """FLOPs and bytes of the prefill, then of each of `new` decode steps."""
  weights, logits, queries, heads = _sizes(c)
  keys_T = before + np.arange(new)  # the pending token sees itself
  flops_T = rows * (2 * (weights + logits) + 4 * queries * keys_T)
  read_T = weights + logits + 2 * rows * heads * keys_T
  prefill = prompts * row_flops(c, before, scored=False)
  read = np.append(weights, read_T) * jnp.dtype(c.compute_dtype).itemsize
  return np.append(prefill, flops_T), read


def measure_limits(mesh, dtype, bar) -> tuple[float, float]:
  """Best matrix product of growing sizes; best update of 256 MiB."""
  product, flops, seconds, size = jax.jit(jnp.matmul), 0.0, 0.0, 512
  while seconds < 0.1 and size <= 16384:
    x = jnp.ones((size, size), dtype)
    seconds = _best_seconds(lambda x=x: product(x, x))
    flops, size = max(flops, 2 * size**3 / seconds), 2 * size
  bar.advance()
  # In place: fresh pages for a copy cost more than moving what they hold.
  add, x = jax.jit(lambda x: x + 1, donate_argnums=0), jnp.ones(2**26)

  def update():
    nonlocal x
    x = add(x)
    return x

  moved = 2 * x.nbytes / _best_seconds(update)
  bar.advance()
  # Several CPU devices are one processor under several names.
  devices = 1 if mesh.devices.flat[0].platform == 'cpu' else mesh.size
  return devices * flops, devices * moved


def _best_seconds(call: Callable[[], jax.Array]) -> float:
  jax.block_until_ready(call())  # compiles
  best, stop = float('inf'), time.perf_counter() + 0.4
  while time.perf_counter() < stop:
    start = time.perf_counter()
    jax.block_until_ready(call())
    best = min(best, time.perf_counter() - start)
  return best


def _sizes(c) -> tuple[int, int, int, int]:
  """Of all layer matrices, the unembedding, all query heads, all key heads."""
  L, D = c.num_layers, c.d_model
  queries, heads = (L * n * c.head_dim for n in (c.num_heads, c.num_kv_heads))
  weights = D * (2 * queries + 2 * heads + 3 * L * c.d_ff)
  return weights, D * c.vocab_size, queries, heads
