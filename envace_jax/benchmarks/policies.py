"""Who is measured: a speaker per attempt, told messages in OpenAI's form.

  oracle    says what the benchmark recorded: the harness's upper bound
  noop      says nothing, once: what doing nothing earns
  endpoint  any OpenAI-compatible server, see `endpoint`

A speaker that breaks down raises `PolicyFailed`: the attempt is errored. What a
model says badly is not a breakdown; it is said, and counts.
"""

from collections.abc import Sequence
import dataclasses
import json
from typing import Protocol

from envace_jax import types
from envace_jax.envs import benchmark
from envace_jax.text import tool_calls


class PolicyFailed(Exception):
  """The policy could not be heard: `kind` says why."""

  def __init__(self, kind: str):
    super().__init__(kind)
    self.kind = kind


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
  """What was said, and what saying it cost."""

  reply: benchmark.Reply
  tokens_in: int = 0
  tokens_out: int = 0  # of the reply
  rehearsal_tokens: int = 0  # sampled privately before it


class Speaker(Protocol):
  """The policy in one attempt."""

  def ask(
    self, messages: Sequence[types.Json], tools: Sequence[types.Json]
  ) -> Answer:
    """The next reply; raises PolicyFailed. Several speakers may ask at once."""


class Policy(Protocol):
  """Makes speakers; safe to use from several threads."""

  name: str  # printed beside every score, and what a results file is for

  def begin(self, task_id: str, trial: int) -> Speaker:
    """A speaker for one attempt; raises PolicyFailed."""

  def close(self) -> None:
    """Releases what the policy holds."""


class Noop:
  """Says nothing."""

  name = 'noop'

  def begin(self, task_id: str, trial: int) -> Speaker:
    del task_id, trial
    return Script(())

  def close(self) -> None:
    pass


class Oracle:
  """Says what a benchmark knows to be right."""

  name = 'oracle'

  def __init__(self, measured: benchmark.Benchmark):
    self._benchmark = measured

  def begin(self, task_id: str, trial: int) -> Speaker:
    del trial
    replies = self._benchmark.oracle(task_id)
    if replies is None:
      raise PolicyFailed('no_oracle')
    return Script(replies)

  def close(self) -> None:
    pass


class Script:
  """Says replies in order, and then nothing."""

  def __init__(self, replies: Sequence[benchmark.Reply]):
    self._rest = iter(replies)

  def ask(
    self, messages: Sequence[types.Json], tools: Sequence[types.Json]
  ) -> Answer:
    del messages, tools
    return Answer(reply=next(self._rest, benchmark.Reply(text='')))


class Dialogue:
  """Messages in OpenAI's form, with an id for every call."""

  def __init__(self, system: str, instruction: str):
    self.messages: list[types.Json] = []
    self._ids = 0
    if system:
      self.messages.append({'role': 'system', 'content': system})
    self.messages.append({'role': 'user', 'content': instruction})

  def add(
    self, reply: benchmark.Reply, heard: Sequence[benchmark.Message]
  ) -> None:
    """A reply, and what it was answered with: tool messages by their order.

    Calls that nobody answered, as where an unreadable one ends a turn, are left
    out: servers refuse a conversation with open calls.
    """
    answered = sum(message.role == 'tool' for message in heard)
    calls = [self._call(action) for action in reply.calls[:answered]]
    said = {'role': 'assistant', 'content': reply.text}
    self.messages.append({**said, 'tool_calls': calls} if calls else said)
    ids = iter([call['id'] for call in calls])
    for message in heard:
      said = {'role': message.role, 'content': message.text}
      if message.role == 'tool':
        said['tool_call_id'] = next(ids, '')
      self.messages.append(said)

  def _call(self, action: types.ToolCall | types.ParseError) -> types.Json:
    self._ids += 1
    if isinstance(action, types.ToolCall):
      name, arguments = action.name, action.arguments
    else:  # there is no form for a call that could not be read
      name, arguments = 'unreadable_call', {'error': action.kind}
    function = {'name': name, 'arguments': tool_calls.dumps(arguments)}
    return {'id': f'call_{self._ids}', 'type': 'function', 'function': function}


def reply_of(message: types.Json) -> benchmark.Reply:
  """An assistant's message in OpenAI's form; bad calls are `ParseError`s."""
  text = message.get('content')
  calls = message.get('tool_calls') or ()
  return benchmark.Reply(
    text=text if isinstance(text, str) else '',
    calls=tuple(map(_read, calls)) if isinstance(calls, list) else (),
  )


def rehearsals(asked: types.Json) -> str:
  """What is asked of private rehearsals, as part of a policy's name."""
  return f', rehearsal {json.dumps(asked, sort_keys=True)}' if asked else ''


def _read(call: object) -> types.ToolCall | types.ParseError:
  function = call.get('function') if isinstance(call, dict) else None
  if not isinstance(function, dict):
    return types.ParseError(kind='not_object', detail='a call has a function')
  arguments = function.get('arguments')
  if isinstance(arguments, dict):  # some servers send JSON for JSON's text
    arguments = json.dumps(arguments)
  value = tool_calls.parse_json(arguments or '{}')
  if isinstance(value, types.ParseError):
    return value
  return tool_calls.call_of({'name': function.get('name'), 'arguments': value})
