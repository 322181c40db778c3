"""BFCL's package evaluates text; nothing a policy writes is ever evaluated."""

import pytest

pytest.importorskip('bfcl_eval', reason='bfcl-eval is an optional package')

from envace_jax import types
from envace_jax.envs import benchmark, recording
from envace_jax.envs.bfcl import backends as bfcl_backends
from envace_jax.envs.bfcl import benchmark as bfcl
from envace_jax.envs.bfcl import calls as bfcl_calls

TASK = 'multi_turn_base_0'


def _deep(levels):
  value = 'x'
  for _ in range(levels):
    value = [value]
  return value


class _Lying(str):
  """Text whose repr is a program."""

  def __repr__(self):
    return "open('executed', 'w').close()"


PROGRAM = "open('executed', 'w').close()"
NAMES = [
  "open('executed', 'w').close",
  'open',
  'eval',
  'exec',
  '__import__',
  '__class__',
  'pwd.__self__.__class__',
  '_load_scenario',
  'pwd() or ls',
  'globals',
  'ｐｗｄ',
  'pwd\n',
  'pwd#',
  '',
  'lambda',
  'GorillaFileSystem.pwd',
]
VALUES = [
  float('nan'),
  float('inf'),
  -float('inf'),
  1 << 63,
  -(1 << 63) - 1,
  10**5000,
  b'bytes',
  {1, 2},
  1j,
  ...,
  _deep(bfcl_calls.MAX_DEPTH + 2),
  _deep(5000),
  _Lying('x'),
  {1: 'a key that is no string'},
  print,
]


@pytest.fixture
def attempt(monkeypatch, tmp_path):
  monkeypatch.chdir(tmp_path)  # a program that ran would leave a file
  attempt = bfcl.Bfcl().open(TASK)
  yield attempt
  attempt.close()
  assert not list(tmp_path.iterdir()), 'what a policy wrote was executed'


def _say(attempt, *calls):
  return attempt.respond(benchmark.Reply(text='', calls=calls))


@pytest.mark.parametrize('name', [*NAMES, None, 3, ['pwd']])
def test_no_other_name_reaches_the_package(attempt, name):
  (message,) = _say(attempt, types.ToolCall(name=name, arguments={}))
  assert message.error == 'raised'
  assert 'is not defined' in message.text
  assert attempt.record()[0] == [[{'refused': '{}'}]]
  assert attempt.score().reason == 'multi_turn:force_terminated'


@pytest.mark.parametrize('value', VALUES, ids=lambda v: type(v).__name__)
def test_no_other_value_reaches_the_package(attempt, value):
  call = types.ToolCall(name='echo', arguments={'content': value})
  message, other = _say(attempt, call, types.ToolCall(name='pwd', arguments={}))
  assert message.error == 'raised', 'refused'
  assert other.error is None, 'the next call is executed'


@pytest.mark.parametrize(
  'key', ['a b', 'a=1,b', '**x', 'ａ', '', 'for', 'x)', 3, None]
)
def test_no_other_argument_reaches_the_package(attempt, key):
  (message,) = _say(attempt, types.ToolCall(name='pwd', arguments={key: 1}))
  assert message.error == 'raised'
  assert attempt.record()[0] == [[{'refused': '{}'}]]


@pytest.mark.parametrize(
  'text',
  [
    PROGRAM,
    f"') or {PROGRAM} or ('",
    f"\\') or {PROGRAM} or (\\'",
    f'{{{PROGRAM}}}',
    "'''",
    '\n\r\x00\u2028\\',
    '\ud800 lone',
    'pwd',
  ],
)
def test_text_stays_text(attempt, text):
  (message,) = _say(
    attempt, types.ToolCall(name='echo', arguments={'content': text})
  )
  assert message.error is None
  message.text.encode()  # whatever came back can be written down
  call = types.ToolCall(name='echo', arguments={'content': text})
  assert bfcl_calls.read(bfcl_calls.render(call), {'echo': ['content']}) == call


