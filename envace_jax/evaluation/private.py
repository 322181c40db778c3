"""Does rehearsing privately help, at equal real calls?

Three arms commit one real execution per task: `plain` without notes,
`rehearsed` with notes from the task's own private rehearsals, `placebo` with
the notes of another task. Each arm's temperature is tuned on dev tasks for each
cap on real calls, with the same budget for every arm. `private_study` has more
arms, made of the same parts.

The policy does not see the cap, so one uncapped run shows every cap at once:
a run capped at C real calls is a prefix of it, and succeeds exactly if the
uncapped run succeeds with at most C calls (`tests/test_rollout.py`).
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses

from envace_jax import types
from envace_jax.evaluation import evaluator as evaluators
from envace_jax.evaluation import runner as runners
from envace_jax.evaluation import success
from envace_jax.rollout import memory, per_action
from envace_jax.rollout import private_rehearsal as rehearsing

ARMS = ('plain', 'rehearsed', 'placebo')
COMMITTED = 4  # streams of random numbers
_PARALLEL, _SEQUENTIAL = 3, 100  # of the first rehearsal, of the others
_SEED = 0

Tasks = Sequence[types.Task]
# (tasks, stream, samples, manner) -> episodes in some world, task by task.
Where = Callable[[Tasks, int, int, runners.Manner], list[types.Episode]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  rule: rehearsing.Rule  # with 0 attempts nothing is measured
  max_reflection_tokens: int  # of what is said about an attempt
  temperatures: Sequence[float]  # of the committed run
  max_calls: Sequence[int]  # caps on real calls
  headline_calls: int  # the cap that is quoted
  action: per_action.Settings
  action_temperatures: Sequence[float]  # of candidates, tuned likewise
  max_refused: float  # share of rehearsed refusals with which a write passes

  def __post_init__(self):
    if self.headline_calls not in self.max_calls:
      raise ValueError(
        f'private.headline_calls={self.headline_calls} is none of '
        f'private.max_calls={tuple(self.max_calls)}; add it'
      )
    if not 0 <= self.max_refused <= 1:
      raise ValueError(
        f'private.max_refused={self.max_refused} is not in [0, 1]'
      )
    if min(self.action_temperatures) <= 0:
      raise ValueError(
        f'private.action_temperatures={tuple(self.action_temperatures)}: at 0 '
        'all candidates are one; use temperatures above 0'
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Committed:
  """One real execution of each of some tasks."""

  outcomes: Sequence[success.Outcome]
  real_calls: Sequence[int]
  sampled_tokens: int

  def within(self, cap: int) -> list[success.Outcome]:
    """The outcomes of the same run under a cap on real calls."""
    return [
      (task_id, None if succeeded is None else succeeded and calls <= cap)
      for (task_id, succeeded), calls in zip(
        self.outcomes, self.real_calls, strict=True
      )
    ]

  def successes(self, cap: int) -> int:
    return sum(bool(succeeded) for _, succeeded in self.within(cap))


Tried = Mapping[float, Committed]  # by temperature


def compare(
  evaluator: evaluators.Evaluator,
  runner: runners.Runner,
  tasks: Mapping[str, Tasks],
  params,
  settings: Settings,
) -> dict:
  """All arms at all caps on IID test tasks, as JSON values."""
  tuned, tested = (
    _arms(evaluator, runner, tasks[split], params, settings)
    for split in ('dev', 'test_iid')
  )
  by_cap = []
  for cap in settings.max_calls:
    line = {'cap': cap}
    for arm in ARMS:
      best = tuned_temperature(tuned[arm], cap)
      line[arm] = success_rate(tested[arm][best], cap)
    by_cap.append(line)
  headline = next(
    line for line in by_cap if line['cap'] == settings.headline_calls
  )
  return {
    'private_rehearsal': {arm: headline[arm] for arm in ARMS},
    'private_rehearsal_by_cap': by_cap,
  }


def _arms(evaluator, runner, tasks, params, settings) -> dict[str, Tried]:
  notes = rehearse(
    runner, tasks, settings.rule, settings, own_world(runner, params)
  ).notes()
  shown = {
    'plain': [''] * len(tasks),
    'rehearsed': notes,
    'placebo': memory.placebo(notes),
  }
  return {
    arm: {
      temperature: commit(
        evaluator,
        runner,
        tasks,
        params,
        runners.Manner(temperature=temperature, notes=shown[arm]),
      )
      for temperature in settings.temperatures
    }
    for arm in ARMS
  }


def own_world(runner: runners.Runner, params) -> Where:
  """Rehearsals in the world of the policy itself."""

  def run(tasks, stream, samples, manner):
    return runner.rehearsed(
      params, tasks, stream=stream, samples=samples, manner=manner
    )

  return run


def rehearse(
  runner: runners.Runner,
  tasks: Tasks,
  rule: rehearsing.Rule,
  settings: Settings,
  where: Where,
) -> rehearsing.Rehearsed:
  """Private rehearsals of some tasks."""
  written = rule.memory is rehearsing.Memory.WRITTEN

  def run(asked, notes, samples, number):
    manner = runners.Manner(
      notes=notes,
      max_action_tokens=settings.max_reflection_tokens if written else None,
    )
    stream = _SEQUENTIAL + number if number else _PARALLEL
    return where(asked, stream, samples, manner)

  context = rehearsing.Context(
    is_write=runner.environment.is_write, fits=runner.fits
  )
  return rehearsing.rehearse(tasks, rule, context, run)


def commit(
  evaluator: evaluators.Evaluator,
  runner: runners.Runner,
  tasks: Tasks,
  params,
  manner: runners.Manner,
  gate: Callable = lambda world: world,
) -> Committed:
  """Executes each task once, for real."""
  episodes = runner.real(
    params, tasks, stream=COMMITTED, manner=manner, gate=gate
  )
  return Committed(
    outcomes=evaluator.judge(tasks, episodes),
    real_calls=[episode.real_calls for episode in episodes],
    sampled_tokens=sum(episode.sampled_tokens for episode in episodes),
  )


def tuned_temperature(tried: Tried, cap: int) -> float:
  """The temperature with most successes under a cap; the first of equals."""
  return max(tried, key=lambda temperature: tried[temperature].successes(cap))


def success_rate(committed: Committed, cap: int) -> dict:
  """The share of successes under a cap, as JSON."""
  rate = success.success_rate(committed.within(cap), seed=_SEED).rate
  return evaluators.leaf(rate)
