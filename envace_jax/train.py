"""One run, top to bottom: data, warm start, rehearsal RL, measurement.

The policy never meets the environment between the start of the warm start and
an evaluation, and no evaluation reaches the training signal: it learns from
recorded attempts, then from episodes that it rehearses itself. Each phase goes
on from its last checkpoint and repeats nothing; everything else is a function
of the config and the step.
"""

from collections.abc import Callable, Mapping
import pathlib
import time

from absl import logging
import jax
import jax.numpy as jnp
import ml_collections

from envace_jax import (
  build,
  components,
  experience,
  no_ops,
  process,
  progress,
  restore,
  results,
  workdirs,
)
from envace_jax import metrics as metric_files
from envace_jax.learning import checkpoints, reuse
from envace_jax.learning import state as states
from envace_jax.learning import step as learning

State = states.TrainState
# What a phase carries from step to step beside its arrays: JSON, checkpointed.
Carry = Mapping[str, int]
Numbers = Mapping[str, float]
# Metrics, then timings: what repeats exactly, and what does not.
Advance = Callable[[State, int, Carry], tuple[State, Numbers, Numbers, Carry]]


def run(config: ml_collections.ConfigDict, workdir: str) -> int:
  """Trains and measures; returns the exit code."""
  path = workdirs.claim(workdir, config)
  clock, compiles = process.Clock(), process.CompileCounter()
  with clock('data'):
    setup = build.Setup(config, path)
  logging.info('%s', setup.describe())
  for line in no_ops.find(config):
    logging.info('does nothing at these settings: %s', line)

  with (
    process.StopRequest().listening() as stop,
    _checkpointer(config, path, 'warm_start') as warm_saves,
    _checkpointer(config, path, 'rl') as rl_saves,
  ):
    # What can really be restored decides which metrics are kept.
    warm, _ = _restore(
      setup, warm_saves, components.optimizer(config.warm_start)
    )
    tuned, carry = _restore(
      setup,
      rl_saves,
      components.rl_optimizer(config),
      share_roles=config.rl.share_roles,
    )
    with _writer(config, path, warm, tuned) as writer:
      loop = _Loop(setup, writer, stop, clock, compiles)
      warm = _warm_start(setup, loop, warm_saves, warm)
      with clock('evaluation'):
        before = results.measure(
          setup, setup.network(warm.params), path, 'warm_start'
        )
      tuned = _reinforce(setup, loop, rl_saves, warm, tuned, carry)
      with clock('evaluation'):
        after = results.measure(
          setup, setup.network(tuned.params), path, 'after'
        )
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
  tx = components.optimizer(config)
  if config.workdir:
    params = restore.warm_start_of(config.workdir, setup, config.steps)
    return State(jnp.int32(config.steps), params, tx.init(params))
  step_fn = learning.make_supervised_step(
    setup.model,
    tx,
    components.supervised_loss(setup.config, config),
    setup.mesh,
    base=setup.base,
  )

  def advance(state: State, step: int, carry: Carry):
    batch = setup.demonstrations_at(
      'warm_start', step, config.batch_size, config.microbatches
    )
    return *step_fn(state, setup.place(batch)), {}, carry

  if state is None:
    state = setup.fresh_state(tx)
  return loop.run('warm_start', state, advance, saves, {})


def _reinforce(
  setup: build.Setup,
  loop: '_Loop',
  saves,
  warm: State,
  state: State | None,
  carry: Carry,
) -> State:
  """Role-wise GRPO on episodes that nobody but the policy has answered.

  With `rl.objective='supervised'`, the control: as many steps of the warm
  start's own loss instead, on as many rows as cost the same.
  """
  config = setup.config.rl
  tx = components.rl_optimizer(setup.config)
  if config.objective == 'supervised':
    step_fn = learning.make_supervised_step(
      setup.model,
      tx,
      components.supervised_loss(setup.config, config),
      setup.mesh,
      base=setup.base,
    )

    def advance(state: State, step: int, carry: Carry):
      batch = setup.demonstrations_at(
        'supervised', step, config.supervised_batch_size, config.microbatches
      )
      return *step_fn(state, setup.place(batch)), {}, carry

  else:
    advance = _policy_advance(setup, warm, tx)
  if state is None:
    start = warm if config.share_roles else states.separate(warm)
    state, carry = states.restart(start, tx, setup.mesh), {'task_cursor': 0}
  loop.warm_up('rl', state, advance, carry)
  return loop.run('rl', state, advance, saves, carry)


