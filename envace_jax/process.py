"""What a run watches about its own process: compiles, time, a wish to stop."""

import contextlib
import signal
import time
import types

import jax

_COMPILED = '/jax/core/compile/backend_compile_duration'


class CompileCounter:
  """Programs and seconds spent compiling since it was made.

  A program that comes out of the persistent cache counts too: it was asked
  for, and on another machine it would be compiled.
  """

  def __init__(self):
    self.count = 0
    self.seconds = 0.0
    jax.monitoring.register_event_duration_secs_listener(self._on_event)

  def _on_event(self, event: str, seconds: float, **_) -> None:
    if event == _COMPILED:
      self.count += 1
      self.seconds += seconds


class Clock:
  """Seconds per named stage of this process; a stage may be entered again."""

  def __init__(self):
    self._start = time.monotonic()
    self._seconds: dict[str, float] = {}

  @contextlib.contextmanager
  def __call__(self, stage: str):
    start = time.monotonic()
    try:
      yield
    finally:
      spent = time.monotonic() - start
      self._seconds[stage] = self._seconds.get(stage, 0.0) + spent

  @property
  def seconds(self) -> dict[str, float]:
    return self._seconds | {'total': time.monotonic() - self._start}


class Stopped(Exception):
  """A run ended early on request, with everything saved."""


class StopRequest:
  """Turns SIGTERM and SIGINT into a flag that the loop reads.

  A second signal is not caught: whoever is impatient is obeyed at once.
  """

  def __init__(self):
    self.requested = False

  @contextlib.contextmanager
  def listening(self):
    previous = {
      number: signal.signal(number, self._on_signal)
      for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
      yield self
    finally:
      for number, handler in previous.items():
        signal.signal(number, handler)

  def _on_signal(self, number: int, frame: types.FrameType | None) -> None:
    del frame
    self.requested = True
    signal.signal(number, signal.SIG_DFL)
