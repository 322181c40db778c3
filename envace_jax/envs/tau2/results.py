"""Attempts in τ²-Bench's own file format, which its own tools read.

One file holds one domain, as there: its tasks, and a simulation per attempt,
with every message, its verdict and its reason to end. `tau2 view` shows it, and
the package's evaluator scores it again.
"""

from collections.abc import Sequence
import datetime
import pathlib
from typing import Any

from envace_jax.envs import benchmark
from envace_jax.envs.tau2 import attempts as tau2_attempts
from envace_jax.envs.tau2 import data as tau2_data
from envace_jax.envs.tau2 import package as tau2_package


def results(
  category: str,
  recorded: Sequence[benchmark.Recorded],
  *,
  agent: str,
  user: str,
  limits: tau2_attempts.Limits,
) -> Any:
  """The package's `Results`.

  Args:
    category: of all the trials.
    recorded: in any order.
    agent: name of whoever was measured.
    user: name of the user, '' in solo mode.
    limits: under which was measured.
  """
  package = tau2_package.load()
  records = package.simulation
  chosen = tau2_data.CATEGORIES[category]
  ids = list(dict.fromkeys(one.value['task_id'] for one in recorded))
  info = records.Info(
    git_commit=tau2_data.version(),
    num_trials=max((one.trial + 1 for one in recorded), default=1),
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
    simulations=[_simulation(one) for one in recorded],
  )


def write(path: pathlib.Path, found: Any) -> None:
  """Writes a file that the package loads."""
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(found.model_dump_json(indent=2), encoding='utf-8')


def _simulation(recorded: benchmark.Recorded) -> Any:
  """The package's `SimulationRun`."""
  started = datetime.datetime.fromisoformat(recorded.started)
  ended = started + datetime.timedelta(seconds=recorded.seconds)
  return tau2_package.load().simulation.SimulationRun.model_validate(
    recorded.value
    | {
      'id': f'{recorded.value["task_id"]}/{recorded.trial}',
      'start_time': started.isoformat(),
      'end_time': ended.isoformat(),
      'duration': recorded.seconds,
      'trial': recorded.trial,
    }
  )
