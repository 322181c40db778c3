"""Episodes to look at: who wrote what, and what the world really says.

A record is one JSON object per line of `transcripts.jsonl`:

  task_id, family, instruction, notes, stop_reason: text
  reward: number or null    success: true, false or null
  spans: [{"author": "ACT", "text": "..."}, ...]   the whole row, in order
  real_spans: the same for an attempt in the real world, or null
  real_observations: [text or null, ...]   for each answered call of `spans`,
      what the real environment says to that call after the same calls

Nothing here trusts a record: text is escaped and cut, keys may be missing.
"""

from collections.abc import Iterable, Sequence
import dataclasses
import itertools
import json
import os
import pathlib
import re

from envace_jax import types
from envace_jax.report import comparison, markup

AUTHORS = {
  'PROMPT': 'the task, as shown to the policy',
  'FORCED': 'template between turns, never sampled',
  'ACT': 'the policy, acting',
  'REHEARSE': 'the policy, answering its own call',
  'WORLD': 'the real environment',
  'USER': 'a scripted later user turn',
  'COPIED': "the policy, in the other role's own row",
}
MAX_SPAN_CHARS = 4000
MAX_PARTS = 200  # merged spans, or steps, shown of one episode

STYLE = """
.tr{--ink:#1d1c1a;--soft:#66635c;--line:#e2dfd8;--card:#fff;
--prompt:#6b6860;--forced:#8b877e;--act:#7a4fb5;--rehearse:#c4560b;
--world:#0b6bb0;--user:#00795c;--copied:#a8730b;--bad:#b3261e;--good:#2f6f3a;
color:var(--ink);font:14px/1.5 ui-sans-serif,system-ui,-apple-system,
'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif}
.tr.alone{background:var(--card);padding:12px 14px}
@media (prefers-color-scheme:dark){:root:not([data-theme=light]) .tr{DARK}}
[data-theme=dark] .tr{DARK}
.tr .legend{display:flex;flex-wrap:wrap;gap:2px 16px;margin:0 0 10px;
padding:0;list-style:none;color:var(--soft);font-size:12.5px}
.tr .legend b{color:var(--c);font-size:11px;letter-spacing:.04em}
.tr .PROMPT{--c:var(--prompt)}.tr .FORCED{--c:var(--forced)}
.tr .ACT{--c:var(--act)}.tr .REHEARSE{--c:var(--rehearse)}
.tr .WORLD{--c:var(--world)}.tr .USER{--c:var(--user)}
.tr .COPIED{--c:var(--copied)}
.tr pre{margin:0;white-space:pre-wrap;overflow-wrap:anywhere;
font:12.5px/1.55 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.tr .row span{background:color-mix(in srgb,var(--c) 13%,transparent);
border-bottom:2px solid var(--c);border-radius:2px;padding:1px 1px 0;
box-decoration-break:clone;-webkit-box-decoration-break:clone}
.tr .row .FORCED{border-bottom-style:dotted;color:var(--soft)}
.tr .said{border-left:3px solid var(--c);border-radius:0 4px 4px 0;
padding:6px 10px;min-width:0;
background:color-mix(in srgb,var(--c) 8%,transparent)}
.tr .who{display:block;color:var(--c);font-size:11px;font-weight:600;
letter-spacing:.03em;margin-bottom:1px}
.tr .said+.said,.tr .note+.said,.tr .pair+.said,
.tr .pair,.tr .note,.tr .step{margin-top:8px}
.tr .pair{display:grid;grid-template-columns:1fr 1fr;gap:8px}
.tr .pair .said{margin:0}
.tr .note{color:var(--soft);font-size:12.5px;margin-top:4px}
.tr .note b{color:var(--good);font-weight:600}
.tr .note.off b{color:var(--bad)}
.tr .note ul{margin:2px 0 0;padding-left:18px}
.tr .note code{font-size:12px;overflow-wrap:anywhere}
.tr .missing{color:var(--soft);font-style:italic}
@media (max-width:600px){.tr .pair{grid-template-columns:1fr}}
""".replace(
  'DARK',
  '--ink:#e9e7e2;--soft:#a5a29b;--line:#35373c;--card:#1c1d20;'
  '--prompt:#b3b0a8;--forced:#8f8c85;--act:#bd9bf0;--rehearse:#f2995c;'
  '--world:#6fb6f0;--user:#54c3a2;--copied:#e0b252;--bad:#ff8a80;--good:#8fce9b',
)

_PIECES = re.compile(r'<\|\w+\|>|</?tool_(?:call|response)>')


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Said:
  author: str
  text: str


def episode_html(record: types.Json) -> str:
  """One episode as its tokens, coloured by author, control pieces included."""
  body = _legend(AUTHORS) + _row(record.get('spans'))
  return _wrap(body, 'tr alone')  # a notebook may be dark where we are light


def side_by_side_html(record: types.Json) -> str:
  """Each call of an episode with its rehearsed and its real answer."""
  real = record.get('real_observations') or []
  real_spans = record.get('real_spans')
  parts = []
  step = 0
  said = [s for s in _merged(record.get('spans')) if s.author != 'FORCED']
  for one in said[:MAX_PARTS]:
    if one.author in ('REHEARSE', 'WORLD'):
      answer = real[step] if step < len(real) else None
      parts.append(_pair(one, answer))
      step += 1
    elif one.author == 'PROMPT':
      parts.append(_prompt(one.text, record.get('notes') or ''))
    else:
      parts.append(_block(one.author, _who(one), one.text))
  parts.append(_left_out(len(said)))
  parts.append(_details('The row as tokens', _row(record.get('spans'))))
  if real_spans:
    title = 'The same task attempted in the real environment'
    parts.append(_details(title, _row(real_spans)))
  return _wrap(''.join(parts))


