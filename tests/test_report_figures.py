"""Charts put numbers where they belong and say what is missing."""

import math
import re
import xml.etree.ElementTree

import pytest

from envace_jax.report import figures, markup, svg


def _points(shape):
  pairs = shape.attrib['points'].split()
  return [tuple(float(v) for v in pair.split(',')) for pair in pairs]


def _curve(*series, **options):
  text = figures.curve(
    series, title='T <&>', x_label='step', y_label='rate', **options
  )
  tree = xml.etree.ElementTree.fromstring(text)
  for element in tree.iter():
    element.tag = element.tag.split('}')[-1]
  return tree


def test_curve_breaks_where_nothing_was_measured():
  ys = [0.1, 0.2, math.nan, 0.4, None, 0.6]
  tree = _curve(figures.Series(label='a', x=range(6), y=ys))
  lines = [_points(p) for p in tree.findall('.//polyline')]
  assert [len(line) for line in lines] == [2, 1, 1]
  assert lines[0][0][1] > lines[0][1][1] > lines[1][0][1]  # up is more
  assert 'T <&>' in ''.join(tree.itertext())
  texts = [t.text for t in tree.findall('text')]
  assert {'step', 'rate', 'a', '0', '1', '0.60'} <= set(texts)


def test_the_gap_is_shaded_between_the_lines_and_changes_colour_with_them():
  steps = [0, 10, 20, 30]
  real = figures.Series(label='real', x=steps, y=[0.2, 0.2, 0.2, None])
  other = figures.Series(
    label='rehearsed', x=steps, y=[0.4, 0.4, 0.0, 0.9], slot=1
  )
  tree = _curve(real, other, shade='gap')
  gaps = [p for p in tree.findall('polygon') if 'gap' in p.attrib['class']]
  assert [g.attrib['class'] for g in gaps] == ['gap f1', 'gap f1', 'gap f0']
  lines = [_points(p) for p in tree.findall('polyline')]
  first = _points(gaps[0])
  assert {first[0], first[1]} == set(lines[0][:2])
  assert {first[2], first[3]} == set(lines[1][:2])


def test_every_number_stays_inside_the_frame():
  wild = figures.Series(
    label='w' * 200, x=[0, 1, 2], y=[-3.0, 0.5, 40.0],
    lo=[-5, 0, 30], hi=[0, 1, 50],
  )  # fmt: skip
  for options in ({}, {'whiskers': True}, {'y_range': None}):
    tree = _curve(wild, wild, wild, **options)
    for shape in tree.findall('.//polyline'):
      for x, y in _points(shape):
        assert svg.LEFT <= x <= svg.RIGHT and 0 < y <= svg.BOTTOM
  flat = figures.Series(label='flat', x=[5], y=[0.0])
  assert _curve(flat, y_range=None).findall('.//polyline')


def test_bars_show_value_interval_and_what_is_missing():
  text = figures.bars(
    [
      figures.Bar(label='plain', value=0.5, lo=0.25, hi=0.75),
      figures.Bar(label='none', value=None),
      figures.Bar(label='below', value=-0.5),
    ],
    title='T',
    y_label='rate',
  )
  tree = xml.etree.ElementTree.fromstring(text.replace(' xmlns=', ' data-x='))
  bars = [r for r in tree.findall('rect') if 'bar' in r.attrib['class']]
  up, down = (float(b.attrib['height']) for b in bars)
  assert up == pytest.approx(down, abs=0.2)
  whisker = tree.find('path').attrib['d']
  low, high = re.match(r'M\S+ (\S+)V(\S+?)M', whisker).groups()
  assert float(low) - float(high) == pytest.approx(up, abs=0.2)
  assert '–' in [t.text for t in tree.findall('text')]


def test_numbers_read_well():
  assert markup.number(-0.004) == '0.00'
  assert markup.number(-0.5) == '\u22120.50'
  assert markup.number(None) == '–'
  assert svg.tick(1500) == '1,500' and svg.tick(-0.25) == '\u22120.25'
