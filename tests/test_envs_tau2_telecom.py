"""Telecom tickets as tasks to train on: splits, checklists and the line."""

import collections
import math

import pytest

pytest.importorskip(
  'tau2', reason='needs the package of τ²-Bench: see tau2_package.INSTALL'
)

from envace_jax import types  # noqa: E402
from envace_jax.envs import benchmark, recording  # noqa: E402
from envace_jax.envs.tau2 import benchmark as tau2  # noqa: E402
from envace_jax.envs.tau2 import data as tau2_data  # noqa: E402
from envace_jax.envs.tau2 import oracles as tau2_oracles  # noqa: E402
from envace_jax.envs.tau2 import package as tau2_package  # noqa: E402
from envace_jax.envs.tau2 import telecom as tau2_telecom  # noqa: E402
from envace_jax.rewards import verifiers  # noqa: E402


@pytest.fixture(scope='module')
def splits():
  return {
    split: tau2_telecom.make_tasks(split) for split in tau2_telecom.SPLITS
  }


@pytest.fixture
def line():
  made = tau2_telecom.TelecomEnvironment()
  yield made
  made.close()


def played(line, task, plan):
  """The transcript of a plan that was really executed."""
  line.reset(task)
  steps = [
    types.Step(
      action=call, action_text='', observation_text=line.call(call).text
    )
    for call in plan
  ]
  return verifiers.Transcript(
    steps=steps,
    reply=task.plan_reply,
    tools=task.tools,
    state_hash=line.state_hash(),
  )


def verdicts(criteria, transcript):
  return {c.id: verifiers.decide(c.check, transcript) for c in criteria}


def test_splits_are_the_benchmarks_and_share_no_state(splits):
  sizes = {split: len(tasks) for split, tasks in splits.items()}
  assert sizes == {'train': 2139, 'base_train': 74, 'test': 40}
  states = collections.Counter()
  for split, tasks in splits.items():
    own = {tau2_telecom._initial(t.environment['ticket']) for t in tasks}
    states.update(own)
    assert split != 'train' or len(own) == len(tasks)
    families = [t.family for t in tasks]
    assert families == sorted(families)  # a curriculum, of one digit
  held_out = {
    tau2_telecom._initial(t.environment['ticket']) for t in splits['test']
  }
  others = {
    tau2_telecom._initial(t.environment['ticket']) for t in splits['train']
  }
  assert not held_out & others
  with pytest.raises(ValueError, match="split='dev'"):
    tau2_telecom.make_tasks('dev')


def test_checklists_pass_for_the_plan_and_not_for_less(splits, line):
  for task in splits['test'][::4] + splits['train'][::300]:
    for criterion in (*task.checklist, *task.evaluation):
      verifiers.validate_check(criterion.check)
    whole = played(line, task, task.plan)
    assert set(verdicts(task.checklist, whole).values()) == {types.Verdict.PASS}
    assert set(verdicts(task.evaluation, whole).values()) == {
      types.Verdict.PASS
    }
    less = played(line, task, task.plan[1:])
    assert types.Verdict.FAIL in verdicts(task.checklist, less).values()
    assert types.Verdict.FAIL in verdicts(task.evaluation, less).values()
    blank = verifiers.Transcript(steps=(), reply=None)
    seen = verdicts(task.checklist, blank)
    assert seen.pop('restraint') is types.Verdict.PASS
    assert set(seen.values()) == {types.Verdict.FAIL}


def test_restraint_sees_what_was_not_broken(splits, line):
  task = next(t for t in splits['train'] if t.family == 'faults_1')
  toggled = types.ToolCall(name='toggle_wifi', arguments={})
  seen = verdicts(task.checklist, played(line, task, [*task.plan, toggled]))
  assert seen['restraint'] is types.Verdict.FAIL
  assert not next(c for c in task.checklist if c.id == 'restraint').required


