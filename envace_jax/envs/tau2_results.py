"""Attempts in τ²-Bench's own file format, which its own tools read.

One file holds one domain, as there: its tasks, and a simulation per attempt,
with every message, its verdict and its reason to end. `tau2 view` shows it, and
the package's evaluator scores it again.
"""

from collections.abc import Sequence
import dataclasses
import datetime
import pathlib
from typing import Any

from envace_jax.envs import tau2_attempts, tau2_data, tau2_package

# Ends that upstream has no name for are the agent's fault there, too.
_AGENT_ERROR = 'agent_error'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
  """One attempt that is over; several at a task differ in `trial`."""

  attempt: tau2_attempts.Tau2Attempt
  trial: int = 0
  started: datetime.datetime
  seconds: float


def simulation(trial: Trial) -> Any:
  """The package's `SimulationRun` of an attempt, its verdict in it."""
  package, attempt = tau2_package.load(), trial.attempt
  _, info = attempt.judge()
  messages = []
  for i, message in enumerate(attempt.trajectory):
    messages.append(message.model_copy(update={'turn_idx': i}))
  reasons = {reason.value for reason in package.simulation.TerminationReason}
  ended = trial.started + datetime.timedelta(seconds=trial.seconds)
  return package.simulation.SimulationRun(
    id=f'{attempt.task_id}/{trial.trial}',
    task_id=attempt.task_id,
    start_time=trial.started.isoformat(),
    end_time=ended.isoformat(),
    duration=trial.seconds,
    termination_reason=(
      attempt.termination if attempt.termination in reasons else _AGENT_ERROR
    ),
    reward_info=info,
    messages=messages,
    trial=trial.trial,
  )


def results(
  category: str,
  trials: Sequence[Trial],
  *,
  agent: str,
  user: str,
  limits: tau2_attempts.Limits,
) -> Any:
  """The package's `Results`.

  Args:
    category: of all the trials.
    trials: in any order.
    agent: name of whoever was measured.
    user: name of the user, '' in solo mode.
    limits: under which was measured.
  """
  package = tau2_package.load()
  records = package.simulation
  chosen = tau2_data.CATEGORIES[category]
  ids = list(dict.fromkeys(trial.attempt.task_id for trial in trials))
  info = records.Info(
    git_commit=tau2_data.version(),
    num_trials=max((trial.trial + 1 for trial in trials), default=1),
    max_steps=limits.max_steps,
    max_errors=limits.max_errors,
    user_info=records.UserInfo(
      implementation='dummy_user' if chosen.solo else 'user_simulator',
      llm=user or None,
    ),
    agent_info=records.AgentInfo(
      implementation='llm_agent_solo' if chosen.solo else 'llm_agent',
      llm=agent,
    ),
    environment_info=tau2_data.environment(
      chosen.domain, solo=chosen.solo
    ).get_info(),
  )
  return records.Results(
    info=info,
    tasks=[tau2_data.task(chosen.domain, task_id) for task_id in ids],
    simulations=[simulation(trial) for trial in trials],
  )


def write(path: pathlib.Path, found: Any) -> None:
  """Writes a file that the package loads."""
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(found.model_dump_json(indent=2), encoding='utf-8')
