"""Conversations as prompts, going on from the very tokens that were sampled.

What the server said is kept as it was sampled, under what a client would send
back of it: roles, texts, and calls with their arguments as values. A request
whose messages begin like a kept conversation goes on from its tokens, and only
what follows is encoded. Where a chat template shows earlier turns otherwise
than they were said, and where nothing is kept, the prompt is made anew.
"""

import collections
from collections.abc import Sequence
import dataclasses
import hashlib
import json

import numpy as np

from envace_jax import types
from envace_jax.serving import jobs
from envace_jax.text import formats, row_breaks, tool_calls
from envace_jax.text import template as templates

KEPT_TOKENS = 1 << 22  # 16 MiB of them


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversation:
  """What was said before the answer that is wanted."""

  system: str
  tools: Sequence[types.Json]
  turns: Sequence[formats.Turn]
  notes: str = ''  # of rehearsals

  def keys(self) -> list[str]:
    """A name for the conversation up to each turn, that turn included."""
    name = _hash('', [self.system, self.tools, self.notes])
    names = []
    for turn in self.turns:
      calls = [[call.name, call.arguments] for call in turn.calls or ()]
      name = _hash(name, [int(turn.author), turn.text, calls])
      names.append(name)
    return names


class Conversations:
  """Makes prompts; remembers what was sampled behind which messages."""

  def __init__(self, template: templates.Template):
    self._template = template
    self._kept: collections.OrderedDict[str, np.ndarray] = (
      collections.OrderedDict()
    )
    self._tokens = 0

  def prompt(self, conversation: Conversation) -> np.ndarray:
    """Tokens up to where the answer begins.

    Raises:
      Refused: the chat template cannot show this conversation.
    """
    turns, names = conversation.turns, conversation.keys()
    try:
      for i in range(len(turns) - 1, -1, -1):
        if turns[i].author == types.Author.ACT and names[i] in self._kept:
          self._kept.move_to_end(names[i])
          row = np.concatenate(
            [
              self._kept[names[i]],
              self._template.continuation(turns[i + 1 :], types.Author.ACT),
            ]
          )
          return follow(self._template, row, conversation)
      return anew(self._template, conversation)
    except ValueError as error:
      raise jobs.Refused(
        400, 'invalid_value', str(error), 'messages'
      ) from error

  def keep(
    self, conversation: Conversation, said: formats.Turn, row: np.ndarray
  ) -> None:
    """Remembers the tokens of a conversation that ends in an answer."""
    longer = dataclasses.replace(
      conversation, turns=(*conversation.turns, said)
    )
    name = longer.keys()[-1]
    self._tokens += len(row) - len(self._kept.pop(name, ()))
    self._kept[name] = row
    while self._tokens > KEPT_TOKENS:
      self._tokens -= len(self._kept.popitem(last=False)[1])


def anew(
  template: templates.Template, conversation: Conversation
) -> np.ndarray:
  """The prompt that a template makes of a conversation.

  Raises:
    ValueError: the template cannot show it.
  """
  turns, asked = list(conversation.turns), None
  if turns and turns[0].author == types.Author.USER:
    asked = turns.pop(0).text
  opening = template.opening(
    asked, conversation.notes, conversation.tools, conversation.system
  )
  return template.conversation(opening, turns)


def follow(
  template: templates.Template, row: np.ndarray, conversation: Conversation
) -> np.ndarray:
  """The tokens of a conversation as they were said, unless they would be shown
  otherwise by now: then the prompt that is made of it anew.

  Raises:
    ValueError: as `anew`.
  """
  if template.format.append_only:
    return row
  made = anew(template, conversation)
  return row if row_breaks.continues(template, row, made) else made


