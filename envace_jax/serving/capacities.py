"""How much is served at a time, and in which sizes: what is compiled."""

import dataclasses


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

  def width(self, tokens: int) -> int:
    """The narrowest window that reads so many in two, or the widest."""
    return next((w for w in self.widths if tokens <= 2 * w), self.widths[-1])

  def rows_in_window(self, width: int) -> int:
    """As many as may be extended by so wide a window at a time."""
    fitting = [n for n in self.sizes if n * width <= self.window_tokens]
    return fitting[-1] if fitting else self.sizes[0]


def fitting(*, rows: int, context: int, queue: int) -> Capacity:
  """Small sets of sizes: compiling a program costs seconds to minutes."""
  ladder, rung = [], 256
  while rung < context:
    ladder.append(rung)
    rung *= 4
  return Capacity(
    rows=rows,
    context=context,
    queue=queue,
    sizes=(*(n for n in (1, 8) if n < rows), rows),
    widths=tuple(w for w in (8, 32, 128) if w < context) or (context,),
    ladder=(*ladder, context),
  )
