"""Charts as hand-written SVG: data in, one string out, nothing to install.

Each figure carries its own style, so that it also stands alone as a file, and
follows the reader's light or dark mode. Series differ by colour (Okabe-Ito
hues), dash and marker at once; every point says its value on hover, and the
whole figure says it in `<desc>`.
"""

from collections.abc import Sequence
import dataclasses
import itertools
import math

from envace_jax.report import markup, svg

_MAX_MARKERS = 24  # more points than this are a line without dots
_DASHES = ('', '6 3', '2 3', '9 3 2 3', '4 4')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Series:
  """One line. `None` or a non-finite number in `y` is a break in it."""

  label: str
  x: Sequence[float]
  y: Sequence[float | None]
  lo: Sequence[float | None] = ()
  hi: Sequence[float | None] = ()
  slot: int = svg.REAL


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bar:
  """One bar with its interval; `value=None` is shown as not measured."""

  label: str
  value: float | None
  lo: float | None = None
  hi: float | None = None
  slot: int = svg.REAL


def curve(
  series: Sequence[Series],
  *,
  title: str,
  x_label: str,
  y_label: str,
  shade: str = '',
  whiskers: bool = False,
  y_range: tuple[float, float] | None = (0.0, 1.0),
) -> str:
  """Lines over x. `shade` names the area between the first two series.

  `whiskers` draws the interval of each point as a bar (few, discrete x);
  otherwise it is a band. `y_range` is widened to hold the data.
  """
  series = [_clean(s) for s in series]
  legend = [_legend_line(i, s) for i, s in enumerate(series)]
  if shade:
    swatch = (
      f'<rect class="gap f{svg.REHEARSED}" y="-5" width="18" height="10"/>'
    )
    legend.append((swatch, shade))
  heads, top = svg.header(title, legend)
  ys = [v for s in series for v in (*s.y, *s.lo, *s.hi) if v is not None]
  xs = [
    x for s in series for x, y in zip(s.x, s.y, strict=True) if y is not None
  ]
  if not xs:
    body = svg.nothing(top)
    return svg.document(
      title, f'{y_label} by {x_label}: not measured', heads + body
    )
  frame = svg.Frame.around(xs, ys, y_range, top)
  parts = [frame.axes(x_label, y_label, discrete=whiskers)]
  if shade and len(series) >= 2:
    parts.append(_shade_between(frame, series[0], series[1]))
  for index, one in enumerate(series):
    shift = 5 * (index - (len(series) - 1) / 2) if whiskers else 0.0
    parts.append(_intervals(frame, one, whiskers, shift))
    parts.append(_line(frame, one, index, shift))
  parts.append(_last_values(frame, series))
  says = '; '.join(_in_words(s) for s in series)
  return svg.document(
    title, f'{y_label} by {x_label}. {says}', heads + ''.join(parts)
  )


def bars(
  items: Sequence[Bar],
  *,
  title: str,
  y_label: str,
  y_range: tuple[float, float] | None = (0.0, 1.0),
) -> str:
  """One bar per item from zero, with its interval and its value on top."""
  heads, top = svg.header(title, [])
  values = [_finite(v) for b in items for v in (b.value, b.lo, b.hi)]
  ys = [v for v in values if v is not None]
  if not ys:
    return svg.document(
      title, f'{y_label}: not measured', heads + svg.nothing(top)
    )
  frame = svg.Frame.around([0, 1], [0.0, *ys], y_range, top)
  parts = [frame.axes('', y_label, x_ticks=False)]
  room = (svg.RIGHT - svg.LEFT) / len(items)
  wide = min(64.0, room * 0.6)
  for index, item in enumerate(items):
    parts.append(_bar(frame, item, svg.LEFT + room * (index + 0.5), wide, room))
  says = '; '.join(
    f'{b.label} {markup.number(_finite(b.value))}'
    f' [{markup.number(_finite(b.lo))}, {markup.number(_finite(b.hi))}]'
    for b in items
  )
  return svg.document(title, f'{y_label}. {says}', heads + ''.join(parts))


