"""The `envace` command.

  envace train    --config experiments/quickstart.py --workdir runs/a
  envace check    --config experiments/quickstart.py --config.rl.steps=3
  envace evaluate --workdir runs/a
  envace rehearse --workdir runs/a --index 3
  envace evaluate --workdir runs/a --private
  envace evaluate --benchmark tau2 --policy runs/a --out scores/tau2
  envace compare  --workdir runs/sweep
  envace compare  --scores scores/before,scores/after
  envace bench    --config experiments/quickstart.py --json bench.json
  envace export   --workdir runs/a --out model
  envace serve    --workdir runs/a --port 8000
  envace export-samples --config experiments/quickstart.py --out samples

What is wrong with a command is said in one sentence, with exit code 2.
"""

import logging as python_logging
import os
import pathlib
import sys

from absl import flags, logging
from ml_collections import config_flags

from envace_jax import errors, measure_flags, rehearsal_flags

_PACKAGE = str(pathlib.Path(__file__).parent)
COMMANDS = (
  'train',
  'evaluate',
  'rehearse',
  'compare',
  'bench',
  'check',
  'export',
  'export-samples',
  'serve',
)

_CONFIG = config_flags.DEFINE_config_file(
  'config',
  None,
  'Experiment file, e.g. experiments/quickstart.py:smoke; override any option '
  'after it with --config.rl.steps=3.',
  lock_config=True,
)
_WORKDIR = flags.DEFINE_string('workdir', None, "The run's directory.")
_JSON = flags.DEFINE_string('json', None, 'bench: also write records here.')
_OUT = flags.DEFINE_string(
  'out', None, 'export, export-samples, evaluate --benchmark: where to write.'
)
_DTYPE = flags.DEFINE_enum(
  'dtype', 'float32', ('float32', 'bfloat16'), 'export: of stored weights.'
)
_SPLIT = flags.DEFINE_string(
  'split', 'test_iid', 'rehearse: tasks to pick from.'
)
_INDEX = flags.DEFINE_integer(
  'index', 0, 'rehearse: which task.', lower_bound=0
)
_PRIVATE = flags.DEFINE_bool(
  'private',
  False,
  'evaluate, rehearse: rehearse privately, then commit one real execution.',
)
_SERVE = flags.DEFINE_bool('serve', False, 'bench: measure the server instead.')
_HOST = flags.DEFINE_string('host', '127.0.0.1', 'serve: where to listen.')
_PORT = flags.DEFINE_integer(
  'port', 8000, 'serve: where to listen; 0 is any.', 0, 65535
)
_MODEL = flags.DEFINE_string(
  'served_model', None, 'serve: its name; by default that of the workdir.'
)
_API_KEY_ENV = flags.DEFINE_string(
  'api_key_env', '', 'serve, evaluate: environment variable with a key, if any.'
)
_ROWS = flags.DEFINE_integer(
  'rows', 8, 'serve: answers at a time.', lower_bound=1
)
_CONTEXT = flags.DEFINE_integer(
  'context',
  0,
  'serve, evaluate --benchmark: tokens in a row; 0 is as in training.',
  lower_bound=0,
)
_QUEUE = flags.DEFINE_integer(
  'queue', 64, 'serve: answers that may wait.', lower_bound=1
)
_DEADLINE = flags.DEFINE_float(
  'deadline_s', 600.0, 'serve: seconds that an answer may take.', 0.001
)
_SHOWN_TOOLS = flags.DEFINE_enum(
  'shown_tools', '', ('', 'none', 'names', 'signatures', 'schemas'),
  'serve, evaluate --benchmark: what prompts say of the tools; default: as in '
  'training.',
)  # fmt: skip
_DISTRIBUTED = flags.DEFINE_bool(
  'distributed', False, 'Call jax.distributed.initialize() first (pods).'
)

# XLA on CPU returns its large buffers to the system after each step and takes
# them back page by page: half the time of a small training run. glibc reads
# these before the process starts, hence the re-execution.
_ALLOCATOR = {
  'MALLOC_MMAP_THRESHOLD_': '8589934592',
  'MALLOC_TRIM_THRESHOLD_': '8589934592',
  'MALLOC_TOP_PAD_': '268435456',
}


def main(argv: list[str] | None = None) -> int:
  """Runs one command; returns the exit code."""
  if argv is None:
    _keep_memory()
    argv = sys.argv
  try:
    command = _parse(argv)
    logging.set_verbosity(logging.INFO)
    logging.use_absl_handler()
    logging.get_absl_handler().setFormatter(
      python_logging.Formatter('%(asctime)s %(message)s', '%H:%M:%S')
    )
    logging.get_absl_handler().addFilter(_is_ours)
    return _run(command)
  except errors.UserError as error:
    sys.stderr.write(f'envace: {error}\n')
    return 2


