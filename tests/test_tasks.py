"""Records survive JSON and disk, hostile files are named, order is pure."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import hypothesis
from hypothesis import strategies as st
import jsonschema
import numpy as np
import pytest

from envace_jax import errors, types
from envace_jax.tasks import dataset, records
from envace_jax.tasks import order as orders

TOOL = {
  'type': 'function',
  'function': {'name': 'get', 'parameters': {'type': 'object'}},
}


def make_task(name: str, **fields) -> types.Task:
  criterion = types.Criterion(
    id='c',
    question='Sent?',
    check={'kind': 'replied', 'contains': ['sent']},
    weight=2.0,
    failure_examples=('no', 'ñ\u2028'),
  )
  base = types.Task(
    id=name,
    instruction='Is it "sent"?\n',
    tools=(TOOL,),
    checklist=(criterion, dataclasses.replace(criterion, id='d')),
    environment={'seed': 2**70, 'nested': [{'a': [1.5, None, True]}]},
    plan=(types.ToolCall(name='get', arguments={'id': 'O1'}),),
    user_turns=('thanks',),
    system='Be brief.',
    records=(
      types.Record(
        call=types.ToolCall(name='get', arguments={'id': 'O1'}),
        observation_text='{}',
      ),
    ),
  )
  return dataclasses.replace(base, **fields)


def make_demonstration(name: str) -> types.Demonstration:
  call = types.ToolCall(name='get', arguments={'id': 'O1'})
  slip = types.ParseError(kind='not_json', detail='{')
  return types.Demonstration(
    task_id=name,
    instruction='Is it sent?',
    steps=(
      types.Step(action=call, action_text='a', observation_text='{}'),
      types.Step(
        action=slip,
        action_text='{',
        observation_text='{"error": "x"}',
        author=types.Author.REHEARSE,
        turn=1,
        message=2,
      ),
    ),
    system='Be brief.',
    user_turns=('And now?',),
    turn_replies=('no',),
    reply='sent',
  )


JSON = st.recursive(
  st.none()
  | st.booleans()
  | st.integers()
  | st.floats(allow_nan=False, allow_infinity=False)
  | st.text(),  # hypothesis' text holds no surrogates
  lambda inner: (
    st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
  ),
  max_leaves=8,
)


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(
  free=st.dictionaries(st.text(), JSON, max_size=3),
  text=st.text(min_size=1),
)
def test_json_is_lossless(free, text):
  task = make_task(text, instruction=text, environment=free)
  assert records.from_json(records.to_json(task)) == task
  demo = dataclasses.replace(make_demonstration(text), notes=text)
  again = records.from_json(records.to_json(demo))
  assert again == demo
  assert isinstance(again.steps[1].author, types.Author)


def test_defaults_of_absent_fields_are_those_of_types():
  text = json.dumps(
    {
      'kind': 'task',
      'id': 't',
      'instruction': 'x',
      'tools': [],
      'checklist': [{'id': 'c', 'question': '', 'check': {}, 'weight': 1}],
    }
  )
  criterion = types.Criterion(id='c', question='', check={})
  expected = types.Task(
    id='t', instruction='x', tools=(), checklist=(criterion,)
  )
  assert records.from_json(text) == expected
  assert type(records.from_json(text).checklist[0].weight) is float


@pytest.mark.parametrize('kind', sorted(records.SCHEMAS))
def test_schema_is_a_schema_and_covers_every_field(kind):
  jsonschema.Draft202012Validator.check_schema(records.SCHEMAS[kind])
  cls = {'task': types.Task, 'demonstration': types.Demonstration}[kind]
  fields = {field.name for field in dataclasses.fields(cls)}
  assert set(records.SCHEMAS[kind]['properties']) == fields | {'kind'}
  criterion = records.SCHEMAS['task']['properties']['checklist']['items']
  assert set(criterion['properties']) == {
    field.name for field in dataclasses.fields(types.Criterion)
  }


@pytest.mark.parametrize(
  'fields, message',
  [
    ({'environment': {'x': [float('nan')]}}, r'environment\.x\[0\]: nan'),
    ({'environment': {1: 2}}, 'environment: key 1 is not a string'),
    ({'environment': {'x': np.int64(1)}}, 'environment.x: int64 has no JSON'),
    ({'instruction': 'a\ud800'}, 'instruction: lone surrogate'),
    ({'instruction': ''}, 'instruction: '),
    ({'user_turns': (3,)}, r'user_turns\[0\]: 3 is not of type'),
    ({'tools': ({'name': 'bare'},)}, r'tools\[0\]: '),
  ],
)
def test_to_json_names_record_and_field(fields, message):
  with pytest.raises(errors.UserError, match=f"task 't7': {message}"):
    records.to_json(make_task('t7', **fields))


def test_repeated_criterion_ids_are_refused():
  task = make_task('t')
  with pytest.raises(errors.UserError, match=r"checklist: criterion ids \['c'"):
    records.to_json(make_task('t', checklist=(task.checklist[0],) * 2))


# Each spoils line 3 of a file whose lines 1 and 4 are good and 2 is blank.
def _spoil(**fields):
  return json.dumps({**json.loads(records.to_json(make_task('bad'))), **fields})


def _without(field):
  value = json.loads(records.to_json(make_task('bad')))
  del value[field]
  return json.dumps(value)


HOSTILE = {
  'wrong type': (_spoil(tools='get'), r"task 'bad': tools: 'get' is not of"),
  'missing': (_without('checklist'), "'checklist' is a required property"),
  'unknown': (_spoil(chekclist=[]), "'chekclist' was unexpected"),
  'kind': (_spoil(kind='tusk'), 'kind in'),
  'kind type': (_spoil(kind=['task']), 'kind in'),
  'no object': ('[1, 2]', 'an object with kind in'),
  'surrogate': (_spoil(family='\udc00'), "'bad': family: lone surrogate"),
  'surrogate key': (_spoil(environment={'\udc00': 1}), 'lone surrogate'),
  'nan': (_spoil(environment={'a': float('nan')}), 'NaN is not a finite'),
  'huge float': (_spoil().replace('"c"', '1e999', 1), '1e999 is not a finite'),
  'huge int': (
    _spoil(environment={'a': 1}).replace(': 1}', ': ' + '9' * 5000 + '}'),
    'digits',
  ),
  'garbage': (_spoil() + ' x', 'Extra data'),
  'two records': (_spoil() + _spoil(), 'Extra data'),
  'cut': (_spoil()[:-5], 'line 3: '),
  'repeated key': ('{"kind": "task", "kind": "task"}', 'repeats a key'),
  'deep': ('[' * 100_000, 'nested too deeply'),
  'duplicate id': (_spoil(id='good'), "task id 'good' was used by .* line 1"),
  'huge weight': (
    _spoil(
      checklist=[{'id': 'c', 'question': '', 'check': {}, 'weight': 10**400}]
    ),
    r'checklist\[0\]\.weight',
  ),
}


@pytest.mark.parametrize('name', sorted(HOSTILE))
def test_hostile_line_is_named(tmp_path, name):
  line, message = HOSTILE[name]
  good = records.to_json(make_task('good'))
  last = records.to_json(make_task('last'))
  path = tmp_path / 'user.jsonl'
  path.write_text(f'{good}\n  \n{line}\n{last}\n', encoding='utf-8')
  with pytest.raises(errors.UserError, match=message) as error:
    dataset.write_dataset_from_jsonl(tmp_path / 'd', 'mine', {'train': path})
  assert f'{path} line 3' in str(error.value)
  assert len(str(error.value)) < 1000
  assert not (tmp_path / 'd').exists()


def test_forgiven_files(tmp_path):
  """BOM, CRLF, blank lines, no last newline, U+2028 inside a string."""
  given = [make_task('a'), make_demonstration('b'), make_task('c')]
  lines = '\r\n\r\n'.join(map(records.to_json, given))
  path = tmp_path / 'user.jsonl'
  path.write_bytes(b'\xef\xbb\xbf' + lines.encode('utf-8'))
  assert records.read_jsonl(path) == given


@pytest.mark.parametrize('content', [b'\xff\xfe{\x00', b'{"a": "\xe9"}'])
def test_other_encodings_are_refused(tmp_path, content):
  path = tmp_path / 'user.jsonl'
  path.write_bytes(content)
  with pytest.raises(errors.UserError, match='line 1: not UTF-8'):
    records.read_jsonl(path)


def test_missing_file_is_a_user_error(tmp_path):
  with pytest.raises(errors.UserError, match='cannot read'):
    records.read_jsonl(tmp_path / 'none.jsonl')


SPLITS = {
  # More than ten, and ids whose sorted order is another.
  'train': [make_task(f't{i * 7 % 23}') for i in range(23)],
  'test_iid': [make_task(f'u{i}') for i in range(3)],
  'demonstrations': [make_demonstration('t1'), make_demonstration('t1')],
}


def _files(directory):
  return {p.name: p.read_bytes() for p in pathlib.Path(directory).iterdir()}


def test_dataset_keeps_the_order_given_and_is_deterministic(tmp_path):
  first = dataset.write_dataset(tmp_path / 'a', 'mine', SPLITS)
  for split, given in SPLITS.items():
    read = dataset.Records(first, split)
    assert list(read) == given
    assert read[len(given) - 1] == read[-1] == given[-1]
    assert read[np.int64(1)] == given[1]
    with pytest.raises(IndexError):
      read[len(given)]
  with pytest.raises(errors.UserError, match="no split 'dev', only"):
    dataset.Records(first, 'dev')
  second = dataset.write_dataset(tmp_path / 'b', 'mine', SPLITS)
  assert _files(first) == _files(second)


def test_order_holds_over_several_shards(tmp_path, monkeypatch):
  """TFDS cuts large splits into files; here small ones are cut."""
  prepare = dataset.TaskDataset.download_and_prepare

  def in_three_files(self):
    config = dataset.tfds.download.DownloadConfig(num_shards=3)
    prepare(self, download_config=config)

  monkeypatch.setattr(
    dataset.TaskDataset, 'download_and_prepare', in_three_files
  )
  directory = dataset.write_dataset(
    tmp_path, 'mine', {'train': SPLITS['train']}
  )
  assert len(list(pathlib.Path(directory).glob('*array_record*'))) == 3
  assert list(dataset.Records(directory, 'train')) == SPLITS['train']


def test_equal_dataset_is_reused_and_another_refused(tmp_path):
  directory = dataset.write_dataset(tmp_path, 'mine', SPLITS)
  stamps = {p: p.stat().st_mtime_ns for p in pathlib.Path(directory).iterdir()}
  assert dataset.write_dataset(tmp_path, 'mine', SPLITS) == directory
  assert stamps == {p: p.stat().st_mtime_ns for p in stamps}
  swapped = {**SPLITS, 'train': SPLITS['train'][::-1]}
  with pytest.raises(errors.UserError, match='delete that directory, or'):
    dataset.write_dataset(tmp_path, 'mine', swapped)
  assert list(dataset.Records(directory, 'train')) == SPLITS['train']


@pytest.mark.parametrize('damage', ['info', 'shard', 'cut shard', 'metadata'])
def test_half_written_dataset_is_rebuilt(tmp_path, damage):
  directory = pathlib.Path(dataset.write_dataset(tmp_path, 'mine', SPLITS))
  whole = _files(directory)
  shard = next(directory.glob('mine-train*'))
  if damage == 'info':
    (directory / 'dataset_info.json').unlink()
  elif damage == 'shard':
    shard.unlink()
  elif damage == 'cut shard':
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
  else:
    (directory / 'metadata.json').write_text('{')
  dataset.write_dataset(tmp_path, 'mine', SPLITS)
  assert _files(directory) == whole


def test_foreign_files_are_not_deleted(tmp_path):
  foreign = tmp_path / 'mine' / '1.0.0' / 'thesis.txt'
  foreign.parent.mkdir(parents=True)
  foreign.write_text('years of work')
  with pytest.raises(errors.UserError, match='thesis.txt'):
    dataset.write_dataset(tmp_path, 'mine', SPLITS)
  assert foreign.read_text() == 'years of work'


@pytest.mark.parametrize(
  'name, splits, message',
  [
    ('mine', {'train': SPLITS['train'], 'dev': []}, "split 'dev' .* is empty"),
    ('mine', {}, 'no splits'),
    ('Mine', SPLITS, 'name'),
    ('../x', SPLITS, 'name'),
    ('mine', {'all': SPLITS['train']}, 'name'),
    (
      'mine',
      {'train': SPLITS['train'], 'test': [make_task('t5')]},
      r"mine/test\[0\]: task id 't5' was used by mine/train\[",
    ),
  ],
)
def test_impossible_datasets(tmp_path, name, splits, message):
  with pytest.raises(errors.UserError, match=message):
    dataset.write_dataset(tmp_path, name, splits)


def test_silent_and_without_tensorflow_or_jax(tmp_path):
  """Writing and reading, in a process that says what it has imported."""
  path = tmp_path / 'user.jsonl'
  path.write_text('\n'.join(map(records.to_json, SPLITS['train'])))
  program = f"""
