"""Continuous batching: one thread that owns the device, and rows that it lends.

  submit -> queue -> a row -> prompt read, window by window -> chunks of tokens

Between two chunks, which are short, requests are let in, end, and are given up.
So nobody waits for somebody else's answer, only for a free row. What a request
says is a function of its prompt and its seed: a row draws by its own key and
its own positions, whoever else is being answered (up to how rounding differs
between batch sizes).

Whatever goes wrong on the device fails the requests that were in flight; the
rows are made anew, and the next requests are served.
"""

import collections
from collections.abc import Sequence
import dataclasses
import secrets
import threading
import time

from absl import logging
import jax
import numpy as np

from envace_jax import types
from envace_jax.model import transformer
from envace_jax.sampling import decode
from envace_jax.serving import jobs, programs, slots

MAX_STOPS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capacity:
  """How much is served at a time; all of it decides what is compiled."""

  rows: int  # answers at a time
  context: int  # tokens in a row, prompt and answer
  queue: int  # answers that may wait for a row
  sizes: tuple[int, ...]  # rows that a program takes, ascending, up to `rows`
  widths: tuple[int, ...]  # windows in which prompts are read, ascending
  ladder: tuple[int, ...]  # cache lengths, ascending, up to `context`
  chunk: int = 8  # tokens per row between two looks at the queue
  window_tokens: int = 1024  # of all rows, in one window

  def __post_init__(self):
    for name, last in (('sizes', self.rows), ('ladder', self.context)):
      values = getattr(self, name)
      if list(values) != sorted(set(values)) or values[-1:] != (last,):
        raise ValueError(f'serve.{name}={values}; ascend, and end at {last}')
    if self.context < 2 or self.rows < 1 or self.queue < 1 or self.chunk < 1:
      raise ValueError(
        f'serve: rows={self.rows}, queue={self.queue} and chunk={self.chunk} '
        f'must be at least 1, context={self.context} at least 2'
      )

  def rung(self, length: int) -> int:
    return next(rung for rung in self.ladder if length <= rung)

  def size(self, rows: int) -> int:
    return next(size for size in self.sizes if rows <= size)

  def rows_in_window(self, width: int) -> int:
    """As many as may be extended by so wide a window at a time."""
    fitting = [n for n in self.sizes if n * width <= self.window_tokens]
    return fitting[-1] if fitting else self.sizes[0]


def capacity(*, rows: int, context: int, queue: int) -> Capacity:
  """Small sets of sizes: compiling a program costs seconds to minutes."""
  ladder, rung = [], 512
  while rung < context:
    ladder.append(rung)
    rung *= 4
  return Capacity(
    rows=rows,
    context=context,
    queue=queue,
    sizes=(*(n for n in (1, 8) if n < rows), rows),
    widths=tuple(w for w in (16, 128) if w < context) or (context,),
    ladder=(*ladder, context),
  )


@dataclasses.dataclass(eq=False)
class _Running:
  """A job with a row."""

  job: jobs.Job
  slot: slots.Slot
  unread: np.ndarray  # of the prompt
  limit: int  # length at which the row must end
  said: list[jobs.Tokens] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Counts:
  """What an engine has done, for /metrics."""

  admitted: int = 0
  finished: int = 0
  cancelled: int = 0
  expired: int = 0
  failed: int = 0
  rejected: int = 0  # the queue was full
  prompt_tokens: int = 0
  reused_tokens: int = 0
  sampled_tokens: int = 0
  device_failures: int = 0


