"""What a config cannot ask for, refused before anything compiles.

One sentence each, with the remedy. What a single component cannot be it refuses
itself, when it is made; here they are all made once.
"""

import ml_collections

from envace_jax import benchmark_worlds, components, errors, types
from envace_jax.learning import kl, surrogates
from envace_jax.model import config as model_config
from envace_jax.model import sharding
from envace_jax.rollout import private_rehearsal

WORLDS = ('rehearsal', 'real', 'simulator', 'null')
DATA_WORLDS = (
  'small',
  'resampled',
  'jsonl',
  'published',
  *benchmark_worlds.WORLDS,
)


def validate(
  config: ml_collections.ConfigDict,
  published: model_config.TransformerConfig | None = None,
) -> None:
  """Refuses what cannot work, in one sentence that names the remedy.

  `published` is the architecture of `pretrained.path`, if there is one.
  """
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
  if config.lora.rank and not config.pretrained.path:
    raise errors.UserError(
      f'lora.rank={config.lora.rank} corrects frozen weights, and without '
      'pretrained.path they would be random; set lora.rank=0'
    )
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
  if rollout.mode == 'on_device' and rollout.max_rows > 1:
    raise errors.UserError(
      f'rollout.max_rows={rollout.max_rows} has rows opened anew, which the '
      'on-device program does not; set rollout.mode=host, or rollout.max_rows=1'
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
    network = components.model(config, config.data.vocab_size, published)
    components.decoder(
      config, network, stop_ids={role: (0,) for role in types.Role}
    )
    components.private_settings(config)
    components.policy_loss(config)
    components.reward_rule(config)
    components.judge_endpoint_of(config)
    components.judge_policy(config)
    components.simulator_endpoint(config)
    components.simulator_policy(config)
    components.optimizer(config.warm_start)
    components.rl_optimizer(config)
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

  if not 0 <= data.left_out <= 1 or data.max_faults < 1:
    raise errors.UserError(
      f'data.left_out={data.left_out} must be from 0 to 1, and '
      f'data.max_faults={data.max_faults} at least 1'
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


def _validate_sharing(rollout, rl) -> None:
  """A network per role needs rows per role, and both roles sampled."""
  if rl.share_roles:
    return
  if rollout.view != 'split' or rollout.world != 'rehearsal':
    raise errors.UserError(
      'rl.share_roles=False trains a network per role, each on rows of its '
      "own; set rollout.view='split' and rollout.world='rehearsal'"
    )
  if rollout.max_rows > 1:
    raise errors.UserError(
      'rl.share_roles=False trains each network on one row an episode; set '
      'rollout.max_rows=1, or rl.share_roles=True'
    )
  if rl.objective == 'supervised':
    raise errors.UserError(
      "rl.objective='supervised' goes on with the one network of the warm "
      'start; set rl.share_roles=True'
    )


def _values(enum_class) -> tuple[str, ...]:
  return tuple(member.value for member in enum_class)


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
  if value not in choices:
    raise errors.UserError(f'{name}={value!r}; use one of {choices}')
