"""OpenAI's request bodies, read strictly.

What would change the answer and is not supported is refused by name; a field
that nobody here knows is refused too, since it might. Null is the same as
absent. Fields that only label a request are allowed and unused.

Ours are `top_k`, `deadline_s`, and in chats `rehearsal`: how the conversation
is rehearsed privately before the reply (`private.Settings`), where that is to
differ from what the server does by itself.

  "rehearsal": {"attempts": 4, "mode": "parallel", "max_tokens": 1024}
"""

from collections.abc import Sequence
import dataclasses
import json
from typing import Any

from envace_jax import types
from envace_jax.serving import (
  chat,
  fields,
  jobs,
  private,
  programs,
  rehearsal_field,
)

MAX_CHOICES = 16
_LABELS = frozenset(
  ('user', 'metadata', 'store', 'service_tier', 'safety_identifier',
   'prompt_cache_key')
)  # fmt: skip
# Allowed where they ask for nothing.
_NEUTRAL = {
  'frequency_penalty': (0,),
  'presence_penalty': (0,),
  'logit_bias': ({},),
  'response_format': ({'type': 'text'},),
  'suffix': ('',),
  'best_of': (1,),
  'modalities': (['text'],),
}
_SHARED = frozenset(
  ('model', 'stream', 'stream_options', 'stop', 'seed', 'n', 'max_tokens',
   'temperature', 'top_p', 'top_k', 'logprobs', 'deadline_s')
)  # fmt: skip
_CHAT = _SHARED | {
  'messages', 'tools', 'tool_choice', 'parallel_tool_calls', 'top_logprobs',
  'max_completion_tokens', 'rehearsal',
}  # fmt: skip
_COMPLETION = _SHARED | {'prompt', 'echo'}
_INT64 = 1 << 63


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatRequest:
  messages: Sequence[types.Json]
  tools: Sequence[types.Json]
  settings: chat.Settings
  stream: bool
  include_usage: bool
  logprobs: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletionRequest:
  prompts: Sequence[str | list[int]]
  settings: chat.Settings
  stream: bool
  include_usage: bool
  logprobs: int | None
  echo: bool