def _clean(one: Series) -> Series:
  ys = tuple(_finite(y) for y in one.y)
  lo = tuple(_finite(v) for v in one.lo) or (None,) * len(ys)
  hi = tuple(_finite(v) for v in one.hi) or (None,) * len(ys)
  rows = sorted(zip(one.x, ys, lo, hi, strict=True), key=lambda row: row[0])
  columns = tuple(zip(*rows, strict=True)) if rows else ((), (), (), ())
  return dataclasses.replace(
    one, x=columns[0], y=columns[1], lo=columns[2], hi=columns[3]
  )


def _runs(one: Series) -> list[list[tuple]]:
  """The unbroken pieces of a line as (x, y, lo, hi) rows."""
  rows = zip(one.x, one.y, one.lo, one.hi, strict=True)
  grouped = itertools.groupby(rows, key=lambda row: row[1] is not None)
  return [list(rows) for measured, rows in grouped if measured]


def _line(frame: svg.Frame, one: Series, index: int, shift: float) -> str:
  dash = _DASHES[index % len(_DASHES)]
  parts = []
  for run in _runs(one):
    points = [(frame.x(x) + shift, frame.y(y)) for x, y, _, _ in run]
    parts.append(
      f'<polyline class="path s{one.slot}" stroke-dasharray="{dash}" '
      f'points="{svg.points(points)}"/>'
    )
    for (x, y), (step, value, lo, hi) in zip(points, run, strict=True):
      sparse = len(one.x) <= _MAX_MARKERS
      about = f'{one.label}, {svg.tick(step)}: {markup.number(value, 3)}'
      if lo is not None and hi is not None:
        about += f' [{markup.number(lo, 3)}, {markup.number(hi, 3)}]'
      shape = (
        _marker(index, x, y, one.slot)
        if sparse
        else (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="transparent"/>')
      )
      title = f'<title>{markup.escape(about)}</title>'
      parts.append(f'<g>{shape}{title}</g>')
  return ''.join(parts)


def _marker(index: int, x: float, y: float, slot: int) -> str:
  kind = f'class="mark f{slot}"'
  if index % 3 == 0:
    return f'<circle {kind} cx="{x:.1f}" cy="{y:.1f}" r="3.9"/>'
  if index % 3 == 1:
    return (
      f'<rect {kind} x="{x - 3.6:.1f}" y="{y - 3.6:.1f}" '
      'width="7.2" height="7.2"/>'
    )
  corners = [(x, y - 4.8), (x + 4.6, y + 3.4), (x - 4.6, y + 3.4)]
  return f'<polygon {kind} points="{svg.points(corners)}"/>'


def _intervals(
  frame: svg.Frame, one: Series, whiskers: bool, shift: float
) -> str:
  parts = []
  for run in _runs(one):
    known = [r for r in run if r[2] is not None and r[3] is not None]
    if not whiskers and len(known) > 1:
      edge = [(frame.x(x), frame.y(hi)) for x, _, _, hi in known]
      edge += [(frame.x(x), frame.y(lo)) for x, _, lo, _ in reversed(known)]
      parts.append(
        f'<polygon class="band f{one.slot}" points="{svg.points(edge)}"/>'
      )
    elif whiskers:
      parts += [
        _whisker(frame, frame.x(x) + shift, lo, hi, f's{one.slot}')
        for x, _, lo, hi in known
      ]
  return ''.join(parts)


def _whisker(
  frame: svg.Frame, x: float, lo: float, hi: float, kind: str
) -> str:
  low, high = frame.y(lo), frame.y(hi)
  return (
    f'<path class="whisker {kind}" d="M{x:.1f} {low:.1f}V{high:.1f}'
    f'M{x - 4:.1f} {low:.1f}h8M{x - 4:.1f} {high:.1f}h8"/>'
  )


def _shade_between(frame: svg.Frame, one: Series, other: Series) -> str:
  """The area between two lines, over the x where both were measured.

  It takes the colour of the upper line, so that it changes where they cross.
  """
  theirs = dict(zip(other.x, other.y, strict=True))
  runs = [[]]
  for x, y in zip(one.x, one.y, strict=True):
    if x not in theirs:
      continue
    if y is None or theirs[x] is None:
      runs.append([])
    else:
      runs[-1].append((x, y, theirs[x]))
  parts = []
  for run in runs:
    for (x0, a0, b0), (x1, a1, b1) in itertools.pairwise(run):
      cut = [(x0, a0, b0), (x1, a1, b1)]
      if (b0 - a0) * (b1 - a1) < 0:
        share = (b0 - a0) / ((b0 - a0) - (b1 - a1))
        level = a0 + share * (a1 - a0)
        cut.insert(1, (x0 + share * (x1 - x0), level, level))
      for left, right in itertools.pairwise(cut):
        above = left[2] + right[2] > left[1] + right[1]
        slot = other.slot if above else one.slot
        corners = [
          (frame.x(left[0]), frame.y(left[1])),
          (frame.x(right[0]), frame.y(right[1])),
          (frame.x(right[0]), frame.y(right[2])),
          (frame.x(left[0]), frame.y(left[2])),
        ]
        parts.append(
          f'<polygon class="gap f{slot}" points="{svg.points(corners)}"/>'
        )
  return ''.join(parts)


def _last_values(frame: svg.Frame, series: Sequence[Series]) -> str:
  """The end of each line as a number, moved apart where they would touch."""
  ends = []
  for one in series:
    measured = [y for y in one.y if y is not None]
    if measured:
      ends.append((frame.y(measured[-1]), measured[-1]))
  ends.sort()
  places = [y for y, _ in ends]
  for i in range(1, len(places)):
    places[i] = max(places[i], places[i - 1] + 13)
  spill = max(0.0, (places[-1] if places else 0.0) - svg.BOTTOM)
  return ''.join(
    svg.text(svg.RIGHT + 4, y - spill + 4, markup.number(value), kind='value')
    for y, (_, value) in zip(places, ends, strict=True)
  )


def _bar(
  frame: svg.Frame, item: Bar, x: float, wide: float, room: float
) -> str:
  fits = max(3, int(room / 6.4))
  label = item.label
  label = label if len(label) <= fits else label[: fits - 1] + '…'
  parts = [svg.text(x, svg.BOTTOM + 18, label, 'middle', 'name')]
  value, lo, hi = _finite(item.value), _finite(item.lo), _finite(item.hi)
  if value is None:
    parts.append(svg.text(x, frame.y(0) - 8, '–', 'middle'))
    return ''.join(parts)
  top, bottom = sorted((frame.y(value), frame.y(0)))
  about = f'{item.label}: {markup.number(value, 3)}'
  parts.append(
    f'<rect class="bar f{item.slot}" x="{x - wide / 2:.1f}" y="{top:.1f}" '
    f'width="{wide:.1f}" height="{max(0.5, bottom - top):.1f}" rx="2">'
    f'<title>{markup.escape(about)}</title></rect>'
  )
  highest = top
  if lo is not None and hi is not None:
    parts.append(_whisker(frame, x, lo, hi, 'ink'))
    highest = min(highest, frame.y(hi))
  parts.append(
    svg.text(x, highest - 7, markup.number(value), 'middle', 'value')
  )
  return ''.join(parts)


def _legend_line(index: int, one: Series) -> tuple[str, str]:
  dash = _DASHES[index % len(_DASHES)]
  swatch = (
    f'<path class="path s{one.slot}" stroke-dasharray="{dash}" d="M0 0h18"/>'
    + _marker(index, 9, 0, one.slot)
  )
  return swatch, one.label


def _in_words(one: Series) -> str:
  measured = [
    (x, y) for x, y in zip(one.x, one.y, strict=True) if y is not None
  ]
  if not measured:
    return f'{one.label}: not measured'
  (x0, y0), (x1, y1) = measured[0], measured[-1]
  return (
    f'{one.label}: {markup.number(y0)} at {svg.tick(x0)}, '
    f'{markup.number(y1)} at {svg.tick(x1)}'
  )


def _finite(value: float | None) -> float | None:
  if value is None or not math.isfinite(value):
    return None
  return float(value)
