"""Sections that compare the methods (a row each, and all per silo), and on their tuning."""

from __future__ import annotations

import math
import statistics
from collections import Counter

import pandas as pd
from markupsafe import Markup

from models.metrics import RANGES
from server.report.canvas import (
    CARD,
    GAIN_AT,
    INK,
    MUTED,
    Canvas,
    chart,
    in_widths,
    room_for,
    styles,
)
from server.report.html import points, render
from server.report.inference import HOSPITALS_NEEDED, spread
from server.report.methods import alone, baselines, info_of, spell
from server.report.participation import mean_without, rounds_missed, seldom
from server.report.study import StudyResults
from server.results.summary import round_name

# Digits of a metric; other metrics are in per cent
DIGITS = dict.fromkeys(("auc", *RANGES), 3)


def methods_section(study: StudyResults) -> Markup:
    """Render the section; empty without results."""
    if not study.runs:
        return Markup()
    others = [method for method in study.methods if study.base not in (None, method)]
    base = study.base or ""
    return render(
        "methods",
        study=study,
        digits=DIGITS,
        nan=math.nan,
        seldom=seldom,
        mean_without=mean_without,
        info_of=info_of,
        rounds_text=rounds_text,
        top_score=top_score,
        baselines=baselines(),
        rare_text=rounds_missed(seldom(study, study.methods)),
        compared=in_widths(draw_gains, study) if len(others) > 1 else None,
        needed=HOSPITALS_NEEDED,
        # As in the headline
        gains=[
            (method, len(silos), study.mean_gain(method, base))
            for method in others
            if (silos := study.silo_means(method, base))
        ],
    )


def top_score(study: StudyResults, silo: str) -> float:
    """Return the highest score of a method in one silo; ``nan`` if none is known."""
    scores = [study.score(method, silo).mean for method in study.methods]
    return max((score for score in scores if not math.isnan(score)), default=math.nan)


def rounds_text(study: StudyResults, method: str, which: str) -> str:
    """Return the rounds of a method's ``final`` or ``bmcta`` scores over its seeds."""
    chosen = [
        (r["final"]["round"] if which == "final" else r["bmcta_round"], r["rounds"])
        for r in study.of(method)
    ]
    known = sorted({(number, rounds) for number, rounds in chosen if number is not None})
    if not known:
        return ""
    first, last = known[0], known[-1]
    if first == last or last[0] > last[1]:
        return " to ".join(dict.fromkeys([round_name(*first), round_name(*last)]))
    return f"rounds {first[0]}–{last[0]}"


@chart
def draw_gains(study: StudyResults, width: float) -> str:
    """Draw each method's gain over the baseline: a mark per silo, the mean and its interval."""
    look, base = styles(study), study.base or alone()
    methods = sorted(
        (m for m in study.methods if m != base), key=lambda m: -study.mean_gain(m, base).mean
    )
    names = list(map(spell, methods))
    c = Canvas(width, 40 * len(methods) + 50, (8 + room_for(names), 60, 6, 44))
    a = c.axes
    for row, method in enumerate(methods):
        each = [study.gain(method, base, s).mean for s in study.silos]
        for value, count in Counter(round(g, 3) for g in each if not math.isnan(g)).items():
            size = min(4 * math.sqrt(count), 12)  # a tick would hide in the line at zero
            a.plot(
                value,
                row + 0.2,
                "o",
                color=MUTED,
                markerfacecolor=CARD,
                markersize=size,
                zorder=3,
            )
        total = study.mean_gain(method, base)
        if math.isnan(total.mean):
            continue
        if total.has_interval:
            a.plot(total.interval, [row - 0.12] * 2, color=look[method].colour, linewidth=2.5)
        a.plot(
            total.mean, row - 0.12, look[method].marker, color=look[method].colour, markersize=8
        )
        a.annotate(points(total.mean), (1, row - 0.12), (54, 0), **GAIN_AT, weight="bold")
    a.axvline(0, color=INK, linewidth=1)
    c.make_rows(names, f"gain over {spell(base)}, points of test {study.task.score_label}")
    a.set_ylim(len(methods) - 0.4, -0.6)
    return c.svg(
        f"compared{width:g}",
        f"Mean gain over {spell(base)} of each method with its 95 % interval.",
    )


def tuning_section(study: StudyResults) -> Markup:
    """Render the section; empty if the study does not use a search (``silofl simulate --tuned``)."""
    if not (searches := study.searches):
        return Markup()
    methods = [m for m in study.methods if m in searches[0]["asked"]["strategies"]]
    scores = {m: [search["best"][m]["score"] for search in searches] for m in methods}
    costs = {m: pd.DataFrame([search["cost"][m] for search in searches]) for m in methods}
    return render(
        "tuning",
        study=study,
        searches=searches,
        methods=methods,
        private=any(search["privacy"] for search in searches),
        equal=len({tuple(sorted(cost["rounds"])) for cost in costs.values()}) == 1,
        totals={m: {key: each.sum() for key, each in costs[m].items()} for m in methods},
        scores={m: (statistics.fmean(each), spread(each)) for m, each in scores.items()},
    )
