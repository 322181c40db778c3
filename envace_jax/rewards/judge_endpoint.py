"""A judge behind any OpenAI-compatible chat endpoint.

The requests of a batch are asked concurrently, at most `concurrency` calls in
flight, on an event loop in a thread of its own; the caller blocks. Equal
requests are asked once, known ones not at all.

The answer is asked for as a JSON schema. Servers that refuse `response_format`
(status 400 or 422) are asked without it from then on: the prompt alone says the
form, and the reader takes nothing else.

Judge j of J asks models[j mod number of models] with a seed of its own, so J
judges are J models, or one model J times (which needs a temperature).

The key of a verdict is a hash of the prompt's version, model, temperature,
token limit, seed, judge and full prompt. The endpoint's address is not in it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
import dataclasses
import hashlib
import json
import os
import threading
import time
from typing import Any

from absl import logging

from envace_jax import errors, types
from envace_jax.rewards import judge as judges
from envace_jax.rewards import judge_attempts, judge_cache, judge_prompt

_RESPONSE_FORMAT = {
  'type': 'json_schema',
  'json_schema': {
    'name': 'verdict',
    'strict': True,
    'schema': judge_prompt.SCHEMA,
  },
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Endpoint:
  """Where judges are, and how they are asked."""

  base_url: str
  models: Sequence[str]
  num_judges: int = 1
  api_key_env: str = ''  # name of the variable with the key; '' for no key
  temperature: float = 0.0
  max_tokens: int = 1024  # of an answer, reasoning included
  seed: int = 0
  concurrency: int = 32  # calls in flight
  max_chars: int = 24_000  # of a prompt
  batch_deadline_s: float = 1800.0  # for all requests of one `judge`

  def __post_init__(self):
    if isinstance(self.models, str) or not self.models:
      raise ValueError(f'models={self.models!r}; give a list of names')
    if self.num_judges < 1 or self.concurrency < 1:
      raise ValueError(
        f'num_judges={self.num_judges} and concurrency={self.concurrency} '
        'must be at least 1'
      )
    if self.num_judges > len(set(self.models)) and self.temperature <= 0:
      raise ValueError(
        f'{self.num_judges} judges of {len(set(self.models))} models at '
        'temperature 0 repeat each other; set a temperature'
      )
    if self.max_chars < judge_prompt.MIN_CHARS:
      raise ValueError(
        f'max_chars={self.max_chars}; use at least {judge_prompt.MIN_CHARS}'
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Question:
  key: str
  judge_index: int
  prompt: str


class EndpointJudge:
  """Asks an endpoint; safe to use from several threads.

  Raises `errors.UserError` when made without the client or the key. After
  that it never raises for anything a server does.
  """

  def __init__(
    self,
    endpoint: Endpoint,
    *,
    policy: judge_attempts.Policy | None = None,
    cache: judge_cache.JudgeCache | None = None,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    clock: Callable[[], float] = time.monotonic,
  ):
    self._endpoint = endpoint
    self._policy = policy or judge_attempts.Policy()
    self._cache = cache or judge_cache.JudgeCache()
    self._sleep, self._clock = sleep, clock
    self._client = _client(endpoint)
    self._slots = asyncio.Semaphore(endpoint.concurrency)
    self._has_schemas = True  # until the server says otherwise
    self._tally = judges.Tally()
    self._reported_faults = 0
    self._counting = threading.Lock()
    self._loop = asyncio.new_event_loop()
    self._thread = threading.Thread(
      target=self._loop.run_forever, name='judge', daemon=True
    )
    self._thread.start()

  @property
  def num_judges(self) -> int:
    return self._endpoint.num_judges

  def judge(
    self, requests: Sequence[judge_prompt.JudgeRequest]
  ) -> list[types.Verdict]:
    questions = [self._question(request) for request in requests]
    by_key = {question.key: question for question in questions}
    known = self._cache.read(by_key)
    new = [q for key, q in by_key.items() if key not in known]
    answers = self._run(self._ask_all(new)) if new else {}
    with self._counting:
      counts = self._tally.counts
      counts['requests'] += len(requests)
      counts['cache_hits'] += len(requests) - len(new)
      for question in questions:
        answer = answers.get(question.key)
        if answer is not None:
          if answer.error:
            self._tally.abstained[answer.error] += 1
          known[question.key] = answer.verdict
    return [known[question.key] for question in questions]

  def take_report(self) -> judges.JudgeReport:
    """What happened since the last report."""
    with self._counting:
      faults = self._cache.num_faults
      self._tally.counts['cache_faults'] = faults - self._reported_faults
      self._reported_faults = faults
      return self._tally.take_report()

  def probe(self) -> None:
    """Asks something trivial, past the cache; `errors.UserError` on failure."""
    criterion = types.Criterion(
      id='probe', question='Did the user greet the assistant?', check={}
    )
    line = judge_prompt.Line(speaker='user', text='Hello!')
    for index in range(self.num_judges):
      request = judge_prompt.JudgeRequest(
        criterion=criterion, before=(), turn=(line,), judge_index=index
      )
      question = self._question(request)
      answer = self._run(self._ask_all([question]))[question.key]
      if answer.error:
        raise errors.UserError(
          f'the judge at {self._endpoint.base_url} gives no verdict '
          f'({answer.error}, model {self._model(index)}); start it, or check '
          'its address, model and key'
        )

  def close(self) -> None:
    """Ends the thread; the cache is the caller's."""
    if self._loop.is_closed():
      return
    self._run(self._client.close())
    self._loop.call_soon_threadsafe(self._loop.stop)
    self._thread.join()
    self._loop.close()

  def _run(self, coroutine):
    future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
    try:
      return future.result()
    except BaseException:  # an interrupt must not leave calls in flight
      future.cancel()
      raise

  async def _ask_all(
    self, questions: Sequence[_Question]
  ) -> Mapping[str, judge_prompt.Answer]:
    tasks = {
      question.key: asyncio.ensure_future(self._ask(question))
      for question in questions
    }
    try:
      await asyncio.wait(
        tasks.values(), timeout=self._endpoint.batch_deadline_s
      )
    finally:
      for task in tasks.values():
        task.cancel()
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    return {key: self._outcome(task) for key, task in tasks.items()}

  def _outcome(self, task: asyncio.Task) -> judge_prompt.Answer:
    kind = 'batch_deadline'
    if not task.cancelled():
      if task.exception() is None:
        return task.result()
      kind = 'internal'  # a fault of ours; the run still goes on
      logging.error('judge: %r', task.exception())
    with self._counting:
      self._tally.errors[kind] += 1
    return judge_prompt.Answer(verdict=types.Verdict.ABSTAIN, error=kind)

  async def _ask(self, question: _Question) -> judge_prompt.Answer:
    async with self._slots:
      answer = await judge_attempts.ask(
        lambda attempt: self._call(question, attempt),
        self._policy,
        question.key,
        self._tally,
        sleep=self._sleep,
        clock=self._clock,
      )
    if not answer.error:
      self._cache.write(
        question.key,
        answer.verdict,
        model=self._model(question.judge_index),
        reason=answer.reason,
      )
    return answer

  async def _call(
    self, question: _Question, attempt: int
  ) -> judge_attempts.Reply:
    body = {
      'model': self._model(question.judge_index),
      'messages': [
        {'role': 'system', 'content': judge_prompt.SYSTEM},
        {'role': 'user', 'content': question.prompt},
      ],
      'temperature': self._endpoint.temperature,
      'max_tokens': self._endpoint.max_tokens,
      # Another seed per judge and attempt: an answer that could not be read
      # is not asked for again word by word.
      'seed': self._endpoint.seed
      + question.judge_index
      + attempt * self.num_judges,
    }
    if not self._has_schemas:
      return _reply_of(await self._post(body))
    try:
      completion = await self._post(
        body | {'response_format': _RESPONSE_FORMAT}
      )
    except Exception as e:
      if getattr(e, 'status_code', None) not in (400, 422):
        raise
      completion = await self._post(body)  # raises if something else is wrong
      if self._has_schemas:
        self._has_schemas = False
        logging.warning('the judge takes no JSON schema; asking without')
    return _reply_of(completion)

  async def _post(self, body: types.Json) -> Any:
    # Past the client's typed method, which spends milliseconds of a call on
    # converting a body that is JSON already, and does not validate the answer.
    return await self._client.post(
      '/chat/completions', body=body, cast_to=object
    )

  def _question(self, request: judge_prompt.JudgeRequest) -> _Question:
    if not 0 <= request.judge_index < self.num_judges:
      raise ValueError(
        f'judge_index={request.judge_index} of {self.num_judges} judges'
      )
    prompt = judge_prompt.render(request, self._endpoint.max_chars)
    content = json.dumps(
      [
        judge_prompt.VERSION,
        self._model(request.judge_index),
        self._endpoint.temperature,
        self._endpoint.max_tokens,
        self._endpoint.seed,
        request.judge_index,
        judge_prompt.SYSTEM,
        prompt,
      ]
    )
    return _Question(
      key=hashlib.sha256(content.encode()).hexdigest(),
      judge_index=request.judge_index,
      prompt=prompt,
    )

  def _model(self, judge_index: int) -> str:
    return self._endpoint.models[judge_index % len(self._endpoint.models)]


