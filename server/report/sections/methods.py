"""Section that compares the methods: a row each, the meaning of the columns, and all methods per silo."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from markupsafe import Markup

from server.report.charts.scores import compared
from server.report.html import between, hospitals_of, lines, markup, mean_of, number, percent, points, with_spread
from server.report.inference import HOSPITALS_NEEDED
from server.report.methods import baseline_name, baselines, reports, spelled
from server.report.participation import MARK, mean_without, rounds_missed, seldom, worst
from server.report.study import Study
from server.report.templates import render
from server.results.summary import round_name

SHOWN_AS = {"auc": "3", "kappa": "3", "mae": "3", "rmse": "3"}  # digits of a metric; other metrics are in per cent


def methods_section(study: Study) -> Markup:
    """Render the section; empty without results."""
    if not study.runs:
        return Markup()
    rare = seldom(study, study.methods)
    several = study.base and len([m for m in study.methods if m != study.base]) > 1
    return render(
        "methods",
        seeds=len(study.seeds),
        head=[
            "Method",
            final_heading(study),
            lines("weighted by|test samples"),
            lines("Worst|hospital"),
            *study.task.secondary_metrics.values(),
            lines("Fairness|variance"),
            lines("Incentivised|rate"),
            lines("Mean|rank"),
            Markup("<b>BMCTA</b><br>best on test"),
        ],
        rows=[method_row(study, method) for method in study.methods],
        terms=terms(study),
        rare_text=rounds_missed(rare) if rare else "",
        mark=MARK,
        compared=[Markup(compared(study, width)) for width in (820, 350)] if several else None,
        base=spelled(study.base) if study.base else "",
        needed=HOSPITALS_NEEDED,
        word=study.task.score_label,
        gains=gain_rows(study),
        gain_head=["Method", lines("Mean gain,|points"), Markup("95&#8239;%<br>interval"), "p"],
        first=spelled(study.best) if study.best and study.compared(study.best, study.base or "") == 1 else "",
        every=every_method(study),
        every_head=["Hospital", *map(spelled, study.methods)],
    )


def final_heading(study: Study) -> Markup:
    """Return the heading of the final scores, with the rule for their round."""
    return markup("<b>Final</b><br>{}", "by validation" if study.chosen_on == "val" else "last round")


def method_row(study: Study, method: str) -> dict[str, Any]:
    """Return the values of one method's row."""
    rare = seldom(study, [method])
    final = with_spread(*study.final(method, mean_of(study)), "%")
    if rare:
        final += markup("<small>without {} {}</small>", MARK, percent(mean_without(study, method, rare)))
    rate = math.nan if method in baselines() else study.final(method, "incentivized_rate")[0]
    score = study.task.score
    return {
        "name": spelled(method),
        "key": method,
        "snapshot": "model before" if reports(method) == "received" else "model after",
        "cells": [
            final + rounds_text(study, method, "final"),
            with_spread(*study.final(method, f"{score}_weighted"), "%"),
            worst_cell(study, method, rare),
            *(
                with_spread(*study.final(method, f"{m}_mean"), SHOWN_AS.get(m, "%"))
                for m in study.task.secondary_metrics
            ),
            with_spread(*study.final(method, "fairness_variance"), "4"),
            "–" if math.isnan(rate) else markup("{}&#8239;%", f"{100 * rate:.0f}"),
            number(study.ranks.get(method, math.nan), 2),
            with_spread(*study.final(method, "bmcta"), "%") + rounds_text(study, method, "bmcta"),
        ],
    }


def worst_cell(study: Study, method: str, rare: Collection[str]) -> Markup:
    """Return the lowest score of a hospital, and which."""
    silo = worst(study, method)
    if silo is None:
        return Markup("–")
    return markup("{}<small>{}{}</small>", percent(study.score(method, silo).mean), silo, MARK if silo in rare else "")


def gain_rows(study: Study) -> list[tuple[str, list[Markup | str]]]:
    """Return each method's mean gain over the baseline, as in the headline, with its interval and p value."""
    rows = []
    for method in study.methods if study.base else ():
        values = study.silo_means(method, study.base or "") if method != study.base else {}
        if values:
            gain = study.mean_gain(method, study.base or "")
            p = "–" if math.isnan(gain.p) else p_value(gain.p)
            mean = markup("{}<small>{}</small>", points(gain.mean), hospitals_of(len(values)))
            rows.append((spelled(method), [mean, between(gain) or "–", p]))
    return rows


def p_value(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def terms(study: Study) -> list[tuple[str, str]]:
    """Return the meanings of the columns."""
    word = study.task.score_label
    final = "Mean over hospitals at the last round, because no hospital has validation data."
    if study.chosen_on == "val":
        final = f"Mean over hospitals at the round with the best mean validation {word}. This is the number to expect."
    found = [
        ("Final", final),
        (
            "BMCTA",
            f"Best mean test {word} over all rounds: the statistic that papers report. It picks the round by looking "
            "at the test data, so it is never below what a user would get and usually above.",
        ),
        (
            "Fairness variance",
            f"How much {word} differs between hospitals. Smaller is more even; 0 means that all have the same.",
        ),
        (
            "Incentivised rate",
            f"Share of hospitals whose score is above that of {' and that of '.join(map(baseline_name, baselines()))}. "
            "Single hospitals' scores are uncertain, and so is this share.",
        ),
        (
            "Mean rank",
            "Place of the method among those of the study, averaged over hospitals; 1 would be first everywhere.",
        ),
    ]
    if study.task.secondary_metrics:
        found.append((", ".join(study.task.secondary_metrics.values()), study.task.secondary_text))
    return found


def rounds_text(study: Study, method: str, which: str) -> Markup:
    """Return the rounds of a method's ``final`` or ``bmcta`` scores over its seeds."""
    runs = study.of(method)
    found = [(r["final"]["round"] if which == "final" else r["bmcta_round"], r["rounds"]) for r in runs]
    known = sorted({(number, rounds) for number, rounds in found if number is not None})
    if not known:
        return Markup()
    first, last = known[0], known[-1]
    if first == last or last[0] > last[1]:
        text = " to ".join(dict.fromkeys([round_name(*first), round_name(*last)]))
    else:
        text = f"rounds {first[0]}–{last[0]}"
    return markup("<small>{}</small>", text)


def every_method(study: Study) -> list[tuple[str, list[tuple[str, Markup]]]]:
    """Return all methods' scores and gains per silo; empty if the table of the silos' section shows them all."""
    if len(study.methods) <= len(study.columns) and len(study.methods) < 4:
        return []
    rows = []
    for silo in study.silos:
        means = {m: study.score(m, silo) for m in study.methods}
        top = max((c.mean for c in means.values() if not math.isnan(c.mean)), default=math.nan)
        cells = []
        for m, score in means.items():
            text = with_spread(score.mean, score.spread, "%")
            if study.base and m != study.base:
                text += markup("<small>{}</small>", points(study.gain(m, study.base, silo).mean))
            cells.append(("best" if score.mean >= top - 1e-9 else "", text))
        rows.append((silo, cells))
    return rows
