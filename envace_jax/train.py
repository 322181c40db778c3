"""One run, top to bottom: data, warm start, rehearsal RL, measurement.

The policy never meets the environment between the start of the warm start and
an evaluation, and no evaluation reaches the training signal: it learns from
recorded attempts, then from episodes that it rehearses itself. Each phase goes
on from its last checkpoint and repeats nothing; everything else is a function
of the config and the step.
"""

from collections.abc import Callable, Mapping
import pathlib

from absl import logging
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from envace_jax import (
  build,
  process,
  progress,
  restore,
  results,
  types,
  workdirs,
)
from envace_jax import metrics as metric_files
from envace_jax.learning import advantages, checkpoints
from envace_jax.learning import batch as batches
from envace_jax.learning import step as learning
from envace_jax.rewards import checklist
from envace_jax.rollout import alternation, statistics
from envace_jax.rollout import episodes as rollouts
from envace_jax.sampling import keys

State = learning.TrainState
Advance = Callable[..., tuple[State, Mapping[str, float]]]


def run(config: ml_collections.ConfigDict, workdir: str) -> int:
  """Trains and measures; returns the exit code."""
  path = workdirs.claim(workdir, config)
  clock, compiles = process.Clock(), process.CompileCounter()
  with clock('data'):
    setup = build.Setup(config, path)
  logging.info('%s', setup.describe())

  with (
    process.StopRequest().listening() as stop,
    _checkpointer(config, path, 'warm_start') as warm_saves,
    _checkpointer(config, path, 'rl') as rl_saves,
  ):
    # What can really be restored decides which metrics are kept.
    warm = _restore(setup, warm_saves, 'warm_start')
    tuned = _restore(setup, rl_saves, 'rl')
    with _writer(config, path, warm, tuned) as writer:
      loop = _Loop(setup, writer, stop, clock, compiles)
      warm = _warm_start(setup, loop, warm_saves, warm)
      with clock('evaluation'):
        before = results.measure(setup, warm.params, path, 'warm_start')
      tuned = _reinforce(setup, loop, rl_saves, warm, tuned)
      with clock('evaluation'):
        after = results.measure(setup, tuned.params, path, 'after')
  results.write(
    setup,
    path,
    before,
    after,
    seconds=clock.seconds,
    compiles={'warm_up': loop.warm_up_compiles, 'after': loop.late_compiles},
  )
  return 0


def _warm_start(
  setup: build.Setup, loop: '_Loop', saves, state: State | None
) -> State:
  """Clones the recorded attempts, both roles, good habits and bad."""
  config = setup.config.warm_start
  tx = build.optimizer(config)
  if config.workdir:
    params = restore.warm_start_of(config.workdir, setup, config.steps)
    return State(jnp.int32(config.steps), params, tx.init(params))
  step_fn = learning.make_supervised_step(
    setup.model, tx, build.supervised_loss(setup.config, config), setup.mesh
  )

  def advance(state: State, step: int):
    batch = setup.demonstrations_at(
      'warm_start', step, config.batch_size, config.microbatches
    )
    return step_fn(state, setup.place(batch))

  if state is None:
    key = keys.stream(setup.config.seed, 'init', 0)
    state = learning.init_state(setup.model, tx, key, setup.mesh)
  return loop.run('warm_start', state, advance, saves)


def _reinforce(
  setup: build.Setup, loop: '_Loop', saves, warm: State, state: State | None
) -> State:
  """Role-wise GRPO on episodes that nobody but the policy has answered.

  With `rl.objective='supervised'`, the control: as many steps of the warm
  start's own loss instead, on as many rows as cost the same.
  """
  config = setup.config.rl
  tx = build.optimizer(config)
  if config.objective == 'supervised':
    step_fn = learning.make_supervised_step(
      setup.model, tx, build.supervised_loss(setup.config, config), setup.mesh
    )

    def advance(state: State, step: int):
      batch = setup.demonstrations_at(
        'supervised', step, config.supervised_batch_size, config.microbatches
      )
      return step_fn(state, setup.place(batch))

  else:
    loss = build.policy_loss(setup.config)
    step_fn = learning.make_policy_step(setup.model, tx, loss, setup.mesh)
    reference = warm.params if loss.uses_reference else None
    simulator = _simulator(setup, warm.params)

    def advance(state: State, step: int):
      episodes, scores = _rehearse(setup, state.params, simulator, step)
      batch, stats = _pack(setup, episodes, scores)
      anchor = None
      if loss.uses_anchor:
        anchor = setup.demonstrations_at(
          'anchor', step, config.anchor_batch_size, config.microbatches
        )
      state, metrics = step_fn(
        state, setup.place(batch), reference, setup.place(anchor)
      )
      return state, {**stats, **metrics}

  if state is None:
    state = learning.restart(warm, tx, setup.mesh)
  loop.warm_up('rl', state, advance)
  return loop.run('rl', state, advance, saves)


def _simulator(setup: build.Setup, warm_params):
  """Frozen parameters of whoever plays the environment."""
  rollout = setup.config.rollout
  if rollout.world != 'simulator' or not rollout.simulator_workdir:
    return warm_params
  return restore.policy_of(rollout.simulator_workdir, setup)


