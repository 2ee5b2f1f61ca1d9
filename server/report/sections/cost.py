"""Sections on the cost of the runs and on what left the silos."""

from __future__ import annotations

import statistics

import numpy as np
import pandas as pd
from markupsafe import Markup

from server.report.canvas import BLUE, CARD, ORANGE, Canvas, chart, room_for, styles
from server.report.html import render, size_text, typical
from server.report.methods import info_of, spell
from server.report.sections.evidence import evidence_that_left, own_models_that_left
from server.report.study import StudyResults

ROUND = ["strategy", "seed", "round"]


def cost_section(study: StudyResults) -> Markup:
    """Render bytes and seconds of each method; empty without results."""
    if not study.runs:
        return Markup()
    return render(
        "cost",
        study=study,
        typical=typical,
        mean_seconds=mean_seconds,
        training_seconds=training_seconds,
        charts={"bytes": bytes_per_round(study), "seconds": seconds_per_round(study)},
    )


def mean_seconds(study: StudyResults, method: str, part: str) -> float | None:
    """Return the seconds of one part of a method's runs, mean over seeds; None if unknown."""
    seconds = [s for r in study.of(method) if (s := r["seconds"].get(part)) is not None]
    return statistics.fmean(seconds) if seconds else None


def training_seconds(study: StudyResults, method: str) -> dict[int, float]:
    """Return by round the seconds, mean over seeds, without the closing evaluation."""
    last = max((r["rounds"] for r in study.of(method)), default=0)
    return {k: v for k, v in study.per_round(method, "round_seconds").items() if k <= last}


@chart
def bytes_per_round(study: StudyResults) -> str:
    """Draw each method's bytes per round, one bar for down and one for up."""
    names = list(map(spell, study.methods))
    c = Canvas(340, 46 * len(names) + 40, (8 + room_for(names), 66, 4, 36))
    a, rows, most = c.axes, np.arange(len(names)), 1.0
    for key, arrow, shift, look in (
        ("bytes_down", "↓", -0.17, {"color": BLUE}),
        (
            "bytes_up",
            "↑",
            0.17,
            {"color": CARD, "edgecolor": ORANGE, "linewidth": 1.2, "hatch": "////"},
        ),
    ):
        sizes = [typical(study.per_round(method, key)) for method in study.methods]
        bars = a.barh(rows + shift, sizes, 0.3, **look)
        a.bar_label(
            bars, [f"{arrow} {size_text(size)}" for size in sizes], padding=5, fontsize=11
        )
        most = max(most, *sizes)
    a.set(ylim=(len(names) - 0.5, -0.5), xlim=(0, most), xticks=[])
    a.set_yticks(rows, names)
    a.set_xlabel("all hospitals together: ↓ to them, ↑ from them")
    a.spines["bottom"].set_visible(False)
    return c.svg("bytes", "Bytes per round of each method, to the hospitals and from them.")


@chart
def seconds_per_round(study: StudyResults) -> str:
    """Draw the wall time of every round, one line per method."""
    c = Canvas(340, 230, (40, 26 + room_for(map(spell, study.methods)), 8, 42))
    look = styles(study)
    for method in study.methods:
        if by_round := training_seconds(study, method):
            c.line(list(by_round), list(by_round.values()), look[method], spell(method))
    c.axes.set_ylim(bottom=0)
    c.axes.set_ylabel("seconds")
    c.finish_lines("round", percent=False)
    return c.svg("seconds", "Seconds per round of each method.")


def left_section(study: StudyResults) -> Markup:
    """Render what left the silos, by method and by silo; empty without results."""
    if not study.runs:
        return Markup()
    values, shares = study.silo_rows.dropna(subset="value"), bytes_up(study)
    return render(
        "left",
        study=study,
        values=values,
        evidence=evidence_that_left(study),
        own=own_models_that_left(study),
        info_of=info_of,
        sizes=shares.groupby("strategy").share.quantile(interpolation="higher"),
        counts=values.silo.value_counts(),
        replies=values.drop_duplicates(["silo", *ROUND]).silo.value_counts(),
        sums=shares.groupby("silo").share.sum(),
    )


def bytes_up(study: StudyResults) -> pd.DataFrame:
    """Return the bytes of vectors that silos sent in each round: an equal ``share`` of each one that trained.

    All that replied count if training reports no metrics.
    """
    rows = study.silo_rows.assign(trained=study.silo_rows.split == "train")
    senders = rows[rows.trained | ~rows.groupby(ROUND).trained.transform("any")]
    sent = study.rows.query("metric == 'bytes_up' and value > 0")[[*ROUND, "value"]]
    shares = senders[["silo", *ROUND]].drop_duplicates().merge(sent, on=ROUND)
    return shares.assign(share=shares.value / shares.groupby(ROUND).silo.transform("size"))
