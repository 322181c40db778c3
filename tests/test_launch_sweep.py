"""launch/sweep.py with a fake trainer: expansion, resume, failure, stopping."""

import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time

import pytest

from launch import sweep

ROOT = pathlib.Path(__file__).parent.parent

EXPERIMENT = """
def get_config(arg=''):
  return {}

def sweep(add):
  for rate in (1e-4, 3e-4):
    add({'rl.learning_rate': rate, 'seed': 1})
  add({'model.betas': (0.8, 0.95)})
  add({'rollout.world': 'null'})
"""
# Appends a line per start, fails or hangs when its workdir says so, and leaves
# summary.json as the real trainer does: last.
TRAINER = """
import json, os, signal, sys, time
workdir = sys.argv[sys.argv.index('--workdir') + 1]
os.makedirs(workdir, exist_ok=True)
with open(workdir + '/starts', 'a') as f:
  f.write(json.dumps(sys.argv[1:]) + chr(10))
print('trainer says hello')
fault = os.environ.get('FAULT', 'none')
if fault in workdir:
  if os.environ['FAULT_KIND'] == 'exit':
    sys.exit(3)
  if os.environ['FAULT_KIND'] == 'no summary':
    sys.exit(0)
  def save(*_):
    open(workdir + '/saved', 'w').close()
    sys.exit(0)
  signal.signal(signal.SIGTERM, save)
  open(workdir + '/ready', 'w').close()
  time.sleep(120)
time.sleep(float(os.environ.get('SECONDS_EACH', 0)))
open(workdir + '/summary.json', 'w').close()
"""


@pytest.fixture
def study(tmp_path):
  """(experiment file, workdir, command of the fake trainer)."""
  experiment = tmp_path / 'my experiment.py'
  experiment.write_text(EXPERIMENT)
  trainer = tmp_path / 'trainer.py'
  trainer.write_text(TRAINER)
  command = shlex.join([sys.executable, str(trainer)])
  return experiment, tmp_path / 'runs', command


def _local(study, *flags, **env):
  experiment, workdir, trainer = study
  return subprocess.run(
    _local_command(study, *flags),
    env=os.environ | env,
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=60,
  )


def _local_command(study, *flags):
  experiment, workdir, trainer = study
  return [
    *(sys.executable, '-m', 'launch.sweep', 'local', str(experiment)),
    *('--workdir', str(workdir), '--trainer', trainer, *flags),
  ]


def _starts(workdir: pathlib.Path) -> dict[str, int]:
  return {
    path.parent.name: len(path.read_text().splitlines())
    for path in workdir.glob('*/starts')
  }


def test_print_gives_one_pasteable_command_per_setting(study, capsys):
  experiment, _, _ = study
  arguments = ['print', f'{experiment}:small arg', '--workdir', 'runs/x/']
  shared = ['--config.rl.steps=3', '--set', 'note=two words']
  assert sweep.main([*arguments, *shared]) == 0
  lines = capsys.readouterr().out.splitlines()
  heads, flags = [], []
  for line in lines:
    words = shlex.split(line)
    assert words[:4] == [
      'envace',
      'train',
      '--config',
      f'{experiment}:small arg',
    ]
    assert words[4] == '--workdir'
    heads.append(words[5])
    assert words[-2:] == ['--config.rl.steps=3', '--config.note=two words']
    flags.append(words[6:-2])
  assert flags == [
    ['--config.rl.learning_rate=0.0001', '--config.seed=1'],
    ['--config.rl.learning_rate=0.0003', '--config.seed=1'],
    ['--config.model.betas=(0.8, 0.95)'],
    ['--config.rollout.world=null'],
  ]
  assert heads[0] == 'runs/x/rl.learning_rate=0.0001,seed=1'
  assert len(set(heads)) == 4


def test_names_are_folders_and_differ():
  overrides = [
    {},
    {'a': 'x/y'},
    {'a': 'x_y'},
    {'a': 'x y'},
    {'a': '../../etc'},
    {'a': 'é'},
    {'a': 'z' * 300},
    {'a': 'z' * 301},
    {'a': 1, 'b': 2},
  ]
  names = [sweep.setting_name(o) for o in overrides]
  assert len(set(names)) == len(names)
  assert all('/' not in n and len(n) <= 140 for n in names)


