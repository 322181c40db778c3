"""What a generation says: thoughts, content and calls, whole or as it comes.

A call that cannot be read is content, markers and all, and so is one that
nobody wanted. While tokens come, shown is what no later token can take back: a
text that may yet turn out to be a call, a stop string or half a character is
held until that is decided, so that the parts of a stream are exactly the whole.
"""

from collections.abc import Sequence
import dataclasses

import numpy as np

from envace_jax import types
from envace_jax.text import template as templates
from envace_jax.text import tokenizer as tokenizers
from envace_jax.text import tool_calls


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
  """How a generation is read."""

  template: templates.Template
  may_call: bool  # otherwise calls are content
  parallel: bool  # otherwise several calls are content
  stop: tuple[str, ...] = ()  # texts that end it, and are no part of it
  forced: tuple[int, ...] = ()  # tokens it was made to begin with


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reply:
  content: str
  thought: str = ''
  calls: Sequence[types.ToolCall] = ()
  malformed: types.ParseError | None = None  # a call that is content


class Reader:
  """Reads one generation."""

  def __init__(self, rules: Rules):
    self._rules = rules
    self._ids = list(rules.forced)
    self.is_cut = False  # a stop string was said

  def hear(self, ids: Sequence[int]) -> None:
    self._ids += map(int, ids)
    self.is_cut = self.is_cut or self._stop_at(self._text()) is not None

  def kept(self, ids: np.ndarray) -> int:
    """How many of the sampled tokens begin before the stop string."""
    at = self._stop_at(self._text())
    if at is None:
      return len(ids)
    template, forced = self._rules.template, list(self._rules.forced)
    for n in range(len(ids)):
      if len(template.literal([*forced, *ids[:n]]).rstrip('\ufffd')) >= at:
        return n
    return len(ids)

  def so_far(self) -> Reply:
    """What is certain already; only ever grows."""
    text = self._text().rstrip('\ufffd')
    stops = self._rules.stop
    at = self._stop_at(text)
    text = text[:at] if at is not None else _without_start_of(text, stops)
    thought, spoken = self._split(text, is_whole=False)
    if self._rules.may_call:
      marker = self._rules.template.marker
      if marker.at_start:
        start = list(marker.ids)
        if start[: len(self._ids)] == self._ids[: len(start)]:
          spoken = ''
      else:
        spoken = spoken.partition(tool_calls.CALL_OPEN)[0]
        spoken = _without_start_of(spoken, (tool_calls.CALL_OPEN,))
    return Reply(content=spoken, thought=thought)

  def whole(self) -> Reply:
    """All of it, once it is over."""
    text = self._text()
    at = self._stop_at(text)
    thought, spoken = self._split(text[:at], is_whole=True)
    template = self._rules.template
    if at is not None or not self._rules.may_call:
      return Reply(content=spoken, thought=thought)
    if not template.is_call(self._ids):
      return Reply(content=spoken, thought=thought)
    calls = template.calls(self._ids)
    wrong = next((c for c in calls if isinstance(c, types.ParseError)), None)
    if wrong is None and len(calls) > 1 and not self._rules.parallel:
      wrong = types.ParseError(kind='several_calls', detail='one is allowed')
    if wrong is not None:
      return Reply(content=spoken, thought=thought, malformed=wrong)
    before = '' if template.marker.at_start else spoken.partition(
      tool_calls.CALL_OPEN
    )[0]  # fmt: skip
    return Reply(content=before, thought=thought, calls=tuple(calls))

  def _text(self) -> str:
    return self._rules.template.text(self._ids)

  def _stop_at(self, text: str) -> int | None:
    found = [at for stop in self._rules.stop if (at := text.find(stop)) >= 0]
    return min(found, default=None)

  def _split(self, text: str, *, is_whole: bool) -> tuple[str, str]:
    """(thought, the rest) of what begins with a thought."""
    opening, closing = tokenizers.THOUGHTS
    if not self._rules.template.has_thoughts:
      return '', text
    if not is_whole and opening.startswith(text):
      return '', ''
    if not text.startswith(opening):
      return '', text
    thought, closed, spoken = text[len(opening) :].partition(closing)
    if not closed and not is_whole:
      thought = _without_start_of(thought, (closing,))
      return thought.lstrip('\n').rstrip('\n'), ''
    return thought.strip('\n'), spoken.lstrip('\n')


def _without_start_of(text: str, endings: Sequence[str]) -> str:
  """A text without what may be the beginning of one of some texts."""
  longest = 0
  for ending in endings:
    for size in range(min(len(ending) - 1, len(text)), longest, -1):
      if text.endswith(ending[:size]):
        longest = size
        break
  return text[: len(text) - longest]
