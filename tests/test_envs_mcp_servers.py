"""Servers that others wrote, over stdio: a file system, git, and tau2."""

import concurrent.futures
import json
import random

import mcp_servers
import pytest
import test_envs_mcp

from envace_jax import types
from envace_jax.envs import benchmark
from envace_jax.envs.mcp import benchmark as mcp_benchmark
from envace_jax.envs.mcp import environment as mcp_environment
from envace_jax.envs.mcp import server as mcp_server
from envace_jax.envs.mcp import tools as mcp_tools
from envace_jax.rewards import checklist

HERE = 'test_envs_mcp_servers'
LIMITS = mcp_server.Limits(start_s=60, call_s=30, stop_s=1)
WORDS = ('ash', 'bay', 'elm', 'fir', 'oak', 'yew')


def make_tree(stage):
  for name, text in stage.arguments['before'].items():
    path = stage.state / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def has_tree(stage):
  found = {
    str(path.relative_to(stage.state)): path.read_text()
    for path in stage.state.rglob('*')
    if path.is_file()
  }
  return found == stage.arguments['after']


def tree_task(seed):
  """Gather two of the files in a new directory, and write down their sum."""
  draw = random.Random(seed)
  names = draw.sample(WORDS, 4)
  before = {f'{name}.txt': str(draw.randrange(100)) for name in names[:3]}
  folder, (first, second, _) = names[3], before
  after = {k: v for k, v in before.items() if k not in (first, second)}
  after |= {f'{folder}/{name}': before[name] for name in (first, second)}
  total = str(int(before[first]) + int(before[second]))
  after[f'{folder}/total'] = total
  move = lambda name: {
    'name': 'move_file',
    'arguments': {'source': name, 'destination': f'{folder}/{name}'},
  }
  return {
    'id': f'tree-{seed}',
    'family': 'trees',
    'instruction': f'Create the directory {folder}, move {first} and {second} '
    f'there, and write the sum of their numbers to {folder}/total.',
    'environment': {
      'reset': f'{HERE}:make_tree',
      'check': f'{HERE}:has_tree',
      'arguments': {'before': before, 'after': after},
    },
    'plan': [
      {'name': 'create_directory', 'arguments': {'path': folder}},
      move(first),
      move(second),
      {
        'name': 'write_file',
        'arguments': {'path': f'{folder}/total', 'content': total},
      },
    ],
    'plan_reply': total,
  }


def opened(path, server, tasks, hidden=mcp_tools.NOTHING):
  file = path / 'mine.jsonl'
  file.write_text('\n'.join(map(json.dumps, tasks)))
  return mcp_benchmark.McpBenchmark(
    file,
    server,
    judge=checklist.score_evaluation,
    validate=checklist.validate_task,
    limits=LIMITS,
    hidden=hidden,
  )


def outcome(bench, task_id, replies):
  attempt = bench.open(task_id)
  try:
    for reply in replies:
      attempt.respond(reply)
    return attempt.score()
  finally:
    attempt.close()


def assert_plans_decide(bench, task_ids):
  """The plan earns full marks, and a plan without its last call none."""
  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    plans = [bench.oracle(task_id) for task_id in task_ids]
    cut = [[*plan[:-2], plan[-1]] for plan in plans]
    empty = [[benchmark.Reply(text='done')]] * len(plans)
    for replies, success in ((plans, True), (cut, False), (empty, False)):
      done = list(pool.map(outcome, [bench] * len(plans), task_ids, replies))
      assert [one.success for one in done] == [success] * len(plans), done
  assert not test_envs_mcp.processes()


def test_file_system_tasks_are_decided_by_the_final_tree(tmp_path):
  tasks = [tree_task(seed) for seed in range(2)]
  bench = opened(tmp_path, mcp_servers.files(), tasks)
  assert_plans_decide(bench, bench.task_ids('trees'))


@pytest.mark.nightly
def test_many_file_system_tasks(tmp_path):
  tasks = [tree_task(seed) for seed in range(30)]
  bench = opened(tmp_path, mcp_servers.files(), tasks)
  assert_plans_decide(bench, bench.task_ids('trees'))


