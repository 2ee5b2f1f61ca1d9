"""Sections on the silos (scores, gains, missed rounds) and on held-out hospitals (zero-shot, personalised, alone)."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from markupsafe import Markup

from client.protocol.study import open_under_masks
from server.report.canvas import (
    GAIN_AT,
    INK,
    LOWEST,
    MUTED,
    Canvas,
    Style,
    chart,
    clip_name,
    in_widths,
    room_for,
    styles,
)
from server.report.html import points, render
from server.report.inference import (
    HOSPITALS_NEEDED,
    SEEDS_NEEDED,
    Gain,
    Score,
    finite_or_nan,
    over_hospitals,
)
from server.report.methods import alone, spell
from server.report.participation import (
    MARK,
    mean_without,
    opened_sums,
    rounds_missed,
    seldom,
    silo_rounds,
)
from server.report.study import StudyResults
from server.results.hold_out import results_in
from server.run.reporter import WEIGHTS

# The look of an interval
BAND: dict[str, Any] = {"alpha": 0.25, "linewidth": 6}
SMALL = 30  # a test set with fewer samples is marked as small
MOST_LOSERS = 6  # with more, the lead names five


def silos_section(study: StudyResults) -> Markup:
    """Render the section; empty without results."""
    if not study.runs:
        return Markup()
    methods, base = study.columns, study.base
    rare = seldom(study, methods)
    gained = {s: study.gain(study.headed, base, s) for s in study.silos} if base else {}
    return render(
        "silos",
        study=study,
        best=study.headed,
        figure=in_widths(gains, study) if study.scored(methods) else None,
        gained=gained,
        compared=sum(not math.isnan(gain.mean) for gain in gained.values()),
        lose={silo: gain for silo, gain in gained.items() if gain.sign < 0},
        few=MOST_LOSERS,
        small=SMALL,
        seeds_needed=SEEDS_NEEDED,
        rare_silos=rare,
        rare_text=rounds_missed(rare),
        without=[mean_without(study, m, rare) for m in methods],
        counted=list(
            dict.fromkeys(e["message"] for e in study.events if e.get("part") == WEIGHTS)
        ),
        sums=opened_sums(study),
        still=open_under_masks(
            int(study.config.get("secure-group", 1)),
            str(study.config.get("secure-robust", "none")),
        ),
        absences=[
            ("Rounds that went on without a hospital", silo_rounds(study, "rejected")),
            ("Rounds in which a hospital's step was bounded", silo_rounds(study, "bounded")),
        ],
    )


def _gain_column(a: Any, gain: Sequence[Gain]) -> None:
    """Write the gains beside the rows, the clear ones in bold."""
    for row, of_silo in enumerate(gain):
        how = {
            "weight": "bold" if of_silo.shown else "normal",
            "color": INK if of_silo.sign else MUTED,
        }
        a.annotate(points(of_silo.mean), (1, row), (46, 0), **GAIN_AT, **how)
    above = {**GAIN_AT, "va": "bottom"}
    a.annotate("gain", (1, -0.5), (46, 6), **above, color=MUTED, fontsize=11)


@chart
def gains(study: StudyResults, width: float) -> str:
    """Draw each silo's scores with the baselines and the best method, joined by a line, with interval and gain.

    Silos that have withheld all scores are left out; at least one silo must remain.
    """
    look = styles(study)
    methods = study.columns
    best, base = study.headed, study.base
    order = study.scored(methods)
    gain = {s: study.gain(best, base, s) for s in order} if base else {}
    if base:
        order.sort(key=lambda s: -gain[s].mean if not math.isnan(gain[s].mean) else 9)
    names = [clip_name(silo, 18) for silo in order]
    margins = (8 + room_for(names), 52 if base else 14, 40, 40)
    c = Canvas(width, 24 * len(order) + 96, margins)
    a = c.axes
    lows = list[float]()
    for row, silo in enumerate(order):
        scores = {m: study.score(m, silo) for m in methods}
        rows = {m: row + lift for m, lift in lifts(scores, 10 / c.inner[0]).items()}
        lows += _silo_row(a, rows, scores, look, best, base)
    if base:
        _gain_column(a, [gain[silo] for silo in order])
    floor = math.floor(10 * min(lows, default=0.0)) / 10
    a.set_xlim(max(floor - 0.02, LOWEST if floor < 0 else -0.02), 1.02)
    rare = seldom(study, methods)
    marked = [n + (MARK if s in rare else "") for n, s in zip(names, order, strict=True)]
    c.make_rows(marked, f"test {study.task.score_label}, %")
    _legend(c, study, look, best, narrow=width < 500)
    listed = ", ".join(map(spell, methods))
    label = f"Test {study.task.score_label} per hospital with {listed}; the numbers are in the table below."
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
    interval = scores[best].interval
    lows = [scores[method].mean for method in rows]
    if not math.isnan(interval[0]):
        band = {"color": look[best].colour, **BAND, "zorder": 1}
        a.plot(interval, [rows[best]] * 2, **band)
        lows.append(interval[0])
    if base is not None and base in rows and best in rows:
        ends = [(scores[m].mean, rows[m]) for m in (base, best)]
        a.plot(*zip(*ends, strict=True), color=INK, linewidth=1.4, zorder=2)
    for method, row in rows.items():
        front = method == best
        size = (8.5 if front else 7) * (1 if row == round(row) else 0.8)
        mark = {**look[method].mark, "markersize": size, "zorder": 4 if front else 3}
        a.plot(scores[method].mean, row, look[method].marker, **mark)
    return lows


def lifts(scores: Mapping[str, Score], least: float) -> dict[str, float]:
    """Return how far each known score's mark is moved off its row: marks that are ``least`` apart hide no other."""
    means = (
        pd.Series({m: score.mean for m, score in scores.items()}, dtype=float)
        .dropna()
        .sort_values(kind="stable")
    )
    lifted = dict[str, float]()
    for _, group in means.groupby((means.diff() >= least).cumsum()):
        step = min(0.3, 0.8 / len(group))
        lifted |= {m: (k - (len(group) - 1) / 2) * step for k, m in enumerate(group.index)}
    return lifted


