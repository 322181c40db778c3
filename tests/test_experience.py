"""What one RL step learns from: who is compared with whom, and who is left."""

import dataclasses
import types as python_types

import jax
import numpy as np
import pytest
import stub_endpoint

from envace_jax import build, errors, experience, no_ops, refusals, types
from envace_jax.model import transformer
from envace_jax.rollout import statistics
from envace_jax.text import formats
from experiments import base, quickstart

A, Source = types.Author, types.Source
REAL, REHEARSED = Source.REAL, Source.REHEARSED


def episode_of(group, source, length=3, real_calls=0):
  authors = np.array([A.PROMPT, *[A.ACT] * (length - 1)], np.int8)
  row = types.Row(
    tokens=np.full(length, 7, np.int32),
    authors=authors,
    logprobs=np.where(authors == A.ACT, -1.0, 0.0).astype(np.float32),
  )
  return types.Episode(
    task_id='t', group=group, sample_index=0, rows=(row,), steps=(), reply=None,
    stop_reason=types.StopReason.MAX_STEPS, source=source,
    real_calls=real_calls,
  )  # fmt: skip


def scored(reward):
  return types.Score(verdicts={}, reward=reward, success=None)


# One group of six and one of two.
GROUPS = [
  [
    (episode_of(0, REAL, 3, real_calls=2), scored(0.0)),
    (episode_of(0, REAL, 4, real_calls=1), scored(0.5)),
    (episode_of(0, REHEARSED, 5), scored(1.0)),
    (episode_of(0, REHEARSED, 6), scored(0.4)),
    (episode_of(0, REHEARSED, 7), scored(None)),  # its world failed
    (episode_of(0, Source.MIXED, 8), scored(0.9)),  # alone
  ],
  [
    (episode_of(1, REAL, 9), scored(1.0)),
    (episode_of(1, REHEARSED, 10), scored(0.0)),
  ],
]
BY_SOURCE = {3: -0.25, 4: 0.25, 5: 0.3, 6: -0.3, 8: 0.0, 9: 0.0, 10: 0.0}
POOLED = {3: -0.56, 4: -0.06, 5: 0.44, 6: -0.16, 8: 0.34, 9: 0.5, 10: -0.5}


def pack(groups, **options):
  config = base.get_config()
  config.rl.microbatches = 1
  config.rollout.max_row_tokens = 16
  config.update_from_flattened_dict(options)
  gathered = experience.Gathered(groups=groups, cursor=0, metrics={}, spend={})
  setup = python_types.SimpleNamespace(config=config)
  return experience.pack(setup, gathered, 0)


@pytest.mark.parametrize(
  'by_source, table, groups, singletons',
  [(True, BY_SOURCE, 5, 3), (False, POOLED, 2, 0)],
)
def test_advantages_by_source_and_pooled(by_source, table, groups, singletons):
  (batch,), metrics = pack(GROUPS, **{'rl.baseline_by_source': by_source})
  assert batch.tokens.shape[0] == 8
  found = {
    int(n): float(adv)
    for n, adv in zip(batch.lengths, batch.advantages[:, 1], strict=True)
    if n
  }
  # The unscored one has left the batch; its place is padding.
  assert found == pytest.approx(table, abs=1e-6)
  assert (metrics['groups/all'], metrics['groups/singleton']) == (
    groups,
    singletons,
  )


def test_a_minibatch_of_nothing_scored_keeps_its_rows():
  lost = [[(episode_of(0, REAL, n), scored(None)) for n in (3, 4)]]
  (batch,), _ = pack(lost)
  assert sorted(batch.lengths) == [3, 4] and not batch.advantages.any()


def of_rows(rewards, rows):
  """A group whose episodes have several rows, one generation each."""
  group = []
  for i, (reward, count) in enumerate(zip(rewards, rows, strict=True)):
    one = episode_of(0, REAL, 3 + i)
    many = one.rows * count
    group.append(
      (dataclasses.replace(one, rows=many, breaks=count - 1), scored(reward))
    )
  return group


