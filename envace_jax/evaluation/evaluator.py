"""Every measurement of a policy, on fixed tasks with fixed random numbers.

  real       success in the environment, sampled and greedy
  rehearsed  success in the policy's own world, by the training checklist
  gap        rehearsed minus real, on the same tasks
  honesty    rehearsed observations against what the environment says to the
             same calls: fidelity, error recall, optimism

Measurements use the same keys at every call, so two policies are compared on
common random numbers and a resumed run repeats its numbers exactly.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses

import jax
import numpy as np

from envace_jax import types
from envace_jax.envs import base as envs
from envace_jax.evaluation import fidelity
from envace_jax.evaluation import intervals
from envace_jax.evaluation import optimism
from envace_jax.evaluation import replay
from envace_jax.rewards import checklist
from envace_jax.rollout import collect
from envace_jax.sampling import generator
from envace_jax.sampling import samplers
from envace_jax.text import template as templates
from envace_jax.worlds import base as worlds
from envace_jax.worlds import real

Tasks = Sequence[types.Task]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Environment:
  """A real environment, and what measuring against it needs to know."""

  make: Callable[[], envs.Environment]
  is_write: Callable[[str], bool]  # by tool name
  determinable: Callable[..., Sequence]  # (call, observation) -> JSON paths


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runner:
  """Runs tasks with one policy network, `rows` at a time."""

  decoder: generator.Decoder
  template: templates.Template
  environment: Environment
  rows: int  # rows of every batch: one set of compiled programs
  key: jax.Array

  def real(
    self,
    params,
    tasks: Tasks,
    *,
    stream: int,
    samples: int = 1,
    temperature: float | None = None,
    notes: Sequence[str] | None = None,
    prompt_tokens: int | None = None,
  ) -> list[types.Episode]:
    """`samples` episodes per task in the environment.

    `temperature` None keeps the training samplers; 0 is greedy.
    """
    world = real.RealWorld(self.environment.make)
    try:
      return self._collect(
        params, world, tasks, stream, samples, temperature, notes, prompt_tokens
      )
    finally:
      world.close()

  def rehearsed(
    self, params, tasks: Tasks, *, stream: int, samples: int = 1
  ) -> list[types.Episode]:
    """`samples` episodes per task in the policy's own world."""
    return self._collect(params, None, tasks, stream, samples)

  def warm_up(self, params, tasks: Tasks, samples: int) -> None:
    """Compiles what `real` and `rehearsed` can need, at both group sizes."""
    self.rehearsed(params, tasks[:1], stream=0, samples=samples)
    for group_size in {1, samples}:
      collector = self._collector(group_size, None, None)
      collector.warm_up(params, tasks[0], self.key)

  def _collect(
    self,
    params,
    world: worlds.World | None,
    tasks: Tasks,
    stream: int,
    samples: int,
    temperature: float | None = None,
    notes: Sequence[str] | None = None,
    prompt_tokens: int | None = None,
  ) -> list[types.Episode]:
    return self._collector(samples, temperature, prompt_tokens).collect(
      params, world, tasks, jax.random.fold_in(self.key, stream), notes=notes
    )

  def _collector(self, samples, temperature, prompt_tokens):
    decoder = self.decoder
    if temperature is not None:
      sampler = samplers.SamplerConfig(temperature=temperature)
      decoder = dataclasses.replace(decoder, act=sampler, rehearse=sampler)
    if prompt_tokens is not None:
      decoder = dataclasses.replace(decoder, prompt_tokens=prompt_tokens)
    if self.rows % samples:
      raise ValueError(f'{samples} samples do not divide {self.rows} rows')
    return collect.Collector(
      decoder=decoder,
      template=self.template,
      batch_tasks=self.rows // samples,
      group_size=samples,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Honesty:
  """Rehearsed episodes of some tasks, and their replays."""

  tasks: Tasks  # one per episode
  replays: Sequence[replay.Replay]

  def comparisons(self, determinable) -> list[list[fidelity.Comparison]]:
    """Rehearsed against real observations, grouped by episode."""
    return [
      [
        fidelity.compare(mine, theirs, determinable)
        for mine, theirs in zip(r.rehearsed.steps, r.real.steps, strict=True)
      ]
      for r in self.replays
    ]


class Evaluator:
  """Measures parameters; the only state is a count of real calls."""

  def __init__(
    self,
    *,
    runner: Runner,
    tasks: Mapping[str, Tasks],
    samples: int,
  ):
    self._runner, self._tasks, self._samples = runner, tasks, samples
    self.real_calls = 0

  def warm_up(self, params) -> None:
    self._runner.warm_up(params, self._tasks['dev'], self._samples)

  def dev(self, params) -> dict[str, float | None]:
    """The few numbers worth a learning curve, on dev tasks."""
    tasks = self._tasks['dev']
    real_success = self.success(params, 'dev', temperature=None)
    honesty = self.honesty(params, tasks)
    rehearsed = _mean(self.rehearsed_success(honesty))
    measured = self._honesty_metrics(honesty)
    real_mean = _mean(real_success)
    return {
      'eval/real_success': real_mean,
      'eval/rehearsed_success': rehearsed,
      'eval/gap': rehearsed - real_mean,
      **{f'eval/{key}': value for key, value in measured.items()},
    }

  def success(
    self, params, split: str, temperature: float | None
  ) -> list[list[bool]]:
    """Real success per task and sample; one sample where it is greedy."""
    tasks = self._tasks[split]
    samples = 1 if temperature == 0 else self._samples
    episodes = self._runner.real(
      params, tasks, stream=1, samples=samples, temperature=temperature
    )
    self.real_calls += sum(episode.real_calls for episode in episodes)
    return _by_task(
      [
        checklist.score_evaluation(
          tasks[i // samples], episode, episode.state_hash
        ).success
        for i, episode in enumerate(episodes)
      ],
      samples,
    )

  def honesty(self, params, tasks: Tasks) -> Honesty:
    """Rehearses the tasks and replays every rehearsal for real."""
    episodes = self._runner.rehearsed(
      params, tasks, stream=2, samples=self._samples
    )
    tasks = [task for task in tasks for _ in range(self._samples)]
    replays = replay.replay(episodes, tasks, self._runner.environment.make)
    self.real_calls += sum(r.real.real_calls for r in replays)
    return Honesty(tasks=tasks, replays=replays)

  def rehearsed_success(self, honesty: Honesty) -> list[list[bool]]:
    """Success that the policy's own world grants, by the training checklist."""
    return _by_task(
      [
        checklist.score_training(task, r.rehearsed).success
        for task, r in zip(honesty.tasks, honesty.replays, strict=True)
      ],
      self._samples,
    )
'''
'''
