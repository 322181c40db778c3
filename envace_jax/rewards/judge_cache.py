"""Verdicts that were paid for once: one SQLite file, keyed by content.

Only PASS and FAIL are kept; what could not be judged is asked again. Every
verdict is committed as it arrives, so a killed run has lost none that it got.
Threads of a process share one connection; processes may share the file (on a
local disk: write-ahead logging needs shared memory). A cache that breaks in the
middle of a run is a miss and a count, never an exception.
"""

from collections.abc import Iterable
import sqlite3
import threading

from absl import logging

from envace_jax import errors, types

_BUSY_MS = 10_000
_CHUNK = 500  # keys per query; SQLite limits the variables of one


class JudgeCache:
  """Verdicts by key; `path` ':memory:' keeps them for this process only.

  Raises `errors.UserError` when the file cannot be used as a cache.
  """

  def __init__(self, path: str = ':memory:'):
    self._path = path
    self._lock = threading.Lock()
    self.num_faults = 0  # reads and writes that failed
    try:
      # Autocommit: one statement, one durable verdict.
      self._connection = sqlite3.connect(
        path, isolation_level=None, check_same_thread=False
      )
      self._connection.execute(f'PRAGMA busy_timeout={_BUSY_MS}')
      self._connection.execute('PRAGMA journal_mode=WAL')
      # Survives a killed process; a power cut may cost the last verdicts.
      self._connection.execute('PRAGMA synchronous=NORMAL')
      self._connection.execute(
        'CREATE TABLE IF NOT EXISTS verdict (key TEXT PRIMARY KEY, '
        'verdict TEXT NOT NULL, model TEXT NOT NULL, reason TEXT NOT NULL) '
        'WITHOUT ROWID'
      )
      self._connection.execute(
        'SELECT key, verdict, model, reason FROM verdict LIMIT 1'
      )
    except sqlite3.Error as e:
      raise errors.UserError(
        f'{path} cannot be used as a cache of verdicts ({e}); delete it or '
        'name another file'
      ) from e

  def read(self, keys: Iterable[str]) -> dict[str, types.Verdict]:
    """The verdicts that are known, by key."""
    keys = list(dict.fromkeys(keys))
    found = {}
    try:
      for start in range(0, len(keys), _CHUNK):
        some = keys[start : start + _CHUNK]
        marks = ','.join('?' * len(some))
        query = f'SELECT key, verdict FROM verdict WHERE key IN ({marks})'
        with self._lock:
          rows = self._connection.execute(query, some).fetchall()
        found.update((key, types.Verdict(verdict)) for key, verdict in rows)
    except (sqlite3.Error, ValueError) as e:
      self._count_fault(e)
    return found

  def write(
    self, key: str, verdict: types.Verdict, *, model: str, reason: str
  ) -> None:
    """Keeps a verdict; the first one under a key stays."""
    if verdict is types.Verdict.ABSTAIN:
      raise ValueError('an ABSTAIN is not cached')
    row = (key, verdict.value, model, reason)
    try:
      with self._lock:
        self._connection.execute(
          'INSERT OR IGNORE INTO verdict VALUES (?, ?, ?, ?)', row
        )
    except sqlite3.Error as e:
      self._count_fault(e)

  def close(self) -> None:
    with self._lock:
      self._connection.close()

  def _count_fault(self, error: Exception) -> None:
    self.num_faults += 1
    if self.num_faults == 1:
      logging.warning('cache of verdicts %s: %s', self._path, error)
