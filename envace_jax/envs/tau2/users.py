"""Who talks to the agent in τ²-Bench, where it is not in solo mode.

The user is a model, told what the benchmark's own simulator is told: its
guidelines, the task's scenario, and the conversation with the roles swapped, so
that the user is the assistant of its own prompt. It ends the conversation with
one of three marks. In telecom it also calls tools of its own, and the agent
does not see those.

A scripted user stands in for a model where the benchmark itself is tested.
Scores with it are not scores of τ²-Bench.
"""

from collections.abc import Awaitable, Sequence
import dataclasses
import hashlib
import json
from typing import Any, Protocol

from envace_jax import types
from envace_jax.endpoints import attempts, client
from envace_jax.endpoints import tally as tallies
from envace_jax.envs import benchmark

STOP = '###STOP###'
MARKS = (STOP, '###TRANSFER###', '###OUT-OF-SCOPE###')
# Before a call, in a text to `ScriptedUser`.
PLEASE = 'Please call '


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
  """What a user did: said something, or called tools of their own."""

  text: str = ''
  calls: Sequence[types.ToolCall] = ()


class User(Protocol):
  """Keeps nothing between two turns, so attempts may share one."""

  name: str  # as printed beside a score

  def respond(
    self, messages: Sequence[types.Json], tools: Sequence[types.Json]
  ) -> Turn:
    """The next turn of a conversation whose 'assistant' is the user.

    Raises:
      AttemptFailed: there is none to be had.
    """


def is_stop(text: str) -> bool:
  """Whether a text ends the conversation."""
  return any(mark in text for mark in MARKS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Endpoint:
  """The model that plays the user, and how it is asked."""

  base_url: str
  model: str
  api_key_env: str = ''  # name of the variable with the key; '' for no key
  temperature: float = 0.0
  max_tokens: int = 2048  # of one turn
  concurrency: int = 16  # calls in flight
  seed: int = 300

  def __post_init__(self):
    if not self.model:
      raise ValueError("model=''; name the model that plays the user")


class EndpointUser:
  """A model behind an OpenAI-compatible endpoint. Safe in several threads."""

  def __init__(self, endpoint: Endpoint, policy: attempts.Policy):
    self.name, self._endpoint = endpoint.model, endpoint
    self._tally = tallies.Tally()
    self._client = client.Client(
      client.Server(
        base_url=endpoint.base_url,
        api_key_env=endpoint.api_key_env,
        concurrency=endpoint.concurrency,
        batch_deadline_s=policy.deadline_s + 60,
      ),
      policy,
      self._tally,
      name='user',
    )

  def respond(
    self, messages: Sequence[types.Json], tools: Sequence[types.Json]
  ) -> Turn:
    body: dict[str, Any] = {
      'model': self._endpoint.model,
      'messages': list(messages),
      'temperature': self._endpoint.temperature,
      'max_tokens': self._endpoint.max_tokens,
      'seed': self._endpoint.seed,
    }
    if tools:
      body |= {'tools': list(tools), 'tool_choice': 'auto'}
    key = hashlib.sha256(json.dumps(body).encode()).hexdigest()

    def call(attempt: int) -> Awaitable[Any]:
      # An attempt that only repeats the question gets the same bad answer.
      return self._post(body | {'seed': self._endpoint.seed + attempt})

    asked = self._client.ask(key, call, _turn)
    outcome = self._client.run({key: asked})[key]
    with self._client.counting:
      self._tally.counts['requests'] += 1
      if outcome.error:
        self._tally.lost[outcome.error] += 1
    if outcome.error:
      raise benchmark.AttemptFailed(f'user: {outcome.error}')
    return outcome.value

  def take_report(self) -> types.Json:
    """The counts of `endpoints.tally` since the last report."""
    with self._client.counting:
      return self._tally.take()

  def close(self) -> None:
    self._client.close()

  async def _post(self, body: types.Json) -> Any:
    return _with_calls(await self._client.post(body))


class ScriptedUser:
  """Opens, does what `please` asks for, reports that, and otherwise stops."""

  name = 'scripted'

  def __init__(self, opening: str):
    self._opening = opening

  def respond(
    self, messages: Sequence[types.Json], tools: Sequence[types.Json]
  ) -> Turn:
    del tools
    mine = [m['content'] for m in messages if m['role'] == 'assistant']
    if self._opening not in mine:
      return Turn(text=self._opening)
    last = messages[-1]
    if last['role'] == 'tool':
      return Turn(text=last['content'])
    _, asked, call = last['content'].partition(PLEASE)
    if not asked:
      return Turn(text=STOP)
    try:
      return Turn(calls=(types.ToolCall(**json.loads(call)),))
    except (TypeError, ValueError):
      return Turn(text='I did not understand what to call.')


def please(call: types.ToolCall) -> str:
  """The text that makes a scripted user call a tool."""
  payload = {'name': call.name, 'arguments': call.arguments}
  return PLEASE + json.dumps(payload, ensure_ascii=False)


def _with_calls(completion: Any) -> Any:
  """A completion whose text is its message as JSON: the calls are needed too.

  What is no completion stays as it is, to be refused where it is read.
  """
  try:
    (choice, *_) = completion['choices']
    message = choice['message']
    spoken = {key: message.get(key) for key in ('content', 'tool_calls')}
    return completion | {
      'choices': [choice | {'message': {'content': json.dumps(spoken)}}]
    }
  except (AttributeError, KeyError, TypeError, ValueError):
    return completion


def _turn(text: str | None) -> tuple[Turn, str]:
  """Reads a message; what is wrong with it has a name."""
  nothing = Turn()
  try:
    message = json.loads(text or '')
    content, calls = message['content'], message['tool_calls'] or ()
    read = tuple(
      types.ToolCall(
        name=call['function']['name'],
        arguments=json.loads(call['function']['arguments'] or '{}'),
      )
      for call in calls
    )
  except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
    return nothing, 'bad_call' if text else 'empty'
  if not all(
    isinstance(call.name, str) and isinstance(call.arguments, dict)
    for call in read
  ):
    return nothing, 'bad_call'
  if not isinstance(content, str | None):
    return nothing, 'bad_body'
  if not read and not (content or '').strip():
    return nothing, 'empty'
  return Turn(text=content or '', calls=read), ''
