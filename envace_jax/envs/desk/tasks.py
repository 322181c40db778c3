"""Tasks for the desk: what is asked, by what it is judged, in which split.

Six families in equal share: lookup, single_write, conditional, chain, trap and
infeasible. The last split is out of distribution: HELD_OUT combinations of
family and goal occur in no other split, though their parts do (a shop that is
sold out is met in conditionals, a coupon in direct requests). An instance and
its paraphrases stay in one split.

Two scorers, kept apart. `checklist` sees the transcript alone and is built on
evidence: a policy that never looks gets at most its reply and its restraint.
`evaluation` compares the final database with the one the oracle leaves, and
reads the reply. Their `check`s, which `rewards.verifiers` decides:

  replied         every word of `contains` and none of `excludes` is in the
                  reply; whole words, whatever the case
  observed        one observation has every word of `contains`, whole words;
                  its call has `about` among the values of its arguments
  acknowledged    a call `name` whose arguments include `arguments` met an
                  observation that is no error, satisfies the tool's `returns`
                  schema and agrees with `echo`
  no_other_writes no call of a tool in `writes` was acknowledged, except those
                  in `allowed`
  state           the final database has this `state_hash`
"""

import collections
from collections.abc import Mapping, Sequence
import contextlib
import dataclasses
import random

from envace_jax import types
from envace_jax.envs.desk import data as desk_data
from envace_jax.envs.desk import environment as desk
from envace_jax.envs.desk import goals as desk_goals
from envace_jax.envs.desk import requests as desk_requests
from envace_jax.text import tool_calls

FAMILIES = desk_requests.FAMILIES
SPLITS = ('train', 'dev', 'test_iid', 'test_ood')
HELD_OUT = (('chain', 'coupon'), ('conditional', 'buy'), ('trap', 'buy'))

_RULES = (*desk.RULES, 'not_found')


def make_tasks(
  config: desk_data.DeskConfig, counts: Mapping[str, int], seed: int
) -> dict[str, list[types.Task]]:
  """Tasks per split, `counts[split]` of them or fewer if there are no more.

  Raises:
    ValueError: a family would have no task in a split that asks for some.
  """
  unknown = set(counts) - set(SPLITS)
  if unknown:
    raise ValueError(f'tasks.counts has unknown splits {sorted(unknown)}')
  sample = _resampled if config.resample else _partitioned
  chosen = sample(config, counts, random.Random(f'tasks/{seed}'))
  with contextlib.closing(desk.Desk(config)) as environment:
    return {
      split: [_task(environment, config, *choice) for choice in choices]
      for split, choices in chosen.items()
    }


def oracle_episode(
  environment: desk.Desk, task: types.Task
) -> list[types.Step]:
  """Executes the plan from the task's initial state."""
  environment.reset(task)
  return [execute(environment, call) for call in task.plan]


def execute(environment: desk.Desk, call: types.ToolCall) -> types.Step:
  """One real call, as a transcript would record it."""
  return types.Step(
    action=call,
    action_text=tool_calls.render_call(call),
    observation_text=environment.call(call).text,
  )


def is_write(name: str) -> bool:
  """Whether a tool can change the desk."""
  return name in desk.WRITES


# Which instances, in which split. A choice is (database seed, instance, index
# of the paraphrase).

_Choice = tuple[int, desk_requests.Instance, int]


def _partitioned(config, counts, rng) -> dict[str, list[_Choice]]:
  """Splits the instances of one database."""
  strata = collections.defaultdict(list)
  rows = desk_data.sample_rows(config, config.seed)
  for instance in desk_goals.enumerate_all(rows, config.goals):
    strata[instance.family, instance.goal, instance.stratum].append(instance)
  pools = collections.defaultdict(list)
  for (family, goal, _), instances in strata.items():
    rng.shuffle(instances)
    for split, part in _shares(family, goal, instances, counts):
      if part:
        pools[split, family].append(part)
  chosen = {}
  for split, count in counts.items():
    chosen[split] = []
    for family, quota in _quotas(config, split, count).items():
      if quota and not pools[split, family]:
        raise ValueError(
          f'tasks.counts[{split!r}]: no {family} task in a desk of'
          f' {config.num_orders} orders; enlarge the desk'
        )
      picked = _paraphrased(_interleaved(pools[split, family]), rng)[:quota]
      chosen[split] += [(config.seed, *choice) for choice in picked]
    rng.shuffle(chosen[split])
  return chosen


