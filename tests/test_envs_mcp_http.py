"""A server over streamable HTTP: the SDK's own, on a free port."""

import contextlib
import json
import socket
import threading
import time

import pytest
import test_envs_mcp

from envace_jax.envs.mcp import environment as mcp_environment
from envace_jax.envs.mcp import server as mcp_server


@contextlib.contextmanager
def served(json_response=False):
  """A server of the SDK's own on a free port; yields its url and its end."""
  uvicorn = pytest.importorskip('uvicorn', reason='serves the HTTP test')
  from mcp.server import mcpserver

  server = mcpserver.MCPServer('adder')
  totals = {}

  @server.tool()
  async def add(number: int, ctx: mcpserver.Context) -> str:
    """Adds to the session's total."""
    key = id(ctx.session)
    totals[key] = totals.get(key, 0) + number
    return str(totals[key])

  @server.tool()
  async def big(size: int) -> str:
    """Is long."""
    return 'y' * size

  @server.tool()
  async def grow(ctx: mcpserver.Context) -> str:
    """Adds a tool."""
    server.add_tool(lambda: 'new', name='grown', description='New.')
    await ctx.session.send_tool_list_changed()
    return 'grew'

  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    port = free.getsockname()[1]
  http = uvicorn.Server(
    uvicorn.Config(
      server.streamable_http_app(json_response=json_response),
      port=port,
      log_level='error',
      timeout_graceful_shutdown=1,
    )
  )
  thread = threading.Thread(target=http.run)
  thread.start()

  def stop():
    http.should_exit = True
    thread.join()

  try:
    while not http.started and thread.is_alive():
      time.sleep(0.01)
    yield f'http://127.0.0.1:{port}/mcp', stop
  finally:
    stop()


def test_a_server_over_http_has_a_session_per_episode():
  limits = mcp_server.Limits(start_s=20, call_s=10, starts=1)
  with served() as (url, stop):
    first, second = (
      mcp_environment.McpEnvironment(mcp_server.Address(url=url), limits)
      for _ in range(2)
    )
    call = test_envs_mcp.call
    try:
      for one in (first, second):
        one.reset(test_envs_mcp.TASK)
        assert json.loads(call(one, 'add', number=2).text)['result'] == '2'
      assert call(first, 'add', number='x').error == 'tool_error'
      assert call(first, 'grow').error is None
      names = lambda: [t['function']['name'] for t in first.tools]
      end = time.monotonic() + 5
      while 'grown' not in names() and time.monotonic() < end:
        time.sleep(0.01)
      assert call(first, 'grown').error is None
      stop()
      with pytest.raises(mcp_server.ServerFailed):
        call(first, 'add', number=1)
      with pytest.raises(mcp_server.ServerFailed, match='cannot_start'):
        first.reset(test_envs_mcp.TASK)
    finally:
      first.close()
      second.close()


@pytest.mark.parametrize('json_response', [False, True])
def test_a_message_over_http_has_a_longest_length(json_response):
  limits = mcp_server.Limits(start_s=20, call_s=10, line_bytes=100_000)
  with served(json_response) as (url, _):
    first, second = (
      mcp_environment.McpEnvironment(mcp_server.Address(url=url), limits)
      for _ in range(2)
    )
    try:
      for one in (first, second):
        one.reset(test_envs_mcp.TASK)
      call = test_envs_mcp.call
      assert len(call(first, 'big', size=20_000).text) > 20_000
      with pytest.raises(mcp_server.ServerFailed) as caught:
        call(first, 'big', size=2_000_000)
      assert caught.value.kind == 'died'
      assert call(second, 'big', size=10).error is None
    finally:
      first.close()
      second.close()
