"""Asks an OpenAI-compatible chat endpoint many questions at once.

At most `concurrency` calls are in flight, on an event loop in a thread of its
own; the caller blocks. What a question is, and how its answer is read, is the
caller's: judges and simulators share what a network can do to them.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
import dataclasses
import os
import threading
import time
from typing import Any, TypeVar

from absl import logging

from envace_jax import errors, types
from envace_jax.endpoints import attempts
from envace_jax.endpoints import tally as tallies

T = TypeVar('T')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Server:
  """Where an endpoint is, and how much it is asked at once."""

  base_url: str
  api_key_env: str  # name of the variable with the key; '' for no key
  concurrency: int  # calls in flight
  batch_deadline_s: float  # for all questions of one `run`

  def __post_init__(self):
    if self.concurrency < 1:
      raise ValueError(f'concurrency={self.concurrency} must be at least 1')


class Client:
  """Safe to use from several threads.

  Raises `errors.UserError` when made without the library or the key. After
  that nothing a server does is raised.
  """

  def __init__(
    self,
    server: Server,
    policy: attempts.Policy,
    tally: tallies.Tally,
    *,
    name: str,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Opens a client.

    Args:
      server: who is asked.
      policy: how often and how long, for one question.
      tally: counts what happens, under `counting` where threads meet.
      name: what the server is here, in messages.
      sleep: waits between attempts.
      clock: measures their deadline, in seconds.
    """
    self._server, self._policy, self._tally = server, policy, tally
    self._name, self._sleep, self._clock = name, sleep, clock
    self._library = _library_client(server, name)
    self._slots = asyncio.Semaphore(server.concurrency)
    self.counting = threading.Lock()
    self._loop = asyncio.new_event_loop()
    self._thread = threading.Thread(
      target=self._loop.run_forever, name=name, daemon=True
    )
    self._thread.start()

  def run(
    self, questions: Mapping[str, Coroutine[Any, Any, attempts.Outcome[T]]]
  ) -> dict[str, attempts.Outcome[T]]:
    """Blocks until all questions have an outcome, by key."""
    future = asyncio.run_coroutine_threadsafe(
      self._run_all(questions), self._loop
    )
    try:
      return future.result()
    except BaseException:  # an interrupt must not leave calls in flight
      future.cancel()
      raise

  async def ask(
    self,
    key: str,
    call: Callable[[int], Awaitable[Any]],
    read: Callable[[str | None], tuple[T, str]],
  ) -> attempts.Outcome[T]:
    """One question, in a slot of its own, in several attempts.

    Args:
      key: of the question's content; decides the jitter of waits.
      call: makes the call number `n` and returns the server's JSON.
      read: the completion's text -> (value, what is wrong with it or '').
    """

    async def attempt(n: int) -> attempts.Reply:
      return attempts.reply_of(await call(n))

    async with self._slots:
      return await attempts.ask(
        attempt,
        read,
        self._policy,
        key,
        self._tally,
        sleep=self._sleep,
        clock=self._clock,
      )

  async def post(self, body: types.Json) -> Any:
    """The JSON that the server sent for one chat completion."""
    # Past the library's typed method, which spends milliseconds of a call on
    # converting a body that is JSON already, and does not validate the answer.
    return await self._library.post(
      '/chat/completions', body=body, cast_to=object
    )

  def close(self) -> None:
    """Ends the thread."""
    if self._loop.is_closed():
      return
    asyncio.run_coroutine_threadsafe(self._library.close(), self._loop).result()
    self._loop.call_soon_threadsafe(self._loop.stop)
    self._thread.join()
    self._loop.close()

  async def _run_all(self, questions) -> dict[str, attempts.Outcome]:
    tasks = {
      key: asyncio.ensure_future(question)
      for key, question in questions.items()
    }
    try:
      await asyncio.wait(tasks.values(), timeout=self._server.batch_deadline_s)
    finally:
      for task in tasks.values():
        task.cancel()
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    return {key: self._outcome(task) for key, task in tasks.items()}

  def _outcome(self, task: asyncio.Task) -> attempts.Outcome:
    kind = 'batch_deadline'
    if not task.cancelled():
      if task.exception() is None:
        return task.result()
      kind = 'internal'  # a fault of ours; the run still goes on
      logging.error('%s: %r', self._name, task.exception())
    with self.counting:
      self._tally.errors[kind] += 1
    return attempts.Outcome(error=kind)


def _library_client(server: Server, name: str):
  """The official client, without retries of its own: they are counted here."""
  try:
    import openai
  except ImportError as e:
    raise errors.UserError(
      f"a {name} behind an endpoint needs `pip install 'envace_jax[judge]'`"
    ) from e
  key = 'none'  # local servers ask for none, the client insists on one
  if server.api_key_env:
    key = os.environ.get(server.api_key_env, '')
    if not key:
      raise errors.UserError(
        f'set the environment variable {server.api_key_env} to the key of '
        f'{server.base_url}'
      )
  return openai.AsyncOpenAI(
    base_url=server.base_url, api_key=key, max_retries=0
  )
