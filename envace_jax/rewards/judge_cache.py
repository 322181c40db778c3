"""Verdicts that were paid for once (`endpoints.cache`).

Only PASS and FAIL are kept; what could not be judged is asked again.
"""

from collections.abc import Iterable

from envace_jax import types
from envace_jax.endpoints import cache


class JudgeCache:
  """Verdicts by key; `path` ':memory:' keeps them for this process only.

  Raises `errors.UserError` when the file cannot be used as a cache.
  """

  def __init__(self, path: str = ':memory:'):
    self._cache = cache.Cache(path, 'verdict')

  @property
  def num_faults(self) -> int:
    """Reads and writes that failed."""
    return self._cache.num_faults

  def read(self, keys: Iterable[str]) -> dict[str, types.Verdict]:
    """The verdicts that are known, by key."""
    found = {}
    for key, text in self._cache.read(keys).items():
      try:
        found[key] = types.Verdict(text)
      except ValueError as e:
        self._cache.count_fault(e)
    return found

  def write(
    self, key: str, verdict: types.Verdict, *, model: str, reason: str
  ) -> None:
    """Keeps a verdict; the first one under a key stays."""
    if verdict is types.Verdict.ABSTAIN:
      raise ValueError('an ABSTAIN is not cached')
    self._cache.write(key, verdict.value, model=model, reason=reason)

  def close(self) -> None:
    self._cache.close()
