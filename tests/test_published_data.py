"""Published samples as a run's data: written, read, and what is lost."""

import contextlib
import json

from absl import logging
import published
import pytest

from envace_jax import build, data, errors, export
from envace_jax.envs.desk import environment as desk
from experiments import quickstart


def generated(**options):
  config = quickstart.get_config('smoke')
  config.data.num_train, config.data.num_dev, config.data.num_test = 12, 3, 3
  config.data.update(options)
  return config


def reading(folder, **options):
  files = str(folder / '{split}.jsonl')
  config = generated(**({'world': 'published', 'files': files} | options))
  config.rollout.prompt_tokens = 64  # few samples teach few words
  return config


@pytest.fixture(scope='module')
def exported(tmp_path_factory):
  folder = tmp_path_factory.mktemp('exported') / 'samples'
  assert export.run(generated(), str(folder)) == 0
  return folder


@pytest.fixture
def folder(exported, tmp_path):
  """A copy of the files that a test may change."""
  copy = tmp_path / 'samples'
  copy.mkdir()
  for file in exported.iterdir():
    (copy / file.name).write_bytes(file.read_bytes())
  return copy


def rows_of(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def write(path, rows):
  path.write_text(''.join(json.dumps(row) + '\n' for row in rows))


def change(path, row, edit):
  """Edits one sample of a file."""
  rows = rows_of(path)
  edit(rows[row])
  write(path, rows)


def weigh(sample):
  (turns,) = sample['extra_info']['interaction_kwargs']['checklist_list']
  turns[0][0]['weight'] += 1


def lengthen(sample):
  """Another user message, in the prompt as in the dialogue."""
  long = 'please ' * 200
  sample['messages'][-1]['content'] = long
  sample['extra_info']['messages'][0]['content'] = long


def test_exported_samples_are_the_tasks_and_their_desk(exported, tmp_path):
  assert [path.stem for path in sorted(exported.iterdir())] == sorted(
    data.SPLITS
  )
  made = data.prepare(generated(), tmp_path / 'made')
  read = data.prepare(reading(exported, strict=True), tmp_path / 'read')
  for split in data.SPLITS:
    for mine, theirs in zip(made.tasks[split], read.tasks[split], strict=True):
      assert (mine.id, mine.instruction) == (theirs.id, theirs.instruction)
      assert mine.evaluation == theirs.evaluation
      assert [c.check for c in mine.checklist] == [
        c.check for c in theirs.checklist
      ]
  # Every training task is demonstrated once, by its plan.
  assert [d.task_id for d in read.demonstrations] == [
    t.id for t in read.tasks['train']
  ]
  task, demonstration = read.tasks['train'][0], read.demonstrations[0]
  with contextlib.closing(read.make_environment()) as environment:
    assert isinstance(environment, desk.Desk)
    environment.reset(task)
    for step in demonstration.steps:
      assert environment.call(step.action).text == step.observation_text


def test_a_resampled_desk_is_found_again(tmp_path):
  export.run(generated(world='resampled'), str(tmp_path / 'samples'))
  config = reading(tmp_path / 'samples')
  read = data.prepare(config, tmp_path / 'run')
  for task, demonstration in zip(
    read.tasks['train'], read.demonstrations, strict=True
  ):
    with contextlib.closing(read.make_environment()) as environment:
      environment.reset(task)
      for step in demonstration.steps:
        assert environment.call(step.action).text == step.observation_text


def test_export_overwrites_nothing_and_makes_no_tasks_of_others(exported):
  with pytest.raises(errors.UserError, match=r'train\.jsonl.*--out'):
    export.run(generated(), str(exported))
  with pytest.raises(errors.UserError, match='published.*small'):
    export.run(reading(exported), str(exported / 'x'))


def test_what_is_lost_is_said_and_said_again(
  folder, tmp_path, caplog, monkeypatch
):
  monkeypatch.setattr(logging.get_absl_logger(), 'level', 20)
  monkeypatch.setattr(logging, 'set_verbosity', lambda level: None)
  train = folder / 'train.jsonl'
  change(train, 1, weigh)
  change(train, 2, lengthen)
  change(train, 4, lengthen)
  with train.open('a') as file:
    file.write('{\n')
  change(folder / 'dev.jsonl', 1, lambda s: s.pop('extra_info'))
  (tmp_path / 'run').mkdir()
  said = []
  for _ in range(2):
    caplog.clear()
    read = data.prepare(reading(folder), tmp_path / 'run')
    said.append([r.getMessage() for r in caplog.records if 'data: ' in r.msg])
    assert [len(read.tasks[s]) for s in data.SPLITS] == [10, 2, 3, 3]
    assert len(read.demonstrations) == 10
    for file in folder.iterdir():  # a restart needs the files no more
      file.unlink()
  assert said[0] == said[1] and len(said[0]) == 4
  dev_line, json_line, long_line, weights_line = said[0]
  assert 'train: 1 samples dropped (json)' in json_line
  assert 'train.jsonl line 13: ' in json_line
  assert 'train: 2 samples dropped (overlong)' in long_line
  assert 'train.jsonl line 3: ' in long_line
  assert 'more than rollout.prompt_tokens=64' in long_line
  assert 'train: 1 samples repaired (weights)' in weights_line
  assert 'line 2: ' in weights_line and 'weights sum to 2' in weights_line
  assert 'dev: 1 samples dropped (schema)' in dev_line
  report = json.loads((tmp_path / 'run' / 'data' / 'samples.json').read_text())
  assert report['train']['dropped'] == {'json': 1, 'overlong': 2}
  assert report['dev']['samples'] == 2


@pytest.mark.parametrize(
  'edit, words',
  [
    (lambda s: s.pop('extra_info'), r'sample: .*extra_info'),
    (weigh, r'checklist_list\[0\]\[0\]: weights sum to 2'),
    (lengthen, r'sample: \d+ tokens are more than rollout\.prompt_tokens=64'),
  ],
  ids=['schema', 'weights', 'overlong'],
)
def test_strict_names_file_row_and_field(folder, tmp_path, edit, words):
  change(folder / 'train.jsonl', 2, edit)
  with pytest.raises(
    errors.UserError, match=rf'train\.jsonl line 3: .*{words}'
  ):
    data.prepare(reading(folder, strict=True), tmp_path / 'run')


def test_rehearses_own_prompt_must_fit_too(exported, tmp_path):
  config = reading(exported, strict=True)
  config.prompt.rehearse.instructions = 'Answer as the desk would. ' * 30
  data.prepare(config, tmp_path / 'joint')  # nobody reads it there
  config.rollout.view = 'split'
  with pytest.raises(errors.UserError, match='rehearse_prompt_tokens=96'):
    data.prepare(config, tmp_path / 'split')


def test_several_files_are_one_split(folder, tmp_path):
  whole = data.prepare(reading(folder), tmp_path / 'whole')
  rows = rows_of(folder / 'train.jsonl')
  (folder / 'train.jsonl').unlink()
  write(folder / 'train-b.jsonl', rows[5:])
  write(folder / 'train-a.jsonl', rows[:5])
  for split in data.SPLITS[1:]:
    (folder / f'{split}.jsonl').rename(folder / f'{split}-0.jsonl')
  files = str(folder / '{split}-*.jsonl')
  parts = data.prepare(reading(folder, files=files), tmp_path / 'parts')
  assert parts.tasks == whole.tasks
  assert parts.demonstrations == whole.demonstrations


def test_a_split_without_files_or_samples_is_named(folder, tmp_path):
  write(folder / 'dev.jsonl', [{}, {}])
  with pytest.raises(errors.UserError, match=r'no dev sample.*2 dropped.*line'):
    data.prepare(reading(folder), tmp_path / 'run')
  (folder / 'dev.jsonl').write_text('')
  with pytest.raises(errors.UserError, match='no dev sample.*are empty'):
    data.prepare(reading(folder), tmp_path / 'run')
  (folder / 'dev.jsonl').unlink()
  with pytest.raises(errors.UserError, match=r'no file .*dev\.jsonl'):
    data.prepare(reading(folder), tmp_path / 'run')
  nowhere = reading(tmp_path / 'nowhere')
  with pytest.raises(errors.UserError, match='no file .*nowhere'):
    data.prepare(nowhere, tmp_path / 'run')


def test_a_task_in_two_splits_is_an_error(folder, tmp_path):
  write(folder / 'dev.jsonl', rows_of(folder / 'train.jsonl')[:2])
  with pytest.raises(errors.UserError, match='was used by'):
    data.prepare(reading(folder), tmp_path / 'run')


def test_foreign_samples_have_no_environment(folder, tmp_path, caplog):
  for split in data.SPLITS:
    samples = [
      {**published.sample(f'{split}-{i}'), 'data_source': 'houses'}
      for i in range(3)
    ]
    write(folder / f'{split}.jsonl', samples)
  config = reading(folder)
  config.rollout.prompt_tokens = 80
  with caplog.at_level('WARNING'):
    read = data.prepare(config, tmp_path / 'run')
  assert read.make_environment is None
  assert caplog.text.count('where it can be executed') == 1
  assert read.tasks['dev'][0].user_turns
  config.rollout.mode, config.rollout.world = 'host', 'real'
  with pytest.raises(errors.UserError, match="world='rehearsal'"):
    build.Setup(config, tmp_path / 'run')


def test_a_reference_to_another_desk_is_named(folder, tmp_path):
  def shrink(sample):
    execution = json.loads(sample['extra_info']['execution'])
    execution['environment']['desk']['num_users'] = size
    sample['extra_info']['execution'] = json.dumps(execution)

  size = 999
  change(folder / 'dev.jsonl', 1, shrink)
  with pytest.raises(errors.UserError, match='task .*num_users=999'):
    data.prepare(reading(folder), tmp_path / 'a')
  size = 20
  change(folder / 'dev.jsonl', 1, shrink)
  with pytest.raises(errors.UserError, match='one desk'):
    data.prepare(reading(folder), tmp_path / 'b')
