"""Chart of the scores by spent epsilon."""

from __future__ import annotations

import statistics

from server.report.charts.canvas import MUTED, chart, drawn, end_labels, percent_axis, styles
from server.report.methods import reports, spelled
from server.report.study import Study

Points = list[tuple[float, float]]


def epsilon_by_round(study: Study, method: str, silo: str) -> dict[int, float]:
    """Return the epsilon that a silo has spent in a run after each round, mean over seeds."""
    found: dict[int, list[float]] = {}
    for row in study.history.rows:
        if (row.strategy, row.silo, row.metric, row.split) == (method, silo, "epsilon", ""):
            found.setdefault(row.round, []).append(row.value)
    return {number: statistics.fmean(values) for number, values in sorted(found.items())}


def bought(study: Study, method: str, silo: str) -> Points:
    """Return (epsilon, score) of a silo by round, for the method's reported snapshot, if both are known.

    The model received in round r has the privacy cost of the rounds before it.
    """
    spent, snapshot = epsilon_by_round(study, method, silo), reports(method)
    shift = 1 if snapshot == "received" else 0
    curve = study.curve(method, snapshot, silo)
    return [(spent[r - shift], statistics.fmean(v)) for r, v in curve.items() if r - shift in spent]


def private_methods(study: Study) -> list[str]:
    """Return the methods that were run with differential privacy."""
    private = {row.strategy for row in study.history.rows if row.metric == "epsilon" and row.silo}
    return [method for method in study.methods if method in private]


@chart
def accuracy_by_epsilon(study: Study, width: float) -> str:
    """Draw each silo's score against its epsilon, and the mean over silos; empty without scores."""
    look, ends = styles(study), []
    methods = private_methods(study)
    right = 26 + 7.2 * max((len(spelled(m)) for m in methods), default=0)
    c = drawn(width, 320 if width > 500 else 270, (38, right, 10, 42))
    a = c.axes
    for method in methods:
        lines = [points for silo in study.silos if (points := bought(study, method, silo))]
        for points in lines:
            a.plot(*zip(*points, strict=True), color=look[method].colour, alpha=0.3, linewidth=0.8)
        if not lines:
            continue
        steps = list(zip(*lines, strict=False))  # the rounds that all silos have
        mean = [tuple(statistics.fmean(values) for values in zip(*step, strict=True)) for step in steps]
        a.plot(
            *zip(*mean, strict=True),
            color=look[method].colour,
            linestyle=look[method].dash,
            linewidth=2.0,
            marker=look[method].marker,
            markevery=max(1, round(len(mean) / 8)),
            markersize=6,
            markerfacecolor=look[method].face,
            markeredgewidth=1.4,
        )
        ends.append((mean[-1][1], spelled(method), look[method]))
    if not ends:
        return ""
    a.margins(x=0.02)
    a.grid(axis="y")
    percent_axis(a.yaxis)
    a.set_xlabel("epsilon spent in the run")
    a.tick_params(axis="y", labelcolor=MUTED)
    end_labels(c, ends)
    label = f"Test {study.task.score_label} against spent epsilon, a thin line per silo, a thick one for their mean."
    return c.svg(f"by-epsilon{width:g}", label)
