"""Section on differential privacy: each silo's privacy cost, and the scores reached with it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from markupsafe import Markup

from server.report.canvas import Canvas, chart, in_widths, room_for, styles
from server.report.html import render
from server.report.methods import info_of, spell
from server.report.study import StudyResults
from server.results.history import SiloCost, spent_by_silo
from server.results.reading import which_of


def privacy_section(study: StudyResults) -> Markup:
    """Render the section; empty if no run had differential privacy."""
    methods = private_methods(study)
    if not methods:
        return Markup()
    return render(
        "privacy",
        study=study,
        methods=methods,
        several=sum(len(study.of(method)) for method in methods) > 1,
        rows=list(privacy_rows(study, methods)),
        figure=in_widths(score_by_epsilon, study),
    )


def private_methods(study: StudyResults) -> list[str]:
    """Return the methods that were run with differential privacy."""
    private = {
        row.strategy for row in study.history.rows if row.metric == "epsilon" and row.silo
    }
    return [method for method in study.methods if method in private]


def privacy_rows(
    study: StudyResults, methods: list[str]
) -> Iterator[tuple[str, str, SiloCost, float | None]]:
    """Yield silo, run, cost and score for each silo and run."""
    for run in (run for method in methods for run in study.of(method)):
        key = which_of(run)
        end = "" if key in study.finished else ", not finished"
        for silo, cost in spent_by_silo(study.history.of(*key)).items():
            score = run["per_silo"].get(silo, {}).get(study.task.score)
            yield silo, f"{spell(key[0])}, {key[1]}{end}", cost, score


def bought(study: StudyResults, method: str, silo: str) -> list[tuple[float, float]]:
    """Return (epsilon, score) of a silo by round, for the method's reported snapshot, if both are known.

    The model received in round r has the privacy cost of the rounds before it.
    """
    spent, snapshot = study.per_round(method, "epsilon", silo), info_of(method).reports
    shift = 1 if snapshot == "received" else 0
    curve = study.curve(method, snapshot, silo)
    return [
        (spent[r - shift], statistics.fmean(v)) for r, v in curve.items() if r - shift in spent
    ]


@chart
def score_by_epsilon(study: StudyResults, width: float) -> str:
    """Draw each silo's score against its epsilon, and the mean over silos; empty without scores."""
    methods, look = private_methods(study), styles(study)
    right = 26 + room_for(map(spell, methods))
    c = Canvas(width, 320 if width > 500 else 270, (38, right, 10, 42))
    for method in methods:
        lines = [points for silo in study.silos if (points := bought(study, method, silo))]
        for points in lines:
            c.axes.plot(
                *zip(*points, strict=True), color=look[method].colour, alpha=0.3, linewidth=0.8
            )
        if lines:
            steps = zip(*lines, strict=False)  # the rounds that all silos have
            x, y = zip(
                *(map(statistics.fmean, zip(*step, strict=True)) for step in steps), strict=True
            )
            c.line(x, y, look[method], spell(method))
    if not c.ends:
        return ""
    c.finish_lines("epsilon spent in the run", rounds=False)
    label = f"Test {study.task.score_label} against spent epsilon, a thin line per silo, a thick one for their mean."
    return c.svg(f"by-epsilon{width:g}", label)
