"""Section that compares the methods: a row each, the meaning of the columns, and all methods per silo."""

# ruff: noqa: E501  (template)
from __future__ import annotations

import math
from collections import Counter
from typing import Any

from markupsafe import Markup

from server.report.canvas import (
    CARD,
    GAIN_AT,
    INK,
    MUTED,
    Canvas,
    chart,
    in_widths,
    percent_axis,
    room_for,
    styles,
)
from server.report.html import (
    between,
    hospitals_of,
    lines,
    markup,
    number,
    percent,
    points,
    render,
    with_spread,
)
from server.report.inference import HOSPITALS_NEEDED
from server.report.methods import alone, baseline_name, baselines, reports, spell
from server.report.participation import MARK, mean_without, rounds_missed, seldom, worst
from server.report.study import StudyResults
from server.results.summary import round_name

# Digits of a metric; other metrics are in per cent
SHOWN_AS = {"auc": "3", "kappa": "3", "mae": "3", "rmse": "3"}
TEMPLATE = """{% from "macros" import table, cells, widths, explained, rare with context %}
<h2>How the methods compare</h2><p class='lead'>Each hospital counts alike, however large it is.
{%- if seeds > 1 %} Means over {{ seeds }} seeds, ± standard deviation; each seed splits the data anew.{% endif %}</p>
{% call table(head, "methods") %}<tbody>{% for row in rows %}<tr><th scope="row">{{ row.name }}<small>{{ row.key }}<span class="desk">, {{ row.snapshot }} local training</span></small></th>{{ cells(row.cells) }}</tr>{% endfor %}</tbody>{% endcall %}
{% call explained() %}<dl class='terms'>{% for term, meaning in terms %}<dt>{{ term }}</dt><dd>{{ meaning }}</dd>{% endfor %}</dl>{% endcall %}
{{ rare(rare_text, mark) }}
{% if compared %}<figure>{{ widths(compared) }}<figcaption>Gain over {{ base }}: mean over hospitals with its 95&#8239;% interval, from {{ needed }} hospitals on; each circle below is a hospital, a larger one several with equal gains.</figcaption></figure>{% endif %}
{% if gains %}<h3>Gain over {{ base }}</h3>
{% call table(gain_head) %}<tbody>{% for name, values in gains %}<tr><th scope="row">{{ name }}</th>{{ cells(values) }}</tr>{% endfor %}</tbody>{% endcall %}
{% call explained() %}<p>Student's t over the hospitals' gains in {{ word }}, each a mean over its seeds, from {{ needed }} hospitals on. The spread between hospitals contains the error of their test patients. The hospitals count as drawn independently from hospitals like these, and the interval holds for these seeds. Intervals and p values are corrected for the number of methods (Bonferroni){% if first %}; {{ first }}, which validation data chose, comes first and has its 5&#8239;% to itself{% endif %}. The headline is decided by the same interval.</p>{% endcall %}{% endif %}
{% if every %}<h3>All methods per hospital</h3><p class='note'>Test {{ word }} in per cent{% if base %}, and the paired difference to {{ base }}{% endif %}; the best of each hospital in bold.</p>
{% call table(every_head) %}<tbody>{% for silo, found in every %}<tr><th scope="row">{{ silo }}</th>{% for kind, text in found %}<td class="{{ kind }}">{{ text }}</td>{% endfor %}</tr>{% endfor %}</tbody>{% endcall %}{% endif %}"""


