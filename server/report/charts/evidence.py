"""Charts of a silo's evidence: reliability diagram and net benefit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from models.evidence.decisions import THRESHOLDS
from models.evidence.measure import unflat
from server.report.charts.canvas import MUTED, chart, drawn, percent_axis, styles
from server.report.methods import spelled
from server.report.study import Study

SIZE = (290, 232)
LOWEST = -0.1  # lower end of the net benefit axis: treating everybody has no lower bound


@chart
def reliability_diagram(study: Study, silo: str, bins: Mapping[str, Sequence[float]]) -> str:
    """Draw the share of events against the predicted probability, of the methods in ``bins``."""
    c, look = drawn(*SIZE, (40, 12, 10, 40)), styles(study)
    a = c.axes
    a.plot([0, 1], [0, 1], color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
    for method, values in bins.items():
        rows, style = unflat(list(values)), look[method]
        most = rows[:, 0].max()
        a.plot(rows[:, 1], rows[:, 2], color=style.colour, linewidth=1.6, linestyle=style.dash, zorder=3)
        for n, predicted, observed in rows.tolist():
            mark = {"color": style.colour, "markerfacecolor": style.face, "markeredgewidth": 1.4}
            a.plot(predicted, observed, style.marker, **mark, markersize=4 + 4 * n / most, zorder=4, clip_on=False)
    a.set(xlim=(0, 1), ylim=(0, 1), xlabel="predicted, %", ylabel="observed, %")
    a.grid(axis="both")
    percent_axis(a.xaxis)
    percent_axis(a.yaxis)
    names = ", ".join(map(spelled, bins))
    return c.svg(f"reliability-{study.silos.index(silo)}", f"Reliability diagram of {silo} with {names}.")


@chart
def value_diagram(study: Study, silo: str, bins: Mapping[str, Sequence[float]], key: str) -> str:
    """Draw mean measurement against mean prediction, in the label's unit, of the methods in ``bins``."""
    c, look = drawn(*SIZE, (52, 12, 14, 40)), styles(study)
    a, ends = c.axes, [v for values in bins.values() for i, v in enumerate(values) if i % 4 in (1, 2)]
    margin = 0.05 * (max(ends) - min(ends)) or 1.0
    low, high = min(ends) - margin, max(ends) + margin
    a.plot([low, high], [low, high], color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
    for method, values in bins.items():
        rows, style = np.asarray(values, dtype=np.float64).reshape(-1, 4), look[method]
        a.plot(rows[:, 1], rows[:, 2], color=style.colour, linewidth=1.6, linestyle=style.dash, zorder=3)
        for n, predicted, observed, _ in rows.tolist():
            mark = {"color": style.colour, "markerfacecolor": style.face, "markeredgewidth": 1.4}
            size = 4 + 4 * n / rows[:, 0].max()
            a.plot(predicted, observed, style.marker, **mark, markersize=size, zorder=4, clip_on=False)
    a.set(xlim=(low, high), ylim=(low, high), xlabel="predicted", ylabel="measured")
    a.grid(axis="both")
    names = ", ".join(map(spelled, bins))
    return c.svg(f"values-{key}", f"Mean measurement by prediction in {silo} with {names}.")


@chart
def net_benefit_chart(study: Study, silo: str, benefits: Mapping[str, Sequence[float]]) -> str:
    """Draw the net benefit of the methods by threshold, with treating everybody and no one for comparison."""
    c, look = drawn(*SIZE, (46, 12, 10, 40)), styles(study)
    a, n = c.axes, len(THRESHOLDS)
    everybody = next(iter(benefits.values()))[n:]
    a.plot(THRESHOLDS, everybody, color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)))
    a.plot([0, 1], [0, 0], color=MUTED, linewidth=1)
    for method, values in benefits.items():
        a.plot(THRESHOLDS, values[:n], color=look[method].colour, linewidth=1.8, linestyle=look[method].dash, zorder=3)
    top = max([0.1, *everybody, *(v for values in benefits.values() for v in values[:n])])
    a.set(xlim=(0, 1), ylim=(LOWEST, top * 1.05), xlabel="treat from this probability on, %", ylabel="net benefit")
    a.grid(axis="y")
    percent_axis(a.xaxis)
    names = ", ".join(map(spelled, benefits))
    return c.svg(f"benefit-{study.silos.index(silo)}", f"Net benefit in {silo} with {names}.")
