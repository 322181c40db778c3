"""The rows of a server on the device, and the programs that move them."""

from collections.abc import Sequence
import secrets

import jax
import numpy as np

from envace_jax import types
from envace_jax.model import transformer
from envace_jax.sampling import decode
from envace_jax.serving import capacities, jobs, programs

MAX_STOPS = 8


class Rows:
  """All rows; nothing here knows who has which."""

  def __init__(
    self,
    model: transformer.Transformer,
    params,
    capacity: capacities.Capacity,
  ):
    self._model, self._params, self._capacity = model, params, capacity
    self.reset()

  def reset(self) -> None:
    """Makes them anew, empty."""
    c = self._capacity
    self._state = decode.empty_state(
      self._model,
      jax.random.split(jax.random.key(0), c.rows),
      capacity=c.context,
      cache_length=c.context,
    )

  def warm_up(self) -> int:
    """Compiles every program there is, before `start`; how many."""
    c, compiled = self._capacity, 0
    self.open(0, 0, 0, 0, 0)
    for rung in c.ladder:
      for size in c.sizes:
        rows = range(size)
        for width in c.widths:
          if width <= rung and size <= c.rows_in_window(width):
            nothing = [np.zeros((0,), np.int32)] * size
            self.extend(rows, nothing, width, rung)
            compiled += 1
        for detailed in (False, True):
          self.decode(rows, [], rung, 1, detailed=detailed)
          compiled += 1
      self.score(np.zeros((rung,), np.int32))
      compiled += 1
    jax.block_until_ready(self._state)
    return compiled + 1

  def open(
    self, target: int, source: int, keep: int, seed: int | None, choice: int
  ) -> None:
    """Begins row `target` as the first `keep` tokens of row `source`."""
    seed = secrets.randbits(63) if seed is None else seed

    words = [seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF, choice]
    self._state = programs.open_row(
      self._state,
      np.int32(target),
      np.int32(source),
      np.int32(keep),
      np.asarray(words, np.uint32),
    )

  def extend(
    self,
    rows: Sequence[int],
    windows: Sequence[np.ndarray],
    width: int,
    rung: int,
  ) -> None:
    """Appends up to `width` tokens to each of some rows, and feeds them."""
    rows_P, places, size = self._placed(rows)
    ids_PW = np.zeros((size, width), np.int32)
    count_P = np.zeros((size,), np.int32)
    for place, window in zip(places, windows, strict=True):
      ids_PW[place, : len(window)], count_P[place] = window, len(window)
    self._state = programs.extend_rows(
      self._model, self._params, self._state, rows_P, ids_PW,
      np.full(ids_PW.shape, types.Author.PROMPT, np.int8), count_P, rung=rung,
    )  # fmt: skip

  def decode(
    self,
    rows: Sequence[int],
    live: Sequence[tuple[jobs.Job, int]],
    rung: int,
    steps: int,
    *,
    detailed: bool,
  ) -> programs.Said:
    """Samples tokens on the first of `rows`: for whom, and up to where.

    What is said is in the order of `rows`.
    """
    rows_P, places, size = self._placed(rows)
    live_P = np.zeros((size,), bool)
    live_P[places[: len(live)]] = True
    self._state, said = programs.decode_rows(
      self._model, self._params, self._state, rows_P, live_P,
      _settings(places, live, size), np.int32(steps), rung=rung,
      chunk=self._capacity.chunk, detailed=detailed,
    )  # fmt: skip
    return jax.tree.map(lambda x: x[places], jax.device_get(said))

  def score(self, ids: np.ndarray, top: int = 0) -> jobs.Tokens:
    """Log-probs of given tokens; from any thread, beside what is running."""
    tokens_T = np.zeros((self._capacity.rung(len(ids)),), np.int32)
    tokens_T[: len(ids)] = ids
    logprobs, top_ids, top_logprobs = jax.device_get(
      programs.score(self._model, self._params, tokens_T)
    )
    n = len(ids)
    return jobs.Tokens(
      ids=np.asarray(ids, np.int32),
      logprobs=logprobs[:n],
      top_ids=top_ids[:n, :top],
      top_logprobs=top_logprobs[:n, :top],
    )

  def _placed(self, rows):
    """Which rows a program takes, where among them `rows` are, how many."""
    c, rows = self._capacity, np.asarray(rows, np.int32)
    size = c.size(len(rows))
    if size == c.rows:
      return None, rows, size
    others = np.setdiff1d(np.arange(c.rows, dtype=np.int32), rows)
    rows_P = np.concatenate([rows, others[: size - len(rows)]])
    return rows_P, np.arange(len(rows)), size


def _settings(
  places: np.ndarray, live: Sequence[tuple[jobs.Job, int]], size: int
) -> programs.RowSettings:
  settings = programs.RowSettings(
    temperature=np.zeros((size,), np.float32),
    top_k=np.zeros((size,), np.int32),
    top_p=np.ones((size,), np.float32),
    limit=np.zeros((size,), np.int32),
    stop=np.full((size, MAX_STOPS), -1, np.int32),
    author=np.zeros((size,), np.int8),
  )
  for place, (job, limit) in zip(places, live, strict=False):
    settings.temperature[place] = job.sampling.temperature
    settings.top_k[place] = job.sampling.top_k
    settings.top_p[place] = job.sampling.top_p
    settings.limit[place] = limit
    settings.stop[place, : len(job.stop_ids)] = job.stop_ids
    settings.author[place] = job.author
  return settings
