"""Any MCP server as an environment: one session per episode.

  server = mcp_server.Command(argv=['mcp-server-git', '-r', '{state}'])
  environment = mcp_environment.McpEnvironment(server)
  environment.reset(task)      # directory, reset hook, process, first calls
  environment.call(types.ToolCall(name='git_status', arguments={...}))

What `task.environment` may say is in `mcp_tasks`. An episode begins in an empty
directory that its reset hook fills, with a new process or a new HTTP session.

Errors of calls are observations: unknown_tool, invalid_call, tool_error (the
tool said so), refused (a JSON-RPC error), bad_message (an answer that breaks
the protocol). When a server dies, hangs, floods or sends too long a message, it
is started again if its state is the directory, at most `limits.restarts` times
an episode: the observation names the fault and says that the call may have
taken effect. A state that lived in the process is gone, so then, and when
restarts are used up, `call` raises `ServerFailed`: the world failed, not the
policy.

`snapshot`, `restore` and `state_hash` are of the directory. A server that does
not name `{state}` in its command keeps its state where nobody can look: there
all three raise `UserError`.
"""

import collections
from collections.abc import Sequence
import json
import time

from absl import logging

from envace_jax import errors, types
from envace_jax.envs import base
from envace_jax.envs.mcp import connection as mcp_connection
from envace_jax.envs.mcp import content as mcp_content
from envace_jax.envs.mcp import hooks as mcp_hooks
from envace_jax.envs.mcp import log as mcp_log
from envace_jax.envs.mcp import server as mcp_server
from envace_jax.envs.mcp import state as mcp_state
from envace_jax.envs.mcp import tasks as mcp_tasks
from envace_jax.envs.mcp import tools as mcp_tools

# Faults after which a session can go on if it must.
_SURVIVED = ('timeout', 'bad_message')


