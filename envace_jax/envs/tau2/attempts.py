"""One attempt at a task of τ²-Bench: who speaks when, and what ends it.

  agent --calls--> tools --answers--> agent --text--> user --text--> agent
                                                      user <-> tools

Every arrow is a step. An attempt ends when the user stops; in solo mode, where
there is no user, when the agent calls `done`; when, with the agent or the user
to speak, as many steps were made or calls refused as are allowed; or when the
agent says nothing at all. A trajectory keeps what the tools really answered,
since they must answer it again when it is scored.

Upstream forces every action of solo mode to be a call. Here it is not forced:
a text without calls ends the attempt as `done` does. What nobody could read as
a call is recorded as a call of a tool that does not exist.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import json
from typing import Any

from envace_jax import types
from envace_jax.envs import benchmark
from envace_jax.envs.tau2 import data as tau2_data
from envace_jax.envs.tau2 import evaluation as tau2_evaluation
from envace_jax.envs.tau2 import package as tau2_package
from envace_jax.envs.tau2 import prompts as tau2_prompts
from envace_jax.envs.tau2 import users as tau2_users
from envace_jax.text import tool_calls

TOOL_ERROR = 'tool_error'
UNFINISHED = 'unfinished'  # scored before it was over

_DONE = 'done'  # the tool that upstream adds in solo mode


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
  """The defaults are those of the benchmark's command line."""

  max_steps: int = 200
  max_errors: int = 10  # calls that were answered by an error

  def __post_init__(self):
    for field in dataclasses.fields(self):
      if getattr(self, field.name) < 1:
        raise ValueError(f'{field.name} must be at least 1')


class Tau2Attempt:
  """Implements `benchmark.Attempt`."""

  def __init__(
    self,
    category: str,
    task: Any,
    user: tau2_users.User | None,
    *,
    limits: Limits,
    prompt: tau2_prompts.Prompt,
  ):
    """Puts the task's state in place and lets the user speak first.

    Args:
      category: of the task.
      task: a copy that is this attempt's own.
      user: who talks; None in solo mode.
      limits: what ends the attempt.
      prompt: what the policy is told.

    Raises:
      AttemptFailed: the user broke down.
    """
    self._package = tau2_package.load()
    self._category, self._task = category, task
    self._user, self._limits = user, limits
    chosen = tau2_data.CATEGORIES[category]
    self._solo = chosen.solo
    self._environment = tau2_data.environment(chosen.domain, solo=chosen.solo)
    history = _initialise(self._environment, task)
    self.task_id = task.id  # the package's
    self.trajectory: list[Any] = list(history)
    self.termination = ''
    self._info: Any = None  # the package's own verdict
    self.num_steps = self.num_errors = 0
    self.system = tau2_prompts.system(
      category, self._environment.get_policy(), task, prompt
    )
    self.tools = tau2_data.tools(category)
    if self._solo:
      self.instruction = task.ticket
      self.num_steps = -1  # upstream does not count the first action
      return
    self._user_tools = tau2_data.user_tools(chosen.domain)
    if history:
      self.system += _earlier(history)
    else:
      # The agent's first words are the benchmark's, not the policy's.
      self.trajectory.append(self._package.greeting.model_copy(deep=True))
    self.instruction = self._hear_user()

  def respond(self, reply: benchmark.Reply) -> Sequence[benchmark.Message]:
    if self.termination:
      return ()
    text = tool_calls.clean(reply.text)
    if self._solo and (
      not reply.calls or any(_name(call) == _DONE for call in reply.calls)
    ):
      self._say('assistant', self._package.agent.LLMSoloAgent.STOP_TOKEN, ())
      self._stop('agent_stop')
      return ()
    if not reply.calls and not text.strip():
      self.termination = 'agent_error'  # it cannot be said in the package
      return ()
    self._say('assistant', text, [_readable(call) for call in reply.calls])
    if reply.calls:
      answers = self._execute()
      return () if self._is_exhausted() else answers
    if self._is_exhausted():
      return ()
    said = self._hear_user()
    if self.termination:
      return ()
    return [benchmark.Message(role='user', text=said)]

  def score(self) -> benchmark.Outcome:
    outcome, self._info = tau2_evaluation.outcome(
      self._category,
      self._task,
      self.trajectory,
      self.termination or UNFINISHED,
    )
    parts = {
      **outcome.parts,
      'steps': max(self.num_steps, 0),
      'refused_calls': self.num_errors,
    }
    return dataclasses.replace(outcome, parts=parts)

  def record(self) -> types.Json:
    """The package's `SimulationRun`, without what only the harness knows."""
    if self._info is None:
      self.score()
    simulation = self._package.simulation
    reasons = {reason.value for reason in simulation.TerminationReason}
    return {
      'task_id': self.task_id,
      # Ends that upstream has no name for are the agent's fault there, too.
      'termination_reason': (
        self.termination if self.termination in reasons else 'agent_error'
      ),
      'reward_info': self._info.model_dump(mode='json'),
      'messages': [
        message.model_copy(update={'turn_idx': i}).model_dump(mode='json')
        for i, message in enumerate(self.trajectory)
      ],
    }

  def close(self) -> None:
    self._environment = None  # the databases are the large part

  def _say(self, role: str, text: str, calls: Sequence[types.ToolCall]) -> None:
    message = self._package.message
    made = {
      'assistant': message.AssistantMessage,
      'user': message.UserMessage,
    }[role](
      role=role,
      content=text or None,
      tool_calls=[
        message.ToolCall(
          id=f'call_{len(self.trajectory)}_{i}',
          name=call.name,
          arguments=dict(call.arguments),
          requestor=role,
        )
        for i, call in enumerate(calls)
      ]
      or None,
    )
    self.trajectory.append(made)
    self.num_steps += 1

  def _execute(self) -> list[benchmark.Message]:
    """Executes the calls of the last message."""
    answers = [self._answer(c) for c in self.trajectory[-1].tool_calls]
    self.trajectory += answers
    self.num_steps += 1
    return [
      benchmark.Message(
        role='tool',
        text=answer.content,
        error=TOOL_ERROR if answer.error else None,
      )
      for answer in answers
    ]

  def _answer(self, call: Any) -> Any:
    try:
      # A copy: what a tool keeps and later changes must not change the record.
      answer = self._environment.get_response(call.model_copy(deep=True))
    except Exception as e:
      # An answer that cannot be written down, after the call was executed:
      # upstream breaks here, and will again when the attempt is scored.
      answer = self._package.message.ToolMessage(
        id=call.id,
        content=f'Error: {type(e).__name__}',
        requestor=call.requestor,
        role='tool',
        error=True,
      )
    self.num_errors += answer.error
    return answer

  def _is_exhausted(self) -> bool:
    """Whether nobody may speak any more."""
    if self.num_steps >= self._limits.max_steps:
      self.termination = 'max_steps'
    if self.num_errors >= self._limits.max_errors:
      self.termination = 'too_many_errors'
    return bool(self.termination)

  def _stop(self, termination: str) -> None:
    """Ends the attempt; upstream looks at the limits after that, too."""
    self.termination = termination
    self._is_exhausted()

  def _hear_user(self) -> str:
    """What the user says next; it may call tools before, or end the attempt."""
    while True:
      turn = self._user.respond(self._as_user(), self._user_tools)
      text = tool_calls.clean(turn.text)
      self._say('user', text, [_readable(call) for call in turn.calls])
      if turn.calls:
        self._execute()
        if self._is_exhausted():
          return ''
      elif tau2_users.is_stop(text):
        self._stop('user_stop')
        return text
      else:
        self._is_exhausted()
        return text

  def _as_user(self) -> list[types.Json]:
    """The conversation as the user's model sees it."""
    user = self._package.user
    state = user.UserSimulator(
      tools=self._user_tools or None, instructions=str(self._task.user_scenario)
    ).get_init_state(
      [m for m in self.trajectory if user.is_valid_user_history_message(m)]
    )
    return [
      _openai(message)
      for message in (*state.system_messages, *state.flip_roles())
    ]


