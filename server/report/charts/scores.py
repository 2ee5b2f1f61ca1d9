"""Charts of scores and gains: per silo, and per method."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from server.report.charts.canvas import (
    CARD,
    INK,
    LOWEST,
    MUTED,
    Canvas,
    Style,
    chart,
    clipped,
    drawn,
    percent_axis,
    styles,
)
from server.report.html import points
from server.report.methods import alone, spelled
from server.report.participation import MARK, seldom
from server.report.study import Gain, Score, Study


@chart
def gains(study: Study, width: float) -> str:
    """Draw each silo's scores with the baselines and the best method, joined by a line, with interval and gain.

    Silos that have withheld all scores are left out; at least one silo must remain.
    """
    look, methods, best = styles(study), study.columns, study.best or study.methods[0]
    base = study.base
    order = [s for s in study.silos if any(not math.isnan(study.score(m, s).mean) for m in methods)]
    gain = {s: study.gain(best, base, s) for s in order} if base else {}
    if base:
        order.sort(key=lambda s: -gain[s].mean if not math.isnan(gain[s].mean) else 9)
    left = 8 + 7.2 * min(max(map(len, order)), 18)
    c = drawn(width, 24 * len(order) + 96, (left, 52 if base else 14, 40, 40))
    a, lows = c.axes, []
    for row, silo in enumerate(order):
        scores = {m: study.score(m, silo) for m in methods}
        rows = {m: row + lift for m, lift in lifts(scores, 10 / c.inner[0]).items()}
        lows += _silo_row(a, rows, scores, look, best, base)
        if base:
            _write_gain(a, row, gain[silo])
    if base:
        place = {"xycoords": "axes fraction", "textcoords": "offset points", "ha": "right", "va": "bottom"}
        a.annotate("gain", (1, 1), (46, 6), **place, color=MUTED, fontsize=11)
    floor = math.floor(10 * min(lows, default=0.0)) / 10
    a.set(xlim=(max(floor - 0.02, LOWEST if floor < 0 else -0.02), 1.02), ylim=(len(order) - 0.5, -0.5))
    rare = seldom(study, methods)
    a.set_yticks(range(len(order)), [clipped(s, 18) + (MARK if s in rare else "") for s in order])
    a.grid(axis="x")
    percent_axis(a.xaxis)
    a.set_xlabel(f"test {study.task.score_label}, %")
    a.spines["left"].set_visible(False)
    _legend(c, study, look, best, narrow=width < 500)
    names = ", ".join(spelled(m) for m in methods)
    label = f"Test {study.task.score_label} per hospital with {names}; the numbers are in the table below."
    return c.svg(f"gains{width:g}", label)


def _silo_row(
    a: Any,
    rows: Mapping[str, float],
    scores: Mapping[str, Score],
    look: Mapping[str, Style],
    best: str,
    base: str | None,
) -> list[float]:
    """Draw the known scores of one silo, each in its row; return the values that may be the lowest of the chart."""
    low, high = scores[best].interval
    lows = []
    if not math.isnan(low):
        a.plot([low, high], [rows[best], rows[best]], color=look[best].colour, alpha=0.25, linewidth=6, zorder=1)
        lows.append(low)
    if base is not None and base in rows and best in rows:
        a.plot([scores[m].mean for m in (base, best)], [rows[base], rows[best]], color=INK, linewidth=1.4, zorder=2)
    for method, row in rows.items():
        lows.append(scores[method].mean)
        front, mark = method == best, _mark(look[method])
        size = (8.5 if front else 7) * (1 if row == round(row) else 0.8)
        a.plot(scores[method].mean, row, look[method].marker, **mark, markersize=size, zorder=4 if front else 3)
    return lows


def lifts(scores: Mapping[str, Score], least: float) -> dict[str, float]:
    """Return how far each known score's mark is moved off its row: marks that are ``least`` apart hide no other."""
    known = sorted((m for m, score in scores.items() if not math.isnan(score.mean)), key=lambda m: scores[m].mean)
    groups: list[list[str]] = []
    for method in known:
        if groups and scores[method].mean - scores[groups[-1][-1]].mean < least:
            groups[-1].append(method)
        else:
            groups.append([method])
    step = {len(group): min(0.3, 0.8 / len(group)) for group in groups}
    return {m: (k - (len(g) - 1) / 2) * step[len(g)] for g in groups for k, m in enumerate(g)}


def _mark(style: Style) -> dict[str, Any]:
    return {"color": style.colour, "markerfacecolor": style.face, "markeredgewidth": 1.6}


def _write_gain(a: Any, row: int, gain: Gain) -> None:
    """Write a silo's gain at the right of its row."""
    a.annotate(
        points(gain.mean),
        (1, row),
        (46, 0),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        ha="right",
        va="center",
        annotation_clip=False,
        weight="bold" if gain.shown else "normal",
        color=MUTED if gain.sign == 0 else INK,
    )


def _legend(c: Canvas, study: Study, look: Mapping[str, Style], best: str, *, narrow: bool) -> None:
    """Add the legend of the methods above the chart."""
    marks: Sequence[Any] = [
        c.axes.plot([], [], look[m].marker, **_mark(look[m]), markersize=7.5, label=spelled(m))[0]
        for m in study.columns
    ]
    if len(study.seeds) == 1:
        interval = "95 %" if narrow else "95 % interval"
        marks = [*marks, *c.axes.plot([], [], color=look[best].colour, alpha=0.25, linewidth=6, label=interval)]
    c.figure.legend(
        handles=marks,
        loc="upper left",
        bbox_to_anchor=(0, 1),
        ncols=len(marks),
        borderpad=0,
        borderaxespad=0.2,
        handlelength=1.2,
        handletextpad=0.4,
        columnspacing=0.9 if narrow else 1.6,
    )


@chart
def compared(study: Study, width: float) -> str:
    """Draw each method's gain over the baseline: a mark per silo, the mean and its interval."""
    look, base = styles(study), study.base or alone()
    methods = sorted((m for m in study.methods if m != base), key=lambda m: -study.mean_gain(m, base).mean)
    left = 8 + 7.2 * max(len(spelled(m)) for m in methods)
    c = drawn(width, 40 * len(methods) + 50, (left, 60, 6, 44))
    a = c.axes
    for row, method in enumerate(methods):
        each = [study.gain(method, base, s).mean for s in study.silos]
        for value, count in Counter(round(g, 3) for g in each if not math.isnan(g)).items():
            size = min(4 * math.sqrt(count), 12)  # a tick would hide in the line at zero
            a.plot(value, row + 0.2, "o", color=MUTED, markerfacecolor=CARD, markersize=size, zorder=3)
        total = study.mean_gain(method, base)
        if math.isnan(total.mean):
            continue
        if not math.isnan(total.interval[0]):
            a.plot(total.interval, [row - 0.12] * 2, color=look[method].colour, linewidth=2.5)
        a.plot(total.mean, row - 0.12, look[method].marker, color=look[method].colour, markersize=8)
        a.annotate(
            points(total.mean),
            (1, row - 0.12),
            (54, 0),
            va="center",
            ha="right",
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            weight="bold",
        )
    a.axvline(0, color=INK, linewidth=1)
    a.set_ylim(len(methods) - 0.4, -0.6)
    a.set_yticks(range(len(methods)), [spelled(m) for m in methods])
    a.grid(axis="x")
    percent_axis(a.xaxis)
    a.set_xlabel(f"gain over {spelled(base)}, points of test {study.task.score_label}")
    a.spines["left"].set_visible(False)
    return c.svg(f"compared{width:g}", f"Mean gain over {spelled(base)} of each method with its 95 % interval.")
