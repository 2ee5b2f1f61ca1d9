"""Page of a survey, ``survey.html``, and the same as text: each hospital's statistics, column by column."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib

from models.evidence.survey import MISSING
from partitions.common.files import write_atomically
from server.report.canvas import BLUE, SETTINGS, Canvas, Style, chart, in_widths, room_for
from server.report.canvas import OTHERS as LOOKS
from server.report.html import format_number, render, text_lines
from server.results.survey import OTHERS, PAGE, Surveyed, cell_names, read_survey
from strategies.base.survey import PARTS

HELD = "withheld"


def write_survey_page(folder: Path) -> Path:
    """Write ``survey.html`` of a survey's directory. Raises DataError if it holds no survey."""
    write_atomically(folder / PAGE, survey_page(read_survey(folder)))
    return folder / PAGE


def survey_page(survey: Surveyed) -> str:
    """Return the page as HTML; every value is escaped."""
    with matplotlib.rc_context(SETTINGS):
        charts = in_widths(draw_curves, survey) if survey.curves else []
    return render("survey", charts=charts, **values_of(survey))


@chart
def draw_curves(survey: Surveyed, width: float) -> str:
    """Draw each group's share without an event, by time, with its interval."""
    curves = survey.curves
    c = Canvas(width, 340, (44, 26 + room_for(curves), 12, 44))
    looks = cycle([(BLUE, "o"), *LOOKS])
    for (name, curve), look in zip(curves.items(), looks, strict=False):
        style = Style(*look)
        ends = [[1.0, *end] for end in (curve.low, curve.high)]
        x = [0.0, *curve.times]
        c.axes.fill_between(x, *ends, step="post", color=style.colour, alpha=0.12, linewidth=0)
        c.axes.step(x, [1.0, *curve.survival], where="post", color=style.colour, linewidth=2.0)
        c.ends.append((curve.survival[-1], name, style))
    c.axes.set_ylim(0, 1.02)
    c.finish_lines("time", rounds=False)
    return c.svg(f"survival{width:g}", "Share without an event by time, of each group")


def values_of(survey: Surveyed) -> dict[str, Any]:
    """Return what the templates of page and text use."""
    return {
        "found": survey,
        "findings": survey.findings,
        "parts": PARTS,
        "held": HELD,
        "holders": holders,
        "values": cells,
        "cell_names": cell_names,
        "count_text": count_text,
        "format_number": format_number,
        "nothing_found": nothing_found,
        "zip": zip,
    }


def nothing_found(survey: Surveyed) -> str:
    """Return the text for no findings; with too few hospitals or values, or in a sum, nothing was compared."""
    if survey.summed:
        return "nothing was compared: a sum shows no single hospital"
    if len(survey.answers) <= OTHERS:
        return f"nothing was compared: it takes {OTHERS + 1} hospitals, for one is held against {OTHERS} others or more"
    if not survey.compared:
        return f"nothing was compared: no column has values of {OTHERS + 1} hospitals or more"
    return "nothing odd is found in one hospital alone"


def holders(survey: Surveyed, key: str, name: str) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the silos that have a column, with their answers."""
    return [(silo, answer) for silo, answer in survey.answers.items() if name in answer[key]]


def cells(n: int, item: Mapping[str, Any]) -> list[str]:
    """Return patients, share of missing values, mean and deviation as text."""
    missing = HELD if item[MISSING] is None else f"{item[MISSING] / n:.0%}" if n else "0%"
    moments = [format_number(item[key]) if key in item else "–" for key in ("mean", "sd")]
    return [str(n), missing, *moments]


def count_text(survey: Surveyed, item: Mapping[str, Any], count: int | None) -> str:
    """Return a cell's count, of a sum with its share of all cells."""
    if count is None:
        return HELD
    total = sum(item["cells"]) if survey.summed else 0
    return f"{count} ({count / total:.0%})" if total else str(count)


def survey_text(survey: Surveyed) -> list[str]:
    """Return the survey as lines for a terminal: each column and hospital, then the findings."""
    return text_lines("survey", **values_of(survey))
