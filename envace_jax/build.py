"""A run's data, policy, worlds and evaluation, put together from its config."""

from collections.abc import Sequence
import dataclasses
import functools
import pathlib

from absl import logging
import jax
import ml_collections

from envace_jax import components, errors, pretrained, refusals, types
from envace_jax import data as datasets
from envace_jax.endpoints import cache
from envace_jax.evaluation import evaluator as evaluators
from envace_jax.evaluation import runner as runners
from envace_jax.learning import batch as batches
from envace_jax.learning import state as states
from envace_jax.model import lora, per_role, sharding, transformer
from envace_jax.rewards import judge_cache, judge_endpoint, scoring
from envace_jax.rollout import collect
from envace_jax.sampling import keys
from envace_jax.tasks import order
from envace_jax.text import rehearse_prompt, row_breaks
from envace_jax.worlds import (
  answers,
  checked,
  endpoint,
  mixed,
  own_row,
  real,
  rehearsal,
  simulator,
)
from envace_jax.worlds import base as worlds

JUDGE_CACHE_FILE = 'judge.sqlite'
SIMULATOR_CACHE_FILE = 'simulator.sqlite'

# What samples and scores: one network for both roles or one each, of weights or
# of frozen ones with adapters.
Network = transformer.Params | lora.Adapted | per_role.PerRole


