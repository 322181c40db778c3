"""How an MCP server is reached, and what it is allowed to cost.

A server is a command of ours, spoken to over its stdin and stdout, or an
address somebody else serves (streamable HTTP). `{state}` in a command, its
directory or its variables stands for the directory that an episode is given:
a server that names it is told to keep its state there, so that the state can
be prepared, compared, copied and brought back. A server that does not keeps
its state to itself.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import urllib.parse

from envace_jax import errors

PLACE = '{state}'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
  """A server that is started for every episode and ended with it.

  It inherits PATH, HOME and their like from us, no keys, and `env` on top.
  """

  argv: Sequence[str]
  env: Mapping[str, str] = dataclasses.field(default_factory=dict)
  cwd: str = PLACE

  def __post_init__(self):
    if isinstance(self.argv, str) or not self.argv or not self.argv[0]:
      raise errors.UserError(
        f'argv={self.argv!r} is no command: name the program and its '
        'arguments as a list'
      )

  @property
  def keeps_state(self) -> bool:
    """Whether the state is the directory, and nothing else."""
    return any(PLACE in word for word in (*self.argv, *self.env.values()))

  def placed(self, state: str) -> 'Command':
    """This command for one episode's directory."""
    put = lambda word: word.replace(PLACE, state)
    return Command(
      argv=tuple(map(put, self.argv)),
      env={key: put(value) for key, value in self.env.items()},
      cwd=put(self.cwd),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Address:
  """A server that runs already, over streamable HTTP."""

  url: str
  headers: Mapping[str, str] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    if urllib.parse.urlsplit(self.url).scheme not in ('http', 'https'):
      raise errors.UserError(
        f'url={self.url!r} is no address: it begins with http:// or https://'
      )

  @property
  def keeps_state(self) -> bool:
    return False

  def placed(self, state: str) -> 'Address':
    del state  # not on this machine
    return self


Server = Command | Address


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
  """Budgets of one environment. What is over one has a name, and is counted."""

  start_s: float = 30.0  # until a server has listed its tools
  call_s: float = 60.0  # one call
  stop_s: float = 2.0  # each of: end of input, SIGTERM, SIGKILL
  starts: int = 3  # attempts at one start
  restarts: int = 3  # after faults, in one episode
  backoff_s: float = 0.25  # before the second attempt; doubled after each
  max_backoff_s: float = 5.0
  line_bytes: int = 16 << 20  # one message of a command
  idle_lines: int = 10_000  # that answer nothing, between two requests
  pages: int = 50  # of the list of tools
  tools: int = 1_000
  text_chars: int = 100_000  # of one observation
  log_lines: int = 200  # that are kept: stderr, stdout that is no message, logs
  log_chars: int = 500  # of one such line

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      least = 0 if field.name == 'restarts' else 1
      if not value > 0 and not (least == 0 and value == 0):
        raise errors.UserError(f'{field.name}={value} must be positive')


DEFAULTS = Limits()


class ServerFailed(Exception):
  """A server did not do its part: `kind` is the fault's name.

  cannot_start, died, timeout, deaf, oversized, flood, bad_message, stuck
  """

  def __init__(self, kind: str, detail: str):
    super().__init__(f'{kind}: {detail}')
    self.kind, self.detail = kind, detail


class Refused(Exception):
  """A server answered a request with a JSON-RPC error; it is in good order."""
