"""The import rules of DESIGN, as code: imports point down only.

The table is the architecture. A new unit must be given its layer here before
its first import, and a unit may name what it needs more narrowly than its
layer would allow.
"""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / 'envace_jax'

# Bottom up. A unit is a package, or a top-level module. It may import itself
# and whatever lies in a lower row; units of one row never import each other.
LAYERS = (
  ('types', 'metrics', 'errors', 'progress', 'process', 'no_ops', 'roofline'),
  ('text', 'model', 'tasks', 'endpoints', 'workdirs'),
  ('sampling', 'learning', 'envs', 'weights'),
  ('worlds', 'rewards'),
  ('rollout',),
  (
    'evaluation',
    'report',
    'published',
    'pretrained',
    'serving',
    'benchmark_worlds',
    'desk_worlds',
  ),
  ('data', 'components', 'benchmarks'),
  ('refusals', 'logprob_memory'),
  ('build',),
  ('restore', 'results', 'experience'),
  ('policy_service',),
  ('run_policy',),
  (
    'train',
    'bench',
    'commands',
    'check',
    'compare',
    'export',
    'measure',
    'serve',
    'serving_bench',
  ),
  ('measure_flags', 'rehearsal_flags'),
  ('main',),
)
# Needs less than its layer allows.
BASE = {'types', 'metrics', 'errors', 'progress'}
NARROWER = {
  'model': {'errors'},  # pure functions of params
  'learning': BASE | {'model'},  # sees arrays only
  'weights': {'errors', 'types', 'model'},  # files <-> parameters
  'endpoints': {'types', 'errors'},  # a network, whoever asks it
  'worlds': BASE | {'text', 'model', 'tasks', 'endpoints', 'sampling', 'envs'},
  'measure_flags': {'errors', 'benchmarks', 'measure'},
  'rehearsal_flags': {'errors', 'rollout', 'serving'},
  # Messages in, verdicts out: who answers is asked over a seam.
  'benchmarks': BASE | {'text', 'tasks', 'endpoints', 'envs', 'evaluation'},
  # How episodes are made knows nothing of what they are worth.
  'rollout': BASE | {'text', 'model', 'tasks', 'sampling', 'worlds'},
}
NO_JAX = {
  'types', 'errors', 'progress', 'text', 'tasks', 'endpoints', 'envs', 'rewards'
}  # fmt: skip
JAX_STACK = {'jax', 'jaxlib', 'flax', 'optax', 'orbax'}

UNITS = [unit for row in LAYERS for unit in row]
FILES = sorted(PACKAGE.rglob('*.py'))


def _may_import() -> dict[str, set[str]]:
  """Unit -> units it may import, itself left out."""
  table, below = {}, set()
  for row in LAYERS:
    for unit in row:
      allowed = below & NARROWER.get(unit, below)
      table[unit] = allowed & NO_JAX if unit in NO_JAX else allowed
    below = below | set(row)
  return table


MAY_IMPORT = _may_import()


def _imports(source: str) -> list[str]:
  """Dotted names a module imports, also inside functions."""
  names = []
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Import):
      names += [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      module = '.' * node.level + (node.module or '')
      names += [f'{module}.{alias.name}' for alias in node.names]
  return names


def _violations(unit: str, source: str) -> list[str]:
  """What is wrong with the imports of a module of `unit`."""
  wrong = []
  for name in _imports(source):
    top, *rest = name.split('.')
    if not top:
      wrong.append(f'{name}: relative import')
    elif top in ('experiments', 'launch', 'notebooks', 'tests'):
      wrong.append(f'{name}: the library knows no {top}')
    elif top == 'envace_jax':
      other = rest[0] if rest else '__init__'
      if other not in MAY_IMPORT[unit] | {unit, '__version__'}:
        wrong.append(f'{name}: {unit} may not import {other}')
    elif top in JAX_STACK and unit in NO_JAX:
      wrong.append(f'{name}: {unit} is free of JAX')
  return wrong


def _unit(path: pathlib.Path) -> str:
  return path.relative_to(PACKAGE).parts[0].removesuffix('.py')


@pytest.mark.parametrize('path', FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path):
  unit = _unit(path)
  if unit == '__init__':
    assert not _imports(path.read_text()), 'the root holds the version only'
    return
  assert unit in MAY_IMPORT, f'give {unit} a layer in this table'
  assert not _violations(unit, path.read_text())


def test_every_unit_stands_once():
  assert len(UNITS) == len(set(UNITS))
  assert set(NARROWER) | NO_JAX <= set(UNITS)


def test_table_has_no_cycle():
  done = set()
  while len(done) < len(MAY_IMPORT):
    ready = {u for u, needs in MAY_IMPORT.items() if needs <= done} - done
    assert ready, f'cycle among {set(MAY_IMPORT) - done}'
    done |= ready


def test_only_main_imports_train_and_nobody_imports_main():
  importers = {
    top: {u for u, needs in MAY_IMPORT.items() if top in needs}
    for top in ('train', 'bench', 'main')
  }
  assert importers == {'train': {'main'}, 'bench': {'main'}, 'main': set()}


@pytest.mark.parametrize(
  'unit, line',
  [
    ('rollout', 'from envace_jax.learning.losses import x'),
    ('rollout', 'from envace_jax import evaluation'),
    ('rollout', 'import envace_jax.rewards.judge'),
    ('text', 'import jax.numpy as jnp'),
    ('rewards', 'def f():\n  from flax import linen'),
    ('rewards', 'from envace_jax.sampling import generator'),
    ('worlds', 'from envace_jax import rewards'),
    ('learning', 'from envace_jax.text import template'),
    ('main', 'from experiments import base'),
    ('text', 'from . import template'),
    ('text', 'from .. import types'),
    ('model', 'import envace_jax'),
  ],
)
def test_planted_violations_are_seen(unit, line):
  assert len(_violations(unit, line)) == 1


@pytest.mark.parametrize(
  'unit, line',
  [
    ('rollout', 'from envace_jax import types'),
    ('rollout', 'from envace_jax.rollout import episodes'),
    ('main', 'from envace_jax import train, bench, data, __version__'),
    ('model', 'import jax, flax.linen as nn'),
  ],
)
def test_legal_imports_pass(unit, line):
  assert not _violations(unit, line)


@pytest.mark.parametrize(
  'path', sorted((ROOT / 'experiments').glob('*.py')), ids=lambda p: p.name
)
def test_experiments_import_ml_collections_only(path):
  tops = {name.split('.')[0] for name in _imports(path.read_text())}
  assert tops <= {'ml_collections', 'experiments'}


@pytest.mark.parametrize(
  'path', sorted((ROOT / 'launch').glob('*.py')), ids=lambda p: p.name
)
def test_launch_imports_stdlib_and_experiments_only(path):
  tops = {name.split('.')[0] for name in _imports(path.read_text())}
  assert tops <= sys.stdlib_module_names | {'experiments', 'launch'}


def test_jax_free_units_load_without_jax():
  """What the table says, asked of the interpreter: third parties count too."""
  modules = [
    '.'.join(path.relative_to(ROOT).with_suffix('').parts)
    for path in FILES
    if _unit(path) in NO_JAX
  ]
  program = (
    'import importlib, sys\n'
    f'for name in {modules!r}:\n'
    '  importlib.import_module(name.removesuffix(".__init__"))\n'
    f'print(sorted({JAX_STACK!r} & set(sys.modules)))'
  )
  done = subprocess.run(
    [sys.executable, '-c', program], cwd=ROOT, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.strip() == '[]'