def _client(endpoint: Endpoint):
  """The official client, without retries of its own: they are counted here."""
  try:
    import openai
  except ImportError as e:
    raise errors.UserError(
      "a judge behind an endpoint needs `pip install 'envace_jax[judge]'`"
    ) from e
  key = 'none'  # local servers ask for none, the client insists on one
  if endpoint.api_key_env:
    key = os.environ.get(endpoint.api_key_env, '')
    if not key:
      raise errors.UserError(
        f'set the environment variable {endpoint.api_key_env} to the key of '
        f'{endpoint.base_url}'
      )
  return openai.AsyncOpenAI(
    base_url=endpoint.base_url, api_key=key, max_retries=0
  )


def _reply_of(completion: Any) -> judge_attempts.Reply:
  """Reads the JSON that a server sent, whatever it is."""
  usage = _get(completion, 'usage')
  tokens = {
    'tokens_in': _count(_get(usage, 'prompt_tokens')),
    'tokens_out': _count(_get(usage, 'completion_tokens')),
  }
  choices = _get(completion, 'choices')
  choice = choices[0] if isinstance(choices, list) and choices else None
  message = _get(choice, 'message')
  text = _get(message, 'content')
  error = ''
  if not isinstance(message, dict) or not isinstance(text, str | None):
    text, error = None, 'bad_body'
  elif choice.get('finish_reason') == 'length':
    error = 'truncated'
  elif choice.get('finish_reason') == 'content_filter':
    error = 'filtered'
  return judge_attempts.Reply(text=text, error=error, **tokens)


def _get(value: Any, key: str) -> Any:
  return value.get(key) if isinstance(value, dict) else None


def _count(value: Any) -> int:
  return value if isinstance(value, int) and value > 0 else 0
