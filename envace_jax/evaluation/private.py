"""Does rehearsing privately help, at equal real calls?

Three arms commit one real execution per task: `plain` without notes,
`rehearsed` with notes from the task's own private rehearsals, `placebo` with
the notes of another task. Each arm's temperature is tuned on dev tasks for each
cap on real calls, with the same budget for every arm.

The policy does not see the cap, so one uncapped run shows every cap at once:
a run capped at C real calls is a prefix of it, and succeeds exactly if the
uncapped run succeeds with at most C calls (`tests/test_rollout.py`).
"""

from collections.abc import Mapping, Sequence
import dataclasses

from envace_jax import types
from envace_jax.evaluation import evaluator as evaluators
from envace_jax.evaluation import runner as runners
from envace_jax.evaluation import success
from envace_jax.rollout import private_rehearsal

ARMS = ('plain', 'rehearsed', 'placebo')
_REHEARSALS, _COMMITTED = 3, 4  # streams of random numbers
_SEED = 0

Tasks = Sequence[types.Task]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  attempts: int  # private rehearsals per task
  max_notes: int  # remembered calls
  temperatures: Sequence[float]  # of the committed run
  max_calls: Sequence[int]  # caps on real calls
  headline_calls: int  # the cap that is quoted

  def __post_init__(self):
    if self.headline_calls not in self.max_calls:
      raise ValueError(
        f'private.headline_calls={self.headline_calls} is none of '
        f'private.max_calls={tuple(self.max_calls)}; add it'
      )


def compare(
  evaluator: evaluators.Evaluator,
  runner: runners.Runner,
  tasks: Mapping[str, Tasks],
  params,
  settings: Settings,
) -> dict:
  """All arms at all caps on IID test tasks, as JSON values."""
  tuned = _runs(evaluator, runner, tasks['dev'], params, settings)
  tested = _runs(evaluator, runner, tasks['test_iid'], params, settings)
  by_cap = []
  for cap in settings.max_calls:
    line = {'cap': cap}
    for arm in ARMS:
      best = max(
        settings.temperatures,
        key=lambda temperature, arm=arm: _share(tuned[arm, temperature], cap),
      )
      rate = success.success_rate(
        _within(tested[arm, best], cap), seed=_SEED
      ).rate
      line[arm] = evaluators.leaf(rate)
    by_cap.append(line)
  headline = next(
    line for line in by_cap if line['cap'] == settings.headline_calls
  )
  return {
    'private_rehearsal': {arm: headline[arm] for arm in ARMS},
    'private_rehearsal_by_cap': by_cap,
  }


Run = list[tuple[success.Outcome, int]]  # outcome and real calls, per task


def _runs(evaluator, runner, tasks, params, settings) -> dict:
  """Uncapped committed runs: (arm, temperature) -> Run."""
  rehearsals = runner.rehearsed(
    params, tasks, stream=_REHEARSALS, samples=settings.attempts
  )
  notes = private_rehearsal.memories(
    rehearsals,
    settings.attempts,
    max_notes=settings.max_notes,
    is_write=runner.environment.is_write,
  )
  shown = {
    'plain': [''] * len(tasks),
    'rehearsed': notes,
    'placebo': private_rehearsal.placebo(notes),
  }
  runs = {}
  for arm in ARMS:
    for temperature in settings.temperatures:
      episodes = runner.real(
        params,
        tasks,
        stream=_COMMITTED,
        temperature=temperature,
        notes=shown[arm],
      )
      outcomes = evaluator.judge(tasks, episodes)
      calls = [episode.real_calls for episode in episodes]
      runs[arm, temperature] = list(zip(outcomes, calls, strict=True))
  return runs


def _within(run: Run, cap: int) -> list[success.Outcome]:
  """The outcomes of the same run under a cap on real calls."""
  return [
    (task_id, None if succeeded is None else succeeded and calls <= cap)
    for (task_id, succeeded), calls in run
  ]


def _share(run: Run, cap: int) -> float:
  return sum(bool(succeeded) for _, succeeded in _within(run, cap))