class Setup:
  """What every command needs of a run, and nothing that is trained."""

  def __init__(self, config: ml_collections.ConfigDict, path: pathlib.Path):
    refusals.validate(config, pretrained.architecture(config, path))
    self.config, self.path = config, path
    self._published = pretrained.keep(config, path)
    self.data = datasets.prepare(config, path, self._published)
    self.rows = datasets.rows(
      self.data,
      config.rollout.max_row_tokens,
      self._rehearse_prompt(0) if config.rollout.view == 'split' else None,
    )
    self.private = components.private_settings(config)
    self.mesh = sharding.make_mesh(**config.mesh.to_dict())
    self.model = components.model(
      config,
      self.data.words.tokenizer.vocab_size,
      self._published and self._published.config,
    )
    self.decoder = components.decoder(
      config, self.model, self.data.template.stop_ids
    )
    self._check_user_turns()
    longest = datasets.longest_prompt(self.data)
    if longest > config.rollout.prompt_tokens:
      raise errors.UserError(
        f'the longest prompt has {longest} tokens, more than '
        f'rollout.prompt_tokens={config.rollout.prompt_tokens}; raise it'
      )
    self.collector = collect.Collector(
      decoder=self.decoder,
      template=self.data.template,
      batch_tasks=config.rl.tasks_per_step,
      group_size=config.rl.group_size,
    )
    self.runner = runners.Runner(
      decoder=self.decoder,
      template=self.data.template,
      environment=self._environment(),
      rehearsed_world=lambda params: self.rehearsed_world(params, 0),
      on_device=config.rollout.mode == 'on_device',
      rows=config.evaluation.batch_tasks * config.evaluation.samples,
      notes_prompt_tokens=config.rollout.notes_prompt_tokens,
      key=keys.stream(config.seed, 'evaluation', 0),
    )
    self.evaluator = evaluators.Evaluator(
      runner=self.runner,
      tasks=self.data.tasks,
      samples=config.evaluation.samples,
      score=self.score,
    )
    self._task_order = order.Order(
      len(self.data.tasks['train']), seed=config.seed
    )
    self._row_orders = {
      name: order.Order(len(self.rows), seed=config.seed + salt)
      for salt, name in enumerate(('warm_start', 'supervised', 'anchor'))
    }

  def fresh_state(self, tx) -> states.TrainState:
    """Where a run begins: published weights, adapters of them, or neither."""
    key = keys.stream(self.config.seed, 'init', 0)
    if self._published is None or self.base is not None:
      return states.init_state(self.model, tx, key, self.mesh)
    params = self._published.load(
      self.model.config,
      states.network_shardings(self.model, self.mesh),
      'float32',
    )
    return states.start_from(params, self.model, tx, self.mesh)

  @functools.cached_property
  def base(self) -> transformer.Params | None:
    """The frozen network that adapters correct; None where weights are."""
    if self.model.config.lora is None:
      return None
    return self._published.load(
      self.model.config,
      states.network_shardings(self.model, self.mesh),
      self.config.pretrained.dtype,
    )

  def network(self, trained) -> Network:
    """What samples and scores, of what is trained."""
    return lora.adapt(self.base, trained)

  def _environment(self) -> runners.Environment | None:
    """Where tasks are executed, if they can be."""
    if self.data.make_environment is None:
      if self.config.rollout.world == 'real':
        raise errors.UserError(
          "rollout.world='real', but no task says where it can be executed; "
          "set rollout.world='rehearsal', or write environments into the tasks"
        )
      return None
    return runners.Environment(
      make=self.data.make_environment,
      is_write=self.data.is_write,
      determinable=self.data.determinable,
    )

  def _check_user_turns(self) -> None:
    row_breaks.refuse(
      self.data.template,
      user_turns=any(
        t.user_turns for ts in self.data.tasks.values() for t in ts
      ),
      max_rows=self.config.rollout.max_rows,
    )
    if self.config.rollout.mode == 'host':
      return
    for task in self.data.tasks['train']:
      if task.user_turns:
        raise errors.UserError(
          f'task {task.id} has later user turns, which the on-device program '
          'does not script; set rollout.mode=host'
        )

  def describe(self) -> str:
    """One line for a person."""
    count = lambda init: transformer.num_params(
      jax.eval_shape(lambda: init(self.model, jax.random.key(0)))
    )
    sizes = f'{count(transformer.init_params):,} parameters, '
    if self.model.config.lora is not None:
      sizes += f'{count(transformer.init_trained):,} of adapters trained, '
    views = 2 if self.config.rollout.view == 'split' else 1
    left_out = views * len(self.data.demonstrations) - len(self.rows)
    return (
      f'{sizes}'
      f'{self.data.words.tokenizer.vocab_size} pieces, '
      f'{len(self.data.tasks["train"])} training tasks, '
      f'{len(self.rows)} rows of demonstrations ({left_out} too long), '
      f'{self.mesh.size} device(s)'
    )

  def demonstrations_at(
    self, stream: str, step: int, size: int, microbatches: int
  ) -> batches.TrainBatch:
    """The recorded rows of one step; a function of the step alone."""
    rows = self._row_orders[stream]
    return batches.pack_rows(
      [self.rows[i] for i in rows.batch_indices(step * size, size)],
      length_buckets=(self.config.rollout.max_row_tokens,),
      batch_size=size,
      microbatches=microbatches,
      packed=components.packs(self.config),
    )

  def tasks_from(self, cursor: int) -> list[types.Task]:
    """`rl.tasks_per_step` training tasks from a position of their order."""
    size = self.config.rl.tasks_per_step
    indices = self._task_order.batch_indices(cursor, size)
    return [self.data.tasks['train'][i] for i in indices]

  def score(
    self, tasks: Sequence[types.Task], episodes: Sequence[types.Episode]
  ) -> list[types.Score]:
    """Measures by the training checklist, and by the judge if there is one.

    Under our own rule, whatever the reward's is: what could not be judged is no
    failure.
    """
    scores = scoring.score_episodes(tasks, episodes, self.judge)
    if self.judge is not None:
      report = self.judge.take_report()
      if report.requests:
        logging.info('evaluation, %s', report.line())
    return scores

  def place(self, batch):
    """Host rows onto the mesh; None stays None."""
    return None if batch is None else sharding.place_batch(batch, self.mesh)

  def training_world(
    self, params, simulator_params, step: int
  ) -> worlds.World | None:
    """Who answers while training; None: the policy, on the device."""
    rollout = self.config.rollout
    if rollout.world == 'real':
      return real.RealWorld(self.data.make_environment)
    if rollout.world == 'null':
      return real.NullWorld()
    if rollout.mode == 'on_device':
      return None
    if rollout.world == 'rehearsal':
      world = self.rehearsed_world(params, step)
    elif self.simulator is not None:
      world = self._endpoint_world(step)
    else:
      world = self._own_row_world(simulator_params, step, trained=False)
    if not components.mixes_worlds(self.config):
      return world
    return mixed.MixedWorld(
      world,
      real.RealWorld(self.data.make_environment),
      self.data.template,
      real_episodes=components.real_episodes(self.config),
      real_steps=rollout.real_steps_fraction,
    )

  def rehearsed_world(self, params, step: int) -> worlds.World:
    """The policy's own world, driven by the host."""
    if self.config.rollout.view == 'split':
      own = per_role.of(params, types.Role.REHEARSE)
      return self._own_row_world(own, step, trained=True)
    return self._checked(rehearsal.RehearsedWorld(self._answers()))

  def _answers(self) -> answers.Answers:
    c = self.config.rollout
    return answers.Answers(
      template=self.data.template,
      max_resamples=c.max_resamples if c.validation == 'program' else None,
    )

  def _checked(self, world: worlds.World) -> worlds.World:
    if self.config.rollout.validation == 'policy':
      return world
    return checked.CheckedWorld(world, self.data.template)

  def _own_row_world(self, params, step: int, *, trained: bool):
    if self.config.rollout.view == 'split':
      opening = self._rehearse_prompt(step)
      width = self.config.rollout.rehearse_prompt_tokens
    else:
      opening = lambda task: self.data.template.prompt(
        task.instruction, '', task.tools, task.system
      )
      width = self.config.rollout.prompt_tokens
    world = own_row.OwnRowWorld(
      dataclasses.replace(self.decoder, prompt_tokens=width),
      self.data.template,
      params,
      opening,
      self._answers(),
      trained=trained,
    )
    return self._checked(world)

  def _endpoint_world(self, step: int) -> worlds.World:
    rollout = self.config.rollout
    world = endpoint.EndpointWorld(
      self.simulator,
      self.data.template,
      self._rehearse_prompt(step).records_for,
      instructions=self.config.prompt.rehearse.instructions,
      max_observation_tokens=rollout.max_observation_tokens,
      checks_answers=rollout.validation == 'program',
    )
    return self._checked(world)

  def _rehearse_prompt(self, step: int) -> rehearse_prompt.RehearsePrompt:
    c = self.config.prompt.rehearse
    return rehearse_prompt.RehearsePrompt(
      template=datasets.template(self.config, self.data.words, c.tools),
      instructions=c.instructions,
      records=c.records,
      max_records=c.max_records,
      keep=c.keep,
      max_tokens=self.config.rollout.rehearse_prompt_tokens,
      salt=step,
      others=self._records if c.records == 'others' else (),
    )

  @functools.cached_property
  def judge(self) -> judge_endpoint.EndpointJudge | None:
    """Decides what checks cannot; its verdicts are kept in the workdir.

    Raises:
      UserError: the client or the key is missing.
    """
    endpoint = components.judge_endpoint_of(self.config)
    if endpoint is None:
      return None
    return judge_endpoint.EndpointJudge(
      endpoint,
      policy=components.judge_policy(self.config),
      cache=judge_cache.JudgeCache(self.path / JUDGE_CACHE_FILE),
    )

  @functools.cached_property
  def simulator(self) -> simulator.Simulator | None:
    """The model behind an endpoint; its answers are kept in the workdir.

    Raises:
      UserError: the client or the key is missing.
    """
    asked = components.simulator_endpoint(self.config)
    if asked is None:
      return None
    return simulator.Simulator(
      asked,
      policy=components.simulator_policy(self.config),
      kept=cache.Cache(str(self.path / SIMULATOR_CACHE_FILE), 'answer'),
    )

  @functools.cached_property
  def _records(self) -> list[types.Record]:
    """Real exchanges of all training tasks, each once."""
    found = {}
    for task in self.data.tasks['train']:
      for record in task.records:
        found.setdefault(repr(record), record)
    return list(found.values())
