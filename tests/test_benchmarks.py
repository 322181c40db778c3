"""The harness: attempts, errors apart from failures, and files that resume."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from envace_jax import errors, types
from envace_jax.benchmarks import comparison, policies, results, run, table
from envace_jax.envs import benchmark

CALL = types.ToolCall(name='add', arguments={'number': 1})
TOOLS = [
  {
    'type': 'function',
    'function': {'name': 'add', 'parameters': {'type': 'object'}},
  }
]


class Counting:
  """Task 'n3' wants three calls of `add`, in as many replies."""

  name, version = 'counting', '1'

  def __init__(self, wait_s=0.0, faults=()):
    self.opened, self.closed = [], 0
    self.wait_s, self.faults = wait_s, dict(faults)

  def categories(self):
    return ('few', 'many')

  def task_ids(self, category):
    numbers = range(1, 4) if category == 'few' else range(4, 9)
    return [f'n{number}' for number in numbers]

  def open(self, task_id):
    self.opened.append(task_id)
    if fault := self.faults.get(('open', task_id)):
      raise fault
    return Adding(self, task_id)

  def oracle(self, task_id):
    if task_id == 'n8':
      return None
    said = [benchmark.Reply(text='', calls=(CALL,))] * int(task_id[1:])
    return [*said, benchmark.Reply(text='done')]


class Adding:
  system, instruction, tools = 'Add.', 'Go.', TOOLS

  def __init__(self, whole, task_id):
    self._whole, self._id, self._count = whole, task_id, 0

  def respond(self, reply):
    time.sleep(self._whole.wait_s)
    if fault := self._whole.faults.get(('respond', self._id)):
      raise fault
    if not reply.calls:
      return ()
    said = []
    for action in reply.calls:
      readable = isinstance(action, types.ToolCall)
      self._count += readable
      error = None if readable else 'invalid_call'
      text = json.dumps({'count': self._count})
      said.append(benchmark.Message(role='tool', text=text, error=error))
    return said

  def score(self):
    wanted = int(self._id[1:])
    return benchmark.Outcome(
      reward=min(self._count, wanted) / wanted,
      success=self._count == wanted,
      reason='' if self._count == wanted else 'wrong_count',
      parts={'count': self._count},
    )

  def record(self):
    return {'said': self._count}

  def close(self):
    self._whole.closed += 1


class Two:
  """Adds twice, whatever is asked; breaks down where it is told to."""

  name = 'two'

  def __init__(self, breaks_at=()):
    self._breaks_at = breaks_at

  def begin(self, task_id, trial):
    if (task_id, trial) in self._breaks_at:
      raise policies.PolicyFailed('timeout')
    said = [benchmark.Reply(text='', calls=(CALL,))] * 2
    return policies.Script([*said, benchmark.Reply(text='done')])

  def close(self):
    pass


def measured(path, whole, policy, **settings):
  return run.measure(
    whole, policy, run.select(whole), path, run.Settings(**settings)
  )


def facts(found):
  """What does not depend on time."""
  return [{**vars(result), 'seconds': 0, 'started': ''} for result in found]


def test_oracle_and_noop_bound_the_harness(tmp_path):
  whole = Counting()
  oracle = measured(tmp_path / 'o', whole, policies.Oracle(whole))
  assert [r.success for r in oracle[:-1]] == [True] * 7
  assert oracle[-1].error == 'policy: no_oracle'
  noop = measured(tmp_path / 'n', whole, policies.Noop())
  assert [(r.success, r.reward, r.error) for r in noop] == [(False, 0, '')] * 8
  assert oracle[2].calls == 3 and oracle[2].steps == 4
  assert whole.closed == 16


def test_parallel_equals_serial(tmp_path):
  serial = measured(tmp_path / 's', Counting(), Two(), trials=2)
  parallel = measured(
    tmp_path / 'p', Counting(wait_s=0.001), Two(), trials=2, workers=5
  )
  assert facts(serial) == facts(parallel) and len(serial) == 16
  assert [r.task_id for r in serial if r.success] == ['n2', 'n2']
  assert [(r.task_id, r.trial) for r in serial[:3]] == [
    ('n1', 0),
    ('n1', 1),
    ('n2', 0),
  ]


def test_what_broke_is_errored_and_not_wrong(tmp_path):
  faults = {
    ('open', 'n1'): benchmark.AttemptFailed('no server'),
    ('respond', 'n4'): benchmark.AttemptFailed('user simulator'),
    ('respond', 'n5'): KeyError('a bug'),
  }
  whole = Counting(faults=faults)
  found = measured(tmp_path / 'f', whole, Two([('n3', 0)]), workers=3)
  assert {r.task_id: r.error for r in found if r.error} == {
    'n1': 'benchmark: no server',
    'n3': 'policy: timeout',
    'n4': 'benchmark: user simulator',
    'n5': "internal: KeyError('a bug')",
  }
  few, many, both = table.rows(found, seed=0)
  assert (few.errored, few.success.mean, few.success.n) == (2, 1.0, 1)
  assert (many.errored, many.success.mean, many.success.n) == (2, 0.0, 3)
  assert (both.errored, both.attempts, both.success.mean) == (4, 8, 0.25)
  assert list(both.unjudged_tasks) == ['few/n1', 'few/n3', 'many/n4', 'many/n5']
  assert '| few | 3 | 1.000 [0.207, 1.000] |' in table.render([few])
  # Made again only when that is asked for.
  repaired = Counting()
  again = measured(tmp_path / 'f', repaired, Two(), retry_errored=True)
  assert sorted(repaired.opened) == ['n1', 'n3', 'n4', 'n5']
  assert not any(result.error for result in again)


def test_a_limit_of_steps_ends_an_attempt_that_is_scored(tmp_path):
  whole = Counting()
  found = measured(tmp_path / 'f', whole, policies.Oracle(whole), max_steps=3)
  assert [r.capped for r in found] == [False] * 2 + [True] * 5 + [False]
  # Three calls, without the closing reply, are what n3 wants.
  assert [r.success for r in found] == [True] * 3 + [False] * 5
  assert table.rows(found, seed=0)[-1].capped == 5


PROGRAM = """
import test_benchmarks
test_benchmarks.measured(
  {path!r}, test_benchmarks.Counting(wait_s=0.1), test_benchmarks.Two()
)
"""


@pytest.mark.parametrize('cap, made', [(0, 0), (1, 1), (2, 2), (None, 2)])
def test_a_cap_on_calls_ends_an_attempt_before_the_call(tmp_path, cap, made):
  """It is a prefix of the attempt without a cap."""
  whole = Counting()
  found = measured(tmp_path / 'f', whole, Two(), max_calls=cap)
  assert {result.calls for result in found} == {made}
  assert [result.parts['count'] for result in found] == [made] * 8
  assert {result.capped for result in found} == {made < 2}
  by_id = {result.task_id: result.success for result in found}
  assert by_id['n2'] == (made == 2) and by_id['n1'] == (made == 1)
  with pytest.raises(errors.UserError, match='max_calls=-1'):
    run.Settings(max_calls=-1)


def test_a_killed_run_is_resumed_and_what_is_done_is_not_done_again(tmp_path):
  path = tmp_path / 'results.jsonl'
  here = pathlib.Path(__file__).parent
  environment = {
    **os.environ,
    'PYTHONPATH': os.pathsep.join([str(here), str(here.parent)]),
  }
  process = subprocess.Popen(
    [sys.executable, '-c', PROGRAM.format(path=str(path))], env=environment
  )
  end = time.monotonic() + 60
  lines = lambda: path.read_bytes().count(b'\n') if path.exists() else 0
  while lines() < 4 and time.monotonic() < end:
    time.sleep(0.01)
  process.send_signal(signal.SIGKILL)
  process.wait()
  done = lines() - 1
  assert 3 <= done < 8
  # Torn in the middle of the last line that was whole.
  path.write_bytes(path.read_bytes()[:-20])
  whole = Counting()
  found = measured(path, whole, Two())
  assert len(whole.opened) == 8 - (done - 1)
  assert facts(found) == facts(measured(tmp_path / 'once', Counting(), Two()))
  idle = Counting()
  assert facts(measured(path, idle, Two())) == facts(found)
  assert idle.opened == []
  assert len(path.read_bytes().splitlines()) == 9


def test_a_file_of_something_else_is_refused_and_left(tmp_path):
  path = tmp_path / 'f'
  measured(path, Counting(), Two())
  before = path.read_bytes()
  with pytest.raises(errors.UserError, match="'policy': 'two'.*'noop'"):
    measured(path, Counting(), policies.Noop())
  assert path.read_bytes() == before
  for content in (b'{"a": 1}', b'no\n', before + b'{"task_id": 1}\n'):
    path.write_bytes(content)
    with pytest.raises(errors.UserError, match='name another file'):
      results.File(path, json.loads(before.splitlines()[0])['measured'])
    assert path.read_bytes() == content


def test_a_torn_line_longer_than_what_follows_is_cut(tmp_path):
  path = tmp_path / 'f'
  found = measured(path, Counting(), Two())
  head, *lines = path.read_bytes().splitlines(keepends=True)
  path.write_bytes(b''.join([head, *lines[:-1], lines[-1][:-1] + b'x' * 5000]))
  assert facts(measured(path, Counting(), Two())) == facts(found)
  assert path.read_bytes().endswith(b'}\n')
  for line in path.read_bytes().splitlines():
    json.loads(line)


def test_tasks_are_selected_by_names_that_exist():
  whole = Counting()
  assert run.select(whole, ['many'], ['n5']) == {'many': ['n5']}
  assert run.select(whole, (), ['n5', 'n1']) == {'few': ['n1'], 'many': ['n5']}
  with pytest.raises(errors.UserError, match="no category 'none'.*few, many"):
    run.select(whole, ['none'])
  with pytest.raises(errors.UserError, match="no task 'n1' in many"):
    run.select(whole, ['many'], ['n1'])
  with pytest.raises(errors.UserError, match='workers=0'):
    run.Settings(workers=0)


def test_trials_give_pass_hat_k(tmp_path):
  found = measured(
    tmp_path / 'f', Counting(), Two([('n2', 1)]), trials=2, workers=2
  )
  few = table.rows(found, seed=0)[0]
  assert (few.k, few.errored, few.hat_k.n) == (2, 1, 2)
  assert (few.success.n, round(few.success.mean, 3)) == (3, 0.333)


def test_a_dialogue_is_told_in_the_form_of_openai():
  dialogue = policies.Dialogue('Add.', 'Go.')
  bad = types.ParseError(kind='bad_json', detail='x')
  reply = benchmark.Reply(text='hm', calls=(CALL, bad))
  heard = [benchmark.Message(role='tool', text=t) for t in ('1', '2')]
  dialogue.add(reply, heard)
  dialogue.add(
    benchmark.Reply(text='so'), [benchmark.Message(role='user', text='and?')]
  )
  said = dialogue.messages
  assert [m['role'] for m in said] == [
    'system',
    'user',
    'assistant',
    'tool',
    'tool',
    'assistant',
    'user',
  ]
  ids = [call['id'] for call in said[2]['tool_calls']]
  assert ids == [said[3]['tool_call_id'], said[4]['tool_call_id']]
  assert policies.reply_of(said[2]).calls[0] == CALL
  assert 'tool_calls' not in said[5]


def test_calls_that_nobody_answered_are_not_left_open():
  dialogue = policies.Dialogue('', 'Go.')
  bad = types.ParseError(kind='bad_json', detail='x')
  user = [benchmark.Message(role='user', text='and?')]
  dialogue.add(benchmark.Reply(text='<tool_call>{', calls=(bad,)), user)
  assert dialogue.messages[1:] == [
    {'role': 'assistant', 'content': '<tool_call>{'},
    {'role': 'user', 'content': 'and?'},
  ]


def test_policies_are_compared_on_the_tasks_that_both_were_judged_on(tmp_path):
  whole = Counting()
  measured(tmp_path / 'a' / 'results.jsonl', whole, Two())
  measured(tmp_path / 'b' / 'results.jsonl', whole, policies.Oracle(whole))
  said = comparison.compare([tmp_path / 'a', tmp_path / 'b'], seed=0)
  rows = [
    [c.strip() for c in r.split('|')[1:-1]] for r in said.splitlines()[4:]
  ]
  assert [row[:3] for row in rows] == [
    ['few', 'two', '3'],
    ['few', 'oracle', '3'],
    ['many', 'two', '5'],
    ['many', 'oracle', '4'],  # of one task nobody recorded a solution
  ]
  assert rows[0][3].startswith('0.333') and rows[0][4] == ''
  assert rows[1][3].startswith('1.000') and rows[1][4].startswith('0.667')
  assert rows[3][4].startswith('1.000')
  assert rows[0][5:] == ['2.0', '0.0', '0.0'] and rows[3][5] == '5.5'
  measured(tmp_path / 'e' / 'results.jsonl', whole, Two(), max_calls=2)
  other = Counting()
  other.version = '2'
  measured(tmp_path / 'c' / 'results.jsonl', other, Two())
  for paths, why in (
    (['a', 'c'], 'different tests'),
    (['a', 'e'], 'not at equal real calls'),
    (['a', 'd'], 'cannot be read as results'),
    (['a'], 'two files'),
  ):
    with pytest.raises(errors.UserError, match=why):
      comparison.compare([tmp_path / p for p in paths], seed=0)


def test_what_a_task_went_on_from_is_in_its_cost_and_in_no_mean(tmp_path):
  for name, wrong in (('a', ''), ('b', 'policy: gone')):
    file = results.File(
      tmp_path / name / 'results.jsonl',
      {'benchmark': 'x', 'version': '1', 'policy': name},
    )
    one = {'category': 'c', 'trial': 0, 'calls': 3, 'tokens_out': 5}
    for task, prerequisite, error in (
      ('session', True, ''),
      ('first', False, ''),
      ('second', False, wrong),
    ):
      file.add(
        results.Result(
          task_id=task, prerequisite=prerequisite, error=error, **one
        )
      )
    file.close()
  said = comparison.compare([tmp_path / 'a', tmp_path / 'b'], seed=0)
  rows = [
    [c.strip() for c in r.split('|')[1:-1]] for r in said.splitlines()[4:]
  ]
  # Three attempts for two verdicts; two for the one that is left.
  assert [row[5:7] for row in rows] == [['4.5', '7.5'], ['6.0', '10.0']]
