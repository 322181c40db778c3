"""Generated file-system tasks: official verdicts, and a real environment."""

import collections
import dataclasses

import pytest

pytest.importorskip('bfcl_eval', reason='bfcl-eval is an optional package')

from envace_jax import types
from envace_jax.envs.bfcl import file_tasks as bfcl_file_tasks
from envace_jax.envs.bfcl import files as bfcl_files
from envace_jax.envs.bfcl import multi as bfcl_multi
from envace_jax.envs.bfcl import package as bfcl_package
from envace_jax.rewards import verifiers
from envace_jax.tasks import records

PASS, FAIL, ABSTAIN = types.Verdict
COUNTS = {'train': 306, 'dev': 30, 'test': 30}


@pytest.fixture(scope='module')
def tasks():
  return bfcl_file_tasks.make_tasks(COUNTS, seed=3)


@pytest.fixture(scope='module')
def official():
  """Whether the package's checker accepts some calls, under a fresh name."""
  package = bfcl_package.load()
  cached = vars(package.multi_turn_utils)
  before = set(cached)

  def check(task, calls):
    entry, truth = bfcl_file_tasks.official_form(task)
    _, ((*said,),) = bfcl_file_tasks.official_form(
      dataclasses.replace(task, plan=calls)
    )
    verdict = package.multi_turn_checker.multi_turn_checker(
      [[said]], truth, entry, '', 'generated'
    )
    for name in set(cached) - before:
      del cached[name]
    return verdict['valid']

  return check


def _call(name, **arguments):
  return types.ToolCall(name=name, arguments=arguments)


def _transcript(task, calls, reply):
  environment = bfcl_files.Files()
  environment.reset(task)
  steps = [
    types.Step(
      action=call,
      action_text='',
      observation_text=environment.call(call).text,
    )
    for call in calls
  ]
  return verifiers.Transcript(
    steps=steps,
    reply=reply,
    tools=task.tools,
    state_hash=environment.state_hash(),
  )


def _failed(criteria, transcript):
  return [
    criterion.id
    for criterion in criteria
    if verifiers.decide(criterion.check, transcript) is not PASS
  ]


def test_the_official_checker_accepts_plans_and_nothing_less(tasks, official):
  checked = 0
  for task in tasks['train']:
    assert official(task, task.plan), task.id
    checked += 1
    assert not official(task, task.plan[:-1]), task.id
    assert not official(task, [_call('ls')]), task.id
  assert checked >= 300


def test_checklist_and_evaluation_accept_the_plan(tasks):
  for task in tasks['train'][:60] + tasks['test']:
    for criterion in (*task.checklist, *task.evaluation):
      verifiers.validate_check(criterion.check)
    seen = _transcript(task, task.plan, task.plan_reply)
    assert not _failed(task.checklist, seen), task.id
    assert not _failed(task.evaluation, seen), task.id


def test_checklist_and_evaluation_reject_corrupted_attempts(tasks):
  for task in tasks['train'][:60]:
    writes = any(call.name in bfcl_files.WRITES for call in task.plan)
    short = _transcript(task, task.plan[:-1], task.plan_reply)
    assert _failed(task.checklist, short)
    assert _failed(task.evaluation, short) == (['state'] if writes else [])
    more = [*task.plan, _call('touch', file_name='stray.txt')]
    more = _transcript(task, more, task.plan_reply)
    assert _failed(task.checklist, more) == ['restraint']
    assert _failed(task.evaluation, more) == ['state']
    silent = _transcript(task, task.plan, '')
    assert 'reply' in _failed(task.checklist, silent)
    assert 'reply' in _failed(task.evaluation, silent)


def test_families_take_turns_and_splits_share_nothing(tasks):
  families = collections.Counter(task.family for task in tasks['train'])
  assert families == dict.fromkeys(bfcl_file_tasks.FAMILIES, 51)
  seen = collections.defaultdict(set)
  for split, found in tasks.items():
    assert len({task.id for task in found}) == COUNTS[split]
    for task in found:
      config = task.environment['initial_config'][bfcl_files.BACKEND]
      seen[split] |= set(config['root'])
  assert not seen['train'] & (seen['dev'] | seen['test'])
  assert not seen['dev'] & seen['test']


