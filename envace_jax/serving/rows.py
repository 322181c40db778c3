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
        nobody_P = np.full((size,), c.rows, np.int32)
        for width in c.widths:
          if width <= rung and size <= c.rows_in_window(width):
            self.extend(nobody_P, np.zeros((size, width), np.int32),
                              np.zeros((size,), np.int32), rung)  # fmt: skip
            compiled += 1
        for detailed in (False, True):
          self.decode(nobody_P, [], rung, 1, detailed=detailed)
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
    rows_P: np.ndarray,
    ids_PW: np.ndarray,
    count_P: np.ndarray,
    rung: int,
  ) -> None:
    """Appends tokens to some rows, and feeds them."""
    self._state = programs.extend_rows(
      self._model, self._params, self._state, rows_P, ids_PW,
      np.full(ids_PW.shape, types.Author.PROMPT, np.int8), count_P, rung=rung,
    )  # fmt: skip

  def decode(
    self,
    rows_P: np.ndarray,
    live: Sequence[tuple[jobs.Job, int]],
    rung: int,
    steps: int,
    *,
    detailed: bool,
  ) -> programs.Said:
    """Samples tokens on the first rows of `rows_P`: whose, and up to where."""
    live_P = np.zeros((len(rows_P),), bool)
    live_P[: len(live)] = True
    self._state, said = programs.decode_rows(
      self._model, self._params, self._state, rows_P, live_P,
      _settings(live, len(rows_P)), np.int32(steps), rung=rung,
      chunk=self._capacity.chunk, detailed=detailed,
    )  # fmt: skip
    return jax.device_get(said)

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


def _settings(
  live: Sequence[tuple[jobs.Job, int]], size: int
) -> programs.RowSettings:
  asked = [job.sampling for job, _ in live]
  fill = size - len(live)
  stop_PK = np.full((size, MAX_STOPS), -1, np.int32)
  for i, (job, _) in enumerate(live):
    stop_PK[i, : len(job.stop_ids)] = job.stop_ids
  return programs.RowSettings(
    temperature=np.asarray(
      [s.temperature for s in asked] + [0] * fill, np.float32
    ),
    top_k=np.asarray([s.top_k for s in asked] + [0] * fill, np.int32),
    top_p=np.asarray([s.top_p for s in asked] + [1] * fill, np.float32),
    limit=np.asarray([limit for _, limit in live] + [0] * fill, np.int32),
    stop=stop_PK,
    author=np.asarray([job.author for job, _ in live] + [0] * fill, np.int8),
  )
