"""A request under way: the jobs that run for it now, and those that follow.

Whatever of it fails, fails it once: nothing of it is left running.
"""

from collections.abc import Callable, Sequence
import concurrent.futures
import threading

from envace_jax.serving import engine, jobs

# Told of one job and what it came to, by the engine's thread.
Then = Callable[[jobs.Job, jobs.Generated], None]


class Pending:
  """What somebody waits for; `done` holds it, or why there is none."""

  def __init__(self, motor: engine.Engine):
    self._motor = motor
    self._lock = threading.Lock()
    self._running: list[jobs.Job] = []
    self._is_given_up = False
    self.done: concurrent.futures.Future = concurrent.futures.Future()
    # Nobody cancels what is waited for, only the jobs behind it.
    self.done.set_running_or_notify_cancel()

  def submit(
    self, group: Sequence[jobs.Job], then: Then, *, goes_on: bool = False
  ) -> None:
    """Lets jobs wait for rows; `goes_on` where the request was let in before.

    Raises:
      Refused: there is no room to wait.
      CancelledError: nobody waits any more.
    """
    with self._lock:
      if self._is_given_up:
        raise concurrent.futures.CancelledError
      self._running += group
    for job in group:
      job.done.add_done_callback(lambda _, job=job: self._ended(job, then))
    self._motor.submit(group, goes_on=goes_on)

  def cancel(self) -> None:
    """Nobody waits for it; its rows are free a moment later."""
    self._give_up()
    self._motor.wake()

  def finish(self, value) -> None:
    if not self.done.done():
      self.done.set_result(value)

  def fail(self, error: BaseException) -> None:
    """Gives up what still runs, and says why."""
    self._give_up()
    if not self.done.done():
      self.done.set_exception(error)

  def _ended(self, job: jobs.Job, then: Then) -> None:
    with self._lock:
      self._running.remove(job)
    try:
      then(job, job.done.result())
    except (Exception, concurrent.futures.CancelledError) as error:
      self.fail(error)

  def _give_up(self) -> None:
    with self._lock:
      self._is_given_up = True
      for job in self._running:
        job.cancel()
