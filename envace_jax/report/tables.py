"""The tables of the report: before and after, and private rehearsal."""

from collections.abc import Mapping

from envace_jax import types
from envace_jax.report import figures, markup, svg
from envace_jax.report import summary as summaries

_ROWS = (  # (label, path, path at warm start, 'warm_start' or 'after' inside)
  ('Success in the real environment', None, None),
  ('sampled, held-out tasks', 'real_success.{}.sampled.iid', None),
  ('sampled, held-out combinations', 'real_success.{}.sampled.ood', None),
  ('greedy, held-out tasks', 'real_success.{}.greedy.iid', None),
  ('greedy, held-out combinations', 'real_success.{}.greedy.ood', None),
  ('The rehearsed world', None, None),
  ('rehearsed success', 'rehearsed_success.{}', None),
  ('gap, rehearsed minus real', 'gap.{}', None),
  ('fidelity', 'fidelity.{}', None),
  ('error recall', 'error_recall', 'error_recall_warm_start'),
  ('optimism index', 'optimism_index', 'optimism_index_warm_start'),
)

_ARMS = (
  ('plain', 'no rehearsal', svg.NEUTRAL),
  ('rehearsed', 'notes from private rehearsals', svg.REHEARSED),
  ('placebo', 'notes of another task', svg.FOURTH),
)


def final_table(summary: types.Json) -> str:
  rows = []
  for label, path, before_path in _ROWS:
    if path is None:
      rows.append(f'<tr class="head"><th colspan="4">{label}</th></tr>')
      continue
    before = summaries.leaf(summary, before_path or path.format('warm_start'))
    after = summaries.leaf(summary, path.format('after'))
    change = '–'
    if before is not None and after is not None:
      change = _signed(after['mean'] - before['mean'])
    rows.append(
      f'<tr><th scope="row">{label}</th>{_cell(before)}{_cell(after)}'
      f'<td>{change}</td></tr>'
    )
  heads = ''.join(
    f'<th scope="col">{name}</th>'
    for name in ('', 'Warm start', 'After', 'Change')
  )
  return (
    '<h2>Before and after</h2><p class="lead">Means with 95 % intervals.</p>'
    f'<div class="card scroll"><table><thead><tr>{heads}</tr></thead>'
    f'<tbody>{"".join(rows)}</tbody></table></div>'
  )


def private_rehearsal(summary: types.Json) -> str:
  rows = []
  for arm, what, _ in _ARMS:
    value = summaries.leaf(summary, f'private_rehearsal.{arm}')
    n = '–' if value is None else f'{value["n"]:,}'
    rows.append(
      f'<tr><th scope="row">{arm}<br/><small>{what}</small></th>'
      f'{_cell(value)}<td>{n}</td></tr>'
    )
  heads = ''.join(
    f'<th scope="col">{name}</th>' for name in ('', 'Success', 'Tasks')
  )
  return (
    '<h2>Private rehearsal</h2><p class="lead">One committed execution per '
    'task at an equal allowance of real calls.</p><div class="charts">'
    f'<figure>{_private_figure(summary)}</figure><div class="card scroll">'
    f'<table><thead><tr>{heads}</tr></thead><tbody>{"".join(rows)}</tbody>'
    '</table></div></div>'
  )


def _private_figure(summary: types.Json) -> str:
  title, y_label = 'Success of the committed execution', 'success rate'
  by_cap = summary.get('private_rehearsal_by_cap') or []
  if not by_cap:
    leaves = [
      summaries.leaf(summary, f'private_rehearsal.{a}') for a, *_ in _ARMS
    ]
    return figures.bars(
      [
        figures.Bar(label=arm, slot=slot, **_numbers(leaf))
        for (arm, _, slot), leaf in zip(_ARMS, leaves, strict=True)
      ],
      title=title,
      y_label=y_label,
    )
  series = []
  for arm, _, slot in _ARMS:
    numbers = [_numbers(summaries.leaf(row, arm)) for row in by_cap]
    series.append(
      figures.Series(
        label=arm,
        x=[row['cap'] for row in by_cap],
        y=[n['value'] for n in numbers],
        lo=[n['lo'] for n in numbers],
        hi=[n['hi'] for n in numbers],
        slot=slot,
      )
    )
  return figures.curve(
    series,
    title=title,
    x_label='real calls allowed',
    y_label=y_label,
    whiskers=True,
  )


def _cell(value: types.Json | None) -> str:
  if value is None:
    return '<td>–</td>'
  number = markup.number(value['mean'])
  return f'<td><b>{number}</b> <small>{interval(value)}</small></td>'


def interval(value: types.Json) -> str:
  return f'{markup.number(value["lo"])} to {markup.number(value["hi"])}'


def _numbers(leaf: types.Json | None) -> Mapping[str, float | None]:
  if leaf is None:
    return {'value': None, 'lo': None, 'hi': None}
  return {'value': leaf['mean'], 'lo': leaf['lo'], 'hi': leaf['hi']}


def _signed(value: float) -> str:
  text = markup.number(value)
  return f'+{text}' if text[0] != '\u2212' and float(text) > 0 else text
