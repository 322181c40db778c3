"""Any MCP server as an environment: faults have names and leave nothing."""

import dataclasses
import json
import os
import pathlib
import sys
import threading
import time

import pytest

from envace_jax import errors, types
from envace_jax.envs.mcp import environment as mcp_environment
from envace_jax.envs.mcp import server as mcp_server
from envace_jax.envs.mcp import tools as mcp_tools

mcp = pytest.importorskip('mcp', reason="needs pip install 'mcp>=2,<3'")
if not hasattr(mcp, 'Client'):
  pytest.skip("needs pip install 'mcp>=2,<3'", allow_module_level=True)

SCRIPT = str(pathlib.Path(__file__).parent / 'hostile_mcp_server.py')
# An interpreter option that does nothing: it tells this process's servers
# from those that another test worker runs at the same time.
OURS = ('-X', f'started_by={os.getpid()}')
LIMITS = mcp_server.Limits(
  start_s=5,
  call_s=5,
  stop_s=0.3,
  backoff_s=0.01,
  line_bytes=1 << 20,
  idle_lines=500,
  text_chars=1000,
  log_lines=20,
)
SHORT = dataclasses.replace(LIMITS, call_s=0.4)
TASK = types.Task(id='t', instruction='x', tools=(), checklist=())


def command(start='well', *, keeps_state=True):
  place = ['{state}'] if keeps_state else []
  argv = [sys.executable, '-S', *OURS, SCRIPT, start, *place]
  return mcp_server.Command(argv=argv)


@pytest.fixture
def make():
  """Makes environments; afterwards no process and no thread may be left."""
  before = set(threading.enumerate())
  made = []

  def make(start='well', *, keeps_state=True, limits=LIMITS, hidden=None):
    environment = mcp_environment.McpEnvironment(
      command(start, keeps_state=keeps_state),
      limits,
      hidden or mcp_tools.Hidden(),
    )
    made.append(environment)
    return environment

  yield make
  for environment in made:
    environment.close()
    assert not environment.state.exists()
  end = time.monotonic() + 5
  while set(threading.enumerate()) - before and time.monotonic() < end:
    time.sleep(0.01)
  assert not set(threading.enumerate()) - before
  assert not processes()


def processes():
  """Our hostile servers that are alive, and our children not reaped."""
  found = []
  for path in pathlib.Path('/proc').glob('[0-9]*'):
    try:
      parent = int((path / 'stat').read_text().rpartition(')')[2].split()[1])
      words = (path / 'cmdline').read_bytes().decode().split('\0')
    except OSError:
      continue
    if OURS[1] in words or (parent == os.getpid() and words == ['']):
      found.append((path.name, words))
  return found


def gone(pid):
  """Whether a process ends soon; one that init has yet to reap has ended."""
  stat = pathlib.Path(f'/proc/{pid}/stat')
  end = time.monotonic() + 5
  while time.monotonic() < end:
    if not stat.exists() or stat.read_text().split()[2] == 'Z':
      return True
    time.sleep(0.01)
  return False


def call(environment, name, **arguments):
  return environment.call(types.ToolCall(name=name, arguments=arguments))


def started(environment):
  environment.reset(TASK)
  return environment


def alive(environment):
  return call(environment, 'echo', text='hi').text == '{"text": "hi"}'


def test_calls_are_executed_and_errors_are_observations(make):
  environment = started(make())
  names = [tool['function']['name'] for tool in environment.tools]
  assert names[:3] == ['echo', 'count', 'die']
  assert environment.tools[0]['type'] == 'function'
  assert alive(environment)
  assert call(environment, 'count').text == '{"count": 1}'
  fail = call(environment, 'fail')
  assert (fail.error, 'no such file' in fail.text) == ('tool_error', True)
  assert call(environment, 'refuse').error == 'refused'
  assert call(environment, 'nothing').error == 'unknown_tool'
  assert call(environment, 'echo', text=float('nan')).error == 'invalid_call'
  assert call(environment, 'echo', text='\ud800').error == 'invalid_call'
  error = types.ParseError(kind='bad_json', detail='x')
  assert environment.call(error).error == 'invalid_call'
  assert alive(environment) and environment.counts == {'starts': 1}