def test_rows_of_an_episode_share_its_advantage():
  group = of_rows([1.0, 0.0, 0.5], [3, 1, 2])
  (batch,), _ = pack([group], **{'rollout.max_rows': 3})
  assert batch.tokens.shape[0] == 3 * 3
  # Each episode counts once per generation: the mean is (3 + 0 + 2 * .5) / 6.
  mean = 4 / 6
  found = sorted(
    zip(batch.lengths.tolist(), batch.advantages[:, 1].tolist(), strict=True)
  )
  expected = [(0, 0.0)] * 3 + [(3, 1 - mean)] * 3 + [(4, -mean)]
  expected += [(5, 0.5 - mean)] * 2
  assert [n for n, _ in found] == [n for n, _ in expected]
  assert [a for _, a in found] == pytest.approx([a for _, a in expected])
  # The shape does not depend on how many rows there were.
  (fewer,), _ = pack(
    [of_rows([1.0, 0.0, 0.5], [1, 1, 1])], **{'rollout.max_rows': 3}
  )
  assert fewer.tokens.shape == batch.tokens.shape


def test_rows_that_broke_are_told():
  episodes, scores = zip(*of_rows([1.0, 0.0, 0.5], [3, 1, 2]), strict=True)
  assert statistics.summarise(episodes, scores)['breaks'] == 1.0


def test_a_format_that_breaks_rows_is_refused_before_anything_compiles(
  tmp_path, monkeypatch
):
  config = quickstart.get_config('smoke')
  monkeypatch.setattr(
    formats.Own, 'breaks', frozenset({formats.Joint.ANSWERED})
  )
  with pytest.raises(errors.UserError, match='rollout.max_rows above 1'):
    build.Setup(config, tmp_path)
  config.rollout.update({'mode': 'host', 'max_rows': 2})
  build.Setup(config, tmp_path)


def test_a_group_has_signal_where_attempts_are_compared():
  split = [(episode_of(0, REAL), scored(1.0)),
           (episode_of(0, REHEARSED), scored(0.0)),
           (episode_of(0, REHEARSED), scored(0.0))]  # fmt: skip
  assert not experience._has_signal(split, by_source=True)
  assert experience._has_signal(split, by_source=False)
  more = [*split, (episode_of(0, REAL), scored(0.5))]
  assert experience._has_signal(more, by_source=True)


def test_real_calls_and_rewards_are_told_by_source():
  found = statistics.by_source(
    *map(list, zip(*GROUPS[0], *GROUPS[1], strict=True))
  )
  assert found == {
    'real_calls': 3,
    'source/real/scored': 3,
    'source/real/reward': 0.5,
    'source/rehearsed/scored': 3,
    'source/rehearsed/reward': pytest.approx(1.4 / 3),
    'source/mixed/scored': 1,
    'source/mixed/reward': 0.9,
  }


def test_what_a_simulator_did_wrong_is_told_by_kind():
  report = {'requests': 5, 'calls': 7, 'errors': {'timeout': 3, 'schema': 1},
            'lost': {'timeout': 1}}  # fmt: skip
  asked = python_types.SimpleNamespace(take_report=lambda: report)
  counts, spend = experience._take_report(asked)
  assert counts == {'simulator/requests': 5, 'simulator/lost': 1}
  assert {k: n for k, n in spend.items() if n} == {
    'simulator/calls': 7,
    'simulator/errors/timeout': 3,
    'simulator/errors/schema': 1,
    'simulator/lost/timeout': 1,
  }


HOST = {'rollout.mode': 'host'}
SERVED = {
  **HOST,
  'rollout.world': 'simulator',
  'rollout.simulator_endpoint.base_url': 'http://127.0.0.1:9/v1',
  'rollout.simulator_endpoint.model': 'm',
}


