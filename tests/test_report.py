"""The report parses strictly, loads nothing, believes no text, and is seen."""

import copy
import json
import math
import os
import shutil
import struct
import subprocess
import xml.etree.ElementTree
import zlib

import numpy as np
import pytest

from envace_jax.report import (
  comparison,
  page,
  summary,
  transcripts,
)

CHROMIUM = shutil.which('chromium') or '/usr/bin/chromium'
FAMILIES = ('lookup', 'write', 'conditional', 'chain', 'trap', 'infeasible')
HOSTILE = (
  '</pre></div></style></title>--><script>alert(1)</script>'
  '<img src="//evil.example/x" onerror=1>&amp;\'"\x00\x07\r\ud800\u202e\uffff'
)


def _leaf(mean, n=300):
  return summary.measurement(mean, mean - 0.04, mean + 0.04, n)


def _summary():
  phases = ('warm_start', 'after')
  splits = {'iid': _leaf(0.4), 'ood': _leaf(0.3)}
  return {
    'real_success': {
      phase: {'sampled': dict(splits), 'greedy': dict(splits)}
      for phase in phases
    },
    'rehearsed_success': {p: _leaf(0.7) for p in phases},
    'gap': {p: _leaf(0.3) for p in phases},
    'fidelity': {p: _leaf(0.8) for p in phases},
    'error_recall': _leaf(0.5),
    'optimism_index': summary.measurement(None, None, None, 0),
    'private_rehearsal': {a: _leaf(0.45) for a in summary.ARMS},
    'real_calls': 1234,
    'seconds': {stage: 12.5 for stage in summary.STAGES},
    'compiles': {'warm_up': 9, 'after': 0},
    'seed': 3,
    'config': {'note': HOSTILE},
  }


def _history():
  return [
    {'step': 0, 'eval/real_success': 0.4, 'eval/rehearsed_success': 0.45},
    {'step': 1, 'rl/reward': 0.5, 'eval/fidelity': None},
    {'step': 20, 'eval/real_success': 0.5, 'eval/rehearsed_success': 0.7},
    {'step': 20, 'eval/fidelity': 0.8, 'eval/optimism_index': -0.1},
    {'step': 40, 'eval/rehearsed_success': 0.8},
  ]


def _record(index, family, text='{"status": "shipped"}'):
  spans = [
    ('PROMPT', f'<|user|>Where is O{index}?<|end|>'),
    ('FORCED', '<|act|>'),
    ('ACT', '<tool_call>{"name": "get_order"}</tool_call>'),
    ('ACT', '<|end|>'),
    ('FORCED', '<|rehearse|>'),
    ('REHEARSE', f'<tool_response>{text}</tool_response><|end|>'),
    ('FORCED', '<|act|>'),
    ('ACT', f'Reply {index} {text}<|end|>'),
  ]
  return {
    'task_id': f'task-{index}',
    'family': family,
    'instruction': f'Where is O{index}? {text}',
    'notes': '',
    'stop_reason': 'replied',
    'reward': 1.0,
    'success': index % 2 == 0,
    'spans': [{'author': author, 'text': said} for author, said in spans],
    'real_spans': None,
    'real_observations': ['{"status": "pending"}'],
  }


def _records():
  repeated = [_record(100 + i, 'lookup') for i in range(4)]
  return repeated + [_record(i, f) for i, f in enumerate(FAMILIES)]


def _strict(document):
  """Raises on any unclosed tag, bare ampersand or forbidden character."""
  start = document.index('<html')
  return xml.etree.ElementTree.fromstring(document[start:].encode())


def test_report_is_complete_and_loads_nothing(tmp_path):
  path = page.write_report(tmp_path, _summary(), _history(), _records())
  document = path.read_text(encoding='utf-8')
  tree = _strict(document)
  assert path.name == 'report.html' and not list(tmp_path.glob('*.tmp'))
  assert len(tree.findall('.//svg')) == 3
  articles = tree.findall('.//article')
  assert len(articles) == 6
  assert len(tree.findall('.//details')) == 7  # six rows and the config
  shown = [a.find('.//p').itertext() for a in articles]
  assert {''.join(t).split(' · ')[1] for t in shown} == set(FAMILIES)
  assert not tree.findall('.//script') and 'http' not in document.replace(
    'http-equiv', ''
  )
  for element in tree.iter():
    for name, value in element.attrib.items():
      assert name not in ('src', 'srcset', 'action', 'style'), element.tag
      assert not name.startswith('on')
      assert name != 'href' or value == 'data:,'
  assert 'url(' not in document and '@import' not in document