def _policy_advance(setup: build.Setup, warm: State, tx) -> Advance:
  """One rollout, and its updates."""
  config, loss = setup.config.rl, components.policy_loss(setup.config)
  updates = config.updates_per_rollout
  step_fn = learning.make_policy_step(
    setup.model,
    tx,
    loss,
    setup.mesh,
    share_roles=config.share_roles,
    base=setup.base,
  )
  started = setup.network(warm.params)
  reference = started if loss.uses_reference else None
  simulator = _simulator(setup, started)
  score = reuse.make_proximal_scorer(setup.model, loss, setup.mesh)

  def advance(state: State, step: int, carry: Carry):
    network = setup.network(state.params)
    gathered = experience.gather(
      setup, simulator, network, step, carry['task_cursor']
    )
    parts, stats = experience.pack(setup, gathered, step)
    parts = [setup.place(part) for part in parts]
    if loss.importance_cap is not None:
      parts = [score(network, part) for part in parts]

    def update(state: State, part: experience.Rows, index: int):
      anchor = None
      if loss.uses_anchor:
        anchor = setup.demonstrations_at(
          'anchor',
          step * updates + index,
          config.anchor_batch_size,
          config.microbatches,
        )
      return step_fn(state, part, reference, setup.place(anchor))

    state, metrics = reuse.update_repeatedly(
      update, state, parts, updates=updates
    )
    carry = {'task_cursor': gathered.cursor}
    return state, {**stats, **metrics}, gathered.spend, carry

  return advance


def _simulator(setup: build.Setup, warm_params):
  """Frozen parameters of whoever plays the environment."""
  rollout = setup.config.rollout
  if rollout.world != 'simulator' or not rollout.simulator_workdir:
    return warm_params  # which an endpoint leaves unused
  return restore.simulator_of(rollout.simulator_workdir, setup)


class _Loop:
  """What both phases share: resume, metrics, evaluation, saves, stopping."""

  def __init__(self, setup, writer, stop, clock, compiles):
    self._setup, self._writer, self._stop = setup, writer, stop
    self._clock, self._compiles = clock, compiles
    self.warm_up_compiles = 0
    self.late_compiles = 0

  def warm_up(
    self, phase: str, state: State, advance: Advance, carry: Carry
  ) -> None:
    """Compiles all that the phase will need, on a copy of the state."""
    with self._clock(phase):
      advance(jax.tree.map(jnp.copy, state), 0, carry)  # its state is donated
      self._setup.evaluator.warm_up(self._setup.network(state.params))
    self.warm_up_compiles = self._compiles.count

  def run(
    self, phase: str, state: State, advance: Advance, saves, carry: Carry
  ) -> State:
    """Steps from the state's own step to the end of the phase."""
    config = self._setup.config
    total, first = config[phase].steps, int(state.step)
    with (
      self._clock(phase),
      progress.bar(phase.replace('_', ' '), total) as bar,
    ):
      bar.advance(first)
      for step in range(first, total):
        started = time.perf_counter()
        state, metrics, timings, carry = advance(state, step, carry)
        line = {f'{phase}/{k}': float(v) for k, v in metrics.items()}
        seconds = time.perf_counter() - started  # of all that `line` waited for
        done = step + 1
        if self._evaluates(phase, done, total):
          network = self._setup.network(state.params)
          line |= self._setup.evaluator.dev(network)
        self._writer.write(self._offset(phase) + done, line)
        timings = {'seconds': seconds, **timings}
        self._writer.write_timings(
          self._offset(phase) + done,
          {f'{phase}/{k}': float(v) for k, v in timings.items()},
        )
        stop = self._stop.requested
        if stop or done == total or done % config.checkpoint.every == 0:
          saves.save(done, state, {'phase': phase, 'carry': dict(carry)})
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
  setup: build.Setup,
  saves: checkpoints.Checkpointer,
  tx,
  *,
  share_roles: bool = True,
) -> tuple[State | None, Carry]:
  """A phase's newest readable state and carry; None where it has not begun."""
  if saves.latest_step() is None:
    return None, {}
  state, meta = saves.restore(
    states.abstract_state(setup.model, tx, setup.mesh, share_roles=share_roles)
  )
  return state, meta['carry']


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