def test_content_that_is_no_text_is_named(make):
  text = json.loads(call(started(make()), 'media').text)['result']
  assert text.split('\n') == [
    'before',
    '[image: image/png, 100 bytes]',
    '[audio: audio/wav, 100 bytes]',
    '[resource link: file:///a.txt, text/plain, 17 bytes]',
    '[resource: file:///b, application/zip, 100 bytes]',
    '[resource: file:///c]',
    'inside',
  ]


def test_huge_content_is_cut_and_says_so(make):
  text = json.loads(call(started(make()), 'huge').text)['result']
  assert text == 'y' * 1000 + ('\n[cut: 1000 of 300000 characters are shown]')


@pytest.mark.parametrize(
  'name, kind',
  [
    ('die', 'died'),
    ('hang', 'timeout'),
    ('long_line', 'oversized'),
    ('flood', 'flood'),
    ('bad_result', 'bad_message'),
    ('bad_answer', 'bad_message'),
  ],
)
def test_a_fault_has_a_name_and_the_server_is_started_again(make, name, kind):
  limits = SHORT if name == 'hang' else LIMITS
  environment, other = started(make(limits=limits)), started(make())
  (environment.state / 'kept').write_text('1')
  broken = call(environment, name)
  assert broken.error == kind
  assert 'started again' in broken.text
  assert (environment.state / 'kept').exists()
  assert alive(environment) and alive(other)
  assert environment.counts == {'starts': 2, 'restarts': 1, kind: 1}
  assert other.counts == {'starts': 1}


def test_noise_and_strange_text_disturb_nothing(make):
  environment = started(make())
  noisy = call(environment, 'noise', text='hi')
  assert (noisy.text, noisy.error) == ('{"text": "hi"}', None)
  assert environment.log.counts['stdout'] == 5
  assert 'stdout: Listening...' in environment.log.lines()
  assert json.loads(call(environment, 'surrogate').text)['result'] == 'a?b'
  assert call(environment, 'deep').error is None
  assert alive(environment)


def test_restarts_are_bounded_within_an_episode(make):
  environment = started(make())
  for _ in range(LIMITS.restarts):
    assert call(environment, 'die').error == 'died'
  with pytest.raises(mcp_server.ServerFailed, match='died: exited with 3'):
    call(environment, 'die')
  with pytest.raises(mcp_server.ServerFailed, match='reset first'):
    call(environment, 'echo')
  environment.reset(TASK)
  assert alive(environment)


def test_a_state_that_died_with_its_server_fails_the_world(make):
  environment = started(make(keeps_state=False))
  call(environment, 'count')
  with pytest.raises(mcp_server.ServerFailed) as caught:
    call(environment, 'die')
  assert caught.value.kind == 'died'
  # A late answer is not one: the session goes on, and ids keep answers apart.
  environment = started(make(keeps_state=False, limits=SHORT))
  call(environment, 'count')
  assert call(environment, 'late').error == 'timeout'
  time.sleep(0.6)
  assert alive(environment)
  assert call(environment, 'count').text == '{"count": 2}'


def test_a_server_that_hears_nothing_meets_the_deadline(make):
  environment = started(make(limits=SHORT))
  assert call(environment, 'hang').error == 'timeout'
  assert alive(environment)
  lost = started(make(limits=SHORT, keeps_state=False))
  assert call(lost, 'hang').error == 'timeout'
  with pytest.raises(mcp_server.ServerFailed) as caught:
    call(lost, 'echo', text='x' * (1 << 20))  # does not fit into the pipe
  assert caught.value.kind == 'deaf'


@pytest.mark.parametrize(
  'start, detail',
  [
    ('exit', 'exited with 2; last line of stderr: no configuration'),
    ('silent', 'no list of tools in'),
    ('garbage', 'exited with 1'),
    ('endless', 'more than 50 pages'),
  ],
)
def test_a_server_that_cannot_start_says_why(make, start, detail):
  start_s = 0.3 if start == 'silent' else 5
  limits = dataclasses.replace(LIMITS, starts=2, start_s=start_s)
  environment = make(start, limits=limits)
  with pytest.raises(mcp_server.ServerFailed) as caught:
    environment.reset(TASK)
  assert caught.value.kind == 'cannot_start' and detail in str(caught.value)
  assert environment.counts == {'starts': 2, 'cannot_start': 2}


def test_a_missing_program_and_a_second_attempt(make):
  missing = mcp_environment.McpEnvironment(
    mcp_server.Command(argv=['no-such-program-here']), LIMITS
  )
  with pytest.raises(mcp_server.ServerFailed, match='no-such-program-here'):
    missing.reset(TASK)
  missing.close()
  environment = started(make('second'))
  assert alive(environment) and environment.counts['starts'] == 2


