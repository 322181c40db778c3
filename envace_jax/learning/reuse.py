"""Several updates from one rollout, the first of them on-policy.

A rollout's rows are cut into `minibatches` parts, once; each pass makes one
update per part, and `updates / minibatches` passes are made. The behaviour
log-probs stay those of the sampler, so from the second update on the
importance ratios leave 1 and the clipping of `learning.surrogates` acts.

`TrainState.step` counts rollouts, whatever the number of updates; the
optimizer counts its own.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
from jax.sharding import Mesh
import numpy as np

from envace_jax.learning import batch as batches
from envace_jax.learning import objective
from envace_jax.learning import state as states
from envace_jax.learning import step as learning
from envace_jax.model import per_role, sharding, transformer

T = TypeVar('T')
# Of one network, or of a network per role.
Params = transformer.Params | per_role.PerRole
Rows = batches.TrainBatch | per_role.PerRole


def partition(
  items: Sequence[T], parts: int, *, seed: Sequence[int]
) -> list[list[T]]:
  """`parts` random parts of equal size; one part keeps the order.

  `seed` is all that the draw depends on: give what identifies the rollout.
  """
  if parts < 1 or len(items) % parts:
    raise ValueError(f'{len(items)} rows do not divide into {parts} parts')
  if parts == 1:
    return [list(items)]
  order = np.random.default_rng(seed).permutation(len(items))
  size = len(items) // parts
  return [
    [items[i] for i in sorted(order[p * size : (p + 1) * size])]
    for p in range(parts)
  ]


def make_proximal_scorer(
  model: transformer.Transformer,
  config: objective.LossConfig,
  mesh: Mesh,
) -> Callable[[Params, Rows], Rows]:
  """`score(params, batch) -> batch` with `proximal_logprobs` of `params`.

  Rows are scored a microbatch at a time, as they will be trained on; those of
  a network per role by the network that sampled them.
  """

  def score(params, batch):
    parts = config.microbatches
    split = jax.tree.map(
      lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), batch
    )
    logp_MBT = jax.lax.map(
      lambda rows: objective.proximal_logprobs(model, params, rows, config),
      split,
    )
    return logp_MBT.swapaxes(0, 1).reshape(batch.tokens.shape)

  jitted = jax.jit(score, out_shardings=sharding.batch_sharding(mesh))

  def proximal_scorer(params, batch):
    if isinstance(batch, per_role.PerRole):
      return per_role.PerRole(
        act=proximal_scorer(params.act, batch.act),
        rehearse=proximal_scorer(params.rehearse, batch.rehearse),
      )
    with sharding.use_mesh(mesh):
      return batch.replace(proximal_logprobs=jitted(params, batch))

  return proximal_scorer


def update_repeatedly(
  update: Callable[
    [states.TrainState, batches.TrainBatch, int],
    tuple[states.TrainState, learning.Metrics],
  ],
  state: states.TrainState,
  parts: Sequence[batches.TrainBatch],
  *,
  updates: int,
) -> tuple[states.TrainState, learning.Metrics]:
  """`update(state, part, i)` for i < `updates`, over and over the parts.

  Metrics are means over the updates, one step is counted for all of them.
  """
  if updates < 1 or updates % len(parts):
    raise ValueError(
      f'updates_per_rollout={updates} must be a multiple of minibatches='
      f'{len(parts)}'
    )
  if updates == 1:
    return update(state, parts[0], 0)
  done, history = int(state.step) + 1, []
  for i in range(updates):
    state, metrics = update(state, parts[i % len(parts)], i)
    history.append(metrics)
  step = jax.device_put(np.int32(done), state.step.sharding)
  history = jax.device_get(history)
  return state.replace(step=step), {
    name: np.mean([metrics[name] for metrics in history], dtype=np.float32)
    for name in history[0]
  }
