"""Completions in OpenAI's shapes, whole and in chunks."""

import asyncio
from collections.abc import AsyncIterator
import concurrent.futures
import json
import secrets
import time

import numpy as np

from envace_jax.serving import completion, jobs, replies, wire
from envace_jax.text import template as templates
from envace_jax.text import tool_calls

_LEAST = -9999.0  # JSON has no infinity


def head(kind: str, model: str) -> dict:
  prefix = 'chatcmpl-' if kind.startswith('chat') else 'cmpl-'
  return {
    'id': prefix + secrets.token_hex(12),
    'object': kind,
    'created': int(time.time()),
    'model': model,
  }


def error(refused: jobs.Refused) -> dict:
  """An error in OpenAI's shape."""
  kinds = {401: 'authentication_error', 429: 'rate_limit_error'}
  kind = 'invalid_request_error' if refused.status < 500 else 'server_error'
  return {
    'error': {
      'message': str(refused),
      'type': kinds.get(refused.status, kind),
      'param': refused.param,
      'code': refused.code,
    }
  }


def usage(done: completion.Completion) -> dict:
  prompt, said = len(done.prompt_ids), done.completion_tokens
  return {
    'prompt_tokens': prompt,
    'completion_tokens': said,
    'total_tokens': prompt + said,
    'prompt_tokens_details': {'cached_tokens': done.cached_tokens},
    'completion_tokens_details': {'rehearsal_tokens': done.rehearsal_tokens},
  }


def chat_completion(
  done: completion.Completion,
  request: wire.ChatRequest,
  model: str,
  template: templates.Template,
) -> dict:
  choices = []
  for i, choice in enumerate(done.choices):
    reply = choice.reply
    message = {
      'role': 'assistant',
      'content': reply.content if reply.content or not reply.calls else None,
      'refusal': None,
    }
    if reply.thought:
      message['reasoning_content'] = reply.thought
    if reply.calls:
      message['tool_calls'] = _calls(reply)
    choices.append(
      {
        'index': i,
        'message': message,
        'logprobs': chat_logprobs(choice, template)
        if request.logprobs
        else None,
        'finish_reason': choice.finish,
      }
    )
  named = head('chat.completion', model)
  return {**named, 'choices': choices, 'usage': usage(done)}


def chat_logprobs(
  choice: completion.Choice, template: templates.Template
) -> dict:
  tokens, content = choice.tokens, []

  def named(i, logprob) -> dict:
    text = template.literal([int(i)])
    return {
      'token': text,
      'logprob': _finite(logprob),
      'bytes': list(text.encode()),
    }

  for t in range(choice.shown):
    tops = zip(tokens.top_ids[t], tokens.top_logprobs[t], strict=True)
    content.append(
      named(tokens.ids[t], tokens.logprobs[t])
      | {'top_logprobs': [named(i, lp) for i, lp in tops]}
    )
  return {'content': content, 'refusal': None}


def completion_choice(
  index: int,
  choice: completion.Choice,
  request: wire.CompletionRequest,
  template: templates.Template,
  prompt: jobs.Tokens | None,
) -> dict:
  """One choice of /v1/completions; `prompt` is scored where it is echoed."""
  text = choice.reply.content
  shown = jobs.Tokens(
    ids=choice.tokens.ids[: choice.shown],
    logprobs=choice.tokens.logprobs[: choice.shown],
    top_ids=choice.tokens.top_ids[: choice.shown],
    top_logprobs=choice.tokens.top_logprobs[: choice.shown],
  )
  parts = [shown] if len(shown.ids) or prompt is None else []
  if prompt is not None:
    text = template.literal(prompt.ids) + text
    parts.insert(0, prompt)
  logprobs = None
  if request.logprobs is not None:
    logprobs = _completion_logprobs(
      jobs.concatenate(parts), template, has_prompt=prompt is not None
    )
  return {
    'index': index,
    'text': text,
    'logprobs': logprobs,
    'finish_reason': choice.finish,
  }


def _completion_logprobs(
  tokens: jobs.Tokens, template: templates.Template, *, has_prompt: bool
) -> dict:
  texts = [template.literal([int(i)]) for i in tokens.ids]
  offsets = np.cumsum([0, *map(len, texts)])[:-1]
  values: list = [_finite(x) for x in tokens.logprobs]
  tops: list = [
    {
      template.literal([int(i)]): _finite(logprob)
      for i, logprob in zip(ids, logprobs, strict=True)
    }
    for ids, logprobs in zip(tokens.top_ids, tokens.top_logprobs, strict=True)
  ]
  if has_prompt:  # nothing stands before the first token
    values[0] = tops[0] = None
  return {
    'tokens': texts,
    'token_logprobs': values,
    'top_logprobs': tops,
    'text_offset': offsets.tolist(),
  }


