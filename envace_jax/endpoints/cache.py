"""Answers that were paid for once: one SQLite file, keyed by content.

Every answer is committed as it arrives, so a killed run has lost none that it
got. Threads of a process share one connection; processes may share the file (on
a local disk: write-ahead logging needs shared memory). A cache that breaks in
the middle of a run is a miss and a count, never an exception.
"""

from collections.abc import Iterable
import sqlite3
import threading

from absl import logging

from envace_jax import errors

_BUSY_MS = 10_000
_CHUNK = 500  # keys per query; SQLite limits the variables of one


class Cache:
  """Texts by key; `path` ':memory:' keeps them for this process only.

  `kind` is what is kept, in one word: the name of the table and its column.
  Raises `errors.UserError` when the file cannot be used as such a cache.
  """

  def __init__(self, path: str, kind: str):
    self._path, self._kind = path, kind
    self._lock = threading.Lock()
    self.num_faults = 0  # reads and writes that failed
    try:
      # Autocommit: one statement, one durable answer.
      self._connection = sqlite3.connect(
        path, isolation_level=None, check_same_thread=False
      )
      self._connection.execute(f'PRAGMA busy_timeout={_BUSY_MS}')
      self._connection.execute('PRAGMA journal_mode=WAL')
      # Survives a killed process; a power cut may cost the last answers.
      self._connection.execute('PRAGMA synchronous=NORMAL')
      self._connection.execute(
        f'CREATE TABLE IF NOT EXISTS {kind} (key TEXT PRIMARY KEY, '
        f'{kind} TEXT NOT NULL, model TEXT NOT NULL, reason TEXT NOT NULL) '
        'WITHOUT ROWID'
      )
      self._connection.execute(
        f'SELECT key, {kind}, model, reason FROM {kind} LIMIT 1'
      )
    except sqlite3.Error as e:
      raise errors.UserError(
        f'{path} cannot be used as a cache of {kind}s ({e}); delete it or '
        'name another file'
      ) from e

  def read(self, keys: Iterable[str]) -> dict[str, str]:
    """The texts that are known, by key."""
    keys = list(dict.fromkeys(keys))
    found = {}
    try:
      for start in range(0, len(keys), _CHUNK):
        some = keys[start : start + _CHUNK]
        marks = ','.join('?' * len(some))
        query = f'SELECT key, {self._kind} FROM {self._kind} WHERE key IN'
        with self._lock:
          rows = self._connection.execute(f'{query} ({marks})', some).fetchall()
        found.update(rows)
    except sqlite3.Error as e:
      self.count_fault(e)
    return found

  def write(self, key: str, text: str, *, model: str, reason: str = '') -> None:
    """Keeps a text; the first one under a key stays."""
    row = (key, text, model, reason)
    try:
      with self._lock:
        self._connection.execute(
          f'INSERT OR IGNORE INTO {self._kind} VALUES (?, ?, ?, ?)', row
        )
    except sqlite3.Error as e:
      self.count_fault(e)

  def close(self) -> None:
    with self._lock:
      self._connection.close()

  def count_fault(self, error: Exception) -> None:
    """Counts something that could not be read or written, and goes on."""
    self.num_faults += 1
    if self.num_faults == 1:
      logging.warning('cache of %ss %s: %s', self._kind, self._path, error)