def _parse(argv: list[str]) -> str:
  usage = (
    f'usage: envace {{{" | ".join(COMMANDS)}}} --config FILE --workdir DIR'
  )
  if len(argv) < 2 or argv[1] in ('-h', '--help', 'help'):
    raise errors.UserError(f'{usage}\n{__doc__}')
  command, rest = argv[1], argv[2:]
  if command not in COMMANDS:
    raise errors.UserError(f'unknown command {command!r}; {usage}')
  try:
    left = flags.FLAGS([argv[0], *rest])
  except Exception as error:  # absl, ml_collections and the file itself
    raise _unusable(error) from error
  if len(left) > 1:
    raise errors.UserError(f'unexpected arguments {left[1:]}; {usage}')
  return command


def _run(command: str) -> int:
  # Imported here, so that a wrong flag is reported before JAX starts.
  if command == 'check':
    from envace_jax import check

    return check.run(_config())
  if command == 'export-samples':
    from envace_jax import export

    return export.run(_config(), _out())
  if command == 'compare' and measure_flags.compares():
    return measure_flags.compare()
  if command == 'compare':
    from envace_jax import compare

    return compare.run(_workdir())
  from envace_jax import process

  if _DISTRIBUTED.value:
    import jax

    jax.distributed.initialize()
  try:
    if command == 'train':
      from envace_jax import train

      return train.run(_config(), _workdir())
    if command == 'bench' and _SERVE.value:
      from envace_jax import serving_bench

      return serving_bench.run(_config(), _JSON.value)
    if command == 'bench':
      from envace_jax import bench

      return bench.run(_config(), _JSON.value)
    if command == 'serve':
      return _serve()
    if command == 'evaluate' and measure_flags.is_wanted():
      return measure_flags.measure(
        _out(),
        api_key_env=_API_KEY_ENV.value,
        tools=_SHOWN_TOOLS.value,
        context=_CONTEXT.value,
        rehearsal=rehearsal_flags.settings(),
      )
    from envace_jax import commands

    if command == 'export':
      return commands.export(_workdir(), _out(), _DTYPE.value)
    if command == 'evaluate':
      if _PRIVATE.value:
        return commands.study_private_rehearsal(_workdir())
      return commands.evaluate(_workdir())
    show = commands.rehearse
    if _PRIVATE.value:
      show = commands.rehearse_privately
    return show(_workdir(), _SPLIT.value, _INDEX.value)
  except process.Stopped as stopped:
    sys.stderr.write(f'envace: {stopped}; the same command goes on\n')
    return 0


def _serve() -> int:
  from envace_jax import policy_service, serve

  return serve.run(
    _workdir(),
    policy_service.Options(
      rows=_ROWS.value,
      context=_CONTEXT.value,
      queue=_QUEUE.value,
      deadline_s=_DEADLINE.value,
      tools=_SHOWN_TOOLS.value,
      rehearsal=rehearsal_flags.settings(),
    ),
    host=_HOST.value,
    port=_PORT.value,
    model=_MODEL.value,
    api_key_env=_API_KEY_ENV.value,
  )


def _config():
  try:
    config = _CONFIG.value
    if config is not None:
      config.to_dict()
  except Exception as error:  # a file that failed to load says so only here
    raise _unusable(error) from error
  if config is None:
    raise errors.UserError('give --config, e.g. experiments/quickstart.py')
  return config


def _unusable(error: Exception) -> errors.UserError:
  """What absl, ml_collections or the experiment file said, on one line."""
  said = str(error)
  if 'Traceback' in said:  # of the experiment file; its last line is the point
    said = said.strip().splitlines()[-1]
  said = ' '.join(said.split())[:500]
  return errors.UserError(
    f'{type(error).__name__}: {said}; options are listed in experiments/base.py'
  )


def _workdir() -> str:
  if _WORKDIR.value is None:
    raise errors.UserError('give --workdir, the directory of the run')
  return _WORKDIR.value


def _out() -> str:
  if _OUT.value is None:
    raise errors.UserError('give --out, the directory to write to')
  return _OUT.value


def _is_ours(record) -> bool:
  """Libraries that log through absl are heard from WARNING on."""
  return record.levelno >= python_logging.WARNING or _PACKAGE in record.pathname


def _keep_memory() -> None:
  """Restarts the process once with glibc told to keep freed memory."""
  missing = {k: v for k, v in _ALLOCATOR.items() if k not in os.environ}
  if sys.platform == 'linux' and missing:
    os.environ.update(missing)
    os.execv(
      sys.executable, [sys.executable, '-m', 'envace_jax.main', *sys.argv[1:]]
    )


if __name__ == '__main__':
  sys.exit(main())
