"""launch/tpu_vm.sh against a fake `gcloud` that records how it was called.

The VM's side is played too: what `--command` carries is run by a real bash
with a fake tmux and a fake trainer, because only that proves the quoting.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

import pytest

SCRIPT = pathlib.Path(__file__).parent.parent / 'launch' / 'tpu_vm.sh'
VM = ['compute', 'tpus', 'tpu-vm']

RECORDER = f"""#!{sys.executable}
import json, os, sys
with open(os.environ['CALLS'], 'a') as calls:
  calls.write(json.dumps(sys.argv[1:]) + '\\n')
sys.exit(int(os.environ.get('FAKE_RC', 0)))
"""
HOSTILE = [
  'two words',
  '$(touch pwned)',
  '`touch pwned`',
  '; touch pwned;',
  '"double" and \'single\'',
  'line\nbreak',
  '$HOME',
  '*',
  'back\\slash',
  '!bang',
  '&& touch pwned || true',
  '',
  '--dry_run',
  'naïve—ünïcode',
]


def _executable(path: pathlib.Path, text: str) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(text)
  path.chmod(0o755)


class Cloud:
  """A committed clone with the script in it, and the recorded calls."""

  def __init__(self, root: pathlib.Path):
    self.clone = root / 'clone of it'  # a space, as people have
    self.calls_path = root / 'calls.jsonl'
    _executable(root / 'bin' / 'gcloud', RECORDER)
    (self.clone / 'launch').mkdir(parents=True)
    self.script = shutil.copy(SCRIPT, self.clone / 'launch')
    (self.clone / '.gitignore').write_text('dist/\n')
    who = ['-c', 'user.name=n', '-c', 'user.email=e@example.com']
    for git in (['init', '-q'], ['add', '.'], [*who, 'commit', '-qm', 'x']):
      subprocess.run(['git', *git], cwd=self.clone, check=True)
    self.env = {
      'PATH': f'{root / "bin"}{os.pathsep}{os.environ["PATH"]}',
      'HOME': str(root),
      'CALLS': str(self.calls_path),
      'TPU_NAME': 'my-tpu',
      'ZONE': 'us-east5-b',
    }

  def say(self, *arguments, **env):
    """Runs the script; an environment value of None removes the name."""
    merged = {k: v for k, v in (self.env | env).items() if v is not None}
    return subprocess.run(
      [self.script, *arguments],
      env=merged,
      cwd=self.clone,
      stdin=subprocess.DEVNULL,
      capture_output=True,
      text=True,
      timeout=60,
    )

  def calls(self) -> list[list[str]]:
    """The calls since the last time."""
    if not self.calls_path.exists():
      return []
    lines = self.calls_path.read_text().splitlines()
    self.calls_path.unlink()
    return [json.loads(line) for line in lines]


@pytest.fixture
def cloud(tmp_path):
  return Cloud(tmp_path)


def _command(call: list[str]) -> str:
  """The shell text that an `ssh` call carries."""
  (text,) = [a for a in call if a.startswith('--command=')]
  return text.removeprefix('--command=')


def test_shellcheck_is_clean():
  done = subprocess.run(
    [pathlib.Path(sys.executable).parent / 'shellcheck', SCRIPT],
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stdout


def test_fits_a_page():
  lines = SCRIPT.read_text().splitlines()
  assert len(lines) <= 80 and max(map(len, lines)) <= 80


@pytest.mark.parametrize(
  'env, extra',
  [
    ({}, []),
    ({'SPOT': '0'}, []),
    ({'SPOT': '1'}, ['--spot']),
  ],
)
def test_create(cloud, env, extra):
  done = cloud.say('create', ACCEL='v5p-16', RUNTIME='v2-alpha-tpuv5', **env)
  assert done.returncode == 0, done.stderr
  assert cloud.calls() == [
    [*VM, 'create', 'my-tpu', '--accelerator-type=v5p-16']
    + ['--version=v2-alpha-tpuv5', *extra, '--zone=us-east5-b']
  ]


@pytest.mark.parametrize('verb', ['create', 'setup', 'logs', 'stop', 'delete'])
def test_project_is_passed_to_every_call(cloud, verb):
  done = cloud.say(verb, PROJECT='p 1', ACCEL='a', RUNTIME='r')
  assert done.returncode == 0, done.stderr
  calls = cloud.calls()
  assert calls and all('--project=p 1' in call for call in calls)
  assert all('--zone=us-east5-b' in call for call in calls)


def test_setup_copies_the_commit_and_installs_on_all_workers(cloud):
  (cloud.clone / 'uncommitted.py').write_text('')
  done = cloud.say('setup')
  assert done.returncode == 0, done.stderr
  assert 'uncommitted changes are not copied' in done.stderr
  archive = cloud.clone / 'dist' / 'envace_jax.tar.gz'
  scp, ssh = cloud.calls()
  assert scp[:6] == [*VM, 'scp', str(archive), 'my-tpu:']
  assert '--worker=all' in scp and '--worker=all' in ssh
  assert ssh[:5] == [*VM, 'ssh', 'my-tpu']
  assert '--python 3.12' in _command(ssh)
  assert '-e ".[tpu]"' in _command(ssh)
  names = subprocess.check_output(['tar', '-tzf', archive], text=True).split()
  assert 'launch/tpu_vm.sh' in names and 'uncommitted.py' not in names


def test_second_setup_replaces_code_and_keeps_runs(cloud, tmp_path):
  """The VM's half of `setup`, with a `python3` that installs nothing."""
  home = tmp_path / 'vm'
  _executable(tmp_path / 'vmbin' / 'python3', RECORDER)
  env = cloud.env | {'PATH': f'{tmp_path / "vmbin"}:{os.environ["PATH"]}'}
  (home / 'envace_jax' / 'runs').mkdir(parents=True)
  (home / 'envace_jax' / 'launch').mkdir()
  (home / 'envace_jax' / 'launch' / 'stale.py').write_text('')
  cloud.say('setup')
  _, ssh = cloud.calls()
  shutil.copy(cloud.clone / 'dist' / 'envace_jax.tar.gz', home)
  done = subprocess.run(['bash', '-c', _command(ssh)], cwd=home, env=env)
  assert done.returncode == 0
  assert [call[:3] for call in cloud.calls()] == [
    ['-m', 'pip', 'install'],
    ['-m', 'uv', 'venv'],
    ['-m', 'uv', 'pip'],
  ]
  assert (home / 'envace_jax' / 'runs').is_dir()
  assert (home / 'envace_jax' / 'launch' / 'tpu_vm.sh').is_file()
  assert not (home / 'envace_jax' / 'launch' / 'stale.py').exists()
  # A step of the VM's half that fails is not papered over by later ones.
  done = subprocess.run(
    ['bash', '-c', _command(ssh)], cwd=home, env=env | {'FAKE_RC': '5'}
  )
  assert done.returncode == 5 and len(cloud.calls()) == 1


