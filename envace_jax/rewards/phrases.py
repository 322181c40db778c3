"""Whether a text mentions a phrase.

Phrases match whole words, ignoring case. A phrase that is a number matches an
equal number ("12.5" is in "$12.50", "4" is not in "40", "4.5" or "O4").
"""

import decimal
import functools
import re

_CHUNK = re.compile(r'[\w.,:/+-]+')
_NUMBER = re.compile(
  r'[+-]?(?:0|[1-9]\d*|[1-9]\d{0,2}(?:,\d{3})+)(?:\.\d+)?', re.ASCII
)


def mentions(text: str, phrase: str) -> bool:
  """Whether a phrase occurs in a text as whole words or as a number."""
  number = _number(phrase.strip())
  if number is not None:
    return number in _numbers(text)
  return _phrase_pattern(phrase).search(text) is not None


def _number(text: str) -> decimal.Decimal | None:
  """The number a text is, and nothing but; '007' and '3-4' are none."""
  if not _NUMBER.fullmatch(text):
    return None
  return decimal.Decimal(text.replace(',', ''))


def _numbers(text: str) -> set[decimal.Decimal]:
  """Numbers that stand alone in a text: not in ids, dates, times, ranges."""
  found = set()
  for chunk in _CHUNK.findall(text):
    chunk = chunk.rstrip('.,:/+-').lstrip(',:/')
    number = _number(chunk)
    parts = [number] if number is not None else map(_number, chunk.split(','))
    found.update(part for part in parts if part is not None)
  return found


@functools.lru_cache(4096)
def _phrase_pattern(phrase: str) -> re.Pattern:
  """Whole words in any case, any white space; ids do not match inside ids."""
  words = phrase.split()
  left, right = r'(?<!\w)', r'(?!\w)'
  if any(
    map(str.isdigit, phrase)
  ):  # O12 is not in O12-3, nor 'order 4' in 'order 4.5'
    left, right = left + r'(?<!\w-)', r'(?!-?\w|[.,]\d)'
  return re.compile(
    (left if re.match(r'\w', words[0]) else '')
    + r'\s+'.join(map(re.escape, words))
    + (right if re.search(r'\w$', words[-1]) else ''),
    re.IGNORECASE,
  )
