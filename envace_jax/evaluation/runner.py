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
class Manner:
  """How ACT goes about its episodes, where not as in training."""

  temperature: float | None = None  # of ACT; None: as in training, 0: greedy
  notes: Sequence[str] | None = None  # rehearsal memory per task
  max_action_tokens: int | None = None  # None: as in training
  rules: alternation.Rules = alternation.Rules()


AS_TRAINED = Manner()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runner:
  """Runs tasks with one network, always `rows` rows at a time."""

  decoder: generator.Decoder
  template: templates.Template
  environment: Environment | None  # None: nothing can be executed
  # The policy's own world for some parameters, driven by the host.
  rehearsed_world: Callable[[Any], worlds.World]
  on_device: bool  # rehearse in one program, where no user speaks again
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
    manner: Manner = AS_TRAINED,
    gate: Callable[[worlds.World], worlds.World] = lambda world: world,
  ) -> list[types.Episode]:
    """`samples` episodes per task in the environment, in task order.

    `gate` wraps the environment in a world that stands before it.
    """
    world = gate(real.RealWorld(self.environment.make))
    try:
      return self.in_world(
        params, world, tasks, stream=stream, samples=samples, manner=manner
      )
    finally:
      world.close()

  def rehearsed(
    self,
    params,
    tasks: Tasks,
    *,
    stream: int,
    samples: int,
    manner: Manner = AS_TRAINED,
  ) -> list[types.Episode]:
    """`samples` episodes per task in the policy's own world."""
    world = None
    if not self.on_device or any(task.user_turns for task in tasks):
      world = self.rehearsed_world(params)
    return self.in_world(
      params, world, tasks, stream=stream, samples=samples, manner=manner
    )

  def fits(self, task: types.Task, notes: str) -> bool:
    """Whether a prompt with these notes is short enough."""
    prompt, _ = self.template.prompt(
      task.instruction, notes, task.tools, task.system
    )
    return len(prompt) <= self.notes_prompt_tokens

  def warm_up(self, params, task: types.Task, samples: int) -> None:
    """Compiles what `real` and `rehearsed` need for prompts without notes."""
    self.rehearsed(params, [task], stream=0, samples=samples)
    world = None if self.on_device else self.rehearsed_world(params)
    # Greedy attempts, one a task, are made in the environment alone.
    sizes = {samples} if self.environment is None else {1, samples}
    for group_size in sorted(sizes):
      self._collector(group_size, AS_TRAINED).warm_up(params, world, task)

  def in_world(
    self,
    params,
    world: worlds.World | None,
    tasks: Tasks,
    *,
    stream: int,
    samples: int,
    manner: Manner = AS_TRAINED,
  ) -> list[types.Episode]:
    """`samples` episodes per task in any world; None: on the device."""
    return self._collector(samples, manner).collect(
      params,
      world,
      tasks,
      jax.random.fold_in(self.key, stream),
      notes=manner.notes,
      rules=manner.rules,
    )

  def _collector(self, samples: int, manner: Manner) -> collect.Collector:
    decoder = self.decoder
    if manner.temperature is not None:
      act = samplers.SamplerConfig(temperature=manner.temperature)
      decoder = dataclasses.replace(decoder, act=act)
    if manner.notes is not None:
      decoder = dataclasses.replace(
        decoder, prompt_tokens=self.notes_prompt_tokens
      )
    if manner.max_action_tokens is not None:
      limits = dataclasses.replace(
        decoder.limits, max_action_tokens=manner.max_action_tokens
      )
      decoder = dataclasses.replace(decoder, limits=limits)
    return collect.Collector(
      decoder=decoder,
      template=self.template,
      batch_tasks=self.rows // samples,
      group_size=samples,
    )