@pytest.mark.parametrize('what', ['nothing', 'unmeasured', 'one point'])
def test_report_of_a_run_that_measured_little(what):
  values = {} if what == 'nothing' else _summary()
  if what == 'unmeasured':
    empty = summary.measurement(0.0, 0.0, 0.0, 0)
    values['real_success']['after']['sampled']['iid'] = empty
    values['private_rehearsal'] = {a: empty for a in summary.ARMS}
  history = [_history()[0]] if what == 'one point' else []
  tree = _strict(page.render(values, history, [{}, {'spans': None}]))
  text = ''.join(tree.itertext())
  assert 'nan' not in text.lower().split() and 'None' not in text
  assert ('did not measure' in text) == (what != 'one point')


def test_hostile_text_stays_text():
  records = [_record(i, HOSTILE, HOSTILE) for i in range(3)]
  records[0]['spans'][2]['author'] = HOSTILE
  records[1]['real_observations'] = [HOSTILE]
  records[2]['real_spans'] = records[2]['spans']
  tree = _strict(page.render(_summary(), _history(), records))
  tags = {element.tag for element in tree.iter()}
  assert not tags & {'script', 'img'}
  text = ''.join(tree.itertext())
  assert '<script>alert(1)</script>' in text  # shown, not run and not lost
  assert '␀' in text and '\\u202e' in text and '\u202e' not in text


def test_huge_and_deep_text_is_cut():
  deep = '{"a":' * 50_000 + '1' + '}' * 50_000
  record = _record(0, 'lookup', deep)
  record['spans'] += [
    {'author': a, 'text': 'x'} for a in ('ACT', 'USER')
  ] * 5000
  html = transcripts.side_by_side_html(record)
  assert len(html) < 200_000
  assert 'more characters' in html and 'more parts not shown' in html


def test_headline_claims_no_more_than_the_intervals():
  values = _summary()
  after = values['real_success']['after']['sampled']
  after['iid'] = _leaf(0.44)
  assert 'overlapping' in page.headline(values)
  after['iid'] = _leaf(0.6)
  assert 'rose' in page.headline(values) and 'too kind' in page.headline(values)
  after['iid'] = _leaf(0.2)
  values['gap']['after'] = _leaf(0.01)
  assert 'fell' in page.headline(values) and 'no gap' in page.headline(values)


def test_side_by_side_marks_what_differs():
  same = _record(0, 'f', '{"status": "pending"}')
  assert transcripts.count_mismatches(same) == (0, 1)
  assert '= agrees' in transcripts.side_by_side_html(same)
  other = transcripts.side_by_side_html(_record(0, 'f'))
  assert 'differs in 1 of 1 fields' in other and '&quot;pending&quot;' in other
  unknown = _record(0, 'f') | {'real_observations': [None]}
  assert transcripts.count_mismatches(unknown) == (0, 0)
  assert 'not replayed' in transcripts.side_by_side_html(unknown)


def test_each_real_answer_stands_beside_its_own_call():
  record = _record(0, 'f', '{"n": 0}')
  record['spans'] = record['spans'][:1]
  for n in range(3):
    record['spans'] += _record(0, 'f', f'{{"n": {n}}}')['spans'][1:6]
  record['real_observations'] = ['{"n": 0}', None, '{"n": 2}']
  html = transcripts.side_by_side_html(record)
  assert html.count('= agrees') == 2 and html.count('not replayed') == 1
  assert 'differs' not in html
  assert transcripts.count_mismatches(record) == (0, 2)


@pytest.mark.parametrize(
  ('ours', 'theirs', 'label'),
  [
    ('{"a": 1, "b": 2}', '{"b": 2.0, "a": 1}', 'agrees'),
    ('{"a": true}', '{"a": 1}', 'differs in 1 of 1'),
    ('{"a.b": 1}', '{"a": {"b": 1}}', 'differs in 2 of 2'),
    ('{"0": 1}', '[1]', 'differs in 2 of 2'),
    ('{"a": []}', '{"a": {}}', 'differs in 1 of 1'),
    ('{"ok": true}', '{"error": "x"}', 'optimistic'),
    ('{"error": "x"}', '{"ok": true}', 'pessimistic'),
    ('{"error": "x"}', '{"error": "y"}', 'differs in 1 of 1'),
    ('{"a": ', '{"a": 1}', 'differs: not valid JSON'),
    ('fine ', 'fine', 'agrees'),
  ],
)
def test_comparison(ours, theirs, label):
  verdict = comparison.compare(ours, theirs)
  assert verdict.label.startswith(label)
  assert verdict.agrees == (label == 'agrees')