def read(
  messages: Sequence[types.Json], tools: Sequence[types.Json]
) -> Conversation:
  """OpenAI's messages as a conversation.

  Raises:
    Refused: they are none, or not in an order in which they could be said.
  """
  if not isinstance(messages, list | tuple) or not messages:
    raise _wrong('messages must be a list of at least one message')
  system, turns, open_calls = [], [], []
  for i, message in enumerate(messages):
    at = f'messages[{i}]'
    if not isinstance(message, dict):
      raise _wrong(f'{at} must be an object')
    role, text = message.get('role'), _text(message.get('content'), at)
    if open_calls and role != 'tool':
      raise _wrong(
        f'{at}: an assistant message with tool_calls must be followed by a '
        f'tool message for each; missing {sorted(open_calls)}'
      )
    if role in ('system', 'developer'):
      if turns:
        raise _wrong(f'{at}: a {role} message must come before all others')
      system.append(text)
    elif role == 'user':
      turns.append(formats.Turn(author=types.Author.USER, text=text))
    elif role == 'assistant':
      calls, open_calls = _calls(message, at)
      order = {name: k for k, name in enumerate(open_calls)}
      turns.append(
        formats.Turn(
          author=types.Author.ACT,
          text=text,
          calls=calls,
          thought=_text(message.get('reasoning_content'), at),
        )
      )
      answered = {}
    elif role == 'tool':
      name = message.get('tool_call_id')
      if name not in open_calls:
        raise _wrong(
          f'{at}: tool_call_id {name!r} answers no open call of the assistant '
          'message before it'
        )
      open_calls.remove(name)
      answered[order[name]] = text
      if not open_calls:
        turns += [
          formats.Turn(author=types.Author.WORLD, text=answered[k])
          for k in sorted(answered)
        ]
    else:
      raise _wrong(
        f'{at}: role {role!r} is none of system, developer, user, assistant, '
        'tool'
      )
  if open_calls:
    raise _wrong(f'the tool messages of {sorted(open_calls)} are missing')
  if turns and turns[-1].author == types.Author.ACT:
    raise _wrong('the last message must be of a user or a tool')
  return Conversation(
    system='\n\n'.join(part for part in system if part),
    tools=tuple(tools),
    turns=tuple(turns),
  )


def _text(content, at: str) -> str:
  """The text of a content; parts are joined."""
  if content is None:
    return ''
  if isinstance(content, str):
    return content
  if isinstance(content, list):
    texts = [
      part.get('text')
      if isinstance(part, dict) and part.get('type') == 'text'
      else None
      for part in content
    ]
    if all(isinstance(text, str) for text in texts):
      return ''.join(texts)
  raise _wrong(f'{at}: content must be text, or parts of type text')


def _calls(message: types.Json, at: str) -> tuple[tuple, list[str]]:
  """The calls of an assistant's message, and what they are known by."""
  calls, names = [], []
  listed = message.get('tool_calls') or ()
  if not isinstance(listed, list | tuple):
    raise _wrong(f'{at}: tool_calls must be a list')
  for call in listed:
    function = call.get('function') if isinstance(call, dict) else None
    if not isinstance(function, dict):
      raise _wrong(f'{at}: a tool call must have a function')
    arguments = function.get('arguments')
    if isinstance(arguments, str):
      arguments = tool_calls.parse_json(arguments or '{}')
    read = tool_calls.call_of(
      {'name': function.get('name'), 'arguments': arguments}
    )
    if isinstance(read, types.ParseError):
      raise _wrong(f'{at}: a tool call cannot be read ({read.detail})')
    if not isinstance(call.get('id'), str) or call['id'] in names:
      raise _wrong(f'{at}: every tool call must have an id of its own')
    calls.append(read)
    names.append(call['id'])
  return tuple(calls), names


def _wrong(message: str) -> jobs.Refused:
  return jobs.Refused(400, 'invalid_value', message, 'messages')


def _hash(before: str, value) -> str:
  text = before + json.dumps(value, sort_keys=True, default=dict)
  return hashlib.sha256(text.encode('utf-8', 'replace')).hexdigest()
