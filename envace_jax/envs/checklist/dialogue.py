"""Reference dialogues: published messages as steps and replies, and back.

An assistant message with k calls is followed by exactly k tool messages. Its
action is its content, then its calls as `text.tool_calls` spells them; content
that itself spells a call would be read as one, and is refused. An assistant
message without calls ends the user turn.
"""

from collections.abc import Sequence
import dataclasses

from envace_jax import types
from envace_jax.envs.checklist import schema as schema
from envace_jax.text import tool_calls

FIELD = 'extra_info.messages'


def read(
  messages: Sequence[types.Json],
) -> tuple[list[str], list[str], list[types.Step]]:
  """User messages, replies to them, and the answered calls between.

  Raises:
    schema.Invalid: messages in an order that is no dialogue.
  """
  users, replies, steps, open_steps = [], [], [], []
  spoken = 0  # assistant messages so far
  for i, message in enumerate(messages):
    role, field = message['role'], f'{FIELD}[{i}]'
    if role in schema.TOOL_ROLES:
      if not open_steps:
        raise schema.Invalid('dialogue', field, 'it answers no tool call')
      answered = open_steps.pop(0)
      steps.append(
        dataclasses.replace(answered, observation_text=message['content'])
      )
      continue
    if open_steps:
      fault = f'{len(open_steps)} tool calls before it are unanswered'
      raise schema.Invalid('dialogue', field, fault)
    if role == 'assistant':
      if len(users) == len(replies):
        raise schema.Invalid('dialogue', field, 'it answers no user message')
      open_steps = _steps(message, field, len(replies), spoken)
      if not open_steps:
        replies.append(message['content'])
      spoken += 1
    elif role == 'user':
      if len(users) > len(replies):
        fault = 'the user message before it has no reply'
        raise schema.Invalid('dialogue', field, fault)
      users.append(message['content'])
    elif i:
      raise schema.Invalid('dialogue', field, 'only the first is a system one')
  if open_steps:
    fault = f'the last {len(open_steps)} tool calls are unanswered'
    raise schema.Invalid('dialogue', FIELD, fault)
  return users, replies, steps


def write(
  task: types.Task, demonstration: types.Demonstration
) -> list[types.Json]:
  """Messages, system message included; raises Invalid as `read` does."""
  if task.instruction != demonstration.instruction:
    fault = 'not that of the demonstration'
    raise schema.Invalid('dialogue', 'instruction', fault)
  if tuple(task.user_turns) != tuple(demonstration.user_turns):
    fault = 'not those of the demonstration'
    raise schema.Invalid('dialogue', 'user_turns', fault)
  if task.system != demonstration.system:
    fault = 'not that of the demonstration'
    raise schema.Invalid('dialogue', 'system', fault)
  if task.id != demonstration.task_id:
    fault = f'{demonstration.task_id!r} is another task'
    raise schema.Invalid('dialogue', 'task_id', fault)
  users = (task.instruction, *task.user_turns)
  replies = (*demonstration.turn_replies, demonstration.reply)
  if len(users) != len(replies):
    fault = f'{len(replies)} replies to {len(users)} user messages'
    raise schema.Invalid('dialogue', 'turn_replies', fault)
  if any(step.turn >= len(users) for step in demonstration.steps):
    raise schema.Invalid('dialogue', 'steps', 'a turn without a user message')
  messages = [_message('system', task.system)] if task.system else []
  for turn, (user, reply) in enumerate(zip(users, replies, strict=True)):
    messages.append(_message('user', user))
    steps = [step for step in demonstration.steps if step.turn == turn]
    while steps:
      text = steps[0].action_text
      calls = tool_calls.parse_actions(text)
      answered, steps = steps[: len(calls)], steps[len(calls) :]
      if isinstance(calls[0], types.ParseError) or [
        (call, text) for call in calls
      ] != [(step.action, step.action_text) for step in answered]:
        fault = f'not what its steps call, one by one: {text!r}'
        raise schema.Invalid('dialogue', 'action_text', fault)
      before, _ = tool_calls.split_calls(text)
      recorded = [_recorded(f'call_{i}', call) for i, call in enumerate(calls)]
      action = _message('assistant', before)
      messages.append({**action, 'tool_calls': recorded})
      messages += [_message('tool', s.observation_text) for s in answered]
    messages.append(_message('assistant', reply))
  return messages


def system(value: types.Json) -> str:
  """The system message, of the prompt where a sample has one."""
  dialogue = value['extra_info']['messages']
  recorded = dialogue[0]['content'] if _starts_with_system(dialogue) else ''
  if 'messages' not in value:
    return recorded
  prompt = value['messages']
  system = prompt[0]['content'] if _starts_with_system(prompt) else ''
  if [m['role'] for m in prompt[_starts_with_system(prompt) :]] != ['user']:
    fault = 'a prompt is an optional system message and one user message'
    raise schema.Invalid('dialogue', 'messages', fault)
  users = [m['content'] for m in dialogue if m['role'] == 'user'][:1]
  if users != [prompt[-1]['content']] or recorded not in ('', system):
    fault = f'the prompt is not how {FIELD} begins'
    raise schema.Invalid('dialogue', 'messages', fault)
  return system


def _starts_with_system(messages: Sequence[types.Json]) -> bool:
  return bool(messages) and messages[0]['role'] == 'system'


def _steps(message, field, turn, spoken) -> list[types.Step]:
  """An assistant message's calls, not yet answered; none of a reply."""
  calls = []
  for k, call in enumerate(message.get('tool_calls') or ()):
    where = f'{field}.tool_calls[{k}].function.arguments'
    arguments = schema.decoded(call['function']['arguments'], where, 'dialogue')
    if not isinstance(arguments, dict):
      raise schema.Invalid('dialogue', where, 'no JSON object')
    name = call['function']['name']
    calls.append(types.ToolCall(name=name, arguments=arguments))
  text = message['content'] + ''.join(map(tool_calls.render_call, calls))
  if not calls and tool_calls.is_call(text):
    fault = f'a reply may not spell {tool_calls.CALL_OPEN}'
    raise schema.Invalid('dialogue', f'{field}.content', fault)
  if calls and tool_calls.parse_actions(text) != calls:
    # A stray tag in the content, NUL, or more than 64 bits in an argument.
    fault = f'its calls do not read back: {text!r}'
    raise schema.Invalid('dialogue', field, fault)
  return [
    types.Step(
      action=call,
      action_text=text,
      observation_text='',
      turn=turn,
      message=spoken,
    )
    for call in calls
  ]


def _message(role: str, content: str) -> types.Json:
  return {'role': role, 'content': content}


def _recorded(name: str, call: types.ToolCall) -> types.Json:
  arguments = tool_calls.dumps(call.arguments)
  function = {'name': call.name, 'arguments': arguments}
  return {'id': name, 'type': 'function', 'function': function}
