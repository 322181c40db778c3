"""Transcripts as tokens: the only place where a token gets its author.

The joint view shows both roles one row:

  <|user|> instruction <|end|> [<|notes|> notes <|end|>]     PROMPT
  <|act|>                                                    FORCED
  <tool_call>{...}</tool_call> <|end|>                       ACT
  <|rehearse|>                                               FORCED
  <tool_response>{...}</tool_response> <|end|>               REHEARSE or WORLD
  <|act|> It is shipped. <|end|>                             FORCED, ACT

A role's stop token belongs to that role and is trained. Headers are single
control pieces, which content can never encode to, so nothing a user or a tool
writes can open a turn. Rows are only ever appended to: sampled ids are kept as
they are and never decoded and encoded again.
"""

from collections.abc import Sequence
import json

import numpy as np

from envace_jax import types
from envace_jax.text import tokenizer as tokenizers
from envace_jax.text import tool_calls

TOOLS_IN_PROMPT = ('none', 'names', 'schemas')


class Template:
  """Binds a tokenizer to the row format above."""

  def __init__(self, tokenizer: tokenizers.Tokenizer, tools: str = 'none'):
    """Makes a template.

    Args:
      tokenizer: supplies content pieces and the control pieces of CONTROL.
      tools: what the prompt says of the tools: 'none' (a fixed tool set that
        the policy has internalised), 'names' or full 'schemas'.
    """
    if tools not in TOOLS_IN_PROMPT:
      raise ValueError(f'prompt.tools={tools!r}; use one of {TOOLS_IN_PROMPT}')
    self._tokenizer = tokenizer
    self._tools = tools
    control = tokenizer.control
    self.pad_id = tokenizer.pad_id
    self.call_id = control['<tool_call>']
    self.stop_id = control['<|end|>']
    self.header_ids = {
      types.Role.ACT: control['<|act|>'],
      types.Role.REHEARSE: control['<|rehearse|>'],
    }

  def prompt(
    self, instruction: str, notes: str = '', tools: Sequence[types.Json] = ()
  ) -> tuple[np.ndarray, np.ndarray]:
    """Opens a row: (ids [T] int32, authors [T] int8), first header included."""
    control, encode = self._tokenizer.control, self._tokenizer.encode
    ids = []
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

  def action(self, text: str) -> np.ndarray:
    """Tokens of a recorded action: a rendered tool call, or a reply."""
    control, encode = self._tokenizer.control, self._tokenizer.encode
    opening, closing = '<tool_call>', '</tool_call>'
    if text.startswith(opening) and text.endswith(closing):
      body = encode(text[len(opening) : -len(closing)])
      ids = [control[opening], *body, control[closing]]
    else:
      ids = encode(text)
    return np.asarray([*ids, self.stop_id], np.int32)

  def demonstration(
    self, demo: types.Demonstration
  ) -> tuple[np.ndarray, np.ndarray]:
    """A recorded attempt as one row: (ids [T] int32, authors [T] int8)."""
    spans = [self.prompt(demo.instruction, demo.notes, demo.tools)]
    for step in demo.steps:
      spans += [
        self._authored(self.action(step.action_text), types.Author.ACT),
        self._header(types.Role.REHEARSE),
        self._authored(
          self.observation(step.observation_text), types.Author.WORLD
        ),
        self._header(types.Role.ACT),
      ]
    spans.append(self._authored(self.action(demo.reply), types.Author.ACT))
    ids, authors = zip(*spans, strict=True)
    return np.concatenate(ids), np.concatenate(authors)

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

  def read(
    self, tokens: np.ndarray, authors: np.ndarray
  ) -> tuple[list[types.Step], str | None]:
    """Splits a row into its answered steps and its reply, by authors alone.

    Returns:
      The steps, and the text of a last unanswered non-call action (None when
      the row ends in anything else).
    """
    steps, pending = [], None
    for author, start, stop in runs(authors):
      ids = tokens[start:stop]
      if author == types.Author.ACT:
        pending = ids
      elif author in (types.Author.REHEARSE, types.Author.WORLD):
        action_text = self.text(pending)
        steps.append(
          types.Step(
            action=tool_calls.parse_action(action_text),
            action_text=action_text,
            observation_text=self.observation_text(ids),
            author=types.Author(author),
          )
        )
        pending = None
    if pending is None or self.is_call(pending):
      return steps, None
    return steps, self.text(pending)

  def _header(self, role: types.Role) -> tuple[np.ndarray, np.ndarray]:
    return _arrays([self.header_ids[role]], [types.Author.FORCED])

  def _authored(
    self, ids: np.ndarray, author: types.Author
  ) -> tuple[np.ndarray, np.ndarray]:
    return ids, np.full(len(ids), author, np.int8)


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


def _arrays(ids, authors):
  return np.asarray(ids, np.int32), np.asarray(authors, np.int8)