def _legend(
    c: Canvas, study: StudyResults, look: Mapping[str, Style], best: str, *, narrow: bool
) -> None:
    """Add the legend of the methods above the chart."""
    marks = list[Any]()
    for m in study.columns:
        mark = {**look[m].mark, "markersize": 7.5, "label": spell(m)}
        marks += c.axes.plot([], [], look[m].marker, **mark)
    if len(study.seeds) == 1:
        interval = "95 %" if narrow else "95 % interval"
        marks += c.axes.plot([], [], color=look[best].colour, **BAND, label=interval)
    c.figure.legend(
        handles=marks,
        ncols=len(marks),
        loc="upper left",
        bbox_to_anchor=(0, 1),
        borderpad=0,
        borderaxespad=0.2,
        handlelength=1.2,
        handletextpad=0.4,
        columnspacing=0.9 if narrow else 1.6,
    )


KINDS = {
    "zero_shot": "Zero-shot",
    "personalised": "Personalised",
    "local": "Alone",
    "all_in": "All in",
}
Scores = Mapping[str, float]  # kind -> score; nan if unknown


def held_out(study: StudyResults) -> dict[str, dict[str, Scores]]:
    """Return the scores of each held-out silo by method, from ``summary.json``."""
    return {
        silo: {
            method: {kind: finite_or_nan(values.get(kind)) for kind in KINDS}
            for method, values in of.items()
        }
        for silo, of in results_in(study.summary).items()
    }


def unseen_methods(study: StudyResults) -> dict[str, list[Scores]]:
    """Return the held-out silos' scores by method, without training alone."""
    methods = defaultdict[str, list[Scores]](list)
    for method, scores in (pair for of in held_out(study).values() for pair in of.items()):
        if method != alone():
            methods[method].append(scores)
    return methods


def unseen_section(study: StudyResults) -> Markup:
    """Render the section; empty if no silo was held out."""
    if not (unseen := held_out(study)):
        return Markup()
    return render(
        "unseen",
        study=study,
        found=unseen,
        methods=unseen_methods(study),
        kinds=KINDS,
        needed=HOSPITALS_NEEDED,
        mean=statistics.fmean,
        lowest=lowest_score,
        gain_over_alone=gain_over_alone,
    )


def lowest_score(silos: Sequence[Scores], kind: str = "zero_shot") -> float:
    """Return the lowest score; ``nan`` if one is not known."""
    scores = [scores[kind] for scores in silos]
    return math.nan if any(map(math.isnan, scores)) else min(scores)


def gain_over_alone(silos: Sequence[Scores], kind: str, methods: int) -> tuple[Gain, int]:
    """Return the mean difference to training alone, and the number of silos that have one."""
    differences = [scores[kind] - scores["local"] for scores in silos]
    known = [value for value in differences if not math.isnan(value)]
    return over_hospitals(known, methods), len(known)
