"""Transcripts as tokens: the only place where a token gets its author.

A row is a prompt, then a stream of turns:

  <|user|> instruction <|end|> [<|notes|> notes <|end|>]     PROMPT
  <|act|>                                                    FORCED
  <tool_call>{...}</tool_call> <|end|>                       ACT
  <|rehearse|>                                               FORCED
  <tool_response>{...}</tool_response> <|end|>               REHEARSE or WORLD
  <|act|> It is shipped. <|end|>                             FORCED, ACT
  <|user|> And the other one? <|end|> <|act|>                USER, FORCED

The joint view shows both roles this one row. Under split views there are two:
each role has a prompt of its own, then the same stream, in which the other
role's words are COPIED. Several calls of one action are answered one by one,
each behind its own <|rehearse|>. Thoughts, between <think> and </think>, are
part of an action and not of what others read of it.

A role's stop token belongs to that role and is trained. Headers are single
control pieces, which content can never encode to, so nothing a user or a tool
writes can open a turn. Rows are only ever appended to: sampled ids are kept as
they are and never decoded and encoded again.
"""

from collections.abc import Sequence
import dataclasses
import json
import re

import numpy as np

from envace_jax import types
from envace_jax.text import tokenizer as tokenizers
from envace_jax.text import tool_calls

Span = tuple[np.ndarray, np.ndarray]  # ids [T] int32, authors [T] int8

