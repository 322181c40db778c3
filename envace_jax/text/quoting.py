"""Hostile texts in the prompt of another model: inert, and within a budget.

Whatever user, policy or tools wrote may claim a verdict, forge a heading, carry
a chat template's control tokens, or be enormous. Every such text is shown as
one JSON string on one line, in which angle brackets, bracketed capitals
([INST]) and invisible characters are escaped: nothing inside a text can end it,
begin a line, or become a control token. Long texts lose their middle, with a
note of how much; long lists of lines lose middle lines.
"""

from collections.abc import Sequence
import dataclasses
import json
import re

from envace_jax.text import tool_calls


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
  """One text, and whose it is: trusted, and one word or two."""

  speaker: str
  text: str


def render(lines: Sequence[Line], budget: int, shortest: int = 120) -> str:
  """Lines that fit a budget of characters, each with its end of line.

  The longest are cut first, and equally. Where that would leave less than
  `shortest` characters each, the middle lines go.
  """
  room = max(2, budget // shortest - 1)
  note = ''
  if len(lines) > room:
    left_out = len(lines) - room
    note = f'({left_out} messages left out here)\n'
    head = room // 3
    lines = [*lines[:head], *lines[head + left_out :]]
  else:
    head = len(lines)
  sizes = [len(line.speaker) + 3 for line in lines]
  # Measured on at most a budget's worth of each text: some are enormous.
  costs = [
    size + len(_escaped(shorten(line.text, budget)))
    for size, line in zip(sizes, lines, strict=True)
  ]
  limit = _water_level(costs, budget - len(note))
  rendered = [
    f'{line.speaker}: {quote(line.text, limit - size)}\n'
    for size, line in zip(sizes, lines, strict=True)
  ]
  return ''.join(rendered[:head]) + note + ''.join(rendered[head:])


def shorten(text: str, max_chars: int) -> str:
  """A text without its middle, and a note of how much there was."""
  if len(text) <= max_chars:
    return text
  note = f' ...[{len(text)} characters, middle left out]... '
  kept = max(0, max_chars - len(note))
  return text[: kept - kept // 2] + note + text[len(text) - kept // 2 :]


def quote(text: str, max_chars: int) -> str:
  """A hostile text as one inert JSON string, at most `max_chars` long.

  Below the length of the note of `shorten` it may be longer than that.
  """
  kept = max_chars
  quoted = _escaped(shorten(text, kept))
  while len(quoted) > max_chars and kept > 0:
    # Escapes lengthen about evenly; a step or two suffice.
    kept = max(0, kept * max_chars // len(quoted) - 8)
    quoted = _escaped(shorten(text, kept))
  return quoted


_UNSEEN = re.compile(
  '[\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]'
  r'|\[(?=/?[A-Z_]+\])'
)


def _escaped(text: str) -> str:
  quoted = json.dumps(tool_calls.clean(text), ensure_ascii=False)
  quoted = quoted.replace('<', '\\u003c').replace('>', '\\u003e')
  return _UNSEEN.sub(lambda match: f'\\u{ord(match.group()):04x}', quoted)


def _water_level(costs: Sequence[int], budget: int) -> int:
  """The largest limit under which costs, each cut to it, fit a budget."""
  level = budget
  for i, cost in enumerate(sorted(costs)):
    level = budget // (len(costs) - i)
    if cost > level:
      return level
    budget -= cost
  return max(costs, default=level)
