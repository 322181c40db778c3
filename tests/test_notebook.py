"""The Colab quick start: small, without outputs, and it runs."""

import os
import pathlib
import sys

import nbclient
import nbformat
import pytest

ROOT = pathlib.Path(__file__).parent.parent
PATH = ROOT / 'notebooks' / 'quickstart.ipynb'
RUN_SECONDS = 540  # a smoke run on a loaded machine


@pytest.fixture
def notebook():
  return nbformat.read(PATH, as_version=4)


def _code(notebook):
  return [c for c in notebook.cells if c.cell_type == 'code']


def test_notebook_is_valid_and_small(notebook):
  nbformat.validate(notebook)
  lines = '\n'.join(cell.source for cell in _code(notebook)).splitlines()
  assert len([line for line in lines if line.strip()]) <= 90
  for line in lines:
    assert not line.lstrip().startswith(('def ', 'class ', 'async def '))


def test_outputs_are_stripped(notebook):
  for cell in _code(notebook):
    assert cell.outputs == [] and cell.execution_count is None
  assert PATH.stat().st_size < 20_000


def test_size_is_one_variable_and_full_by_default(notebook):
  tagged = [
    c for c in notebook.cells if 'parameters' in c.metadata.get('tags', [])
  ]
  assert len(tagged) == 1
  assert "SIZE = ''" in tagged[0].source


@pytest.mark.timeout(RUN_SECONDS + 60)
def test_notebook_runs_at_smoke_size(notebook, tmp_path, monkeypatch):
  for cell in _code(notebook):
    cell.source = cell.source.replace("SIZE = ''", "SIZE = ':smoke'")
  # The kernel's shell finds this environment's `envace`, activated or not.
  bin_path = pathlib.Path(sys.executable).parent
  monkeypatch.setenv('PATH', f'{bin_path}{os.pathsep}{os.environ["PATH"]}')
  # A kernel is a new process: what this one set for its own tests must not
  # reach it, and neither must the reader's IPython set-up.
  monkeypatch.setenv('IPYTHONDIR', str(tmp_path / 'ipython'))
  nbclient.NotebookClient(
    notebook,
    timeout=RUN_SECONDS,
    kernel_name='python3',
    resources={'metadata': {'path': str(tmp_path)}},
  ).execute()

  workdir = tmp_path / 'runs' / 'quickstart'
  for name in ('summary.json', 'report.html', 'transcripts.jsonl'):
    assert (workdir / name).stat().st_size > 0
  shown = [
    output.data['text/html']
    for cell in _code(notebook)
    for output in cell.outputs
    if 'text/html' in output.get('data', {})
  ]
  episode, report = shown
  assert 'tool_call' in episode, 'a rehearsed call is shown'
  assert 'srcdoc=' in report
  printed = ''.join(
    output.text
    for cell in _code(notebook)
    for output in cell.outputs
    if output.output_type == 'stream'
  )
  assert 'warm_start' in printed and 'after' in printed
