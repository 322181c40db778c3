"""A run's data: made once, read again, or the user's own."""

import contextlib
import dataclasses
import pathlib

import pytest

from envace_jax import data, errors
from envace_jax.tasks import records
from experiments import quickstart

ROOT = pathlib.Path(__file__).parent.parent


def tiny(**options):
  config = quickstart.get_config('smoke')
  config.data.num_train, config.data.num_dev, config.data.num_test = 24, 6, 6
  config.data.num_demonstrations = 60
  config.data.update(options)
  return config


@pytest.fixture(scope='module')
def prepared(tmp_path_factory):
  """(data, workdir) as a run finds them the first time."""
  workdir = tmp_path_factory.mktemp('run')
  return data.prepare(tiny(), workdir), workdir


@pytest.fixture(scope='module')
def jsonl(prepared, tmp_path_factory):
  """The same records as a user's files; the options that name them."""
  made, _ = prepared
  folder = tmp_path_factory.mktemp('mine')
  for split, tasks in made.tasks.items():
    write(folder / f'tasks.{split}.jsonl', tasks)
  write(folder / 'demonstrations.jsonl', made.demonstrations)
  return {
    'world': 'jsonl',
    'jsonl_tasks': str(folder / 'tasks.{split}.jsonl'),
    'jsonl_demonstrations': str(folder / 'demonstrations.jsonl'),
  }


def write(path, items):
  path.write_text(''.join(records.to_json(item) + '\n' for item in items))


def assert_same(left, right):
  assert left.tasks == right.tasks
  assert left.demonstrations == right.demonstrations
  text = left.demonstrations[0].instruction
  assert left.tokenizer.encode(text) == right.tokenizer.encode(text)
  assert left.tokenizer.vocab_size == right.tokenizer.vocab_size


def test_a_restart_reads_what_was_written(prepared):
  made, workdir = prepared
  before = {p: p.read_bytes() for p in workdir.rglob('*') if p.is_file()}
  again = data.prepare(tiny(), workdir)
  assert_same(made, again)
  assert before == {
    p: p.read_bytes() for p in workdir.rglob('*') if p.is_file()
  }


def test_another_workdir_gets_the_same_data(prepared, tmp_path):
  assert_same(prepared[0], data.prepare(tiny(), tmp_path))


def test_the_runs_seed_does_not_change_the_data(prepared, tmp_path):
  config = tiny()
  config.seed = 7
  assert_same(prepared[0], data.prepare(config, tmp_path))


def test_records_ground_training_tasks_alone(prepared, tmp_path):
  grounded = data.prepare(tiny(records=True), tmp_path)
  with contextlib.closing(grounded.make_environment()) as environment:
    for task, plain in zip(
      grounded.tasks['train'], prepared[0].tasks['train'], strict=True
    ):
      assert dataclasses.replace(task, records=()) == plain
      assert [record.call for record in task.records] == [*task.plan]
      environment.reset(task)
      for record in task.records:
        assert environment.call(record.call).text == record.observation_text
  assert not any(
    task.records
    for split in ('dev', 'test_iid', 'test_ood')
    for task in grounded.tasks[split]
  )


def test_splits_share_no_task(prepared):
  ids = [task.id for split in prepared[0].tasks.values() for task in split]
  assert len(ids) == len(set(ids)) == 24 + 6 + 6 + 6


def test_users_files_give_the_same_tasks(prepared, jsonl, tmp_path):
  config = tiny(**jsonl)
  read = data.prepare(config, tmp_path)
  assert read.tasks == prepared[0].tasks
  assert read.demonstrations == prepared[0].demonstrations
  assert data.prepare(config, tmp_path).tasks == read.tasks
  # The words come from the user's demonstrations alone.
  text = read.demonstrations[3].instruction
  assert read.tokenizer.decode(read.tokenizer.encode(text)) == text


def test_changed_files_are_noticed(prepared, jsonl, tmp_path):
  folder = tmp_path / 'mine'
  folder.mkdir()
  for file in pathlib.Path(jsonl['jsonl_tasks']).parent.iterdir():
    (folder / file.name).write_bytes(file.read_bytes())
  config = tiny(
    world='jsonl',
    jsonl_tasks=str(folder / 'tasks.{split}.jsonl'),
    jsonl_demonstrations=str(folder / 'demonstrations.jsonl'),
  )
  data.prepare(config, tmp_path / 'run')
  tasks = prepared[0].tasks['dev']
  write(folder / 'tasks.dev.jsonl', [dataclasses.replace(tasks[0], id='new')])
  try:
    again = data.prepare(config, tmp_path / 'run')
  except errors.UserError:
    return  # refused: as good
  assert [task.id for task in again.tasks['dev']] == ['new']


@pytest.mark.parametrize(
  'change, words',
  [
    ({'world': 'mars'}, ['mars', 'resampled']),
    ({'jsonl_tasks': 'tasks.jsonl'}, ['{split}']),
    ({'jsonl_demonstrations': ''}, ['jsonl_demonstrations']),
    ({'jsonl_demonstrations': '/nowhere/x.jsonl'}, ['/nowhere/x.jsonl']),
  ],
  ids=lambda value: str(value)[:30],
)
def test_wrong_options_are_one_sentence(jsonl, tmp_path, change, words):
  with pytest.raises(errors.UserError) as caught:
    data.prepare(tiny(**(jsonl | change)), tmp_path)
  assert all(word in str(caught.value) for word in words)


def test_a_broken_line_is_named(jsonl, tmp_path):
  bad = tmp_path / 'bad.jsonl'
  good = pathlib.Path(jsonl['jsonl_demonstrations']).read_text().splitlines()
  bad.write_text('\n'.join([good[0], good[1].replace('"steps"', '"stpes"')]))
  options = jsonl | {'jsonl_demonstrations': str(bad)}
  with pytest.raises(errors.UserError, match=r"bad\.jsonl line 2.*'steps'"):
    data.prepare(tiny(**options), tmp_path / 'run')


def test_an_empty_file_is_named(jsonl, tmp_path):
  empty = tmp_path / 'none.jsonl'
  empty.write_text('\n\n')
  options = jsonl | {'jsonl_demonstrations': str(empty)}
  with pytest.raises(errors.UserError, match="'demonstrations'.*empty"):
    data.prepare(tiny(**options), tmp_path / 'run')


def test_a_checklist_that_cannot_score_is_named(prepared, jsonl, tmp_path):
  task = prepared[0].tasks['dev'][0]
  wrong = dataclasses.replace(task.checklist[0], check={'kind': 'guessed'})
  folder = tmp_path / 'mine'
  folder.mkdir()
  for split, tasks in prepared[0].tasks.items():
    write(folder / f'tasks.{split}.jsonl', tasks)
  write(
    folder / 'tasks.dev.jsonl', [dataclasses.replace(task, checklist=(wrong,))]
  )
  options = jsonl | {'jsonl_tasks': str(folder / 'tasks.{split}.jsonl')}
  with pytest.raises(errors.UserError) as caught:
    data.prepare(tiny(**options), tmp_path / 'run')
  assert task.id in str(caught.value) and 'guessed' in str(caught.value)


def test_overlong_demonstrations_are_left_out_whole(prepared):
  made, _ = prepared
  lengths = sorted(len(ids) for ids, _ in data.rows(made, 10_000, None))
  middle = lengths[len(lengths) // 2]
  kept = data.rows(made, middle, None)
  assert sorted(len(ids) for ids, _ in kept) == [
    n for n in lengths if n <= middle
  ]
  with pytest.raises(errors.UserError, match=f'shortest\\s+has {lengths[0]}'):
    data.rows(made, 5, None)
