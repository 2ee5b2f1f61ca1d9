"""The report's page: head, sections and footer. The templates escape all values from a run."""

# ruff: noqa: E501  (template)

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import matplotlib
from markupsafe import Markup

from server.report.canvas import SETTINGS
from server.report.head import faults, headline, tiles, where
from server.report.html import render
from server.report.methods import exchanges, info_of, spell
from server.report.sections.cost import cost_section, left_section
from server.report.sections.evidence import evidence_section
from server.report.sections.methods import methods_section, tuning_section
from server.report.sections.privacy import privacy_section
from server.report.sections.repeat import repeat_section
from server.report.sections.rounds import rounds_section
from server.report.sections.silo_data import data_section, relationships_section
from server.report.sections.silos import silos_section, unseen_section
from server.report.study import StudyResults
from server.report.verdict import answer
from strategies import strategies

CSS = """
:root {
  color-scheme: light dark;
  --page: #f6f6f4; --card: #ffffff; --ink: #1b1f24; --muted: #5c6670; --grid: #e2e5e8; --tint: #eef3f7; --shade: #1b1f2440;
  --blue: #0072b2; --orange: #c98300; --green: #00805e; --vermillion: #c65200; --purple: #b05f8c; --sky: #3a9bd0;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --page: #101418; --card: #171c22; --ink: #e6e9ec; --muted: #9aa5b0; --grid: #2d353d; --tint: #1e2730; --shade: #e6e9ec40;
    --blue: #5bb4ec; --orange: #eaa92d; --green: #2cc39a; --vermillion: #f08a4b; --purple: #dd9bc2; --sky: #9ad4f5;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; scroll-behavior: smooth; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Helvetica Neue", Arial, sans-serif;
}
main { max-width: 1080px; margin: 0 auto; padding: 40px 24px 72px; }
header p.where { margin: 0 0 14px; color: var(--muted); font-size: 14px; }
header p.where b { color: var(--ink); font-weight: 600; }
h1 { font-size: clamp(25px, 3.6vw, 38px); line-height: 1.2; letter-spacing: -0.015em; font-weight: 680; margin: 0 0 14px;
     max-width: 27em; text-wrap: balance; }
h1 em { font-style: normal; } h1 em.shown { color: var(--blue); }
h2 { font-size: 22px; line-height: 1.3; letter-spacing: -0.01em; margin: 0 0 6px; font-weight: 650; }
h3 { font-size: 15px; margin: 24px 0 6px; font-weight: 650; }
p { margin: 0 0 12px; max-width: 46em; }
p.lead { font-size: 17px; color: var(--muted); max-width: 44em; }
.nb { white-space: nowrap; }
p.note, figcaption, .note { color: var(--muted); font-size: 14px; line-height: 1.5; }
.answer { border-left: 4px solid var(--blue); background: var(--card); padding: 14px 18px; margin: 18px 0; border-radius: 0 8px 8px 0; }
.answer h2 { font-size: 16px; } .answer p { margin: 0 0 6px; max-width: 56em; overflow-wrap: anywhere; } .answer p:last-child { margin: 0; }
.fault { border-left: 4px solid var(--vermillion); background: var(--card); padding: 12px 16px; margin: 18px 0; border-radius: 0 8px 8px 0; }
.fault p { margin: 0; overflow-wrap: anywhere; }
.fault p + p { margin-top: 6px; }
nav { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 22px 0 0; font-size: 14px; }
nav a { color: var(--muted); text-decoration: none; border-bottom: 1px solid var(--grid); }
nav a:hover { color: var(--blue); border-color: currentColor; }
.tiles { display: grid; grid-template-columns: repeat(4, 1fr); gap: 1px; background: var(--grid); border: 1px solid var(--grid);
         border-radius: 12px; overflow: hidden; margin: 26px 0 0; }
.tiles > div { background: var(--card); padding: 16px 18px 14px; }
.tiles dt { font-size: 13px; color: var(--muted); }
.tiles dd { margin: 2px 0 0; font-size: 29px; font-weight: 660; letter-spacing: -0.02em; line-height: 1.25; font-variant-numeric: tabular-nums; }
.tiles dd small { font-size: 15px; font-weight: 500; letter-spacing: 0; color: var(--muted); }
.tiles dd + dd { font-size: 13px; font-weight: 400; color: var(--muted); letter-spacing: 0; line-height: 1.45; }
section { background: var(--card); border: 1px solid var(--grid); border-radius: 12px; padding: 28px 30px 24px; margin: 22px 0 0; }
figure { margin: 18px 0 6px; }
figcaption { margin-top: 8px; max-width: 52em; }
svg { display: block; width: 100%; height: auto; overflow: visible; color: var(--ink); }
svg text { font-family: inherit; font-variant-numeric: tabular-nums; }
.narrow, td small.phone, th small.phone { display: none; }
.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(290px, 1fr)); gap: 22px 28px; align-items: start; }
.panels.two { grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); }
.side { display: grid; grid-template-columns: minmax(0, 1.65fr) minmax(0, 1fr); gap: 20px 36px; align-items: start; }
.side .panels { grid-template-columns: 1fr; }
.panels figure { margin: 10px 0 0; }
.panels h3 { margin: 0 0 4px; }
.scroll { overflow-x: auto; margin: 16px 0 0; background: /* covers that scroll along, shadows that stay */
  linear-gradient(to left, var(--card) 40%, transparent) right / 60px 100% no-repeat local,
  linear-gradient(to left, var(--shade), transparent) right / 22px 100% no-repeat scroll; }
.scroll th:first-child { position: sticky; left: 0; background: var(--card); }
.swipe { display: none; text-align: right; }
table { border-collapse: collapse; width: 100%; font-size: 14.5px; font-variant-numeric: tabular-nums; }
th, td { padding: 8px 10px; text-align: right; vertical-align: top; white-space: nowrap; border-bottom: 1px solid var(--grid); }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
th:last-child, td:last-child { padding-right: 0; }
table.wordy th:nth-child(2), table.wordy th:nth-child(4), table.reasons thead th:last-child { text-align: left; }
table.methods th, table.methods td { padding-left: 6px; padding-right: 6px; } table.methods th:first-child { padding-left: 0; }
table.methods tbody th { white-space: normal; max-width: 11em; }
table.dense td, table.dense tbody th { padding-top: 4px; padding-bottom: 4px; }
td.text, th.text { text-align: left; white-space: normal; min-width: 11em; }
thead th { font-weight: 550; color: var(--muted); font-size: 13px; line-height: 1.35; vertical-align: bottom; border-bottom-color: var(--muted); }
tbody th { font-weight: 550; }
tfoot td, tfoot th { font-weight: 620; border-bottom: 0; border-top: 1px solid var(--muted); }
td small, th small { display: block; color: var(--muted); font-size: 12px; font-weight: 400; line-height: 1.35; }
td.main { background: var(--tint); }
td.up { color: var(--blue); font-weight: 640; }
td.down { color: var(--vermillion); font-weight: 640; }
td.best { font-weight: 680; }
dl.terms { display: grid; grid-template-columns: max-content 1fr; gap: 8px 20px; margin: 18px 0 0; font-size: 14.5px; }
dl.terms dt { font-weight: 620; }
dl.terms dd { margin: 0; color: var(--muted); max-width: 48em; }
pre { background: var(--tint); border-radius: 8px; padding: 14px 16px; overflow-x: auto; font-size: 13.5px; line-height: 1.6; margin: 12px 0; }
code, pre { font-family: ui-monospace, SFMono-Regular, "Cascadia Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
code { font-size: 0.92em; }
ul { padding-left: 20px; margin: 0 0 12px; max-width: 46em; }
details.note { margin: 12px 0; }
details summary { cursor: pointer; color: var(--muted); font-size: 14px; }
.keys { display: flex; gap: 22px; align-items: center; flex-wrap: wrap; }
footer { color: var(--muted); font-size: 13px; margin-top: 26px; }
@media (max-width: 860px) { .tiles { grid-template-columns: repeat(2, 1fr); } .side { grid-template-columns: 1fr; }
  .side .panels { grid-template-columns: repeat(auto-fill, minmax(290px, 1fr)); } }
@media (max-width: 600px) {
  main { padding: 24px 14px 48px; }
  section { padding: 20px 16px 16px; border-radius: 10px; }
  .scroll { margin: 14px 0 0; } .swipe { display: block; margin: 14px 0 -8px; }
  .wide { display: none; } .narrow { display: block; }
  .tiles > div { padding: 12px 14px; }
  .tiles dd { font-size: 24px; }
  table { font-size: 13.5px; } th, td { padding: 7px 6px; }
  .desk, table.silos thead th:nth-child(2), table.silos thead th:nth-child(3) { display: none; }
  td small.phone, th small.phone { display: block; }
  table.silos thead th { white-space: normal; }
  dl.terms { grid-template-columns: 1fr; gap: 2px; } dl.terms dd { margin-bottom: 10px; }
  pre { white-space: pre-wrap; overflow-wrap: anywhere; }
}
@media screen and (max-width: 430px) { table { font-size: 12.5px; } th, td { padding: 7px 4px; } td small, th small { font-size: 11px; }
  table.silos thead th { font-size: 12px; } }
@media print {
  @page { margin: 14mm; }
  body { background: none; font-size: 10.5pt; } main { max-width: none; padding: 0; }
  section { border: 0; border-top: 1px solid var(--grid); border-radius: 0; padding: 14px 0 0; margin-top: 18px; }
  nav, details { display: none; } .scroll { overflow: visible; margin: 10px 0 0; background: none; }
  .wide { display: block; } .narrow { display: none; }
  figure, tr, .tiles, .panels > div, dl.terms > * { break-inside: avoid; } h2, h3 { break-after: avoid; }
  thead { display: table-header-group; } tfoot { display: table-row-group; }
  table { font-size: 9pt; } th, td { padding: 4px 5px; } pre { white-space: pre-wrap; overflow-wrap: anywhere; }
  * { -webkit-print-color-adjust: exact; print-color-adjust: exact; }
}
"""
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>silofl report: {{ title }}</title>
<style>{{ css }}</style>
</head>
<body>
<main>
<header>
<p class="where">{{ where }}</p>
<h1>{{ sentence }}</h1>
<p class="lead">{{ lead }}</p>
{% if answer %}<div class="answer"><h2>Should we federate?</h2><p>{{ answer.sentence }}</p>{% if answer.condition %}<p class="note">{{ answer.condition }}</p>{% endif %}</div>{% endif %}
{{ faults }}
{{ tiles }}
<nav>{% for key, name, _ in sections %}<a href="#{{ key }}">{{ name }}</a>{% endfor %}</nav>
</header>
{% for key, _, body in sections %}
<section id="{{ key }}">{{ body }}</section>
{% endfor %}
<footer>{{ footer }}</footer>
</main>
</body>
</html>
"""
SECTIONS = (
    ("silos", "Hospitals", silos_section),
    ("methods", "Methods", methods_section),
    ("tuning", "Tuning", tuning_section),
    ("unseen", "Unseen", unseen_section),
    ("evidence", "Evidence", evidence_section),
    ("rounds", "Rounds", rounds_section),
    ("data", "Data", data_section),
    ("relationships", "Relationships", relationships_section),
    ("cost", "Cost", cost_section),
    ("privacy", "Privacy", privacy_section),
    ("left", "What left the hospitals", left_section),
    ("repeat", "Repeat", repeat_section),
)


def page(study: StudyResults) -> str:
    """Return the whole report of a study as HTML."""
    with matplotlib.rc_context(SETTINGS):
        sections = [
            (key, name, body) for key, name, section in SECTIONS if (body := section(study))
        ]
    sentence, lead = headline(study)
    return render(
        PAGE,
        title=study.path.resolve().name,
        css=Markup(CSS),
        where=where(study),
        sentence=sentence,
        lead=lead,
        answer=answer(study),
        faults=faults(study),
        tiles=tiles(study),
        sections=sections,
        footer=footer(study),
    )


def footer(study: StudyResults) -> str:
    """Return the version and the methods' sources."""
    try:
        release = version("silofl")
    except PackageNotFoundError:  # inside a Flower app bundle
        release = ""
    known = strategies()
    papers = [
        f"{spell(m)}: {info_of(m).paper}" for m in study.methods if m in known and exchanges(m)
    ]
    return f"silofl {release}. " + "; ".join(papers) + ("." if papers else "")
