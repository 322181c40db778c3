"""Benchmarks as a run's data: what is shown is real, and is what is read."""

import collections
import json
import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip('tau2', reason='needs the package of τ²-Bench')
pytest.importorskip('bfcl_eval', reason='bfcl-eval is an optional package')

from envace_jax import benchmark_worlds, data, errors, types
from envace_jax.envs import base as envs
from envace_jax.envs import benchmark, recording
from envace_jax.envs.bfcl import files as bfcl_files
from envace_jax.envs.tau2 import benchmark as tau2
from envace_jax.envs.tau2 import demonstrations as tau2_demonstrations
from envace_jax.envs.tau2 import oracles as tau2_oracles
from envace_jax.envs.tau2 import telecom as tau2_telecom
from experiments import bfcl_files as bfcl_experiment
from experiments import tau2_telecom as telecom_experiment

ROOT = pathlib.Path(__file__).parent.parent


def config(module, **options):
  c = module.get_config('smoke')
  c.data.update(options)
  return c


@pytest.fixture(scope='module')
def prepared(tmp_path_factory):
  return {
    name: data.prepare(c, tmp_path_factory.mktemp(name))
    for name, c in (
      ('telecom', config(telecom_experiment, num_demonstrations=40)),
      ('files', config(bfcl_experiment, num_train=20, num_demonstrations=40)),
    )
  }


def judged(task_id, calls):
  """The package's own verdict on calls, by its own environment."""
  attempt = tau2.Tau2(split='full').open(f'telecom_solo/{task_id}')
  try:
    for call in calls:
      attempt.respond(benchmark.Reply(text='', calls=(call,)))
    attempt.respond(tau2_oracles.DONE)
    return attempt.score().success
  finally:
    attempt.close()


def test_what_is_shown_of_a_ticket_earns_the_packages_full_marks(prepared):
  tickets = {
    task.id: task.environment['ticket']
    for task in prepared['telecom'].tasks['train']
  }
  shown = {
    demo.task_id: demo
    for demo in prepared['telecom'].demonstrations
    if demo.habit == 'expert'
  }
  assert len(shown) > 10
  for task_id, demo in shown.items():
    calls = [step.action for step in demo.steps]
    assert judged(tickets[task_id], calls)
    # Whoever is shown first looks; without a repair nothing is solved.
    looks = [c for c in calls if not tau2_telecom.is_write(c.name)]
    assert calls[0] in looks
    assert tau2_telecom.is_handed_over(calls) or not judged(
      tickets[task_id], looks
    )


def test_a_ticket_that_the_script_does_not_solve_is_not_shown():
  """The script's own limits are the benchmark's verdict, ticket by ticket."""
  environment = tau2_telecom.TelecomEnvironment()
  unsolved = []
  for task in tau2_telecom.make_tasks('base_train'):
    calls = tau2_demonstrations.calls(environment, task)
    if calls is None:
      unsolved.append(task)
    else:
      assert judged(task.environment['ticket'], calls), task.id
  environment.close()
  assert unsolved


@pytest.mark.parametrize('name', ['telecom', 'files'])
def test_a_shown_row_begins_as_a_rollout_does(prepared, name):
  made = prepared[name]
  tasks = {task.id: task for task in made.tasks['train']}
  rows = data.rows(made, 10_000, None)
  assert len(rows) == len(made.demonstrations)
  for (ids, authors), demo in zip(rows, made.demonstrations, strict=True):
    task = tasks[demo.task_id]
    prompt, _ = made.template.prompt(
      task.instruction, '', task.tools, task.system
    )
    assert ids[: len(prompt)].tolist() == prompt.tolist()
    learned = set(authors[len(prompt) :]) - {types.Author.FORCED}
    assert learned == {types.Author.ACT, types.Author.WORLD}


def test_the_words_of_the_tools_are_in_the_vocabulary(prepared):
  """Names that are spelt in bytes would cost a prompt hundreds of tokens."""
  made = prepared['telecom']
  encode = made.words.tokenizer.encode
  names = [tool['function']['name'] for tool in tau2_telecom.tools()]
  assert sum(len(encode(name)) for name in names) < 5 * len(names)


@pytest.mark.parametrize('name', ['telecom', 'files'])
def test_a_share_of_attempts_lacks_one_call(prepared, name):
  demos = prepared[name].demonstrations
  habits = collections.Counter(demo.habit for demo in demos)
  assert set(habits) == {'expert', 'one_call_less'}
  assert 4 <= habits['one_call_less'] <= 20  # 0.3 of 40
  longest = collections.defaultdict(int)
  for demo in demos:
    if demo.habit == 'expert':
      longest[demo.task_id] = len(demo.steps)
  compared = [
    (len(demo.steps), longest[demo.task_id])
    for demo in demos
    if demo.habit == 'one_call_less' and demo.task_id in longest
  ]
  assert compared
  assert all(less == whole - 1 for less, whole in compared)


