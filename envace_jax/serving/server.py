"""OpenAI's HTTP interface over a `chat.Service`.

  POST /v1/chat/completions  /v1/completions      GET /v1/models
  GET  /health  /metrics

The network is asyncio's, the device the engine's thread; what passes between
them are futures, and tokens through `answers.Stream`. A client that goes away
takes its request with it. Every error is an OpenAI error object.
"""

import asyncio
import contextlib
import dataclasses
import functools
import hmac
import json

from absl import logging
import numpy as np

from envace_jax import errors
from envace_jax.serving import answers, chat, completion, jobs, streaming, wire
from envace_jax.text import tokenizer as tokenizers

RETRY_AFTER_S = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
  """What a server is told."""

  model: str  # the name that clients ask for
  api_key: str = ''  # '' for none
  max_body_bytes: int = 8 << 20


def app(
  service: chat.Service, tokenizer: tokenizers.Tokenizer, options: Options
):
  """The ASGI application; its shutdown waits for what is in flight.

  Raises:
    UserError: FastAPI is not installed.
  """
  try:
    import fastapi
    from starlette import exceptions
  except ImportError as e:
    raise errors.UserError(
      "a server needs FastAPI and uvicorn; pip install 'envace_jax[serve]'"
    ) from e
  handlers = _Handlers(service, tokenizer, options)

  @contextlib.asynccontextmanager
  async def lifespan(_):
    yield
    await asyncio.to_thread(service.engine.close)

  made = fastapi.FastAPI(
    lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None
  )
  add = functools.partial(made.add_route, include_in_schema=False)
  add('/v1/chat/completions', handlers.guard(handlers.chat), ['POST'])
  add('/v1/completions', handlers.guard(handlers.completions), ['POST'])
  add('/v1/models', handlers.guard(handlers.models), ['GET'])
  add('/v1/models/{name:path}', handlers.guard(handlers.model), ['GET'])
  add('/health', handlers.health, ['GET'])
  add('/metrics', handlers.metrics, ['GET'])

  async def unrouted(_, error):
    code = {404: 'not_found', 405: 'method_not_allowed'}
    return _refusal(
      jobs.Refused(
        error.status_code,
        code.get(error.status_code, 'invalid_request'),
        f'{error.detail}',
      )
    )

  made.add_exception_handler(exceptions.HTTPException, unrouted)
  return made


