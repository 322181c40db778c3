"""What a chat template is given: turns and prompts as masked messages.

A template that ignores tools or calls is shown both as text: schemas in the
system message, under `TOOLS_HEAD`, and calls in the assistant's content. Notes
follow the instruction, in the user's message, under `NOTES`. Every text is
masked (`text.chat_markup`), a malformed call's tags excepted.
"""

from collections.abc import Callable, Sequence
import dataclasses
import json
from typing import Any

from envace_jax import types
from envace_jax.text import formats, signatures, tool_calls

NOTES = '\n\nKnown from rehearsal:\n'
TOOLS_HEAD = 'Tools that may be called:'
CALL_FORM = (
  'To call one, answer with its name and arguments as JSON, like this:\n'
  '<tool_call>\n{"name": "TOOL", "arguments": {"ARGUMENT": "VALUE"}}\n'
  '</tool_call>'
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Messages:
  """Makes messages for a template that shows what the flags say."""

  mask: Callable[[Any], Any]  # chat_markup.Markup.mask
  has_calls: bool
  has_tools: bool
  has_thoughts: bool

  def opening(self, opening: formats.Opening) -> tuple[list[dict], list]:
    """The messages and tools of a prompt."""
    system, tools = [opening.system], []
    if opening.shown == 'schemas' and self.has_tools:
      tools = [_plain(tool) for tool in opening.tools]
    elif opening.shown != 'none' and opening.tools:
      functions = [tool['function'] for tool in opening.tools]
      if opening.shown == 'names':
        shown = [function['name'] for function in functions]
      elif opening.shown == 'signatures':
        shown = [signatures.signature(function) for function in functions]
      else:
        shown = [tool_calls.dumps(function) for function in functions]
      system.append('\n'.join([TOOLS_HEAD, *shown]))
      if not self.has_calls:
        system.append(CALL_FORM)
    system = '\n\n'.join(part for part in system if part)
    messages = [{'role': 'system', 'content': system}] if system else []
    asked = opening.instruction
    if asked is not None:
      if opening.notes:
        asked += NOTES + opening.notes
      messages.append({'role': 'user', 'content': asked})
    return self.mask(messages), self.mask(tools)

  def turn(self, turn: formats.Turn) -> dict:
    """What somebody said after the prompt."""
    if turn.author == types.Author.ACT:
      if turn.calls is not None:
        return self.spoken(turn)
      return self.said(turn.text)
    content = self.mask(turn.text)
    if turn.author == types.Author.USER:
      return {'role': 'user', 'content': content}
    return {'role': 'tool', 'name': 'tool', 'content': content}

  def calling(self, before: str, calls: Sequence[dict]) -> dict:
    """A message of calls: name and arguments, masked."""
    if self.has_calls:
      wrapped = [{'type': 'function', 'function': call} for call in calls]
      return {'role': 'assistant', 'content': before, 'tool_calls': wrapped}
    spelt = [
      f'{tool_calls.CALL_OPEN}\n{tool_calls.dumps(call)}\n'
      f'{tool_calls.CALL_CLOSE}'
      for call in calls
    ]
    content = '\n'.join([before, *spelt] if before else spelt)
    return {'role': 'assistant', 'content': content}

  def spoken(self, turn: formats.Turn) -> dict:
    """An action whose calls are given."""
    text = self.mask(turn.text)
    if turn.calls:
      message = self.calling(text, self._payloads(turn.calls))
    else:
      message = {'role': 'assistant', 'content': text}
    if turn.thought and self.has_thoughts:
      message['reasoning_content'] = self.mask(turn.thought)
    return message

  def said(self, text: str) -> dict:
    """A recorded action as a message; a malformed call as it was written.

    Thoughts go where the template wants them, and nowhere if it wants none.
    """
    thought, spoken = _split_thought(text)
    before, bodies = tool_calls.split_calls(spoken) or (spoken, [])
    calls = [
      tool_calls.parse_action(
        tool_calls.CALL_OPEN + body + tool_calls.CALL_CLOSE
      )
      for body in bodies
    ]
    if calls and all(isinstance(call, types.ToolCall) for call in calls):
      message = self.calling(self.mask(before.strip()), self._payloads(calls))
    elif tool_calls.is_call(spoken):
      content = self.mask(spoken)
      for tag in (tool_calls.CALL_OPEN, tool_calls.CALL_CLOSE):
        content = content.replace(self.mask(tag), tag)
      message = {'role': 'assistant', 'content': content}
    else:
      message = {'role': 'assistant', 'content': self.mask(spoken)}
    if thought and self.has_thoughts:
      message['reasoning_content'] = self.mask(thought)
    return message

  def _payloads(self, calls: Sequence[types.ToolCall]) -> list[dict]:
    return [
      {
        'name': self.mask(call.name),
        'arguments': self.mask(_plain(call.arguments)),
      }
      for call in calls
    ]


def _split_thought(text: str) -> tuple[str, str]:
  """(thought, the rest) of an action that begins with a thought."""
  opening, closing = '<think>', '</think>'
  if not text.startswith(opening) or closing not in text:
    return '', text
  thought, _, spoken = text[len(opening) :].partition(closing)
  return thought.strip('\n'), spoken.lstrip('\n')


def _plain(value):
  """Nested mappings as dicts, which every template can serialise."""
  return json.loads(tool_calls.dumps(value))
