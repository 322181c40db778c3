"""`report.html`: one run, told on one self-contained page.

Every number comes from `summary.json`, `metrics.jsonl` or `transcripts.jsonl`;
what a run did not measure is shown as such, never as zero. The file loads
nothing from anywhere and runs no script: its content policy forbids both.
"""

from collections.abc import Sequence
import json
import os
import pathlib

from envace_jax import types
from envace_jax.report import figures, markup, style, svg, tables, transcripts
from envace_jax.report import summary as summaries

FILE = 'report.html'
TRANSCRIPTS_SHOWN = 6

_XMLNS = ' xmlns="http://www.w3.org/2000/svg"'
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"

_STAGES = {
  'data': 'preparing data',
  'warm_start': 'warm start',
  'rl': 'rehearsal RL',
  'evaluation': 'evaluation',
  'total': 'in all',
}

_TERMS = (
  ('real success', 'share of tasks solved in the real environment'),
  ('rehearsed success', 'the same when the policy answers its own calls'),
  ('gap', 'rehearsed minus real success; above zero is optimistic'),
  ('fidelity', 'field F1 of rehearsed against real observations'),
  ('error recall', 'share of real errors that are rehearsed as errors'),
  ('optimism index', 'missed errors minus invented errors, from −1 to 1'),
  ('warm start', 'the supervised policy that reinforcement starts from'),
  ('sampled, greedy', 'actions drawn at the sampling temperature, or the best'),
  ('private rehearsal', 'rehearsing a task before one committed execution'),
  ('placebo', 'the notes of another task'),
  ('interval', '95 % interval for the mean over tasks'),
)


def write_report(
  workdir: str | os.PathLike[str],
  summary: types.Json,
  history: Sequence[types.Json],
  records: Sequence[types.Json],
) -> pathlib.Path:
  """Writes `report.html` in one step and returns its path."""
  path = pathlib.Path(workdir) / FILE
  temporary = path.with_name(FILE + '.tmp')
  temporary.write_text(render(summary, history, records), encoding='utf-8')
  temporary.replace(path)
  return path


def render(
  summary: types.Json,
  history: Sequence[types.Json],
  records: Sequence[types.Json],
) -> str:
  """The page as text."""
  sections = (
    _opening(summary),
    _training(history),
    tables.final_table(summary),
    tables.private_rehearsal(summary),
    _episodes(records),
    _costs(summary),
    _glossary(),
  )
  body = ''.join(sections).replace(_XMLNS, '')
  for shared in (svg.STYLE, transcripts.STYLE):  # once, in the head
    body = body.replace(f'<style>{shared}</style>', '')
  css = style.PAGE + svg.STYLE + transcripts.STYLE
  return (
    '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
    f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"/>'
    '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
    '<link rel="icon" href="data:,"/><title>envace_jax run report</title>'
    f'<style>{css}</style></head><body><main>{body}</main></body></html>\n'
  )


def headline(summary: types.Json) -> str:
  """What happened, in one sentence, as HTML; claims follow the intervals."""
  before = summaries.leaf(summary, 'real_success.warm_start.sampled.iid')
  after = summaries.leaf(summary, 'real_success.after.sampled.iid')
  share = markup.number
  if after is None:
    text = 'This run did not measure success in the real environment'
  elif before is None:
    text = f'Real success is <b>{share(after["mean"])}</b>'
  else:
    apart = after['lo'] > before['hi'] or after['hi'] < before['lo']
    verb = 'rose' if after['mean'] > before['mean'] else 'fell'
    verb = verb if apart else 'moved'
    aside = '' if apart else ', within overlapping intervals'
    text = (
      f'Real success {verb} from <b>{share(before["mean"])}</b> to '
      f'<b>{share(after["mean"])}</b>{aside}'
    )
  rehearsed = summaries.leaf(summary, 'rehearsed_success.after')
  gap = summaries.leaf(summary, 'gap.after')
  if rehearsed is None:
    return f'{text}.'
  text += (
    f'; in its own rehearsals the policy scores {share(rehearsed["mean"])}'
  )
  if gap is None:
    return f'{text}.'
  size = share(abs(gap['mean']))
  if gap['lo'] > 0:
    return f'{text}, so the world it imagines is <b>{size}</b> too kind.'
  if gap['hi'] < 0:
    return f'{text}, so the world it imagines is <b>{size}</b> too harsh.'
  return f'{text}, and no gap between the two can be told from zero.'


def _opening(summary: types.Json) -> str:
  tiles = ''.join(
    _tile(name, summaries.leaf(summary, path), before)
    for name, path, before in (
      (
        'Real success',
        'real_success.after.sampled.iid',
        summaries.leaf(summary, 'real_success.warm_start.sampled.iid'),
      ),
      (
        'Rehearsed success',
        'rehearsed_success.after',
        summaries.leaf(summary, 'rehearsed_success.warm_start'),
      ),
      ('Gap', 'gap.after', summaries.leaf(summary, 'gap.warm_start')),
      (
        'Optimism index',
        'optimism_index',
        summaries.leaf(summary, 'optimism_index_warm_start'),
      ),
    )
  )
  seed = markup.escape(str(summary.get('seed', 'unknown')))
  return (
    f'<p class="kicker">envace_jax run report, seed {seed}</p>'
    f'<h1>{headline(summary)}</h1><dl class="tiles">{tiles}</dl>'
  )


