"""The row format of a pretrained model, derived from its own chat template.

Nothing of a model family is written here. Short conversations with probes for
contents are rendered; what stands between the probes are the joints, the stop
tokens and the marks of calls and answers. Contents are then rendered by the
same template, so that it may strip or quote them.

Cuts are made beside control pieces, where no encoder merges across: what others
write is encoded with the template's text around it. Where only white space
stands between the last control piece of a joint and an observation, it belongs
to the observation, and REHEARSE says it: under Qwen3 an answer is what stands
behind <tool_response>, line ends and closing tag included.

Where a later prompt shows earlier turns otherwise than they were said, `breaks`
has the joint.
"""

from collections.abc import Sequence
import pathlib

from envace_jax import errors, types
from envace_jax.text import (
  call_marker,
  chat_markup,
  chat_messages,
  fast_tokenizer,
  formats,
  json_calls,
  tool_calls,
)

_TEMPLATE_FILE = 'chat_template.jinja'
_ASK, _SAY, _NAME, _VALUE, _SEEN, _SEEN_TOO, _ASK_TOO, _THINK = (
  chat_markup.PROBES
)
_USER, _REPLY = (
  {'role': 'user', 'content': _ASK},
  {'role': 'assistant', 'content': _SAY},
)


class ChatFormat:
  """Implements `formats.Format`."""

  def __init__(self, markup: chat_markup.Markup, *, thinking: bool):
    """Derives the format; `thinking` is the template's `enable_thinking`.

    Raises:
      ValueError: the template has no such turns, or hides what ends them.
    """
    self._markup, self._thinking = markup, thinking
    self._messages = chat_messages.Messages(
      mask=markup.mask, has_calls=True, has_tools=True, has_thoughts=True
    )
    has_calls = self._shows([_USER, self._calling(1)], (), _NAME, _VALUE)
    tool = {'type': 'function', 'function': {'name': _NAME, 'parameters': {}}}
    has_tools = self._shows([_USER], (tool,), _NAME)
    has_thoughts = thinking and self._shows(
      [_USER, _REPLY | {'reasoning_content': _THINK}], (), _THINK
    )
    self._messages = chat_messages.Messages(
      mask=markup.mask,
      has_calls=has_calls,
      has_tools=has_tools,
      has_thoughts=has_thoughts,
    )
    self._call = self._calling(1)
    self._derive_joints()
    lead = self._body([_USER, self._call], _NAME)
    in_reply = self._body([_USER, _REPLY], _SAY)
    self._is_json = tool_calls.CALL_OPEN not in lead
    self.marker = call_marker.find(markup, lead, in_reply)
    joints = formats.Joint
    self.breaks = frozenset(
      joint
      for joint, breaks in (
        (joints.ANSWERED, self._breaks_at_tools()),
        (joints.ASKED, self._breaks_at_user()),
      )
      if breaks
    )
    self.append_only = not (self.breaks or has_thoughts)

  def prompt(
    self, opening: formats.Opening, turns: Sequence[formats.Turn] = ()
  ) -> list[int]:
    messages, tools = self._messages.opening(opening)
    messages += map(self._messages.turn, turns)
    text = self._render(messages, tools, to_act=True)
    last = turns[-1].author if turns else types.Author.USER
    joint = self._asked if last == types.Author.USER else self._answered_joint
    if not text.endswith(joint):
      raise ValueError(
        'the chat template opens an action differently in this conversation; '
        'use another template'
      )
    return self._markup.encode(text[: len(text) - len(joint)])

  def observation(
    self, joint: formats.Joint, text: str
  ) -> tuple[list[int], list[int]]:
    seen = {'role': 'tool', 'name': 'tool', 'content': self._markup.mask(text)}
    rendered = self._render([_USER, self._call, seen], to_act=True)
    start = self._after_call(rendered) + len(self._texts[formats.Joint.CALLED])
    said = rendered[start : len(rendered) - len(self._answered_joint)]
    header = list(self.joints[joint])
    ids = self._markup.encode(self._texts[joint] + said)
    if ids[: len(header)] == header:
      return header, ids[len(header) :]
    # A token that they share counts as the observation's, whose text then
    # begins with the joint's last line end.
    kept = len(call_marker.common_start([ids, header]))
    return ids[:kept], ids[kept:]

  def user_turn(self, text: str) -> list[int]:
    asked = {'role': 'user', 'content': self._markup.mask(text)}
    rendered = self._render([_USER, _REPLY, asked], to_act=True)
    start = rendered.index(_SAY) + len(_SAY + self._reply_end)
    stop = len(rendered) - len(self._asked)
    return self._markup.encode(rendered[start:stop])

  def action(self, text: str) -> list[int]:
    return self._action(self._messages.said(text))

  def spoken(self, turn: formats.Turn) -> list[int]:
    return self._action(self._messages.spoken(turn))

  def call_opening(self, name: str | None) -> list[int]:
    lead = self._body([_USER, self._call], _NAME)
    if name is None and self._is_json:
      return list(self.marker.ids)
    if name is None:
      before, tag, _ = lead.partition(tool_calls.CALL_OPEN)
      return self._markup.encode(before + tag)
    after = self._body([_USER, self._call], _VALUE)[len(lead + _NAME) :]
    before_arguments, brace, _ = after.partition('{')
    if not brace:
      raise ValueError(
        'the chat template writes arguments without braces; use tool_choice '
        "'auto' or 'required'"
      )
    # What begins the arguments is the policy's, so that no token is cut.
    opening = lead + self._markup.mask(name) + before_arguments.rstrip()
    return self._markup.encode(opening)

  def calls(
    self, text: str, *, parallel: bool
  ) -> list[types.ToolCall | types.ParseError]:
    if self._is_json:
      return [json_calls.parse_action(text)]
    if parallel:
      return tool_calls.parse_actions(text)
    return [tool_calls.parse_action(text)]

  def observation_text(self, text: str) -> str:
    before, after = self._around
    if text.startswith(before):
      text = text[len(before) :]
    return text[: len(text) - len(after)] if text.endswith(after) else text

  def _action(self, message: dict) -> list[int]:
    body = self._after_opening([_USER, message])
    return self._markup.encode(body[: self._markup.controls(body)[-1].end()])

  def _render(self, messages, tools=(), *, to_act=False) -> str:
    return self._markup.render(
      messages, tools, to_act=to_act, thinking=self._thinking
    )

  def _shows(self, messages, tools, *probes: str) -> bool:
    try:
      text = self._render(messages, tools)
    except ValueError:
      return False
    return all(probe in text for probe in probes)

  def _calling(self, calls: int) -> dict:
    """A message of one or more calls with probes."""
    call = {'name': _NAME, 'arguments': {'k': _VALUE}}
    return self._messages.calling('', [call] * calls)

  def _derive_joints(self) -> None:
    """Joints, stop tokens, and what frames an observation."""
    joints = formats.Joint
    asked = self._tail(self._render([_USER], to_act=True), _ASK)
    self._asked = asked[self._control_in(asked, 0).end() :]
    replied = self._tail(self._render([_USER, _REPLY]), _SAY)
    reply_stop = self._control_in(replied, -1)
    self._reply_end = replied[: reply_stop.end()]
    called = self._tail(self._render([_USER, self._call]), _VALUE)
    call_stop = self._control_in(called, -1)
    self._call_end = called[: call_stop.end()]
    seen = {'role': 'tool', 'name': 'tool', 'content': _SEEN}
    text = self._render([_USER, self._call, seen], to_act=True)
    lead = text[self._after_call(text) : text.index(_SEEN)]
    header = _up_to_control(self._markup, lead)
    if lead[len(header) :].strip():
      header = lead
    rest = self._tail(text, _SEEN)
    stop = self._control_in(rest, 0)
    self._around = lead[len(header) :], rest[: stop.start()]
    self._answered_joint = rest[stop.end() :]
    self._texts = {
      joints.CALLED: header,
      joints.ANSWERED: self._answered_joint,
      joints.ASKED: self._asked,
    }
    self._derive_again(rest[: stop.end()])
    encode = self._markup.encode
    self.joints = {k: tuple(encode(v)) for k, v in self._texts.items()}
    ids = lambda *found: tuple(dict.fromkeys(encode(m[0])[0] for m in found))
    self.stop_ids = {
      types.Role.ACT: ids(reply_stop, call_stop),
      types.Role.REHEARSE: ids(stop),
    }

  def _derive_again(self, seen_end: str) -> None:
    """The joint between two answers, if the template has one."""
    seen, seen_too = (
      {'role': 'tool', 'name': 'tool', 'content': probe}
      for probe in (_SEEN, _SEEN_TOO)
    )
    conversation = [_USER, self._calling(2), seen, seen_too]
    if not self._shows(conversation, (), _SEEN, _SEEN_TOO):
      return
    text = self._tail(self._render(conversation), _SEEN)
    between = text[: text.index(_SEEN_TOO)]
    before = self._around[0]
    if between.startswith(seen_end) and between.endswith(before):
      cut = len(between) - len(before)
      self._texts[formats.Joint.AGAIN] = between[len(seen_end) : cut]

  def _breaks_at_tools(self) -> bool:
    """Whether an answered call is shown otherwise than it was said."""
    seen = {'role': 'tool', 'name': 'tool', 'content': _SEEN}
    call = self._call
    if self._messages.has_thoughts:
      call = call | {'reasoning_content': _THINK}
    before = self._render([_USER, call])
    after = self._render([_USER, call, seen], to_act=True)
    return not after.startswith(before[: self._after_call(before)])

  def _breaks_at_user(self) -> bool:
    reply = _REPLY
    if self._messages.has_thoughts:
      reply = reply | {'reasoning_content': _THINK}
    asked = {'role': 'user', 'content': _ASK_TOO}
    before = self._render([_USER, reply])
    after = self._render([_USER, reply, asked], to_act=True)
    return not after.startswith(before)

  def _body(self, messages, probe: str) -> str:
    """What an action says up to a probe."""
    text = self._after_opening(messages)
    return text[: text.index(probe)]

  def _after_opening(self, messages) -> str:
    """What a message of ACT says behind what asks for it, to its end."""
    opening = self._render([_USER], to_act=True)
    text = self._render(messages)
    if not text.startswith(opening):
      raise ValueError(
        'the chat template writes an action differently from how it is asked '
        'for; use another template'
      )
    return text[len(opening) :]

  def _after_call(self, text: str) -> int:
    return text.rindex(_VALUE) + len(_VALUE + self._call_end)

  def _tail(self, text: str, probe: str) -> str:
    if probe not in text:
      raise ValueError(
        'the chat template leaves out a user, assistant or tool message; use '
        'one that shows all three'
      )
    return text[text.rindex(probe) + len(probe) :]

  def _control_in(self, text: str, which: int):
    found = self._markup.controls(text)
    if not found:
      raise ValueError(
        'the chat template ends a turn by ordinary text, which content could '
        'forge; use one whose turns end in an added token'
      )
    return found[which]


