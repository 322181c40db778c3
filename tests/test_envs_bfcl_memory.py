"""BFCL's memory: stores go from sessions to questions, and nowhere else."""

import json
import pathlib
import threading

import pytest

pytest.importorskip('bfcl_eval', reason='bfcl-eval is an optional package')
pytest.importorskip('rank_bm25', reason="the key-value store's search needs it")
pytest.importorskip('overrides', reason='the memory backends need it')

from envace_jax import errors, types
from envace_jax.benchmarks import policies, run, table
from envace_jax.envs import benchmark
from envace_jax.envs.bfcl import backends as bfcl_backends
from envace_jax.envs.bfcl import benchmark as bfcl
from envace_jax.envs.bfcl import memory as bfcl_memory

STORES = (bfcl_memory.KV, bfcl_memory.REC_SUM)
FIRST = {c: f'{c}_prereq_32-notetaker-0' for c in STORES}


@pytest.fixture(scope='module')
def source():
  return bfcl.Bfcl()


def _notes(source, category):
  """Questions of the shortest scenario."""
  return [i for i in source.task_ids(category) if '-notetaker-' in i]


def _say(attempt, name, **arguments):
  call = types.ToolCall(name=name, arguments=arguments)
  (heard,) = attempt.respond(benchmark.Reply(text='', calls=[call]))
  return heard


class Reader:
  """Writes like the oracle, and says only what it was shown in a question."""

  def __init__(self, source, name='reader', skip=(), breaks_at=()):
    self._source, self.name = source, name
    self._skip, self._breaks_at = skip, breaks_at
    self.begun = []

  def begin(self, task_id, trial):
    self.begun.append((task_id, trial))
    if task_id in self._breaks_at:
      raise policies.PolicyFailed('timeout')
    if task_id in self._skip:
      return policies.Script(())
    script = self._source.oracle(task_id)
    return policies.Script(script) if 'prereq' in task_id else _Says(script[0])


class _Says:
  def __init__(self, first):
    self._first = first

  def ask(self, messages, tools):
    del tools
    if messages[-1]['role'] == 'tool':
      text = messages[-1]['content']
      return policies.Answer(reply=benchmark.Reply(text=text))
    return policies.Answer(reply=self._first, tokens_out=1)


def _measure(source, policy, path, tasks, **settings):
  return run.measure(source, policy, tasks, path, run.Settings(**settings))


@pytest.mark.parametrize('category', STORES)
def test_what_sessions_wrote_is_what_a_question_reads(
  source, category, tmp_path
):
  tasks = {category: _notes(source, category)[::4]}
  found = _measure(
    source, Reader(source), tmp_path / 'r', tasks, workers=3, trials=2
  )
  sessions = [one for one in found if one.prerequisite]
  questions = [one for one in found if not one.prerequisite]
  assert len(sessions) == 5 * 2 and len(questions) == 7 * 2
  assert not any(one.error for one in found)
  assert all(one.success and one.parts['seen'] for one in questions)
  (row,) = table.rows(found, seed=0)
  assert row.tasks == 7 and row.errored == 0 and row.success.mean == 1
  assert row.calls == sum(one.calls for one in found) > row.attempts
  silent = Reader(
    source, 'silent', skip=source.prerequisites(tasks[category][0])
  )
  found = _measure(source, silent, tmp_path / 's', tasks)
  assert not any(one.success or one.parts.get('seen') for one in found)


def test_runs_side_by_side_do_not_see_each_other(source, tmp_path):
  category = bfcl_memory.KV
  tasks = {category: _notes(source, category)[::6]}
  sessions = source.prerequisites(tasks[category][0])
  found = {}

  def measure(name, skip):
    policy = Reader(source, name, skip=skip)
    found[name] = _measure(source, policy, tmp_path / name, tasks, workers=2)

  sides = [('writes', ()), ('silent', sessions)]
  threads = [threading.Thread(target=measure, args=side) for side in sides]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  scores = {
    name: {one.success for one in some if not one.prerequisite}
    for name, some in found.items()
  }
  assert scores == {'writes': {True}, 'silent': {False}}


def test_a_resumed_run_goes_on_from_the_recorded_store(source, tmp_path):
  category = bfcl_memory.REC_SUM
  first, *rest = _notes(source, category)[::8]
  path = tmp_path / 'r'
  _measure(source, Reader(source), path, {category: [first]})
  # Killed in mid-chain: the last session and the question are not there.
  lines = path.read_bytes().splitlines(keepends=True)
  path.write_bytes(b''.join(lines[:-2]) + lines[-2][:20])
  policy = Reader(source)
  found = _measure(source, policy, path, {category: [first, *rest]})
  sessions = source.prerequisites(first)
  begun = [task_id for task_id, _ in policy.begun]
  assert begun == [sessions[-1], first, *rest]
  assert all(one.success for one in found if not one.prerequisite)


def test_what_goes_on_from_an_errored_session_is_errored(source, tmp_path):
  category = bfcl_memory.KV
  task = _notes(source, category)[0]
  sessions = source.prerequisites(task)
  policy = Reader(source, breaks_at=sessions[2])
  tasks, path = {category: [task]}, tmp_path / 'r'
  found = _measure(source, policy, path, tasks)
  assert [one.error for one in found] == [
    '',
    '',
    'policy: timeout',
    *[f'prerequisite: {sessions[2]}'] * 3,
  ]
  (row,) = table.rows(found, seed=0)
  assert (row.errored, row.attempts, row.success) == (1, 1, None)
  again = Reader(source)
  found = _measure(source, again, path, tasks, retry_errored=True)
  assert [task_id for task_id, _ in again.begun] == [*sessions[2:], task]
  assert found[-1].success


