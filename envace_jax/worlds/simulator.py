"""A model behind any OpenAI-compatible chat endpoint, as a source of answers.

All questions of a step are asked concurrently (`endpoints.client`), each with a
seed of its own. An answer that was paid for is kept, under a hash of whatever
decides it: the prompt's version, model, temperature, token limit, seed and full
prompt; the endpoint's address is not in it. So a run that is killed gets its
answers again, and resumes exactly, as long as none was lost: what was never
answered is asked anew, and may be answered then. `simulator/lost` in the
metrics counts those.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
import dataclasses
import hashlib
import json
import time
from typing import Any

from envace_jax.endpoints import attempts, cache, client
from envace_jax.endpoints import tally as tallies
from envace_jax.text import simulator_prompt

SEED_BITS = 31  # some servers keep seeds in 32 bits with a sign


@dataclasses.dataclass(frozen=True, kw_only=True)
class Endpoint:
  """Where the model is, and how it is asked."""

  base_url: str
  model: str
  api_key_env: str = ''  # name of the variable with the key; '' for no key
  temperature: float = 1.0
  max_tokens: int = 2048  # of an answer, reasoning included
  concurrency: int = 32  # calls in flight
  max_chars: int = 24_000  # of a prompt
  batch_deadline_s: float = 600.0  # for all questions of one step

  def __post_init__(self):
    if not self.model:
      raise ValueError("simulator_endpoint.model=''; name the model to ask")
    if self.max_chars < simulator_prompt.MIN_CHARS:
      raise ValueError(
        f'simulator_endpoint.max_chars={self.max_chars}; use at least '
        f'{simulator_prompt.MIN_CHARS}'
      )
    self.server()

  def server(self) -> client.Server:
    return client.Server(
      base_url=self.base_url,
      api_key_env=self.api_key_env,
      concurrency=self.concurrency,
      batch_deadline_s=self.batch_deadline_s,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
  """What is asked, and what an answer must not be."""

  system: str
  prompt: str
  seed: int  # below 2 ** SEED_BITS; two questions do not share one
  fault: Callable[[str], str]  # observation -> kind of what is wrong, or ''


class Simulator:
  """Answers questions; never raises for anything a server does.

  Raises `errors.UserError` when made without the client or the key.
  """

  def __init__(
    self,
    endpoint: Endpoint,
    *,
    policy: attempts.Policy,
    kept: cache.Cache,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    clock: Callable[[], float] = time.monotonic,
  ):
    self.endpoint = endpoint
    self._kept, self._reported_faults = kept, 0
    self._tally = tallies.Tally()
    self._client = client.Client(
      endpoint.server(),
      policy,
      self._tally,
      name='simulator',
      sleep=sleep,
      clock=clock,
    )

  def ask(self, questions: Sequence[Question]) -> list[attempts.Outcome[str]]:
    """An observation for each question, or what went wrong last, in order."""
    by_key = {self._key(question): question for question in questions}
    known = self._kept.read(by_key)
    found = {key: attempts.Outcome(value=text) for key, text in known.items()}
    new = {key: q for key, q in by_key.items() if key not in known}
    if new:
      found |= self._client.run({k: self._ask(k, q) for k, q in new.items()})
    outcomes = [found[self._key(question)] for question in questions]
    with self._client.counting:
      self._tally.counts['requests'] += len(questions)
      self._tally.counts['cache_hits'] += len(questions) - len(new)
      self._tally.lost.update(o.error for o in outcomes if o.error)
    return outcomes

  def take_report(self) -> Mapping[str, Any]:
    """The counts of `endpoints.tally` since the last report."""
    with self._client.counting:
      faults = self._kept.num_faults
      self._tally.counts['cache_faults'] = faults - self._reported_faults
      self._reported_faults = faults
      return self._tally.take()

  def close(self) -> None:
    """Ends the thread; the cache is the caller's."""
    self._client.close()

  async def _ask(self, key: str, question: Question) -> attempts.Outcome[str]:
    def read(text: str | None) -> tuple[str, str]:
      observation, error = simulator_prompt.read(text)
      return observation, error or question.fault(observation)

    def call(attempt: int) -> Awaitable[Any]:
      return self._client.post(self._body(question, attempt))

    outcome = await self._client.ask(key, call, read)
    if not outcome.error:
      self._kept.write(key, outcome.value, model=self.endpoint.model)
    return outcome

  def _body(self, question: Question, attempt: int) -> dict[str, Any]:
    return {
      'model': self.endpoint.model,
      'messages': [
        {'role': 'system', 'content': question.system},
        {'role': 'user', 'content': question.prompt},
      ],
      'temperature': self.endpoint.temperature,
      'max_tokens': self.endpoint.max_tokens,
      # An answer that could not be read is not asked for again word by word.
      'seed': (question.seed + attempt) % 2**SEED_BITS,
    }

  def _key(self, question: Question) -> str:
    content = [simulator_prompt.VERSION, self._body(question, 0)]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
