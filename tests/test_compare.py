"""Arms, seeds and tasks are paired as the docstring says."""

import json

import pytest

from envace_jax import compare, errors


def write_run(root, name, seed, before, after, **options):
  workdir = root / name
  (workdir / 'evaluations').mkdir(parents=True)
  config = {'seed': seed, 'warm_start': {'workdir': ''}, 'rl': options}
  (workdir / 'config.json').write_text(json.dumps(config))
  for phase, values in (('warm_start', before), ('after', after)):
    rows = [[f't{i}', v] for i, v in enumerate(values)]
    tables = {table: rows for table in compare.TABLES}
    (workdir / 'evaluations' / f'{phase}.json').write_text(
      json.dumps({'outcomes': tables})
    )


def records_of(root, capsys):
  assert compare.run(str(root)) == 0
  printed = capsys.readouterr().out
  return json.loads(printed[printed.index('\n[\n') :])


def test_differences_are_paired_by_task_and_seed(tmp_path, capsys):
  for seed in range(3):
    write_run(
      tmp_path, f'a{seed}', seed, [0, 0, 1, 1], [1, 1, 1, seed > 0], world='a'
    )
    write_run(
      tmp_path, f'b{seed}', seed, [0, 0, 1, 1], [0, 1, 0, None], world='b'
    )
  records = records_of(tmp_path, capsys)
  table = [r for r in records if r['table'] == 'sampled/iid']
  by_pair = {(r['arm'], r['against']): r for r in table}
  change = by_pair['rl.world=a', 'warm start']
  assert change['by_seed'] == [0.25, 0.5, 0.5]
  assert change['mean'] == pytest.approx(1.25 / 3)
  assert change['p'] == 0.25  # 2 / 2**3, the floor of three seeds
  against = by_pair['rl.world=a', 'rl.world=b']
  assert against['tasks'] == 3  # the unjudged task is left out on both sides
  assert against['mean'] == pytest.approx(2 / 3)
  assert against['lo'] <= against['mean'] <= against['hi']


def test_no_run_is_one_sentence(tmp_path):
  with pytest.raises(errors.UserError, match='no finished run'):
    compare.load(tmp_path)
