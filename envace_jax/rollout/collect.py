"""Episodes for a list of tasks, in batches of one fixed shape.

The last batch is filled up with copies of its first task and cut again, so
that neither the number of tasks nor their texts ever compile anything.
"""

from collections.abc import Sequence
import dataclasses

import jax

from envace_jax import types
from envace_jax.model import per_role
from envace_jax.rollout import alternation, episodes, on_device
from envace_jax.sampling import generator, keys
from envace_jax.text import template as templates
from envace_jax.worlds import base as worlds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collector:
  """Runs episodes with one decoder, `batch_tasks` x `group_size` at a time."""

  decoder: generator.Decoder
  template: templates.Template
  batch_tasks: int
  group_size: int

  def collect(
    self,
    params,
    world: worlds.World | None,
    tasks: Sequence[types.Task],
    key: jax.Array,
    *,
    notes: Sequence[str] | None = None,
    rules: alternation.Rules,
  ) -> list[types.Episode]:
    """`group_size` episodes per task, in task order.

    Args:
      params: the policy; of a network per role, ACT's is asked.
      world: who answers; None rehearses on the device, in one program.
      tasks: any number of tasks.
      key: the stream; rows derive theirs by global sample index.
      notes: rehearsal memory per task, shown in its prompt.
      rules: what else ends an episode (host-driven worlds only).
    """
    params = per_role.of(params, types.Role.ACT)
    attempts = episodes.attempts_of(tasks, self.group_size, notes=notes)
    done = []
    for start in range(0, len(tasks), self.batch_tasks):
      first, size = start * self.group_size, self._batch_size
      batch = attempts[first : first + size]
      real = len(batch)
      # Filled rows repeat a group under sample indices of their own.
      fill = [
        dataclasses.replace(batch[i % self.group_size], sample_index=first + i)
        for i in range(real, size)
      ]
      finished = self._run(params, world, batch + fill, key, rules)
      done += [
        episodes.episode_of(attempt, one, self.template)
        for attempt, one in zip(batch, finished, strict=False)
      ]
    return done

  def warm_up(
    self, params, world: worlds.World | None, task: types.Task
  ) -> None:
    """Compiles every program that host-driven rollouts can need."""
    params = per_role.of(params, types.Role.ACT)
    attempts = episodes.attempts_of([task] * self.batch_tasks, self.group_size)
    batch = worlds.Batch(
      tasks=[attempt.task for attempt in attempts],
      prompts=[self._prompt(attempts[0])] * self.batch_tasks,
      row_keys=keys.rows(jax.random.key(0), range(self._batch_size)),
    )
    generator.Session(
      self.decoder, params, batch.prompts, self.group_size, batch.row_keys
    ).warm_up()
    if world is not None:
      world.warm_up(batch)

  @property
  def _batch_size(self) -> int:
    return self.batch_tasks * self.group_size

  def _run(
    self, params, world, attempts, key, rules
  ) -> list[episodes.Finished]:
    prompts = [
      self._prompt(attempt) for attempt in attempts[:: self.group_size]
    ]
    row_keys = keys.rows(key, [attempt.sample_index for attempt in attempts])
    if world is None:
      return on_device.rehearse_episodes(
        self.decoder, self.template, params, prompts, self.group_size, row_keys
      )
    return alternation.run_episodes(
      self.decoder,
      self.template,
      params,
      world,
      attempts,
      prompts,
      row_keys,
      rules,
    )

  def _prompt(self, attempt: episodes.Attempt) -> generator.Row:
    task = attempt.task
    return self.template.prompt(
      task.instruction, attempt.notes, task.tools, task.system
    )
