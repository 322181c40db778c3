"""The server as OpenAI's own client and raw sockets see it."""

import concurrent.futures
import json
import time

import numpy as np
import pytest
import serving

ASK = [{'role': 'user', 'content': 'ab'}]
openai = pytest.importorskip('openai', reason='no openai: nobody to ask')
httpx = pytest.importorskip('httpx', reason='no httpx: nobody to ask')


@pytest.fixture(scope='module')
def motor(policy):
  with serving.running(*policy) as motor:
    yield motor


@pytest.fixture(scope='module')
def url(motor):
  with serving.listening(motor) as (url, _):
    yield url


@pytest.fixture(scope='module')
def client(url):
  return serving.client(url)


def ask(client, messages=ASK, **options):
  options = {'max_tokens': 30, 'seed': 7} | options
  return client.chat.completions.create(
    model=serving.MODEL, messages=messages, **options
  )


def post(url, body, path='/v1/chat/completions', key=serving.KEY):
  content = body if isinstance(body, bytes) else json.dumps(body)
  return httpx.post(
    url + path,
    content=content,
    headers={'Authorization': f'Bearer {key}'},
    timeout=60,
  )


def test_a_completion_has_every_part(client):
  done = ask(client)
  assert done.object == 'chat.completion' and done.id.startswith('chatcmpl-')
  choice = done.choices[0]
  assert choice.message.role == 'assistant' and choice.message.content
  assert choice.finish_reason in ('stop', 'length')
  assert done.usage.total_tokens == (
    done.usage.prompt_tokens + done.usage.completion_tokens
  )
  assert done.usage.completion_tokens_details.rehearsal_tokens == 0
  assert ask(client).choices[0].message == choice.message
  assert {
    ask(client, seed=seed).choices[0].message.content for seed in range(6)
  } != {choice.message.content}


@pytest.mark.parametrize('seed', range(4))
@pytest.mark.parametrize('stop', [None, ['ab', 'zz']])
def test_a_stream_says_the_same(client, seed, stop):
  options = dict(seed=seed, stop=stop, n=2, logprobs=True, top_logprobs=2)
  whole = ask(client, **options)
  texts, ends, scored, usage = ['', ''], [None, None], [None, None], None
  for chunk in ask(
    client, **options, stream=True, stream_options={'include_usage': True}
  ):
    usage = chunk.usage or usage
    for choice in chunk.choices:
      texts[choice.index] += choice.delta.content or ''
      ends[choice.index] = choice.finish_reason or ends[choice.index]
      scored[choice.index] = choice.logprobs or scored[choice.index]
  for choice in whole.choices:
    assert texts[choice.index] == choice.message.content
    assert ends[choice.index] == choice.finish_reason
    said = ''.join(token.token for token in choice.logprobs.content)
    if '\ufffd' not in said:  # half a character is a token of its own
      assert said.startswith(choice.message.content)
    for one, other in zip(
      choice.logprobs.content, scored[choice.index].content, strict=True
    ):
      assert one.token == other.token
      assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
      assert len(one.top_logprobs) == 2
    if stop:
      assert 'ab' not in choice.message.content
  assert usage.completion_tokens == whole.usage.completion_tokens


def test_n_answers_differ_and_return(client):
  done = ask(client, n=8)
  texts = [choice.message.content for choice in done.choices]
  assert len(texts) == 8 and len(set(texts)) > 2
  again = ask(client, n=8)
  assert [choice.message.content for choice in again.choices] == texts


def test_max_tokens_is_a_length(client):
  for name in ('max_tokens', 'max_completion_tokens'):
    options = {'max_tokens': None} | {name: 1}
    done = ask(client, **options)
    assert done.usage.completion_tokens == 1
  ends = {
    ask(client, max_tokens=2, seed=s).choices[0].finish_reason for s in range(8)
  }
  assert 'length' in ends


