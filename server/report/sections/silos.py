"""Section on the silos: their scores, gains and missed rounds."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from server.report.charts.scores import gains
from server.report.events import SiloRounds
from server.report.html import between, capital, counted, markup, mean_of, percent, points
from server.report.inference import SEEDS_NEEDED
from server.report.methods import spelled
from server.report.participation import MARK, Rounds, mean_without, rounds_missed, seldom
from server.report.scores import Gain
from server.report.study import Study
from server.report.templates import render

SMALL = 30  # a test set with fewer samples is marked as small


def silos_section(study: Study) -> Markup:
    """Render the section; empty without results."""
    if not study.runs:
        return Markup()
    best, base, methods = study.best or study.methods[0], study.base, study.columns
    rare = seldom(study, methods)
    head = [Markup('Hospital<small class="phone">train + test</small>'), "Train", "Test", *map(spelled, methods)]
    if base:
        head.append(markup("Gain of {}<br>over {}", spelled(best), spelled(base)))
    known = any(not math.isnan(study.score(m, s).mean) for m in methods for s in study.silos)
    return render(
        "silos",
        lead=losers(study),
        figure=[Markup(gains(study, width)) for width in (820, 350)] if known else None,
        head=head,
        rows=[silo_row(study, silo, best, MARK if silo in rare else "") for silo in study.silos],
        means=list(mean_rows(study, methods, rare)),
        intervals=intervals(study),
        withheld=study.withheld,
        rare_text=rounds_missed(rare) if rare else "",
        mark=MARK,
        joined=joined_late(study),
        absences=[
            ("Rounds that went on without a hospital", named(study.absences)),
            ("Rounds in which a hospital's step was bounded", named(study.bounds)),
        ],
    )


def silo_row(study: Study, silo: str, best: str, mark: str) -> dict[str, Any]:
    """Return the values of one row of the table."""
    n_test = study.sizes(silo, "n_test")
    cells = []
    for method in study.columns:
        score = study.score(method, silo)
        low, high = score.interval
        if math.isnan(score.mean):
            text = Markup("<small>withheld</small>") if silo in study.withheld else Markup("–")
        else:
            text = markup("{}", percent(score.mean))
            text += Markup() if math.isnan(low) else markup("<small>{}–{}</small>", percent(low, 0), percent(high, 0))
            text += Markup() if math.isnan(score.spread) else markup("<small>±&#8202;{}</small>", percent(score.spread))
        cells.append(("main" if method == best and len(study.columns) > 1 else "", text))
    if study.base:
        cells.append(gain_cell(study.gain(best, study.base, silo)))
    return {
        "silo": silo,
        "mark": mark,
        "train": span(study.sizes(silo, "n_train")),
        "test": span(n_test),
        "small": bool(n_test and 0 < n_test[0] < SMALL),
        "cells": cells,
    }


def joined_late(study: Study) -> list[str]:
    """Return a sentence for each silo that joined during a run."""
    return [
        f"{silo} joined late: it took part from round {first} on ({', '.join(map(spelled, methods))})"
        for silo, by_round in study.joined.items()
        for first, methods in by_round.items()
    ]


def span(values: Sequence[int]) -> str:
    """Return ``40``, or ``28–50`` if seeds differ."""
    return "–" if not values else f"{values[0]}" if len(values) == 1 else f"{values[0]}–{values[-1]}"


def intervals(study: Study) -> Markup:
    """Return the explanation of the table's small numbers."""
    several = len(study.seeds) > 1
    wilson = "Wilson's" if study.task.score == "accuracy" else "its"
    what = "mean and standard deviation over seeds" if several else f"with {wilson} 95&#8239;% interval below"
    about = f"{capital(study)} in per cent on the hospital's own test samples, {what}. "
    if study.base:
        seeds = f"seeds (from {SEEDS_NEEDED} on) and " if several else ""
        about += (
            f"The gain's interval counts {seeds}test samples. It takes the two tests as independent, because which "
            "samples were right never leaves a hospital; it is wider than it need be. A gain is in colour where its "
            "interval excludes zero."
        )
    return Markup(about)


def mean_rows(study: Study, methods: Sequence[str], rare: Mapping[str, Rounds]) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield the rows of means: over all silos and, if some silos missed many rounds, without these."""
    best, base = study.best, study.base

    def row(means: Iterable[float], without: Collection[str]) -> list[str]:
        gain = [points(study.mean_gain(best, base, without).mean)] if best and base else []
        return [*map(percent, means), *gain]

    yield "Mean", row((study.final(m, mean_of(study))[0] for m in methods), ())
    if rare:
        yield f"without {MARK}", row((mean_without(study, m, rare) for m in methods), rare)


def gain_cell(gain: Gain) -> tuple[str, Markup]:
    """Return the class and the text of a gain's cell."""
    kind = {1: "up", 0: "", -1: "down"}[gain.shown]
    interval = between(gain, 0)
    return kind, markup("{}", points(gain.mean)) + (markup("<small>{}</small>", interval) if interval else Markup())


def losers(study: Study) -> Markup:
    """Return a sentence on the silos that score lower with the best method."""
    best, base = study.best, study.base
    if not best or not base:
        return markup("The {} of every hospital's model on the hospital's own test data.", study.task.score_label)
    each = {s: study.gain(best, base, s) for s in study.silos}
    lose = [markup('<span class="nb">{} ({})</span>', s, points(g.mean)) for s, g in each.items() if g.sign < 0]
    other = Markup()
    if study.personalised not in (None, best):
        other = markup(" The best personalised method was {}.", spelled(study.personalised or ""))
    if not lose:
        return markup("No hospital scores lower with {} than with {}.{}", spelled(best), spelled(base), other)
    if len(lose) > 6:
        lose = [*lose[:5], markup("{}", counted(len(lose) - 5, "other"))]
    names = Markup(", ").join(lose)
    return markup("Lower with {} than with {}: {}.{}", spelled(best), spelled(base), names, other)


def named(found: Sequence[SiloRounds]) -> list[SiloRounds]:
    """Return the rows with the methods in the spelling of their papers."""
    return [each._replace(strategy=spelled(each.strategy)) for each in found]
