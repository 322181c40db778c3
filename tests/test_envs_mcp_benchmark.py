"""A user's benchmark on an MCP server: its file, its attempts, its verdicts."""

import json
import sys

import pytest
import test_envs_mcp

from envace_jax import errors, types
from envace_jax.envs import benchmark
from envace_jax.envs.mcp import benchmark as mcp_benchmark
from envace_jax.envs.mcp import hooks as mcp_hooks
from envace_jax.envs.mcp import tasks as mcp_tasks
from envace_jax.rewards import checklist

CHECK = {'id': 'a', 'question': '?', 'check': {'kind': 'replied'}}
HERE = 'test_envs_mcp_benchmark'


def prepare(stage):
  (stage.state / 'given').write_text(stage.arguments['text'])


def kept(stage):
  """A share: what of the text is still there, and the policy must call."""
  assert stage.call('echo', {'text': 'x'}).error is None
  given = (stage.state / 'given').read_text() == stage.arguments['text']
  return (given + bool(stage.steps)) / 2


def broken(stage):
  del stage
  return 'yes'


def write(path, *tasks):
  path.write_text('\n'.join(json.dumps(task) for task in tasks))
  return path


def task(**changes):
  return {'id': 't1', 'instruction': 'do', 'checklist': [CHECK], **changes}


def opened(path, *tasks, start='well', limits=test_envs_mcp.LIMITS):
  return mcp_benchmark.McpBenchmark(
    write(path / 'mine.jsonl', *tasks),
    test_envs_mcp.command(start),
    judge=checklist.score_evaluation,
    validate=checklist.validate_task,
    limits=limits,
  )


def say(text='', *names):
  calls = [types.ToolCall(name=n, arguments={'text': 'x'}) for n in names]
  return benchmark.Reply(text=text, calls=calls)


@pytest.fixture
def attempt(tmp_path):
  """Opens the only task of a file; closed at the end."""
  made = []

  def attempt(**changes):
    made.append(opened(tmp_path, task(**changes)).open('t1'))
    return made[-1]

  yield attempt
  for one in made:
    one.close()
  assert not test_envs_mcp.processes()


def test_a_checklist_over_turns_and_a_hook_decide(attempt):
  environment = {
    'reset': f'{HERE}:prepare',
    'setup': [{'name': 'echo', 'arguments': {}}],
    'check': f'{HERE}:kept',
    'arguments': {'text': 'hello'},
  }
  criteria = [
    {'id': 'a', 'question': '?', 'check': {'kind': 'called', 'name': 'echo'}},
    {
      'id': 'b',
      'question': '?',
      'turn': 1,
      'check': {'kind': 'replied', 'contains': ['two']},
    },
    {
      'id': 'c',
      'question': '?',
      'turn': 1,
      'check': {'kind': 'called', 'name': 'count'},
    },
  ]
  given = {
    'environment': environment,
    'checklist': criteria,
    'user_turns': ['and now?'],
  }
  good = attempt(**given)
  assert good.instruction == 'do' and len(good.tools) > 5
  first, second = good.respond(say('', 'echo', 'fail'))
  assert (first.role, first.error, second.error) == ('tool', None, 'tool_error')
  (user,) = good.respond(say('one'))
  assert (user.role, user.text) == ('user', 'and now?')
  good.respond(say('', 'count'))
  assert good.respond(say('two')) == ()
  assert good.score() == benchmark.Outcome(
    reward=1.0,
    success=True,
    parts={
      'checklist': 1.0,
      'verdicts': {'a': 'pass', 'b': 'pass', 'c': 'pass'},
      'check': 1.0,
    },
  )
  bad = attempt(**given)
  bad.respond(say('one'))
  outcome = bad.score()  # one turn of two, and nothing called
  assert (outcome.reward, outcome.success) == (0.0, False)
  assert outcome.reason == 'a: fail' and outcome.parts['check'] == 0.5


def test_commands_prepare_and_check_a_state_and_its_hash_is_seen(attempt):
  python = [sys.executable, '-S', '-c']
  environment = {
    'reset': [*python, 'open("given", "w").write("1")'],
    'check': [
      *python,
      'import json, os, sys; told = json.load(sys.stdin);'
      'os.chdir(os.environ["ENVACE_STATE"]);'
      'sys.exit(told["reply"] != "yes" or not os.path.exists("given"))',
    ],
  }
  first = attempt(environment=environment)
  digest = first.environment.state_hash()
  state = {'kind': 'state', 'state_hash': digest}
  criterion = {'id': 's', 'question': '?', 'check': state}
  for text, changed, success, reason in (
    ('yes', False, True, ''),
    ('no', False, False, 'check'),
    ('yes', True, False, 's: fail'),
  ):
    one = attempt(environment=environment, evaluation=[criterion])
    if changed:
      (one.environment.state / 'more').touch()
    one.respond(say(text))
    outcome = one.score()
    assert (outcome.success, outcome.reason) == (success, reason)


def test_attempts_share_nothing(tmp_path):
  bench = opened(tmp_path, task(), task(id='t2', family='b'))
  assert bench.name == 'mine' and len(bench.version) == 12
  assert bench.categories() == ('tasks', 'b')
  assert bench.task_ids('b') == ['t2']
  one, two = bench.open('t1'), bench.open('t1')
  try:
    assert one.environment.state != two.environment.state
    for expected in (1, 2):
      (said,) = one.respond(say('', 'count'))
      assert said.text == json.dumps({'count': expected})
    assert two.respond(say('', 'count'))[0].text == '{"count": 1}'
  finally:
    one.close()
    two.close()


