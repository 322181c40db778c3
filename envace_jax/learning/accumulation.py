"""Sums over microbatches: the memory of one, the gradient of all."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from envace_jax.learning import batch as batches
from envace_jax.learning import objective

Params = Any  # whatever is differentiated: a network's parameters, adapters


def accumulate(
  loss_fn: Callable[[Params, Any], tuple[jax.Array, Any]],
  params: Params,
  rows: Any,
  config: objective.LossConfig,
) -> tuple[jax.Array, Any, Params]:
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
