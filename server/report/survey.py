"""Page of a survey, ``survey.html``, and the same as text: each hospital's statistics, column by column."""

# ruff: noqa: E501
from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from models.survey import MISSING
from partitions.common.files import write_atomically
from server.report.html import count_noun, format_number, hospitals_of, render
from server.report.page import CSS
from server.results.survey import OTHERS, PAGE, Finding, Surveyed, cell_names, read_survey
from strategies.base.survey import PARTS

HELD = "withheld"
PAGE_TEXT = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>Survey of {{ silos }}</title><style>{{ css }}
table.reasons thead th { text-align: left; } .ends { display: flex; justify-content: space-between; gap: 8px; } .names { white-space: normal; max-width: 260px; } .bars { display: flex; align-items: flex-end; gap: 1px; height: 26px; min-width: 90px; } .bars i { flex: 1; background: currentColor; opacity: .65; min-height: 1px; } .bars i.held { opacity: .15; height: 100%; }</style></head>
<body><main><header><p class="where">silofl survey</p><h1>{{ silos }}, {{ count }}</h1>
<p class="lead">What each hospital's policy lets out of its columns. A small count, and what would disclose one, is withheld: a pale bar, or &ldquo;withheld&rdquo;. Counts are rounded.</p></header>
<section><h2>Findings</h2><p class="note">A finding is a reason to look. Nothing was corrected: the hospital changes its recipe, and imports again.</p>
{% if found %}<div class="scroll" tabindex="0"><table class="reasons"><thead><tr><th>Hospital</th><th>Column</th><th>What</th><th>Why</th><th>Look at</th></tr></thead><tbody>
{% for f in found %}<tr><th scope="row">{{ f.silo }}</th><td class="text">{{ f.column }}</td><td class="text">{{ f.kind }}</td><td class="text">{{ f.what }}</td><td class="text">{{ code(f.look) }}</td></tr>{% endfor %}</tbody></table></div>
{% else %}<p>{{ nothing }}</p>{% endif %}</section>
{% for part, name, rows in tables %}<section><h2>{{ name }}</h2><p class="note">{{ part }}</p>
<div class="scroll" tabindex="0"><table><thead><tr><th>Hospital</th><th>Patients</th><th>Missing</th><th>Mean</th><th>Deviation</th><th>Counts</th></tr></thead><tbody>
{% for silo, cells, bars, ends, names in rows %}<tr><th scope="row">{{ silo }}</th>{% for cell in cells %}<td>{{ cell|replace("%", " %") }}</td>{% endfor %}<td>{% if bars %}<div class="bars">{% for title, height, held in bars %}<i title="{{ title }}"{% if held %} class="held"{% else %} style="height:{{ height }}%"{% endif %}></i>{% endfor %}</div>{% if ends %}<small class="ends"><span>{{ ends[0] }}</span><span>{{ ends[1] }}</span></small>{% else %}<small class="names">{{ names }}</small>{% endif %}{% endif %}</td></tr>{% endfor %}</tbody></table></div></section>
{% endfor %}</main></body></html>
"""


def write_survey_page(folder: Path) -> Path:
    """Write ``survey.html`` of a survey's directory. Raises DataError if it holds no survey."""
    write_atomically(folder / PAGE, survey_page(read_survey(folder)))
    return folder / PAGE


def survey_page(found: Surveyed) -> str:
    """Return the page as HTML; every value is escaped."""
    tables = [
        (
            part,
            name,
            [
                (silo, cells(a["n"], item := a[key][name]), *histogram(item))
                for silo, a in holders(found, key, name)
            ],
        )
        for part, key in PARTS.items()
        for name in found.names(key)
    ]
    return render(
        PAGE_TEXT,
        css=Markup(CSS),
        silos=hospitals_of(len(found.answers)),
        count=count_noun(len(found.findings), "finding"),
        found=found.findings,
        tables=tables,
        nothing=nothing_found(found),
        code=code,
    )


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


def histogram(item: Mapping[str, Any]) -> tuple[list[tuple[str, int, bool]], list[str], str]:
    """Return a column's bars, and below them the ends of its range or the names of its categories."""
    if "levels" in item:
        return bars(item), [], " · ".join(map(str, item["levels"]))
    return (
        bars(item),
        [format_number(end, zeros=False) for end in item["range"]] if item.get("cells") else [],
        "",
    )


def bars(item: Mapping[str, Any]) -> list[tuple[str, int, bool]]:
    """Return for each cell its name and count, height in per cent, and whether it is withheld."""
    counts = item.get("cells", [])
    most = max((count or 0 for count in counts), default=0) or 1
    return [
        (
            f"{name}: {HELD if count is None else count}",
            round(100 * (count or 0) / most),
            count is None,
        )
        for name, count in zip(cell_names(item), counts, strict=True)
    ]


def survey_text(found: Surveyed) -> list[str]:
    """Return the survey as lines for a terminal: each column and hospital, then the findings."""
    lines = []
    for part, key in PARTS.items():
        for name in found.names(key):
            lines.append(f"{part} {name}")
            for silo, answer in holders(found, key, name):
                item = answer[key][name]
                n, missing, mean, sd = cells(answer["n"], item)
                moments = f"  mean {mean}, sd {sd}" if "mean" in item else ""
                levels = [
                    f"{c} {HELD if k is None else k}"
                    for c, k in zip(item.get("levels", ()), item.get("cells", ()), strict=False)
                ]
                counts = f"  {', '.join(levels)}" if levels else ""
                lines.append(
                    f"  {silo}: {count_noun(int(n), 'patient')}, missing {missing}{moments}{counts}"
                )
    lines += [
        "",
        count_noun(len(found.findings), "finding") if found.findings else nothing_found(found),
    ]
    return lines + [line_of(finding) for finding in found.findings]


def line_of(finding: Finding) -> str:
    """Return a finding in one line."""
    column = f", {finding.column}" if finding.column else ""
    look = f"; look at {finding.look}" if finding.look else ""
    return f"{finding.silo}{column}: {finding.kind}: {finding.what}{look}"
