"""A server at an address: the SDK's transport, with a longest message.

The SDK bounds an event of a stream, and reads a body of plain JSON whole,
however long it is. Here both end at the same number of bytes.
"""

from typing import Any

from envace_jax.envs.mcp import server as mcp_server


def client(address: mcp_server.Address, limits: mcp_server.Limits) -> Any:
  """The HTTP client that the SDK's transport is to use."""
  import httpx2

  class Bounded(httpx2.AsyncHTTPTransport):
    """Cuts the connection at a body that is too long."""

    async def handle_async_request(self, request):
      response = await super().handle_async_request(request)
      kind = response.headers.get('content-type', '')
      if not kind.startswith('text/event-stream'):
        response.stream = Body(response.stream)
      return response

  class Body(httpx2.AsyncByteStream):
    """A body, as far as it may go."""

    def __init__(self, stream):
      self._stream = stream

    async def __aiter__(self):
      total = 0
      async for chunk in self._stream:
        total += len(chunk)
        if total > limits.line_bytes:
          raise httpx2.ReadError(f'a body of over {limits.line_bytes} bytes')
        yield chunk

    async def aclose(self):
      await self._stream.aclose()

  return httpx2.AsyncClient(
    transport=Bounded(),
    headers=dict(address.headers),
    # Calls have deadlines of our own; a stream may be silent for long.
    timeout=httpx2.Timeout(limits.call_s, read=None),
  )


def streams(address: mcp_server.Address, limits: mcp_server.Limits, http: Any):
  """The transport, as the SDK wants one."""
  from mcp.client import streamable_http

  return streamable_http.streamable_http_client(
    address.url, http_client=http, max_sse_event_size=limits.line_bytes
  )
