"""What became of each attempt, a JSON line each, in a file that may be resumed.

The first line says what is measured: the benchmark with its version, the
policy, the limits. A file of another measurement is refused. A line that was
torn by a kill is cut off, and its attempt made again.
"""

from collections.abc import Mapping
import dataclasses
import json
import os
import pathlib
from typing import Any

from absl import logging

from envace_jax import errors, types

Key = tuple[str, int]  # (task id, trial)
_HEAD = b'{"measured": '  # how a file of results begins


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
  """One attempt. `error` is why it is errored, '' for one that was judged."""

  task_id: str
  category: str
  trial: int
  prerequisite: bool = False  # others go on from it; it has no verdict
  error: str = ''
  reward: float = 0.0
  success: bool = False
  reason: str = ''  # the benchmark's own name of a failure
  capped: bool = False  # it was ended by a limit of steps or of calls
  parts: types.Json = dataclasses.field(default_factory=dict)
  steps: int = 0  # replies of the policy
  calls: int = 0
  call_errors: int = 0  # answered with an error, or unreadable
  tokens_in: int = 0
  tokens_out: int = 0
  rehearsal_tokens: int = 0  # sampled privately, before replies
  started: str = ''  # ISO 8601, UTC
  seconds: float = 0.0
  record: Any = None  # for the benchmark's own result file
  demonstration: types.Json | None = None  # for `tasks.records`, if wanted

  @property
  def key(self) -> Key:
    return self.task_id, self.trial

  @property
  def is_judged(self) -> bool:
    return not self.error and not self.prerequisite


class File:
  """The results of one measurement; one process writes at a time."""

  def __init__(self, path: str | os.PathLike, measured: types.Json):
    """Opens or begins a file.

    Args:
      path: of the file.
      measured: what its results are of; JSON, equal in every resumption.

    Raises:
      UserError: the file is of something else, or no file of results.
    """
    self._path = pathlib.Path(path)
    self.results: dict[Key, Result] = {}
    self._path.parent.mkdir(parents=True, exist_ok=True)
    whole = self._read(json.loads(json.dumps(measured)))
    self._file = self._path.open('r+b' if self._path.exists() else 'wb')
    self._file.truncate(whole)
    self._file.seek(whole)
    if not whole:
      self._write({'measured': measured})

  def add(self, result: Result) -> None:
    """Writes a result through to the disk; a later one of its key counts."""
    self._write(dataclasses.asdict(result))
    self.results[result.key] = result

  def close(self) -> None:
    self._file.close()

  def _write(self, value: Mapping[str, Any]) -> None:
    line = json.dumps(value, default=repr) + '\n'
    self._file.write(line.encode())
    self._file.flush()
    os.fsync(self._file.fileno())

  def _read(self, measured: types.Json) -> int:
    """Reads what is there; returns how many bytes of it are whole."""
    if not self._path.exists():
      return 0
    whole = 0
    content = self._path.read_bytes()
    for number, line in enumerate(content.split(b'\n')[:-1], 1):
      try:
        self._take(json.loads(line), number, measured)
      except (ValueError, TypeError) as error:
        raise errors.UserError(
          f'{self._path} line {number} is no result ({error}); name another '
          'file'
        ) from error
      whole += len(line) + 1
    if not whole and not _HEAD.startswith(content[: len(_HEAD)]):
      raise errors.UserError(
        f'{self._path} is no file of results; name another file'
      )
    if torn := len(content) - whole:
      logging.warning('%s: a torn line of %d bytes is cut', self._path, torn)
    return whole

  def _take(self, value: Any, number: int, measured: types.Json) -> None:
    if number == 1:
      found = value.get('measured') if isinstance(value, dict) else None
      if found != measured:
        raise errors.UserError(
          f'{self._path} holds results of {found}, not of {measured}; name '
          'another file'
        )
      return
    result = Result(**value)
    self.results[result.key] = result
