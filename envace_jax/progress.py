"""Progress that a person can see: a bar on a terminal, log lines elsewhere.

`bar` wraps anything that may run longer than two seconds. On a terminal it
draws one rich bar on stderr with the rate and the time left, and log lines are
printed above it rather than through it. Elsewhere (a file, a pipe, CI) it
stays silent for two seconds and then logs a plain line now and then, also
while one long call blocks; a run shorter than that says nothing.
"""

from collections.abc import Iterable, Iterator
import contextlib
import logging as python_logging
import sys
import threading
import time
import typing

from absl import logging
import rich.console
import rich.progress
import rich.text

FIRST_LINE_SECONDS = 2.0
LINE_SECONDS = 15.0

T = typing.TypeVar('T')


class Bar(typing.Protocol):
  """What the body of a `with progress.bar(...)` sees."""

  def advance(self, amount: float = 1, **shown: typing.SupportsFloat) -> None:
    """Moves on by `amount`; `shown` are values to print beside the bar."""


@contextlib.contextmanager
def bar(
  description: str,
  total: float | None = None,
  *,
  unit: str = 'step',
  active: bool = True,
  console: rich.console.Console | None = None,
) -> Iterator[Bar]:
  """Shows progress while the body runs; `total=None` means 'unknown'."""
  if not active:
    yield _Silent()
    return
  console = console or rich.console.Console(file=sys.stderr)
  if console.is_terminal and not console.is_dumb_terminal:
    with _terminal_bar(console, description, total, unit) as shown:
      yield shown
  else:
    lines = _Lines(description, total, unit)
    try:
      yield lines
    finally:
      lines.close()


def track(
  items: Iterable[T],
  description: str,
  total: float | None = None,
  *,
  unit: str = 'step',
  active: bool = True,
) -> Iterator[T]:
  """Iterates over `items` under a bar."""
  if total is None and hasattr(items, '__len__'):
    total = len(items)
  with bar(description, total, unit=unit, active=active) as shown:
    for item in items:
      yield item
      shown.advance()


class _Silent:
  def advance(self, amount: float = 1, **shown: typing.SupportsFloat) -> None:
    del amount, shown


class _RichBar:
  def __init__(
    self, progress: rich.progress.Progress, task: rich.progress.TaskID
  ):
    self._progress = progress
    self._task = task

  def advance(self, amount: float = 1, **shown: typing.SupportsFloat) -> None:
    self._progress.update(self._task, advance=amount, shown=_values(shown))


class _Rate(rich.progress.ProgressColumn):
  def render(self, task: rich.progress.Task) -> rich.text.Text:
    rate = task.finished_speed or task.speed
    text = '' if rate is None else f'{rate:.3g} {task.fields["unit"]}/s'
    return rich.text.Text(text, style='progress.data.speed')


# A terminal has one live display; a bar inside a bar is a second row of it.
_on_screen: list[rich.progress.Progress] = []


@contextlib.contextmanager
def _terminal_bar(
  console: rich.console.Console,
  description: str,
  total: float | None,
  unit: str,
) -> Iterator[Bar]:
  fields = {'unit': unit, 'shown': ''}
  if _on_screen:
    progress = _on_screen[0]
    task = progress.add_task(description, total=total, **fields)
    try:
      yield _RichBar(progress, task)
    finally:
      progress.remove_task(task)
    return
  progress = rich.progress.Progress(
    rich.progress.SpinnerColumn(),
    # Descriptions are text, not markup: '[a/b]' must not vanish.
    rich.progress.TextColumn('{task.description}', markup=False),
    rich.progress.BarColumn(bar_width=24),
    rich.progress.MofNCompleteColumn(),
    _Rate(),
    rich.progress.TimeElapsedColumn(),
    rich.progress.TimeRemainingColumn(),
    rich.progress.TextColumn('{task.fields[shown]}', markup=False),
    console=console,
  )
  before = sys.stderr
  with progress, _logs_follow_stderr(before):
    _on_screen.append(progress)
    try:
      task = progress.add_task(description, total=total, **fields)
      yield _RichBar(progress, task)
    finally:
      _on_screen.pop()


@contextlib.contextmanager
def _logs_follow_stderr(before: typing.TextIO) -> Iterator[None]:
  """Log lines that went to `before` go to the stderr rich put in its place.

  A handler holds the stream it was made with, so its lines would otherwise be
  drawn across the live bar.
  """
  handlers = [logging.get_absl_handler().python_handler]
  handlers += python_logging.getLogger().handlers
  moved = [h for h in handlers if getattr(h, 'stream', None) is before]
  for handler in moved:
    handler.setStream(sys.stderr)
  try:
    yield
  finally:
    for handler in moved:
      handler.setStream(before)


class _Lines:
  """Log lines from a heartbeat thread, so that a blocked body still shows."""

  def __init__(self, description: str, total: float | None, unit: str):
    self._description = description
    self._total = total
    self._unit = unit
    self._done = 0.0
    self._shown = ''
    self._start = time.monotonic()
    self._spoke = False
    self._stop = threading.Event()
    self._thread = threading.Thread(target=self._beat, daemon=True)
    self._thread.start()

  def advance(self, amount: float = 1, **shown: typing.SupportsFloat) -> None:
    self._done += amount
    self._shown = _values(shown)

  def close(self) -> None:
    self._stop.set()
    self._thread.join()
    if self._spoke:
      self._log('finished' if self._total == self._done else 'stopped')

  def _beat(self) -> None:
    wait = FIRST_LINE_SECONDS
    while not self._stop.wait(wait):
      self._spoke = True
      self._log('')
      wait = LINE_SECONDS

  def _log(self, state: str) -> None:
    seconds = time.monotonic() - self._start
    rate = self._done / seconds if seconds > 0 else 0.0
    parts = [f'{self._done:g}']
    if self._total is not None:
      parts[0] += f'/{self._total:g}'
    parts[0] += f' {self._unit}'
    parts.append(f'{rate:.3g} {self._unit}/s')
    parts.append(f'{seconds:.0f} s')
    if not state and self._total is not None and rate > 0:
      left = max(0.0, self._total - self._done) / rate
      parts.append(f'{left:.0f} s left')
    if self._shown:
      parts.append(self._shown)
    if state:
      parts.append(state)
    logging.info('%s: %s', self._description, ', '.join(parts))


def _values(shown: dict[str, typing.SupportsFloat]) -> str:
  return ' '.join(f'{key} {float(x):.3g}' for key, x in shown.items())
