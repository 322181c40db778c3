"""What one RL step learns from: episodes, what they earned, and as a batch.

`gather` samples, with dynamic sampling until enough groups differ; `pack` turns
the groups into rows with role-wise advantages, one batch per minibatch. Both
are functions of config, parameters, step and task cursor.
"""

import collections
from collections.abc import Mapping, Sequence
import dataclasses

from absl import logging
import numpy as np

from envace_jax import build, components, types
from envace_jax.endpoints import tally as tallies
from envace_jax.learning import advantages, dynamic_sampling, reuse
from envace_jax.learning import batch as batches
from envace_jax.model import per_role
from envace_jax.rewards import scoring
from envace_jax.rollout import alternation, statistics
from envace_jax.rollout import episodes as rollouts
from envace_jax.sampling import keys
from envace_jax.worlds import simulator

# For one network, or for a network per role.
Rows = batches.TrainBatch | per_role.PerRole
# One task's attempts, each with its score.
Group = Sequence[tuple[types.Episode, types.Score]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gathered:
  """Groups to learn from, and how they came about."""

  groups: Sequence[Group]
  cursor: int  # position of the first task of the next step
  metrics: Mapping[str, float]
  spend: Mapping[str, float]  # at endpoints; differs from run to run


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Draw:
  groups: Sequence[Group]
  counts: Mapping[str, int]  # judged, refused and rejected; deterministic
  spend: Mapping[str, int]


def gather(
  setup: build.Setup, simulator_params, params, step: int, cursor: int
) -> Gathered:
  """Samples the tasks from `cursor` on and scores them.

  Metrics describe every episode that was sampled: with dynamic sampling, those
  that are learned from are a selection by reward.
  """
  config = setup.config
  size = config.rl.tasks_per_step
  draws: list[_Draw] = []

  def sample(position: int, draw: int) -> Sequence[Group]:
    draws.append(_draw(setup, simulator_params, params, step, position, draw))
    return draws[-1].groups

  filled = dynamic_sampling.fill(
    sample,
    lambda group: _has_signal(group, config.rl.baseline_by_source),
    cursor=cursor,
    wanted=size,
    max_draws=1 + config.rl.dynamic_sampling_draws,
  )
  sampled = [pair for group in filled.collected for pair in group]
  episodes, scores = map(list, zip(*sampled, strict=True))
  metrics = dict(statistics.summarise(episodes, scores))
  if config.rollout.world == 'real' or components.mixes_worlds(config):
    metrics |= statistics.by_source(episodes, scores)
  metrics |= _summed([draw.counts for draw in draws])
  if config.rl.dynamic_sampling_draws:
    metrics |= {
      'groups/drawn': filled.drawn,
      'groups/kept': filled.kept,
      'groups/dropped': filled.dropped,
      'groups/budget_exhausted': int(filled.budget_exhausted),
    }
  return Gathered(
    groups=[_renumbered(group, i) for i, group in enumerate(filled.groups)],
    cursor=filled.cursor,
    metrics=metrics,
    spend=_summed([draw.spend for draw in draws]),
  )


def pack(
  setup: build.Setup, gathered: Gathered, step: int
) -> tuple[list[Rows], Mapping[str, float]]:
  """Rows with their role-wise advantages by minibatch, and statistics.

  What could not be judged leaves its minibatch, where anything else remains:
  its tokens would count in the denominators.
  """
  config = setup.config.rl
  pairs = [pair for group in gathered.groups for pair in group]
  episodes, scores = map(list, zip(*pairs, strict=True))
  group = {
    'rewards_E': np.asarray([score.reward or 0.0 for score in scores]),
    'scored_E': np.asarray([score.reward is not None for score in scores]),
    'groups_E': _compared(episodes, by_source=config.baseline_by_source),
    'counts_ER': np.asarray([rollouts.generation_counts(e) for e in episodes]),
  }
  adv_ER = advantages.role_advantages(
    **group,
    baseline=advantages.Baseline(config.baseline),
    weighting=advantages.Weighting(config.weighting),
    leave_one_out=config.leave_one_out,
    std=config.std,
  )
  parts = []
  for part in reuse.partition(
    range(len(episodes)), config.minibatches, seed=(setup.config.seed, step)
  ):
    kept = [i for i in part if scores[i].reward is not None] or part
    parts.append(
      _packed(setup, [episodes[i] for i in kept], adv_ER[kept], len(part))
    )
  counts = advantages.group_statistics(**group)
  act = types.Role.ACT
  return parts, {
    **gathered.metrics,
    'groups/all': counts.groups,
    'groups/zero_variance': int(counts.zero_variance_groups_R[act]),
    'groups/singleton': int(counts.singleton_groups_R[act]),
  }


def _packed(
  setup: build.Setup,
  episodes: list[types.Episode],
  adv_ER: np.ndarray,
  batch_size: int,
) -> Rows:
  """The episodes in a batch for `batch_size` of them."""
  options = {
    'length_buckets': (setup.config.rollout.max_row_tokens,),
    'microbatches': setup.config.rl.microbatches,
    'packed': components.packs(setup.config),
  }
  if not setup.config.rl.share_roles:
    return batches.pack_views(
      episodes, adv_ER, batch_size=batch_size, **options
    )
  rows = components.rows_per_episode(setup.config)
  return batches.pack_episodes(
    episodes, adv_ER, batch_size=batch_size * rows, **options
  )


def _draw(
  setup: build.Setup,
  simulator_params,
  params,
  step: int,
  position: int,
  draw: int,
) -> _Draw:
  """The groups of `tasks_per_step` tasks, sampled with the draw's own keys."""
  config = setup.config
  tasks = setup.tasks_from(position)
  world = setup.training_world(params, simulator_params, step)
  episodes = setup.collector.collect(
    params,
    world,
    tasks,
    keys.stream(config.seed, f'rollout/{draw}' if draw else 'rollout', step),
    rules=_rules(setup),
  )
  if world is not None:
    world.close()
  scores = scoring.score_episodes(
    [tasks[episode.group] for episode in episodes],
    episodes,
    setup.judge,
    success_bonus=config.reward.success_bonus,
    rule=components.reward_rule(config),
  )
  counts = {} if world is None else dict(world.interventions())
  spend = {}
  if setup.judge is not None:
    report = setup.judge.take_report()
    logging.info('%s', report.line())
    counts |= report.verdicts()
    spend = report.spend()
  if setup.simulator is not None:
    asked, cost = _take_report(setup.simulator)
    counts, spend = counts | asked, spend | cost
  groups = [[] for _ in tasks]
  for episode, score in zip(episodes, scores, strict=True):
    groups[episode.group].append((episode, score))
  return _Draw(groups=groups, counts=counts, spend=spend)


def _summed(parts: Sequence[Mapping[str, int]]) -> Mapping[str, int]:
  total = collections.Counter()
  for part in parts:
    total.update(part)  # `+` would lose the zeros
  return total


def _has_signal(group: Group, by_source: bool) -> bool:
  """Whether two attempts that are compared with each other differ."""
  rewards = collections.defaultdict(list)
  for episode, score in group:
    rewards[episode.source if by_source else None].append(score.reward)
  return any(map(dynamic_sampling.has_signal, rewards.values()))


def _compared(
  episodes: Sequence[types.Episode], *, by_source: bool
) -> np.ndarray:
  """An integer for each episode, equal where two share a baseline."""
  sources = list(types.Source)
  return np.asarray(
    [
      len(sources) * episode.group
      + (sources.index(episode.source) if by_source else 0)
      for episode in episodes
    ]
  )


def _take_report(
  asked: simulator.Simulator,
) -> tuple[Mapping[str, int], Mapping[str, int]]:
  """What a rerun of a step would repeat, and what it would not.

  A step with lost answers may come out differently when it is run again.
  """
  report = asked.take_report()
  logging.info('%s', tallies.describe('simulator', report, lost='lost'))
  counts = {
    'simulator/requests': report.get('requests', 0),
    'simulator/lost': sum(report['lost'].values()),
  }
  return counts, tallies.spend('simulator', report, lost='lost')


def _rules(setup: build.Setup) -> alternation.Rules:
  """What ends an episode; requirements do, where the reward's rule says so."""
  rule = components.reward_rule(setup.config)

  def allow_next_turn(cases: Sequence[alternation.Between]) -> list[bool]:
    return scoring.allow_next_turn(
      [case.task for case in cases],
      [_so_far(case) for case in cases],
      [case.turn for case in cases],
      setup.judge,
      rule=rule,
    )

  return alternation.Rules(
    upstream_termination=setup.config.rollout.upstream_termination,
    allow_next_turn=allow_next_turn if rule.unmet_requirement_ends else None,
  )


def _so_far(case: alternation.Between) -> types.Episode:
  """An unfinished episode as one that the next turn would not follow."""
  return types.Episode(
    task_id=case.task.id,
    group=0,
    sample_index=0,
    rows=(),
    steps=case.said.steps,
    reply=None,
    turn_replies=(*case.said.turn_replies, case.said.reply),
    num_turns=case.said.num_turns,
    stop_reason=types.StopReason.REQUIREMENT_UNMET,
  )


def _renumbered(group: Group, index: int) -> Group:
  """The group as number `index` of its batch, whatever draw it came from."""
  first = index * len(group)
  return [
    (dataclasses.replace(episode, group=index, sample_index=first + j), score)
    for j, (episode, score) in enumerate(group)
  ]