def test_a_conversation_is_read_once(client):
  system = {'role': 'system', 'content': 'a system prompt of some length'}
  first = ask(client, [system, *ASK], max_tokens=12)
  for seed in range(20):
    first = ask(client, [system, *ASK], seed=seed)
    if first.choices[0].finish_reason == 'stop':
      break
  said = {'role': 'assistant', 'content': first.choices[0].message.content}
  second = ask(client, [system, *ASK, said, *ASK])
  cached = second.usage.prompt_tokens_details.cached_tokens
  first_row = first.usage.prompt_tokens + first.usage.completion_tokens
  # Exactly the sampled tokens: a text that was encoded anew would be shorter
  # or longer, or differ somewhere on the way.
  assert cached >= first_row - 1


def test_completions_have_logprobs_and_echo(client, motor):
  create = lambda **options: client.completions.create(
    model=serving.MODEL, seed=3, **options
  )
  done = create(prompt='abab', max_tokens=5, logprobs=2, echo=True)
  scored = done.choices[0].logprobs
  assert done.choices[0].text.startswith('abab')
  assert scored.token_logprobs[0] is None and scored.top_logprobs[0] is None
  expected = motor.score(np.asarray(serving.TOKENIZER.encode('abab')))
  np.testing.assert_allclose(
    scored.token_logprobs[1:4], expected.logprobs[1:], atol=1e-4
  )
  assert scored.text_offset[:4] == [0, 1, 2, 3]
  assert all(len(top) == 2 for top in scored.top_logprobs[1:4])
  only = create(prompt='abab', max_tokens=0, logprobs=0, echo=True)
  assert only.choices[0].text == 'abab'
  many = create(prompt=['ab', 'ba', 'a'], max_tokens=4, n=2)
  assert [choice.index for choice in many.choices] == list(range(6))
  ids = serving.TOKENIZER.encode('ab')
  from_ids = create(prompt=ids, max_tokens=4)
  assert (
    from_ids.choices[0].text
    == create(prompt='ab', max_tokens=4).choices[0].text
  )
  parts = create(prompt='ab', max_tokens=4, stream=True)
  text = ''.join(part.choices[0].text for part in parts)
  assert text == from_ids.choices[0].text


def test_models_health_and_metrics(client, url):
  assert [model.id for model in client.models.list()] == [serving.MODEL]
  assert client.models.retrieve(serving.MODEL).id == serving.MODEL
  assert httpx.get(url + '/health').json() == {'status': 'ok'}
  lines = httpx.get(url + '/metrics').text.splitlines()
  values = dict(line.split() for line in lines if not line.startswith('#'))
  assert int(values['envace_finished_total']) > 0
  assert values['envace_rows'] == '4'


WRONG = {
  'json': (b'{"model": ', 400, 'invalid_json'),
  'nan': (b'{"temperature": NaN}', 400, 'invalid_json'),
  'deep': (b'[' * 60000, 400, 'invalid_json'),
  'list': (b'[]', 400, 'invalid_json'),
  'huge': (b' ' * (1 << 17), 413, 'request_too_large'),
  'model': ({'model': 'gpt'}, 404, 'model_not_found'),
  'no messages': ({}, 400, 'invalid_value'),
  'format': (
    {'response_format': {'type': 'json_schema'}},
    400,
    'unsupported_parameter',
  ),
  'bias': ({'logit_bias': {'1': 5}}, 400, 'unsupported_parameter'),
  'penalty': ({'presence_penalty': 1}, 400, 'unsupported_parameter'),
  'unknown': ({'beams': 4}, 400, 'unsupported_parameter'),
  'temperature': ({'temperature': 'hot'}, 400, 'invalid_value'),
  'bool': ({'temperature': True}, 400, 'invalid_value'),
  'n': ({'n': 1000}, 400, 'invalid_value'),
  'stop': ({'stop': ['']}, 400, 'invalid_value'),
  'role': ({'messages': [{'role': 'root'}]}, 400, 'invalid_value'),
  'tools': ({'tools': [{'type': 'code'}]}, 400, 'invalid_value'),
  'choice': ({'messages': ASK, 'tool_choice': 'required'}, 400,
             'invalid_value'),
  'calls': ({'messages': [{'role': 'assistant', 'tool_calls': 5}]}, 400,
            'invalid_value'),
  'orphan': (
    {'messages': [{'role': 'tool', 'tool_call_id': 'x', 'content': ''}]},
    400,
    'invalid_value',
  ),
  'long': (
    {'messages': [{'role': 'user', 'content': 'x' * 200}]},
    400,
    'context_length_exceeded',
  ),
}  # fmt: skip