class McpEnvironment:
  """One episode at a time; `close` ends the process and the directory."""

  def __init__(
    self,
    server: mcp_server.Server,
    limits: mcp_server.Limits = mcp_server.DEFAULTS,
    hidden: mcp_tools.Hidden = mcp_tools.NOTHING,
  ):
    self._server, self._limits, self._hidden = server, limits, hidden
    self._directory = mcp_state.Directory()
    self._connection: mcp_connection.Connection | None = None
    self._tools = mcp_tools.Tools()
    self._episode = mcp_tasks.Episode()
    self._restarts = 0  # in this episode
    # starts, restarts, list_changes, and faults by kind; over all episodes.
    self.counts = collections.Counter()
    self.log = mcp_log.Log(lines=limits.log_lines, chars=limits.log_chars)

  @property
  def tools(self) -> Sequence[types.Json]:
    """What may be called now; a server may change it in mid-episode."""
    self._refresh()
    return self._tools.schemas

  @property
  def state(self):
    """The directory of the episode."""
    return self._directory.path

  def reset(self, task: types.Task) -> None:
    """Starts an episode; raises `ServerFailed` or `HookFailed`."""
    self._disconnect()
    self._episode = mcp_tasks.episode(task)
    self._restarts = 0
    self._directory.empty()
    if self._episode.reset is not None:
      mcp_hooks.reset(self._episode.reset, self.stage())
    self._start()
    for call in self._episode.setup:
      observation = self.call_any(call.name, call.arguments)
      if observation.error is not None:
        raise mcp_hooks.HookFailed(
          f'setup call {call.name}: {observation.text[:300]}'
        )

  def call(self, action: types.ToolCall | types.ParseError) -> base.Observation:
    if isinstance(action, types.ParseError):
      return base.failure('invalid_call', mcp_content.cut(action.kind, 200))
    self._refresh()
    name = self._tools.names.get(action.name)
    if name is None:
      return base.failure('unknown_tool', mcp_content.cut(action.name, 200))
    odd = sorted(set(action.arguments) & set(self._hidden.parameters))
    if odd:
      return base.failure('invalid_arguments', f'{odd[0]}: no such parameter')
    return self.call_any(name, action.arguments)

  def call_any(self, name: str, arguments: types.Json) -> base.Observation:
    """Calls a tool by the server's name, also a hidden one."""
    if self._connection is None:
      raise mcp_server.ServerFailed('died', 'no session: reset first')
    if not _is_json(arguments):
      return base.failure('invalid_call', 'the arguments are no JSON')
    try:
      result = self._connection.call(name, dict(arguments))
    except mcp_server.Refused as refusal:
      detail = mcp_content.cut(str(refusal), self._limits.text_chars)
      return base.failure('refused', detail)
    except mcp_server.ServerFailed as fault:
      return self._mend(fault)
    return mcp_content.observation(result, self._limits.text_chars)

  def snapshot(self) -> bytes:
    self._require_state('snapshot')
    return self._directory.pack()

  def restore(self, snapshot: bytes) -> None:
    self._require_state('restore')
    self._disconnect()
    self._directory.unpack(snapshot)
    self._start()

  def state_hash(self) -> str:
    self._require_state('state_hash')
    return self._directory.hash()

  def stage(self) -> mcp_hooks.Stage:
    """What a hook is given."""
    return mcp_hooks.Stage(
      state=self._directory.path,
      arguments=self._episode.arguments,
      limit_s=self._episode.hook_s,
      call=self.call_any,
    )

  def close(self) -> None:
    self._disconnect()
    self._directory.close()

  def _start(self) -> None:
    """A new session, in as many attempts as it may take."""
    server = self._server.placed(str(self._directory.path))
    for attempt in range(self._limits.starts):
      if attempt:
        wait = self._limits.backoff_s * 2 ** (attempt - 1)
        time.sleep(min(wait, self._limits.max_backoff_s))
      connection = mcp_connection.Connection(server, self._limits, self.log)
      self.counts['starts'] += 1
      try:
        self._show(connection.open())
      except BaseException as error:
        connection.close()
        if not isinstance(error, mcp_server.ServerFailed):
          raise
        self.counts[error.kind] += 1
        fault = error
      else:
        self._connection = connection
        return
    raise fault

  def _mend(self, fault: mcp_server.ServerFailed) -> base.Observation:
    """What a call that broke the session returns, if anything can."""
    self.counts[fault.kind] += 1
    logging.warning('MCP server: %s', fault)
    self._restarts += 1
    if self._restarts > self._limits.restarts:
      self._disconnect()
      raise fault
    if self._server.keeps_state:
      self._disconnect()
      self._start()
      self.counts['restarts'] += 1
      after = 'the server was started again'
    elif fault.kind in _SURVIVED:
      after = 'the server runs on'
    else:
      self._disconnect()
      raise fault
    detail = f'{fault.detail}; {after}, and the call may have taken effect'
    return base.failure(fault.kind, detail)

  def _refresh(self) -> None:
    """Reads a list of tools again that the server said has changed."""
    connection = self._connection
    if connection is None or not connection.has_new_tools():
      return
    self.counts['list_changes'] += 1
    try:
      self._show(connection.tools())
    except (mcp_server.ServerFailed, mcp_server.Refused) as fault:
      # The old list stands; the next call meets whatever is wrong.
      self.counts['list_faults'] += 1
      logging.warning('MCP server: no new list of tools: %s', fault)

  def _show(self, listed) -> None:
    tools = mcp_tools.convert(listed, self._hidden)
    for fault in tools.faults:
      if fault not in self._tools.faults:
        logging.warning('MCP server: %s', fault)
    self._tools = tools

  def _disconnect(self) -> None:
    if self._connection is not None:
      self._connection.close()
      self._connection = None

  def _require_state(self, what: str) -> None:
    if not self._server.keeps_state:
      raise errors.UserError(
        f'{what}: this server keeps its state to itself; name {{state}} in its '
        'command if it can keep it in a directory'
      )


def _is_json(value: types.Json) -> bool:
  try:
    json.dumps(value, allow_nan=False, ensure_ascii=False).encode('utf-8')
  except (TypeError, ValueError, RecursionError):
    return False
  return True
