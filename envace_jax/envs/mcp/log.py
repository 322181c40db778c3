"""What a server says beside its answers: the last lines, each cut, and counts.

Threads share one: the event loop writes, whoever asks reads.
"""

import collections
import threading


class Log:
  """The last `lines` lines by source: stderr, stdout, server, client."""

  def __init__(self, *, lines: int, chars: int):
    self._kept = collections.deque(maxlen=lines)
    self._chars, self._lock = chars, threading.Lock()
    self.counts = collections.Counter()  # lines by source, kept or not

  def add(self, source: str, line: bytes) -> None:
    text = line[: 4 * self._chars].decode('utf-8', 'replace').strip()
    cut = ' ...' if len(text) > self._chars else ''
    with self._lock:
      self.counts[source] += 1
      if text:
        self._kept.append((source, text[: self._chars] + cut))

  def lines(self) -> list[str]:
    """The lines kept, oldest first, as 'source: text'."""
    with self._lock:
      return [f'{source}: {text}' for source, text in self._kept]

  def last(self, source: str) -> str:
    """The last line of a source that is kept, '' for none."""
    with self._lock:
      return next((t for s, t in reversed(self._kept) if s == source), '')
