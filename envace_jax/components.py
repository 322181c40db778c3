"""From a config to the components it describes, one function each.

Every option of a component is read here, once, so that an option has one
reader and one meaning. A component refuses what it cannot be; what options
forbid each other is in `refusals`.
"""

from collections.abc import Mapping
import dataclasses

import ml_collections

from envace_jax import types
from envace_jax.endpoints import attempts
from envace_jax.evaluation import private
from envace_jax.learning import kl, objective, surrogates
from envace_jax.learning import optimizer as optimizers
from envace_jax.model import config as model_config
from envace_jax.model import transformer
from envace_jax.rewards import checklist, judge_endpoint
from envace_jax.rollout import per_action, private_rehearsal
from envace_jax.sampling import generator, samplers
from envace_jax.worlds import simulator


def mixes_worlds(config: ml_collections.ConfigDict) -> bool:
  """Whether some answers of a rehearsal or a simulator are real."""
  rollout = config.rollout
  return rollout.real_fraction > 0 or rollout.real_steps_fraction > 0


def real_episodes(config: ml_collections.ConfigDict) -> int:
  """Wholly real episodes of each group, where worlds are mixed."""
  return round(config.rollout.real_fraction * config.rl.group_size)


def rows_per_episode(config: ml_collections.ConfigDict) -> int:
  """Rows that an episode may leave to be trained on."""
  rollout = config.rollout
  answers_in_own = rollout.view == 'split' and rollout.world == 'rehearsal'
  return rollout.max_rows + answers_in_own


# What a published architecture leaves open: how it is computed.
NUMERICS = ('attention', 'dtype', 'remat', 'scan_layers')


def model(
  config: ml_collections.ConfigDict,
  vocab_size: int,
  published: model_config.TransformerConfig | None = None,
) -> transformer.Transformer:
  """The network, of `config.model`'s sizes or of a published architecture.

  Raises:
    ValueError: rows are longer than the published network was trained for.
  """
  options, max_len = config.model.to_dict(), config.rollout.max_row_tokens
  chosen = {
    'max_len': max_len,
    'lora': model_config.LoraConfig(**config.lora)
    if config.lora.rank
    else None,
  }
  if published is None:
    shape = model_config.TransformerConfig(
      vocab_size=vocab_size, **options, **chosen
    )
    return transformer.Transformer(shape)
  if max_len > published.max_len:
    raise ValueError(
      f'rollout.max_row_tokens={max_len} exceeds the {published.max_len} '
      'positions of the published network; lower it'
    )
  chosen |= {name: options[name] for name in NUMERICS}
  return transformer.Transformer(dataclasses.replace(published, **chosen))


def decoder(
  config: ml_collections.ConfigDict,
  network: transformer.Transformer,
  stop_ids: Mapping[types.Role, tuple[int, ...]],
) -> generator.Decoder:
  """How episodes are sampled while training."""
  c = config.rollout
  return generator.Decoder(
    model=network,
    limits=types.Limits(
      max_steps=c.max_steps,
      max_actions=c.max_actions,
      max_user_turns=c.max_user_turns,
      max_parallel_calls=c.max_parallel_calls,
      max_action_tokens=c.max_action_tokens,
      max_observation_tokens=c.max_observation_tokens,
      max_row_tokens=c.max_row_tokens,
      max_rows=c.max_rows,
    ),
    act=samplers.SamplerConfig(**c.act.to_dict()),
    rehearse=samplers.SamplerConfig(**c.rehearse.to_dict()),
    act_stop_ids=stop_ids[types.Role.ACT],
    rehearse_stop_ids=stop_ids[types.Role.REHEARSE],
    prompt_tokens=c.prompt_tokens,
    widths=tuple(c.widths),
    ladder=tuple(c.ladder),
  )


def private_settings(config: ml_collections.ConfigDict) -> private.Settings:
  options = config.private.to_dict()
  rule = private_rehearsal.Rule(
    attempts=options.pop('attempts'),
    mode=private_rehearsal.Mode(options.pop('mode')),
    memory=private_rehearsal.Memory(options.pop('memory')),
    max_notes=options.pop('max_notes'),
  )
  action = per_action.Settings(
    candidates=options.pop('candidates'),
    answers=options.pop('answers'),
    uncertainty_weight=options.pop('uncertainty_weight'),
  )
  return private.Settings(**options, rule=rule, action=action)


