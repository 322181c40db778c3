"""Options whose value cannot matter at the current settings, and why.

A switch that does nothing is worse than none: two arms of a study that differ
by it are one arm. `envace check` lists them and a run logs them as it starts.
"Cannot matter" means the same update but for the rounding by which a sampler
and a trainer in float32 differ, at a ratio that is 1 otherwise.
"""

import ml_collections

_LEFT_OUT = "data.left_out: only for a benchmark's environment"
_FAULTS = "data.max_faults: only for data.world='tau2_telecom'"
_HABITS = (
  'data.habits, data.notes_fraction, data.records, data.reflections: attempts '
  "at a benchmark's tasks are their plans"
)
_STRICT = "data.strict: only for data.world='published'"


def find(config: ml_collections.ConfigDict) -> list[str]:
  """One line per idle option, from the config alone."""
  rollout, rl = config.rollout, config.rl
  found = []
  if rl.steps == 0:
    found.append('rl.*: rl.steps=0, there is no RL phase')
  if rl.objective == 'supervised':
    found.append(
      'rollout.*, reward.*, rl.baseline, rl.weighting, rl.leave_one_out, '
      'rl.std, rl.clip_*, rl.surrogate, rl.dual_clip, rl.importance_cap, '
      'rl.updates_per_rollout, rl.minibatches, rl.dynamic_sampling_draws, '
      "rl.kl_*, rl.anchor_*: rl.objective='supervised' samples nothing"
    )
  else:
    found.append("rl.supervised_batch_size: only for rl.objective='supervised'")
    found += [
      *_rewards(config.reward),
      *_ratios(config),
      *_groups(rl),
      *_penalties(rl),
      *_roles(rollout, rl),
    ]
  found += [*_rows(config), *_optimizers(config)]
  if rollout.mode == 'on_device':
    found.append("rollout.widths: only for evaluation while mode='on_device'")
  found += [*_data(config.data), *_published(config)]
  found += [*_worlds(rollout), *_mixing(rollout, rl)]
  found += _private(config)
  for role in ('act', 'rehearse'):
    if rollout[role].temperature == 0:
      found.append(f'rollout.{role}.top_k, .top_p: greedy')
  return found


def _data(data) -> list[str]:
  """What concerns data of another origin."""
  files = "data.files: only for data.world='jsonl' or 'published'"
  if data.world in ('small', 'resampled'):
    return [files, _STRICT, _LEFT_OUT, _FAULTS]
  if data.world == 'bfcl_files':
    return [files, _STRICT, _HABITS, _FAULTS]
  if data.world == 'tau2_telecom':
    return [files, _STRICT, _HABITS, 'data.num_test: the benchmark decides']
  found = [
    'data.num_*, data.habits, data.notes_fraction, data.records, '
    'data.reflections: data comes from your files',
    _LEFT_OUT,
    _FAULTS,
  ]
  return found if data.world == 'published' else [*found, _STRICT]


def _published(config) -> list[str]:
  """What a checkpoint decides, and what there is only with one."""
  found = []
  if config.pretrained.path:
    if not config.lora.rank:
      found.append('pretrained.dtype: lora.rank=0 freezes nothing')
    found.append(
      'data.vocab_size, model.* but .attention, .dtype, .remat and '
      '.scan_layers: pretrained.path brings vocabulary and architecture'
    )
  else:
    found.append("pretrained.dtype: pretrained.path=''")
  if not config.lora.rank:
    found.append('lora.alpha, lora.targets: lora.rank=0 trains the weights')
  return found


def _optimizers(config) -> list[str]:
  """What concerns moments where none are kept."""
  return [
    f'{phase}.optimizer.b1, .b2, .moments_dtype: '
    f"{phase}.optimizer.kind='adafactor' keeps no moments of Adam"
    for phase in ('warm_start', 'rl')
    if config[phase].optimizer.kind == 'adafactor'
  ]


def _rewards(reward) -> list[str]:
  """What concerns judges where there are none."""
  if reward.judge.base_url:
    return []
  return [
    'reward.judge.*, reward.judge_attempts.*, reward.rule.aggregation, '
    ".precedence, .tool_error_fails: reward.judge.base_url='', nobody judges"
  ]


def _private(config) -> list[str]:
  """What concerns rehearsals that are not made, or nothing said of them."""
  found = []
  if config.private.attempts == 0:
    found.append('private.*: private.attempts=0, nothing is rehearsed')
  elif config.private.memory == 'agreed':
    found.append("private.max_reflection_tokens: private.memory='agreed'")
  if config.data.reflections and config.private.memory == 'agreed':
    found.append("data.reflections: only read for private.memory='written'")
  return found


def _worlds(rollout) -> list[str]:
  """What concerns a view or a world that is not in use."""
  found = []
  served = rollout.simulator_endpoint.base_url
  if rollout.world != 'simulator':
    found.append(
      'rollout.simulator_workdir, rollout.simulator_endpoint.*, '
      "rollout.simulator_attempts.*: only for rollout.world='simulator'"
    )
    served = ''
  elif not served:
    found.append(
      'rollout.simulator_endpoint.*, rollout.simulator_attempts.*: '
      "rollout.simulator_endpoint.base_url='', no endpoint is asked"
    )
  if served:
    found.append(
      'prompt.rehearse.tools, rollout.rehearse_prompt_tokens, '
      'rollout.max_resamples: the endpoint is told all tools, and asked '
      'rollout.simulator_attempts.max_attempts times'
    )
  elif rollout.view == 'joint':
    found.append(
      'prompt.rehearse.*, rollout.rehearse_prompt_tokens, data.records: only '
      "for rollout.view='split', or a simulator behind an endpoint"
    )
  if rollout.validation == 'policy':
    found.append("rollout.max_resamples: only for rollout.validation='program'")
  return found


