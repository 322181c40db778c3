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
import threading
import time

from absl import logging
import numpy as np

from envace_jax.model import transformer
from envace_jax.serving import capacities, jobs, slots
from envace_jax.serving import counts as counting
from envace_jax.serving import rows as device


@dataclasses.dataclass(eq=False)
class _Running:
  """A job with a row."""

  job: jobs.Job
  slot: slots.Slot
  unread: np.ndarray  # of the prompt
  limit: int  # length at which the row must end
  said: list[jobs.Tokens] = dataclasses.field(default_factory=list)


class Engine:
  """Answers prompts. `submit` may be called from any thread."""

  def __init__(
    self,
    model: transformer.Transformer,
    params,
    limits: capacities.Capacity,
  ):
    self.capacity, self.counts = limits, counting.Counts()
    self._slots = slots.Slots(limits.rows, limits.context)
    self._rows = device.Rows(model, params, limits)
    self.vocab_size = model.config.vocab_size
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
  def is_alive(self) -> bool:
    return self._thread.is_alive() and not self._closing

  @property
  def waiting(self) -> int:
    return len(self._waiting)

  @property
  def running(self) -> int:
    return len(self._running)

  def submit(self, group: Sequence[jobs.Job], *, goes_on: bool = False) -> None:
    """Lets some jobs wait for rows, all or none.

    What `goes_on` follows from jobs that were let in before: it waits in front,
    is never one too many, and is still answered while the engine drains.

    Raises:
      Refused: the queue is full, or the engine is closing.
    """
    with self._changed:
      is_closed = self._draining and not goes_on
      if is_closed or not self._thread.is_alive():
        raise jobs.Refused(503, 'shutting_down', 'the server is shutting down')
      if goes_on:
        self._waiting.extendleft(reversed(group))
        self._changed.notify()
        return
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
    return self._rows.warm_up()

  def score(self, ids: np.ndarray, top: int = 0) -> jobs.Tokens:
    """Log-probs of given tokens; from any thread, beside what is running."""
    return self._rows.score(ids, top)

  def _run(self) -> None:
    try:
      self._serve()
    finally:  # also where not even a new beginning is possible
      self._abandon()

  def _serve(self) -> None:
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
      self._rows.open(
        place.target.index,
        place.source.index,
        place.keep,
        job.sampling.seed,
        job.choice,
      )
      job.reused, job.is_read = place.keep, place.keep == len(job.prompt)
      self.counts.admitted += 1
      self.counts.prompt_tokens += len(job.prompt)
      self.counts.reused_tokens += place.keep

  def _extend(self) -> None:
    """One window for every prompt that is not read yet, like with like."""
    c, groups = self.capacity, collections.defaultdict(list)
    for running in self._running:
      if left := len(running.unread):
        groups[c.width(left)].append(running)
    for width, group in sorted(groups.items()):
      most = c.rows_in_window(width)
      for start in range(0, len(group), most):
        self._extend_group(group[start : start + most], width)

  def _extend_group(self, group: Sequence[_Running], width: int) -> None:
    longest = max(r.slot.length + len(r.unread[:width]) for r in group)
    # A window may not be wider than the cache that it is written to.
    rung = self.capacity.rung(max(longest, width))
    self._rows.extend(
      [running.slot.index for running in group],
      [running.unread[:width] for running in group],
      width,
      rung,
    )
    for running in group:
      self._slots.append(running.slot, running.unread[:width])
      running.unread = running.unread[width:]
      running.job.is_read = not len(running.unread)

  def _decode(self) -> None:
    """A chunk of tokens for everybody whose prompt is read."""
    live = [r for r in self._running if not len(r.unread)]
    for running in [r for r in live if r.slot.length >= r.limit]:
      self._finish(running, jobs.Ended.LENGTH)  # nothing was asked for
      live.remove(running)
    if not live:
      return
    c = self.capacity
    # Who waits for a first token alone need not wait for a whole chunk; in
    # company, stopping for each newcomer would cost everybody.
    steps = c.chunk if any(running.said for running in live) else 1
    longest = max(min(r.slot.length + steps, r.limit) for r in live)
    detailed = any(
      r.job.sampling.top or r.job.sampling.top_k or r.job.sampling.top_p < 1
      for r in live
    )
    said = self._rows.decode(
      [running.slot.index for running in live],
      [(running.job, running.limit) for running in live],
      c.rung(longest),
      steps,
      detailed=detailed,
    )
    for i, running in enumerate(live):
      n, top = int(said.count[i]), running.job.sampling.top
      tokens = jobs.Tokens(
        ids=said.tokens[i, :n],
        logprobs=said.logprobs[i, :n],
        top_ids=said.top_ids[i, :n, :top],
        top_logprobs=said.top_logprobs[i, :n, :top],
      )
      self._hear(running, tokens, bool(said.stopped[i]))

  def _hear(
    self, running: _Running, tokens: jobs.Tokens, stopped: bool
  ) -> None:
    self._slots.append(running.slot, tokens.ids)
    self.counts.sampled_tokens += len(tokens.ids)
    running.said.append(tokens)
    is_enough, failed = False, None
    if not np.isfinite(tokens.logprobs).all():
      failed = jobs.Refused(
        500, 'no_distribution', 'the network gave no finite logits'
      )
    else:
      try:
        is_enough = running.job.listen(tokens)
      except Exception:  # who listens badly fails alone
        logging.exception('the listener of a request failed')
        failed = jobs.Refused(500, 'internal_error', 'the request failed')
    if failed is not None:
      self._release(running)
      self._fail(running.job, failed)
      return
    if is_enough and not stopped:
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
    self._rows.reset()

  def _abandon(self) -> None:
    gone = jobs.Refused(503, 'shutting_down', 'the server is shutting down')
    for running in list(self._running):
      self._release(running)
      self._fail(running.job, gone)
    with self._changed:
      self._draining = True
      waiting = list(self._waiting)
      self._waiting.clear()
    for job in waiting:
      self._fail(job, gone)