import sys
from absl import logging
from envace_jax.tasks import dataset
logging.set_verbosity(logging.INFO)
where, splits = {str(tmp_path)!r}, {{'a': {str(path)!r}}}
d = dataset.write_dataset_from_jsonl(where, 'mine', splits)
assert dataset.write_dataset_from_jsonl(where, 'mine', splits) == d
ids = [record.id for record in dataset.Records(d, 'a')]
logging.set_verbosity(logging.WARNING)
import tensorflow_datasets as tfds
raw = tfds.builder_from_directory(d).as_data_source('a')
assert [row['id'].decode() for row in raw] == ids and len(ids) == 23
sys.exit(' '.join({{'tensorflow', 'jax', 'torch'}} & set(sys.modules)) or 0)
"""
  done = subprocess.run(
    [sys.executable, '-c', program],
    capture_output=True,
    text=True,
    cwd=pathlib.Path(__file__).parent.parent,
  )
  assert (done.returncode, done.stdout, done.stderr) == (0, '', '')


@pytest.mark.parametrize('n', [1, 2, 7, 40])
def test_every_epoch_is_a_permutation_and_epochs_differ(n):
  order = orders.Order(n, seed=5)
  epochs = order.batch_indices(0, 6 * n).reshape(6, n)
  assert (np.sort(epochs, 1) == np.arange(n)).all()
  if n >= 7:
    assert len({tuple(epoch) for epoch in epochs}) == 6
    other = orders.Order(n, seed=6).batch_indices(0, 6 * n)
    # Neighbouring seeds are not each other's epochs, shifted.
    assert not (other[: 5 * n].reshape(5, n) == epochs[1:]).all(1).any()


def test_order_is_pinned():
  """Changing it breaks the resume of every run on disk."""
  found = orders.Order(7, seed=3).batch_indices(0, 14)
  assert found.tolist() == GOLDEN


@hypothesis.settings(deadline=None, max_examples=25)
@hypothesis.given(
  n=st.integers(1, 12),
  cursor=st.integers(0, 10**6),
  local=st.integers(1, 5),
  processes=st.integers(1, 4),
)
def test_restart_and_sharding_equal_the_unbroken_order(
  n, cursor, local, processes
):
  order, size = orders.Order(n, seed=1), local * processes
  unbroken = order.batch_indices(cursor, 3 * size)
  resumed = orders.Order(n, seed=1).batch_indices(cursor + size, size)
  assert resumed.tolist() == unbroken[size : 2 * size].tolist()
  shards = [
    order.batch_indices(cursor, size, process=p, num_processes=processes)
    for p in range(processes)
  ]
  assert np.concatenate(shards).tolist() == unbroken[:size].tolist()


def test_group_batches_resume_and_number_rows_globally():
  order = orders.Order(5, seed=0)
  batches = order.group_batches(2, groups=4, group_size=3)
  first, second = next(batches), next(batches)
  assert (
    first.records.tolist() == np.repeat(order.batch_indices(2, 4), 3).tolist()
  )
  assert first.groups.tolist() == np.repeat(np.arange(4), 3).tolist()
  assert first.next_cursor == 6
  again = next(order.group_batches(6, groups=4, group_size=3))
  assert again.records.tolist() == second.records.tolist()
  halves = [
    next(
      order.group_batches(2, groups=4, group_size=3, process=p, num_processes=2)
    )
    for p in range(2)
  ]
  for field in ('records', 'groups', 'sample_indices'):
    joined = np.concatenate([getattr(half, field) for half in halves])
    assert joined.tolist() == getattr(first, field).tolist()
  assert first.sample_indices.tolist() == list(range(12))
  assert {half.next_cursor for half in halves} == {first.next_cursor}


@pytest.mark.parametrize(
  'call',
  [
    lambda: orders.Order(0, 1),
    lambda: orders.Order(3, -1),
    lambda: orders.Order(3, 1).batch_indices(-1, 2),
    lambda: orders.Order(3, 1).batch_indices(0, 3, num_processes=2),
    lambda: orders.Order(3, 1).batch_indices(0, 2, process=2, num_processes=2),
    lambda: next(orders.Order(3, 1).group_batches(0, groups=2, group_size=0)),
  ],
)
def test_impossible_orders(call):
  with pytest.raises(ValueError):
    call()


GOLDEN = [4, 6, 0, 2, 5, 3, 1, 2, 1, 3, 4, 6, 0, 5]