def test_a_changed_list_of_tools_is_honoured(make):
  environment = started(make())
  call(environment, 'change')
  names = [tool['function']['name'] for tool in environment.tools]
  assert 'added' in names and 'echo' not in names
  assert call(environment, 'added', text='hi').text == '{"text": "hi"}'
  assert call(environment, 'echo').error == 'unknown_tool'
  assert environment.counts['list_changes'] == 1
  before = environment.tools
  call(environment, 'bad_list')
  assert environment.tools == before and environment.counts['list_faults'] == 1
  assert call(environment, 'added', text='hi').error is None


def test_names_are_legal_and_collisions_are_numbered(make):
  environment = started(make('odd'))
  names = [tool['function']['name'] for tool in environment.tools]
  assert names == ['a_b', 'a_b_2', 'a_b_3', 'x' * 64, 'n_', '_']
  assert call(environment, 'a_b_2', text='hi').text == '{"text": "hi"}'


def test_what_is_hidden_is_not_shown_and_not_called(make):
  hidden = mcp_tools.Hidden(tools=['die'], parameters=['key'])
  environment = started(make(hidden=hidden))
  shown = [tool['function'] for tool in environment.tools]
  assert 'die' not in [function['name'] for function in shown]
  assert all('key' not in f['parameters']['properties'] for f in shown)
  assert call(environment, 'die').error == 'unknown_tool'
  assert call(environment, 'echo', key='k').error == 'invalid_arguments'
  assert environment.call_any('echo', {'key': 'k'}).error is None


def test_what_a_server_says_beside_is_kept_in_bounds(make):
  environment = started(make())
  for _ in range(30):
    call(environment, 'talk')
  end = time.monotonic() + 2
  while environment.log.counts['stderr'] < 30 and time.monotonic() < end:
    time.sleep(0.01)
  lines = environment.log.lines()
  assert environment.log.counts == {'stderr': 30, 'server': 30}
  assert len(lines) == 20 and max(map(len, lines)) < 600
  assert 'server: info: {"said": 1}' in lines


def test_children_and_stubborn_servers_end_with_the_episode(make):
  environment = started(make())
  call(environment, 'orphan')
  child = int((environment.state / 'orphan').read_text())
  os.kill(child, 0)
  environment.reset(TASK)
  assert gone(child)
  stubborn = started(make('stubborn'))
  start = time.monotonic()
  stubborn.close()
  assert time.monotonic() - start < 3


def test_state_is_the_directory(make):
  environment, copy = started(make()), started(make())
  empty = environment.state_hash()
  assert empty == copy.state_hash()
  (environment.state / 'a').mkdir()
  (environment.state / 'a' / 'f').write_text('1')
  (environment.state / 'l').symlink_to('/etc/passwd')
  full, snapshot = environment.state_hash(), environment.snapshot()
  assert full != empty
  (environment.state / 'a' / 'f').write_text('2')
  assert environment.state_hash() not in (full, empty)
  for one in (environment, copy):
    one.restore(snapshot)
    assert one.state_hash() == full and alive(one)
  environment.reset(TASK)
  assert environment.state_hash() == empty


def test_a_state_nobody_can_look_at_raises(make):
  environment = started(make(keeps_state=False))
  for method, arguments in (
    ('snapshot', ()),
    ('restore', (b'',)),
    ('state_hash', ()),
  ):
    with pytest.raises(errors.UserError, match=f'{method}: .*name .state.'):
      getattr(environment, method)(*arguments)


def test_settings_that_make_no_sense_are_refused():
  with pytest.raises(errors.UserError, match='no command'):
    mcp_server.Command(argv='server --x')
  with pytest.raises(errors.UserError, match='no address'):
    mcp_server.Address(url='localhost:1')
  with pytest.raises(errors.UserError, match='call_s=0'):
    mcp_server.Limits(call_s=0)


def test_without_the_sdk_the_install_line_is_said(monkeypatch):
  monkeypatch.setitem(sys.modules, 'mcp', None)
  environment = mcp_environment.McpEnvironment(command(), LIMITS)
  with pytest.raises(errors.UserError, match=r'envace_jax\[envs\]'):
    environment.reset(TASK)
  environment.close()
