"""Page of a survey, ``survey.html``, and the same as text: each hospital's statistics, column by column."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.evidence.survey import MISSING
from partitions.common.files import write_atomically
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
    return render("survey", **values_of(survey))


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
        "format_number": format_number,
        "nothing_found": nothing_found,
        "zip": zip,
    }


def nothing_found(survey: Surveyed) -> str:
    """Return the text for no findings; with too few hospitals nothing was compared."""
    if len(survey.answers) <= OTHERS:
        return f"nothing was compared: it takes {OTHERS + 1} hospitals, for one is held against {OTHERS} others or more"
    return "nothing odd is found in one hospital alone"


def holders(survey: Surveyed, key: str, name: str) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the silos that have a column, with their answers."""
    return [(silo, answer) for silo, answer in survey.answers.items() if name in answer[key]]


def cells(n: int, item: Mapping[str, Any]) -> list[str]:
    """Return patients, share of missing values, mean and deviation as text."""
    missing = HELD if item[MISSING] is None else f"{item[MISSING] / n:.0%}" if n else "0%"
    moments = [format_number(item[key]) if key in item else "–" for key in ("mean", "sd")]
    return [str(n), missing, *moments]


def survey_text(survey: Surveyed) -> list[str]:
    """Return the survey as lines for a terminal: each column and hospital, then the findings."""
    return text_lines("survey", **values_of(survey))
