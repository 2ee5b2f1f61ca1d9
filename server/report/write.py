"""Writer of a study's report, ``report.html``.

:func:`write_report` writes the page; :func:`silo_table` returns the same comparison as plain text. ``study`` has the
values, ``sections`` the texts, ``charts`` the charts, ``templates`` the HTML.
"""

from __future__ import annotations

import math
from logging import WARNING
from pathlib import Path

from flwr.common import log

from partitions.common.files import write_atomically
from partitions.common.output import columns
from partitions.simulated import divide
from server.report.html import between, number, percent, points
from server.report.methods import spell
from server.report.page import page
from server.report.participation import rounds_missed, seldom
from server.report.study import StudyResults
from server.report.survey import write_survey_page
from server.report.verdict import verdict
from server.results.manifest import describe
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
    manifest = describe(
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
    methods, best, base = study.methods, study.best, study.base
    rows = [["silo", "test", *map(spell, methods)]]
    for silo in study.silos:
        cells = [study.score(m, silo) for m in methods]
        tested = max((c.n_test for c in cells), default=0)
        rows.append([silo, str(tested), *(percent_of(c.mean, c.spread) for c in cells)])
    rows.append(["mean", "", *(percent_of(*study.mean_score(m)) for m in methods)])
    if study.ranks:
        rows.append(["mean rank", "", *(number(study.ranks[m], 2) for m in methods)])
    notes = []
    if best and base:
        gains = [study.gain(best, base, silo) for silo in study.silos]
        gains.append(study.mean_gain(best, base))
        column = [f"{spell(best)} gains", *(points(gain.mean) for gain in gains), ""]
        rows = [[*row, text] for row, text in zip(rows, column, strict=False)]
        notes += [gain_line(study, best, base)] if any(study.counts(best, base)) else []
    several = f"; mean and standard deviation of {len(study.seeds)} seeds"
    notes.append(
        f"{study.task.score_label} in % on test data, at the round that validation data chose"
        + (several if len(study.seeds) > 1 else "")
    )
    if rare := seldom(study, methods):
        notes.append(
            f"{rounds_missed(rare)}: scores are those of the last round that a silo took part in"
        )
    text = columns([[row[0], *(cell.translate(TERMINAL) for cell in row[1:])] for row in rows])
    rule, end = "-" * max(map(len, text)), 1 + len(study.silos)
    return "\n".join(
        [text[0], rule, *text[1:end], rule, *text[end:], *notes, *damages_of(study)]
    )


def gain_line(study: StudyResults, best: str, base: str) -> str:
    """Return the mean gain, with the decision of the report's headline."""
    found = verdict(study, best, base)
    why = f"95 % interval {between(found.gain)}"
    why = why if found.shown else f"not yet certain: {found.why}"
    gain = f"{spell(best)} against {spell(base)}: {points(found.gain.mean)} points, {why}"
    return gain.translate(TERMINAL)


def percent_of(mean: float, deviation: float) -> str:
    return percent(mean) + ("" if math.isnan(deviation) else f" ±{percent(deviation)}")


def damages_of(study: StudyResults) -> list[str]:
    """Return the notes on silos' damaged states, and how the run handled each."""
    notes = (e for e in study.events if e["event"] == "note" and e.get("about") == "state")
    return list(dict.fromkeys(event["message"] for event in notes))
