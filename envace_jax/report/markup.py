"""Text that anyone may have written, made safe and visible in HTML and SVG.

Escaping keeps model text from becoming markup; the rest keeps it from lying:
control characters are shown as pictures, and characters that would reorder or
hide their neighbours are spelt out.
"""

import html
import re

_CONTROL = {code: 0x2400 + code for code in range(32) if code not in (9, 10)}
_CONTROL[0x7F] = 0x2421
# Lone surrogates cannot be encoded; the C1 range and the non-characters are
# parse errors in HTML.
_UNENCODABLE = re.compile('[\ud800-\udfff\x80-\x9f\ufdd0-\ufdef\ufffe\uffff]')
_INVISIBLE = re.compile('[\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]')


def escape(text: str) -> str:
  """`text` as HTML or SVG character data or a quoted attribute value."""
  text = text.translate(_CONTROL)
  text = _UNENCODABLE.sub('\ufffd', text)
  text = _INVISIBLE.sub(lambda m: f'\\u{ord(m.group()):04x}', text)
  return html.escape(text, quote=True)


def shorten(text: str, limit: int) -> str:
  """At most about `limit` characters, saying how many were left out."""
  if len(text) <= limit:
    return text
  return f'{text[:limit]} … ({len(text) - limit:,} more characters)'


def number(value: float | None, digits: int = 2) -> str:
  """A number for people: a real minus sign, and a dash for 'not measured'."""
  if value is None:
    return '–'
  text = f'{value:.{digits}f}'
  if float(text) == 0:
    text = text.lstrip('-')
  return text.replace('-', '\u2212')
