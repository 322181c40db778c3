"""Server-sent events of an answer, for as long as somebody listens.

A client may go away before the first event is made. Whatever ends the response,
what is still asked of the engine for it is given up.
"""

import asyncio
from collections.abc import AsyncIterator
import concurrent.futures

from absl import logging

from envace_jax.serving import answers, jobs
from envace_jax.serving import pending as waiting


def response(
  stream: answers.Stream,
  pending: waiting.Pending,
  chunks: AsyncIterator[dict],
):
  """The response to a request; `pending` is told of the client's going."""
  from starlette import responses

  pending.done.add_done_callback(stream.finish)

  class Events(responses.StreamingResponse):
    async def __call__(self, scope, receive, send) -> None:
      gone = asyncio.ensure_future(_follow(receive, pending))
      try:
        await super().__call__(scope, receive, send)
      finally:
        gone.cancel()
        if not pending.done.done():
          pending.cancel()

  return Events(
    _events(chunks),
    media_type='text/event-stream',
    headers={'Cache-Control': 'no-cache', 'X-Accel-Buffering': 'no'},
  )


async def disconnected(receive) -> None:
  """Waits until the client is gone."""
  while (await receive())['type'] != 'http.disconnect':
    pass


async def _follow(receive, pending: waiting.Pending) -> None:
  await disconnected(receive)
  pending.cancel()


async def _events(chunks: AsyncIterator[dict]) -> AsyncIterator[str]:
  try:
    async for chunk in chunks:
      yield answers.event(chunk)
    yield 'data: [DONE]\n\n'
  except concurrent.futures.CancelledError:
    return  # nobody listens
  except jobs.Refused as refused:
    yield answers.event(answers.error(refused))
  except Exception:
    logging.exception('a stream failed')
    failed = jobs.Refused(500, 'internal_error', 'the server failed')
    yield answers.event(answers.error(failed))