def test_logs_and_delete(cloud):
  assert cloud.say('logs').returncode == 0
  assert cloud.say('logs', WORKER='3').returncode == 0
  assert cloud.say('delete').returncode == 0
  tail = '--command=tail -n 100 -F envace_jax/train.log'
  zone = '--zone=us-east5-b'
  assert cloud.calls() == [
    [*VM, 'ssh', 'my-tpu', '--worker=0', tail, zone],
    [*VM, 'ssh', 'my-tpu', '--worker=3', tail, zone],
    [*VM, 'delete', 'my-tpu', '--quiet', zone],
  ]


@pytest.fixture
def vm(tmp_path):
  """A home folder with a fake tmux that detaches and a fake trainer."""
  home = tmp_path / 'vm'
  tmux = '#!/bin/bash\n[[ "$*" == "new-session -d -s envace "* ]] || exit 9\n'
  tmux += 'shift 4; setsid "$@" </dev/null >/dev/null 2>&1 &\n'
  _executable(tmp_path / 'vmbin' / 'tmux', tmux)
  trainer = f"""#!{sys.executable}
import json, os, signal, sys, time
def save(*_):
  time.sleep(0.3)
  open('saved', 'w').close()
  sys.exit(7)
signal.signal(signal.SIGTERM, save)
print('hello', flush=True)
with open('argv.tmp', 'w') as f:
  json.dump(sys.argv[1:], f)
os.rename('argv.tmp', 'argv.json')
time.sleep(60 if '--wait' in sys.argv else 0)
"""
  _executable(home / 'envace_jax' / '.venv' / 'bin' / 'envace', trainer)
  return home


def _on_vm(vm: pathlib.Path, command: str) -> int:
  path = f'{vm.parent / "vmbin"}:{os.environ["PATH"]}'
  env = {'PATH': path, 'HOME': str(vm)}
  return subprocess.run(
    ['bash', '-c', command], cwd=vm, env=env, timeout=60
  ).returncode


