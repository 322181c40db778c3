"""Arms, seeds and tasks are paired as the docstring says."""

import json

import pytest

from envace_jax import compare, errors, workdirs


def write_run(root, name, seed, before, after, measured=None, **options):
  workdir = root / name
  (workdir / 'evaluations').mkdir(parents=True)
  config = {'seed': seed, 'warm_start': {'workdir': ''}, 'rl': options}
  (workdir / 'config.json').write_text(json.dumps(config))
  for phase, values in (('warm_start', before), ('after', after)):
    rows = [[f't{i}', v] for i, v in enumerate(values)]
    tables = {table: rows for table in compare.TABLES}
    (workdir / 'evaluations' / f'{phase}.json').write_text(
      json.dumps({'outcomes': tables} | (measured or {}))
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


def test_every_pair_of_arms_is_compared(tmp_path, capsys):
  for i, world in enumerate('abc'):
    for seed in range(2):
      write_run(tmp_path, f'{world}{seed}', seed, [0, 0], [i > 0, i > 1],
                world=world)  # fmt: skip
  pairs = {
    (r['arm'][-1], r['against'][-1]): r['mean']
    for r in records_of(tmp_path, capsys)
    if r['table'] == 'greedy/iid' and 'world' in r['against']
  }
  assert pairs == {('a', 'b'): -0.5, ('a', 'c'): -1.0, ('b', 'c'): -0.5}


def test_honesty_and_private_rehearsal_are_paired_over_seeds(tmp_path, capsys):
  for seed, (gap, rehearsed) in enumerate([(0.1, 0.5), (0.2, 0.9)]):
    arms = {'plain': 0.4, 'rehearsed': rehearsed, 'placebo': 0.3}
    line = {name: {'mean': value} for name, value in arms.items()}
    write_run(
      tmp_path, f's{seed}', seed, [0], [1],
      {'gap': {'mean': gap}, 'fidelity': {'mean': None},
       'private_rehearsal_by_cap': [{'cap': 1} | line]},
    )  # fmt: skip
  records = {r['table']: r for r in records_of(tmp_path, capsys)}
  assert records['gap']['by_seed'] == [0, 0]  # same file before and after
  assert 'fidelity' not in records
  private = records['private/1']
  assert private['by_seed'] == pytest.approx([0.1, 0.5])
  # t with one degree of freedom: 0.3 +- 12.7062 * 0.2
  assert private['hi'] == pytest.approx(0.3 + 12.7062 * 0.2, abs=1e-3)


def test_what_was_never_executed_is_left_out(tmp_path, capsys):
  unknown = {name: {'mean': None} for name in ('plain', 'rehearsed', 'placebo')}
  measured = {
    'rehearsed_success': {'mean': 0.5},
    'gap': {'mean': None},
    'private_rehearsal_by_cap': [{'cap': 1} | unknown],
  }
  for seed in range(2):
    write_run(tmp_path, f'a{seed}', seed, [], [], measured, world='a')
    write_run(tmp_path, f'b{seed}', seed, [0, 1], [1, 1], measured, world='b')
  records = records_of(tmp_path, capsys)
  assert {r['arm'] for r in records if 'iid' in r['table']} == {'rl.world=b'}
  assert {r['arm'] for r in records if r['table'] == 'rehearsed_success'} == {
    'rl.world=a',
    'rl.world=b',
  }
  assert not [r for r in records if r['table'] in ('gap', 'private/1')]


def test_an_unfinished_run_is_named(tmp_path, caplog):
  write_run(tmp_path, 'good', 0, [0], [1])
  write_run(tmp_path, 'cut', 1, [0], [1])
  (tmp_path / 'cut' / 'evaluations' / 'after.json').unlink()
  with caplog.at_level('WARNING'):
    assert len(compare.load(tmp_path)) == 1
  assert 'cut' in caplog.text and 'after.json' in caplog.text


def test_no_run_is_one_sentence(tmp_path):
  with pytest.raises(errors.UserError, match='no finished run'):
    compare.load(tmp_path)


def test_the_lines_of_a_private_study_are_set_against_plain(tmp_path, capsys):
  def line(arm, rate, **described):
    at = [{'cap': 1, 'temperature': 0.0, 'success': {'mean': rate}}]
    return {
      'executor': 'after', 'arm': arm, 'by_cap': at, 'real_calls': 1.5,
      'rehearsed_tokens': 30, 'committed_tokens': 10, 'seconds': 0.1,
    } | described  # fmt: skip

  own = {'rehearser': 'after', 'mode': 'parallel', 'memory': 'agreed',
         'attempts': 4}  # fmt: skip
  for seed, rate in enumerate((0.5, 0.7)):
    write_run(tmp_path, f'a{seed}', seed, [0], [1])
    lines = [
      line('plain', 0.4),
      line('rehearsed', rate, **own),
      line('rehearsed', rate - 0.2, **own | {'rehearser': 'warm_start'}),
    ]
    file = tmp_path / f'a{seed}' / workdirs.PRIVATE_STUDY_FILE
    file.write_text(json.dumps({'lines': lines}))
  found = {
    r['arm']: r
    for r in records_of(tmp_path, capsys)
    if r['table'] == 'private in full/1'
  }
  assert found['the run, after, plain']['mean'] == 0
  itself = found['the run, after, rehearsed: 4 by itself, parallel, agreed']
  assert itself['by_seed'] == pytest.approx([0.1, 0.3])
  assert itself['success'] == pytest.approx(0.6)
  other = found['the run, after, rehearsed: 4 by warm_start, parallel, agreed']
  assert other['by_seed'] == pytest.approx([-0.1, 0.1])