def test_names_do_not_depend_on_the_other_settings(study):
  experiment, _, _ = study
  before = {s.name for s in sweep.expand(str(experiment), 'w', [])}
  grown = EXPERIMENT.replace('(1e-4, 3e-4)', '(1e-5, 1e-4, 3e-4)')
  experiment.write_text(grown)
  after = {s.name for s in sweep.expand(str(experiment), 'w', [])}
  assert before < after and len(after) == 5


def test_file_without_sweep_is_one_setting(study, capsys):
  experiment, _, _ = study
  experiment.write_text('def get_config(arg=""): return {}\n')
  assert sweep.main(['print', str(experiment), '--workdir', 'w']) == 0
  words = shlex.split(capsys.readouterr().out)
  assert words[-2:] == ['--workdir', 'w/default']


def test_local_runs_all_then_skips_all(study):
  _, workdir, _ = study
  done = _local(study, '--jobs', '3', '--config.rl.steps=3')
  assert done.returncode == 0, done.stderr
  assert sorted(_starts(workdir).values()) == [1, 1, 1, 1]
  log = workdir / 'rollout.world=null.log'
  assert 'trainer says hello' in log.read_text()
  argv = json.loads((workdir / 'rollout.world=null' / 'starts').read_text())
  assert argv[-2:] == ['--config.rollout.world=null', '--config.rl.steps=3']
  again = _local(study, '--config.rl.steps=3')
  assert again.returncode == 0
  assert again.stdout.count('skipped') == 4
  assert sorted(_starts(workdir).values()) == [1, 1, 1, 1]


def test_local_runs_n_at_a_time(study):
  done = _local(study, '--jobs', '4', SECONDS_EACH='1')
  assert done.returncode == 0
  lines = done.stdout.splitlines()
  assert [line.split()[0] for line in lines] == ['started'] * 4 + [
    'finished'
  ] * 4


def test_local_never_exceeds_jobs(study):
  running = most = 0
  for line in _local(study, '--jobs', '2').stdout.splitlines():
    running += {'started': 1, 'finished': -1}[line.split()[0]]
    most = max(most, running)
  assert (running, most) == (0, 2)


