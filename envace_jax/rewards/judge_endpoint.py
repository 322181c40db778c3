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
from collections.abc import Awaitable, Callable, Sequence
import dataclasses
import hashlib
import json
import time
from typing import Any

from absl import logging

from envace_jax import errors, types
from envace_jax.endpoints import attempts, client
from envace_jax.endpoints import tally as tallies
from envace_jax.rewards import judge as judges
from envace_jax.rewards import judge_cache, judge_prompt

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
    policy: attempts.Policy | None = None,
    cache: judge_cache.JudgeCache | None = None,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    clock: Callable[[], float] = time.monotonic,
  ):
    self._endpoint = endpoint
    self._cache = cache or judge_cache.JudgeCache()
    self._has_schemas = True  # until the server says otherwise
    self._tally = tallies.Tally()
    self._reported_faults = 0
    self._client = client.Client(
      client.Server(
        base_url=endpoint.base_url,
        api_key_env=endpoint.api_key_env,
        concurrency=endpoint.concurrency,
        batch_deadline_s=endpoint.batch_deadline_s,
      ),
      policy or attempts.Policy(),
      self._tally,
      name='judge',
      sleep=sleep,
      clock=clock,
    )

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
    answers = self._ask_all(new) if new else {}
    with self._client.counting:
      counts = self._tally.counts
      counts['requests'] += len(requests)
      counts['cache_hits'] += len(requests) - len(new)
      for question in questions:
        answer = answers.get(question.key)
        if answer is not None:
          if answer.error:
            self._tally.lost[answer.error] += 1
          known[question.key] = answer.verdict
    return [known[question.key] for question in questions]

  def take_report(self) -> judges.JudgeReport:
    """What happened since the last report."""
    with self._client.counting:
      faults = self._cache.num_faults
      self._tally.counts['cache_faults'] = faults - self._reported_faults
      self._reported_faults = faults
      return judges.take_report(self._tally)

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
      answer = self._ask_all([question])[question.key]
      if answer.error:
        raise errors.UserError(
          f'the judge at {self._endpoint.base_url} gives no verdict '
          f'({answer.error}, model {self._model(index)}); start it, or check '
          'its address, model and key'
        )

  def close(self) -> None:
    """Ends the thread; the cache is the caller's."""
    self._client.close()

  def _ask_all(
    self, questions: Sequence[_Question]
  ) -> dict[str, judge_prompt.Answer]:
    outcomes = self._client.run({q.key: self._ask(q) for q in questions})
    return {
      key: outcome.value
      or judge_prompt.Answer(verdict=types.Verdict.ABSTAIN, error=outcome.error)
      for key, outcome in outcomes.items()
    }

  async def _ask(
    self, question: _Question
  ) -> attempts.Outcome[judge_prompt.Answer]:
    outcome = await self._client.ask(
      question.key, lambda attempt: self._call(question, attempt), _read
    )
    if outcome.value is not None:
      self._cache.write(
        question.key,
        outcome.value.verdict,
        model=self._model(question.judge_index),
        reason=outcome.value.reason,
      )
    return outcome

  async def _call(self, question: _Question, attempt: int) -> Any:
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
      return await self._post(body)
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
    return completion

  async def _post(self, body: types.Json) -> Any:
    return await self._client.post(body)

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


def _read(text: str | None) -> tuple[judge_prompt.Answer, str]:
  answer = judge_prompt.read(text)
  return answer, answer.error