def test_tokens_are_coloured_by_author_and_keep_their_control_pieces():
  html = transcripts.episode_html(_record(7, 'lookup'))
  tree = xml.etree.ElementTree.fromstring(html)
  spans = tree.findall('.//pre/span')
  assert [s.attrib['class'] for s in spans] == [
    'PROMPT', 'FORCED', 'ACT', 'FORCED', 'REHEARSE', 'FORCED', 'ACT',
  ]  # fmt: skip
  assert spans[2].text == '<tool_call>{"name": "get_order"}</tool_call><|end|>'
  assert all(
    f'.tr .{name}' in transcripts.STYLE for name in transcripts.AUTHORS
  )


def test_records_round_trip_with_surrogates(tmp_path):
  path = tmp_path / 'transcripts.jsonl'
  records = [_record(i, 'f', HOSTILE) for i in range(3)]
  transcripts.write_records(path, records)
  assert [transcripts.read_record(path, i) for i in range(3)] == records
  for index in (3, -1):
    with pytest.raises(IndexError, match='has 3 transcripts'):
      transcripts.read_record(path, index)


def test_summary_is_written_whole_and_reads_back(tmp_path):
  values = _summary()
  values['config'] = {'lr': np.float32(0.5), 'sizes': (1, np.int64(2))}
  summary.write(tmp_path / 'summary.json', values)
  back = json.loads((tmp_path / 'summary.json').read_text())
  assert back['config'] == {'lr': 0.5, 'sizes': [1, 2]}
  assert back['optimism_index']['mean'] is None
  assert not list(tmp_path.glob('*.tmp'))


@pytest.mark.parametrize(
  ('path', 'bad', 'named'),
  [
    ('gap.after.mean', math.nan, 'gap.after.mean'),
    ('config.x', np.float32('inf'), 'config.x'),
    ('gap.after', None, 'gap.after'),
    ('gapp', 1, 'gapp'),
    ('real_calls', 1.5, 'real_calls'),
    ('fidelity.after.lo', 0.9, 'fidelity.after'),
    ('error_recall.n', 0, 'error_recall'),
    ('seconds.total', -1, 'seconds.total'),
    ('config.f', object(), 'not JSON'),
  ],
)
def test_a_bad_summary_is_refused_by_key(tmp_path, path, bad, named):
  values = copy.deepcopy(_summary())
  node = values
  *parents, last = path.split('.')
  for key in parents:
    node = node[key]
  node[last] = bad
  with pytest.raises(ValueError, match=named):
    summary.write(tmp_path / 'summary.json', values)
  assert not (tmp_path / 'summary.json').exists()


def _png_rows(data):
  """Width, height and decompressed scan lines of an 8-bit PNG."""
  width, height = struct.unpack('>II', data[16:24])
  place, body = 8, b''
  while place < len(data):
    size, kind = struct.unpack('>I4s', data[place : place + 8])
    if kind == b'IDAT':
      body += data[place + 8 : place + 8 + size]
    place += 12 + size
  return width, height, zlib.decompress(body)


@pytest.mark.skipif(not os.path.exists(CHROMIUM), reason='no Chromium here')
@pytest.mark.parametrize('theme', ['light', 'dark'])
def test_a_browser_draws_it(tmp_path, theme):
  path = page.write_report(tmp_path, _summary(), _history(), _records())
  text = path.read_text(encoding='utf-8')
  path.write_text(text.replace('<html', f'<html data-theme="{theme}"', 1))
  command = [
    CHROMIUM, '--headless', '--no-sandbox', '--disable-gpu', '--disable-quic',
    '--no-first-run', '--disable-background-networking', '--hide-scrollbars',
    '--disable-component-update', '--disable-sync',
    f'--user-data-dir={tmp_path / "profile"}', '--window-size=800,2400',
    f'--screenshot={tmp_path / "shot.png"}', path.as_uri(),
  ]  # fmt: skip
  subprocess.run(command, check=True, timeout=120, capture_output=True)
  width, height, pixels = _png_rows((tmp_path / 'shot.png').read_bytes())
  assert (width, height) == (800, 2400)
  assert len(set(pixels)) > 100  # not one flat colour: charts and text
