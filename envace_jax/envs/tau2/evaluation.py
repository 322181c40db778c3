"""τ²-Bench's verdict on a trajectory, by its own evaluators.

  reward = Π_b reward_b,   b over the task's own `reward_basis`

DB compares the final databases with those after the gold actions, ENV_ASSERTION
asks the final environment, ACTION looks for the gold actions, COMMUNICATE for
texts in what the agent said. The environment is the one that results when the
recorded calls are executed again, and each recorded answer must come again. A
trajectory on which an evaluator raises earns nothing.

NL_ASSERTION needs a judge, and none is built in. No task of this release counts
it; where a task does, and the other parts do not settle the product, there is
no verdict, which is neither 1 nor 0.
"""

from collections.abc import Sequence
import functools
import math
from typing import Any

from absl import logging

from envace_jax.envs import benchmark
from envace_jax.envs.tau2 import data as tau2_data
from envace_jax.envs.tau2 import package as tau2_package

NEEDS_JUDGE = 'needs_judge'
EVALUATOR_ERROR = 'evaluator_error'

_ENV = ('DB', 'ENV_ASSERTION')
_TOLERANCE = 1e-6  # of the benchmark's own success


def evaluate(
  category: str, task: Any, messages: Sequence[Any], termination: str
) -> Any:
  """The package's `RewardInfo`.

  Raises:
    AttemptFailed: a part that the product depends on needs a judge.
    EvaluatorFailed: an evaluator raised, as when a recorded call does not
      give its recorded answer again.
  """
  package = tau2_package.load()
  info = package.simulation.RewardInfo
  if termination not in ('agent_stop', 'user_stop'):
    return info(reward=0.0, reward_basis=None, info={'note': termination})
  criteria = task.evaluation_criteria
  if criteria is None:
    return info(reward=1.0, reward_basis=None)
  try:
    found = _parts(category, task, list(messages))
  except Exception as e:  # whatever a policy's arguments may do to a replay
    raise EvaluatorFailed(f'{type(e).__name__}: {e}'[:500]) from e
  basis = {kind.value for kind in criteria.reward_basis}
  rewards = {}
  for kinds, part in (
    (_ENV, found['env']),
    (('ACTION',), found['action']),
    (('COMMUNICATE',), found['communicate']),
  ):
    if basis & set(kinds):
      rewards |= dict.fromkeys(
        (package.task.RewardType(kind) for kind in kinds if kind in basis),
        part.reward,
      ) | (part.reward_breakdown or {})
  rewards = {k: v for k, v in rewards.items() if k.value in basis}
  reward = math.prod(rewards.values())
  if 'NL_ASSERTION' in basis and reward and criteria.nl_assertions:
    raise benchmark.AttemptFailed(
      f'{NEEDS_JUDGE}: task {task.id} counts assertions in natural language'
    )
  return info(
    reward=reward,
    db_check=found['env'].db_check,
    env_assertions=found['env'].env_assertions,
    action_checks=found['action'].action_checks,
    communicate_checks=found['communicate'].communicate_checks,
    reward_basis=criteria.reward_basis,
    reward_breakdown=rewards,
    info={kind: part.info for kind, part in found.items()},
  )


class EvaluatorFailed(Exception):
  """An evaluator of the package raised on what a policy had done."""


def outcome(
  category: str, task: Any, messages: Sequence[Any], termination: str
) -> tuple[benchmark.Outcome, Any]:
  """The verdict, and the package's `RewardInfo` behind it."""
  package = tau2_package.load()
  try:
    info = evaluate(category, task, messages, termination)
  except EvaluatorFailed as e:
    logging.warning('τ² task %s could not be evaluated: %s', task.id, e)
    info = package.simulation.RewardInfo(
      reward=0.0, reward_basis=None, info={'note': f'{EVALUATOR_ERROR}: {e}'}
    )
    return _verdict(info, EVALUATOR_ERROR, termination), info
  parts = info.reward_breakdown or {}
  lost = '+'.join(kind.value for kind, part in parts.items() if part < 1)
  return _verdict(info, lost or termination, termination), info


def is_success(reward: float) -> bool:
  """The benchmark's own rule."""
  return abs(reward - 1) <= _TOLERANCE


def _verdict(info: Any, reason: str, termination: str) -> benchmark.Outcome:
  success = is_success(info.reward)
  parts = {k.value: v for k, v in (info.reward_breakdown or {}).items()}
  return benchmark.Outcome(
    reward=info.reward,
    success=success,
    reason='' if success else reason,
    parts=parts | {'termination': termination},
  )


def _parts(category: str, task: Any, messages: list[Any]) -> dict[str, Any]:
  chosen = tau2_data.CATEGORIES[category]
  evaluators = tau2_package.load().evaluators
  return {
    # The gold actions are played as in a conversation, whatever the mode.
    'env': evaluators['env'].EnvironmentEvaluator.calculate_reward(
      environment_constructor=functools.partial(_environment, chosen.domain),
      task=task,
      full_trajectory=messages,
      solo_mode=chosen.solo,
    ),
    'action': evaluators['action'].ActionEvaluator.calculate_reward(
      task=task, full_trajectory=messages
    ),
    'communicate': evaluators[
      'communicate'
    ].CommunicateEvaluator.calculate_reward(
      task=task, full_trajectory=messages
    ),
  }


def _environment(domain: str, solo_mode: bool = False) -> Any:
  return tau2_data.environment(domain, solo=solo_mode)
