"""A toy run from published samples, judged by an endpoint that fails."""

import collections
import hashlib
import json

import numpy as np
import pytest
import stub_endpoint

from envace_jax import (
  build,
  commands,
  compare,
  components,
  errors,
  experience,
  export,
  restore,
  train,
  types,
)
from envace_jax import metrics as metric_files
from envace_jax.rewards import judge as judges
from envace_jax.rewards import judge_endpoint, judge_prompt
from envace_jax.worlds import validation
from experiments import quickstart

Fault = stub_endpoint.Fault
FAULTS = {Fault.HANG: 0.10, Fault.MALFORMED: 0.07}
STEPS = 3


def decide(prompt):
  """The direct verdict: a coin that depends on everything the judge sees."""
  return hashlib.sha256(prompt.encode()).digest()[0] % 2 == 0


def for_judges(sample, number):
  """Takes away the checks, and of most samples all items but one."""
  (turns,) = sample['extra_info']['interaction_kwargs']['checklist_list']
  items = turns[0]
  for item in items:
    del item['check']
  if number % 3:
    turns[0] = [items[0] | {'weight': 1.0}]


def rewrite(source, target, edit):
  target.mkdir()
  for file in source.iterdir():
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    for number, sample in enumerate(samples):
      edit(sample, number)
    lines = ''.join(json.dumps(sample) + '\n' for sample in samples)
    (target / file.name).write_text(lines)


@pytest.fixture(scope='module')
def stub():
  with stub_endpoint.StubEndpoint(decide, faults=FAULTS, seed=5) as running:
    yield running


@pytest.fixture(scope='module')
def samples(tmp_path_factory):
  """Folders of samples: judged and executable, or judged and foreign."""
  root = tmp_path_factory.mktemp('samples')
  config = quickstart.get_config('smoke')
  config.data.num_train, config.data.num_dev, config.data.num_test = 24, 3, 3
  export.run(config, str(root / 'checked'))
  rewrite(root / 'checked', root / 'judged', for_judges)
  rewrite(
    root / 'judged',
    root / 'foreign',
    lambda sample, number: sample['extra_info'].pop('execution'),
  )
  return root


@pytest.fixture(scope='module')
def config_of(samples, stub):
  def make(kind, **changes):
    c = quickstart.get_config('smoke')
    c.update_from_flattened_dict(
      {
        'data.world': 'published',
        'data.files': str(samples / kind / '{split}.jsonl'),
        'model.d_model': 32,
        'model.head_dim': 8,
        'model.d_ff': 64,
        'model.num_layers': 2,
        'rollout.prompt_tokens': 64,  # few samples teach few words
        'rollout.view': 'split',
        'rollout.mode': 'host',
        'rollout.validation': 'program',
        'reward.judge.base_url': stub.url,
        'reward.judge.models': ('stub',),
        'reward.judge_attempts.max_attempts': 2,
        'reward.judge_attempts.timeout_s': 3.0,
        'reward.judge_attempts.backoff_s': 0.05,
        'warm_start.steps': 150,  # until most of its calls are well formed
        'warm_start.batch_size': 16,
        'warm_start.optimizer.learning_rate': 6e-3,
        'rl.steps': 2,
        'checkpoint.every': 100,
        'evaluation.every': 0,
        'evaluation.batch_tasks': 3,
        'private.attempts': 0,
      }
      | changes
    )
    return c

  return make


@pytest.fixture(scope='module')
def run(config_of, tmp_path_factory):
  """The workdir of a whole run whose judge fails now and then."""
  workdir = tmp_path_factory.mktemp('runs') / 'judged'
  assert train.run(config_of('judged'), str(workdir)) == 0
  return workdir


