"""A policy behind an OpenAI-compatible endpoint, asked through `endpoints`.

Tries again what is the server's fault, and counts it. A reply that was cut at
its longest length is the policy's own: it is taken as it stands, and a call
that was cut is unreadable. Each request has a seed of its own, from the task,
the trial and the number of the step, so that a rerun asks the same.

A server that rehearses privately (`envace serve`) is asked to by an extension
field, and says in every reply what that cost. One that does not say has not
rehearsed, whatever it ignored: the attempt is errored, as `no_rehearsal`. So it
is where a server rehearses by itself and was not asked to, as
`unasked_rehearsal`: the policy that is named did not do that.
"""

from collections.abc import Sequence
import dataclasses
import hashlib

from envace_jax import types
from envace_jax.benchmarks import policies
from envace_jax.endpoints import attempts, client
from envace_jax.endpoints import tally as tallies
from envace_jax.envs import benchmark


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
  """How the model is asked; part of the policy's name."""

  model: str
  temperature: float = 0.0
  max_tokens: int = 1024  # one reply
  seed: int = 0
  rehearsal: types.Json = dataclasses.field(default_factory=dict)


class Endpoint:
  """The policy; raises `errors.UserError` without the client or the key."""

  def __init__(
    self,
    server: client.Server,
    sampling: Sampling,
    retries: attempts.Policy,
  ):
    self.name = (
      f'{sampling.model} at {server.base_url}, temperature '
      f'{sampling.temperature:g}, {sampling.max_tokens} tokens, seed '
      f'{sampling.seed}{policies.rehearsals(sampling.rehearsal)}'
    )
    self.tally = tallies.Tally()
    self.client = client.Client(server, retries, self.tally, name='policy')
    self.sampling = sampling

  def begin(self, task_id: str, trial: int) -> policies.Speaker:
    return _Speaker(self, f'{self.sampling.seed}/{task_id}/{trial}')

  def close(self) -> None:
    self.client.close()


class _Speaker:
  """One attempt's share of the client."""

  def __init__(self, policy: Endpoint, key: str):
    self._policy, self._key, self._step = policy, key, 0

  def ask(
    self, messages: Sequence[types.Json], tools: Sequence[types.Json]
  ) -> policies.Answer:
    sampling, key = self._policy.sampling, f'{self._key}/{self._step}'
    seed = request_seed(self._key, self._step)
    self._step += 1
    body = {
      'model': sampling.model,
      'messages': list(messages),
      'temperature': sampling.temperature,
      'max_tokens': sampling.max_tokens,
      'seed': seed,
    }
    if tools:  # an empty list is refused by servers
      body['tools'] = list(tools)
    rehearses = bool(tools and sampling.rehearsal)
    if rehearses:
      body['rehearsal'] = {**sampling.rehearsal, 'conversation': self._key}
    spent, said, heard = [], [], {}

    async def call(n: int):
      del n
      completion = _taken_as_it_stands(await self._policy.client.post(body))
      read = attempts.reply_of(completion)
      rehearsed = _rehearsal_tokens(completion)
      tokens = read.tokens_out - (rehearsed or 0)
      spent.append((read.tokens_in, tokens, rehearsed or 0))
      if not read.error:
        said.append(rehearsed)
        heard.update(completion['choices'][0]['message'])
      return completion

    def read(text: str | None) -> tuple[benchmark.Reply, str]:
      del text  # the calls are beside it
      return policies.reply_of(heard), ''

    asked = self._policy.client.ask(key, call, read)
    outcome = self._policy.client.run({key: asked})[key]
    if outcome.error:
      raise policies.PolicyFailed(outcome.error)
    if rehearses and said[-1] is None:
      raise policies.PolicyFailed('no_rehearsal')
    if said[-1] and not rehearses:
      raise policies.PolicyFailed('unasked_rehearsal')
    tokens_in, tokens_out, rehearsed = map(sum, zip(*spent, strict=True))
    return policies.Answer(
      reply=outcome.value,
      tokens_in=tokens_in,
      tokens_out=tokens_out,
      rehearsal_tokens=rehearsed,
    )


def request_seed(key: str, step: int) -> int:
  """The seed of an attempt's reply; `key` names policy's seed and attempt."""
  return int(hashlib.sha256(f'{key}/{step}'.encode()).hexdigest()[:7], 16)


def _rehearsal_tokens(completion: object) -> int | None:
  """What rehearsals cost; None where nothing is said of that."""
  try:
    details = completion['usage']['completion_tokens_details']
    tokens = details['rehearsal_tokens']
  except (KeyError, TypeError):
    return None
  return tokens if type(tokens) is int and tokens >= 0 else None


def _taken_as_it_stands(completion: object) -> object:
  """A completion whose first choice was cut, said to be whole."""
  try:
    choice, *rest = completion['choices']
    if choice['finish_reason'] != 'length':
      return completion
    whole = [{**choice, 'finish_reason': 'stop'}, *rest]
    return {**completion, 'choices': whole}
  except (KeyError, TypeError, ValueError):  # read elsewhere, and refused
    return completion
