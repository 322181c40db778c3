"""Private rehearsals behind the server, as OpenAI's own client sees them."""

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import http.client
import json
import threading
import time

import numpy as np
import pytest
import serving

from envace_jax import types
from envace_jax.rollout import private_rehearsal as rehearsing
from envace_jax.serving import chat, engine, jobs, pending, private, server

ASK = {'role': 'user', 'content': 'ab'}
openai = pytest.importorskip('openai', reason='no openai: nobody to ask')
httpx = pytest.importorskip('httpx', reason='no httpx: nobody to ask')


@pytest.fixture(scope='module')
def motor(rehearsing):
  return rehearsing


@pytest.fixture(scope='module')
def url(motor):
  with serving.listening(motor) as (url, _):
    yield url


@pytest.fixture(scope='module')
def client(url):
  return serving.client(url)


@pytest.fixture
def seen(motor, monkeypatch):
  """Every job, with what it came to: [job, its generation]."""
  found, real = [], motor.submit

  def submit(group, **options):
    for job in group:
      pair = [job, None]
      found.append(pair)
      job.done.add_done_callback(
        lambda done, pair=pair: pair.__setitem__(1, done.result())
      )
    real(group, **options)

  monkeypatch.setattr(motor, 'submit', submit)
  return found


def ask(client, rehearsal=None, messages=(ASK,), **options):
  options = {'seed': 2, 'tools': [serving.TOOL]} | options
  extra = {} if rehearsal is None else {'rehearsal': rehearsal}
  return client.chat.completions.create(
    model=serving.MODEL, messages=list(messages), extra_body=extra, **options
  )


def cost(done):
  return done.usage.completion_tokens_details.rehearsal_tokens


def said(job):
  return serving.TEMPLATE.literal(job.prompt)


def rehearsals(seen):
  """What each rehearsal said, by its number."""
  whole = collections.defaultdict(list)
  for job, generated in seen:
    if job.choice >= 1 << 16:
      whole[job.choice].append((job.author, generated))
  return [whole[number] for number in sorted(whole)]


def remembered(rehearsed, writes=()):
  """The notes, made of what was said and by nothing of the library."""
  votes, answers = collections.Counter(), collections.defaultdict(list)
  for one in rehearsed:
    texts = [serving.TEMPLATE.literal(g.tokens.ids) for _, g in one]
    mine = set()
    for call, answer in zip(texts[::2], texts[1::2], strict=False):
      if not answer.endswith('</tool_response><|end|>'):
        continue
      to = json.loads(call[11 : call.index('</tool_call>')])['arguments']['to']
      if 'go' in writes:
        break
      if to not in mine:
        mine.add(to)
        votes[to] += 1
        answers[to].append(answer[15 : answer.index('</tool_response>')])
  first = list(answers)
  return [
    f'go {to} -> '
    + max(
      answers[to], key=lambda a: (answers[to].count(a), -answers[to].index(a))
    )
    for to in first
  ]


def test_notes_stand_before_the_reply_and_tokens_are_counted(client, seen):
  done = ask(client, {'attempts': 3, 'max_tokens': 90})
  made = rehearsals(seen)
  assert len(made) == 3
  reply, generated = seen[-1]
  notes = remembered(made)
  assert notes, 'nothing was rehearsed: this test sees nothing'
  shown = said(reply)
  assert shown.startswith('<|tools|>go<|end|><|user|>ab<|end|><|notes|>')
  assert shown.endswith('<|end|><|act|>')
  assert shown.split('<|notes|>')[1][: -len('<|end|><|act|>')] == '; '.join(
    notes
  )
  spent = sum(len(g.tokens.ids) for one in made for _, g in one)
  assert cost(done) == spent <= 90
  assert done.usage.completion_tokens == spent + len(generated.tokens.ids)
  assert done.usage.prompt_tokens == len(reply.prompt)
  authors = {author for one in made for author, _ in one}
  assert authors == {types.Author.ACT, types.Author.REHEARSE}
  assert 'notes' not in done.model_dump_json()


