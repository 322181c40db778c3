"""Tasks of the desk: solvable, judged by evidence, split without leaks."""

import collections
import dataclasses
import re

import pytest

from envace_jax import types
from envace_jax.envs.desk import data as desk_data
from envace_jax.envs.desk import environment as desk
from envace_jax.envs.desk import goals as desk_goals
from envace_jax.envs.desk import tasks as desk_tasks
from envace_jax.rewards import checklist, verifiers

COUNTS = {'train': 600, 'dev': 60, 'test_iid': 120, 'test_ood': 60}
FEW = {'train': 60, 'dev': 24, 'test_iid': 24, 'test_ood': 24}
MOVING = dataclasses.replace(
  desk.SMALL, goals=(*desk_data.GOALS, 'transfer'), seed=3
)
CONFIGS = {
  'small': (desk.SMALL, COUNTS),
  'resampled': (desk.RESAMPLED, FEW),
  'moving': (MOVING, FEW),
}


@pytest.fixture(scope='module', params=CONFIGS)
def made(request):
  """(config, tasks per split, a desk)."""
  config, counts = CONFIGS[request.param]
  environment = desk.Desk(config)
  yield config, desk_tasks.make_tasks(config, counts, seed=0), environment
  environment.close()


def flat(splits):
  return [task for tasks in splits.values() for task in tasks]


def play(environment, task, calls, reply):
  """(training score, evaluation score) of an attempt."""
  environment.reset(task)
  steps = [desk_tasks.execute(environment, call) for call in calls]
  transcript = verifiers.Transcript(
    steps=steps,
    reply=reply,
    tools=task.tools,
    state_hash=environment.state_hash(),
  )
  training = checklist.score(task.checklist, transcript, success_bonus=0.0)
  return training, checklist.score(
    task.evaluation, transcript, success_bonus=0.0
  )


def test_the_oracle_passes_both_scorers(made):
  _, splits, environment = made
  for task in flat(splits):
    scores = play(environment, task, task.plan, task.plan_reply)
    for score in scores:
      assert (score.reward, score.success) == (1.0, True), task.id
    assert 1 <= len(task.plan) <= 4


def test_checks_are_well_formed(made):
  checklist.validate_task(made[1]['train'][0])
  for task in flat(made[1]):
    checklist.validate_task(dataclasses.replace(task, tools=()))
    assert sum(c.weight for c in task.checklist) == pytest.approx(1)
    assert not any(c.check['kind'] == 'state' for c in task.checklist)


def acknowledged(environment, task):
  """The plan's writes that the desk accepts."""
  steps = desk_tasks.oracle_episode(environment, task)
  return [
    step.action
    for step in steps
    if desk_tasks.is_write(step.action.name)
    and '"error"' not in step.observation_text
  ]


def test_corrupted_plans_fail_both_scorers(made):
  config, splits, environment = made
  tried = collections.Counter()
  for task in flat(splits)[::4]:
    gold = acknowledged(environment, task)
    rest = [call for call in task.plan if call not in gold]
    attempts = {
      'wrong reply': (task.plan, 'It is purple.'),
      'hedged reply': (task.plan, f'{task.plan_reply} Or not possible. Done.'),
      'no reply': (task.plan, None),
      'false refusal': (rest, 'Not possible: region_mismatch.'),
    }
    if gold:
      attempts['dropped write'] = (rest, task.plan_reply)
      attempts['wrong object'] = (
        [*rest, elsewhere(task, gold[0])],
        task.plan_reply,
      )
    attempts['extra write'] = (
      [*task.plan, extra_write(config, environment, task)],
      task.plan_reply,
    )
    if task.plan_reply == 'Not possible: region_mismatch.':
      del attempts['false refusal']
    for name, (calls, reply) in attempts.items():
      training, evaluation = play(environment, task, calls, reply)
      assert evaluation.success is False, (task.id, name)
      assert training.success is False, (task.id, name)
      assert training.reward < 1
      tried[name] += 1
  assert len(tried) == 7


def elsewhere(task, call):
  """The same write about something else."""
  key = next(iter(call.arguments))
  pool = {'user_id': desk_data.USER_IDS}.get(key, desk_data.ORDER_IDS)
  wrong = next(value for value in pool[5:] if value != call.arguments[key])
  return types.ToolCall(
    name=call.name, arguments={**call.arguments, key: wrong}
  )


def extra_write(config, environment, task):
  """A write that would go through once the plan is done."""
  desk_tasks.oracle_episode(environment, task)
  before = environment.snapshot()
  rows = desk_data.sample_rows(config, task.environment['seed'])
  for order in rows.orders:
    call = desk_goals.ticket(order.order_id, 'other')[0]
    if environment.call(call).error is None:
      environment.restore(before)
      return call
  raise AssertionError('every order has a ticket')


def test_a_policy_that_never_looks_gets_little(made):
  """The best blind answer earns its reply and its restraint at most."""
  _, splits, environment = made
  for task in flat(splits):
    training, _ = play(environment, task, (), task.plan_reply)
    assert training.success is False
    assert training.reward <= 0.4 + 1e-9


def test_claiming_success_after_a_refusal_is_not_success(made):
  config, splits, environment = made
  for task in flat(splits):
    if task.family not in ('trap', 'infeasible'):
      continue
    where = task.environment
    rows = desk_data.sample_rows(config, where['seed'])
    if where['goal'] in ('buy', 'transfer', 'coupon', 'cancel', 'refund'):
      hasty = desk_goals.obvious_write(where['goal'], where['slots'], rows)
      training, evaluation = play(environment, task, [hasty], 'Done.')
      assert not training.success and not evaluation.success
      assert training.reward <= 0.7 + 1e-9


