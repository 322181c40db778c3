"""What a user's task runs beside the server: a reset before, a check after.

A hook is the text `package.module:function`, or a command as a list of words.

  function(stage)  Python of the user's own, in this process, with no deadline
  command          in the state's directory, killed with its children after
                   `limit_s`; ENVACE_STATE names the directory, stdin is JSON:
                   {arguments} for a reset, {arguments, steps, reply} for a
                   check

A check returns a bool or a number in [0, 1]; as a command it exits with 0 for
success and 1 for failure. Anything else is a broken hook, not a failed task.
A hook runs with the rights of whoever runs it: a task file is a program, and
one from elsewhere is read before it is run.
"""

from collections.abc import Callable, Sequence
import contextlib
import dataclasses
import importlib
import json
import os
import pathlib
import re
import signal
import subprocess
from typing import Any

from envace_jax import types
from envace_jax.envs import base

Hook = str | Sequence[str]
_FUNCTION = re.compile(r'[A-Za-z_][\w.]*:[A-Za-z_]\w*')


class HookFailed(Exception):
  """A hook broke down, or returned what is no verdict."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
  """What a hook may look at. Before the server runs, `call` raises."""

  state: pathlib.Path  # the directory
  arguments: types.Json  # of the task: environment.arguments
  limit_s: float
  call: Callable[[str, types.Json], base.Observation]  # by the server's names
  steps: Sequence[types.Step] = ()  # what was called; for a check
  reply: str | None = None  # the last one; for a check


def fault(hook: Any) -> str:
  """Why a value is no hook that can be run, in a sentence; '' for none."""
  if isinstance(hook, list):
    words = hook and all(isinstance(w, str) and w for w in hook)
    return '' if words else f'{hook!r} is no command: use a list of words'
  if not isinstance(hook, str) or not _FUNCTION.fullmatch(hook):
    return f'{hook!r} is neither "module:function" nor a list of words'
  try:
    function = _function(hook)
  except Exception as error:  # whatever a user's module raises
    return f'{hook!r} cannot be imported: {error!r}'
  return '' if callable(function) else f'{hook!r} is no function'


def reset(hook: Hook, stage: Stage) -> None:
  """Prepares the state; raises HookFailed."""
  if isinstance(hook, str):
    _call(hook, stage)
    return
  code, said = _run(hook, stage, {'arguments': stage.arguments})
  if code:
    raise HookFailed(f'reset {hook[0]} exited with {code}: {said}')


def check(hook: Hook, stage: Stage) -> float:
  """The verdict on a final state, in [0, 1]; raises HookFailed."""
  if isinstance(hook, str):
    verdict = _call(hook, stage)
    # A NaN is not in the range either.
    if not isinstance(verdict, bool | int | float) or not 0 <= verdict <= 1:
      raise HookFailed(
        f'check {hook} returned {verdict!r:.100}, not a bool or a number in '
        '[0, 1]'
      )
    return float(verdict)
  steps = [
    {
      'name': getattr(step.action, 'name', None),
      'arguments': getattr(step.action, 'arguments', None),
      'observation': step.observation_text,
      'turn': step.turn,
    }
    for step in stage.steps
  ]
  told = {'arguments': stage.arguments, 'steps': steps, 'reply': stage.reply}
  code, said = _run(hook, stage, told)
  if code not in (0, 1):
    raise HookFailed(f'check {hook[0]} exited with {code}: {said}')
  return float(code == 0)


def _function(hook: str) -> Any:
  module, _, name = hook.partition(':')
  return getattr(importlib.import_module(module), name)


def _call(hook: str, stage: Stage) -> Any:
  try:
    return _function(hook)(stage)
  except Exception as error:  # whatever a user's function raises
    raise HookFailed(f'{hook} raised {error!r:.300}') from error


def _run(
  hook: Sequence[str], stage: Stage, told: types.Json
) -> tuple[int, str]:
  """(exit code, last line of what it said); the whole group has a deadline."""
  try:
    process = subprocess.Popen(
      list(hook),
      cwd=stage.state,
      env={**os.environ, 'ENVACE_STATE': str(stage.state)},
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      start_new_session=True,
    )
  except (OSError, ValueError) as error:
    raise HookFailed(f'{hook[0]} cannot be run: {error}') from error
  try:
    said, _ = process.communicate(json.dumps(told).encode(), stage.limit_s)
  except subprocess.TimeoutExpired:
    raise HookFailed(f'{hook[0]} took over {stage.limit_s} s') from None
  finally:
    with contextlib.suppress(ProcessLookupError, PermissionError):
      os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    process.stdin.close()
  lines = said.decode('utf-8', 'replace').strip().splitlines()
  return process.returncode, lines[-1][:300] if lines else ''