class _Handlers:
  """One method for each path."""

  def __init__(self, service, tokenizer, options):
    self._service, self._tokenizer = service, tokenizer
    self._options = options
    self._template = service.template

  def guard(self, handler):
    """A handler that only friends reach, and whose every error has a shape."""

    @functools.wraps(handler)
    async def guarded(request):
      try:
        self._authorise(request)
        return await handler(request)
      except jobs.Refused as refused:
        return _refusal(refused)
      except Exception:
        logging.exception('a request failed')
        return _refusal(
          jobs.Refused(500, 'internal_error', 'the server failed')
        )

    return guarded

  async def chat(self, request):
    body = wire.parse(await self._body(request))
    asked = wire.chat_request(
      body, self._options.model, self._service.rehearsal
    )
    stream = None
    if asked.stream:
      stream = answers.Stream(asyncio.get_running_loop())
    pending = await asyncio.to_thread(
      self._service.start,
      asked.messages,
      asked.tools,
      asked.settings,
      stream and stream.listen,
    )
    shapes = (asked, self._options.model, self._template)
    if stream is not None:
      chunks = answers.chat_chunks(stream, *shapes)
      return streaming.response(stream, pending, chunks)
    done = await _wait(request, [pending])
    return _json(answers.chat_completion(done[0], *shapes))

  async def completions(self, request):
    body = wire.parse(await self._body(request))
    asked = wire.completion_request(body, self._options.model)
    prompts = [self._ids(prompt) for prompt in asked.prompts]
    if asked.stream:
      if len(prompts) > 1:
        raise jobs.Refused(
          400, 'invalid_value', 'stream one prompt at a time', 'prompt'
        )
      stream = answers.Stream(asyncio.get_running_loop())
      pending = self._service.complete(
        prompts[0], asked.settings, stream.listen
      )
      chunks = answers.completion_chunks(
        stream, asked, self._options.model, self._template
      )
      return streaming.response(stream, pending, chunks)
    group = []
    try:
      for prompt in prompts:
        group.append(self._service.complete(prompt, asked.settings))
    except jobs.Refused:
      for pending in group:
        pending.cancel()
      raise
    done = await _wait(request, group)
    choices = []
    for one in done:
      scored = None
      if asked.echo:
        scored = await asyncio.to_thread(
          self._service.engine.score, one.prompt_ids, asked.logprobs or 0
        )
      for choice in one.choices:
        choices.append(
          answers.completion_choice(
            len(choices), choice, asked, self._template, scored
          )
        )
    named = answers.head('text_completion', self._options.model)
    total = _sum([answers.usage(one) for one in done])
    return _json({**named, 'choices': choices, 'usage': total})

  async def models(self, request):
    del request
    return _json({'object': 'list', 'data': [self._model()]})

  async def model(self, request):
    name = request.path_params['name']
    if name != self._options.model:
      raise jobs.Refused(
        404, 'model_not_found', f'{self._options.model!r} is served here'
      )
    return _json(self._model())

  async def health(self, request):
    del request
    alive = self._service.engine.is_alive
    status = 'ok' if alive else 'down'
    return _json({'status': status}, 200 if alive else 503)

  async def metrics(self, request):
    del request
    from starlette import responses

    motor = self._service.engine
    lines = []
    for name, value in dataclasses.asdict(motor.counts).items():
      lines += [f'# TYPE envace_{name}_total counter',
                f'envace_{name}_total {value}']  # fmt: skip
    for name, value in (
      ('waiting', motor.waiting),
      ('running', motor.running),
      ('rows', motor.capacity.rows),
      ('queue', motor.capacity.queue),
    ):
      lines += [f'# TYPE envace_{name} gauge', f'envace_{name} {value}']
    return responses.PlainTextResponse(
      '\n'.join(lines) + '\n', media_type='text/plain; version=0.0.4'
    )

  def _model(self) -> dict:
    return {
      'id': self._options.model,
      'object': 'model',
      'created': 0,
      'owned_by': 'envace_jax',
      'max_model_len': self._service.engine.capacity.context,
    }

  def _authorise(self, request) -> None:
    key = self._options.api_key
    if not key:
      return
    given = request.headers.get('authorization', '')
    if not hmac.compare_digest(given.encode(), f'Bearer {key}'.encode()):
      raise jobs.Refused(
        401, 'invalid_api_key', 'give the API key as a bearer token'
      )

  async def _body(self, request) -> bytes:
    most, parts, size = self._options.max_body_bytes, [], 0
    async for part in request.stream():
      size += len(part)
      if size > most:
        raise jobs.Refused(
          413, 'request_too_large', f'a body may have {most} bytes'
        )
      parts.append(part)
    return b''.join(parts)

  def _ids(self, prompt):
    if isinstance(prompt, str):
      prompt = self._tokenizer.encode(prompt)
    if not len(prompt):
      raise jobs.Refused(
        400, 'invalid_value', 'a prompt must have at least a token', 'prompt'
      )
    # As Python's integers: a client's may have any size.
    if not all(0 <= i < self._tokenizer.vocab_size for i in prompt):
      raise jobs.Refused(
        400,
        'invalid_value',
        f'token ids must be in [0, {self._tokenizer.vocab_size - 1}]',
        'prompt',
      )
    return np.asarray(prompt, np.int32)


async def _wait(request, group) -> list[completion.Completion]:
  """All completions; given up once the client is gone."""
  wanted = asyncio.gather(*(asyncio.wrap_future(p.done) for p in group))
  gone = asyncio.ensure_future(streaming.disconnected(request.receive))
  try:
    await asyncio.wait({wanted, gone}, return_when=asyncio.FIRST_COMPLETED)
    if not wanted.done():
      raise jobs.Refused(499, 'client_closed_request', 'the client is gone')
    return wanted.result()
  finally:
    gone.cancel()
    wanted.cancel()
    # Else it is logged that nobody looked at what was given up.
    wanted.add_done_callback(lambda over: over.cancelled() or over.exception())
    for pending in group:
      if not pending.done.done():
        pending.cancel()


def _json(value: dict, status: int = 200, headers: dict | None = None):
  from starlette import responses

  return responses.Response(
    json.dumps(value, allow_nan=False),
    status_code=status,
    media_type='application/json',
    headers=headers,
  )


def _refusal(refused: jobs.Refused):
  headers = None
  if refused.status in (429, 503):
    headers = {'Retry-After': str(RETRY_AFTER_S)}
  return _json(answers.error(refused), refused.status, headers)


def _sum(usages: list[dict]) -> dict:
  """Numbers added up, level by level."""
  return {
    key: _sum([usage[key] for usage in usages])
    if isinstance(value, dict)
    else sum(usage[key] for usage in usages)
    for key, value in usages[0].items()
  }
