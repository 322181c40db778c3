"""The style sheet of `report.html`: one column, quiet, light or dark."""

_LIGHT = (
  '--bg:#f7f5f0;--card:#fff;--ink:#1d1c1a;--soft:#66635c;--line:#e2dfd8;'
  '--accent:#c4560b;--good:#2f6f3a;--bad:#b3261e'
)
_DARK = (
  '--bg:#121316;--card:#1c1d20;--ink:#e9e7e2;--soft:#a5a29b;--line:#35373c;'
  '--accent:#f2995c;--good:#8fce9b;--bad:#ff8a80'
)

PAGE = f"""
:root{{color-scheme:light dark;{_LIGHT}}}
@media (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{_DARK}}}}}
:root[data-theme=dark]{{color-scheme:dark;{_DARK}}}
:root[data-theme=light]{{color-scheme:light}}
*{{box-sizing:border-box}}
html{{-webkit-text-size-adjust:100%;text-size-adjust:100%}}
body{{margin:0;background:var(--bg);color:var(--ink);
font:16px/1.55 ui-sans-serif,system-ui,-apple-system,'Segoe UI',Roboto,
'Helvetica Neue',Arial,sans-serif;font-variant-numeric:tabular-nums}}
main{{max-width:1000px;margin:0 auto;padding:56px 24px 80px}}
.kicker{{color:var(--soft);font-size:14px;margin:0 0 10px}}
h1{{font:500 clamp(23px,3.4vw,33px)/1.32 Charter,'Bitstream Charter',
'Sitka Text',Cambria,Georgia,serif;margin:0;max-width:31em;
text-wrap:pretty;letter-spacing:-.005em}}
h1 b{{font-weight:600;color:var(--accent);white-space:nowrap}}
h2{{font:600 21px/1.3 Charter,'Bitstream Charter','Sitka Text',Cambria,
Georgia,serif;margin:64px 0 6px}}
p{{margin:0 0 16px;max-width:68ch}}
.lead{{color:var(--soft)}}
.tiles{{display:grid;grid-template-columns:repeat(4,1fr);gap:1px;
margin:36px 0 0;background:var(--line);border:1px solid var(--line);
border-radius:8px;overflow:hidden}}
.tile{{background:var(--card);padding:16px 18px}}
.tile dt{{font-size:13px;color:var(--soft)}}
.tile dd{{margin:2px 0 0;font-size:27px;font-weight:600;line-height:1.25}}
.tile dd small{{display:block;font-size:12.5px;font-weight:400;
color:var(--soft);line-height:1.45;margin-top:2px}}
.charts{{display:grid;grid-template-columns:repeat(2,1fr);gap:16px;
margin-top:20px}}
.card,figure{{background:var(--card);border:1px solid var(--line);
border-radius:8px;margin:0;min-width:0}}
figure{{padding:12px}}
figure svg{{display:block;width:100%;height:auto;max-width:560px;margin:auto}}
.scroll{{overflow-x:auto}}
table{{border-collapse:collapse;width:100%;font-size:15px}}
th,td{{padding:9px 18px;text-align:right;vertical-align:baseline;
border-top:1px solid var(--line)}}
th{{font-weight:400;text-align:left}}
thead th{{border-top:0;color:var(--soft);font-size:13px;text-align:right}}
thead th:first-child{{text-align:left}}
td small,th small{{color:var(--soft);font-size:12.5px}}
td small{{white-space:nowrap}}
td b{{font-weight:600}}
tr.head th{{color:var(--soft);font-size:13px;padding-top:18px;
border-top-color:transparent}}
.episode{{padding:18px 20px 16px;margin-top:16px}}
.episode h3{{font-size:15px;font-weight:600;margin:0;line-height:1.4;
overflow-wrap:anywhere}}
.facts{{color:var(--soft);font-size:13px;margin:2px 0 12px;max-width:none}}
.facts .yes{{color:var(--good);font-weight:600}}
.facts .no{{color:var(--bad);font-weight:600}}
details{{margin-top:12px}}
summary{{cursor:pointer;color:var(--soft);font-size:13.5px}}
summary:hover{{color:var(--ink)}}
summary:focus-visible{{outline:2px solid var(--accent);outline-offset:3px}}
details[open]>summary{{margin-bottom:8px}}
.config{{margin:0;padding:16px 18px;white-space:pre-wrap;
overflow-wrap:anywhere;font:12.5px/1.5 ui-monospace,SFMono-Regular,Menlo,
Consolas,monospace;background:var(--card);border:1px solid var(--line);
border-radius:8px}}
.costs{{display:flex;flex-wrap:wrap;gap:14px 40px;margin:16px 0 0}}
.costs dt{{font-size:13px;color:var(--soft)}}
.costs dd{{margin:0;font-weight:600}}
.terms{{display:grid;grid-template-columns:max-content 1fr;gap:6px 24px;
margin:16px 0 0;font-size:15px}}
.terms dt{{font-weight:600}}
.terms dd{{margin:0;color:var(--soft)}}
@media (max-width:760px){{
main{{padding:32px 16px 56px}}
h2{{margin-top:48px}}
.tiles{{grid-template-columns:repeat(2,1fr)}}
.tile{{padding:13px 14px}}
.charts{{grid-template-columns:1fr}}
figure{{padding:6px}}
th,td{{padding:8px 10px}}
td small{{display:block}}
.episode{{padding:14px}}
.terms{{grid-template-columns:1fr;gap:0}}
.terms dd{{margin-bottom:8px}}
}}
@media print{{body{{background:#fff}}main{{padding:0;max-width:none}}
.episode,figure{{break-inside:avoid}}}}
"""
