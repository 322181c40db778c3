"""Every measurement of a policy, on fixed tasks with fixed random numbers.

  real       success in the environment, sampled and greedy, IID and OOD
  rehearsed  success in the policy's own world, by the training checklist
  gap        rehearsed minus real, split into its causes
  honesty    rehearsed observations against what the environment says to the
             same calls: fidelity, error recall, optimism

Where tasks cannot be executed only rehearsed success is measured, and whatever
compares with the environment is null, which is not zero.

Two policies are compared on common random numbers, and a resumed run repeats
its numbers exactly. Nothing measured here is ever read by training.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses

from envace_jax import types
from envace_jax.evaluation import fidelity, intervals, optimism, replay, success
from envace_jax.evaluation import runner as runners
from envace_jax.rewards import checklist

_REAL, _REHEARSED = 1, 2  # streams of random numbers
_BOOTSTRAP_SEED = 0
_DEV_DRAWS = 2  # intervals of learning curves are not shown

Tasks = Sequence[types.Task]
# By the training checklist; a judge wants all the episodes at once.
Score = Callable[[Tasks, Sequence[types.Episode]], Sequence[types.Score]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Honesty:
  """Rehearsed episodes, their replays if any, and two reports on those."""

  tasks: Tasks  # one per episode
  episodes: Sequence[types.Episode]
  replays: Sequence[replay.Replay]  # none where nothing can be executed
  fidelity: fidelity.Fidelity
  optimism: optimism.Optimism


class Evaluator:
  """Measures parameters; its only state is a count of real calls."""

  def __init__(
    self,
    *,
    runner: runners.Runner,
    tasks: Mapping[str, Tasks],
    samples: int,
    score: Score,
  ):
    self._runner, self._tasks, self._samples = runner, tasks, samples
    self._score = score
    self.real_calls = 0

  def warm_up(self, params) -> None:
    """Compiles every program of `dev`."""
    self._runner.warm_up(params, self._tasks['dev'][0], self._samples)

  def dev(self, params) -> dict[str, float | None]:
    """The few numbers worth a learning curve, on dev tasks."""
    real = success.success_rate(
      self.outcomes(params, 'dev', None),
      seed=_BOOTSTRAP_SEED,
      draws=_DEV_DRAWS,
    )
    honesty = self.honesty(params, 'dev', draws=_DEV_DRAWS)
    rehearsed = success.success_rate(
      self.rehearsed_outcomes(honesty), seed=_BOOTSTRAP_SEED, draws=_DEV_DRAWS
    )
    values = {
      'real_success': real.rate,
      'rehearsed_success': rehearsed.rate,
      'fidelity': honesty.fidelity.f1,
      'exact_match': honesty.fidelity.exact_match,
      'error_recall': honesty.optimism.error_recall,
      'optimism_index': honesty.optimism.optimism_index,
    }
    means = {f'eval/{key}': _mean(value) for key, value in values.items()}
    gap = None
    if real.rate is not None and rehearsed.rate is not None:
      gap = rehearsed.rate.mean - real.rate.mean
    return means | {'eval/gap': gap}

  def held_out(self, params) -> dict:
    """The final numbers, on test tasks, as JSON values.

    Keys are those of `report.summary` where it has them; `outcomes` is the
    task-level table behind them.
    """
    table = {
      f'{decoding}/{split}': self.outcomes(params, f'test_{split}', temperature)
      for decoding, temperature in (('sampled', None), ('greedy', 0.0))
      for split in ('iid', 'ood')
    }
    rates = {
      name: success.success_rate(outcomes, seed=_BOOTSTRAP_SEED)
      for name, outcomes in table.items()
    }
    honesty = self.honesty(params, 'test_iid')
    rehearsed = self.rehearsed_outcomes(honesty)
    passes = success.passes(
      table['sampled/iid'], self._samples, seed=_BOOTSTRAP_SEED
    )
    gap = self._gap(honesty, rehearsed, table['sampled/iid'])
    return {
      'real_success': {
        decoding: {
          split: leaf(rates[f'{decoding}/{split}'].rate)
          for split in ('iid', 'ood')
        }
        for decoding in ('sampled', 'greedy')
      },
      'pass_at_k': {'k': passes.k, 'any': leaf(passes.any_of_k),
                    'all': leaf(passes.all_of_k)},
      'rehearsed_success': leaf(
        success.success_rate(rehearsed, seed=_BOOTSTRAP_SEED).rate
      ),
      'gap': leaf(gap.total),
      'gap_parts': {
        'dynamics': leaf(gap.dyn),
        'judge': leaf(gap.judge),
        'adaptation': leaf(gap.adapt),
      },
      'fidelity': leaf(honesty.fidelity.f1),
      'exact_match': leaf(honesty.fidelity.exact_match),
      'error_recall': leaf(honesty.optimism.error_recall),
      'optimism_index': leaf(honesty.optimism.optimism_index),
      'outcomes': {name: list(map(list, rows)) for name, rows in table.items()},
    }  # fmt: skip

  def outcomes(
    self, params, split: str, temperature: float | None
  ) -> list[success.Outcome]:
    """Real success of each attempt; greedy attempts each task once.

    None at all where nothing can be executed.
    """
    if self._runner.environment is None:
      return []
    samples = 1 if temperature == 0 else self._samples
    tasks = self._tasks[split]
    episodes = self._runner.real(
      params,
      tasks,
      stream=_REAL,
      samples=samples,
      manner=runners.Manner(temperature=temperature),
    )
    return self.judge(_each(tasks, samples), episodes)

  def judge(
    self, tasks: Tasks, episodes: Sequence[types.Episode]
  ) -> list[success.Outcome]:
    """Scores real episodes by the environment's final state and the reply."""
    self.real_calls += sum(episode.real_calls for episode in episodes)
    return [
      (
        task.id,
        checklist.score_evaluation(task, episode, episode.state_hash).success,
      )
      for task, episode in zip(tasks, episodes, strict=True)
    ]

  def honesty(self, params, split: str, *, draws: int = 10_000) -> Honesty:
    """Rehearses a split's tasks; replays every rehearsal, where it can be."""
    environment = self._runner.environment
    episodes = self._runner.rehearsed(
      params, self._tasks[split], stream=_REHEARSED, samples=self._samples
    )
    tasks = _each(self._tasks[split], self._samples)
    replays, pairs = [], []
    if environment is not None:
      replays = replay.replay(episodes, tasks, environment.make)
      pairs = [
        (task.id, mine, theirs)
        for task, r in zip(tasks, replays, strict=True)
        for mine, theirs in r.same_history()
      ]
    self.real_calls += sum(r.real.real_calls for r in replays)
    return Honesty(
      tasks=tasks,
      episodes=episodes,
      replays=replays,
      fidelity=fidelity.compare(
        [
          fidelity.Comparison(
            rehearsed=mine.observation_text,
            real=theirs.observation_text,
            determinable=_determinable(environment, theirs),
            task_id=task_id,
          )
          for task_id, mine, theirs in pairs
        ],
        seed=_BOOTSTRAP_SEED,
        draws=draws,
      ),
      optimism=optimism.error_agreement(
        [
          optimism.ErrorPair(
            rehearsed=optimism.outcome_class(mine.observation_text),
            real=optimism.outcome_class(theirs.observation_text),
            task_id=task_id,
          )
          for task_id, mine, theirs in pairs
        ],
        seed=_BOOTSTRAP_SEED,
        draws=draws,
      ),
    )

  def rehearsed_outcomes(self, honesty: Honesty) -> list[success.Outcome]:
    """What the policy's own world grants it, by the training checklist."""
    scores = self._score(honesty.tasks, honesty.episodes)
    return [
      (task.id, score.success)
      for task, score in zip(honesty.tasks, scores, strict=True)
    ]

  def _gap(
    self,
    honesty: Honesty,
    rehearsed: Sequence[success.Outcome],
    real: Sequence[success.Outcome],
  ) -> optimism.Gap:
    """M4 in successes: the same attempt numbers, rehearsed and real."""
    if not honesty.replays:
      rehearsed, tasks, replayed = [], [], []
    else:
      tasks, replayed = honesty.tasks, [r.real for r in honesty.replays]
    return optimism.gap(
      [task.id for task in tasks],
      rehearsed=[s for _, s in rehearsed],
      replay_transcript=[s.success for s in self._score(tasks, replayed)],
      replay_real=[
        checklist.score_evaluation(task, one, one.state_hash).success
        for task, one in zip(tasks, replayed, strict=True)
      ],
      real=[s for _, s in real],
      seed=_BOOTSTRAP_SEED,
    )


def leaf(interval: intervals.Interval | None) -> dict:
  """An interval as JSON; n = 0 and nulls where nothing could be measured."""
  if interval is None:
    return {'mean': None, 'lo': None, 'hi': None, 'n': 0}
  # One task alone has no interval: its ends are the mean.
  lo = interval.mean if interval.lo is None else interval.lo
  hi = interval.mean if interval.hi is None else interval.hi
  return {'mean': interval.mean, 'lo': lo, 'hi': hi, 'n': interval.n}


def _determinable(environment: runners.Environment, step: types.Step):
  if isinstance(step.action, types.ParseError):
    return [('error',)]
  return environment.determinable(step.action, step.observation_text)


def _each(tasks: Tasks, samples: int) -> list[types.Task]:
  return [task for task in tasks for _ in range(samples)]


def _mean(interval: intervals.Interval | None) -> float | None:
  return None if interval is None else interval.mean