@pytest.mark.parametrize(
  'text',
  [
    f'echo({PROGRAM})',
    'echo(content=__import__("os").getcwd())',
    'echo(content=f"{1}")',
    'echo(content=1 + 1)',
    'echo(content="a" * 9)',
    'echo(content=[x for x in ()])',
    'echo(content=lambda: 1)',
    'echo(*["a"])',
    'echo(**{"content": "a"})',
    'echo("a", content="b")',
    'echo("a", "b", "c")',
    'echo("a")("b")',
    'echo("a"); pwd()',
    'echo("a") or pwd()',
    'echo(content=b"a")',
    'echo(content=1e999)',
    'echo(content=9' + '9' * 5000 + ')',
    'echo(content=' + '[' * 500 + ']' * 500 + ')',
    'echo(content=' + '-' * 50_000 + '1)',
    'echo(content="' + 'a' * 200_000 + '")',
    'ｅｃｈｏ(content="a")',
    'x.echo(content="a")',
    'echo.__call__(content="a")',
    'echo',
    'echo(',
    '',
    '\x00',
    'unknown()',
  ],
)
def test_the_parser_reads_literals_only(attempt, text):
  del attempt  # for the directory that must stay empty
  with pytest.raises(bfcl_calls.Malformed):
    bfcl_calls.read(text, {'echo': ['content', 'file_name']})


def test_a_call_that_would_not_come_back_is_refused():
  source = bfcl.Bfcl()
  task_id = next(
    task_id
    for task_id in source.task_ids('multi_turn_base')
    if 'MathAPI' in source._task(task_id)[1]['involved_classes']
  )
  attempt = source.open(task_id)
  for name, key in bfcl_backends.COSTLY.items():
    for value in (10**12, -(10**12), 1e12, '9' * 12):
      other = {'power': 'base', 'logarithm': 'value'}.get(name, 'number')
      call = types.ToolCall(name=name, arguments={other: 7, key: value})
      (message,) = _say(attempt, call)
      assert f'beyond {bfcl_backends.MAX_COST}' in message.text
      if len(attempt.record()[0]) == 20:
        break
  attempt.close()


def test_a_directory_inside_itself_ends_the_attempt(attempt):
  plan = [
    types.ToolCall(name='mkdir', arguments={'dir_name': 'a'}),
    types.ToolCall(name='cp', arguments={'source': 'a', 'destination': 'a'}),
  ]
  assert _say(attempt, plan[0])
  assert not _say(attempt, plan[1])
  assert attempt.score().reason == 'overgrown'


def test_what_cannot_be_read_ends_the_turn_and_is_counted(attempt):
  bad = types.ParseError(kind='bad_json', detail='')
  good = types.ToolCall(name='pwd', arguments={})
  recorder = recording.Recorder(TASK, attempt)
  reply = benchmark.Reply(text='', calls=(good, bad))
  (message,) = heard = attempt.respond(reply)
  assert message.role == 'user'
  recorder.hear(reply, heard)
  kept = recorder.demonstration('policy')
  assert not kept.steps, 'what a user says is no answer to a call'
  assert kept.user_turns == (message.text,) and kept.turn_replies == ('',)
  assert attempt.score().parts['malformed'] == 1


def test_a_failed_backend_is_errored_and_not_wrong(monkeypatch):
  source = bfcl.Bfcl()

  def broken(*args, **kwargs):
    raise OSError('no disk')

  attempt = source.open(TASK)
  for reply in source.oracle(TASK):
    attempt.respond(reply)
  checker = source._package.multi_turn_checker
  monkeypatch.setattr(checker, 'state_checker', broken)
  with pytest.raises(benchmark.AttemptFailed, match='no disk'):
    attempt.score()
  attempt.close()
  utils = source._package.multi_turn_utils
  monkeypatch.setattr(utils, 'execute_multi_turn_func_call', broken)
  with pytest.raises(benchmark.AttemptFailed, match='no initial state'):
    source.open(TASK)


def test_a_checker_that_stumbles_over_a_shape_counts_it_wrong():
  source = bfcl.Bfcl()
  for category in ('live_simple', 'simple_python', 'parallel_multiple'):
    for task_id in source.task_ids(category)[::20]:
      for value in ({'a': {}}, [{}], [[1], {}], None, '', 7, [None, 'x']):
        calls = [
          types.ToolCall(
            name=call.name, arguments=dict.fromkeys(call.arguments, value)
          )
          for call in source.oracle(task_id)[0].calls
        ]
        attempt = source.open(task_id)
        _say(attempt, *calls)
        outcome = attempt.score()
        assert outcome.success or outcome.reason


def test_the_limit_of_steps_holds_for_refused_calls_too(attempt):
  call = types.ToolCall(name='nothing', arguments={})
  said = [_say(attempt, call) for _ in range(100)]
  assert sum(map(bool, said)) == 20
  assert attempt.score().reason == 'multi_turn:force_terminated'