def test_the_file_system_server_keeps_its_jail_and_its_state():
  environment = mcp_environment.McpEnvironment(mcp_servers.files(), LIMITS)
  call = lambda name, **arguments: test_envs_mcp.call(
    environment, name, **arguments
  )
  try:
    environment.reset(test_envs_mcp.TASK)
    assert len(environment.tools) >= 14
    assert call('read_text_file', path='/etc/passwd').error == 'tool_error'
    assert call('read_text_file', path=7).error is not None
    (environment.state / 'a.png').write_bytes(b'\x89PNG' + bytes(96))
    seen = call('read_media_file', path='a.png')
    assert '[image: image/png, 100 bytes]' in seen.text
    before, snapshot = environment.state_hash(), environment.snapshot()
    assert call('write_file', path='b', content='1').error is None
    assert environment.state_hash() != before
    environment.restore(snapshot)
    assert environment.state_hash() == before
    assert call('read_text_file', path='b').error == 'tool_error'
  finally:
    environment.close()


def called_well(stage):
  """The server's own log has the plan's calls, these only, and no error."""
  log = json.loads(stage.call('get_call_log', {}).text)['calls']
  names = [entry['tau2_tool_call']['name'] for entry in log]
  failed = any(entry['tau2_tool_message']['error'] for entry in log)
  return names == stage.arguments['names'] and not failed


def tau2_task(plan):
  names = [call['name'] for call in plan]
  return {
    'id': 'tau2',
    'instruction': 'Do it.',
    'environment': {
      'check': f'{HERE}:called_well',
      'arguments': {'names': names},
    },
    'checklist': [
      {
        'id': 'called',
        'question': '?',
        'check': {'kind': 'called', 'name': names[-1]},
      }
    ],
    'plan': plan,
    'plan_reply': 'Done.',
  }


TAU2_HIDDEN = mcp_tools.Hidden(
  tools=['reset_state', 'get_call_log'], parameters=['state_key']
)


def assert_tau2(tmp_path, domain, plan):
  server, tool = mcp_servers.tau2(domain), plan[-1]['name']
  bench = opened(tmp_path, server, [tau2_task(plan)], TAU2_HIDDEN)
  attempt = bench.open('tau2')
  try:
    functions = [shown['function'] for shown in attempt.tools]
    assert tool in [function['name'] for function in functions]
    assert not {'reset_state', 'get_call_log'} & {f['name'] for f in functions}
    assert 'state_key' not in json.dumps(functions)
    hidden = types.ToolCall(name='get_call_log', arguments={})
    (said,) = attempt.respond(benchmark.Reply(text='', calls=(hidden,)))
    assert said.error == 'unknown_tool'
  finally:
    attempt.close()
  assert_plans_decide(bench, ['tau2'])


def test_a_tau2_domain_over_mcp(tmp_path):
  create = {'user_id': 'user_1', 'title': 'Call Ann'}
  plan = [
    {'name': 'get_users', 'arguments': {}},
    {'name': 'create_task', 'arguments': create},
  ]
  assert_tau2(tmp_path, 'mock', plan)


@pytest.mark.nightly
def test_tau2_retail_over_mcp(tmp_path):
  user = {'first_name': 'Yusuf', 'last_name': 'Rossi', 'zip': '19122'}
  plan = [
    {'name': 'find_user_id_by_name_zip', 'arguments': user},
    {'name': 'list_all_product_types', 'arguments': {}},
  ]
  assert_tau2(tmp_path, 'retail', plan)


def has_commit(stage):
  seen = stage.call('git_log', {'repo_path': str(stage.state)})
  return stage.arguments['message'] in seen.text


@pytest.mark.nightly
def test_the_git_server_commits(tmp_path):
  script = (
    'git init -q . && git config user.email a@b.c && git config user.name A'
    ' && echo 1 > a && git add a && git commit -qm first && echo 2 > a'
  )
  task = {
    'id': 'commit',
    'instruction': 'Commit the change with the message "second".',
    'environment': {
      'reset': ['sh', '-c', script],
      'check': f'{HERE}:has_commit',
      'arguments': {'message': 'second'},
    },
    'plan': [
      {'name': 'git_add', 'arguments': {'repo_path': '.', 'files': ['a']}},
      {
        'name': 'git_commit',
        'arguments': {'repo_path': '.', 'message': 'second'},
      },
    ],
    'plan_reply': 'Done.',
  }
  assert_plans_decide(opened(tmp_path, mcp_servers.git(), [task]), ['commit'])
