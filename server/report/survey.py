"""Page of a survey, ``survey.html``, and the same as text: each hospital's statistics, column by column."""

# ruff: noqa: E501
from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from models.evidence.survey import MISSING
from partitions.common.files import write_atomically
from server.report.html import format_number, render, text_lines
from server.report.page import CSS
from server.results.survey import OTHERS, PAGE, Surveyed, cell_names, read_survey
from strategies.base.survey import PARTS

HELD = "withheld"
PAGE_TEXT = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>Survey of {{ found.answers|length|hospitals }}</title><style>{{ css }}
table.reasons thead th { text-align: left; } .ends { display: flex; justify-content: space-between; gap: 8px; } .names { white-space: normal; max-width: 260px; } .bars { display: flex; align-items: flex-end; gap: 1px; height: 26px; min-width: 90px; } .bars i { flex: 1; background: currentColor; opacity: .65; min-height: 1px; } .bars i.held { opacity: .15; height: 100%; }</style></head>
<body><main><header><p class="where">silofl survey</p><h1>{{ found.answers|length|hospitals }}, {{ findings|length|noun("finding") }}</h1>
<p class="lead">What each hospital's policy lets out of its columns. A small count, and what would disclose one, is withheld: a pale bar, or &ldquo;withheld&rdquo;. Counts are rounded.</p></header>
<section><h2>Findings</h2><p class="note">A finding is a reason to look. Nothing was corrected: the hospital changes its recipe, and imports again.</p>
{% if findings %}<div class="scroll" tabindex="0"><table class="reasons"><thead><tr><th>Hospital</th><th>Column</th><th>What</th><th>Why</th><th>Look at</th></tr></thead><tbody>
{% for f in findings %}<tr><th scope="row">{{ f.silo }}</th><td class="text">{{ f.column }}</td><td class="text">{{ f.kind }}</td><td class="text">{{ f.what }}</td><td class="text">{{ code(f.look) }}</td></tr>{% endfor %}</tbody></table></div>
{% else %}<p>{{ nothing_found(found) }}</p>{% endif %}</section>
{% for part, key in parts.items() %}{% for name in found.names(key) %}<section><h2>{{ name }}</h2><p class="note">{{ part }}</p>
<div class="scroll" tabindex="0"><table><thead><tr><th>Hospital</th><th>Patients</th><th>Missing</th><th>Mean</th><th>Deviation</th><th>Counts</th></tr></thead><tbody>
{% for silo, answer in holders(found, key, name) %}{% set item = answer[key][name] %}{% set counts = item.cells|default([]) %}{% set most = counts|map("default", 0, true)|max|default(0, true) or 1 %}
<tr><th scope="row">{{ silo }}</th>{% for cell in values(answer.n, item) %}<td>{{ cell|replace("%", " %") }}</td>{% endfor %}<td>{% if counts %}<div class="bars">{% for title, count in zip(cell_names(item), counts) %}<i title="{{ title }}: {{ held if count is none else count }}"{% if count is none %} class="held"{% else %} style="height:{{ (100 * count / most)|whole }}%"{% endif %}></i>{% endfor %}</div>{% if "levels" in item %}<small class="names">{{ item.levels|join(" · ") }}</small>{% else %}<small class="ends">{% for end in item.range %}<span>{{ format_number(end, zeros=false) }}</span>{% endfor %}</small>{% endif %}{% endif %}</td></tr>{% endfor %}</tbody></table></div></section>
{% endfor %}{% endfor %}</main></body></html>
"""


def write_survey_page(folder: Path) -> Path:
    """Write ``survey.html`` of a survey's directory. Raises DataError if it holds no survey."""
    write_atomically(folder / PAGE, survey_page(read_survey(folder)))
    return folder / PAGE


def survey_page(found: Surveyed) -> str:
    """Return the page as HTML; every value is escaped."""
    return render(PAGE_TEXT, css=Markup(CSS), code=code, **values_of(found))


def values_of(found: Surveyed) -> dict[str, Any]:
    """Return what the templates of page and text use."""
    return {
        "found": found,
        "findings": found.findings,
        "parts": PARTS,
        "held": HELD,
        "holders": holders,
        "values": cells,
        "cell_names": cell_names,
        "format_number": format_number,
        "nothing_found": nothing_found,
        "zip": zip,
    }


def code(text: str) -> Markup:
    """Return a text with `names of settings` as code; all else is escaped."""
    return Markup(re.sub("`(.*?)`", r"<code>\1</code>", str(escape(text))))


def nothing_found(found: Surveyed) -> str:
    """Return the text for no findings; with too few hospitals nothing was compared."""
    if len(found.answers) <= OTHERS:
        return f"nothing was compared: it takes {OTHERS + 1} hospitals, for one is held against {OTHERS} others or more"
    return "nothing odd is found in one hospital alone"


def holders(found: Surveyed, key: str, name: str) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the silos that have a column, with their answers."""
    return [(silo, answer) for silo, answer in found.answers.items() if name in answer[key]]


def cells(n: int, item: Mapping[str, Any]) -> list[str]:
    """Return patients, share of missing values, mean and deviation as text."""
    missing = HELD if item[MISSING] is None else f"{item[MISSING] / n:.0%}" if n else "0%"
    moments = [format_number(item[key]) if key in item else "–" for key in ("mean", "sd")]
    return [str(n), missing, *moments]


TEXT = """{% for part, key in parts.items() %}{% for name in found.names(key) %}
{{ part }} {{ name }}
{% for silo, answer in holders(found, key, name) %}{% set item = answer[key][name] %}{% set n, missing, mean, sd = values(answer.n, item) %}
  {{ silo }}: {{ answer.n|noun("patient") }}, missing {{ missing }}
{%- if "mean" in item %}  mean {{ mean }}, sd {{ sd }}{% endif %}
{%- for level, count in zip(item.levels|default([]), item.cells|default([])) %}{{ "  " if loop.first else ", " }}{{ level }} {{ held if count is none else count }}{% endfor %}

{% endfor %}{% endfor %}{% endfor %}

{{ findings|length|noun("finding") if findings else nothing_found(found) }}
{% for f in findings %}{{ f.silo }}{{ ", " ~ f.column if f.column }}: {{ f.kind }}: {{ f.what }}{{ "; look at " ~ f.look if f.look }}
{% endfor %}"""


def survey_text(found: Surveyed) -> list[str]:
    """Return the survey as lines for a terminal: each column and hospital, then the findings."""
    return text_lines(TEXT, **values_of(found))