def _shares(family, goal, instances, counts):
  """Cuts one stratum into splits, in proportion to what they ask for."""
  if (family, goal) in HELD_OUT:
    return [('test_ood', instances)]
  splits = [split for split in SPLITS[::-1] if split != 'test_ood']
  total = sum(counts.get(split, 0) for split in splits)
  shares, done, cut = [], 0, 0
  for split in splits:  # train comes last and takes what rounding leaves
    done += counts.get(split, 0)
    end = round(done / total * len(instances)) if total else 0
    shares.append((split, instances[cut:end]))
    cut = end
  return shares


def _resampled(config, counts, rng) -> dict[str, list[_Choice]]:
  """Draws a new database for every task."""
  # Consecutive seeds from a start of the config's own: never drawn twice.
  database = rng.randrange(1 << 30)
  chosen = {}
  for split, count in counts.items():
    chosen[split] = []
    for family, quota in _quotas(config, split, count).items():
      taken, misses = collections.Counter(), 0
      while taken.total() < quota:
        database += 1
        rows = desk_data.sample_rows(config, database)
        offers = _offers(config, rows, split, family)
        if not offers:
          misses += 1
          if misses > 100:
            raise ValueError(
              f'tasks.counts[{split!r}]: 100 databases of'
              f' {config.num_orders} orders offer no {family} task'
            )
          continue
        stratum = min(offers, key=lambda key: (taken[key], key))
        taken[stratum] += 1
        instance = rng.choice(offers[stratum])
        index = rng.randrange(len(instance.instructions))
        chosen[split].append((database, instance, index))
    rng.shuffle(chosen[split])
  return chosen


def _offers(config, rows, split, family):
  offers = collections.defaultdict(list)
  for instance in desk_goals.enumerate_all(rows, config.goals, (family,)):
    held_out = (instance.family, instance.goal) in HELD_OUT
    if held_out == (split == 'test_ood'):
      offers[instance.goal, instance.stratum].append(instance)
  return offers


def _quotas(config, split: str, count: int) -> dict[str, int]:
  """Equal shares for the families that a split can have."""
  families = FAMILIES
  if split == 'test_ood':
    families = [family for family, goal in HELD_OUT if goal in config.goals]
    if count and not families:
      raise ValueError("tasks.counts['test_ood']: no held-out goal is enabled")
  return {
    family: (count + len(families) - 1 - i) // len(families)
    for i, family in enumerate(families)
  }


def _interleaved(parts: Sequence[Sequence]) -> list:
  """Takes turns, so that rare strata are as frequent as they can be."""
  longest = max(map(len, parts), default=0)
  return [part[i] for i in range(longest) for part in parts if i < len(part)]


def _paraphrased(instances, rng) -> list:
  """Each instance in one wording first, then all again in the other."""
  first = [
    (instance, rng.randrange(len(instance.instructions)))
    for instance in instances
  ]
  return first + [
    (instance, (index + 1) % len(instance.instructions))
    for instance, index in first
  ]


# From an instance to a task.