def test_the_run_is_judged_and_measured_for_real(run):
  lines = metric_files.read(run / 'metrics.jsonl')
  steps = [line for line in lines if 'rl/reward' in line]
  assert [line['step'] for line in steps] == [151, 152]
  for line in steps:
    assert line['rl/judge/requests'] >= 16
    assert 0 <= line['rl/judge/abstained'] < line['rl/judge/requests']
    assert line['rl/steps'] > 0.5 and line['rl/malformed'] < 0.5  # it calls
    for code in validation.CALL_CODES:
      assert line[f'rl/refused/{code}'] >= 0
    for code in validation.ANSWER_CODES:
      assert line[f'rl/rejected/{code}'] >= 0
    assert not {'rl/judge/calls', 'rl/judge/retries'} & set(line)
  timed = metric_files.read(run / 'timings.jsonl')
  assert [line['step'] for line in timed] == list(range(1, 153))
  assert all(line['warm_start/seconds'] > 0 for line in timed[:150])
  spent = timed[150:]
  assert all(line['rl/seconds'] > 0 for line in spent)
  assert sum(line['rl/judge/retries'] for line in spent) > 0
  assert sum(line['rl/judge/errors/timeout'] for line in spent) > 0
  # The first step was asked while warming up: what was judged is cached.
  assert spent[0]['rl/judge/cache_hits'] > 0
  assert spent[1]['rl/judge/tokens_in'] > 0
  summary = json.loads((run / 'summary.json').read_text())
  assert summary['real_success']['after']['greedy']['iid']['mean'] is not None
  assert summary['rehearsed_success']['after']['mean'] is not None
  assert summary['real_calls'] > 0 and summary['compiles']['after'] == 0
  assert (run / 'report.html').exists()


def test_an_endpoint_teaches_what_its_verdicts_would(run, config_of, stub):
  """Faults change no advantage but through what was not judged at all."""
  config = config_of(
    'judged',
    **{
      'reward.judge_attempts.max_attempts': 1,  # so that faults are for good
      'reward.judge_attempts.timeout_s': 8.0,
      'rl.baseline': 'shared',
      'rl.weighting': 'episode',
    },
  )
  setup = build.Setup(config, run)
  _, _, params = restore.newest(str(run), setup)
  endpoint = judge_endpoint.EndpointJudge(
    components.judge_endpoint_of(config), policy=components.judge_policy(config)
  )
  stub.bodies.clear()
  asked = learned(setup, endpoint, params)
  endpoint.close()
  faults = collections.defaultdict(set)
  for body in stub.bodies:
    faults[body['messages'][-1]['content']].add(stub.fault_of(body))
  lost = {prompt for prompt, met in faults.items() if met != {None}}
  given = learned(setup, direct_judge(lost), params)

  unscored = 0
  for (gathered, parts, stats), (_, theirs, same) in zip(
    asked, given, strict=True
  ):
    assert stats == same  # requests and abstentions among them
    for part, their in zip(parts, theirs, strict=True):
      np.testing.assert_array_equal(part.tokens, their.tokens)
      np.testing.assert_array_equal(part.advantages, their.advantages)
      np.testing.assert_array_equal(part.lengths, their.lengths)
    assert np.abs(parts[0].advantages).max() > 0
    assert_groups_shrink(gathered, parts)
    unscored += stats['unscored']
  assert unscored > 0
  # Each fault cost one verdict, and each lost verdict was counted.
  spend = collections.Counter()
  for gathered, _, _ in asked:
    spend.update(gathered.spend)
  met = collections.Counter(map(stub.fault_of, stub.bodies))
  assert spend['judge/errors/timeout'] == met[Fault.HANG] > 0
  assert spend['judge/errors/malformed'] == met[Fault.MALFORMED] > 0
  assert spend['judge/calls'] == len(stub.bodies)
  abstained = sum(stats['judge/abstained'] for _, _, stats in asked)
  requests = sum(stats['judge/requests'] for _, _, stats in asked)
  assert met[Fault.HANG] + met[Fault.MALFORMED] <= abstained < requests / 2
  # With nothing lost the advantages would have been others.
  (_, parts, _), *_ = learned(setup, direct_judge(set()), params)
  assert not np.array_equal(parts[0].advantages, asked[0][1][0].advantages)


