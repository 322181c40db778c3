"""A policy behind an endpoint, asked over real HTTP by the official client."""

import http.server
import json
import threading

import pytest
import test_benchmarks

from envace_jax.benchmarks import endpoint, run
from envace_jax.endpoints import attempts, client


class _Model(http.server.BaseHTTPRequestHandler):
  """Adds once, with the faults that the server's script lists first."""

  def do_POST(self):
    body = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
    self.server.bodies.append(body)
    status = self.server.script.pop(0) if self.server.script else 200
    called = any(m['role'] == 'tool' for m in body['messages'])
    message, finish = {'role': 'assistant', 'content': 'done'}, 'stop'
    if not called:
      cut = status == 'cut'
      function = {'name': 'add', 'arguments': '{"num' if cut else '{}'}
      call = {'id': 'a', 'type': 'function', 'function': function}
      message = {'role': 'assistant', 'content': None, 'tool_calls': [call]}
      finish = 'length' if cut else 'tool_calls'
    answer = {
      'id': 'x',
      'object': 'chat.completion',
      'choices': [{'index': 0, 'message': message, 'finish_reason': finish}],
      'usage': {'prompt_tokens': 10, 'completion_tokens': 2},
    }
    content = b'[' if status == 'garbage' else json.dumps(answer).encode()
    self.send_response(status if isinstance(status, int) else 200)
    self.send_header('Content-Type', 'application/json')
    self.send_header('Content-Length', str(len(content)))
    self.end_headers()
    self.wfile.write(content)

  def log_message(self, format, *args):
    del format, args


@pytest.fixture
def model():
  server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), _Model)
  server.bodies, server.script = [], []
  thread = threading.Thread(target=server.serve_forever)
  thread.start()
  yield server
  server.shutdown()
  thread.join()
  server.server_close()


def test_an_endpoint_is_measured_and_its_faults_are_errors(model, tmp_path):
  pytest.importorskip('openai', reason='asks the endpoint')
  policy = endpoint.Endpoint(
    client.Server(
      base_url=f'http://127.0.0.1:{model.server_port}/v1',
      api_key_env='',
      concurrency=4,
      batch_deadline_s=20,
    ),
    endpoint.Sampling(model='m'),
    attempts.Policy(max_attempts=2, timeout_s=5, backoff_s=0.01),
  )
  one = lambda path: run.measure(
    test_benchmarks.Counting(),
    policy,
    {'few': ['n1']},
    tmp_path / path,
    run.Settings(),
  )[0]
  try:
    model.script = [500, 'garbage']  # mended by one retry; not mended
    assert one('a').error == 'policy: bad_body'
    model.script = [500]
    good = one('b')
    assert (good.success, good.tokens_in, good.tokens_out) == (True, 20, 4)
    assert good.calls == 1 and good.call_errors == 0
    first, again = model.bodies[-3], model.bodies[-2]
    assert first == again and first['tools'] == test_benchmarks.TOOLS
    assert model.bodies[-1]['seed'] != first['seed']
    model.script = ['cut']
    cut = one('c')
    assert (cut.error, cut.success, cut.call_errors) == ('', False, 1)
    model.script = [401]
    assert one('d').error == 'policy: refused_401'
  finally:
    policy.close()