def legend_html() -> str:
  """The colours of both views, to print once above several episodes."""
  return _wrap(_legend(AUTHORS))


def count_mismatches(record: types.Json) -> tuple[int, int]:
  """(answers that differ from the real ones, answers that were compared)."""
  real = record.get('real_observations') or []
  answers = [
    s.text
    for s in _merged(record.get('spans'))
    if s.author in ('REHEARSE', 'WORLD')
  ]
  verdicts = [
    comparison.compare(plain(ours), plain(theirs))
    for ours, theirs in zip(answers, real, strict=False)
    if theirs is not None
  ]
  return sum(not v.agrees for v in verdicts), len(verdicts)


def write_records(
  path: str | os.PathLike[str], records: Iterable[types.Json]
) -> None:
  """Replaces `path` in one step; ASCII, so that lone surrogates survive."""
  path = pathlib.Path(path)
  temporary = path.with_name(path.name + '.tmp')
  with temporary.open('w', encoding='ascii') as file:
    for record in records:
      file.write(json.dumps(record, allow_nan=False) + '\n')
  temporary.replace(path)


def read_records(path: str | os.PathLike[str]) -> list[dict]:
  """Every record of a file, in order."""
  with pathlib.Path(path).open(encoding='utf-8') as file:
    return [json.loads(line) for line in file]


def read_record(path: str | os.PathLike[str], index: int) -> dict:
  """Record number `index`, counted from 0."""
  records = read_records(path)
  if not 0 <= index < len(records):
    raise IndexError(
      f'{path} has {len(records)} transcripts, numbered from 0; there is no '
      f'{index}'
    )
  return records[index]


def plain(text: str) -> str:
  """Text without control pieces and tool tags, for reading and comparing."""
  return _PIECES.sub('', text).strip()


def _merged(spans: Sequence[types.Json] | None) -> list[_Said]:
  """Spans with neighbours of one author joined; unknown authors kept."""
  said = [
    _Said(author=str(s.get('author')), text=str(s.get('text') or ''))
    for s in spans or []
  ]
  grouped = itertools.groupby(said, key=lambda one: one.author)
  return [
    _Said(author=author, text=''.join(one.text for one in group))
    for author, group in grouped
  ]


def _row(spans: Sequence[types.Json] | None) -> str:
  said = _merged(spans)
  parts = []
  for one in said[:MAX_PARTS]:
    kind = one.author if one.author in AUTHORS else 'FORCED'
    text = markup.escape(markup.shorten(one.text, MAX_SPAN_CHARS))
    title = markup.escape(one.author)
    parts.append(f'<span class="{kind}" title="{title}">{text}</span>')
  return f'<pre class="row">{"".join(parts)}</pre>{_left_out(len(said))}'


def _prompt(text: str, notes: str) -> str:
  """What the policy was shown; notes are set apart when they are known."""
  text = plain(text)
  notes = notes.strip()
  if notes and text.endswith(notes):
    text = text[: -len(notes)].rstrip()
    return _block('PROMPT', 'Task', text) + _block('PROMPT', 'Notes', notes)
  return _block('PROMPT', 'Task', text)


def _pair(ours: _Said, theirs: str | None) -> str:
  who = (
    'What was rehearsed' if ours.author == 'REHEARSE' else 'What it was told'
  )
  left = _block(ours.author, who, ours.text)
  if theirs is None:
    right = (
      '<div class="said WORLD"><span class="who">What the world says</span>'
      '<span class="missing">not replayed</span></div>'
    )
    return f'<div class="pair">{left}{right}</div>'
  right = _block('WORLD', 'What the world says', theirs)
  verdict = comparison.compare(plain(ours.text), plain(theirs))
  sign, kind = ('=', 'note') if verdict.agrees else ('≠', 'note off')
  items = ''.join(
    f'<li><code>{_short(path)}</code>: rehearsed <code>{_short(left_value)}'
    f'</code>, really <code>{_short(right_value)}</code></li>'
    for path, left_value, right_value in verdict.differences
  )
  items = f'<ul>{items}</ul>' if items else ''
  note = f'<div class="{kind}"><b>{sign} {verdict.label}</b>{items}</div>'
  return f'<div class="pair">{left}{right}</div>{note}'


def _who(one: _Said) -> str:
  if one.author == 'USER':
    return 'User'
  if one.author != 'ACT':
    return one.author
  return 'Tool call' if '<tool_call>' in one.text else 'Reply to the user'


def _block(author: str, who: str, text: str) -> str:
  kind = author if author in AUTHORS else 'FORCED'
  shown = markup.escape(markup.shorten(plain(text), MAX_SPAN_CHARS))
  if not shown:
    shown = '<span class="missing">nothing</span>'
  return (
    f'<div class="said {kind}"><span class="who">{markup.escape(who)}</span>'
    f'<pre>{shown}</pre></div>'
  )


def _left_out(count: int) -> str:
  if count <= MAX_PARTS:
    return ''
  return f'<p class="missing">{count - MAX_PARTS:,} more parts not shown</p>'


def _details(title: str, body: str) -> str:
  return f'<details class="step"><summary>{title}</summary>{body}</details>'


def _legend(authors: types.Json) -> str:
  items = ''.join(
    f'<li><b class="{name}">■ {name}</b> {what}</li>'
    for name, what in authors.items()
  )
  return f'<ul class="legend">{items}</ul>'


def _short(text: str) -> str:
  return markup.escape(markup.shorten(text, 120))


def _wrap(body: str, kind: str = 'tr') -> str:
  return f'<div class="{kind}"><style>{STYLE}</style>{body}</div>'