def test_the_oracle_says_the_plan(tmp_path):
  plan = [{'name': 'echo', 'arguments': {}}]
  bench = opened(tmp_path, task(plan=plan, plan_reply='done'), task(id='t2'))
  first, last = bench.oracle('t1')
  assert first.calls == (types.ToolCall(name='echo', arguments={}),)
  assert (last.text, last.calls) == ('done', ())
  assert bench.oracle('t2') is None


def test_what_breaks_beside_the_policy_is_an_attempt_that_failed(
  attempt, tmp_path
):
  slow = [sys.executable, '-c', 'import time; time.sleep(60)']
  exits = [sys.executable, '-S', '-c', 'import sys; sys.exit("lost it")']
  for environment, words in (
    ({'reset': exits}, 'exited with 1: lost it'),
    ({'reset': ['no-such-program']}, 'cannot be run'),
    ({'reset': slow, 'hook_s': 0.2}, 'took over 0.2 s'),
    ({'reset': f'{HERE}:prepare'}, "KeyError.'text'"),
    ({'setup': [{'name': 'fail', 'arguments': {}}]}, 'setup call fail'),
  ):
    with pytest.raises(benchmark.AttemptFailed, match=words):
      attempt(environment=environment)
  with pytest.raises(benchmark.AttemptFailed, match='cannot_start'):
    opened(tmp_path, task(), start='exit').open('t1')
  with pytest.raises(benchmark.AttemptFailed, match="returned 'yes'"):
    attempt(environment={'check': f'{HERE}:broken'}).score()
  dying = attempt()
  for _ in range(test_envs_mcp.LIMITS.restarts):
    assert dying.respond(say('', 'die'))[0].error == 'died'
  with pytest.raises(benchmark.AttemptFailed, match='died'):
    dying.respond(say('', 'die'))


def test_what_nobody_could_decide_is_no_success(attempt):
  one = attempt(checklist=[{'id': 'j', 'question': 'nice?', 'check': {}}])
  one.respond(say('hello'))
  outcome = one.score()
  assert (outcome.success, outcome.reason) == (False, 'j: abstain')


@pytest.mark.parametrize(
  'line, words',
  [
    ('{', 'line 2: Expecting'),
    ('{"id": "x", "id": "y"}', 'line 2: an object repeats a key'),
    ('[]', 'line 2: an object with kind'),
    (b'\xff{}', "line 2: 'utf-8' codec"),
    (task(), "line 2, task 't1': id: line 1 has it too"),
    ({'id': 'x', 'instruction': ''}, "line 2, task 'x': instruction"),
    (task(id='x', checklist=[]), 'nothing says what success is'),
    (task(id='x', family='../x'), "family: '../x'"),
    (task(id='x', cheklist=[]), 'cheklist'),
    (
      task(id='x', environment={'rest': []}),
      "task 'x': environment.rest: unknown",
    ),
    (task(id='x', environment={'reset': 'rm -r'}), 'environment.reset'),
    (task(id='x', environment={'reset': []}), 'environment.reset: .. is no'),
    (task(id='x', environment={'check': 'no.such:f'}), 'cannot be imported'),
    (task(id='x', environment={'check': 'json:no'}), 'cannot be imported'),
    (task(id='x', environment={'check': 'json:__name__'}), 'is no function'),
    (task(id='x', environment={'setup': [{}]}), r'environment.setup\[0\]'),
    (task(id='x', environment={'hook_s': True}), 'environment.hook_s'),
    (task(id='x', environment={'arguments': 1}), 'environment.arguments'),
  ],
)
def test_a_task_file_is_refused_in_a_sentence(tmp_path, line, words):
  path = write(tmp_path / 'mine.jsonl', task())
  if not isinstance(line, bytes):
    line = (line if isinstance(line, str) else json.dumps(line)).encode()
  path.write_bytes(path.read_bytes() + b'\n' + line)
  with pytest.raises(errors.UserError, match=words) as caught:
    mcp_tasks.read(path)
  assert str(path) in str(caught.value)


def test_files_without_tasks_and_bad_checks_are_refused(tmp_path):
  with pytest.raises(errors.UserError, match='cannot read'):
    mcp_tasks.read(tmp_path / 'none')
  with pytest.raises(errors.UserError, match='has no task'):
    mcp_tasks.read(write(tmp_path / 'empty'))
  bad = [{'id': 'a', 'question': '?', 'check': {'kind': 'guessed'}}]
  with pytest.raises(errors.UserError, match='task t1: unknown check kind'):
    opened(tmp_path, task(checklist=bad))


def test_a_hook_that_leaves_children_leaves_none(tmp_path):
  program = (
    'import subprocess, sys; p = subprocess.Popen(["sleep", "60"]);'
    'open("pid", "w").write(str(p.pid))'
  )
  stage = mcp_hooks.Stage(
    state=tmp_path, arguments={}, limit_s=0.5, call=lambda *_: None
  )
  with pytest.raises(mcp_hooks.HookFailed, match='took over'):
    mcp_hooks.reset([sys.executable, '-S', '-c', program], stage)
  assert test_envs_mcp.gone(int((tmp_path / 'pid').read_text()))
