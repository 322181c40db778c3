"""Switches that do nothing say so, and those that do something do not."""

import pytest

from envace_jax import no_ops
from experiments import base

REUSED = {'rl.updates_per_rollout': 4}
HALF = {'model.dtype': 'bfloat16'}
WHOLE = {'rl.microbatches': 1, 'warm_start.microbatches': 1}
PUBLISHED = {'pretrained.path': 'a'}
ALONE = {'pretrained.path': ''}
ADAPTED = {'lora.rank': 8}
PARTS = {'rl.microbatches': 16}


def named(changes):
  config = base.get_config()
  config.update_from_flattened_dict(changes)
  return no_ops.find(config)


@pytest.mark.parametrize(
  'option, switched_on, reason, made_real',
  [
    ('rl.clip_low', {}, 'one update per rollout', REUSED),
    ('rl.clip_low', {}, 'one update per rollout', HALF),
    ('rl.surrogate', {'rl.surrogate': 'sequence'}, 'ratio is 1', REUSED),
    ('rl.surrogate', {'rl.surrogate': 'cispo'}, 'ratio is 1', REUSED),
    ('rl.dual_clip', {'rl.dual_clip': 3.0}, 'ratio is 1', REUSED),
    (
      'rl.dual_clip',
      {'rl.dual_clip': 3.0, 'rl.surrogate': 'cispo', **REUSED},
      'bounds the weight',
      {'rl.surrogate': 'token'},
    ),
    ('rl.importance_cap', {'rl.importance_cap': 2.0}, 'float32', HALF),
    (
      'rl.importance_cap',
      {'rl.importance_cap': 2.0, **REUSED},
      'every weight is 1',
      HALF,
    ),
    (
      'rl.leave_one_out',
      {'rl.leave_one_out': True, 'rl.group_size': 1},
      'no others',
      {'rl.group_size': 8},
    ),
    (
      'rl.std',
      {'rl.std': True, 'rl.group_size': 1},
      'no others',
      {'rl.group_size': 8},
    ),
    (
      'rl.dynamic_sampling_draws',
      {'rl.dynamic_sampling_draws': 2, 'rl.group_size': 1},
      'no group differs',
      {'rl.group_size': 8},
    ),
    ('data.files', {}, 'published', {'data.world': 'jsonl'}),
    ('data.vocab_size', PUBLISHED, 'brings vocabulary', ALONE),
    ('pretrained.dtype', PUBLISHED, 'freezes nothing', ADAPTED),
    ('lora.alpha', PUBLISHED, 'trains the weights', ADAPTED),
    ('data.strict', {}, 'published', {'data.world': 'published'}),
    (
      'data.strict',
      {'data.world': 'jsonl'},
      'published',
      {'data.world': 'published'},
    ),
    (
      'data.num_*',
      {'data.world': 'published'},
      'your files',
      {'data.world': 'small'},
    ),
    ('prompt.rehearse', {}, "view='split'", {'rollout.view': 'split'}),
    (
      'rollout.simulator_workdir',
      {},
      'simulator',
      {'rollout.world': 'simulator'},
    ),
    ('rollout.max_resamples', {}, 'program', {'rollout.validation': 'program'}),
    (
      'rl.row_buckets',
      {'rl.packing': True},
      'not cut',
      {'rl.packing': False},
    ),
    (
      'warm_start.optimizer.b1, .b2, .moments_dtype',
      {'warm_start.optimizer.kind': 'adafactor'},
      'no moments',
      {'warm_start.optimizer.kind': 'adamw'},
    ),
    ('rl.packing', {'rl.packing': True, **WHOLE}, 'left out', PARTS),
    ('rl.kl_estimator', {}, 'rl.kl_act=0', {'rl.kl_act': 0.1}),
    (
      'rl.kl_*',
      {'rl.kl_act': 0.1, 'rl.kl_estimator': 'k1'},
      'expected gradient of 0',
      {'rl.kl_estimator': 'k2'},
    ),
  ],
  ids=lambda value: str(value)[:40],
)
def test_a_switch_is_listed_exactly_while_it_does_nothing(
  option, switched_on, reason, made_real
):
  lines = [x for x in named(switched_on) if x.startswith(option)]
  assert len(lines) == 1 and reason in lines[0]
  both = named(switched_on | made_real)
  assert not [x for x in both if x.startswith(option)]


def test_the_supervised_control_uses_none_of_them():
  (line,) = [
    x
    for x in named({'rl.objective': 'supervised'})
    if "rl.objective='supervised'" in x
  ]
  for option in ('surrogate', 'updates_per_rollout', 'dynamic_sampling_draws'):
    assert f'rl.{option}' in line