class Stream:
  """The parts of a reply as they come, in order and without repeating any."""

  def __init__(self, loop: asyncio.AbstractEventLoop):
    self._loop = loop
    self._queue: asyncio.Queue = asyncio.Queue()

  def listen(self, index: int, so_far: replies.Reply) -> None:
    """Called by the engine's thread."""
    self._loop.call_soon_threadsafe(self._queue.put_nowait, (index, so_far))

  def finish(self, done: concurrent.futures.Future) -> None:
    self._loop.call_soon_threadsafe(self._queue.put_nowait, done)

  async def deltas(
    self, n: int
  ) -> AsyncIterator[tuple[int, str, str] | completion.Completion]:
    """(choice, more thought, more content), and then all of it.

    Raises:
      Refused: the answer was broken off.
    """
    sent = [['', ''] for _ in range(n)]
    while True:
      item = await self._queue.get()
      if isinstance(item, concurrent.futures.Future):
        done = item.result()
        seen = [(i, choice.reply) for i, choice in enumerate(done.choices)]
      else:
        done, seen = None, [item]
      for i, reply in seen:
        more = []
        for k, whole in enumerate((reply.thought, reply.content)):
          more.append(whole[len(sent[i][k]) :])
          sent[i][k] = max(sent[i][k], whole, key=len)
        if any(more):
          yield i, more[0], more[1]
      if done is not None:
        yield done
        return


async def chat_chunks(
  stream: Stream,
  request: wire.ChatRequest,
  model: str,
  template: templates.Template,
) -> AsyncIterator[dict]:
  """A reply in chunks; log-probs and calls come whole, when all are known."""
  named = head('chat.completion.chunk', model)
  n = request.settings.n

  def chunk(i, delta, finish=None, logprobs=None):
    one = {
      'index': i,
      'delta': delta,
      'logprobs': logprobs,
      'finish_reason': finish,
    }
    return {**named, 'choices': [one]}

  for i in range(n):
    yield chunk(i, {'role': 'assistant', 'content': ''})
  async for item in stream.deltas(n):
    if isinstance(item, completion.Completion):
      break
    i, thought, content = item
    delta = {'reasoning_content': thought} if thought else {}
    yield chunk(i, delta | ({'content': content} if content else {}))
  for i, choice in enumerate(item.choices):
    if choice.reply.calls:
      numbered = [
        {'index': k, **call} for k, call in enumerate(_calls(choice.reply))
      ]
      yield chunk(i, {'tool_calls': numbered})
    logprobs = chat_logprobs(choice, template) if request.logprobs else None
    yield chunk(i, {}, choice.finish, logprobs)
  if request.include_usage:
    yield {**named, 'choices': [], 'usage': usage(item)}


async def completion_chunks(
  stream: Stream,
  request: wire.CompletionRequest,
  model: str,
  template: templates.Template,
) -> AsyncIterator[dict]:
  """A text in chunks; log-probs come whole, in the last one."""
  named = head('text_completion', model)
  async for item in stream.deltas(request.settings.n):
    if isinstance(item, completion.Completion):
      break
    i, _, content = item
    one = {'index': i, 'text': content, 'logprobs': None, 'finish_reason': None}
    yield {**named, 'choices': [one]}
  for i, choice in enumerate(item.choices):
    last = completion_choice(i, choice, request, template, None)
    yield {**named, 'choices': [last | {'text': ''}]}
  if request.include_usage:
    yield {**named, 'choices': [], 'usage': usage(item)}


def event(value: dict) -> str:
  """One server-sent event."""
  return f'data: {json.dumps(value)}\n\n'


def _calls(reply: replies.Reply) -> list[dict]:
  return [
    {
      'id': 'call_' + secrets.token_hex(12),
      'type': 'function',
      'function': {
        'name': call.name,
        'arguments': tool_calls.dumps(call.arguments),
      },
    }
    for call in reply.calls
  ]


def _finite(logprob) -> float:
  return max(float(logprob), _LEAST)