def _initialise(environment: Any, task: Any) -> Sequence[Any]:
  """Puts the task's state in place; returns what was said before."""
  state = task.initial_state
  history = list((state and state.message_history) or ())
  environment.set_state(
    initialization_data=state and state.initialization_data,
    initialization_actions=state and state.initialization_actions,
    message_history=history,
  )
  environment.sync_tools()
  return history


def _earlier(history: Sequence[Any]) -> str:
  lines = '\n'.join(
    json.dumps(_openai(message), ensure_ascii=False) for message in history
  )
  return f'\n<earlier_messages>\n{lines}\n</earlier_messages>'


def _openai(message: Any) -> types.Json:
  """A message of the package in the form of the chat API."""
  made = {'role': message.role, 'content': message.content}
  if message.role == 'tool':
    return made | {'tool_call_id': message.id}
  if getattr(message, 'tool_calls', None):
    made['tool_calls'] = [
      {
        'id': call.id,
        'type': 'function',
        'function': {
          'name': call.name,
          'arguments': json.dumps(call.arguments),
        },
      }
      for call in message.tool_calls
    ]
  return made


def _name(call: types.ToolCall | types.ParseError) -> Any:
  return getattr(call, 'name', None)


def _readable(call: types.ToolCall | types.ParseError) -> types.ToolCall:
  """A call that can be recorded: plain JSON, without what no file can hold."""
  if isinstance(call, types.ParseError):
    return _unreadable(call.kind)
  if not isinstance(call.name, str) or not isinstance(call.arguments, Mapping):
    return _unreadable('not_object')
  try:
    text = json.dumps(dict(call.arguments), ensure_ascii=False)
    arguments = json.loads(tool_calls.clean(text))
  except (RecursionError, TypeError, ValueError):
    return _unreadable('bad_arguments')
  return types.ToolCall(name=tool_calls.clean(call.name), arguments=arguments)


def _unreadable(kind: str) -> types.ToolCall:
  return types.ToolCall(name=f'unreadable call: {kind}', arguments={})