def _wait_for(path: pathlib.Path, text: str = '') -> str:
  deadline = time.monotonic() + 30
  while not path.exists() or text not in path.read_text():
    assert time.monotonic() < deadline, f'no {text!r} in {path}'
    time.sleep(0.02)
  return path.read_text()


def test_hostile_arguments_arrive_as_they_are(cloud, vm):
  done = cloud.say('run', '--', *HOSTILE)
  assert done.returncode == 0, done.stderr
  (call,) = cloud.calls()
  assert call[:6] == [*VM, 'ssh', 'my-tpu', '--worker=all']
  assert _on_vm(vm, _command(call)) == 0
  home = vm / 'envace_jax'
  assert json.loads(_wait_for(home / 'argv.json')) == ['train', *HOSTILE]
  assert _wait_for(home / 'train.log', 'exit status 0').startswith('hello')
  assert not list(vm.parent.rglob('pwned'))


def test_stop_returns_when_the_trainer_has_saved(cloud, vm):
  cloud.say('run', '--', '--wait')
  cloud.say('stop')
  run, stop = cloud.calls()
  home = vm / 'envace_jax'
  assert _on_vm(vm, _command(run)) == 0
  _wait_for(home / 'argv.json')
  assert '--worker=all' in stop
  assert _on_vm(vm, _command(stop)) == 0
  assert (home / 'saved').exists()
  _wait_for(home / 'train.log', 'exit status 7')
  assert _on_vm(vm, _command(stop)) != 0, 'nothing runs, and stop says so'


@pytest.mark.parametrize('place', [0, 1])
@pytest.mark.parametrize('verb', ['create', 'setup', 'run', 'stop', 'delete'])
def test_dry_run_prints_exactly_what_would_run(cloud, verb, place):
  env = {'ACCEL': 'a b', 'RUNTIME': "r'", 'PROJECT': '$(p)', 'SPOT': '1'}
  rest = ['--', *HOSTILE] if verb == 'run' else []
  words = [verb]
  words.insert(place, '--dry_run')
  dry = cloud.say(*words, *rest, **env)
  assert dry.returncode == 0, dry.stderr
  assert cloud.calls() == [] and not (cloud.clone / 'dist').exists()
  assert cloud.say(verb, *rest, **env).returncode == 0
  real = cloud.calls()
  pasted = subprocess.run(['bash', '-e', '-c', dry.stdout], env=cloud.env)
  assert pasted.returncode == 0
  assert real and cloud.calls() == real


@pytest.mark.parametrize('verb', ['create', 'setup', 'run', 'logs', 'delete'])
def test_failures_propagate(cloud, verb):
  rest = ['--', 'x'] if verb == 'run' else []
  env = {'ACCEL': 'a', 'RUNTIME': 'r', 'FAKE_RC': '37'}
  assert cloud.say(verb, *rest, **env).returncode == 37
  assert len(cloud.calls()) == 1, 'nothing runs after a failure'


def test_setup_fails_without_a_commit(cloud):
  shutil.rmtree(cloud.clone / '.git')
  assert cloud.say('setup').returncode != 0
  assert cloud.calls() == []


@pytest.mark.parametrize('name', ['TPU_NAME', 'ZONE', 'ACCEL', 'RUNTIME'])
@pytest.mark.parametrize('value', [None, ''])
def test_missing_variable_is_one_sentence(cloud, name, value):
  env = {'ACCEL': 'a', 'RUNTIME': 'r', name: value}
  done = cloud.say('create', **env)
  expected = f"tpu_vm.sh: set {name} in the environment to 'create'.\n"
  assert (done.returncode, done.stderr) == (2, expected)
  assert cloud.calls() == []


@pytest.mark.parametrize(
  'words, hint',
  [
    ([], 'say create, setup'),
    (['--dry_run'], 'say create, setup'),
    (['launch'], "unknown argument 'launch'"),
    (['run', '--config', 'x'], 'go after --'),
    (['run'], "give 'run'"),
    (['run', '--'], "give 'run'"),
    (['delete', '--', 'x'], 'takes no arguments'),
    (['create', 'delete'], 'one verb'),
  ],
)
def test_wrong_use_is_one_sentence(cloud, words, hint):
  done = cloud.say(*words)
  assert done.returncode == 2 and hint in done.stderr
  assert done.stderr.count('\n') == 1
  assert cloud.calls() == []
