"""A local chat endpoint that fails on demand, the same way every time.

Which fault a call meets is a hash of the seed and of the call's body, so it
depends neither on threads nor on the order of calls. Standard library only.
"""

from collections.abc import Callable, Mapping
import enum
import hashlib
import http.server
import json
import socket
import threading
import time


class Fault(enum.Enum):
  """What a call meets instead of an answer."""

  SERVER_ERROR = 'server_error'
  RATE_LIMIT = 'rate_limit'  # 429, with Retry-After
  FORBIDDEN = 'forbidden'
  NO_SCHEMAS = 'no_schemas'  # 400, but only where a schema is asked for
  HANG = 'hang'
  DRIP = 'drip'  # a byte now and then, for ever
  DISCONNECT = 'disconnect'
  GARBAGE = 'garbage'  # bytes that are no JSON, declared as JSON
  PLAIN_TEXT = 'plain_text'  # status 200 and a web page
  OTHER_JSON = 'other_json'  # a list where an object should be
  NO_CHOICES = 'no_choices'
  NULL_CONTENT = 'null_content'
  MALFORMED = 'malformed'  # prose for a verdict
  WRONG_SCHEMA = 'wrong_schema'
  CONTRADICTION = 'contradiction'
  TRUNCATED = 'truncated'


_CONTENT = {
  Fault.NULL_CONTENT: None,
  Fault.MALFORMED: 'I would say that it passes: "passed": true',
  Fault.WRONG_SCHEMA: '{"reason": "", "verdict": "maybe", "passed": true}',
  Fault.CONTRADICTION: '{"reason": "", "verdict": "pass", "passed": false}',
  Fault.TRUNCATED: '{"reason": "", "verdict": "pass", "passed": true}',
}


class StubEndpoint:
  """Answers chat completions; use as a context manager.

  Args:
    decide: whoever is imitated: the user message, then a judge's verdict, or
      a text to be sent as it is.
    faults: share of the calls that meet each fault.
    latency_s: of every call.
    retry_after: the header of a 429.
  """

  def __init__(
    self,
    decide: Callable[[str], bool | str] = lambda prompt: True,
    *,
    faults: Mapping[Fault, float] | None = None,
    latency_s: float = 0.0,
    retry_after: str = '7',
    seed: int = 0,
  ):
    self.decide, self.faults = decide, dict(faults or {})
    self.latency_s, self.retry_after, self.seed = latency_s, retry_after, seed
    self.bodies: list[dict] = []
    self.most_in_flight = 0
    self.busy_s = 0.0  # from the arrival of calls to their answers, summed
    self._in_flight = 0
    self._lock = threading.Lock()
    self.closing = threading.Event()
    self._server = _Server(('127.0.0.1', 0), _handler_of(self))
    self._thread = threading.Thread(
      target=self._server.serve_forever, args=(0.02,), daemon=True
    )

  @property
  def url(self) -> str:
    return f'http://127.0.0.1:{self._server.server_address[1]}/v1'

  def __enter__(self) -> 'StubEndpoint':
    self._thread.start()
    return self

  def __exit__(self, *unused) -> None:
    self.closing.set()
    self._server.shutdown()
    self._server.server_close()
    self._thread.join()

  def fault_of(self, body: dict) -> Fault | None:
    text = json.dumps([self.seed, body], sort_keys=True)
    digest = hashlib.sha256(text.encode()).digest()
    draw = int.from_bytes(digest[:8], 'big') / 2**64
    for fault, share in self.faults.items():
      if draw < share:
        return fault
      draw -= share
    return None

  def enter_call(self, body: dict) -> None:
    with self._lock:
      self.bodies.append(body)
      self._in_flight += 1
      self.most_in_flight = max(self.most_in_flight, self._in_flight)

  def leave_call(self, seconds: float) -> None:
    with self._lock:
      self._in_flight -= 1
      self.busy_s += seconds


class _Server(http.server.ThreadingHTTPServer):
  daemon_threads = True
  block_on_close = False
  request_queue_size = 128

  def handle_error(self, request, client_address):
    """Clients hang up when their patience ends; that is no news."""


def _handler_of(stub: StubEndpoint):
  class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    disable_nagle_algorithm = True
    wbufsize = -1

    def log_message(self, *unused):
      pass

    def do_POST(self):
      length = int(self.headers['content-length'])
      body = json.loads(self.rfile.read(length))
      stub.enter_call(body)
      start = time.monotonic()
      try:
        if stub.latency_s:
          time.sleep(stub.latency_s)
        self._answer(body, stub.fault_of(body))
      finally:
        stub.leave_call(time.monotonic() - start)

    def _answer(self, body, fault):
      prompt = body['messages'][-1]['content']
      if fault is Fault.SERVER_ERROR:
        self._send(500, {'error': {'message': 'down'}})
      elif fault is Fault.RATE_LIMIT:
        headers = {'retry-after': stub.retry_after}
        self._send(429, {'error': {'message': 'slow down'}}, headers)
      elif fault is Fault.FORBIDDEN:
        self._send(401, {'error': {'message': 'who are you'}})
      elif fault is Fault.NO_SCHEMAS and 'response_format' in body:
        self._send(400, {'error': {'message': 'response_format: unknown'}})
      elif fault is Fault.HANG:
        stub.closing.wait(30)
        self.close_connection = True
      elif fault is Fault.DRIP:
        self.send_response(200)
        self.send_header('content-length', '100000')
        self.end_headers()
        while not stub.closing.wait(0.05):
          self.wfile.write(b' ')
          self.wfile.flush()
      elif fault is Fault.DISCONNECT:
        self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True
      elif fault is Fault.GARBAGE:
        self._send(200, b'\xff\x00{"choices": [')
      elif fault is Fault.PLAIN_TEXT:
        self._send(200, b'<html>hello</html>', kind='text/html')
      elif fault is Fault.OTHER_JSON:
        self._send(200, [1, 2])
      elif fault is Fault.NO_CHOICES:
        self._send(200, {'id': 'x', 'object': 'chat.completion', 'choices': []})
      else:
        self._send(200, completion(body, fault, stub.decide(prompt)))

    def _send(self, status, value, headers=None, kind='application/json'):
      data = value if isinstance(value, bytes) else json.dumps(value).encode()
      self.send_response(status)
      self.send_header('content-type', kind)
      self.send_header('content-length', str(len(data)))
      for name, text in (headers or {}).items():
        self.send_header(name, text)
      self.end_headers()
      self.wfile.write(data)
      self.wfile.flush()

  return Handler


def completion(body: dict, fault: Fault | None, said: bool | str) -> dict:
  text = said
  if isinstance(said, bool):
    verdict = 'pass' if said else 'fail'
    text = json.dumps({'reason': 'stub', 'verdict': verdict, 'passed': said})
  return {
    'id': 'stub',
    'object': 'chat.completion',
    'created': 0,
    'model': body['model'],
    'choices': [
      {
        'index': 0,
        'finish_reason': 'length' if fault is Fault.TRUNCATED else 'stop',
        'message': {
          'role': 'assistant',
          'content': _CONTENT.get(fault, text),
        },
      }
    ],
    'usage': {'prompt_tokens': 11, 'completion_tokens': 3, 'total_tokens': 14},
  }