def test_held_out_tickets_are_the_benchmarks_own_and_none_is_trained_on(
  prepared,
):
  tasks = prepared['telecom'].tasks
  official = {task.id for task in tau2_telecom.make_tasks('test')}
  assert {t.id for s in ('test_iid', 'test_ood') for t in tasks[s]} == official
  known = [task.id for s in ('train', 'dev') for task in tasks[s]]
  assert len(set(known)) == len(known) and not official & set(known)
  of = lambda split: {
    int(t.family.removeprefix('faults_')) for t in tasks[split]
  }
  assert max(of('train') | of('test_iid')) <= 2 < min(of('test_ood'))


class _Bell:
  """An environment that answers everything, and counts who asked."""

  tools = ()

  def __init__(self):
    self.closed = 0

  def reset(self, task):
    pass

  def call(self, action):
    return envs.success({'result': action.name})

  def close(self):
    self.closed += 1


def ringing(shown):
  bell = _Bell()
  return bell, benchmark_worlds.World(
    make_tasks=None,
    make_environment=lambda: bell,
    shown=shown,
    is_write=lambda name: False,
  )


def tasks(count):
  return [
    types.Task(id=f't{i}', instruction='Ring.', tools=(), checklist=())
    for i in range(count)
  ]


def calls(*names):
  return [types.ToolCall(name=name, arguments={}) for name in names]


def test_unsolved_tasks_are_counted_and_the_others_take_turns(caplog):
  c = config(bfcl_experiment, num_demonstrations=6, left_out=0.0)
  solved = {'t1': calls('a', 'b'), 't3': calls('c')}
  bell, world = ringing(lambda environment, task: solved.get(task.id))
  with caplog.at_level('INFO', logger='absl'):
    made = benchmark_worlds.demonstrations(world, c, tasks(5))
  assert [demo.task_id for demo in made] == ['t1', 't3'] * 3
  assert 'attempts to show at 2 of 5 tasks' in caplog.text
  assert bell.closed == 1
  assert {step.outcome for d in made for step in d.steps} == {recording.SUCCESS}


def test_nothing_to_show_is_an_error_and_one_call_is_never_left_out():
  c = config(bfcl_experiment, num_demonstrations=3, left_out=1.0)
  bell, world = ringing(lambda environment, task: None)
  with pytest.raises(errors.UserError, match='none of 3 tasks is solved'):
    benchmark_worlds.demonstrations(world, c, tasks(5))
  assert bell.closed == 1
  _, world = ringing(lambda environment, task: calls('a'))
  made = benchmark_worlds.demonstrations(world, c, tasks(5))
  assert [len(demo.steps) for demo in made] == [1, 1, 1]
  assert {demo.habit for demo in made} == {'expert'}
  c.data.num_demonstrations = 0
  _, world = ringing(lambda environment, task: None)
  assert not benchmark_worlds.demonstrations(world, c, tasks(5))


def test_a_file_task_shows_its_plan(prepared):
  made = prepared['files']
  plans = {task.id: task.plan for task in made.tasks['train']}
  environment = bfcl_files.Files()
  by_id = {task.id: task for task in made.tasks['train']}
  for demo in made.demonstrations:
    if demo.habit == 'expert':
      assert tuple(step.action for step in demo.steps) == tuple(
        plans[demo.task_id]
      )
    environment.reset(by_id[demo.task_id])
    for step in demo.steps:
      assert environment.call(step.action).text == step.observation_text
  environment.close()


def test_telecom_trains_from_its_tickets_to_a_report(tmp_path):
  """An update of each kind; the numbers mean nothing."""
  subprocess.run(
    [
      sys.executable, '-m', 'envace_jax.main', 'train',
      '--config=experiments/tau2_telecom.py:smoke', f'--workdir={tmp_path}',
      '--config.model.d_model=16', '--config.model.num_layers=1',
      '--config.model.d_ff=16', '--config.model.head_dim=8',
    ],
    cwd=ROOT, env=os.environ | {'JAX_PLATFORMS': 'cpu'}, check=True,
    capture_output=True,
  )  # fmt: skip
  after = json.loads((tmp_path / 'evaluations' / 'after.json').read_text())
  assert len(after['outcomes']['greedy/iid']) == 10
  assert len(after['outcomes']['greedy/ood']) == 30
  assert (tmp_path / 'report.html').exists()
