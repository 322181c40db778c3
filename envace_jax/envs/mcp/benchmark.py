"""A user's benchmark: a task file, a server, and a verdict on each attempt.

  reward  = checklist share x the check hook's verdict (1 for what is missing)
  success = every required criterion PASSes, and the hook says 1

The checklist is that of the task, checklist and evaluation together; how one is
judged lies above environments, so the judge is handed in: `Judge` is the shape
of `rewards.checklist.score_evaluation`, and `validate` that of its
`validate_task`. A criterion that nothing could decide (an empty check without a
judge model) leaves the reward, and keeps the attempt from being a success.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import hashlib
import pathlib

from etils import epath

from envace_jax import errors, types
from envace_jax.envs import benchmark
from envace_jax.envs.mcp import environment as mcp_environment
from envace_jax.envs.mcp import hooks as mcp_hooks
from envace_jax.envs.mcp import server as mcp_server
from envace_jax.envs.mcp import tasks as mcp_tasks
from envace_jax.envs.mcp import tools as mcp_tools

Judge = Callable[[types.Task, types.Episode, str | None], types.Score]


class McpBenchmark:
  """The seam `envs.benchmark.Benchmark` over a task file.

  Args:
    path: of the task file, see `mcp_tasks`.
    server: what the tasks are about.
    judge: decides a checklist.
    validate: raises ValueError on a task that the judge cannot decide.
    limits: of each attempt's server.
    hidden: what of the server is not for the policy.
  """

  def __init__(
    self,
    path: epath.PathLike,
    server: mcp_server.Server,
    *,
    judge: Judge,
    validate: Callable[[types.Task], None],
    limits: mcp_server.Limits = mcp_server.DEFAULTS,
    hidden: mcp_tools.Hidden = mcp_tools.NOTHING,
  ):
    tasks = mcp_tasks.read(path)
    for task in tasks:
      try:
        validate(_judged(task))
      except ValueError as error:
        raise errors.UserError(f'{path}, {error}') from error
    self.name = epath.Path(path).stem
    self.version = _version(path)
    self._tasks = {task.id: task for task in tasks}
    self._server, self._limits, self._hidden = server, limits, hidden
    self._judge = judge

  def categories(self) -> Sequence[str]:
    return tuple(dict.fromkeys(map(_family, self._tasks.values())))

  def task_ids(self, category: str) -> Sequence[str]:
    return [i for i, task in self._tasks.items() if _family(task) == category]

  def open(self, task_id: str) -> 'McpAttempt':
    """A fresh attempt, on a server of its own; raises AttemptFailed."""
    environment = mcp_environment.McpEnvironment(
      self._server, self._limits, self._hidden
    )
    task = self._tasks[task_id]
    try:
      environment.reset(task)
    except BaseException as error:
      environment.close()
      if not isinstance(error, mcp_server.ServerFailed | mcp_hooks.HookFailed):
        raise
      raise benchmark.AttemptFailed(str(error)) from error
    return McpAttempt(task, environment, self._judge)

  def oracle(self, task_id: str) -> Sequence[benchmark.Reply] | None:
    """The plan of a task that has one, a call at a time; one turn only."""
    task = self._tasks[task_id]
    if not task.plan_reply or task.user_turns:
      return None
    calls = [benchmark.Reply(text='', calls=(call,)) for call in task.plan]
    return [*calls, benchmark.Reply(text=task.plan_reply)]

  def groups(
    self,
    outcomes: Mapping[str, Sequence[benchmark.Outcome | None]],
    recorded: Sequence[benchmark.Recorded],
  ) -> Mapping[str, float]:
    del outcomes, recorded
    return {}

  def write(
    self,
    directory: pathlib.Path,
    policy: str,
    recorded: Sequence[benchmark.Recorded],
  ) -> Sequence[pathlib.Path]:
    """Nobody else has tools for such a benchmark."""
    del directory, policy, recorded
    return ()


class McpAttempt:
  """The seam `envs.benchmark.Attempt`: scripted user turns, real calls."""

  def __init__(
    self,
    task: types.Task,
    environment: mcp_environment.McpEnvironment,
    judge: Judge,
  ):
    self.system, self.instruction = task.system, task.instruction
    self._task, self.environment, self._judge = task, environment, judge
    self._steps: list[types.Step] = []
    self._replies: list[str] = []
    self._messages = 0

  @property
  def tools(self) -> Sequence[types.Json]:
    return self.environment.tools

  def respond(self, reply: benchmark.Reply) -> Sequence[benchmark.Message]:
    if reply.calls:
      said = [self._call(action, reply.text) for action in reply.calls]
      self._messages += 1
      return said
    self._replies.append(reply.text)
    self._messages += 1
    turn = len(self._replies)
    if turn > len(self._task.user_turns):
      return ()
    user = self._task.user_turns[turn - 1]
    return (benchmark.Message(role='user', text=user),)

  def score(self) -> benchmark.Outcome:
    task, episode = _judged(self._task), self._episode()
    share, success, parts = 1.0, True, {}
    if task.evaluation:
      score = self._judge(task, episode, self._state_hash())
      share, success = score.reward or 0.0, score.success is not False
      if not all(_is_decided(c, score) for c in task.evaluation):
        success = False
      parts['checklist'] = score.reward
      parts['verdicts'] = {i: v.value for i, v in score.verdicts.items()}
    hook = mcp_tasks.episode(self._task).check
    if hook is not None:
      verdict = self._check(hook, episode)
      share, success = share * verdict, success and verdict == 1
      parts['check'] = verdict
    reason = '' if success else _reason(parts)
    return benchmark.Outcome(
      reward=share, success=success, reason=reason, parts=parts
    )

  def record(self) -> None:
    return None

  def close(self) -> None:
    self.environment.close()

  def _call(
    self, action: types.ToolCall | types.ParseError, text: str
  ) -> benchmark.Message:
    try:
      seen = self.environment.call(action)
    except mcp_server.ServerFailed as error:
      raise benchmark.AttemptFailed(str(error)) from error
    self._steps.append(
      types.Step(
        action=action,
        action_text=text,
        observation_text=seen.text,
        turn=len(self._replies),
        message=self._messages,
      )
    )
    return benchmark.Message(role='tool', text=seen.text, error=seen.error)

  def _episode(self) -> types.Episode:
    """What was said, as a record that a checklist can read."""
    done = len(self._replies) > len(self._task.user_turns)
    stop = types.StopReason.REPLIED if done else types.StopReason.MAX_ACTIONS
    return types.Episode(
      task_id=self._task.id,
      group=0,
      sample_index=0,
      rows=(),
      steps=tuple(self._steps),
      reply=self._replies[-1] if done else None,
      stop_reason=stop,
      turn_replies=tuple(self._replies[:-1] if done else self._replies),
      num_turns=min(len(self._replies), len(self._task.user_turns)) + 1,
      source=types.Source.REAL,
      real_calls=len(self._steps),
    )

  def _state_hash(self) -> str | None:
    try:
      return self.environment.state_hash()
    except errors.UserError:  # a server that keeps its state to itself
      return None

  def _check(self, hook: mcp_hooks.Hook, episode: types.Episode) -> float:
    stage = dataclasses.replace(
      self.environment.stage(), steps=episode.steps, reply=episode.reply
    )
    try:
      return mcp_hooks.check(hook, stage)
    except mcp_hooks.HookFailed as error:
      raise benchmark.AttemptFailed(str(error)) from error


def _family(task: types.Task) -> str:
  return task.family or mcp_tasks.DEFAULT_FAMILY


def _judged(task: types.Task) -> types.Task:
  """The task with all of its criteria where an evaluation looks for them."""
  return dataclasses.replace(
    task, checklist=(), evaluation=(*task.checklist, *task.evaluation)
  )


def _is_decided(criterion: types.Criterion, score: types.Score) -> bool:
  verdict = score.verdicts[criterion.id]
  return not criterion.required or verdict is types.Verdict.PASS


def _reason(parts: types.Json) -> str:
  """The first criterion that did not pass, or the hook."""
  for name, verdict in parts.get('verdicts', {}).items():
    if verdict != types.Verdict.PASS.value:
      return f'{name}: {verdict}'
  return 'check'


def _version(path: epath.PathLike) -> str:
  """A task file's version is its content."""
  return hashlib.sha256(epath.Path(path).read_bytes()).hexdigest()[:12]
