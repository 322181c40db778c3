"""A server as a process: JSON lines in and out, and nothing left behind.

The SDK's transport reads a line of any length, stops at bytes that are no
UTF-8, and hands stderr to a file that grows. Here a line has a longest length,
what is no message is a line of the log, and so is stderr; a flood of either
ends the connection. At the end the input is closed, then the process group is
asked to go, then killed; the process is waited for, so no zombie stays.
"""

import asyncio
from collections.abc import AsyncIterator
import contextlib
import json
import os
import signal
from typing import Any

from envace_jax.envs.mcp import log as mcp_log
from envace_jax.envs.mcp import server as mcp_server

_INHERITED = (
  'HOME',
  'LANG',
  'LOGNAME',
  'PATH',
  'SHELL',
  'TMPDIR',
  'USER',
)


class Process:
  """The transport of one `Command`, as the SDK wants one: see `streams`."""

  def __init__(
    self,
    command: mcp_server.Command,
    limits: mcp_server.Limits,
    log: mcp_log.Log,
  ):
    self._command, self._limits, self._log = command, limits, log
    self._process: asyncio.subprocess.Process | None = None
    self._idle = 0  # lines since the last request that answered nothing
    self._stopping = False
    self.fault: mcp_server.ServerFailed | None = None  # why it ended

  @contextlib.asynccontextmanager
  async def streams(self) -> AsyncIterator[tuple]:
    """The streams (what it says, what it hears) of a new process."""
    import anyio

    try:
      self._process = await asyncio.create_subprocess_exec(
        *self._command.argv,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=self._command.cwd,
        env=_environment(self._command),
        start_new_session=True,
        limit=self._limits.line_bytes,
      )
    except (OSError, ValueError) as error:
      self.fault = mcp_server.ServerFailed(
        'cannot_start', f'{self._command.argv[0]}: {error}'
      )
      raise self.fault from error
    said, heard = anyio.create_memory_object_stream(0)
    outgoing, written = anyio.create_memory_object_stream(0)
    tasks = [
      asyncio.ensure_future(self._read(said)),
      asyncio.ensure_future(self._write(written, said)),
      asyncio.ensure_future(self._read_errors()),
    ]
    try:
      yield heard, outgoing
    finally:
      await self._stop()
      for task in tasks:
        task.cancel()
      await asyncio.gather(*tasks, return_exceptions=True)
      for stream in (said, heard, outgoing, written):
        stream.close()

  def kill(self) -> None:
    """Kills the group at once; from any thread, at any time."""
    if self._process is not None:
      _signal(self._process.pid, signal.SIGKILL)

  async def _read(self, said) -> None:
    """Hands on messages until the process ends or breaks a limit."""
    import anyio
    from mcp.shared import message as messages
    import mcp_types

    closed = anyio.ClosedResourceError, anyio.BrokenResourceError
    try:
      while line := await self._line():
        message = _message(line)
        if message is None:
          self._log.add('stdout', line)
          self._count()
          continue
        answers = mcp_types.JSONRPCResponse | mcp_types.JSONRPCError
        if not isinstance(message, answers):
          self._count()
        await said.send(messages.SessionMessage(message))
      code = await self._exit_code()
      self._fail(mcp_server.ServerFailed('died', _said_of(code)))
    except mcp_server.ServerFailed as fault:
      self._fail(fault)
      self.kill()
    except closed:  # the session is over
      pass
    finally:
      said.close()

  async def _line(self) -> bytes:
    try:
      return await self._process.stdout.readline()
    except ValueError as error:
      raise mcp_server.ServerFailed(
        'oversized',
        f'a line of over {self._limits.line_bytes} bytes, its longest; '
        'raise line_bytes if that is wanted',
      ) from error

  def _count(self) -> None:
    self._idle += 1
    if self._idle > self._limits.idle_lines:
      raise mcp_server.ServerFailed(
        'flood', f'{self._idle} lines that answered nothing'
      )

  async def _write(self, written, said) -> None:
    """Sends what the session says; a closed pipe ends the session."""
    try:
      async for message in written:
        self._idle = 0
        text = message.message.model_dump_json(
          by_alias=True, exclude_unset=True
        )
        self._process.stdin.write(text.encode() + b'\n')
        await asyncio.wait_for(self._process.stdin.drain(), self._limits.call_s)
    except TimeoutError:
      self._fail(
        mcp_server.ServerFailed(
          'deaf', f'it did not read its input in {self._limits.call_s} s'
        )
      )
      self.kill()
    except (OSError, UnicodeEncodeError):
      said.close()

  def _fail(self, fault: mcp_server.ServerFailed) -> None:
    """The first fault stands; an end that we asked for is none."""
    if self.fault is None and not self._stopping:
      self.fault = fault

  async def _read_errors(self) -> None:
    # In blocks: a line of stderr may have any length.
    rest = b''
    while block := await self._process.stderr.read(1 << 14):
      *lines, rest = (rest + block).split(b'\n')
      for line in lines[-self._limits.log_lines :]:
        self._log.add('stderr', line)
      rest = rest[: self._limits.log_chars]
    if rest:
      self._log.add('stderr', rest)

  async def _exit_code(self) -> int | None:
    """Of a process whose output has ended; None for one that goes on."""
    return self._process.returncode if await self._ended() else None

  async def _ended(self) -> bool:
    # Not `wait()`: that is also for pipes, which a grandchild may hold open.
    end = asyncio.get_running_loop().time() + self._limits.stop_s
    while self._process.returncode is None:
      if asyncio.get_running_loop().time() >= end:
        return False
      await asyncio.sleep(0.01)
    return True

  async def _stop(self) -> None:
    process, self._stopping = self._process, True
    process.stdin.close()
    ended = await self._ended()
    if not ended:
      _signal(process.pid, signal.SIGTERM)
      ended = await self._ended()
    # Also after an orderly end: what it started may still be there.
    _signal(process.pid, signal.SIGKILL)
    if not ended and not await self._ended():
      self._log.add(
        'client', f'process {process.pid} outlives SIGKILL'.encode()
      )
    # Releases the pipes that a descendant in another group may hold open.
    process._transport.close()


def _message(line: bytes) -> Any:
  """The SDK's message, None for what is none; an answer must be legal."""
  import mcp_types

  parse = mcp_types.jsonrpc_message_adapter.validate_json
  try:
    return parse(line, by_name=False)
  except ValueError:  # not JSON-RPC, not JSON, not UTF-8
    pass
  try:
    value = json.loads(line)
  except (ValueError, RecursionError):
    return None
  if not isinstance(value, dict) or not {'result', 'error'} & set(value):
    return None
  # Python reads lone surrogates, which servers send and JSON should not have.
  clean = json.dumps(value, ensure_ascii=False).encode('utf-8', 'replace')
  try:
    return parse(clean, by_name=False)
  except ValueError as error:
    shown = clean[:200].decode('utf-8', 'replace')
    raise mcp_server.ServerFailed(
      'bad_message', f'an answer that breaks the protocol: {shown}'
    ) from error


def _environment(command: mcp_server.Command) -> dict[str, str]:
  inherited = {k: os.environ[k] for k in _INHERITED if k in os.environ}
  return inherited | dict(command.env)


def _signal(pid: int, number: int) -> None:
  with contextlib.suppress(ProcessLookupError, PermissionError):
    os.killpg(pid, number)  # the leader's pid: it began a session


def _said_of(code: int | None) -> str:
  if code is None:
    return 'its output ended though it runs on'
  if code < 0:
    return f'ended by signal {-code}'
  return f'exited with {code}'