def test_no_official_tree_is_touched():
  package = bfcl_package.load()
  official = set()
  for category in bfcl_multi.CATEGORIES:
    for entry in package.entries(category):
      files = entry['initial_config'].get(bfcl_files.BACKEND, {})
      official |= set(files.get('root', {}))
  assert len(official) > 20
  ours = {root for roots in bfcl_file_tasks.ROOTS.values() for root in roots}
  assert not official & ours


def test_tasks_are_a_function_of_split_seed_and_index(tasks):
  again = bfcl_file_tasks.make_tasks({'dev': 12}, seed=3)['dev']
  assert again == tasks['dev'][:12]
  other = bfcl_file_tasks.make_tasks({'dev': 12}, seed=4)['dev']
  for one, another in zip(again, other, strict=True):
    assert one.environment != another.environment
  with pytest.raises(ValueError, match="splits \\['held_out'\\] are unknown"):
    bfcl_file_tasks.make_tasks({'held_out': 1}, seed=0)


def test_tasks_survive_the_form_in_which_they_are_stored(tasks):
  for task in tasks['train'][:6]:
    assert records.from_json(records.to_json(task)) == task


def test_a_failed_call_changes_nothing_and_says_why(tasks):
  environment = bfcl_files.Files()
  environment.reset(tasks['train'][0])
  environment.call(_call('mkdir', dir_name='a'))
  before = environment.state_hash(), environment.snapshot()
  for call, error in (
    (types.ParseError(kind='bad_json', detail=''), 'invalid_call'),
    (_call('open', file='x'), 'unknown_tool'),
    (_call('_load_scenario', scenario={}), 'unknown_tool'),
    (_call(None), 'unknown_tool'),
    (_call('touch', file_name=float('nan')), 'invalid_arguments'),
    (_call('touch', **{'a b': 1}), 'invalid_arguments'),
    (_call('touch', wrong='x'), 'raised'),
    (_call('touch', file_name=3), 'raised'),
    (_call('mkdir', dir_name='a'), 'refused'),
    (_call('cp', source='a', destination='a'), 'raised'),
  ):
    observation = environment.call(call)
    assert observation.error == error, call
    assert (environment.state_hash(), environment.snapshot()) == before, call


def test_state_is_content_and_restores_anywhere(tasks):
  task = tasks['train'][0]
  one, other = bfcl_files.Files(), bfcl_files.Files()
  one.reset(task)
  other.reset(task)
  start = one.snapshot()
  empty = one.state_hash()
  for environment, order in ((one, 'xyz'), (other, 'zyx')):
    for name in order:
      assert environment.call(_call('mkdir', dir_name=name)).error is None
  assert one.state_hash() == other.state_hash() != empty
  one.call(_call('cd', folder='x'))
  one.call(_call('touch', file_name='f'))
  assert one.state_hash() != other.state_hash()
  other.restore(one.snapshot())
  assert other.state_hash() == one.state_hash()
  assert other.call(_call('pwd')) == one.call(_call('pwd'))
  one.restore(start)
  assert one.state_hash() == empty != other.state_hash()
  one.close()
  other.close()


def test_copies_of_directories_cannot_outgrow_the_limit(tasks):
  """Each round doubles what a walk would meet."""
  environment = bfcl_files.Files()
  environment.reset(tasks['train'][0])
  environment.call(_call('mkdir', dir_name='d0'))
  errors = []
  for i in range(18):
    for call in (
      _call('cp', source=f'd{i}', destination=f'e{i}'),
      _call('mkdir', dir_name=f'd{i + 1}'),
      _call('mv', source=f'd{i}', destination=f'd{i + 1}'),
      _call('mv', source=f'e{i}', destination=f'd{i + 1}'),
    ):
      errors.append(environment.call(call).error)
  assert 'raised' in errors
  assert environment.state_hash()
