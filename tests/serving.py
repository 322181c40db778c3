"""A small server over a tiny policy, and how tests talk to it."""

import contextlib
import dataclasses
import socket
import threading
import time

import numpy as np
import pytest
import talkative

from envace_jax import types
from envace_jax.model import transformer
from envace_jax.sampling import scripted
from envace_jax.serving import capacities, chat, engine, jobs, private, server
from envace_jax.text import template as templates
from envace_jax.text import tokenizer as tokenizers

MODEL, KEY = 'tiny', 'sesame'


class Tokenizer(tokenizers.ByteTokenizer):
  """Bytes, one of which no UTF-8 has: it spells the end of a call."""

  ENDS_CALL = 255
  # What a policy that rehearses says in one token each: no text encodes so.
  SPELT = {
    254: b'{"name": "go", "arguments": {"to": 1}}',
    253: b'{"name": "go", "arguments": {"to": 2}}',
    252: b'{"n": 1}',
    251: b'{"n": 2}',
  }

  def __init__(self):
    super().__init__()
    self._bytes_of[len(self.control) + self.ENDS_CALL] = b'{}}'
    for byte, text in self.SPELT.items():
      self._bytes_of[len(self.control) + byte] = text


TOKENIZER = Tokenizer()
TEMPLATE = templates.Template(TOKENIZER, 'names', parallel=True)
# One size of everything: a program takes seconds to compile.
CAPACITY = capacities.Capacity(
  rows=4, context=120, queue=64, sizes=(4,), widths=(16,), ladder=(120,),
  chunk=4,
)  # fmt: skip
REHEARSING = dataclasses.replace(CAPACITY, context=240, ladder=(240,))
TOOL = {
  'type': 'function',
  'function': {'name': 'go', 'parameters': {'type': 'object'}},
}


def follower():
  """(model, params) that answer 'hi', and complete a call begun for it."""
  model, _ = talkative.policy()
  control = TOKENIZER.control
  h, i, space = TOKENIZER.encode('hi ')
  ends = len(control) + TOKENIZER.ENDS_CALL
  successor = {
    control['<|act|>']: h,
    h: i,
    i: control['<|end|>'],
    space: ends,
    ends: control['</tool_call>'],
    control['</tool_call>']: control['<|end|>'],
  }
  return model, scripted.params(model, successor)


def rehearser():
  """(model, params) that call 'go', answer themselves, and say 'hi' some time.

  What comes next depends on the last token, and by chance.
  """
  control = TOKENIZER.control
  h, i = TOKENIZER.encode('hi')
  one, two, low, high = (len(control) + byte for byte in Tokenizer.SPELT)
  chain = {
    control['<|act|>']: {control['<tool_call>']: 0.6, h: 0.4},
    control['<tool_call>']: {one: 0.6, two: 0.4},
    one: {control['</tool_call>']: 1.0},
    two: {control['</tool_call>']: 1.0},
    control['</tool_call>']: {control['<|end|>']: 1.0},
    control['<|rehearse|>']: {control['<tool_response>']: 1.0},
    control['<tool_response>']: {low: 0.6, high: 0.4},
    low: {control['</tool_response>']: 1.0},
    high: {control['</tool_response>']: 1.0},
    control['</tool_response>']: {control['<|end|>']: 1.0},
    h: {i: 1.0},
    i: {control['<|end|>']: 1.0},
  }
  return talkative.policy(chain, max_len=REHEARSING.context, unlikely=-14)


def job(text, seed, *, choice=0, leader=None, **sampling):
  """An answer wanted to a prompt."""
  sampling = {'max_tokens': 30} | sampling
  return jobs.Job(
    prompt=talkative.TEMPLATE.prompt(text)[0],
    sampling=jobs.Sampling(seed=seed, **sampling),
    stop_ids=talkative.END,
    choice=choice,
    leader=leader,
  )


@contextlib.contextmanager
def running(model: transformer.Transformer, params, **changes):
  """An engine that has compiled everything."""
  motor = engine.Engine(model, params, dataclasses.replace(CAPACITY, **changes))
  motor.warm_up()
  motor.start()
  try:
    yield motor
  finally:
    motor.close(drain=False)


@contextlib.contextmanager
def listening(
  motor: engine.Engine,
  *,
  key: str = KEY,
  deadline_s=60.0,
  rehearsal: private.Settings = private.Settings(),  # noqa: B008 (it is frozen)
):
  """(base URL, uvicorn server) of a server on a free port."""
  uvicorn = pytest.importorskip('uvicorn', reason='no uvicorn: no server')
  pytest.importorskip('fastapi', reason='no FastAPI: no server')
  service = chat.Service(
    motor, TEMPLATE, deadline_s=deadline_s, rehearsal=rehearsal
  )
  app = server.app(
    service,
    TOKENIZER,
    server.Options(model=MODEL, api_key=key, max_body_bytes=1 << 16),
  )
  bound = socket.socket()
  bound.bind(('127.0.0.1', 0))
  bound.listen(2048)
  served = uvicorn.Server(uvicorn.Config(app, log_level='error'))
  thread = threading.Thread(target=served.run, kwargs={'sockets': [bound]})
  thread.start()
  until(lambda: served.started)
  try:
    yield f'http://127.0.0.1:{bound.getsockname()[1]}', served
  finally:
    served.should_exit = True
    thread.join(60)
    bound.close()
    assert not thread.is_alive(), 'the server does not end'


def until(condition, seconds: float = 60.0) -> None:
  """Waits for something that another thread brings about."""
  end = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < end, 'it does not come about'
    time.sleep(0.01)


def client(url: str, key: str = KEY):
  """The official client, which retries nothing."""
  openai = pytest.importorskip('openai', reason='no openai: no client')
  return openai.OpenAI(
    base_url=url + '/v1', api_key=key, max_retries=0, timeout=60
  )


def same(left: np.ndarray, right: np.ndarray) -> bool:
  return len(left) == len(right) and bool((left == right).all())


ACT_END = TEMPLATE.stop_ids[types.Role.ACT]
