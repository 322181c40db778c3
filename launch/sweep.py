"""An experiment's sweep, expanded to one `envace train` command per setting.

  python -m launch.sweep print  experiments/x.py --workdir runs/x
  python -m launch.sweep local  experiments/x.py --workdir runs/x --jobs 2
  python -m launch.sweep submit experiments/x.py --workdir gs://bucket/x \
    --tpus tpu-a,tpu-b --dry_run

An experiment file may define `sweep(add)`, which calls `add({'rl.steps': 50})`
once per setting; without one the file is a sweep of one setting. Every setting
has its own workdir, named after its overrides, so that a sweep that grows
keeps what it has. `local` skips a setting whose workdir holds `summary.json`
and lets the trainer resume the others. `--config.x=v` (or `--set x=v`) and
`experiments/x.py:arg` go to every setting; the trainer rejects unknown keys.
"""

import argparse
import dataclasses
import hashlib
import importlib.util
import json
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import time

TPU_VM = pathlib.Path(__file__).parent / 'tpu_vm.sh'
FINISHED = 'summary.json'  # the trainer writes it last
STOP_SECONDS = 60  # for a trainer to save after SIGTERM


class SweepError(Exception):
  """A wrong argument or experiment file: one sentence that says the remedy."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
  """One training run of a sweep."""

  experiment: str  # path[:arg]
  name: str
  workdir: str  # the sweep's, then the name
  flags: tuple[str, ...]  # --config.x=v, the sweep's own first

  @property
  def arguments(self) -> list[str]:
    """What follows `envace train`; --config must come before overrides."""
    where = ['--config', self.experiment, '--workdir', self.workdir]
    return [*where, *self.flags]

  @property
  def log(self) -> pathlib.Path:
    """Beside the workdir, which belongs to the trainer."""
    return pathlib.Path(f'{self.workdir}.log')

  @property
  def record(self) -> pathlib.Path:
    return pathlib.Path(f'{self.workdir}.command.json')

  @property
  def finished(self) -> bool:
    return pathlib.Path(self.workdir, FINISHED).is_file()


def load_sweep(path: str) -> list[dict]:
  """The overrides of every setting, in the order of `sweep(add)`."""
  if not pathlib.Path(path).is_file():
    raise SweepError(f'there is no experiment file {path}')
  spec = importlib.util.spec_from_file_location('swept_experiment', path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  if not hasattr(module, 'get_config'):
    raise SweepError(f'{path} must define get_config(arg)')
  if not hasattr(module, 'sweep'):
    return [{}]
  settings = []
  module.sweep(lambda overrides: settings.append(dict(overrides)))
  if not settings:
    raise SweepError(f'sweep(add) in {path} must add at least one setting')
  return settings


def setting_name(overrides: dict) -> str:
  """A readable folder name; what it cannot spell is told apart by a hash."""
  if not overrides:
    return 'default'
  spelled = ','.join(f'{key}={value}' for key, value in overrides.items())
  name = re.sub(r'[^A-Za-z0-9._=,+-]', '_', spelled)
  if name == spelled and len(name) <= 120:
    return name
  digest = hashlib.sha256(spelled.encode()).hexdigest()[:8]
  return f'{name[:120]}-{digest}'


def expand(experiment: str, workdir: str, shared: list[str]) -> list[Setting]:
  """The settings of `experiment` (path[:arg]); `shared` goes to all of them."""
  path = re.sub(r'\.py:.*', '.py', experiment, flags=re.DOTALL)
  settings = {}
  for overrides in load_sweep(path):
    for key in overrides:
      if any(flag.startswith(f'--config.{key}=') for flag in shared):
        raise SweepError(f'the sweep sets {key} itself; leave the flag out')
    name = setting_name(overrides)
    if name in settings:
      raise SweepError(f'sweep(add) in {path} adds {name} twice')
    own = [f'--config.{key}={value}' for key, value in overrides.items()]
    settings[name] = Setting(
      experiment=experiment,
      name=name,
      workdir=f'{workdir.rstrip("/")}/{name}',
      flags=(*own, *shared),
    )
  return list(settings.values())


def run_local(settings: list[Setting], trainer: list[str], jobs: int) -> int:
  """Runs `jobs` settings at a time; 1 if any failed, 130 if interrupted."""
  waiting = [s for s in settings if not _skip(s)]
  running: list[tuple[Setting, subprocess.Popen]] = []
  failed = []
  # A sweep that is terminated must not leave trainers behind either.
  signal.signal(signal.SIGTERM, signal.default_int_handler)
  try:
    while waiting or running:
      while waiting and len(running) < jobs:
        running.append((waiting[0], _start(waiting[0], trainer)))
        print(f'started   {waiting.pop(0).name}', flush=True)
      time.sleep(0.05)
      for setting, process in list(running):
        if process.poll() is None:
          continue
        running.remove((setting, process))
        ok = process.returncode == 0 and setting.finished
        print('finished ' if ok else 'failed   ', setting.name, flush=True)
        if not ok:
          failed.append((setting, process.returncode))
  except KeyboardInterrupt:
    _stop([process for _, process in running])
    print('stopped; the same command goes on from here', file=sys.stderr)
    return 130
  for setting, code in failed:
    why = f'exit code {code}' if code else f'no {FINISHED} in {setting.workdir}'
    print(f'{setting.name}: {why}; read {setting.log}', file=sys.stderr)
  return 1 if failed else 0


def submit(settings: list[Setting], tpus: list[str], dry_run: bool) -> int:
  """Starts setting i on TPU VM i, which `tpu_vm.sh` has created and set up."""
  if len(tpus) < len(settings):
    raise SweepError(
      f'{len(settings)} settings need as many TPU VMs, one each; '
      f'--tpus names {len(tpus)}'
    )
  if os.path.isabs(settings[0].experiment):
    raise SweepError('name the experiment relative to the repository root')
  failed = []
  for setting, tpu in zip(settings, tpus, strict=False):
    mode = ['--dry_run'] if dry_run else []
    command = [str(TPU_VM), *mode, 'run', '--', *setting.arguments]
    if subprocess.run(command, env=os.environ | {'TPU_NAME': tpu}).returncode:
      failed.append(f'{setting.name}: not started on {tpu}')
  for line in failed:
    print(line, file=sys.stderr)
  return 1 if failed else 0


def _skip(setting: Setting) -> bool:
  """True if nothing is left to run; refuses what another command has left."""
  if setting.record.is_file():
    before = json.loads(setting.record.read_text())
    if before != [setting.experiment, *setting.flags]:
      raise SweepError(
        f'{setting.workdir} was made by {shlex.join(before)}; '
        'give this sweep another --workdir'
      )
  if setting.finished:
    print(f'skipped   {setting.name} (finished before)', flush=True)
  return setting.finished


def _start(setting: Setting, trainer: list[str]) -> subprocess.Popen:
  """A trainer in a process group of its own, so that Ctrl-C reaches us only."""
  setting.record.parent.mkdir(parents=True, exist_ok=True)
  setting.record.write_text(json.dumps([setting.experiment, *setting.flags]))
  with setting.log.open('ab') as log:
    return subprocess.Popen(
      [*trainer, *setting.arguments],
      stdin=subprocess.DEVNULL,
      stdout=log,
      stderr=subprocess.STDOUT,
      start_new_session=True,
    )


def _stop(processes: list[subprocess.Popen]) -> None:
  """SIGTERM, on which trainers save, and SIGKILL for those that do not end."""
  deadline = time.monotonic() + STOP_SECONDS
  try:
    for process in processes:
      _signal_group(process, signal.SIGTERM)
    for process in processes:
      process.wait(max(0.0, deadline - time.monotonic()))
  except (subprocess.TimeoutExpired, KeyboardInterrupt):
    print('trainers that do not stop are killed', file=sys.stderr)
  finally:
    for process in processes:
      _signal_group(process, signal.SIGKILL)
      process.wait()


def _signal_group(process: subprocess.Popen, number: int) -> None:
  try:
    os.killpg(process.pid, number)
  except ProcessLookupError:
    pass  # the whole group has ended


def _arguments(argv: list[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    prog='launch.sweep',
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  parser.add_argument('mode', choices=('print', 'local', 'submit'))
  parser.add_argument('experiment', help='experiments/x.py or ...:arg')
  parser.add_argument('--workdir', required=True, help='one folder for all')
  parser.add_argument('--jobs', type=int, default=1, help='local: at a time')
  parser.add_argument('--tpus', default='', help='submit: names, by comma')
  parser.add_argument('--dry_run', action='store_true', help='submit: print')
  parser.add_argument('--set', action='append', default=[], metavar='KEY=VALUE')
  parser.add_argument(
    '--trainer', default='envace train', help='the command of one run'
  )
  arguments, rest = parser.parse_known_args(argv)
  rest += [f'--config.{override}' for override in arguments.set]
  for flag in rest:
    if not re.match(r'--config\.[^=]+=', flag):
      parser.error(f'{flag} is neither an option nor --config.KEY=VALUE')
  if arguments.jobs < 1:
    parser.error('--jobs must be at least 1')
  arguments.shared = rest
  return arguments


def main(argv: list[str] | None = None) -> int:
  """Exit code: 0, 1 (a setting failed), 2 (wrong use), 130 (interrupted)."""
  arguments = _arguments(argv)
  trainer = shlex.split(arguments.trainer)
  try:
    settings = expand(arguments.experiment, arguments.workdir, arguments.shared)
    if arguments.mode == 'local':
      return run_local(settings, trainer, arguments.jobs)
    if arguments.mode == 'submit':
      tpus = [name for name in arguments.tpus.split(',') if name]
      return submit(settings, tpus, arguments.dry_run)
    for setting in settings:
      print(shlex.join([*trainer, *setting.arguments]))
    return 0
  except SweepError as error:
    print(f'sweep.py: {error}', file=sys.stderr)
    return 2


if __name__ == '__main__':
  sys.exit(main())