def test_a_core_memory_is_in_sight_of_the_next(source):
  attempt = source.open(FIRST[bfcl_memory.KV])
  assert 'no content in the core memory' in attempt.system
  value = "{'} __import__('os') \ud800"
  assert not _say(attempt, 'core_memory_add', key='a_b', value=value).error
  left = attempt.record()
  attempt.close()
  following = source.open_after(
    'memory_kv_prereq_33-notetaker-1', [json.loads(json.dumps(left))]
  )
  assert '"a_b": "{\'} __import__' in following.system
  following.close()


@pytest.mark.parametrize('category', STORES)
def test_nothing_hostile_leaves_the_store(
  source, category, tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  attempt = source.open(FIRST[category])
  folder = pathlib.Path(attempt._folder.name)
  program = "'); open('executed', 'w').close() #"
  for text in ('../../escaped', '/escaped', program, 'memory_clear()', '\0'):
    if category == bfcl_memory.KV:
      heard = _say(attempt, 'archival_memory_add', key=text, value=text)
      assert heard.error == 'refused'
      _say(attempt, 'core_memory_add', key='plain', value=text)
    else:
      assert not _say(attempt, 'memory_append', text=text).error
  for name in ('_flush_memory_to_local_file', '__class__', 'open'):
    assert _say(attempt, name).error == 'raised'
  left = attempt.record()
  files = [path for path in folder.rglob('*') if path.is_file()]
  assert {path.name for path in files} == {
    'notetaker_final.json',
    f'{FIRST[category]}.json',
  }
  assert json.dumps(left['store'])
  attempt.close()
  assert not folder.exists() and not list(tmp_path.iterdir())
  assert not list(folder.parent.glob('*escaped*'))


def test_a_summary_does_not_grow_without_end(source):
  attempt = source.open(FIRST[bfcl_memory.REC_SUM])
  assert not _say(attempt, 'memory_update', text='a' * 9000).error
  for old in ('a', ''):
    heard = _say(attempt, 'memory_replace', old_text=old, new_text='b' * 9000)
    assert str(bfcl_backends.MAX_MEMORY) in heard.text
  assert not _say(attempt, 'memory_replace', old_text='a', new_text='bc').error
  assert len(attempt.record()['store']['memory']) == 18000
  attempt.close()


def test_the_last_words_are_judged(source):
  task = 'memory_kv_0-customer-0'
  for replies, reason in (
    ([benchmark.Reply(text="{'answer': 'Michael'}")], ''),
    ([benchmark.Reply(text='Michaela')], 'agentic:answer_not_found'),
    ([benchmark.Reply(text='')], 'agentic:no_last_message'),
    ([], 'agentic:no_last_message'),
  ):
    attempt = source.open(task)
    for reply in replies:
      assert not attempt.respond(reply)
    outcome = attempt.score()
    attempt.close()
    assert outcome.reason == reason
    assert outcome.parts['scenario'] == 'customer'
    assert not outcome.parts['stored'], 'the answer itself is no store'


def test_a_session_has_no_verdict(source):
  attempt = source.open(FIRST[bfcl_memory.KV])
  with pytest.raises(ValueError, match='is a session'):
    attempt.score()
  attempt.close()


def test_files_and_groups_are_in_the_benchmarks_terms(source, tmp_path):
  category = bfcl_memory.KV
  tasks = {category: _notes(source, category)[::9]}
  found = _measure(source, policies.Oracle(source), tmp_path / 'r', tasks)
  recorded = [
    benchmark.Recorded(
      task_id=one.task_id, trial=0, started='', seconds=0.0, value=one.record
    )
    for one in found
  ]
  source.write(tmp_path, 'oracle', recorded)
  (folder,) = tmp_path.glob('trial_0/*/agentic/memory/kv')
  lines = (folder / 'BFCL_v4_memory_kv_prereq_result.json').read_text()
  ids = [json.loads(line)['id'] for line in lines.splitlines()]
  assert ids == list(source.prerequisites(tasks[category][0]))
  stores = folder / 'memory_snapshot'
  final = (stores / 'notetaker_final.json').read_text()
  last = (stores / 'prereq_checkpoints' / f'{ids[-1]}.json').read_text()
  assert final == last and json.loads(final) == found[4].record['store']
  good = benchmark.Outcome(
    reward=1.0, success=True, parts={'scenario': 'notetaker'}
  )
  assert source.groups({category: [good]}, ()) == {'memory_kv.notetaker': 1}
  assert source.groups({category: [good, None]}, ()) == {}


def test_a_store_that_cannot_run_is_refused_with_its_reason(monkeypatch):
  there = bfcl_memory.importlib.util.find_spec
  lacks = lambda name: None if name == 'faiss' else there(name)
  monkeypatch.setattr(bfcl_memory.importlib.util, 'find_spec', lacks)
  with pytest.raises(errors.UserError, match='pip install .*faiss-cpu'):
    run.select(bfcl.Bfcl(), ['memory_vector'])
