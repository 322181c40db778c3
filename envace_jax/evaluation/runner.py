"""Episodes for measuring: in batches of one size, under fixed keys."""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import jax

from envace_jax import types
from envace_jax.envs import base as envs
from envace_jax.rollout import alternation, collect
from envace_jax.sampling import generator, samplers
from envace_jax.text import template as templates
from envace_jax.worlds import base as worlds
from envace_jax.worlds import real

Tasks = Sequence[types.Task]
Path = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Environment:
  """A real environment, and what measuring against it needs to know."""

  make: Callable[[], envs.Environment]
  is_write: Callable[[str], bool]  # by tool name
  # (call, observation text) -> paths whose value can be known.
  determinable: Callable[[types.ToolCall, str], Sequence[Path]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runner:
  """Runs tasks with one network, always `rows` rows at a time."""

  decoder: generator.Decoder
  template: templates.Template
  environment: Environment
  # The policy's own world for some parameters; None: its own row, on device.
  rehearsed_world: Callable[[Any], worlds.World | None]
  rows: int
  notes_prompt_tokens: int
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
    max_calls: int | None = None,
  ) -> list[types.Episode]:
    """`samples` episodes per task in the environment, in task order.

    `temperature` None keeps the training samplers; 0 is greedy.
    """
    world = real.RealWorld(self.environment.make)
    try:
      return self._collect(
        params, world, tasks, stream, samples, temperature, notes, max_calls
      )
    finally:
      world.close()

  def rehearsed(
    self, params, tasks: Tasks, *, stream: int, samples: int
  ) -> list[types.Episode]:
    """`samples` episodes per task in the policy's own world."""
    world = self.rehearsed_world(params)
    return self._collect(params, world, tasks, stream, samples)

  def warm_up(self, params, task: types.Task, samples: int) -> None:
    """Compiles what `real` and `rehearsed` need for prompts without notes."""
    self.rehearsed(params, [task], stream=0, samples=samples)
    for group_size in sorted({1, samples}):
      self._collector(group_size, None, False).warm_up(
        params, self.rehearsed_world(params), task
      )

  def _collect(
    self,
    params,
    world: worlds.World | None,
    tasks: Tasks,
    stream: int,
    samples: int,
    temperature: float | None = None,
    notes: Sequence[str] | None = None,
    max_calls: int | None = None,
  ) -> list[types.Episode]:
    collector = self._collector(samples, temperature, notes is not None)
    return collector.collect(
      params,
      world,
      tasks,
      jax.random.fold_in(self.key, stream),
      notes=notes,
      rules=alternation.Rules(max_calls=max_calls),
    )

  def _collector(
    self, samples: int, temperature: float | None, has_notes: bool
  ) -> collect.Collector:
    decoder = self.decoder
    if temperature is not None:
      sampler = samplers.SamplerConfig(temperature=temperature)
      decoder = dataclasses.replace(decoder, act=sampler, rehearse=sampler)
    if has_notes:
      decoder = dataclasses.replace(
        decoder, prompt_tokens=self.notes_prompt_tokens
      )
    return collect.Collector(
      decoder=decoder,
      template=self.template,
      batch_tasks=self.rows // samples,
      group_size=samples,
    )
