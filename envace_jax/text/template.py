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

Shown are the pieces of our own format; those of pretrained models differ in
words and joints alone (`text.formats`). A role's stop token belongs to that
role and is trained. Joints hold control pieces, which content can never encode
to, so nothing a user or a tool writes can open a turn. Rows are only ever
appended to: sampled ids are kept as they are and never decoded and encoded
again.
"""

from collections.abc import Sequence

import numpy as np

from envace_jax import types
from envace_jax.text import formats
from envace_jax.text import tokenizer as tokenizers

Span = tuple[np.ndarray, np.ndarray]  # ids [T] int32, authors [T] int8


class Template:
  """Binds a tokenizer and a format to rows as above."""

  def __init__(
    self,
    tokenizer: tokenizers.Tokenizer,
    tools: str = 'none',
    *,
    parallel: bool = False,
    row_format: formats.Format | None = None,
  ):
    """Makes a template.

    Args:
      tokenizer: supplies content pieces and control pieces.
      tools: what a prompt says of the tools: 'none' (a fixed tool set that
        the policy has internalised), 'names', one-line 'signatures' or full
        'schemas'.
      parallel: an action may hold several calls; otherwise that is malformed.
      row_format: words and joints, of this tokenizer; None: `formats.Own`.
    """
    if tools not in formats.TOOLS_SHOWN:
      raise ValueError(
        f'prompt.tools={tools!r}; use one of {formats.TOOLS_SHOWN}'
      )
    self.format = row_format or formats.Own(tokenizer)
    if parallel and formats.Joint.AGAIN not in self.format.joints:
      raise ValueError(
        'this chat template cannot show several answers to one action; set '
        'rollout.max_parallel_calls=1'
      )
    self._tokenizer = tokenizer
    self._tools = tools
    self._parallel = parallel
    self._thought_ids = tuple(map(tokenizer.control.get, tokenizers.THOUGHTS))
    self.has_thoughts = None not in self._thought_ids
    self.pad_id = tokenizer.pad_id
    self.marker = self.format.marker
    self.stop_ids = self.format.stop_ids
    self.control_ids = sorted(set(tokenizer.control.values()))
    self._stops = {i for ids in self.stop_ids.values() for i in ids}

  def prompt(
    self,
    instruction: str,
    notes: str = '',
    tools: Sequence[types.Json] = (),
    system: str = '',
  ) -> Span:
    """Opens a row: (ids [T] int32, authors [T] int8), first header included."""
    opening = self.opening(instruction, notes, tools, system)
    ids = np.asarray(self.format.prompt(opening, ()), np.int32)
    prompt = _authored(ids, types.Author.PROMPT)
    return join([prompt, self.header(formats.Joint.ASKED)])

  def header(self, joint: formats.Joint) -> Span:
    """The tokens that stand between two turns, FORCED."""
    ids = np.asarray(self.format.joints[joint], np.int32)
    return _authored(ids, types.Author.FORCED)

  def observation(self, text: str) -> np.ndarray:
    """Tokens of an observation somebody else wrote, stop token included."""
    return self.answered(formats.Joint.CALLED, text)[1]

  def answered(
    self, joint: formats.Joint, text: str
  ) -> tuple[np.ndarray, np.ndarray]:
    """A joint and the observation behind it, as if encoded in one go.

    The joint differs from `header(joint)` where it shares a token with text.
    """
    header, said = self.format.observation(joint, text)
    return np.asarray(header, np.int32), np.asarray(said, np.int32)

  def user_turn(self, text: str) -> np.ndarray:
    """Tokens of a later user turn, which no text in it can end or forge."""
    return np.asarray(self.format.user_turn(text), np.int32)

  def action(self, text: str) -> np.ndarray:
    """Tokens of a recorded action: rendered tool calls, or a reply."""
    return np.asarray(self.format.action(text), np.int32)

  def conversation(
    self, opening: formats.Opening, turns: Sequence[formats.Turn]
  ) -> np.ndarray:
    """The prompt of the next action of a conversation, [T] int32."""
    first = () if self.format.append_only else turns
    ids = np.asarray(self.format.prompt(opening, first), np.int32)
    if not self.format.append_only:
      return np.concatenate([ids, self.header(_joint_after(turns))[0]])
    return np.concatenate([ids, self.continuation(turns, types.Author.USER)])

  def continuation(
    self, turns: Sequence[formats.Turn], before: types.Author
  ) -> np.ndarray:
    """What follows a turn of `before`, up to the next action, [T] int32."""
    spans = []
    for turn in turns:
      spans += self.spans(turn, before)
      before = turn.author
    return join([*spans, self.header(_joint_after(turns))])[0]

  def demonstration(self, demo: types.Demonstration) -> Span:
    """A recorded attempt as one row: (ids [T] int32, authors [T] int8)."""
    prompt = self.prompt(demo.instruction, demo.notes, demo.tools, demo.system)
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
    return self.marker.is_in(ids)

  def text(self, ids: Sequence[int]) -> str:
    """Readable text of a span, control pieces by name, stop token dropped."""
    ids = list(ids)
    if ids and ids[-1] in self._stops:
      ids.pop()
    return self._tokenizer.decode(ids)

  def literal(self, ids: Sequence[int]) -> str:
    """Text of any span, every control piece by its name."""
    return self._tokenizer.decode(list(ids))

  def observation_text(self, ids: Sequence[int]) -> str:
    """What an observation says, without its tags where they are whole."""
    return self.format.observation_text(self.text(ids))

  def _calls(self, text: str) -> list[types.ToolCall | types.ParseError]:
    return self.format.calls(text, parallel=self._parallel)

  def _spoken(self, ids: Sequence[int]) -> list[int]:
    """An action without its thoughts; one left open hides all but the stop."""
    opening, closing = self._thought_ids
    spoken, is_thought = [], False
    for i in map(int, ids):
      is_thought = is_thought or i == opening
      if not is_thought or i in self._stops:
        spoken.append(i)
      is_thought = is_thought and i != closing
    return spoken

  def opening(self, instruction, notes, tools, system) -> formats.Opening:
    return formats.Opening(
      instruction=instruction,
      notes=notes,
      tools=tools,
      shown=self._tools,
      system=system,
    )

  def turns(self, demo: types.Demonstration) -> list[formats.Turn]:
    """What was said after the prompt of a recorded attempt."""
    turns, turn, open_calls = [], 0, 0

    def say(author, text):
      turns.append(formats.Turn(author=author, text=text))

    def end_turns(until):
      nonlocal turn
      while turn < until:
        say(types.Author.ACT, demo.turn_replies[turn])
        say(types.Author.USER, demo.user_turns[turn])
        turn += 1

    for step in demo.steps:
      end_turns(step.turn)
      if not open_calls:
        open_calls = len(self._calls(step.action_text))
        say(types.Author.ACT, step.action_text)
      say(types.Author.WORLD, step.observation_text)
      open_calls -= 1
    end_turns(len(demo.user_turns))
    say(types.Author.ACT, demo.reply)
    return turns

  def _stream(self, demo: types.Demonstration) -> list[Span]:
    """What follows the prompt of a recorded attempt, joints included."""
    spans, before = [], types.Author.USER
    for turn in self.turns(demo):
      spans += self.spans(turn, before)
      before = turn.author
    return spans[1:]  # the first joint is the prompt's

  def spans(self, turn: formats.Turn, before: types.Author) -> list[Span]:
    """A turn after one of `before`, behind the joint, if there is one."""
    joints = formats.Joint
    if turn.author == types.Author.USER:
      return [_authored(self.user_turn(turn.text), turn.author)]
    if turn.author == types.Author.WORLD:
      called = before == types.Author.ACT
      joint, ids = self.answered(
        joints.CALLED if called else joints.AGAIN, turn.text
      )
      header = _authored(joint, types.Author.FORCED)
    else:
      asked = before == types.Author.USER
      header = self.header(joints.ASKED if asked else joints.ANSWERED)
      ids = self._said(turn)
    return [header, _authored(ids, turn.author)]

  def _said(self, turn: formats.Turn) -> np.ndarray:
    if turn.calls is None:
      return self.action(turn.text)
    return np.asarray(self.format.spoken(turn), np.int32)


def _joint_after(turns: Sequence[formats.Turn]) -> formats.Joint:
  """What stands between some turns and the next action."""
  answered = turns and turns[-1].author == types.Author.WORLD
  return formats.Joint.ANSWERED if answered else formats.Joint.ASKED


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
