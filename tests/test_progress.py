"""A bar on a terminal, lines elsewhere, and nothing for what is short."""

import io
import re
import time

from absl import logging
import pytest
import rich.console

from envace_jax import progress


@pytest.fixture
def lines(monkeypatch):
  said = []
  monkeypatch.setattr(
    logging, 'info', lambda text, *values: said.append(text % values)
  )
  monkeypatch.setattr(progress, 'FIRST_LINE_SECONDS', 0.15)
  monkeypatch.setattr(progress, 'LINE_SECONDS', 0.05)
  return said


def test_short_work_says_nothing(lines):
  with progress.bar('quick', 3) as bar:
    for _ in range(3):
      bar.advance()
  assert lines == []


def test_blocked_work_is_still_seen_and_the_end_is_told(lines):
  with progress.bar('compile [a/b]', 4, unit='program') as bar:
    bar.advance(3, loss=0.25)
    time.sleep(0.4)  # one long call: nobody advances
    bar.advance()
  assert len(lines) >= 3
  assert lines[0].startswith('compile [a/b]: 3/4 program')
  assert 'left' in lines[0] and 'loss 0.25' in lines[0]
  assert lines[-1].endswith('finished')


def test_an_error_ends_the_lines_and_is_not_called_finished(lines):
  with pytest.raises(KeyError), progress.bar('work', 4):
    time.sleep(0.2)
    raise KeyError
  assert lines[-1].endswith('stopped')
  count = len(lines)
  time.sleep(0.15)
  assert len(lines) == count


def test_terminal_bars_nest_and_keep_text_as_text():
  screen = io.StringIO()
  console = rich.console.Console(
    file=screen, force_terminal=True, width=120, _environ={'TERM': 'xterm'}
  )
  with progress.bar('outer [a/b]', 2, console=console) as outer:
    for _ in range(2):
      with progress.bar('inner', None, console=console) as inner:
        inner.advance(5, loss=1.5)
      outer.advance()
  plain = re.sub(r'\x1b\[[0-9;?]*[A-Za-z]', '', screen.getvalue())
  assert 'outer [a/b]' in plain and '2/2' in plain
  assert plain.rstrip().splitlines()[-1].count('inner') == 0


def test_track_yields_everything_and_inactive_shows_nothing(lines):
  assert list(progress.track(range(5), 'five', active=False)) == [*range(5)]
  assert list(progress.track(iter('abc'), 'letters')) == [*'abc']
  assert lines == []