def optimizer(phase: ml_collections.ConfigDict, *, updates_per_step: int = 1):
  """The optimizer of `config.warm_start` or `config.rl`."""
  return optimizers.make_optimizer(
    total_steps=max(phase.steps, 1) * updates_per_step,
    **phase.optimizer.to_dict(),
  )


def rl_optimizer(config: ml_collections.ConfigDict):
  """The optimizer of `config.rl`, scheduled over all updates of the phase.

  With a network per role it is one for each that has anything to learn.
  """
  reused = config.rl.objective == 'policy_gradient'
  updates = config.rl.updates_per_rollout if reused else 1
  tx = optimizer(config.rl, updates_per_step=updates)
  if config.rl.share_roles:
    return tx
  loss = policy_loss(config)
  learns_act, learns_rehearse = (r in loss.trained_roles for r in types.Role)
  learns_rehearse |= loss.uses_anchor
  return optimizers.for_each_role(
    act=tx if learns_act else None, rehearse=tx if learns_rehearse else None
  )


def reward_rule(config: ml_collections.ConfigDict) -> checklist.Rule:
  """How an episode's verdicts come about."""
  options = config.reward.rule.to_dict()
  return checklist.Rule(
    **options
    | {
      'aggregation': checklist.Aggregation(options['aggregation']),
      'precedence': checklist.Precedence(options['precedence']),
    }
  )


def judge_endpoint_of(
  config: ml_collections.ConfigDict,
) -> judge_endpoint.Endpoint | None:
  """Where judges are; None: there are none."""
  options = config.reward.judge.to_dict()
  if not options['base_url']:
    return None
  return judge_endpoint.Endpoint(**options, seed=config.seed)


def judge_policy(config: ml_collections.ConfigDict) -> attempts.Policy:
  return attempts.Policy(**config.reward.judge_attempts.to_dict())


def simulator_endpoint(
  config: ml_collections.ConfigDict,
) -> simulator.Endpoint | None:
  """Where the simulator is; None: it is not behind an endpoint."""
  options = config.rollout.simulator_endpoint.to_dict()
  if config.rollout.world != 'simulator' or not options['base_url']:
    return None
  return simulator.Endpoint(**options)


def simulator_policy(config: ml_collections.ConfigDict) -> attempts.Policy:
  return attempts.Policy(**config.rollout.simulator_attempts.to_dict())


def supervised_loss(config, phase) -> objective.LossConfig:
  return objective.LossConfig(
    microbatches=phase.microbatches,
    normalizer=objective.Normalizer(config.rl.normalizer),
    **_row_options(config),
  )


def policy_loss(config: ml_collections.ConfigDict) -> objective.LossConfig:
  rl, rollout = config.rl, config.rollout
  return objective.LossConfig(
    policy_weight_per_role=(rl.act_weight, rl.rehearse_weight),
    temperature_per_role=(
      rollout.act.temperature,
      rollout.rehearse.temperature,
    ),
    surrogate=surrogates.Surrogate(rl.surrogate),
    clip_low=rl.clip_low,
    clip_high=rl.clip_high,
    dual_clip=rl.dual_clip or None,
    importance_cap=rl.importance_cap or None,
    kl_estimator=kl.KLEstimator(rl.kl_estimator),
    kl_weight_per_role=(rl.kl_act, rl.kl_rehearse),
    nll_weight=rl.anchor_weight,
    normalizer=objective.Normalizer(rl.normalizer),
    microbatches=rl.microbatches,
    **_row_options(config),
  )


def packs(config: ml_collections.ConfigDict) -> bool:
  """Whether several transcripts share a row of a train step."""
  return config.rl.packing


def _row_options(config: ml_collections.ConfigDict) -> dict:
  """How the rows of either phase are worked off."""
  # A packed row is nearly full; what to cut off it costs compilation.
  buckets = () if packs(config) else tuple(config.rl.row_buckets)
  return {
    'row_buckets': buckets,
    'packed': packs(config),
    'logprob_chunk': config.rl.logprob_chunk,
  }