def test_the_formatter_is_the_one_of_in_process_rehearsals(motor, seen):
  """What the server shows is what `Rehearsed` makes of the same episodes."""
  service = chat.Service(motor, serving.TEMPLATE, deadline_s=60)
  caught = []
  real = private.Rehearsals.run

  def run(self, *args, **options):
    caught.append(self)
    return real(self, *args, **options)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(private.Rehearsals, 'run', run)
    service.chat([ASK], [serving.TOOL], settings(attempts=4))
  episodes = caught[0].rehearsed.attempts[0]
  assert len(episodes) == 4 and any(one.steps for one in episodes)
  again = rehearsing.Rehearsed(
    tasks=caught[0].rehearsed.tasks,
    attempts=[episodes],
    rule=rehearsing.Rule(
      attempts=4,
      mode=rehearsing.Mode.PARALLEL,
      memory=rehearsing.Memory.AGREED,
      max_notes=4,
    ),
    context=rehearsing.Context(
      is_write=lambda name: False, fits=lambda task, notes: True
    ),
  )
  prompt, _ = serving.TEMPLATE.prompt('ab', again.notes()[0], [serving.TOOL])
  assert serving.same(seen[-1][0].prompt, prompt)


def settings(seed=2, n=1, **rehearsal):
  return chat.Settings(
    sampling=jobs.Sampling(seed=seed),
    n=n,
    rehearsal=private.Settings(**rehearsal) if rehearsal else None,
  )


def test_a_seed_says_everything_again(client):
  rehearsal = {'attempts': 3, 'max_tokens': 60}
  dump = lambda seed: [
    (done.usage.model_dump(exclude={'prompt_tokens_details'}),
     done.choices[0].message.content,
     [c.function.arguments for c in done.choices[0].message.tool_calls or ()])
    for done in [ask(client, rehearsal, seed=seed)]
  ]  # fmt: skip
  assert dump(1) == dump(1)
  assert len({json.dumps(dump(seed)) for seed in range(5)}) > 1


def test_none_is_none_bit_for_bit(motor, seen):
  service = chat.Service(motor, serving.TEMPLATE, deadline_s=60)
  own = chat.Service(
    motor,
    serving.TEMPLATE,
    deadline_s=60,
    rehearsal=private.Settings(attempts=2),
  )
  bare, zero, off = (
    some.chat([ASK], [serving.TOOL], asked)
    for some, asked in (
      (service, settings(n=3)),
      (service, settings(n=3, attempts=0)),
      (own, settings(n=3, attempts=0)),
    )
  )
  assert len(seen) == 9
  for other in (zero, off):
    assert serving.same(bare.prompt_ids, other.prompt_ids)
    assert other.rehearsal_tokens == 0
    for one, two in zip(bare.choices, other.choices, strict=True):
      assert one.reply == two.reply
      assert serving.same(one.tokens.ids, two.tokens.ids)
      np.testing.assert_array_equal(one.tokens.logprobs, two.tokens.logprobs)
  # A server's own are for requests that could act, and say nothing of it.
  assert own.chat([ASK], [serving.TOOL], settings()).rehearsal_tokens
  assert not own.chat([ASK], [], settings()).rehearsal_tokens


