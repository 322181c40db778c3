"""Means merge to the whole, and a killed run resumes to the same bytes."""

import json
import math

import numpy as np
import pytest

from envace_jax import metrics


def _lines(workdir, name='metrics.jsonl'):
  return (workdir / name).read_text().splitlines()


def _run(writer, steps):
  with writer:
    for step in steps:
      writer.write(step, {'rl/reward': step / 7, 'a': np.float32(0.1)})
      writer.write(step, {'eval/real_success': step / 3})
      writer.write_timings(step, {'seconds': 0.5 * step})


def test_parts_merge_to_the_mean_of_all():
  values = [(3.0, 2), (5.0, 1), (-1.0, 4), (8.0, 0)]
  whole = metrics.WeightedMean()
  parts = [metrics.WeightedMean() for _ in range(3)]
  for index, (value, weight) in enumerate(values):
    whole = whole.add(value, weight)
    parts[index % 3] = parts[index % 3].add(value, weight)
  merged = parts[0].merge(parts[1]).merge(parts[2])
  assert merged == whole
  assert merged.mean == pytest.approx((6 + 5 - 4) / 7)


def test_nothing_has_no_mean():
  assert metrics.WeightedMean().mean is None
  assert metrics.WeightedMean().add(3.0, 0).mean is None
  with pytest.raises(ValueError, match='negative'):
    metrics.WeightedMean().add(1.0, -1)


def test_lines_are_sorted_and_non_finite_values_are_null_and_counted(tmp_path):
  with metrics.Writer(tmp_path) as writer:
    writer.write(np.int64(0), {'z': 1, 'a': float('nan'), 'm': -math.inf})
    writer.write(1, {'z': np.float64(2), 'unmeasured': None})
    assert writer.non_finite == 2
  first, second = _lines(tmp_path)
  assert first == '{"a": null, "m": null, "non_finite": 2, "step": 0, "z": 1.0}'
  assert second == '{"step": 1, "unmeasured": null, "z": 2.0}'
  with metrics.Writer(tmp_path, resume_step=0) as writer:
    assert writer.non_finite == 2


@pytest.mark.parametrize(
  'bad', [{'step': 1.0}, {'a': 'text'}, {'a': np.zeros(2)}, {3: 1.0}]
)
def test_what_is_not_a_metric_is_refused_by_name(tmp_path, bad):
  with metrics.Writer(tmp_path, tensorboard=False) as writer:
    with pytest.raises(ValueError, match=str(next(iter(bad)))):
      writer.write(0, bad)
    assert not _lines(tmp_path)


@pytest.mark.parametrize('torn', ['', '{"step": 3, "rl/rew', '{"step"', '{"a'])
def test_resume_equals_the_unbroken_run(tmp_path, torn):
  whole, broken = tmp_path / 'whole', tmp_path / 'broken'
  _run(metrics.Writer(whole), range(6))
  _run(metrics.Writer(broken), range(4))  # saved at step 2, killed in step 4
  with (broken / 'metrics.jsonl').open('a') as file:
    file.write(torn)
  with (broken / 'timings.jsonl').open('a') as file:
    file.write(torn)
  _run(metrics.Writer(broken, resume_step=2), range(3, 6))
  for name in ('metrics.jsonl', 'timings.jsonl'):
    assert (broken / name).read_bytes() == (whole / name).read_bytes()
  assert not list(broken.glob('*.tmp'))


def test_resume_before_the_first_checkpoint_keeps_nothing(tmp_path):
  _run(metrics.Writer(tmp_path), range(3))
  metrics.Writer(tmp_path, resume_step=-1).close()
  assert not _lines(tmp_path)


def test_a_used_workdir_is_not_overwritten(tmp_path):
  _run(metrics.Writer(tmp_path), range(2))
  before = (tmp_path / 'metrics.jsonl').read_bytes()
  with pytest.raises(ValueError, match='already holds a run'):
    metrics.Writer(tmp_path)
  assert (tmp_path / 'metrics.jsonl').read_bytes() == before


def test_damage_in_the_middle_is_an_error_with_its_line(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  path.write_text('{"step": 0}\n{"step": \n{"step": 2}\n')
  with pytest.raises(ValueError, match='metrics.jsonl:2 '):
    metrics.read(path)


def test_reading_leaves_a_torn_last_line_out(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  path.write_bytes(b'{"step": 0}\n{"step": 1, "a": "\xff')
  assert metrics.read(path) == [{'step': 0}]
  assert metrics.read(tmp_path / 'absent.jsonl') == []


def test_an_inactive_writer_touches_nothing(tmp_path):
  _run(metrics.Writer(tmp_path / 'w', active=False), range(3))
  assert not (tmp_path / 'w').exists()


def test_every_line_is_on_disk_before_the_next(tmp_path):
  writer = metrics.Writer(tmp_path, tensorboard=False)
  for step in range(3):
    writer.write(step, {'a': step})
    assert json.loads(_lines(tmp_path)[-1]) == {'a': float(step), 'step': step}
  writer.close()


def test_event_files_hold_the_scalars_and_the_purge(tmp_path):
  from tensorboardX import proto

  _run(metrics.Writer(tmp_path), range(3))
  _run(metrics.Writer(tmp_path, resume_step=0), range(1, 3))
  files = sorted((tmp_path / 'tensorboard').iterdir())
  assert len(files) == 2  # a quick restart did not overwrite the first
  events = []
  for file in files:
    data = file.read_bytes()
    while data:
      size = int.from_bytes(data[:8], 'little')
      events.append(proto.event_pb2.Event.FromString(data[12 : 12 + size]))
      data = data[16 + size :]
  tags = {v.tag for e in events for v in e.summary.value}
  assert {'rl/reward', 'eval/real_success', 'seconds'} <= tags
  assert [e.step for e in events if e.HasField('session_log')] == [1]