def learned(setup, judge, params):
  """(gathered, batches, statistics) of the first steps, judged by `judge`."""
  setup.judge = judge
  steps, cursor = [], 0
  for step in range(STEPS):
    gathered = experience.gather(setup, params, params, step, cursor)
    steps.append((gathered, *experience.pack(setup, gathered, step)))
    cursor = gathered.cursor
  return steps


def direct_judge(lost):
  """Says what the endpoint decides, and nothing about the lost prompts."""

  def answer(prompts):
    bare = [p.removeprefix(judge_prompt.SYSTEM + '\n\n') for p in prompts]
    return ['' if p in lost else verdict(decide(p)) for p in bare]

  return judges.FunctionJudge([answer])


def verdict(passed):
  word = 'pass' if passed else 'fail'
  return json.dumps({'reason': '', 'verdict': word, 'passed': passed})


def assert_groups_shrink(gathered, parts):
  """reward - mean of those with a reward; those without left the batch."""
  sampled_by = list(types.AUTHOR_OF_ROLE.values())
  expected = []
  for group in gathered.groups:
    rewards = [score.reward for _, score in group if score.reward is not None]
    for episode, score in group:
      for row in episode.rows if score.reward is not None else ():
        sampled = np.isin(row.authors, sampled_by)
        advantage = score.reward - np.mean(rewards)
        expected.append((row.tokens.tobytes(), *[advantage] * sampled.sum()))
  packed = []
  for part in parts:
    for i, length in enumerate(np.asarray(part.lengths)):
      if length:
        sampled = np.isin(np.asarray(part.authors)[i, :length], sampled_by)
        advantages = np.asarray(part.advantages)[i, :length][sampled]
        tokens = np.asarray(part.tokens)[i, :length]
        packed.append((tokens.tobytes(), *advantages))
  for mine, theirs in zip(sorted(packed), sorted(expected), strict=True):
    assert mine[0] == theirs[0]
    np.testing.assert_allclose(mine[1:], theirs[1:], atol=1e-6)


def test_foreign_samples_train_and_measure_what_can_be(
  run, config_of, caplog, capsys
):
  workdir = run.parent / 'foreign'
  config = config_of(
    'foreign', **{'warm_start.workdir': str(run), 'rl.steps': 1}
  )
  with caplog.at_level('WARNING'):
    assert train.run(config, str(workdir)) == 0
  assert caplog.text.count('where it can be executed') == 1
  (line,) = metric_files.read(workdir / 'metrics.jsonl')
  assert line['eval/rehearsed_success'] is not None
  for name in ('real_success', 'gap', 'fidelity', 'optimism_index'):
    assert line[f'eval/{name}'] is None
  summary = json.loads((workdir / 'summary.json').read_text())
  nothing = {'mean': None, 'lo': None, 'hi': None, 'n': 0}
  for phase in ('warm_start', 'after'):
    for decoding in ('sampled', 'greedy'):
      for leaf in summary['real_success'][phase][decoding].values():
        assert leaf == nothing
    assert summary['gap'][phase] == summary['fidelity'][phase] == nothing
    assert summary['rehearsed_success'][phase]['n'] > 0
  assert summary['real_calls'] == 0
  page = (workdir / 'report.html').read_text()
  assert 'did not measure success in the real environment; in its' in page
  for command in (
    commands.study_private_rehearsal,
    lambda path: commands.rehearse_privately(path, 'dev', 0),
  ):
    with pytest.raises(errors.UserError, match='cannot be executed'):
      command(str(workdir))
  capsys.readouterr()
  assert commands.rehearse(str(workdir), 'test_iid', 0) == 0
  assert 'real world: this task has none' in capsys.readouterr().out
  assert compare.run(str(run.parent)) == 0
  printed = capsys.readouterr().out
  records = json.loads(printed[printed.index('\n[\n') :])
  real = [r for r in records if r['table'] == 'greedy/iid']
  assert len(real) == 1 and 'judged' in real[0]['arm']
  rehearsed = [r for r in records if r['table'] == 'rehearsed_success']
  assert len(rehearsed) == 2
