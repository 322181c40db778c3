"""A run's data: made once, read again, or the user's own."""

import contextlib
import dataclasses
import pathlib

import pytest

from envace_jax import data, errors, refusals
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
    write(folder / f'my.{split}.jsonl', tasks)
  write(folder / 'my.demonstrations.jsonl', made.demonstrations)
  return {'world': 'jsonl', 'files': str(folder / 'my.{split}.jsonl')}


def copied(jsonl, folder):
  """The user's files in another folder, and the options that name them."""
  folder.mkdir()
  for file in pathlib.Path(jsonl['files']).parent.iterdir():
    (folder / file.name).write_bytes(file.read_bytes())
  return jsonl | {'files': str(folder / 'my.{split}.jsonl')}


def write(path, items):
  path.write_text(''.join(records.to_json(item) + '\n' for item in items))


def assert_same(left, right):
  assert left.tasks == right.tasks
  assert left.demonstrations == right.demonstrations
  text = left.demonstrations[0].instruction
  assert left.words.tokenizer.encode(text) == right.words.tokenizer.encode(text)
  assert left.words.tokenizer.vocab_size == right.words.tokenizer.vocab_size


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
  assert read.words.tokenizer.decode(read.words.tokenizer.encode(text)) == text


def test_changed_files_are_noticed(prepared, jsonl, tmp_path):
  folder = tmp_path / 'mine'
  config = tiny(**copied(jsonl, folder))
  data.prepare(config, tmp_path / 'run')
  tasks = prepared[0].tasks['dev']
  write(folder / 'my.dev.jsonl', [dataclasses.replace(tasks[0], id='new')])
  try:
    again = data.prepare(config, tmp_path / 'run')
  except errors.UserError:
    return  # refused: as good
  assert [task.id for task in again.tasks['dev']] == ['new']


@pytest.mark.parametrize(
  'options, words',
  [
    ({'world': 'mars'}, ['mars', 'resampled']),
    ({'world': 'jsonl', 'files': 'tasks.jsonl'}, ['jsonl', '{split}']),
    ({'world': 'published', 'files': ''}, ['published', '{split}']),
    ({'world': 'published', 'files': '{split}.json'}, ["memory='written'"]),
  ],
  ids=str,
)
def test_wrong_options_are_one_sentence(options, words):
  refusals.validate(tiny())
  config = tiny(**options, reflections=0.1)
  config.private.memory = 'written'
  with pytest.raises(errors.UserError) as caught:
    refusals.validate(config)
  assert all(word in str(caught.value) for word in words)


def test_a_missing_file_is_named(jsonl, tmp_path):
  folder = tmp_path / 'mine'
  options = copied(jsonl, folder)
  (folder / 'my.demonstrations.jsonl').unlink()
  with pytest.raises(errors.UserError, match=r'my\.demonstrations\.jsonl'):
    data.prepare(tiny(**options), tmp_path / 'run')


def test_a_broken_line_is_named(jsonl, tmp_path):
  options = copied(jsonl, tmp_path / 'mine')
  bad = tmp_path / 'mine' / 'my.demonstrations.jsonl'
  good = bad.read_text().splitlines()
  bad.write_text('\n'.join([good[0], good[1].replace('"steps"', '"stpes"')]))
  with pytest.raises(
    errors.UserError, match=r"demonstrations\.jsonl line 2.*'steps'"
  ):
    data.prepare(tiny(**options), tmp_path / 'run')


def test_an_empty_file_is_named(jsonl, tmp_path):
  options = copied(jsonl, tmp_path / 'mine')
  (tmp_path / 'mine' / 'my.demonstrations.jsonl').write_text('\n\n')
  with pytest.raises(errors.UserError, match="'demonstrations'.*empty"):
    data.prepare(tiny(**options), tmp_path / 'run')


def test_a_checklist_that_cannot_score_is_named(prepared, jsonl, tmp_path):
  task = prepared[0].tasks['dev'][0]
  wrong = dataclasses.replace(task.checklist[0], check={'kind': 'guessed'})
  options = copied(jsonl, tmp_path / 'mine')
  write(
    tmp_path / 'mine' / 'my.dev.jsonl',
    [dataclasses.replace(task, checklist=(wrong,))],
  )
  with pytest.raises(errors.UserError) as caught:
    data.prepare(tiny(**options), tmp_path / 'run')
  assert task.id in str(caught.value) and 'guessed' in str(caught.value)


def everywhere(jsonl, folder, environment_of):
  """The user's tasks with other environments; the options that name them."""
  options = copied(jsonl, folder)
  for split in data.SPLITS:
    path = folder / f'my.{split}.jsonl'
    write(
      path,
      [
        dataclasses.replace(task, environment=environment_of(task, split))
        for task in records.read_jsonl(path)
      ],
    )
  return options


def test_tasks_without_an_environment_have_none(jsonl, tmp_path, caplog):
  options = everywhere(jsonl, tmp_path / 'mine', lambda task, split: {})
  with caplog.at_level('WARNING'):
    made = data.prepare(tiny(**options), tmp_path / 'run')
  assert made.make_environment is None
  assert caplog.text.count('where it can be executed') == 1


@pytest.mark.parametrize(
  'environment_of, words',
  [
    (lambda task, split: task.environment if split == 'dev' else {}, 'nothing'),
    (lambda task, split: {'name': 'mars', 'seed': 0}, "'mars'.*leave it out"),
    (lambda task, split: {'name': 'desk'}, 'seed None.*leave it out'),
  ],
  ids=['some', 'unknown', 'no seed'],
)
def test_an_environment_that_cannot_be_is_named(
  jsonl, tmp_path, environment_of, words
):
  options = everywhere(jsonl, tmp_path / 'mine', environment_of)
  with pytest.raises(errors.UserError, match=f'task .*{words}'):
    data.prepare(tiny(**options), tmp_path / 'run')


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
