"""Section on the scores by round: all methods, and each before and after local training."""

from __future__ import annotations

import statistics

from markupsafe import Markup

from server.report.canvas import (
    BLUE,
    LOWEST,
    MUTED,
    ORANGE,
    Canvas,
    Style,
    chart,
    in_widths,
    room_for,
    styles,
)
from server.report.html import capital, render
from server.report.methods import info_of, spell
from server.report.study import StudyResults
from server.results.summary import early_stop

PANELS = 6  # maximum number of methods shown before and after local training
SNAPSHOTS = {
    "received": Style(ORANGE, "s", (0, (4, 2)), filled=False),
    "personal": Style(BLUE, "o", filled=False),
}


def rounds_section(study: StudyResults) -> Markup:
    """Render the scores by round; empty without scores."""
    methods = [m for m in study.methods if study.curve(m, info_of(m).reports)]
    if not methods:
        return Markup()
    first = study.columns if len(methods) > PANELS else ()
    shown = list(dict.fromkeys([*first, *methods]))[:PANELS]
    return render(
        "rounds",
        capital=capital(study),
        word=study.task.score_label,
        by_round=in_widths(by_round, study),
        panels=[(spell(m), before_after(study, m)) for m in shown],
        methods=len(methods),
        stopped=[
            f"{spell(run['strategy'])}, seed {run['seed']}, {why}"
            for run in study.summarised
            if (why := early_stop(run))
        ],
    )


@chart
def by_round(study: StudyResults, width: float) -> str:
    """Draw each method's mean score over silos, for its reported snapshot, by rounds of training."""
    right = 26 + room_for(map(spell, study.methods))
    c = Canvas(width, 360 if width > 500 else 290, (38, right, 10, 42))
    look = styles(study)
    for method in study.methods:
        snapshot = info_of(method).reports
        # The model received in round r was trained for r - 1 rounds
        shift = 1 if snapshot == "received" else 0
        if not (curve := {k - shift: v for k, v in study.curve(method, snapshot).items()}):
            continue
        means = [statistics.fmean(values) for values in curve.values()]
        if len(study.seeds) > 1:
            ranges = list(map(min, curve.values())), list(map(max, curve.values()))
            c.axes.fill_between(
                list(curve), *ranges, color=look[method].colour, alpha=0.12, linewidth=0
            )
        c.line(list(curve), means, look[method], spell(method))
    c.finish_lines("rounds of training")
    return c.svg(
        f"by-round{width:g}",
        f"Mean test {study.task.score_label} over hospitals by round and method.",
    )


@chart
def before_after(study: StudyResults, method: str) -> str:
    """Draw one method's mean score before and after local training, with single silos in the background."""
    c = Canvas(340, 230, (36, 78, 8, 42))
    for silo in study.silos if len(study.silos) <= 40 else ():
        curve = study.curve(method, "personal", silo)
        c.axes.plot(
            list(curve),
            list(map(statistics.fmean, curve.values())),
            color=MUTED,
            alpha=0.22,
            linewidth=0.8,
        )
    for snapshot, style in SNAPSHOTS.items():
        if curve := study.curve(method, snapshot):
            means = list(map(statistics.fmean, curve.values()))
            c.line(list(curve), means, style, snapshot)
    lowest = min((y for y, _, _ in c.ends), default=0.0)
    c.axes.set_ylim(max(lowest - 0.1, LOWEST) if lowest < 0 else -0.02, 1.02)
    c.finish_lines("round")
    label = f"{spell(method)}: mean test {study.task.score_label} by round before and after local training."
    return c.svg(f"before-{method}", label)