def _mixing(rollout, rl) -> list[str]:
  """What concerns real answers among others."""
  found = []
  if not 0 < rollout.real_fraction < 1:
    found.append(
      'rl.baseline_by_source: one kind of world answers all episodes of a group'
    )
  if rollout.real_fraction == 1 and rollout.real_steps_fraction:
    found.append(
      'rollout.real_steps_fraction: rollout.real_fraction=1, every episode is '
      'real'
    )
  alone = round(rollout.real_fraction * rl.group_size) == 1 < rl.group_size
  if alone and rl.baseline_by_source:
    found.append(
      f'rollout.real_fraction={rollout.real_fraction}: one real episode in a '
      'group has no other to be compared with under rl.baseline_by_source, so '
      'it has no advantage'
    )
  return found


def _ratios(config) -> list[str]:
  """What acts on importance ratios, where every ratio is 1."""
  rl, found = config.rl, []
  if rl.surrogate == 'cispo' and rl.dual_clip:
    found.append(
      f"rl.dual_clip={rl.dual_clip}: rl.surrogate='cispo' bounds the weight of "
      'every token already, whatever the sign of its advantage'
    )
  # In bfloat16 a cached decode step and a whole row differ by more than
  # rounding of the last bit, so ratios do leave 1.
  if config.model.dtype != 'float32':
    return found
  if rl.importance_cap:
    found.append(
      f"rl.importance_cap={rl.importance_cap}: with model.dtype='float32' "
      'sampler and trainer agree up to rounding, so every weight is 1; it '
      'costs one more scoring pass per rollout'
    )
  if rl.updates_per_rollout > 1:
    return found
  found.append(
    f'rl.clip_low={rl.clip_low}, rl.clip_high={rl.clip_high}: one update per '
    'rollout, so every importance ratio is 1 and nothing is clipped'
  )
  if rl.surrogate != 'token':
    found.append(
      f'rl.surrogate={rl.surrogate!r}: one update per rollout, so every ratio '
      "is 1, where its gradient is that of 'token' (up to rounding)"
    )
  if rl.dual_clip and rl.surrogate != 'cispo':
    found.append(
      f'rl.dual_clip={rl.dual_clip}: one update per rollout, so every ratio is '
      '1, below the bound'
    )
  return found


def _rows(config) -> list[str]:
  """What concerns padding, where packing leaves none or saves nothing."""
  rl, found = config.rl, []
  if not rl.packing:
    return found
  if rl.row_buckets:
    found.append('rl.row_buckets: rl.packing=True, packed rows are not cut')
  if rl.microbatches == config.warm_start.microbatches == 1:
    found.append(
      'rl.packing: rl.microbatches=1 and warm_start.microbatches=1, so there '
      'is no microbatch that could be left out; every row is computed'
    )
  return found


def _groups(rl) -> list[str]:
  """What compares the attempts of a group."""
  found = []
  if rl.group_size == 1:
    found.append('rl.*: groups of one have no baseline; nothing is learned')
    for name in ('leave_one_out', 'std'):
      if rl[name]:
        found.append(
          f'rl.{name}: rl.group_size=1, there are no others to compare with'
        )
    if rl.dynamic_sampling_draws:
      found.append(
        f'rl.dynamic_sampling_draws={rl.dynamic_sampling_draws}: '
        'rl.group_size=1, no group differs within itself; every step spends '
        'the whole budget and learns nothing from it'
      )
  if rl.baseline == 'role' and rl.weighting == 'episode':
    found.append(
      "rl.baseline='role' equals 'shared' wherever every episode of a group "
      'has both roles: the reward is common and episodes weigh the same'
    )
  return found


def _penalties(rl) -> list[str]:
  """What is added to the policy term."""
  found = []
  if rl.anchor_weight == 0:
    found.append('rl.anchor_batch_size: rl.anchor_weight=0')
  if rl.kl_act == rl.kl_rehearse == 0:
    found.append(
      f'rl.kl_estimator={rl.kl_estimator!r}: rl.kl_act=0 and rl.kl_rehearse=0'
    )
  elif rl.kl_estimator == 'k1':
    found.append(
      "rl.kl_*: rl.kl_estimator='k1' has an expected gradient of 0 on-policy, "
      "so as a loss it adds noise and no pull; use 'k2', 'k3' or 'exact'"
    )
  return found


def _roles(rollout, rl) -> list[str]:
  """What concerns a role that does not sample, or is not trained."""
  found = []
  if rollout.world != 'rehearsal' and (rl.rehearse_weight or rl.kl_rehearse):
    found.append(
      f'rl.rehearse_weight, rl.kl_rehearse: with rollout.world='
      f'{rollout.world!r} nobody samples as REHEARSE'
    )
  return found
