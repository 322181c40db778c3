"""The page a chart is drawn on: style, title, legend, scales and axes."""

from collections.abc import Iterable, Sequence
import dataclasses
import math

from envace_jax.report import markup

WIDTH, HEIGHT = 440, 300
LEFT, RIGHT, BOTTOM = 40, 396, 258  # plot area; its top follows the legend
_CHAR = 6.2  # mean advance of one character at the base size

# Slots are meanings, used alike in every figure and in the transcripts.
REAL, REHEARSED, THIRD, FOURTH, NEUTRAL = range(5)

_LIGHT = (
  '--paper:#fff;--ink:#1d1c1a;--soft:#66635c;--line:#e2dfd8;'
  '--c0:#0b6bb0;--c1:#c4560b;--c2:#00795c;--c3:#a3437d;--c4:#6b6860'
)
_DARK = (
  '--paper:#1c1d20;--ink:#e9e7e2;--soft:#a5a29b;--line:#35373c;'
  '--c0:#6fb6f0;--c1:#f2995c;--c2:#54c3a2;--c3:#dc9cc6;--c4:#b3b0a8'
)
STYLE = f"""
.fig{{{_LIGHT};
font:11.5px ui-sans-serif,system-ui,-apple-system,'Segoe UI',Roboto,
'Helvetica Neue',Arial,sans-serif;font-variant-numeric:tabular-nums}}
@media (prefers-color-scheme:dark){{
:root:not([data-theme=light]) .fig,.fig:root{{{_DARK}}}}}
[data-theme=dark] .fig{{{_DARK}}}
.fig text{{fill:var(--soft)}}
.fig .title{{fill:var(--ink);font-size:13.5px;font-weight:600}}
.fig .name,.fig .value{{fill:var(--ink)}}
.fig .value{{font-weight:600}}
.fig .paper{{fill:var(--paper)}}
.fig .grid{{stroke:var(--line);stroke-width:1}}
.fig .axis{{stroke:var(--soft);stroke-width:1}}
.fig .path{{fill:none;stroke-width:2;stroke-linejoin:round;
stroke-linecap:round}}
.fig .band{{opacity:.13}}
.fig .gap{{opacity:.2}}
.fig .ink{{stroke:var(--ink)}}
.fig .bar{{opacity:.85}}
.fig .whisker{{stroke-width:1.5;fill:none}}
.fig .mark{{stroke:var(--paper);stroke-width:1.5}}
""" + ''.join(
  f'.fig .s{i}{{stroke:var(--c{i})}}.fig .f{i}{{fill:var(--c{i})}}\n'
  for i in range(5)
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Frame:
  """Data coordinates to pixels, and the ticks between them."""

  x0: float
  x1: float
  y0: float
  y1: float
  top: float
  xs: tuple[float, ...]

  @classmethod
  def around(cls, xs, ys, y_range, top: float) -> 'Frame':
    low, high = y_range or (min(ys), max(ys))
    low, high = min([low, *ys]), max([high, *ys])
    if low == high:
      low, high = low - 0.5, high + 0.5
    step = _step(low, high)
    low, high = math.floor(low / step) * step, math.ceil(high / step) * step
    x0, x1 = min(xs), max(xs)
    if x0 == x1:
      x0, x1 = x0 - 1, x1 + 1
    distinct = tuple(sorted(set(xs)))
    return cls(x0=x0, x1=x1, y0=low, y1=high, top=top, xs=distinct)

  def x(self, value: float) -> float:
    inset = 10
    span = RIGHT - LEFT - 2 * inset
    return LEFT + inset + (value - self.x0) / (self.x1 - self.x0) * span

  def y(self, value: float) -> float:
    share = (value - self.y0) / (self.y1 - self.y0)
    return BOTTOM - share * (BOTTOM - self.top)

  def axes(
    self,
    x_label: str,
    y_label: str,
    *,
    discrete: bool = False,
    x_ticks: bool = True,
  ) -> str:
    parts = []
    for value in _ticks(self.y0, self.y1):
      y = self.y(value)
      kind = 'axis' if value == 0 else 'grid'
      parts.append(rule(kind, LEFT, y, RIGHT, y))
      parts.append(text(LEFT - 7, y + 4, tick(value), 'end'))
    if self.y0 > 0:
      parts.append(rule('axis', LEFT, BOTTOM, RIGHT, BOTTOM))
    places: Sequence[float] = ()
    if x_ticks:
      few = discrete and len(self.xs) <= 8
      places = self.xs if few else _ticks(self.x0, self.x1)
    for value in places:
      x = self.x(value)
      parts.append(rule('axis', x, BOTTOM, x, BOTTOM + 4))
      parts.append(text(x, BOTTOM + 17, tick(value), 'middle'))
    parts.append(text((LEFT + RIGHT) / 2, HEIGHT - 8, x_label, 'middle'))
    parts.append(text(8, self.top - 12, y_label))
    return ''.join(parts)


def document(title: str, says: str, body: str) -> str:
  """A stand-alone SVG; `says` is what a screen reader reads."""
  return (
    f'<svg xmlns="http://www.w3.org/2000/svg" class="fig" role="img" '
    f'viewBox="0 0 {WIDTH} {HEIGHT}" aria-label="{markup.escape(title)}">'
    f'<style>{STYLE}</style><desc>{markup.escape(says)}</desc>'
    f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}"/>{body}</svg>'
  )


def header(title: str, legend: Sequence[tuple[str, str]]) -> tuple[str, float]:
  """Title and (swatch, label) legend, and the y where the plot may begin."""
  parts = [text(8, 20, markup.shorten(title, 64), kind='title')]
  x, y = 8.0, 42.0
  for swatch, label in legend:
    label = label if len(label) <= 40 else label[:39] + '…'
    wide = 24 + _CHAR * len(label) + 14
    if x > 8 and x + wide > WIDTH:
      x, y = 8.0, y + 17
    parts.append(f'<g transform="translate({x:.1f} {y - 4:.1f})">{swatch}</g>')
    parts.append(text(x + 24, y, label, kind='name'))
    x += wide
  return ''.join(parts), y + (38 if legend else 14)


def nothing(top: float) -> str:
  """What a figure without a single number shows."""
  middle = (top + BOTTOM) / 2
  return rule('axis', LEFT, BOTTOM, RIGHT, BOTTOM) + text(
    WIDTH / 2, middle, 'not measured in this run', 'middle'
  )


def text(
  x: float, y: float, content: str, anchor: str = 'start', kind: str = ''
) -> str:
  return (
    f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">'
    f'{markup.escape(content)}</text>'
  )


def rule(kind: str, x0: float, y0: float, x1: float, y1: float) -> str:
  return (
    f'<line class="{kind}" x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" '
    f'y2="{y1:.1f}"/>'
  )


def points(pairs: Iterable[tuple[float, float]]) -> str:
  return ' '.join(f'{x:.1f},{y:.1f}' for x, y in pairs)


def tick(value: float) -> str:
  """A tick as short as it can be: 0.25, 1, 1,500, with a real minus."""
  return f'{value:,.6g}'.replace('-', '\u2212')


def _step(low: float, high: float) -> float:
  """The 1-2-5 step that gives about six ticks."""
  rough = (high - low) / 6
  power = 10.0 ** math.floor(math.log10(rough))
  return next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)


def _ticks(low: float, high: float) -> list[float]:
  step = _step(low, high)
  first = math.ceil(low / step - 1e-9)
  last = math.floor(high / step + 1e-9)
  return [round(i * step, 12) + 0.0 for i in range(first, last + 1)]