@pytest.mark.parametrize(
  'changes, message',
  [
    ({**HOST, 'rollout.real_fraction': 1.5}, r'must be in \[0, 1\]'),
    ({**HOST, 'rollout.real_steps_fraction': -0.1}, r'must be in \[0, 1\]'),
    ({**HOST, 'rollout.real_fraction': 0.3}, '2.4 episodes.*multiple of 1/8'),
    ({'rollout.real_fraction': 0.5}, 'set rollout.mode=host'),
    ({'rollout.real_steps_fraction': 0.5}, 'set rollout.mode=host'),
    ({**HOST, 'rollout.world': 'null', 'rollout.real_fraction': 0.5}, 'null'),
    ({'rollout.max_rows': 2}, 'set rollout.mode=host, or rollout.max_rows=1'),
    ({**HOST, 'rollout.max_rows': 0}, 'max_rows=0; use at least 1'),
    (
      {
        **HOST,
        'rollout.view': 'split',
        'rl.share_roles': False,
        'rollout.max_rows': 2,
      },
      'rl.share_roles=True',
    ),
    ({**SERVED, 'rollout.simulator_workdir': 'runs/x'}, 'leave one of them'),
    ({**SERVED, 'rollout.simulator_endpoint.model': ''}, 'name the model'),
    ({'rollout.simulator_attempts.backoff_s': 0.0}, 'must be positive'),
  ],
  ids=lambda value: str(value)[-40:],
)
def test_impossible_mixtures_and_simulators_are_refused(changes, message):
  config = base.get_config()
  config.update_from_flattened_dict(changes)
  with pytest.raises(errors.UserError, match=message):
    refusals.validate(config)


@pytest.mark.parametrize(
  'changes, idle, not_idle',
  [
    ({}, ['rl.baseline_by_source', 'simulator_endpoint.*'], []),
    ({'rollout.real_fraction': 0.5}, [], ['rl.baseline_by_source']),
    ({'rollout.real_fraction': 0.125}, ['one real episode'], []),
    (
      {'rollout.real_fraction': 0.125, 'rl.baseline_by_source': False},
      [],
      ['one real episode'],
    ),
    (
      {'rollout.real_fraction': 1.0, 'rollout.real_steps_fraction': 0.5},
      ['rollout.real_steps_fraction'],
      [],
    ),
    ({'rollout.real_steps_fraction': 0.5}, [], ['real_steps_fraction:']),
    (SERVED, ['prompt.rehearse.tools'], ['prompt.rehearse.*', 'attempts.*:']),
    (
      {'rollout.world': 'simulator'},
      ['prompt.rehearse.*', 'no endpoint is asked'],
      ['simulator_workdir'],
    ),
  ],
  ids=lambda value: str(value)[-40:],
)
def test_idle_options_of_mixtures_and_simulators(changes, idle, not_idle):
  config = base.get_config()
  config.update_from_flattened_dict(changes)
  lines = '\n'.join(no_ops.find(config))
  assert all(name in lines for name in idle)
  assert not any(name in lines for name in not_idle)


TINY = {
  'data.num_train': 24, 'data.num_dev': 6, 'data.num_test': 6,
  'data.num_demonstrations': 60, 'data.records': True,
  'model.d_model': 16, 'model.head_dim': 4, 'model.d_ff': 16,
  'model.num_layers': 1, 'rollout.prompt_tokens': 48,
  'rl.tasks_per_step': 2, 'rl.group_size': 4,
  'rl.microbatches': 1, 'rl.anchor_batch_size': 0, 'rl.anchor_weight': 0.0,
}  # fmt: skip


@pytest.mark.parametrize('world', ['rehearsal', 'simulator'])
def test_a_step_of_a_real_run(tmp_path, world):
  """Through config, desk and loop; an untrained policy rarely calls."""
  answer = '<execution_result>{"status": "shipped"}</execution_result>'
  with stub_endpoint.StubEndpoint(lambda prompt: answer) as stub:
    config = quickstart.get_config('smoke')
    served = SERVED | {'rollout.simulator_endpoint.base_url': stub.url}
    config.update_from_flattened_dict(
      TINY | HOST | {'rollout.real_fraction': 0.5}
    )
    if world == 'simulator':
      config.update_from_flattened_dict(served)
    setup = build.Setup(config, tmp_path)
    params = transformer.init_params(setup.model, jax.random.key(0))
    found = experience.gather(setup, params, params, 0, 0)
    parts, metrics = experience.pack(setup, found, 0)
    assert len(parts) == 1 and 'real_calls' in metrics
    other = 'rehearsed' if world == 'rehearsal' else 'simulated'
    assert metrics['source/real/scored'] == 4
    assert metrics[f'source/{other}/scored'] == 4
    if world == 'simulator':
      assert metrics['simulator/lost'] == 0
      assert metrics['simulator/requests'] == len(stub.bodies)
      assert found.spend['simulator/calls'] == len(stub.bodies)
      setup.simulator.close()
