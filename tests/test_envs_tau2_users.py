"""The user of τ²-Bench behind an endpoint: what it hears, and may say."""

import http.server
import json
import threading

import pytest

pytest.importorskip(
  'tau2', reason='needs the package of τ²-Bench: see tau2_package.INSTALL'
)

from envace_jax import types  # noqa: E402
from envace_jax.endpoints import attempts  # noqa: E402
from envace_jax.envs import benchmark  # noqa: E402
from envace_jax.envs.tau2 import benchmark as tau2  # noqa: E402
from envace_jax.envs.tau2 import users as tau2_users  # noqa: E402


def calls(name, arguments):
  function = {'name': name, 'arguments': arguments}
  call = {'id': 'a', 'type': 'function', 'function': function}
  return {'content': None, 'tool_calls': [call]}


@pytest.fixture
def serve():
  """Serves messages in their order; gives the user and what it was asked."""
  servers, users = [], []

  def start(messages):
    bodies, rest = [], list(messages)

    class Handler(http.server.BaseHTTPRequestHandler):
      def log_message(self, *unused):
        pass

      def do_POST(self):
        length = int(self.headers['content-length'])
        bodies.append(json.loads(self.rfile.read(length)))
        sent = json.dumps({'choices': [{'message': rest.pop(0)}]}).encode()
        self.send_response(200)
        self.send_header('content-type', 'application/json')
        self.send_header('content-length', str(len(sent)))
        self.end_headers()
        self.wfile.write(sent)

    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    threading.Thread(
      target=server.serve_forever, args=(0.02,), daemon=True
    ).start()
    servers.append(server)
    url = f'http://127.0.0.1:{server.server_address[1]}/v1'
    user = tau2_users.EndpointUser(
      tau2_users.Endpoint(base_url=url, model='m'),
      attempts.Policy(backoff_s=0.001),
    )
    users.append(user)
    return user, bodies

  yield start
  for user in users:
    user.close()
  for server in servers:
    server.shutdown()
    server.server_close()


def opened(user, category):
  bench = tau2.Tau2(lambda category, task: user, user_name=user.name)
  return bench.open(bench.task_ids(category)[0])


def test_under_dual_control_the_user_calls_tools_unseen(serve):
  user, bodies = serve(
    [
      {'content': 'My phone is dead.'},
      calls('check_sim_status', '{}'),
      calls('enable_roaming', '{"line_id": "L1002"}'),  # the agent's tool
      {'content': 'It is active. ###STOP###'},
    ]
  )
  attempt = opened(user, 'telecom')
  assert attempt.instruction == 'My phone is dead.'
  look = types.ToolCall(name='get_details_by_id', arguments={'id': 'L1002'})
  (found,) = attempt.respond(benchmark.Reply(text='', calls=(look,)))
  assert found.error is None  # and the user does not see it
  said = benchmark.Reply(text='What does the SIM say?')
  assert attempt.respond(said) == ()
  assert attempt.termination == 'user_stop'
  told = bodies[0]['messages'][0]
  assert told['role'] == 'system' and '###OUT-OF-SCOPE###' in told['content']
  assert '<scenario>' in told['content']
  assert len(bodies[0]['tools']) == 30 and bodies[0]['temperature'] == 0
  roles = [message['role'] for message in bodies[3]['messages']]
  assert roles == [
    'system', 'user', 'assistant', 'user',
    'assistant', 'tool', 'assistant', 'tool',
  ]  # fmt: skip
  answers = [m for m in attempt.trajectory if m.role == 'tool'][1:]
  assert [m.requestor for m in answers] == ['user', 'user']
  assert [m.error for m in answers] == [False, True]
  outcome = attempt.score()
  assert outcome.parts['refused_calls'] == 1 and outcome.reward == 0


def test_users_without_tools_are_not_offered_any(serve):
  user, bodies = serve([{'content': 'Hello.'}, {'content': '###TRANSFER###'}])
  attempt = opened(user, 'retail')
  assert attempt.respond(benchmark.Reply(text='Hello.')) == ()
  assert 'tools' not in bodies[0]
  assert 'tool' not in bodies[0]['messages'][0]['content']
  assert attempt.termination == 'user_stop'


def test_a_bad_turn_is_asked_for_again(serve):
  user, bodies = serve(
    [
      {'content': ''},
      {'content': None},
      calls('check_sim_status', '{"a"'),
      {'content': 'At last.'},
    ]
  )
  assert opened(user, 'mock').instruction == 'At last.'
  assert len({body['seed'] for body in bodies}) == 4
  report = user.take_report()
  assert report['errors'] == {'empty': 2, 'bad_call': 1}
  assert report['requests'] == 1 and not report['lost']


@pytest.mark.parametrize(
  'message, kind',
  [
    ({'content': ' '}, 'empty'),
    (calls('x', '[1]'), 'bad_call'),
    (calls(None, '{}'), 'bad_call'),
    ({'content': None, 'tool_calls': 7}, 'bad_call'),
    ({'content': 7}, 'bad_body'),
    ('hello', 'bad_body'),
  ],
)
def test_a_user_that_breaks_down_is_not_the_policys_fault(serve, message, kind):
  user, bodies = serve([message] * 4)
  with pytest.raises(benchmark.AttemptFailed, match=kind):
    opened(user, 'mock')
  assert len(bodies) == 4
  assert user.take_report()['lost'] == {kind: 1}


def test_a_user_that_never_stops_calling_ends_at_the_limit():
  class Busy:
    name = 'busy'

    def respond(self, messages, tools):
      call = {'name': 'check_sim_status', 'arguments': {}}
      text = tau2_users.PLEASE + json.dumps(call)
      return tau2_users.ScriptedUser('x').respond(
        [
          {'role': 'assistant', 'content': 'x'},
          {'role': 'user', 'content': text},
        ],
        tools,
      )

  attempt = opened(Busy(), 'telecom')
  assert attempt.termination == 'max_steps'
  assert attempt.num_steps in (200, 201)
  assert attempt.respond(benchmark.Reply(text='Stop it.')) == ()
  assert attempt.score().reason == 'max_steps'