def _rehearse(setup: build.Setup, params, simulator_params, step: int):
  """One train step's episodes, and what their checklists pay for them."""
  config = setup.config
  tasks = setup.tasks_at(step)
  episodes = setup.collector.collect(
    params,
    setup.training_world(params, simulator_params, step),
    tasks,
    keys.stream(config.seed, 'rollout', step),
    rules=alternation.Rules(
      upstream_termination=config.rollout.upstream_termination
    ),
  )
  scores = [
    checklist.score_training(
      tasks[episode.group], episode, success_bonus=config.reward.success_bonus
    )
    for episode in episodes
  ]
  return episodes, scores


def _pack(setup: build.Setup, episodes, scores):
  """Episodes with their role-wise advantages as a batch, and statistics."""
  config = setup.config.rl
  group = {
    'rewards_E': np.asarray([score.reward or 0.0 for score in scores]),
    'scored_E': np.asarray([score.reward is not None for score in scores]),
    'groups_E': np.asarray([episode.group for episode in episodes]),
    'counts_ER': np.asarray([rollouts.generation_counts(e) for e in episodes]),
  }
  adv_ER = advantages.role_advantages(
    **group,
    baseline=advantages.Baseline(config.baseline),
    weighting=advantages.Weighting(config.weighting),
    leave_one_out=config.leave_one_out,
    std=config.std,
  )
  batch = batches.pack_episodes(
    episodes,
    adv_ER,
    length_buckets=(setup.config.rollout.max_row_tokens,),
    batch_size=sum(len(episode.rows) for episode in episodes),
    microbatches=config.microbatches,
  )
  groups = advantages.group_statistics(**group)
  act = types.Role.ACT
  return batch, {
    **statistics.summarise(episodes, scores),
    'groups/all': groups.groups,
    'groups/zero_variance': int(groups.zero_variance_groups_R[act]),
    'groups/singleton': int(groups.singleton_groups_R[act]),
  }


class _Loop:
  """What both phases share: resume, metrics, evaluation, saves, stopping."""

  def __init__(self, setup, writer, stop, clock, compiles):
    self._setup, self._writer, self._stop = setup, writer, stop
    self._clock, self._compiles = clock, compiles
    self.warm_up_compiles = 0
    self.late_compiles = 0

  def warm_up(self, phase: str, state: State, advance: Advance) -> None:
    """Compiles all that the phase will need, on a copy of the state."""
    with self._clock(phase):
      advance(jax.tree.map(jnp.copy, state), 0)  # its state is donated
      self._setup.evaluator.warm_up(state.params)
    self.warm_up_compiles = self._compiles.count

  def run(self, phase: str, state: State, advance: Advance, saves) -> State:
    """Steps from the state's own step to the end of the phase."""
    config = self._setup.config
    total, first = config[phase].steps, int(state.step)
    with (
      self._clock(phase),
      progress.bar(phase.replace('_', ' '), total) as bar,
    ):
      bar.advance(first)
      for step in range(first, total):
        state, metrics = advance(state, step)
        line = {f'{phase}/{k}': float(v) for k, v in metrics.items()}
        done = step + 1
        if self._evaluates(phase, done, total):
          line |= self._setup.evaluator.dev(state.params)
        self._writer.write(self._offset(phase) + done, line)
        stop = self._stop.requested
        if stop or done == total or done % config.checkpoint.every == 0:
          saves.save(done, state, {'phase': phase})
        if stop:
          saves.wait()
          raise process.Stopped(f'stopped after {phase} step {done}')
        bar.advance(**_shown(line))
    saves.wait()  # raises if the last save did not land
    self.late_compiles = self._compiles.count - self.warm_up_compiles
    return state

  def _evaluates(self, phase: str, done: int, total: int) -> bool:
    every = self._setup.config.evaluation.every
    if done == total:
      return True
    return phase == 'rl' and every > 0 and done % every == 0

  def _offset(self, phase: str) -> int:
    return 0 if phase == 'warm_start' else self._setup.config.warm_start.steps


def _shown(line: Mapping[str, float]) -> dict[str, float]:
  """The few values worth a place beside the bar."""
  names = {'rl/reward': 'reward', 'warm_start/loss': 'loss', 'rl/loss': 'loss'}
  return {short: line[key] for key, short in names.items() if key in line}


def _checkpointer(config, path: pathlib.Path, phase: str):
  return checkpoints.Checkpointer(
    path / 'checkpoints' / phase, max_to_keep=config.checkpoint.keep
  )


def _restore(
  setup: build.Setup, saves: checkpoints.Checkpointer, phase: str
) -> State | None:
  """A phase's newest readable state, or None where it has not begun."""
  if saves.latest_step() is None:
    return None
  tx = build.optimizer(setup.config[phase])
  state, _ = saves.restore(learning.abstract_state(setup.model, tx, setup.mesh))
  return state


def _writer(
  config, path: pathlib.Path, warm: State | None, tuned: State | None
) -> metric_files.Writer:
  """Takes up the metrics where the restored states left them."""
  if tuned is not None:
    reached = config.warm_start.steps + int(tuned.step)
  else:
    reached = -1 if warm is None else int(warm.step)
  return metric_files.Writer(
    path, resume_step=reached, active=jax.process_index() == 0
  )
