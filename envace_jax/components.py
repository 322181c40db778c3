"""From a config to the components it describes, one function each.

Every option of a component is read here, once, so that an option has one
reader and one meaning. Whatever is impossible is refused here, before anything
compiles.
"""

import ml_collections

from envace_jax import errors, types
from envace_jax.endpoints import attempts
from envace_jax.evaluation import private
from envace_jax.learning import kl, objective, surrogates
from envace_jax.learning import optimizer as optimizers
from envace_jax.model import config as model_config
from envace_jax.model import sharding, transformer
from envace_jax.rewards import checklist, judge_endpoint
from envace_jax.rollout import per_action, private_rehearsal
from envace_jax.sampling import generator, samplers
from envace_jax.worlds import simulator

WORLDS = ('rehearsal', 'real', 'simulator', 'null')
DATA_WORLDS = ('small', 'resampled', 'jsonl', 'published')


def validate(config: ml_collections.ConfigDict) -> None:
  """Refuses what cannot work, in one sentence that names the remedy."""
  rollout, rl = config.rollout, config.rl
  _validate_data(config.data)
  _one_of('rollout.world', rollout.world, WORLDS)
  _one_of('rollout.mode', rollout.mode, ('on_device', 'host'))
  _one_of('rollout.validation', rollout.validation, ('policy', 'program'))
  _one_of('rollout.view', rollout.view, ('joint', 'split'))
  _one_of('rl.objective', rl.objective, ('policy_gradient', 'supervised'))
  _one_of('rl.baseline', rl.baseline, ('shared', 'role'))
  _one_of('rl.weighting', rl.weighting, ('episode', 'row'))
  _one_of('rl.normalizer', rl.normalizer, ('token', 'role_token', 'row'))
  _one_of('rl.surrogate', rl.surrogate, _values(surrogates.Surrogate))
  _one_of('rl.kl_estimator', rl.kl_estimator, _values(kl.KLEstimator))
  _one_of('private.mode', config.private.mode, _values(private_rehearsal.Mode))
  _one_of(
    'private.memory', config.private.memory, _values(private_rehearsal.Memory)
  )
  _validate_reuse(rl)
  _validate_simulator(rollout)
  _validate_mixing(rollout, rl)
  _validate_sharing(rollout, rl)
  if rollout.mode == 'on_device' and rollout.world != 'rehearsal':
    raise errors.UserError(
      f'rollout.world={rollout.world!r} needs the host to answer; set '
      'rollout.mode=host'
    )
  if rollout.mode == 'on_device' and rollout.view == 'split':
    raise errors.UserError(
      "rollout.view='split' needs two rows an episode, which the host moves; "
      'set rollout.mode=host'
    )
  if rollout.mode == 'on_device' and (
    rollout.max_parallel_calls > 1 or rollout.max_actions <= rollout.max_steps
  ):
    raise errors.UserError(
      'the on-device program answers one call an action and counts calls, not '
      'actions; set rollout.mode=host, or rollout.max_parallel_calls=1 and '
      'rollout.max_actions above rollout.max_steps'
    )
  if rollout.mode == 'on_device' and rollout.validation == 'program':
    raise errors.UserError(
      "rollout.validation='program' reads calls and answers, which the "
      'on-device program does not; set rollout.mode=host'
    )
  if rollout.mode == 'on_device' and rollout.upstream_termination:
    raise errors.UserError(
      'rollout.upstream_termination reads observations, which the on-device '
      'program does not; set rollout.mode=host'
    )
  if rl.objective == 'policy_gradient':
    for role in ('act', 'rehearse'):
      if rollout[role].top_k or rollout[role].top_p < 1:
        raise errors.UserError(
          f'rollout.{role}: training rescores under the temperature alone, so '
          'top_k and top_p would bias the importance ratio; leave them at 0 '
          'and 1.0'
        )
  for phase, size in (
    ('warm_start', config.warm_start.batch_size),
    ('rl', rl.tasks_per_step * rl.group_size // rl.minibatches),
    ('rl', rl.anchor_batch_size if rl.anchor_weight else 0),
  ):
    parts = config[phase].microbatches * config.mesh.data * config.mesh.fsdp
    if size % parts:
      raise errors.UserError(
        f'{size} rows of {phase} do not divide into microbatches * data * '
        f'fsdp = {parts} parts; change {phase}.microbatches or the batch size'
      )
  rows = config.evaluation.batch_tasks * config.evaluation.samples
  for name, size in (
    ('evaluation.samples', config.evaluation.samples),
    ('private.attempts', config.private.attempts or 1),
  ):
    if size < 1 or rows % size:
      raise errors.UserError(
        f'{name}={size} must divide evaluation.batch_tasks * '
        f'evaluation.samples = {rows} rows'
      )
  for name in ('warm_start.steps', 'rl.steps'):
    phase, key = name.split('.')
    if config[phase][key] < 0:
      raise errors.UserError(f'{name} must not be negative')
  if config.private.memory == 'written' and (
    config.data.world == 'published'  # samples hold no assessments
    or not (config.data.reflections or config.data.world == 'jsonl')
  ):
    raise errors.UserError(
      "private.memory='written' needs a policy that was taught to assess its "
      'attempts; set data.reflections above 0 where data.world is not '
      "'published'"
    )
  try:  # what the components themselves refuse
    sharding.make_mesh(**config.mesh.to_dict())
    decoder(config, model(config, config.data.vocab_size), stop_id=0)
    private_settings(config)
    policy_loss(config)
    reward_rule(config)
    judge_endpoint_of(config)
    judge_policy(config)
    simulator_endpoint(config)
    simulator_policy(config)
    optimizer(config.warm_start)
    rl_optimizer(config)
  except ValueError as error:
    raise errors.UserError(str(error)) from error


def _validate_data(data: ml_collections.ConfigDict) -> None:
  """Where tasks come from."""
  _one_of('data.world', data.world, DATA_WORLDS)
  if data.world in ('jsonl', 'published') and '{split}' not in data.files:
    raise errors.UserError(
      f'data.world={data.world!r} needs data.files, a path that contains '
      '{split} (train, dev, test_iid, test_ood)'
    )


def _validate_reuse(rl: ml_collections.ConfigDict) -> None:
  """How often a rollout is used, and how long it is sampled for."""
  parts, updates = rl.minibatches, rl.updates_per_rollout
  rows = rl.tasks_per_step * rl.group_size
  if parts < 1 or rows % parts:
    raise errors.UserError(
      f'rl.minibatches={parts} must divide rl.tasks_per_step * rl.group_size = '
      f'{rows} rows'
    )
  if updates < 1 or updates % parts:
    raise errors.UserError(
      f'rl.updates_per_rollout={updates} must be a multiple of rl.minibatches='
      f'{parts}: each part of a rollout is used equally often'
    )
  if rl.dynamic_sampling_draws < 0:
    raise errors.UserError(
      f'rl.dynamic_sampling_draws={rl.dynamic_sampling_draws} must not be '
      'negative; 0 is off'
    )


def _validate_simulator(rollout: ml_collections.ConfigDict) -> None:
  """One player at most."""
  if rollout.simulator_workdir and rollout.simulator_endpoint.base_url:
    raise errors.UserError(
      'rollout.simulator_workdir and rollout.simulator_endpoint.base_url both '
      'name who plays the environment; leave one of them empty'
    )


def _validate_mixing(
  rollout: ml_collections.ConfigDict, rl: ml_collections.ConfigDict
) -> None:
  """Which episodes and steps are answered for real."""
  for name in ('real_fraction', 'real_steps_fraction'):
    share = rollout[name]
    if not 0 <= share <= 1:
      raise errors.UserError(f'rollout.{name}={share} must be in [0, 1]')
    if share and rollout.world not in ('rehearsal', 'simulator'):
      raise errors.UserError(
        f'rollout.{name}={share} mixes the real environment into a rehearsal '
        f'or a simulator, not into rollout.world={rollout.world!r}; set it to 0'
      )
    if share and rollout.mode == 'on_device':
      raise errors.UserError(
        f'rollout.{name}={share} needs the host to answer; set '
        'rollout.mode=host'
      )
  episodes = rollout.real_fraction * rl.group_size
  if abs(episodes - round(episodes)) > 1e-6:
    raise errors.UserError(
      f'rollout.real_fraction={rollout.real_fraction} of rl.group_size='
      f'{rl.group_size} is {episodes:.3g} episodes; use a multiple of '
      f'1/{rl.group_size}'
    )


def mixes_worlds(config: ml_collections.ConfigDict) -> bool:
  """Whether some answers of a rehearsal or a simulator are real."""
  rollout = config.rollout
  return rollout.real_fraction > 0 or rollout.real_steps_fraction > 0


def real_episodes(config: ml_collections.ConfigDict) -> int:
  """Wholly real episodes of each group, where worlds are mixed."""
  return round(config.rollout.real_fraction * config.rl.group_size)


def _validate_sharing(rollout, rl) -> None:
  """A network per role needs rows per role, and both roles sampled."""
  if rl.share_roles:
    return
  if rollout.view != 'split' or rollout.world != 'rehearsal':
    raise errors.UserError(
      'rl.share_roles=False trains a network per role, each on rows of its '
      "own; set rollout.view='split' and rollout.world='rehearsal'"
    )
  if rl.objective == 'supervised':
    raise errors.UserError(
      "rl.objective='supervised' goes on with the one network of the warm "
      'start; set rl.share_roles=True'
    )


def model(
  config: ml_collections.ConfigDict, vocab_size: int
) -> transformer.Transformer:
  return transformer.Transformer(
    model_config.TransformerConfig(
      vocab_size=vocab_size,
      max_len=config.rollout.max_row_tokens,
      **config.model.to_dict(),
    )
  )


def decoder(
  config: ml_collections.ConfigDict,
  network: transformer.Transformer,
  stop_id: int,
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
    ),
    act=samplers.SamplerConfig(**c.act.to_dict()),
    rehearse=samplers.SamplerConfig(**c.rehearse.to_dict()),
    act_stop_ids=(stop_id,),
    rehearse_stop_ids=(stop_id,),
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


def _values(enum_class) -> tuple[str, ...]:
  return tuple(member.value for member in enum_class)


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
  if value not in choices:
    raise errors.UserError(f'{name}={value!r}; use one of {choices}')
