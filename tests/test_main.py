"""Wrong commands: one sentence, exit code 2, nothing compiled or written."""

import importlib.util
import pathlib
import subprocess
import sys

import pretrained
import pytest

from envace_jax import check, errors, main

ROOT = pathlib.Path(__file__).parent.parent
EXPERIMENTS = sorted(
  path
  for path in (ROOT / 'experiments').glob('*.py')
  if path.name not in ('__init__.py',)
)
SMOKE = '--config=experiments/quickstart.py:smoke'


def envace(*arguments):
  return subprocess.run(
    [sys.executable, '-m', 'envace_jax.main', *arguments],
    cwd=ROOT, capture_output=True, text=True, timeout=120,
  )  # fmt: skip


@pytest.mark.parametrize(
  'arguments, words',
  [
    (['train'], ['--config']),
    (['fly'], ['fly', 'train']),
    (['check', SMOKE, '--config.rl.step=3'], ['step']),
    (['check', SMOKE, '--config.rl.steps=many'], ['many']),
    (['check', '--config=experiments/none.py'], ['none.py']),
    (['check', '--config=experiments/quickstart.py:big'], ['smoke']),
    (
      ['check', SMOKE, '--config.rl.microbatches=7'],
      ['divide', 'microbatches'],
    ),
    (['check', SMOKE, '--config.rollout.world=mars'], ['mars', 'rehearsal']),
    (['check', SMOKE, '--config.rollout.act.top_k=5'], ['top_k', 'ratio']),
    (['check', SMOKE, '--config.rollout.world=real'], ['rollout.mode=host']),
    (['check', SMOKE, '--config.model.num_heads=3'], ['num_heads=3']),
    (['check', SMOKE, '--config.mesh.tensor=4096'], ['4096']),
    (['check', SMOKE, '--config.rl.optimizer.warmup_steps=99'], ['99']),
    (['check', SMOKE, '--config.data.world=published'], ['data.files']),
    (['export-samples', SMOKE], ['--out']),
    (['evaluate', '--workdir=/nonexistent/run'], ['no run']),
    (['serve', '--workdir=/nonexistent/run', '--port=0'], ['no run']),
    (['serve'], ['--workdir']),
    (
      ['serve', '--workdir=/nonexistent/run', '--api_key_env=NO_SUCH_KEY'],
      ['NO_SUCH_KEY'],
    ),
    (['bench', SMOKE, '--serve'], ['max_row_tokens']),
  ],
  ids=lambda value: ' '.join(value)[-40:],
)
def test_a_wrong_command_is_one_sentence(arguments, words):
  done = envace(*arguments)
  assert done.returncode == 2, done.stdout + done.stderr
  assert 'Traceback' not in done.stderr
  for word in words:
    assert word in done.stderr


@pytest.mark.parametrize('path', EXPERIMENTS, ids=lambda path: path.stem)
def test_every_experiment_passes_check(path, capsys):
  spec = importlib.util.spec_from_file_location(path.stem, path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  config = module.get_config()
  if config.pretrained.path:
    config.pretrained.path = str(pretrained.smollm2_gguf())
  assert check.run(config) == 0
  printed = capsys.readouterr().out
  assert 'parameters' in printed and 'do nothing' in printed


def test_a_workdir_of_another_config_is_left_alone(tmp_path):
  from envace_jax import workdirs
  from experiments import base

  config = base.get_config()
  workdirs.claim(str(tmp_path / 'run'), config)
  before = (tmp_path / 'run' / 'config.json').read_bytes()
  config.rl.steps += 1
  with pytest.raises(errors.UserError, match='rl.steps'):
    workdirs.claim(str(tmp_path / 'run'), config)
  assert (tmp_path / 'run' / 'config.json').read_bytes() == before
  (tmp_path / 'mine').mkdir()
  (tmp_path / 'mine' / 'thesis.tex').write_text('years of work')
  with pytest.raises(errors.UserError, match='not empty'):
    workdirs.claim(str(tmp_path / 'mine'), config)
  (tmp_path / 'broken').mkdir()
  (tmp_path / 'broken' / 'config.json').write_text('{"seed": ')
  with pytest.raises(errors.UserError, match='damaged'):
    workdirs.claim(str(tmp_path / 'broken'), config)
  assert workdirs.load_config(str(tmp_path / 'run')).seed == config.seed


def test_every_option_is_read_by_someone():
  """An option nobody reads would be accepted and do nothing."""
  from experiments import base

  sources = ''.join(
    path.read_text() for path in (ROOT / 'envace_jax').rglob('*.py')
  )
  passed_whole = ('model', 'mesh', 'private', 'optimizer', 'habits', 'act',
                  'rehearse', 'rule', 'judge', 'judge_attempts',
                  'simulator_endpoint', 'simulator_attempts')  # fmt: skip

  def unread(config, above):
    for key, value in config.items():
      if hasattr(value, 'items'):
        yield from unread(value, (*above, key))
      elif not set(above) & set(passed_whole) and f'.{key}' not in sources:
        yield '.'.join((*above, key))

  assert not list(unread(base.get_config(), ()))


def test_usage_names_every_command(capsys):
  assert main.main(['envace']) == 2
  printed = capsys.readouterr().err
  for command in main.COMMANDS:
    assert command in printed