def parse(body: bytes) -> dict[str, Any]:
  """A body as a JSON object, without its nulls.

  Raises:
    Refused: it is none.
  """

  def reject(name: str):
    raise ValueError(f'{name} is not JSON')

  try:
    value = json.loads(body, parse_constant=reject)
  except (ValueError, RecursionError) as error:
    raise jobs.Refused(
      400, 'invalid_json', f'the body is not valid JSON ({error})'
    ) from error
  if not isinstance(value, dict):
    raise jobs.Refused(400, 'invalid_json', 'the body must be a JSON object')
  for key, item in value.items():
    try:
      json.dumps([key, item], ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # JSON can spell what is no text
      raise jobs.Refused(
        400,
        'invalid_value',
        f'{key!a} holds half a surrogate pair, which is no character',
        ascii(key)[1:-1][:100],
      ) from error
  return {key: item for key, item in value.items() if item is not None}


def chat_request(
  body: dict[str, Any],
  model: str,
  rehearsal: private.Settings = private.Settings(),  # noqa: B008 (it is frozen)
) -> ChatRequest:
  """A request for /v1/chat/completions; `rehearsal` is what servers do alone.

  Raises:
    Refused: a field is unknown, unsupported or wrong.
  """
  _known(body, _CHAT, model)
  logprobs = fields.boolean(body, 'logprobs')
  top = fields.integer(body, 'top_logprobs', 0, 0, programs.TOP)
  if top and not logprobs:
    raise fields.wrong('top_logprobs', 'top_logprobs needs logprobs=true')
  limits = [
    fields.integer(body, name, None, 1, _INT64)
    for name in ('max_completion_tokens', 'max_tokens')
  ]
  choice, named = _tool_choice(body.get('tool_choice', 'auto'))
  stream, include_usage = _stream(body)
  return ChatRequest(
    messages=body.get('messages', ()),
    tools=_tools(body.get('tools', [])),
    settings=_settings(
      body,
      max_tokens=limits[0] if limits[0] is not None else limits[1],
      top=top,
      tool_choice=choice,
      named=named,
      parallel=fields.boolean(body, 'parallel_tool_calls', None),
      rehearsal=rehearsal_field.read(body.get('rehearsal'), rehearsal),
    ),
    stream=stream,
    include_usage=include_usage,
    logprobs=logprobs,
  )


def completion_request(body: dict[str, Any], model: str) -> CompletionRequest:
  """A request for /v1/completions.

  Raises:
    Refused: as `chat_request`.
  """
  _known(body, _COMPLETION, model)
  logprobs = fields.integer(body, 'logprobs', None, 0, programs.TOP)
  stream, include_usage = _stream(body)
  echo = fields.boolean(body, 'echo')
  if stream and echo:
    raise fields.wrong('echo', 'echo and stream exclude each other')
  return CompletionRequest(
    prompts=_prompts(body.get('prompt')),
    settings=_settings(
      body,
      max_tokens=fields.integer(
        body, 'max_tokens', 16, 0 if echo else 1, _INT64
      ),
      top=logprobs or 0,
      tool_choice='none',
      named=None,
      parallel=None,
    ),
    stream=stream,
    include_usage=include_usage,
    logprobs=logprobs,
    echo=echo,
  )


def _known(body, names: frozenset[str], model: str) -> None:
  for name, value in body.items():
    if name in names or name in _LABELS:
      continue
    if name in _NEUTRAL and value in _NEUTRAL[name]:
      continue
    raise jobs.Refused(
      400,
      'unsupported_parameter',
      f'{name} is not supported here and might change the answer; leave it out',
      name[:100],
    )
  if not isinstance(body.get('model'), str):
    raise fields.wrong('model', f'model must be {model!r}')
  if body['model'] != model:
    raise jobs.Refused(
      404,
      'model_not_found',
      f'the model {body["model"][:100]!r} does not exist; {model!r} does',
      'model',
    )


def _settings(
  body, *, max_tokens, top, tool_choice, named, parallel, rehearsal=None
) -> chat.Settings:
  return chat.Settings(
    sampling=jobs.Sampling(
      temperature=fields.number(body, 'temperature', 1.0, 0, 2),
      top_p=fields.number(body, 'top_p', 1.0, 1e-6, 1),
      top_k=fields.integer(body, 'top_k', 0, 0, 1 << 30),
      max_tokens=max_tokens,
      seed=fields.integer(body, 'seed', None, -_INT64, _INT64 - 1),
      top=top,
    ),
    n=fields.integer(body, 'n', 1, 1, MAX_CHOICES),
    stop=_stop(body.get('stop', ())),
    tool_choice=tool_choice,
    named=named,
    parallel=parallel,
    deadline_s=fields.number(body, 'deadline_s', None, 1e-3, 86400),
    rehearsal=rehearsal,
  )


def _stream(body) -> tuple[bool, bool]:
  stream, options = (
    fields.boolean(body, 'stream'),
    body.get('stream_options', {}),
  )
  if not isinstance(options, dict) or set(options) - {
    'include_usage',
    'include_obfuscation',
  }:
    raise fields.wrong(
      'stream_options', 'stream_options may have include_usage'
    )
  if options and not stream:
    raise fields.wrong('stream_options', 'stream_options needs stream=true')
  return stream, options.get('include_usage') is True


def _stop(value) -> tuple[str, ...]:
  stops = [value] if isinstance(value, str) else value
  if not isinstance(stops, list | tuple) or len(stops) > 4:
    raise fields.wrong('stop', 'stop must be a string, or at most 4 of them')
  if not all(isinstance(stop, str) and stop for stop in stops):
    raise fields.wrong('stop', 'stop must be strings that are not empty')
  return tuple(stops)


def _tool_choice(value) -> tuple[str, str | None]:
  if value in ('none', 'auto', 'required'):
    return value, None
  if isinstance(value, dict) and value.get('type') == 'function':
    function = value.get('function')
    name = function.get('name') if isinstance(function, dict) else None
    if isinstance(name, str):
      return 'named', name
  raise fields.wrong(
    'tool_choice',
    "tool_choice must be 'none', 'auto', 'required' or name a function",
  )


def _tools(value) -> tuple[types.Json, ...]:
  if not isinstance(value, list):
    raise fields.wrong('tools', 'tools must be a list')
  for i, tool in enumerate(value):
    function = tool.get('function') if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get('type') != 'function':
      raise fields.wrong('tools', f'tools[{i}] must be of type function')
    name, parameters = function.get('name'), function.get('parameters', {})
    if not isinstance(name, str) or not name:
      raise fields.wrong('tools', f'tools[{i}].function.name must be a string')
    if not isinstance(parameters, dict | None):
      raise fields.wrong(
        'tools', f'tools[{i}].function.parameters must be an object'
      )
  return tuple(value)


def _prompts(value) -> list[str | list[int]]:
  is_ids = lambda x: isinstance(x, list) and all(type(i) is int for i in x)
  prompts = [value] if isinstance(value, str) or is_ids(value) else value
  if not isinstance(prompts, list) or not 1 <= len(prompts) <= MAX_CHOICES:
    raise fields.wrong(
      'prompt', f'prompt must be 1 to {MAX_CHOICES} texts or ids'
    )
  if not all((isinstance(p, str) or is_ids(p)) and p for p in prompts):
    raise fields.wrong(
      'prompt', 'a prompt must be a text or ids, and not empty'
    )
  return prompts