@pytest.mark.parametrize('mode', ['parallel', 'sequential'])
@pytest.mark.parametrize('attempts, budget', [(1, 1), (3, 5), (4, 40)])
def test_a_budget_is_kept(client, seen, mode, attempts, budget):
  asked = {'attempts': attempts, 'mode': mode, 'max_tokens': budget}
  done = ask(client, asked)
  made = rehearsals(seen)
  spent = [sum(len(g.tokens.ids) for _, g in one) for one in made]
  assert cost(done) == sum(spent) <= budget and len(made) == attempts
  if mode == 'parallel':
    assert max(spent) <= -(-budget // attempts)
  if budget < 10:
    assert sum(spent) == budget  # cut in the middle of a word
    assert '<|notes|>' not in said(seen[-1][0])


def test_the_number_of_actions_is_kept(client, seen):
  ask(client, {'attempts': 4, 'max_actions': 1})
  for one in rehearsals(seen):
    assert len(one) == 1  # a call that nobody answers, or a reply


def test_a_sequence_is_shown_what_was_before(client, seen):
  for seed in range(8):
    seen.clear()
    ask(client, {'attempts': 3, 'mode': 'sequential'}, seed=seed)
    made = rehearsals(seen)
    opened = {}
    for job, _ in seen:
      opened.setdefault(job.choice, said(job))
    prompts = [opened[i] for i in sorted(opened) if i >= 1 << 16]
    for number, prompt in enumerate(prompts):
      notes = '; '.join(remembered(made[:number]))
      assert (f'<|notes|>{notes}<|end|>' in prompt) == bool(notes)
    if '<|notes|>' in prompts[1]:
      return
  pytest.fail('no first rehearsal left anything')


def test_what_changes_the_world_is_no_knowledge(client, seen):
  for writes in ([], ['go']):
    seen.clear()
    ask(client, {'attempts': 3, 'writes': writes})
    shown = '<|notes|>' in said(seen[-1][0])
    assert shown == bool(remembered(rehearsals(seen), writes))
    assert shown != bool(writes)


def reply_of(done):
  return done.choices[0].message.model_dump(exclude_none=True)


def after(done):
  """What a client says next."""
  message = reply_of(done)
  calls = message.get('tool_calls', ())
  if not calls:
    return [message, ASK]
  answers = [
    {'role': 'tool', 'tool_call_id': call['id'], 'content': '{"n": 3}'}
    for call in calls
  ]
  return [message, *answers]


@pytest.mark.parametrize('name', ['', 'mine'])
def test_a_conversation_is_rehearsed_once_and_read_once(client, seen, name):
  rehearsal = {'attempts': 3, 'max_tokens': 90, 'conversation': name}
  messages, notes, row = [ASK], None, None
  for turn in range(3):
    done = ask(client, rehearsal, messages)
    shown = said(seen[-1][0]).partition('<|notes|>')[2].partition('<|end|>')[0]
    assert bool(cost(done)) == (turn == 0) and shown
    if turn:
      assert shown == notes
      # All but the last token, which no cache has yet.
      assert done.usage.prompt_tokens_details.cached_tokens >= row - 1
    job, generated = seen[-1]
    notes, row = shown, len(job.prompt) + len(generated.tokens.ids)
    messages += after(done)
  # A reply that comes back otherwise is still of that conversation ...
  odd = [ASK, {'role': 'assistant', 'content': 'odd'}, ASK]
  done = ask(client, rehearsal, odd)
  assert not cost(done) and notes in said(seen[-1][0])
  # ... but not of one by another name, nor of one that begins otherwise.
  assert cost(ask(client, rehearsal | {'conversation': 'other'}, odd))
  assert cost(ask(client, rehearsal, [ASK | {'content': 'b'}, *odd[1:]]))
  # Who does not ask for rehearsals is not told of those of others.
  ask(client, None, odd)
  assert '<|notes|>' not in said(seen[-1][0])


def test_a_stream_begins_after_the_rehearsals(client):
  options = {'n': 2, 'seed': 3}
  rehearsal = {'attempts': 2, 'max_tokens': 60}
  whole = ask(client, rehearsal, **options)
  texts, calls, usage = ['', ''], [[], []], None
  for chunk in ask(
    client, rehearsal, **options, stream=True,
    stream_options={'include_usage': True},
  ):  # fmt: skip
    usage = chunk.usage or usage
    for choice in chunk.choices:
      texts[choice.index] += choice.delta.content or ''
      calls[choice.index] += choice.delta.tool_calls or []
  for choice in whole.choices:
    message = choice.message
    assert texts[choice.index] == (message.content or '')
    assert [c.function.arguments for c in calls[choice.index]] == [
      c.function.arguments for c in message.tool_calls or ()
    ]
  assert usage.completion_tokens_details.rehearsal_tokens == cost(whole) > 0
  assert usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.parametrize(
  'rehearsal, options, param',
  [
    (5, {}, 'rehearsal'),
    ({'beams': 2}, {}, 'rehearsal.beams'),
    ({'attempts': -1}, {}, 'rehearsal.attempts'),
    ({'attempts': 1000}, {}, 'rehearsal.attempts'),
    ({'attempts': True}, {}, 'rehearsal.attempts'),
    ({'attempts': 2, 'mode': 'both'}, {}, 'rehearsal.mode'),
    ({'attempts': 2, 'mode': []}, {}, 'rehearsal.mode'),
    ({'attempts': 2, 'memory': 'long'}, {}, 'rehearsal.memory'),
    ({'attempts': 2, 'max_tokens': 0}, {}, 'rehearsal.max_tokens'),
    ({'attempts': 2, 'max_tokens': 1}, {}, 'rehearsal'),
    ({'attempts': 2, 'writes': 'go'}, {}, 'rehearsal.writes'),
    ({'attempts': 2, 'writes': [1]}, {}, 'rehearsal.writes'),
    ({'attempts': 2, 'temperature': 9}, {}, 'rehearsal.temperature'),
    ({'attempts': 2, 'conversation': 5}, {}, 'rehearsal.conversation'),
    ({'attempts': 2}, {'tools': []}, 'rehearsal'),
    ({'attempts': 2}, {'tool_choice': 'none'}, 'rehearsal'),
    ({'attempts': 2},
     {'messages': [{'role': 'assistant', 'content': 'a'}, ASK]}, 'rehearsal'),
    ({'attempts': 2}, {'messages': [{'role': 'system', 'content': 'a'}]},
     'rehearsal'),
  ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(client, rehearsal, options, param):
  with pytest.raises(openai.BadRequestError) as wrong:
    ask(client, rehearsal, **options)
  assert wrong.value.param == param
  assert wrong.value.code in ('invalid_value', 'unsupported_parameter')


def test_a_policy_that_cannot_says_why(motor):
  service = chat.Service(
    motor,
    serving.TEMPLATE,
    deadline_s=60,
    ability=private.Ability(refusal='it has never rehearsed'),
  )
  with pytest.raises(jobs.Refused, match='never rehearsed'):
    service.chat([ASK], [serving.TOOL], settings(attempts=1))
  assert not service.chat(
    [ASK], [serving.TOOL], settings(attempts=0)
  ).rehearsal_tokens


@pytest.fixture
def slow(motor, monkeypatch):
  real = motor._decode
  monkeypatch.setattr(motor, '_decode', lambda: (time.sleep(0.03), real()))


def idle(motor):
  serving.until(lambda: not motor.running and not motor.waiting, 10)


@pytest.fixture
def held(motor, monkeypatch):
  """Holds the device once a condition is true: nothing is said after that."""
  real, now = motor._decode, [lambda: True]
  monkeypatch.setattr(
    motor, '_decode', lambda: time.sleep(0.01) if now[0]() else real()
  )
  return lambda condition: now.__setitem__(0, condition)


def test_who_goes_away_frees_rows(url, motor, held, seen):
  """In the midst of the second rehearsal, which then cannot end by itself."""
  body = {
    'model': serving.MODEL, 'messages': [ASK], 'tools': [serving.TOOL],
    'rehearsal': {'attempts': 16, 'mode': 'sequential', 'max_tokens': 10000},
    'seed': 2,
  }  # fmt: skip
  second = lambda: any(job.choice == (1 << 16) + 1 for job, _ in seen)
  held(second)
  for stream in (False, True):
    seen.clear()
    before = motor.counts.cancelled
    connection = http.client.HTTPConnection(url.removeprefix('http://'))
    connection.request(
      'POST',
      '/v1/chat/completions',
      body=json.dumps(body | {'stream': stream}),
      headers={'Authorization': f'Bearer {serving.KEY}'},
    )
    serving.until(second)
    connection.close()
    serving.until(lambda b=before: motor.counts.cancelled > b, 10)
    idle(motor)
    made = len(seen)
    time.sleep(0.1)
    assert len(seen) == made  # nothing follows
    assert all(job.choice >= 1 << 16 for job, _ in seen)


def test_nothing_follows_what_is_given_up(motor, seen):
  """Also where somebody goes between two jobs."""
  waiting = pending.Pending(motor)

  def then(job, generated):
    waiting.cancel()
    waiting.submit([serving.job('b', 1)], then, goes_on=True)

  waiting.submit([serving.job('ab', 1)], then)
  with pytest.raises(concurrent.futures.CancelledError):
    waiting.done.result(20)
  assert len(seen) == 1


def test_a_deadline_and_a_full_queue_hold_for_rehearsals(
  client, motor, slow, monkeypatch
):
  with pytest.raises(openai.InternalServerError) as late:
    client.chat.completions.create(
      model=serving.MODEL,
      messages=[ASK],
      tools=[serving.TOOL],
      extra_body={
        'deadline_s': 0.2,
        'rehearsal': {
          'attempts': 16,
          'mode': 'sequential',
          'max_tokens': 10000,
        },
      },
    )
  assert late.value.status_code == 504
  idle(motor)
  smaller = dataclasses.replace(motor.capacity, queue=4)
  monkeypatch.setattr(motor, 'capacity', smaller)
  with pytest.raises(openai.RateLimitError):
    ask(client, {'attempts': 16, 'max_tokens': 100})
  assert not motor.waiting
  # What was let in is never one too many, and goes before who comes later.
  service = chat.Service(motor, serving.TEMPLATE, deadline_s=60)
  waiting = service.start(
    [ASK], [serving.TOOL], settings(n=8, attempts=1, max_tokens=160)
  )
  others = []
  with pytest.raises(jobs.Refused, match='wait already'):
    while True:
      motor.submit([serving.job('ab', len(others))])
      others.append(1)
  assert waiting.done.result(30).rehearsal_tokens
  idle(motor)
  first, second, third = group = [serving.job('ab', seed) for seed in range(3)]
  with motor._changed:
    motor.submit([first])
    motor.submit([second, third], goes_on=True)
    assert list(motor._waiting) == [second, third, first]
  for job in group:
    job.done.result(30)


def test_a_shutdown_finishes_rehearsals_and_their_reply():
  motor = engine.Engine(*serving.rehearser(), serving.REHEARSING)
  motor.start()
  service = chat.Service(motor, serving.TEMPLATE, deadline_s=60)
  waiting = service.start(
    [ASK], [serving.TOOL], settings(attempts=4, max_tokens=100)
  )
  serving.until(lambda: motor.counts.finished)
  motor.close()
  assert waiting.done.result(0).rehearsal_tokens
  with pytest.raises(jobs.Refused, match='shutting down'):
    service.chat([ASK], [serving.TOOL], settings(attempts=1))


def test_who_listens_badly_fails_alone(motor):
  service = chat.Service(motor, serving.TEMPLATE, deadline_s=60)
  failures = motor.counts.device_failures

  def deaf(index, so_far):
    raise RuntimeError('the loop is closed')

  others = [service.start([ASK], [], settings(seed)) for seed in range(3)]
  bad = service.start([ASK], [], settings(), deaf)
  with pytest.raises(jobs.Refused, match='the request failed'):
    bad.done.result(30)
  assert all(other.done.result(30).choices for other in others)
  assert motor.counts.device_failures == failures
  idle(motor)


def test_who_goes_before_the_first_event_is_given_up(motor, held):
  """The application alone: the response begins, and nobody is there."""
  held(lambda: True)
  service = chat.Service(motor, serving.TEMPLATE, deadline_s=60)
  app = server.app(
    service, serving.TOKENIZER, server.Options(model=serving.MODEL)
  )
  body = json.dumps({
    'model': serving.MODEL, 'messages': [ASK], 'stream': True, 'n': 8,
    'tools': [serving.TOOL], 'rehearsal': {'attempts': 4},
  })  # fmt: skip
  for version, breaks in (('2.3', False), ('2.4', False), ('2.4', True)):
    before = motor.counts.cancelled
    heard = iter([{'type': 'http.request', 'body': body.encode()}])
    scope = {
      'type': 'http', 'method': 'POST', 'path': '/v1/chat/completions',
      'raw_path': b'', 'query_string': b'', 'headers': [],
      'asgi': {'version': '3.0', 'spec_version': version},
    }  # fmt: skip

    async def receive(heard=heard, breaks=breaks):
      if (message := next(heard, None)) is not None:
        return message
      if breaks:  # nobody says so, but nothing can be sent
        await asyncio.sleep(60)
      return {'type': 'http.disconnect'}

    async def send(message, breaks=breaks):
      del message
      await asyncio.sleep(0)
      if breaks:
        raise OSError('the connection is gone')

    async def run(call=(scope, receive, send), before=before):
      with contextlib.suppress(Exception):
        await asyncio.wait_for(app(*call), 20)
      end = time.monotonic() + 10
      while motor.counts.cancelled == before:  # while the loop still runs
        assert time.monotonic() < end, 'nobody gave it up'
        await asyncio.sleep(0.01)

    asyncio.run(run())
    idle(motor)


@pytest.mark.parametrize(
  'path, body',
  [
    ('completions', '{"prompt": "a\\ud800b"}'),
    ('completions', '{"prompt": ["ok", "\\udfff"]}'),
    ('completions', '{"prompt": []}'),
    ('completions', '{"prompt": [[]]}'),
    ('completions', '{"prompt": ["a", []]}'),
    ('completions', '{"prompt": ""}'),
    ('completions', '{"prompt": "a", "stop": "\\ud800"}'),
    ('completions', '{"\\ud800": 1}'),
    ('chat/completions', '{"messages": [{"role": "user", "content": '
                         '"\\ud83d"}]}'),
  ],
)  # fmt: skip
def test_what_is_no_text_is_refused(url, path, body):
  body = f'{{"model": "{serving.MODEL}", ' + body[1:]
  found = httpx.post(
    f'{url}/v1/{path}',
    content=body,
    headers={'Authorization': f'Bearer {serving.KEY}'},
    timeout=60,
  )
  assert found.status_code == 400, found.text
  error = found.json()['error']
  assert error['type'] == 'invalid_request_error' and error['message']


def test_a_text_without_tokens_is_refused(motor):
  class Silent(type(serving.TOKENIZER)):
    def encode(self, text):
      return []

  service = chat.Service(motor, serving.TEMPLATE, deadline_s=60)
  handlers = server._Handlers(
    service, Silent(), server.Options(model=serving.MODEL)
  )
  with pytest.raises(jobs.Refused, match='at least a token'):
    handlers._ids('\u200b')


def test_others_are_served_between_the_steps(client, motor):
  """Rehearsals hold rows only while they say something."""
  found = []
  threads = [
    threading.Thread(
      target=lambda s=seed: found.append(
        cost(ask(client, {'attempts': 4, 'max_tokens': 120}, seed=s))
      )
    )
    for seed in range(6)
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(60)
  alone = [
    cost(ask(client, {'attempts': 4, 'max_tokens': 120}, seed=seed))
    for seed in range(6)
  ]
  assert sorted(found) == sorted(alone)
  idle(motor)