_THOUGHT_MARK = re.compile(f'({"|".join(tokenizers.THOUGHTS)})')
TOOLS_IN_PROMPT = ('none', 'names', 'schemas')
# Authors of observations in a row of ACT, and whose words they are.
OBSERVING = {
  types.Author.REHEARSE: types.Author.REHEARSE,
  types.Author.COPIED: types.Author.REHEARSE,
  types.Author.WORLD: types.Author.WORLD,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
  """What a row says."""

  steps: Sequence[types.Step]  # answered calls
  turn_replies: Sequence[str]  # replies that a user turn followed
  reply: str | None  # a finished reply that ends the row
  num_turns: int  # user turns that began


class Template:
  """Binds a tokenizer to the row format above."""

  def __init__(
    self,
    tokenizer: tokenizers.Tokenizer,
    tools: str = 'none',
    *,
    parallel: bool = False,
  ):
    """Makes a template.

    Args:
      tokenizer: supplies content pieces and the control pieces of CONTROL.
      tools: what a prompt says of the tools: 'none' (a fixed tool set that
        the policy has internalised), 'names' or full 'schemas'.
      parallel: an action may hold several calls; otherwise that is malformed.
    """
    if tools not in TOOLS_IN_PROMPT:
      raise ValueError(f'prompt.tools={tools!r}; use one of {TOOLS_IN_PROMPT}')
    self._tokenizer = tokenizer
    self._tools = tools
    self._parallel = parallel
    control = tokenizer.control
    self.pad_id = tokenizer.pad_id
    self.call_id = control['<tool_call>']
    self._thought_ids = tuple(control.get(name) for name in tokenizers.THOUGHTS)
    self.stop_id = control['<|end|>']
    self.header_ids = {
      types.Role.ACT: control['<|act|>'],
      types.Role.REHEARSE: control['<|rehearse|>'],
    }

  def prompt(
    self,
    instruction: str,
    notes: str = '',
    tools: Sequence[types.Json] = (),
    system: str = '',
  ) -> Span:
    """Opens a row: (ids [T] int32, authors [T] int8), first header included."""
    control, encode = self._tokenizer.control, self._tokenizer.encode
    ids = []
    if system:
      ids += [control['<|system|>'], *encode(system), self.stop_id]
    if self._tools != 'none':
      functions = [tool['function'] for tool in tools]
      if self._tools == 'names':
        text = ', '.join(function['name'] for function in functions)
      else:
        text = json.dumps(functions, ensure_ascii=False)
      ids += [control['<|tools|>'], *encode(text), self.stop_id]
    ids += [control['<|user|>'], *encode(instruction), self.stop_id]
    if notes:
      ids += [control['<|notes|>'], *encode(notes), self.stop_id]
    authors = [types.Author.PROMPT] * len(ids) + [types.Author.FORCED]
    ids.append(self.header_ids[types.Role.ACT])
    return _arrays(ids, authors)

  def observation(self, text: str) -> np.ndarray:
    """Tokens of an observation somebody else wrote, stop token included."""
    control = self._tokenizer.control
    return np.asarray(
      [
        control['<tool_response>'],
        *self._tokenizer.encode(text),
        control['</tool_response>'],
        self.stop_id,
      ],
      np.int32,
    )

  def user_turn(self, text: str) -> np.ndarray:
    """Tokens of a later user turn, which no text in it can end or forge."""
    control, encode = self._tokenizer.control, self._tokenizer.encode
    return np.asarray(
      [control['<|user|>'], *encode(text), self.stop_id], np.int32
    )

  def action(self, text: str) -> np.ndarray:
    """Tokens of a recorded action: rendered tool calls, or a reply."""
    control, encode = self._tokenizer.control, self._tokenizer.encode
    opening, closing = tool_calls.CALL_OPEN, tool_calls.CALL_CLOSE
    parts = tool_calls.split_calls(text)
    if parts is None and text.startswith(opening) and text.endswith(closing):
      parts = '', [text[len(opening) : -len(closing)]]  # a malformed call
    before, bodies = parts or (text, [])
    ids = self._encode_with_thoughts(before)
    for body in bodies:
      ids += [control[opening], *encode(body), control[closing]]
    return np.asarray([*ids, self.stop_id], np.int32)

  def demonstration(self, demo: types.Demonstration) -> Span:
    """A recorded attempt as one row: (ids [T] int32, authors [T] int8)."""
    prompt = self.prompt(demo.instruction, demo.notes, demo.tools)
    return join([prompt, *self._stream(demo)])

  def demonstration_views(
    self, demo: types.Demonstration, prompts: Sequence[Span]
  ) -> list[Span]:
    """A recorded attempt as the rows of ACT and of REHEARSE.

    `prompts` open the two rows. What the world said is learned in the row of
    REHEARSE alone, where no word of ACT is learned.
    """
    ids, authors = join(self._stream(demo))
    rows = []
    for prompt, theirs in zip(
      prompts, (types.Author.WORLD, types.Author.ACT), strict=True
    ):
      copied = np.where(authors == theirs, types.Author.COPIED, authors)
      rows.append(join([prompt, (ids, copied.astype(np.int8))]))
    return rows

  def calls(
    self, ids: Sequence[int]
  ) -> list[types.ToolCall | types.ParseError]:
    """What an action asks for, in order; one entry where one is allowed."""
    return self._calls(self.text(self._spoken(ids)))

  def without_thoughts(self, ids: np.ndarray, authors: np.ndarray) -> Span:
    """A span as REHEARSE may see it: COPIED thoughts are left out."""
    kept_ids, kept_authors = [], []
    for author, start, stop in runs(authors):
      part = ids[start:stop]
      if author == types.Author.COPIED:
        part = self._spoken(part)
      kept_ids += list(part)
      kept_authors += [author] * len(part)
    return _arrays(kept_ids, kept_authors)

  def is_call(self, ids: Sequence[int]) -> bool:
    """Whether an action asks for a tool; the on-device rule is the same."""
    return self.call_id in ids

  def text(self, ids: Sequence[int]) -> str:
    """Readable text of a span, control pieces by name, stop token dropped."""
    ids = list(ids)
    if ids and ids[-1] == self.stop_id:
      ids.pop()
    return self._tokenizer.decode(ids)

  def literal(self, ids: Sequence[int]) -> str:
    """Text of any span, every control piece by its name."""
    return self._tokenizer.decode(list(ids))

  def observation_text(self, ids: Sequence[int]) -> str:
    """What an observation says, without its tags where they are whole."""
    text = self.text(ids)
    opening, closing = '<tool_response>', '</tool_response>'
    if text.startswith(opening) and text.endswith(closing):
      return text[len(opening) : -len(closing)]
    return text

  def read(self, tokens: np.ndarray, authors: np.ndarray) -> Reading:
    """Reads a row of ACT back, by authors alone."""
    steps, replies, num_turns = [], [], 1
    text, calls, message = '', [], -1
    for author, start, stop in runs(authors):
      ids = tokens[start:stop]
      if author == types.Author.ACT:
        text, message = self.text(ids), message + 1
        calls = self.calls(ids) if self.is_call(ids) else []
        if not calls and ids[-1] == self.stop_id:
          replies.append(text)
      elif author == types.Author.USER:
        num_turns += 1
      elif author in OBSERVING:
        steps.append(
          types.Step(
            action=calls.pop(0),
            action_text=text,
            observation_text=self.observation_text(ids),
            author=OBSERVING[author],
            turn=len(replies),
            message=message,
          )
        )
    replied = (
      len(authors) > 0
      and authors[-1] == types.Author.ACT
      and tokens[-1] == self.stop_id
      and not calls
    )
    return Reading(
      steps=tuple(steps),
      turn_replies=tuple(replies[:-1] if replied else replies),
      reply=replies[-1] if replied else None,
      num_turns=num_turns,
    )

  def _calls(self, text: str) -> list[types.ToolCall | types.ParseError]:
    if self._parallel:
      return tool_calls.parse_actions(text)
    return [tool_calls.parse_action(text)]

  def _spoken(self, ids: Sequence[int]) -> list[int]:
    """An action without its thoughts; one left open hides all but the stop."""
    opening, closing = self._thought_ids
    spoken, is_thought = [], False
    for i in map(int, ids):
      is_thought = is_thought or i == opening
      if not is_thought or i == self.stop_id:
        spoken.append(i)
      is_thought = is_thought and i != closing
    return spoken

  def _encode_with_thoughts(self, text: str) -> list[int]:
    """Ids of what a recorded policy wrote, its marks of thinking as such."""
    if None in self._thought_ids:
      return self._tokenizer.encode(text)
    ids = []
    for part in _THOUGHT_MARK.split(text):
      if part in tokenizers.THOUGHTS:
        ids.append(self._tokenizer.control[part])
      else:
        ids += self._tokenizer.encode(part)
    return ids

  def _stream(self, demo: types.Demonstration) -> list[Span]:
    """What follows the prompt of a recorded attempt, headers included."""
    act = self._header(types.Role.ACT)
    spans, turn, open_calls = [], 0, 0

    def end_turn():
      reply, user = demo.turn_replies[turn], demo.user_turns[turn]
      spans.extend(
        [
          _authored(self.action(reply), types.Author.ACT),
          _authored(self.user_turn(user), types.Author.USER),
          act,
        ]
      )

    for step in demo.steps:
      while turn < step.turn:
        end_turn()
        turn += 1
      if not open_calls:
        open_calls = len(self._calls(step.action_text))
        action = self.action(step.action_text)
        spans.append(_authored(action, types.Author.ACT))
      observation = self.observation(step.observation_text)
      spans += [
        self._header(types.Role.REHEARSE),
        _authored(observation, types.Author.WORLD),
      ]
      open_calls -= 1
      if not open_calls:
        spans.append(act)
    while turn < len(demo.user_turns):
      end_turn()
      turn += 1
    return [*spans, _authored(self.action(demo.reply), types.Author.ACT)]

  def _header(self, role: types.Role) -> Span:
    return _arrays([self.header_ids[role]], [types.Author.FORCED])


def join(spans: Sequence[Span]) -> Span:
  """Spans as one."""
  ids, authors = zip(*spans, strict=True)
  return np.concatenate(ids), np.concatenate(authors)


def runs(authors: np.ndarray) -> list[tuple[int, int, int]]:
  """Maximal spans of one author, as (author, start, stop)."""
  if not len(authors):
    return []
  cuts = np.flatnonzero(np.diff(authors)) + 1
  edges = [0, *cuts.tolist(), len(authors)]
  return [
    (int(authors[start]), start, stop)
    for start, stop in zip(edges[:-1], edges[1:], strict=True)
  ]


def _authored(ids: np.ndarray, author: types.Author) -> Span:
  return ids, np.full(len(ids), author, np.int8)


def _arrays(ids, authors) -> Span:
  return np.asarray(ids, np.int32), np.asarray(authors, np.int8)