def test_splits_leak_nothing(made):
  _, splits, _ = made
  seen, ids = {}, set()
  for split, tasks in splits.items():
    for task in tasks:
      assert task.id not in ids
      ids.add(task.id)
      key = (
        task.environment['seed'],
        task.family,
        task.environment['goal'],
        str(task.environment['slots']),
      )
      # Paraphrases of a request stay together.
      assert seen.setdefault(key, split) == split
      held_out = (task.family, task.environment['goal']) in desk_tasks.HELD_OUT
      assert held_out == (split == 'test_ood'), task.id


def test_ood_is_composed_of_trained_parts(made):
  _, splits, _ = made
  goals = {task.environment['goal'] for task in splits['train']}
  replies = {task.plan_reply for task in splits['train']}
  tools = {call.name for task in splits['train'] for call in task.plan}
  for task in splits['test_ood']:
    assert task.environment['goal'] in goals
    assert {call.name for call in task.plan} <= tools
    if not re.search(r'\d', task.plan_reply):
      assert task.plan_reply in replies
  combinations = {(t.family, t.environment['goal']) for t in splits['test_ood']}
  assert combinations == set(desk_tasks.HELD_OUT)


def test_families_share_equally(made):
  config, splits, _ = made
  counts = COUNTS if config is desk.SMALL else FEW
  for split, tasks in splits.items():
    assert len(tasks) == counts[split]
    families = collections.Counter(task.family for task in tasks)
    expected = 3 if split == 'test_ood' else 6
    assert len(families) == expected
    assert max(families.values()) - min(families.values()) <= 1


def test_branches_of_conditions_are_balanced(made):
  tasks = [t for t in made[1]['train'] if t.family == 'conditional']
  taken = [t.environment['outcome'] == 'done' for t in tasks]
  assert 0.3 < sum(taken) / len(taken) < 0.7


def skeleton(task):
  """The instruction without its ids and names."""
  text = task.instruction
  for value in task.environment['slots'].values():
    text = re.sub(rf'\b{value}\b', '_', text)
  return task.environment['goal'], text


def test_a_prompt_does_not_tell_feasible_from_infeasible(made):
  _, splits, _ = made
  asked = collections.defaultdict(set)
  for task in flat(splits):
    asked[task.family].add(skeleton(task))
    assert len(task.instruction.split()) <= 12
  direct = asked['single_write'] | asked['trap'] | asked['infeasible']
  per_goal = collections.Counter(goal for goal, _ in direct)
  assert max(per_goal.values()) == 2
  for goal in ('cancel', 'refund', 'coupon'):
    shown = {
      family: {s for s in asked[family] if s[0] == goal}
      for family in ('single_write', 'trap', 'infeasible')
    }
    union = set.union(*shown.values())
    if len(splits['train']) >= 600:
      assert all(texts == union for texts in shown.values()), goal


def test_tasks_follow_from_the_seed(made):
  config, _, _ = made
  few = {'train': 12, 'test_ood': 3}
  first = desk_tasks.make_tasks(config, few, seed=1)
  assert first == desk_tasks.make_tasks(config, few, seed=1)
  other = desk_tasks.make_tasks(config, few, seed=2)
  ids = [[task.id for task in tasks['train']] for tasks in (first, other)]
  assert ids[0] != ids[1]


def test_an_id_means_the_same_task_whatever_was_asked_for():
  one = desk_tasks.make_tasks(desk.SMALL, {'train': 120}, seed=1)
  two = desk_tasks.make_tasks(desk.SMALL, {'train': 120, 'dev': 60}, seed=2)
  tasks = {task.id: task for task in one['train']}
  shared = [task for task in flat(two) if task.id in tasks]
  assert len(shared) > 10
  assert all(tasks[task.id] == task for task in shared)


def test_transfer_is_asked_only_where_it_is_enabled():
  goals = lambda splits: {task.environment['goal'] for task in flat(splits)}
  assert 'transfer' not in goals(desk_tasks.make_tasks(desk.SMALL, FEW, seed=0))
  moving = flat(desk_tasks.make_tasks(MOVING, FEW, seed=0))
  asked = {t.plan_reply for t in moving if t.environment['goal'] == 'transfer'}
  assert 'Not possible: region_mismatch.' in asked and 'Done.' in asked


def test_more_than_there_is_gives_all_there_is():
  rows = desk_data.sample_rows(desk.SMALL, 0)
  offered = collections.Counter(
    instance.family
    for instance in desk_goals.enumerate_all(rows, desk.SMALL.goals)
    if (instance.family, instance.goal) not in desk_tasks.HELD_OUT
  )
  assert 2 * offered.total() > 1500  # each in two wordings
  asked = {'train': 12 * offered['trap']}
  splits = desk_tasks.make_tasks(desk.SMALL, asked, seed=0)
  families = collections.Counter(task.family for task in splits['train'])
  assert families['trap'] == 2 * offered['trap']


def test_a_family_that_cannot_be_filled_is_an_error():
  without = dataclasses.replace(desk.SMALL, goals=('status', 'price'))
  with pytest.raises(ValueError, match='single_write'):
    desk_tasks.make_tasks(without, {'train': 12}, seed=0)
  with pytest.raises(ValueError, match='test_ood'):
    desk_tasks.make_tasks(without, {'test_ood': 12}, seed=0)
  with pytest.raises(ValueError, match='unknown splits'):
    desk_tasks.make_tasks(desk.SMALL, {'valid': 12}, seed=0)