class Engine:
  """Answers prompts. `submit` may be called from any thread."""

  def __init__(
    self,
    model: transformer.Transformer,
    params,
    limits: Capacity,
  ):
    self._model, self._params = model, params
    self.capacity, self.counts = limits, Counts()
    self._slots = slots.Slots(limits.rows, limits.context)
    self._state = self._fresh_state()
    self._waiting: collections.deque[jobs.Job] = collections.deque()
    self._running: list[_Running] = []
    self._changed = threading.Condition()
    self._closing = self._draining = False
    self._thread = threading.Thread(
      target=self._run, name='engine', daemon=True
    )

  def start(self) -> None:
    self._thread.start()

  @property
  def vocab_size(self) -> int:
    return self._model.config.vocab_size

  @property
  def is_alive(self) -> bool:
    return self._thread.is_alive() and not self._closing

  @property
  def waiting(self) -> int:
    return len(self._waiting)

  @property
  def running(self) -> int:
    return len(self._running)

  def submit(self, group: Sequence[jobs.Job]) -> None:
    """Lets some jobs wait for rows, all or none.

    Raises:
      Refused: the queue is full, or the engine is closing.
    """
    with self._changed:
      if self._draining or not self._thread.is_alive():
        raise jobs.Refused(503, 'shutting_down', 'the server is shutting down')
      free = self.capacity.rows - len(self._running)
      if len(self._waiting) + len(group) > self.capacity.queue + free:
        self.counts.rejected += 1
        raise jobs.Refused(
          429,
          'rate_limit_exceeded',
          f'{len(self._waiting)} answers wait already and at most '
          f'{self.capacity.queue} may; try again later',
        )
      self._waiting.extend(group)
      self._changed.notify()

  def wake(self) -> None:
    """A job was cancelled."""
    with self._changed:
      self._changed.notify()

  def close(self, *, drain: bool = True) -> None:
    """Ends the thread, once what was accepted is answered (`drain`) or now."""
    with self._changed:
      self._draining, self._closing = True, not drain
      self._changed.notify()
    if self._thread.is_alive():
      self._thread.join()

  def warm_up(self) -> int:
    """Compiles every program there is, before `start`; how many."""
    c, compiled = self.capacity, 0
    self._open(0, 0, 0, 0, 0)
    for rung in c.ladder:
      for size in c.sizes:
        nobody_P = np.full((size,), c.rows, np.int32)
        for width in c.widths:
          if width <= rung and size <= c.rows_in_window(width):
            self._extend_rows(nobody_P, np.zeros((size, width), np.int32),
                              np.zeros((size,), np.int32), rung)  # fmt: skip
            compiled += 1
        for detailed in (False, True):
          self._decode_rows(nobody_P, [], rung, detailed, 1)
          compiled += 1
      self.score(np.zeros((rung,), np.int32))
      compiled += 1
    jax.block_until_ready(self._state)
    return compiled + 1

  def score(self, ids: np.ndarray, top: int = 0) -> jobs.Tokens:
    """Log-probs of given tokens; from any thread, beside what is running."""
    tokens_T = np.zeros((self.capacity.rung(len(ids)),), np.int32)
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

  def _fresh_state(self) -> decode.DecodeState:
    c = self.capacity
    return decode.empty_state(
      self._model,
      jax.random.split(jax.random.key(0), c.rows),
      capacity=c.context,
      cache_length=c.context,
    )

  def _run(self) -> None:
    while True:
      with self._changed:
        while not (self._waiting or self._running or self._draining):
          self._changed.wait()
        if self._draining and not (self._waiting or self._running):
          return
      try:
        self._turn()
      except Exception as error:  # whatever the device or a listener raises
        logging.exception('the engine failed; its rows are made anew')
        self._start_over(error)
      if self._closing:
        self._abandon()
        return

  def _turn(self) -> None:
    self._leave()
    self._admit()
    self._extend()
    self._decode()

  def _leave(self) -> None:
    """Lets go whom nobody waits for, and who has waited too long."""
    now = time.monotonic()
    with self._changed:
      for job in [job for job in self._waiting if self._is_over(job, now)]:
        self._waiting.remove(job)
    for running in [r for r in self._running if self._is_over(r.job, now)]:
      self._release(running)

  def _is_over(self, job: jobs.Job, now: float) -> bool:
    if job.is_cancelled:
      self.counts.cancelled += 1
      job.done.cancel()
    elif job.deadline is not None and now > job.deadline:
      self.counts.expired += 1
      self._fail(
        job,
        jobs.Refused(504, 'timeout', 'the deadline passed before the answer'),
      )
    else:
      return False
    return True

  def _admit(self) -> None:
    """Gives rows to whoever is next."""
    with self._changed:
      ready = [
        job
        for job in self._waiting
        if job.leader is None or job.leader.is_read or job.leader.done.done()
      ]
    for job in ready:
      place = self._slots.place(job.prompt)
      if place is None:
        return
      with self._changed:
        self._waiting.remove(job)
        room = self.capacity.context - len(job.prompt)
        most = job.sampling.max_tokens
        self._running.append(
          _Running(
            job=job,
            slot=place.target,
            unread=job.prompt[place.keep :],
            limit=len(job.prompt) + (room if most is None else min(most, room)),
          )
        )
      seed = job.sampling.seed
      self._open(
        place.target.index,
        place.source.index,
        place.keep,
        secrets.randbits(63) if seed is None else seed,
        job.choice,
      )
      job.reused, job.is_read = place.keep, place.keep == len(job.prompt)
      self.counts.admitted += 1
      self.counts.prompt_tokens += len(job.prompt)
      self.counts.reused_tokens += place.keep

  def _open(self, target, source, keep, seed, choice) -> None:
    words = [seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF, choice]
    self._state = programs.open_row(
      self._state,
      np.int32(target),
      np.int32(source),
      np.int32(keep),
      np.asarray(words, np.uint32),
    )

  def _extend(self) -> None:
    """One window for every prompt that is not read yet, like with like."""
    c, groups = self.capacity, collections.defaultdict(list)
    for running in self._running:
      if left := len(running.unread):
        fit = next((w for w in c.widths if left <= w), c.widths[-1])
        groups[fit].append(running)
    for width, group in sorted(groups.items()):
      most = c.rows_in_window(width)
      for start in range(0, len(group), most):
        self._extend_group(group[start : start + most], width)

  def _extend_group(self, group: Sequence[_Running], width: int) -> None:
    size = self.capacity.size(len(group))
    rows_P = np.full((size,), self.capacity.rows, np.int32)
    ids_PW = np.zeros((size, width), np.int32)
    count_P = np.zeros((size,), np.int32)
    for i, running in enumerate(group):
      window = running.unread[:width]
      rows_P[i], count_P[i] = running.slot.index, len(window)
      ids_PW[i, : len(window)] = window
    longest = max(r.slot.length + len(r.unread[:width]) for r in group)
    # A window may not be wider than the cache that it is written to.
    rung = self.capacity.rung(max(longest, width))
    self._extend_rows(rows_P, ids_PW, count_P, rung)
    for running in group:
      self._slots.append(running.slot, running.unread[:width])
      running.unread = running.unread[width:]
      running.job.is_read = not len(running.unread)

  def _extend_rows(self, rows_P, ids_PW, count_P, rung) -> None:
    self._state = programs.extend_rows(
      self._model, self._params, self._state, rows_P, ids_PW,
      np.full(ids_PW.shape, types.Author.PROMPT, np.int8), count_P, rung=rung,
    )  # fmt: skip

  def _decode(self) -> None:
    """A chunk of tokens for everybody whose prompt is read."""
    live = [r for r in self._running if not len(r.unread)]
    for running in [r for r in live if r.slot.length >= r.limit]:
      self._finish(running, jobs.Ended.LENGTH)  # nothing was asked for
      live.remove(running)
    if not live:
      return
    c = self.capacity
    rows_P = np.full((c.size(len(live)),), c.rows, np.int32)
    rows_P[: len(live)] = [running.slot.index for running in live]
    # Who waits for a first token need not wait for a whole chunk.
    steps = c.chunk if all(running.said for running in live) else 1
    longest = max(min(r.slot.length + steps, r.limit) for r in live)
    detailed = any(
      r.job.sampling.top or r.job.sampling.top_k or r.job.sampling.top_p < 1
      for r in live
    )
    said = self._decode_rows(rows_P, live, c.rung(longest), detailed, steps)
    for i, running in enumerate(live):
      n, top = int(said.count[i]), running.job.sampling.top
      tokens = jobs.Tokens(
        ids=said.tokens[i, :n],
        logprobs=said.logprobs[i, :n],
        top_ids=said.top_ids[i, :n, :top],
        top_logprobs=said.top_logprobs[i, :n, :top],
      )
      self._hear(running, tokens, bool(said.stopped[i]))

  def _decode_rows(self, rows_P, live, rung, detailed, steps) -> programs.Said:
    live_P = np.zeros((len(rows_P),), bool)
    live_P[: len(live)] = True
    self._state, said = programs.decode_rows(
      self._model, self._params, self._state, rows_P, live_P,
      _settings(live, len(rows_P)), np.int32(steps), rung=rung,
      chunk=self.capacity.chunk, detailed=detailed,
    )  # fmt: skip
    return jax.device_get(said)

  def _hear(
    self, running: _Running, tokens: jobs.Tokens, stopped: bool
  ) -> None:
    self._slots.append(running.slot, tokens.ids)
    self.counts.sampled_tokens += len(tokens.ids)
    running.said.append(tokens)
    if not np.isfinite(tokens.logprobs).all():
      self._release(running)
      self._fail(
        running.job,
        jobs.Refused(
          500, 'no_distribution', 'the network gave no finite logits'
        ),
      )
      return
    if running.job.listen(tokens) and not stopped:
      self._finish(running, jobs.Ended.SEEN)
    elif stopped:
      self._finish(running, jobs.Ended.STOPPED)
    elif running.slot.length >= running.limit:
      self._finish(running, jobs.Ended.LENGTH)

  def _finish(self, running: _Running, ended: jobs.Ended) -> None:
    self._release(running)
    self.counts.finished += 1
    said = jobs.concatenate(running.said) if running.said else jobs.NOTHING
    if not running.job.done.cancelled():
      running.job.done.set_result(
        jobs.Generated(tokens=said, ended=ended, reused=running.job.reused)
      )

  def _release(self, running: _Running) -> None:
    self._slots.release(running.slot)
    with self._changed:
      self._running.remove(running)

  def _fail(self, job: jobs.Job, error: Exception) -> None:
    self.counts.failed += 1
    if not job.done.done():
      job.done.set_exception(error)

  def _start_over(self, error: Exception) -> None:
    """The state was donated to what failed, so none of it can be trusted."""
    self.counts.device_failures += 1
    for running in list(self._running):
      self._release(running)
      failed = jobs.Refused(500, 'internal_error', 'the engine failed')
      failed.__cause__ = error
      self._fail(running.job, failed)
    self._slots.forget()
    self._state = self._fresh_state()

  def _abandon(self) -> None:
    gone = jobs.Refused(503, 'shutting_down', 'the server is shutting down')
    for running in list(self._running):
      self._release(running)
      self._fail(running.job, gone)
    while self._waiting:
      self._fail(self._waiting.popleft(), gone)


def _settings(live: Sequence[_Running], size: int) -> programs.RowSettings:
  asked = [running.job.sampling for running in live]
  fill = size - len(live)
  stop_PK = np.full((size, MAX_STOPS), -1, np.int32)
  for i, running in enumerate(live):
    stop_PK[i, : len(running.job.stop_ids)] = running.job.stop_ids
  return programs.RowSettings(
    temperature=np.asarray(
      [s.temperature for s in asked] + [0] * fill, np.float32
    ),
    top_k=np.asarray([s.top_k for s in asked] + [0] * fill, np.int32),
    top_p=np.asarray([s.top_p for s in asked] + [1] * fill, np.float32),
    limit=np.asarray([r.limit for r in live] + [0] * fill, np.int32),
    stop=stop_PK,
    author=np.asarray([r.job.author for r in live] + [0] * fill, np.int8),
  )