def from_directory(
  directory: str | pathlib.Path,
  tokenizer: fast_tokenizer.FastTokenizer,
  *,
  thinking: bool = True,
) -> ChatFormat:
  """The format of the chat template in a directory of a tokenizer.

  Raises:
    UserError: there is none, or none that rows can be made of.
  """
  file = pathlib.Path(directory, _TEMPLATE_FILE)
  try:
    if file.exists():
      source = file.read_text(encoding='utf-8')
    else:
      source = _source_of(tokenizer.config.get('chat_template'))
    markup = chat_markup.Markup(source, tokenizer)
    return ChatFormat(markup, thinking=thinking)
  except (OSError, ValueError) as e:
    raise errors.UserError(f'{directory}: {e}') from e


def _source_of(value) -> str:
  """One template; of several, the one for tools."""
  if isinstance(value, list):
    named = {entry.get('name'): entry.get('template') for entry in value}
    value = named.get('tool_use') or named.get('default')
  if not isinstance(value, str) or not value:
    raise ValueError(
      f'no chat template; give a directory with a {_TEMPLATE_FILE}, or with '
      'chat_template in its tokenizer_config.json'
    )
  return value


def _up_to_control(markup: chat_markup.Markup, text: str) -> str:
  found = markup.controls(text)
  return text[: found[-1].end()] if found else ''