def methods_section(study: StudyResults) -> Markup:
    """Render the section; empty without results."""
    if not study.runs:
        return Markup()
    several = study.base and len([m for m in study.methods if m != study.base]) > 1
    return render(
        TEMPLATE,
        seeds=len(study.seeds),
        head=[
            "Method",
            markup(
                "<b>Final</b><br>{}",
                "by validation" if study.chosen_on == "val" else "last round",
            ),
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
        rare_text=rounds_missed(seldom(study, study.methods)),
        mark=MARK,
        compared=in_widths(draw_gains, study) if several else None,
        base=spell(study.base) if study.base else "",
        needed=HOSPITALS_NEEDED,
        word=study.task.score_label,
        gains=gain_rows(study),
        gain_head=["Method", lines("Mean gain,|points"), Markup("95&#8239;%<br>interval"), "p"],
        first=spell(study.best)
        if study.best and study.count_compared(study.best, study.base or "") == 1
        else "",
        every=every_method(study),
        every_head=["Hospital", *map(spell, study.methods)],
    )


def method_row(study: StudyResults, method: str) -> dict[str, Any]:
    """Return the values of one method's row."""
    rare = seldom(study, [method])
    score = study.task.score
    silo = worst(study, method)
    metrics = (
        with_spread(*study.final(method, f"{m}_mean"), SHOWN_AS.get(m, "%"))
        for m in study.task.secondary_metrics
    )
    without = markup(
        "<small>without {} {}</small>", MARK, percent(mean_without(study, method, rare))
    )
    final = with_spread(*study.mean_score(method), "%") + (without if rare else Markup())
    lowest = Markup("–")
    if silo is not None:
        mark = MARK if silo in rare else ""
        lowest = markup(
            "{}<small>{}{}</small>", percent(study.score(method, silo).mean), silo, mark
        )
    rate = math.nan if method in baselines() else study.final(method, "incentivized_rate")[0]
    return {
        "name": spell(method),
        "key": method,
        "snapshot": "model before" if reports(method) == "received" else "model after",
        "cells": [
            final + rounds_text(study, method, "final"),
            with_spread(*study.final(method, f"{score}_weighted"), "%"),
            lowest,
            *metrics,
            with_spread(*study.final(method, "fairness_variance"), "4"),
            "–" if math.isnan(rate) else markup("{}&#8239;%", percent(rate, 0)),
            number(study.ranks.get(method, math.nan), 2),
            with_spread(*study.final(method, "bmcta"), "%")
            + rounds_text(study, method, "bmcta"),
        ],
    }


def gain_rows(study: StudyResults) -> list[tuple[str, list[Markup | str]]]:
    """Return each method's mean gain over the baseline, as in the headline, with its interval and p value."""
    rows, base = [], study.base or ""
    for method in (m for m in study.methods if base and m != base):
        if silos := study.silo_means(method, base):
            gain = study.mean_gain(method, base)
            p = "< 0.001" if gain.p < 0.001 else number(gain.p, 3)
            mean = markup("{}<small>{}</small>", points(gain.mean), hospitals_of(len(silos)))
            rows.append((spell(method), [mean, between(gain) or "–", p]))
    return rows


def terms(study: StudyResults) -> list[tuple[str, str]]:
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
        found.append(
            (", ".join(study.task.secondary_metrics.values()), study.task.secondary_text)
        )
    return found


def rounds_text(study: StudyResults, method: str, which: str) -> Markup:
    """Return the rounds of a method's ``final`` or ``bmcta`` scores over its seeds."""
    found = [
        (r["final"]["round"] if which == "final" else r["bmcta_round"], r["rounds"])
        for r in study.of(method)
    ]
    known = sorted({(number, rounds) for number, rounds in found if number is not None})
    if not known:
        return Markup()
    first, last = known[0], known[-1]
    if first == last or last[0] > last[1]:
        text = " to ".join(dict.fromkeys([round_name(*first), round_name(*last)]))
    else:
        text = f"rounds {first[0]}–{last[0]}"
    return markup("<small>{}</small>", text)


def every_method(study: StudyResults) -> list[tuple[str, list[tuple[str, Markup]]]]:
    """Return all methods' scores and gains per silo; empty if the table of the silos' section shows them all."""
    if len(study.methods) <= len(study.columns) and len(study.methods) < 4:
        return []
    rows = []
    for silo in study.silos:
        scores = {m: study.score(m, silo) for m in study.methods}
        top = max((c.mean for c in scores.values() if not math.isnan(c.mean)), default=math.nan)
        cells = []
        for m, score in scores.items():
            text = with_spread(score.mean, score.spread, "%")
            if study.base and m != study.base:
                text += markup(
                    "<small>{}</small>", points(study.gain(m, study.base, silo).mean)
                )
            cells.append(("best" if score.mean >= top - 1e-9 else "", text))
        rows.append((silo, cells))
    return rows


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
        if not math.isnan(total.interval[0]):
            a.plot(total.interval, [row - 0.12] * 2, color=look[method].colour, linewidth=2.5)
        a.plot(
            total.mean, row - 0.12, look[method].marker, color=look[method].colour, markersize=8
        )
        a.annotate(points(total.mean), (1, row - 0.12), (54, 0), **GAIN_AT, weight="bold")
    a.axvline(0, color=INK, linewidth=1)
    a.set_ylim(len(methods) - 0.4, -0.6)
    a.set_yticks(range(len(methods)), names)
    a.grid(axis="x")
    percent_axis(a.xaxis)
    a.set_xlabel(f"gain over {spell(base)}, points of test {study.task.score_label}")
    a.spines["left"].set_visible(False)
    return c.svg(
        f"compared{width:g}",
        f"Mean gain over {spell(base)} of each method with its 95 % interval.",
    )
