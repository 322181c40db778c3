"""What a transcript looks like as tokens: one small protocol, and our format.

A format supplies the words of a prompt, of what others write, and the *joints*
between turns, which are forced upon the policy. A joint depends on who spoke
before, since chat templates close one turn and open the next in one breath:

  CALLED     an action that calls  ->  its observation
  AGAIN      an observation        ->  that of the action's next call
  ANSWERED   the last observation  ->  the next action
  ASKED      a user turn           ->  the next action

`Own` is the format of policies trained from scratch, one control piece a joint.
Formats of pretrained models are derived in `text.chat_format`. What a row is,
and who its authors are, is `text.template`'s, whatever the format.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import enum
import json
import re
from typing import Protocol

from envace_jax import types
from envace_jax.text import signatures, tool_calls
from envace_jax.text import tokenizer as tokenizers

_THOUGHT_MARK = re.compile(f'({"|".join(tokenizers.THOUGHTS)})')


class Joint(enum.Enum):
  """Between which turns forced tokens stand."""

  CALLED = 'called'
  AGAIN = 'again'
  ANSWERED = 'answered'
  ASKED = 'asked'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Marker:
  """The ids by which an action is known to be a call."""

  ids: Sequence[int]
  at_start: bool = False  # they open the action; otherwise they stand anywhere

  def is_in(self, ids: Sequence[int]) -> bool:
    """Whether an action is a call; the on-device rule is the same."""
    ids, marker = [*map(int, ids)], list(self.ids)
    last = 0 if self.at_start else len(ids) - len(marker)
    return any(
      ids[i : i + len(marker)] == marker for i in range(max(last, 0) + 1)
    )


# What a prompt says of the tools, from nothing to everything.
TOOLS_SHOWN = ('none', 'names', 'signatures', 'schemas')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Opening:
  """What a prompt says."""

  instruction: str | None  # None: nobody has asked anything yet
  notes: str = ''  # rehearsal memory
  tools: Sequence[types.Json] = ()  # OpenAI function schemas
  shown: str = 'none'  # of the tools: one of TOOLS_SHOWN
  system: str = ''


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
  """What somebody said after the prompt: ACT, WORLD or USER."""

  author: types.Author
  text: str
  # What ACT calls; the text is then what it says beside, whatever that spells.
  # None: calls, if any, are spelt in the text as `tool_calls` does.
  calls: Sequence[types.ToolCall] | None = None
  thought: str = ''  # before an action of such calls


def tools_text(tools: Sequence[types.Json], shown: str) -> str:
  """What a prompt of ours says of the tools, as `shown` of TOOLS_SHOWN."""
  functions = [tool['function'] for tool in tools]
  if shown == 'none':
    return ''
  if shown == 'names':
    return ', '.join(function['name'] for function in functions)
  if shown == 'signatures':
    return signatures.signatures(functions)
  return json.dumps(functions, ensure_ascii=False)


class Format(Protocol):
  """Words and joints of a row."""

  stop_ids: Mapping[types.Role, tuple[int, ...]]
  marker: Marker
  joints: Mapping[Joint, tuple[int, ...]]  # AGAIN may be absent
  # Joints at which a prompt made anew does not start with the row so far.
  breaks: frozenset[Joint]
  append_only: bool  # such a prompt continues the row, whatever is said

  def prompt(self, opening: Opening, turns: Sequence[Turn]) -> list[int]:
    """A row that is made in one go, up to the joint before the next action."""
    ...

  def observation(self, joint: Joint, text: str) -> tuple[list[int], list[int]]:
    """A joint, and an observation behind it, its stop token included.

    The joint is that of `joints`, unless text and joint share a token.
    """
    ...

  def user_turn(self, text: str) -> list[int]: ...

  def action(self, text: str) -> list[int]:
    """A recorded action, spelt as `tool_calls` does, its stop included."""
    ...

  def spoken(self, turn: Turn) -> list[int]:
    """An action whose calls are given, its stop included."""
    ...

  def call_opening(self, name: str | None) -> list[int]:
    """How an action that calls begins, up to its tool's name or behind it.

    Raises:
      ValueError: the format has no such beginning.
    """
    ...

  def calls(
    self, text: str, *, parallel: bool
  ) -> list[types.ToolCall | types.ParseError]:
    """What an action that has the marker asks for."""
    ...

  def observation_text(self, text: str) -> str:
    """What an observation says, without the marks around it."""
    ...


class Own:
  """Headers, ends and marks are control pieces of CONTROL."""

  breaks = frozenset()
  append_only = True

  def __init__(self, tokenizer: tokenizers.Tokenizer):
    self._tokenizer = tokenizer
    self._control = control = tokenizer.control
    self._end = control['<|end|>']
    self.stop_ids = {role: (self._end,) for role in types.Role}
    self.marker = Marker(ids=(control[tool_calls.CALL_OPEN],))
    act, rehearse = (control['<|act|>'],), (control['<|rehearse|>'],)
    self.joints = {
      Joint.CALLED: rehearse,
      Joint.AGAIN: rehearse,
      Joint.ANSWERED: act,
      Joint.ASKED: act,
    }

  def prompt(self, opening: Opening, turns: Sequence[Turn] = ()) -> list[int]:
    if turns:
      raise ValueError('rows of this format are only ever appended to')
    control, encode = self._control, self._tokenizer.encode
    ids = []
    if opening.system:
      ids += [control['<|system|>'], *encode(opening.system), self._end]
    if opening.shown != 'none':
      text = tools_text(opening.tools, opening.shown)
      ids += [control['<|tools|>'], *encode(text), self._end]
    if opening.instruction is not None:
      ids += self.user_turn(opening.instruction)
    if opening.notes:
      ids += [control['<|notes|>'], *encode(opening.notes), self._end]
    return ids

  def observation(self, joint: Joint, text: str) -> tuple[list[int], list[int]]:
    control = self._control
    said = [
      control[tool_calls.RESPONSE_OPEN],
      *self._tokenizer.encode(text),
      control[tool_calls.RESPONSE_CLOSE],
      self._end,
    ]
    return list(self.joints[joint]), said

  def user_turn(self, text: str) -> list[int]:
    return [self._control['<|user|>'], *self._tokenizer.encode(text), self._end]

  def action(self, text: str) -> list[int]:
    opening, closing = tool_calls.CALL_OPEN, tool_calls.CALL_CLOSE
    parts = tool_calls.split_calls(text)
    if parts is None and text.startswith(opening) and text.endswith(closing):
      parts = '', [text[len(opening) : -len(closing)]]  # a malformed call
    before, bodies = parts or (text, [])
    ids = self._encode_with_thoughts(before)
    for body in bodies:
      said = self._tokenizer.encode(body)
      ids += [self._control[opening], *said, self._control[closing]]
    return [*ids, self._end]

  def spoken(self, turn: Turn) -> list[int]:
    control, encode, ids = self._control, self._tokenizer.encode, []
    opening, closing = tokenizers.THOUGHTS
    if turn.thought and opening in control:
      ids += [control[opening], *encode(turn.thought), control[closing]]
    ids += encode(turn.text)
    for call in turn.calls:
      payload = {'name': call.name, 'arguments': call.arguments}
      said = encode(tool_calls.dumps(payload))
      ids.append(control[tool_calls.CALL_OPEN])
      ids += [*said, control[tool_calls.CALL_CLOSE]]
    return [*ids, self._end]

  def call_opening(self, name: str | None) -> list[int]:
    ids = list(self.marker.ids)
    if name is not None:
      ids += self._tokenizer.encode(
        f'{{"name": {tool_calls.dumps(name)}, "arguments": '
      )
    return ids

  def calls(
    self, text: str, *, parallel: bool
  ) -> list[types.ToolCall | types.ParseError]:
    if parallel:
      return tool_calls.parse_actions(text)
    return [tool_calls.parse_action(text)]

  def observation_text(self, text: str) -> str:
    opening, closing = tool_calls.RESPONSE_OPEN, tool_calls.RESPONSE_CLOSE
    if text.startswith(opening) and text.endswith(closing):
      return text[len(opening) : -len(closing)]
    return text

  def _encode_with_thoughts(self, text: str) -> list[int]:
    """Ids of what a recorded policy wrote, its marks of thinking as such."""
    if any(name not in self._control for name in tokenizers.THOUGHTS):
      return self._tokenizer.encode(text)
    ids = []
    for part in _THOUGHT_MARK.split(text):
      if part in tokenizers.THOUGHTS:
        ids.append(self._control[part])
      else:
        ids += self._tokenizer.encode(part)
    return ids