def _task(environment, config, database, instance, wording) -> types.Task:
  rows = desk_data.sample_rows(config, database)
  solution = desk_goals.solve(instance, rows)
  where = f'@{database}' if config.resample else ''
  replied = {'kind': 'replied', **_reply_words(solution)}
  bare = types.Task(
    id=f'{instance.key}/{wording}{where}',
    instruction=instance.instructions[wording],
    tools=desk.TOOLS,
    checklist=_checklist(solution, replied),
    environment={
      'name': 'desk',
      'seed': database,
      'goal': instance.goal,
      'slots': instance.slots,
      'outcome': solution.outcome,
    },
    family=instance.family,
    plan=solution.plan,
    plan_reply=solution.reply,
  )
  oracle_episode(environment, bare)
  state = {'kind': 'state', 'state_hash': environment.state_hash()}
  return dataclasses.replace(
    bare,
    evaluation=(
      types.Criterion(
        id='state',
        question='Is the database as it should be?',
        check=state,
        weight=0.5,
        focus_on='state',
      ),
      _criterion('reply', replied, 0.5),
    ),
  )


def _checklist(solution, replied) -> tuple[types.Criterion, ...]:
  write = solution.write
  observed = {
    'kind': 'observed',
    'contains': list(solution.fact),
    'about': solution.about,
  }
  allowed = [] if write is None else [_as_json(write)]
  restraint = {
    'kind': 'no_other_writes',
    'writes': list(desk.WRITES),
    'allowed': allowed,
  }
  if write is None:
    return (
      _criterion('fact', observed, 0.6),
      _criterion('restraint', restraint, 0.1),
      _criterion('reply', replied, 0.3),
    )
  # A write that the desk accepts only if it is right may be tried unchecked:
  # there, looking first earns credit but is not required.
  done = {'kind': 'acknowledged', **_as_json(write), 'echo': _echo(write)}
  return (
    _criterion('fact', observed, 0.3, required=solution.outcome != 'done'),
    _criterion('write', done, 0.4),
    _criterion('restraint', restraint, 0.1),
    _criterion('reply', replied, 0.2),
  )


_QUESTIONS = {
  'fact': ('Was the deciding fact obtained?', 'tool.content'),
  'write': ('Did the desk acknowledge the right change?', 'tool.content'),
  'restraint': ('Was nothing else changed?', 'tool_calls'),
  'reply': ('Does the reply say what is true?', 'reply'),
}


def _criterion(id, check, weight, required=True) -> types.Criterion:
  question, focus = _QUESTIONS[id]
  return types.Criterion(
    id=id,
    question=question,
    check=check,
    weight=weight,
    focus_on=focus,
    required=required,
  )


def _as_json(call: types.ToolCall) -> types.Json:
  return {'name': call.name, 'arguments': dict(call.arguments)}


def _echo(call: types.ToolCall) -> types.Json:
  """Fields of a success that repeat what was asked."""
  if call.name == 'place_order':
    return {}  # all it says is new
  if call.name == 'open_ticket':
    return {'topic': call.arguments['topic']}
  if call.name == 'refund_order':
    order_id, amount = call.arguments['order_id'], call.arguments['amount']
    return {'order_id': order_id, 'refunded': amount}
  return dict(call.arguments)


def _reply_words(solution: desk_goals.Solution) -> types.Json:
  """Words a right reply has, and words that would hedge it."""
  reply = solution.reply
  verdicts = {'done', 'not possible', 'ticket', 'cancelled'}
  if reply.startswith('It is '):
    word = reply.removeprefix('It is ').removesuffix('.')
    contains = [word]
  elif reply.startswith('Not possible: '):
    word = reply.removeprefix('Not possible: ').removesuffix('.')
    contains = ['not possible', word]
  elif reply.startswith('I opened a '):
    word = reply.split()[3]
    contains = ['ticket', word]
  else:
    word = ''
    contains = ['done'] if reply == 'Done.' else ['cancelled']
  rivals = [group for group in _RIVALS if word in group]
  excludes = verdicts.union(*rivals).difference(contains)
  return {'contains': contains, 'excludes': sorted(excludes)}


# Answers to the same kind of question: naming two of them is hedging.
_RIVALS = (
  frozenset(desk_data.STATUSES),
  frozenset(desk_data.REGIONS),
  frozenset(desk_data.TOPICS),
  frozenset(_RULES),
  frozenset(
    map(
      str,
      {*desk_data.MONEY, *desk_data.STOCKS, *desk_data.PERCENTS},
    )
  ),
)