def test_evaluation_is_the_benchmarks_verdict(splits, line):
  """On plans, broken plans, and detours that end well."""
  bench = tau2.Tau2(split='full')
  for task in splits['test'][::5]:
    toggle = types.ToolCall(name='toggle_airplane_mode', arguments={})
    for plan in (
      task.plan,
      task.plan[1:],
      task.plan[:1],
      [toggle, *task.plan, toggle],
      [*task.plan, toggle],
    ):
      seen = verdicts(task.evaluation, played(line, task, plan))
      attempt = bench.open(f'telecom_solo/{task.environment["ticket"]}')
      for call in plan:
        attempt.respond(benchmark.Reply(text='', calls=(call,)))
      attempt.respond(tau2_oracles.DONE)
      success = set(seen.values()) == {types.Verdict.PASS}
      assert success == attempt.score().success, (task.id, plan)


def test_states(splits, line):
  task = splits['train'][100]
  line.reset(task)
  start, broken = line.snapshot(), line.state_hash()
  for call in task.plan:
    line.call(call)
  solved, after = line.snapshot(), line.state_hash()
  assert after != broken
  other = tau2_telecom.TelecomEnvironment()
  other.reset(task)
  assert other.state_hash() == broken  # two copies, one content
  other.restore(solved)
  assert other.state_hash() == after
  other.restore(start)
  assert other.state_hash() == broken
  line.call(types.ToolCall(name='toggle_wifi', arguments={}))
  assert line.state_hash() == after  # the assertions do not tell them apart
  assert other.state_hash() == broken
  other.call(types.ToolCall(name='toggle_data', arguments={}))
  assert other.state_hash() != broken
  other.reset(task)
  assert other.state_hash() == broken


@pytest.mark.parametrize(
  'action, error',
  [
    (types.ParseError(kind='bad_json', detail=''), 'invalid_call'),
    (types.ToolCall(name='done', arguments={}), 'unknown_tool'),
    (types.ToolCall(name='set_user_location', arguments={}), 'unknown_tool'),
    (types.ToolCall(name=None, arguments={}), 'unknown_tool'),
    (
      types.ToolCall(name='reseat_sim_card', arguments={'a': math.nan}),
      'invalid_arguments',
    ),
    (types.ToolCall(name='reseat_sim_card', arguments=7), 'invalid_arguments'),
    (
      types.ToolCall(name='reseat_sim_card', arguments={'a': 1}),
      'tool_error',
    ),
    (
      types.ToolCall(
        name='grant_app_permission',
        arguments={'app_name': {}, 'permission': '\ud800'},
      ),
      'tool_error',
    ),
  ],
)
def test_what_is_refused_changes_nothing(splits, line, action, error):
  line.reset(splits['test'][0])
  before = line.state_hash()
  observation = line.call(action)
  assert observation.error == error and '"error"' in observation.text
  assert line.state_hash() == before


def test_a_tool_that_fails_halfway_changes_nothing(splits, line):
  """None of the benchmark's does; the promise is the seam's."""
  line.reset(splits['test'][0])
  before, world = line.state_hash(), line._environment

  def fail(call):
    world.user_tools.toggle_data()
    return tau2_package.load().message.ToolMessage(
      id='', role='tool', content='Error: late', error=True
    )

  world.get_response = fail
  refused = line.call(types.ToolCall(name='toggle_data', arguments={}))
  assert refused.error == 'tool_error' and 'late' in refused.text
  assert line.state_hash() == before


def test_transitions_are_real_and_in_order():
  bench = tau2.Tau2()
  for task_id in bench.task_ids('telecom_solo')[:4]:
    kept = recording.of_plan(bench, task_id)
    found = list(recording.transitions(kept))
    calls = [call for call, _ in tau2_oracles.gold_calls(tau2.find(task_id)[1])]
    assert [record.call for _, record, _ in found] == calls
    for i, (history, _, outcome) in enumerate(found):
      assert outcome == recording.SUCCESS
      assert [step.action for step in history] == calls[:i]
    # The same calls, executed again, give the same answers.
    assert recording.of_plan(bench, task_id) == kept


def test_tools_are_full_schemas():
  names = [t['function']['name'] for t in tau2_telecom.tools()]
  assert len(names) == 43 and 'done' not in names
  assert set(names) >= tau2_telecom.writes()
  assert tau2_telecom.is_write('toggle_data')
  assert not tau2_telecom.is_write('can_send_mms')
  assert tau2_data.tools('telecom_solo')[-1]['function']['name'] == 'done'