@pytest.mark.parametrize(
  'kind, why', [('exit', 'exit code 3'), ('no summary', 'no summary.json')]
)
def test_a_failing_setting_is_reported_last_and_resumed(study, kind, why):
  _, workdir, _ = study
  done = _local(study, FAULT='0.0003', FAULT_KIND=kind)
  assert done.returncode == 1
  (line,) = done.stderr.splitlines()
  failed = 'rl.learning_rate=0.0003,seed=1'
  assert line.startswith(failed) and why in line and f'{failed}.log' in line
  assert done.stdout.count('finished') == 3, 'the others are not held up'
  assert _local(study).returncode == 0
  starts = _starts(workdir)
  assert starts.pop(failed) == 2
  assert list(starts.values()) == [1, 1, 1]


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_stopping_lets_trainers_save_and_leaves_none(study, number):
  _, workdir, _ = study
  process = subprocess.Popen(
    _local_command(study, '--jobs', '2'),
    env=os.environ | {'FAULT': 'seed=1', 'FAULT_KIND': 'hang'},
    cwd=ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
  deadline = time.monotonic() + 30
  while len(list(workdir.glob('*/ready'))) < 2:
    assert time.monotonic() < deadline
    time.sleep(0.02)
  process.send_signal(number)
  _, errors = process.communicate(timeout=30)
  assert process.returncode == 130 and 'goes on from here' in errors
  assert len(list(workdir.glob('*/saved'))) == 2
  assert len(_starts(workdir)) == 2, 'no new one was started'
  assert _local(study, '--jobs', '4').returncode == 0


def test_a_trainer_that_ignores_sigterm_is_killed(monkeypatch):
  monkeypatch.setattr(sweep, 'STOP_SECONDS', 0.2)
  deaf = 'import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n'
  deaf += 'print(1, flush=True)\nimport time; time.sleep(60)'
  process = subprocess.Popen(
    [sys.executable, '-c', deaf], stdout=subprocess.PIPE, start_new_session=True
  )
  process.stdout.readline()
  sweep._stop([process])
  assert process.returncode == -signal.SIGKILL


def test_a_workdir_of_another_command_is_refused(study):
  assert _local(study, '--set', 'rl.steps=3').returncode == 0
  done = _local(study, '--set', 'rl.steps=4')
  assert done.returncode == 2
  assert '--config.rl.steps=3' in done.stderr
  assert 'another --workdir' in done.stderr


@pytest.mark.parametrize(
  'body, hint',
  [
    ('', 'must define get_config'),
    ('def get_config(a): 0\ndef sweep(add): 0', 'at least one setting'),
    (
      'def get_config(a): 0\n'
      'def sweep(add):\n  for _ in "ab": add({"seed": 1})',
      'adds seed=1 twice',
    ),
  ],
)
def test_bad_experiment_is_one_sentence(study, capsys, body, hint):
  experiment, workdir, _ = study
  experiment.write_text(body)
  assert sweep.main(['local', str(experiment), '--workdir', str(workdir)]) == 2
  error = capsys.readouterr().err
  assert hint in error and error.count('\n') == 1
  assert not workdir.exists()


def test_missing_file_and_swept_flag_are_one_sentence(study, capsys):
  experiment, _, _ = study
  assert sweep.main(['print', 'no.py:x', '--workdir', 'w']) == 2
  assert 'there is no experiment file no.py\n' in capsys.readouterr().err
  flag = '--config.rl.learning_rate=1'
  assert sweep.main(['print', str(experiment), '--workdir', 'w', flag]) == 2
  assert 'the sweep sets rl.learning_rate itself' in capsys.readouterr().err


@pytest.mark.parametrize(
  'flags', [['--seed=3'], ['stray'], ['--jobs', '0'], ['--config=x.py']]
)
def test_wrong_flags_are_refused(study, capsys, flags):
  experiment, _, _ = study
  with pytest.raises(SystemExit) as stop:
    sweep.main(['print', str(experiment), '--workdir', 'w', *flags])
  assert stop.value.code == 2
  assert capsys.readouterr().out == ''


def _submit(*flags, **env):
  command = [sys.executable, '-m', 'launch.sweep', 'submit', *flags]
  env = os.environ | {'ZONE': 'z'} | env
  return subprocess.run(
    command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=60
  )


def _relative_experiment(tmp_path) -> str:
  (tmp_path / 'x.py').write_text(EXPERIMENT)
  return os.path.relpath(tmp_path / 'x.py', ROOT)


def test_submit_starts_one_setting_per_tpu(tmp_path):
  experiment = _relative_experiment(tmp_path)
  where = [experiment, '--workdir', 'gs://b/x', '--tpus', 'a,b,c,d,e']
  done = _submit(*where, '--dry_run', '--set', 'rl.steps=3')
  assert done.returncode == 0, done.stderr
  assert done.stdout.count('gcloud compute tpus tpu-vm ssh') == 4
  for tpu in 'abcd':
    assert f'tpu-vm ssh {tpu} --worker=all' in done.stdout
  assert done.stdout.count('gs://b/x/') == 4
  assert done.stdout.count('config.rl.steps=3') == 4


def test_submit_reports_what_did_not_start(tmp_path):
  gcloud = tmp_path / 'bin' / 'gcloud'
  gcloud.parent.mkdir()
  gcloud.write_text('#!/bin/bash\n[[ "$*" != *"ssh b "* ]]\n')
  gcloud.chmod(0o755)
  path = f'{gcloud.parent}{os.pathsep}{os.environ["PATH"]}'
  experiment = _relative_experiment(tmp_path)
  where = [experiment, '--workdir', 'gs://b/x', '--tpus', 'a,b,c,d']
  done = _submit(*where, PATH=path)
  assert done.returncode == 1
  assert done.stderr == 'rl.learning_rate=0.0003,seed=1: not started on b\n'


def test_submit_needs_a_tpu_per_setting(tmp_path):
  experiment = _relative_experiment(tmp_path)
  done = _submit(experiment, '--workdir', 'w', '--tpus', 'a,b', '--dry_run')
  assert done.returncode == 2
  assert '4 settings need as many TPU VMs' in done.stderr
  absolute = str(tmp_path / 'x.py')
  done = _submit(absolute, '--workdir', 'w', '--tpus', 'a,b,c,d', '--dry_run')
  assert done.returncode == 2 and 'relative' in done.stderr
