"""One session with one MCP server, for a caller that blocks.

The SDK is asynchronous and wants a session opened and closed by one task; that
task runs on an event loop in a thread of the connection's own, so a server
that keeps its loop busy disturbs nobody else. Every request has a deadline,
and so has the end: then the process is killed, whatever the session thinks.
"""

import asyncio
from collections.abc import Callable, Coroutine
import concurrent.futures
import contextlib
import json
import threading
from typing import Any

from envace_jax import errors
from envace_jax.envs.mcp import http as mcp_http
from envace_jax.envs.mcp import log as mcp_log
from envace_jax.envs.mcp import server as mcp_server
from envace_jax.envs.mcp import stdio as mcp_stdio

_INSTALL = "an MCP server needs its SDK, mcp 2; pip install 'envace_jax[envs]'"
_SLACK_S = 2.0  # for the loop to say that a deadline has passed


class Connection:
  """Open from `open` to `close`; a fault ends it, and `open` is for new ones.

  Nothing a server does is raised but as `ServerFailed` and `Refused`.
  """

  def __init__(
    self,
    server: mcp_server.Server,
    limits: mcp_server.Limits,
    log: mcp_log.Log,
  ):
    _require_sdk()
    self._server, self._limits, self._log = server, limits, log
    self._process: mcp_stdio.Process | None = None
    if isinstance(server, mcp_server.Command):
      self._process = mcp_stdio.Process(server, limits, log)
    self._client: Any = None
    self._loop = asyncio.new_event_loop()
    self._thread = threading.Thread(
      target=self._loop.run_forever, name='mcp', daemon=True
    )
    self._end = asyncio.Event()
    self._owner: concurrent.futures.Future | None = None
    self._changed = threading.Event()

  def open(self) -> list[Any]:
    """Starts the session; returns the SDK's tools, in the server's order."""
    self._thread.start()
    opened = concurrent.futures.Future()
    self._owner = asyncio.run_coroutine_threadsafe(
      self._own(opened), self._loop
    )
    try:
      return opened.result(self._limits.start_s + _SLACK_S)
    except concurrent.futures.TimeoutError:
      raise mcp_server.ServerFailed(
        'cannot_start', f'no list of tools in {self._limits.start_s} s'
      ) from None

  def call(self, name: str, arguments: dict[str, Any]) -> Any:
    """The SDK's result of one call; `name` is the server's."""
    return self._run(
      lambda: self._client.call_tool(name, arguments), self._limits.call_s
    )

  def tools(self) -> list[Any]:
    """The list as it is now."""
    self._changed.clear()
    return self._run(self._list, self._limits.call_s)

  def has_new_tools(self) -> bool:
    """Whether the server said that its list changed since it was read."""
    return self._changed.is_set()

  def close(self) -> None:
    """Ends session, process and thread; in bounded time, and more than once."""
    if self._loop.is_closed():
      return
    if self._thread.is_alive():
      if self._owner is not None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._await_owner()
      self._loop.call_soon_threadsafe(self._loop.stop)
      self._thread.join()
    self._loop.run_until_complete(_cancel_all())
    self._loop.run_until_complete(self._loop.shutdown_asyncgens())
    self._loop.close()

  def _await_owner(self) -> None:
    wait = 4 * self._limits.stop_s
    for attempt in (lambda: None, self._owner.cancel):
      attempt()
      done, _ = concurrent.futures.wait([self._owner], wait)
      if done:
        break
    if self._process is not None:
      self._process.kill()

  def _run(self, request: Callable[[], Coroutine], limit: float) -> Any:
    """The answer to a request, or what went wrong with it."""
    future = asyncio.run_coroutine_threadsafe(
      self._request(request, limit), self._loop
    )
    try:
      return future.result(limit + _SLACK_S)
    except concurrent.futures.TimeoutError:
      future.cancel()
      raise mcp_server.ServerFailed(
        'stuck', f'the client gave no answer in {limit + _SLACK_S} s'
      ) from None
    except concurrent.futures.CancelledError:
      raise mcp_server.ServerFailed('died', 'the session ended') from None

  async def _request(self, request: Callable[[], Coroutine], limit: float):
    import mcp
    import pydantic

    if self._client is None:
      raise self._fault() or mcp_server.ServerFailed('died', 'no session')
    try:
      return await asyncio.wait_for(request(), limit)
    except TimeoutError:
      raise self._fault() or mcp_server.ServerFailed(
        'timeout', f'no answer in {limit} s'
      ) from None
    except mcp.MCPError as error:
      if fault := self._fault():
        raise fault from None
      if error.code == _CONNECTION_CLOSED:
        # The transport may be a moment behind with the reason.
        await asyncio.sleep(0.05)
        raise self._fault() or mcp_server.ServerFailed(
          'died', error.message
        ) from None
      raise mcp_server.Refused(error.message) from None
    except (pydantic.ValidationError, RuntimeError, ValueError) as error:
      raise mcp_server.ServerFailed('bad_message', _brief(error)) from None
    except mcp_server.ServerFailed:
      raise
    except Exception as error:  # transports raise more than they document
      raise self._fault() or mcp_server.ServerFailed(
        'died', _brief(error)
      ) from None

  def _fault(self) -> mcp_server.ServerFailed | None:
    return self._process.fault if self._process is not None else None

  async def _own(self, opened: concurrent.futures.Future) -> None:
    """Holds the session from its beginning to its end."""
    try:
      async with contextlib.AsyncExitStack() as stack:
        async with asyncio.timeout(self._limits.start_s):
          await stack.enter_async_context(self._new_client())
          tools = await self._list()
        opened.set_result(tools)
        await self._end.wait()
    except BaseException as error:
      if not opened.done():
        opened.set_exception(self._start_fault(error))
      if not isinstance(error, Exception):
        raise
      self._log.add('client', _brief(error).encode('utf-8', 'replace'))
    finally:
      self._client = None

  @contextlib.asynccontextmanager
  async def _new_client(self):
    import mcp

    async with contextlib.AsyncExitStack() as stack:
      if self._process is not None:
        transport = self._process.streams()
      else:
        http = await stack.enter_async_context(
          mcp_http.client(self._server, self._limits)
        )
        transport = mcp_http.streams(self._server, self._limits, http)
      # The handshake that every server knows: after it a server says on its
      # own that its tools changed.
      client = mcp.Client(
        transport,
        mode='legacy',
        logging_callback=self._keep_log,
        message_handler=self._hear,
        cache=None,
      )
      self._client = await stack.enter_async_context(client)
      yield self._client

  async def _list(self) -> list[Any]:
    """All pages of the list of tools, of a server that has tools."""
    if self._client.server_capabilities.tools is None:
      return []
    tools, cursor = [], None
    for _ in range(self._limits.pages):
      page = await self._client.list_tools(cursor=cursor)
      tools += page.tools
      cursor = page.next_cursor
      if len(tools) > self._limits.tools:
        raise mcp_server.ServerFailed(
          'flood', f'more than {self._limits.tools} tools'
        )
      if not cursor:
        return tools
    raise mcp_server.ServerFailed(
      'flood', f'a list of tools of more than {self._limits.pages} pages'
    )

  async def _keep_log(self, params: Any) -> None:
    data = params.data
    text = data if isinstance(data, str) else json.dumps(data, default=repr)
    line = f'{params.level}: {text}'
    self._log.add('server', line.encode('utf-8', 'replace'))

  async def _hear(self, message: Any) -> None:
    if getattr(message, 'method', '') == 'notifications/tools/list_changed':
      self._changed.set()
    elif isinstance(message, Exception):
      self._log.add('client', _brief(message).encode('utf-8', 'replace'))

  def _start_fault(self, error: BaseException) -> mcp_server.ServerFailed:
    error = _first(error)
    fault = self._fault()
    if fault is None and isinstance(error, mcp_server.ServerFailed):
      fault = error
    if fault is not None and fault.kind == 'cannot_start':
      return fault
    detail = str(fault) if fault else _brief(error)
    if fault is None and isinstance(error, TimeoutError):
      detail = f'no list of tools in {self._limits.start_s} s'
    if said := self._log.last('stderr'):
      detail += f'; last line of stderr: {said}'
    return mcp_server.ServerFailed('cannot_start', detail)


_CONNECTION_CLOSED = -32000  # JSON-RPC: the SDK's own, for a stream that ended


async def _cancel_all() -> None:
  """Ends what the session left on its loop."""
  tasks = asyncio.all_tasks() - {asyncio.current_task()}
  for task in tasks:
    task.cancel()
  await asyncio.gather(*tasks, return_exceptions=True)


def _brief(error: BaseException) -> str:
  """An error in a line."""
  error = _first(error)
  text = ' '.join(str(error).split())
  return f'{type(error).__name__}: {text[:500]}' if text else repr(error)


def _first(error: BaseException) -> BaseException:
  """The first error of a group, or the error itself."""
  while isinstance(error, BaseExceptionGroup):
    error = error.exceptions[0]
  return error


def _require_sdk() -> None:
  try:
    from mcp import Client  # noqa: F401  (1.x has none)
  except ImportError as error:
    raise errors.UserError(_INSTALL) from error
