"""`envace check`: what a config means, without compiling anything.

Prints the effective config, the token and memory budgets that follow from it,
and every option that does nothing at these settings. Impossible settings are
one sentence and exit code 2.
"""

import sys

from flax import linen as nn
import jax
import ml_collections

from envace_jax import components, no_ops, pretrained, refusals
from envace_jax.learning import state as states
from envace_jax.model import config as model_config
from envace_jax.model import per_role, transformer

_FLOAT_BYTES = 4


def run(config: ml_collections.ConfigDict) -> int:
  """Prints the report; returns the exit code."""
  published = pretrained.architecture(config)
  refusals.validate(config, published)
  lines = ['Config', *_indented(str(config).splitlines()), '']
  lines += ['Budgets', *_indented(budgets(config, published)), '']
  idle = no_ops.find(config)
  lines.append('Options that do nothing at these settings')
  lines += _indented(idle or ['none'])
  sys.stdout.write('\n'.join(lines) + '\n')
  return 0


def budgets(
  config: ml_collections.ConfigDict,
  published: model_config.TransformerConfig | None = None,
) -> list[str]:
  """Tokens and bytes per step, from shapes alone.

  Sizes are upper bounds for the vocabulary cap; activations are those of one
  microbatch without rematerialisation.
  """
  rollout, rl = config.rollout, config.rl
  network = components.model(config, config.data.vocab_size, published)
  shape = network.config
  state = jax.eval_shape(
    lambda: _abstract_state(
      network, components.rl_optimizer(config), config.rl.share_roles
    )
  )
  params = transformer.num_params(state.params)
  state_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
  rows = rl.tasks_per_step * rl.group_size
  width = shape.compute_dtype.dtype.itemsize
  cache = (
    2 * shape.num_layers * shape.num_kv_heads * shape.head_dim
    * rollout.max_row_tokens * rows * width
  )  # fmt: skip
  micro_rows = rows // rl.minibatches // rl.microbatches
  micro_tokens = micro_rows * rollout.max_row_tokens
  activations = (
    micro_tokens
    * width
    * shape.num_layers
    * (8 * shape.d_model + 3 * shape.d_ff)
  )
  logits = micro_rows * rl.logprob_chunk * shape.vocab_size * _FLOAT_BYTES
  if (
    components.policy_loss(config).uses_reference and rl.kl_estimator == 'exact'
  ):
    logits *= 2  # the reference's next to the policy's
  return [
    f'parameters           {params:>14,}',
    f'train state          {_mib(state_bytes)}',
    f'KV caches            {_mib(cache)}  ({rows} rows)',
    f'activations          {_mib(activations)}  (one microbatch)',
    f'logits               {_mib(logits)}  (one chunk)',
    f'row tokens           {rollout.max_row_tokens:>14,}  at most',
    f'RL tokens per step   {rows * rollout.max_row_tokens:>14,}  at most',
    f'RL rollouts          {rl.steps * rows:>14,}',
    f'warm-start rows      '
    f'{config.warm_start.steps * config.warm_start.batch_size:>14,}',
    f'devices              '
    f'{config.mesh.data * config.mesh.fsdp * config.mesh.tensor:>14,}',
  ]


def _abstract_state(network, tx, share_roles):
  params = nn.meta.unbox(transformer.init_trained(network, jax.random.key(0)))
  if not share_roles:
    params = per_role.PerRole(act=params, rehearse=params)
  return states.TrainState(
    step=jax.numpy.int32(0), params=params, opt_state=tx.init(params)
  )


def _mib(size: int) -> str:
  return f'{size / 2**20:>10,.1f} MiB'


def _indented(lines: list[str]) -> list[str]:
  return [f'  {line}' for line in lines]
