"""What a run measured: means that know their weight, and files that resume.

`metrics.jsonl` holds deterministic values only, so that an interrupted run and
an unbroken one leave the same bytes; seconds, rates and what judges cost, which
never repeat, go to `timings.jsonl`. Both also go to TensorBoard event files.

Resuming from a checkpoint of step s keeps the lines with `step <= s` and drops
what a killed process had written beyond it. Hence one rule for the caller:
write everything about step s *before* saving the checkpoint of step s.
"""

from collections.abc import Mapping
import dataclasses
import json
import math
import operator
import os
import pathlib
import typing

METRICS_FILE = 'metrics.jsonl'
TIMINGS_FILE = 'timings.jsonl'
NON_FINITE = 'non_finite'  # key that counts the values a line lost to null
_RESERVED = ('step', NON_FINITE)

Scalar = typing.SupportsFloat | None


@dataclasses.dataclass(frozen=True)
class WeightedMean:
  """A mean kept as (sum, count), so that parts merge into the true whole."""

  sum: float = 0.0
  count: float = 0.0

  def add(self, value: float, weight: float = 1.0) -> 'WeightedMean':
    """The mean with one more value; the receiver is unchanged."""
    if weight < 0:
      raise ValueError(f'weight={weight} must not be negative')
    return WeightedMean(
      self.sum + float(value) * float(weight), self.count + float(weight)
    )

  def merge(self, other: 'WeightedMean') -> 'WeightedMean':
    return WeightedMean(self.sum + other.sum, self.count + other.count)

  @property
  def mean(self) -> float | None:
    """None when nothing was added: 'not measured' is neither 0 nor NaN."""
    return self.sum / self.count if self.count > 0 else None


class Writer:
  """Appends metrics and timings of one run to its workdir.

  `resume_step=None` starts a run and refuses a workdir that already has one;
  `resume_step=s` keeps steps up to s; `resume_step=-1` keeps nothing (a run
  that died before its first checkpoint). A writer that is not `active`, as on
  every process but the first, touches no file.
  """

  def __init__(
    self,
    workdir: str | os.PathLike[str],
    *,
    resume_step: int | None = None,
    active: bool = True,
    tensorboard: bool = True,
  ):
    self.non_finite = 0  # values written as null since step 0
    self._files: dict[str, typing.TextIO] = {}
    self._events = None
    self._active = active
    if not active:
      return
    workdir = pathlib.Path(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    for name in (METRICS_FILE, TIMINGS_FILE):
      path = workdir / name
      if resume_step is None:
        _refuse_existing(path)
      else:
        _truncate(path, resume_step)
    for line in read(workdir / METRICS_FILE):
      self.non_finite += int(line.get(NON_FINITE) or 0)
    for name in (METRICS_FILE, TIMINGS_FILE):
      self._files[name] = (workdir / name).open('a', encoding='utf-8')
    if tensorboard:
      self._events = _open_events(workdir / 'tensorboard', resume_step)

  def write(self, step: int, metrics: Mapping[str, Scalar]) -> None:
    """Appends values that a resumed run would reproduce exactly."""
    self._append(METRICS_FILE, step, metrics)

  def write_timings(self, step: int, timings: Mapping[str, Scalar]) -> None:
    """Appends wall-clock values: seconds, rates, anything that varies."""
    self._append(TIMINGS_FILE, step, timings)

  def close(self) -> None:
    for file in self._files.values():
      file.flush()
      os.fsync(file.fileno())
      file.close()
    self._files = {}
    if self._events is not None:
      self._events.close()
      self._events = None
    self._active = False

  def __enter__(self) -> 'Writer':
    return self

  def __exit__(self, *_) -> None:
    self.close()

  def _append(self, name: str, step: int, values: Mapping[str, Scalar]) -> None:
    if not self._active:
      return
    step = operator.index(step)
    if step < 0:
      raise ValueError(f'step={step} must not be negative')
    numbers = {key: _number(key, value) for key, value in values.items()}
    finite = {key: x if _is_finite(x) else None for key, x in numbers.items()}
    lost = sum(x is not None and not math.isfinite(x) for x in numbers.values())
    line = {'step': step, **finite}
    if lost:
      line[NON_FINITE] = lost
      self.non_finite += lost if name == METRICS_FILE else 0
    text = json.dumps(line, sort_keys=True, allow_nan=False)
    self._files[name].write(text + '\n')
    self._files[name].flush()  # a kill -9 loses at most the line being written
    if self._events is not None:
      for key, value in finite.items():
        if value is not None:
          self._events.add_scalar(key, value, step)


def read(path: str | os.PathLike[str]) -> list[dict]:
  """The lines of a `.jsonl` file; a torn last line is left out."""
  return [json.loads(raw) for raw in _whole_lines(pathlib.Path(path))]


def _whole_lines(path: pathlib.Path) -> list[bytes]:
  """Raw lines that parse, so that what is kept is kept byte for byte."""
  if not path.exists():
    return []
  lines = path.read_bytes().split(b'\n')
  kept = []
  for number, raw in enumerate(lines, start=1):
    if not raw:
      continue
    try:
      parsed = json.loads(raw)
    except ValueError as error:  # bad UTF-8 is a ValueError too
      if number == len(lines):  # no newline after it: torn by a kill
        break
      raise ValueError(
        f'{path}:{number} is not JSON; remove that line, or the workdir'
      ) from error
    if not isinstance(parsed, dict) or 'step' not in parsed:
      if number == len(lines):
        break
      raise ValueError(f"{path}:{number} has no 'step'; is it a metrics file?")
    kept.append(raw)
  return kept


def _truncate(path: pathlib.Path, last_step: int) -> None:
  """Atomically keeps the lines up to `last_step`, as they are."""
  if not path.exists():
    return
  kept = [
    raw for raw in _whole_lines(path) if json.loads(raw)['step'] <= last_step
  ]
  temporary = path.with_name(path.name + '.tmp')
  with temporary.open('wb') as file:
    file.write(b''.join(raw + b'\n' for raw in kept))
    file.flush()
    os.fsync(file.fileno())
  temporary.replace(path)


def _refuse_existing(path: pathlib.Path) -> None:
  if path.exists() and path.stat().st_size:
    raise ValueError(
      f'{path} already holds a run; resume it with resume_step, or choose '
      'another workdir'
    )


def _open_events(directory: pathlib.Path, resume_step: int | None):
  # Imported here: half a second that every command without a Writer saves.
  import tensorboardX

  return tensorboardX.SummaryWriter(
    str(directory),
    purge_step=None if resume_step is None else resume_step + 1,
    # Event files are named by the second; a quick restart must not overwrite.
    filename_suffix=f'.{os.getpid()}.{len(list(directory.glob("*")))}',
  )


def _number(key: str, value: Scalar) -> float | None:
  if not isinstance(key, str) or key in _RESERVED:
    raise ValueError(f'{key!r} cannot be a metric name (reserved or no string)')
  if value is None:
    return None
  if isinstance(value, str | bytes):
    raise ValueError(f'metric {key!r} is text: {value!r}; metrics are numbers')
  try:
    return float(value)
  except (TypeError, ValueError, OverflowError) as error:
    raise ValueError(f'metric {key!r} is not one number: {value!r}') from error


def _is_finite(value: float | None) -> bool:
  return value is not None and math.isfinite(value)
