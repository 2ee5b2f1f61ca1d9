"""Writer of a study's report, ``report.html``.

:func:`write_report` writes the page; :func:`silo_table` returns the same comparison as plain text. ``study`` has the
values, ``sections`` the texts, ``charts`` the charts, ``templates`` the HTML.
"""

from __future__ import annotations

import statistics
from logging import WARNING
from pathlib import Path

from flwr.common import log

from partitions.common.files import write_atomically
from partitions.common.output import columns
from partitions.simulated import divide
from server.report.html import text_lines
from server.report.page import page
from server.report.participation import rounds_missed, seldom
from server.report.sections.silos import lowest_score, unseen_methods
from server.report.study import StudyResults
from server.report.survey import write_survey_page
from server.report.verdict import verdict
from server.results.manifest import describe_partition
from server.results.run_directory import RunDirectory
from server.results.survey import JSON as SURVEY_JSON
from strategies.base.run_settings import RunSettings

TERMINAL = str.maketrans("–−", "--")


def write_manifest(directory: RunDirectory, settings: RunSettings) -> None:
    """Write a simulated run's ``manifest.json``, the samples of each silo, unless an earlier seed has written it."""
    c = settings.common
    if (directory.path / "manifest.json").exists():
        return
    whole, silos = divide(settings.division)
    manifest = describe_partition(
        whole, silos, name=c.partition, seed=c.seed, settings=settings.partition
    )
    directory.write_json("manifest.json", manifest)


def write_report(path: Path) -> Path:
    """Write the page of a run directory: a report, or a survey's page. Raises UserError if it holds no run."""
    if (path / SURVEY_JSON).is_file():
        return write_survey_page(path)
    study = StudyResults(path)
    file = path / "report.html"
    write_atomically(file, page(study))
    return file


def try_report(path: Path) -> None:
    """Write the report at the end of a run; an error in the report is logged and does not fail the run."""
    try:
        write_report(path)
    except Exception as error:
        log(
            WARNING,
            "no report: %s: %s (later: silofl report %s)",
            type(error).__name__,
            error,
            path,
        )


def silo_table(study: StudyResults) -> str:
    """Return the comparison per silo as plain text: scores in per cent, gains in points, means and mean ranks.

    Notes on damaged states are added at the end.
    """
    methods, best = study.methods, study.best or ""
    base = study.base if best else None
    lines = text_lines(
        "comparison",
        study=study,
        best=best,
        base=base,
        found=verdict(study, best, base) if base else None,
        tested=lambda silo: max((study.score(m, silo).n_test for m in methods), default=0),
        rare=rounds_missed(seldom(study, methods)),
    )
    cells, notes = (
        lines[: (end := lines.index(""))],
        [line.translate(TERMINAL) for line in lines[end + 1 :]],
    )
    text = columns(
        [
            [name, *(cell.translate(TERMINAL) for cell in rest)]
            for name, *rest in (line.split("\t") for line in cells)
        ]
    )
    rule, end = "-" * max(map(len, text)), 1 + len(study.silos)
    # What the run noted of silos' damaged states, and how it handled each
    damaged = (e for e in study.events if e["event"] == "note" and e.get("about") == "state")
    notes += dict.fromkeys(event["message"] for event in damaged)
    return "\n".join(
        [text[0], rule, *text[1:end], rule, *text[end:], *notes, *held_out_lines(study)]
    )


def held_out_lines(study: StudyResults) -> list[str]:
    """Return the means and worst scores of held-out hospitals in per cent, a line per method; empty without any."""
    if not (methods := unseen_methods(study)):
        return []
    rows = text_lines("held-out", methods=methods, mean=statistics.fmean, lowest=lowest_score)
    return ["", *columns(row.translate(TERMINAL).split("\t") for row in rows)]