@pytest.mark.parametrize('name', WRONG)
def test_a_wrong_request_has_openais_shape(url, name):
  body, status, code = WRONG[name]
  if isinstance(body, dict):
    body = {'model': serving.MODEL} | body
  found = post(url, body)
  assert found.status_code == status, found.text
  error = found.json()['error']
  assert error['code'] == code and error['message']
  assert set(error) == {'message', 'type', 'param', 'code'}


def test_an_id_of_any_size_is_refused(url):
  for wrong in (-1, 1 << 40, 1 << 80):
    body = {'model': serving.MODEL, 'prompt': [1, wrong]}
    assert post(url, body, '/v1/completions').status_code == 400


def test_the_client_raises_its_own_errors(client, url):
  with pytest.raises(openai.BadRequestError) as wrong:
    ask(client, logit_bias={'1': 3})
  assert wrong.value.param == 'logit_bias'
  with pytest.raises(openai.AuthenticationError):
    ask(serving.client(url, key='wrong'))
  with pytest.raises(openai.NotFoundError):
    client.models.retrieve('gpt')
  assert post(url, b'{}', '/v1/nowhere').json()['error']['code'] == 'not_found'
  assert httpx.get(url + '/v1/chat/completions').status_code == 405


def test_a_deadline_is_a_timeout(client):
  with pytest.raises(openai.InternalServerError) as late:
    ask(client, extra_body={'deadline_s': 0.001}, n=16)
  assert late.value.status_code == 504 and late.value.code == 'timeout'


def test_who_disconnects_frees_rows(client, url, motor, monkeypatch):
  """Streaming and not, and what others are told does not change."""
  expected = ask(client).choices[0].message.content
  real = motor._decode
  monkeypatch.setattr(motor, '_decode', lambda: (time.sleep(0.05), real()))
  body = {'model': serving.MODEL, 'messages': ASK, 'n': 16, 'temperature': 2}
  headers = {'Authorization': f'Bearer {serving.KEY}'}
  address = url + '/v1/chat/completions'
  before = motor.counts.cancelled
  with pytest.raises(httpx.ReadTimeout):
    httpx.post(address, json=body, headers=headers, timeout=0.3)
  serving.until(lambda: not motor.running and not motor.waiting, 10)
  with httpx.stream(
    'POST', address, json=body | {'stream': True}, headers=headers
  ) as answer:
    next(answer.iter_lines())
  serving.until(lambda: not motor.running and not motor.waiting, 10)
  assert motor.counts.cancelled - before >= 2
  assert ask(client).choices[0].message.content == expected


@pytest.mark.nightly  # a busy machine drops connections of its own
def test_a_flood_meets_a_queue(url, motor):
  """1,000 at once: some are answered, the others are told to come back."""
  body = json.dumps(
    {'model': serving.MODEL, 'messages': ASK, 'max_tokens': 8, 'seed': 1}
  )
  headers = {'Authorization': f'Bearer {serving.KEY}'}
  # A connection that idles while the machine is busy is closed; none is kept.
  limits = httpx.Limits(max_connections=1000, max_keepalive_connections=0)
  with httpx.Client(limits=limits, timeout=120) as session:
    send = lambda _: session.post(
      url + '/v1/chat/completions', content=body, headers=headers
    )
    with concurrent.futures.ThreadPoolExecutor(200) as pool:
      found = list(pool.map(send, range(1000)))
  statuses = [answer.status_code for answer in found]
  assert set(statuses) <= {200, 429} and statuses.count(200) >= 64
  texts = {
    answer.json()['choices'][0]['message']['content']
    for answer in found
    if answer.status_code == 200
  }
  assert len(texts) == 1
  for answer in found:
    if answer.status_code == 429:
      assert answer.headers['Retry-After']
      assert answer.json()['error']['type'] == 'rate_limit_error'
  serving.until(lambda: not motor.running and not motor.waiting)