def _tile(
  name: str, value: types.Json | None, before: types.Json | None
) -> str:
  if value is None:
    inner = '–<small>not measured</small>'
  else:
    inner = (
      f'{markup.number(value["mean"])}<small>{tables.interval(value)}</small>'
    )
    if before is not None:
      inner += f'<small>warm start {markup.number(before["mean"])}</small>'
  return f'<div class="tile"><dt>{name}</dt><dd>{inner}</dd></div>'


def _training(history: Sequence[types.Json]) -> str:
  charts = [
    figures.curve(
      [
        _series(history, 'eval/real_success', 'real', svg.REAL),
        _series(history, 'eval/rehearsed_success', 'rehearsed', svg.REHEARSED),
      ],
      title='Success, real and rehearsed',
      x_label='train step',
      y_label='success rate',
      shade='gap',
    ),
    figures.curve(
      [
        _series(history, 'eval/fidelity', 'fidelity', svg.THIRD),
        _series(history, 'eval/error_recall', 'error recall', svg.FOURTH),
        _series(
          history, 'eval/optimism_index', 'optimism index', svg.REHEARSED
        ),
      ],
      title='Fidelity of the rehearsed world',
      x_label='train step',
      y_label='rate or index',
    ),
  ]
  shown = ''.join(f'<figure>{chart}</figure>' for chart in charts)
  return (
    '<h2>While training</h2><p class="lead">What held-out tasks give in the '
    'real environment, beside what the policy claims when it answers its own '
    'calls.</p>'
    f'<div class="charts">{shown}</div>'
  )


def _series(
  history: Sequence[types.Json], key: str, label: str, slot: int
) -> figures.Series:
  """A metric over steps; of several values at one step the last one counts."""
  rows = {
    line['step']: line
    for line in history
    if line.get(key) is not None and line.get('step') is not None
  }
  steps = sorted(rows)
  return figures.Series(
    label=label,
    x=steps,
    y=[rows[s][key] for s in steps],
    lo=[rows[s].get(f'{key}_lo') for s in steps],
    hi=[rows[s].get(f'{key}_hi') for s in steps],
    slot=slot,
  )


def _episodes(records: Sequence[types.Json]) -> str:
  chosen = choose(records)
  if not chosen:
    return '<h2>Transcripts</h2><p class="lead">None were recorded.</p>'
  parts = [_episode(record) for record in chosen]
  return (
    '<h2>Transcripts</h2><p class="lead">What was rehearsed, beside what the '
    f'world really says to the same calls: {len(chosen)} of {len(records):,} '
    'recorded, every kind of task before any twice.</p>'
    f'{transcripts.legend_html()}{"".join(parts)}'
  )


def choose(records: Sequence[types.Json]) -> list[types.Json]:
  """Up to six, in the order given, but each family once before any twice."""
  seen: dict[str, int] = {}
  ranked = []
  for index, record in enumerate(records):
    family = str(record.get('family', ''))
    ranked.append((seen.get(family, 0), index))
    seen[family] = seen.get(family, 0) + 1
  return [records[index] for _, index in sorted(ranked)[:TRANSCRIPTS_SHOWN]]


def _episode(record: types.Json) -> str:
  kind, word = {
    True: ('yes', '✓ judged a success'),
    False: ('no', '✗ judged a failure'),
  }.get(record.get('success'), ('', 'not judged'))
  said = [
    str(record.get('family') or '').replace('_', ' '),
    'ended: ' + str(record.get('stop_reason') or '?').replace('_', ' '),
    str(record.get('task_id') or ''),
  ]
  reward = record.get('reward')
  if isinstance(reward, int | float):
    said.append(f'reward {markup.number(reward)}')
  wrong, compared = transcripts.count_mismatches(record)
  if compared:
    said.append(f'{wrong} of {compared} answers differ from the real ones')
  facts = ''.join(
    f' · {markup.escape(markup.shorten(fact, 80))}' for fact in said if fact
  )
  title = str(record.get('instruction') or 'No instruction')
  return (
    '<article class="card episode">'
    f'<h3>{markup.escape(markup.shorten(title, 300))}</h3>'
    f'<p class="facts"><span class="{kind}">{word}</span>{facts}</p>'
    f'{transcripts.side_by_side_html(record)}</article>'
  )


def _costs(summary: types.Json) -> str:
  seconds = summary.get('seconds') or {}
  compiles = summary.get('compiles') or {}
  items = [(_STAGES.get(k, k), _duration(v)) for k, v in seconds.items()]
  items += [
    (f'programs compiled, {k.replace("_", " ")}', f'{v:,}')
    for k, v in compiles.items()
  ]
  if summary.get('real_calls') is not None:
    items.append(('real tool calls', f'{summary["real_calls"]:,}'))
  shown = ''.join(
    f'<div><dt>{markup.escape(name)}</dt><dd>{value}</dd></div>'
    for name, value in items
  )
  config = json.dumps(summary.get('config', {}), indent=2, default=str)
  seed = markup.escape(str(summary.get('seed', 'unknown')))
  return (
    f'<h2>Cost and settings</h2><dl class="costs">{shown}</dl>'
    f'<details><summary>Configuration, seed {seed}</summary>'
    f'<pre class="config">{markup.escape(config)}</pre></details>'
  )


def _glossary() -> str:
  terms = ''.join(f'<dt>{t}</dt><dd>{what}</dd>' for t, what in _TERMS)
  return f'<h2>Terms</h2><dl class="terms">{terms}</dl>'


def _duration(seconds: float) -> str:
  minutes, rest = divmod(round(seconds), 60)
  return f'{minutes} min {rest:02d} s' if minutes else f'{seconds:.1f} s'
