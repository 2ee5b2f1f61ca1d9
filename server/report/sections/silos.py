"""Section on the silos: their scores, gains and missed rounds."""

# ruff: noqa: E501  (template)
from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from markupsafe import Markup

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
    percent_axis,
    room_for,
    styles,
)
from server.report.html import between, capital, count_noun, markup, percent, points, render
from server.report.inference import SEEDS_NEEDED, Gain, Score
from server.report.methods import spell
from server.report.participation import (
    MARK,
    Rounds,
    mean_without,
    opened_sums,
    rounds_missed,
    seldom,
    silo_rounds,
)
from server.report.study import StudyResults

SMALL = 30  # a test set with fewer samples is marked as small
TEMPLATE = """{% from "macros" import table, cells, widths, rare with context %}
<h2>What each hospital gained</h2><p class='lead'>{{ lead }}</p>
<figure>{% if figure %}{{ widths(figure) }}{% endif %}</figure>
{% call table(head, "silos") %}<tbody>
{% for row in rows %}<tr><th scope="row">{{ row.silo }}{{ row.mark }}<small class="phone">{{ row.train }} + {{ row.test }}</small></th><td class="desk">{{ row.train }}</td><td class="desk">{{ row.test }}{% if row.small %}<small>small</small>{% endif %}</td>
{%- for kind, text in row.cells %}<td class="{{ kind }}">{{ text }}</td>{% endfor %}</tr>{% endfor %}
</tbody><tfoot>{% for name, values in means %}<tr><th scope="row">{{ name }}</th><td class="desk"></td><td class="desk"></td>{{ cells(values) }}</tr>{% endfor %}</tfoot>{% endcall %}
<p class='note' style='margin-top:12px'>{{ intervals }}</p>
{% if withheld %}<p class="note">Withheld by the hospital because too few test samples stand behind them: {{ withheld|join(", ") }}.</p>{% endif %}
{{ rare(rare_text, mark) }}
{% if joined %}<p class="note">{{ joined|join("; ") }}. Its gain compares runs in which it trained for fewer rounds than the others; training alone counts from the round in which it joined that run.</p>{% endif %}
{% if sums %}<p class="note">Secure aggregation: {% if simulated %}hospitals' updates were added as integers; in a simulation nothing is masked.{% else %}hospitals masked their updates, and the server opened their sums alone.{% endif %} {{ sums|join(". ") }}. Each hospital cut its own step.</p>{% endif %}
{% for title, found in absences if found %}<h3>{{ title }}</h3>
{% call table(["Hospital", "Method, seed", "Rounds", "Last reason"], "reasons") %}<tbody>{% for method, seed, silo, n, reason in found %}<tr><th scope="row">{{ silo }}</th><td>{{ method }}, {{ seed }}</td><td>{{ n }}</td><td class="text">{{ reason }}</td></tr>{% endfor %}</tbody>{% endcall %}
{% endfor %}"""


def silos_section(study: StudyResults) -> Markup:
    """Render the section; empty without results."""
    if not study.runs:
        return Markup()
    best = study.best or study.methods[0]
    base = study.base
    methods = study.columns
    rare = seldom(study, methods)
    head = [
        Markup('Hospital<small class="phone">train + test</small>'),
        "Train",
        "Test",
        *map(spell, methods),
    ]
    if base:
        head.append(markup("Gain of {}<br>over {}", spell(best), spell(base)))
    known = any(not math.isnan(study.score(m, s).mean) for m in methods for s in study.silos)
    return render(
        TEMPLATE,
        lead=losers(study),
        figure=in_widths(gains, study) if known else None,
        head=head,
        rows=[
            silo_row(study, silo, best, MARK if silo in rare else "") for silo in study.silos
        ],
        means=list(mean_rows(study, methods, rare)),
        intervals=intervals(study),
        withheld=study.withheld,
        rare_text=rounds_missed(rare),
        mark=MARK,
        joined=[
            f"{silo} joined late: it took part from round {first} on ({', '.join(map(spell, own))})"
            for silo, by_round in study.joined.items()
            for first, own in by_round.items()
        ],
        sums=opened_sums(study),
        simulated=study.simulated,
        absences=[
            ("Rounds that went on without a hospital", silo_rounds(study, "rejected")),
            ("Rounds in which a hospital's step was bounded", silo_rounds(study, "bounded")),
        ],
    )


def silo_row(study: StudyResults, silo: str, best: str, mark: str) -> dict[str, Any]:
    """Return the values of one row of the table."""
    n_test = study.sizes(silo, "n_test")
    cells = []
    for method in study.columns:
        score = study.score(method, silo)
        low, high = score.interval
        text = markup("{}", percent(score.mean))
        if math.isnan(score.mean) and silo in study.withheld:
            text = Markup("<small>withheld</small>")
        if not math.isnan(low):
            text += markup("<small>{}–{}</small>", percent(low, 0), percent(high, 0))
        if not math.isnan(score.spread):
            text += markup("<small>±&#8202;{}</small>", percent(score.spread))
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


def span(values: Sequence[int]) -> str:
    """Return ``40``, or ``28–50`` if seeds differ."""
    return "–".join(map(str, dict.fromkeys([values[0], values[-1]]))) if values else "–"


def intervals(study: StudyResults) -> Markup:
    """Return the explanation of the table's small numbers."""
    several = len(study.seeds) > 1
    wilson = "Wilson's" if study.task.score == "accuracy" else "its"
    what = (
        "mean and standard deviation over seeds"
        if several
        else f"with {wilson} 95&#8239;% interval below"
    )
    about = f"{capital(study)} in per cent on the hospital's own test samples, {what}. "
    if study.base:
        seeds = f"seeds (from {SEEDS_NEEDED} on) and " if several else ""
        about += (
            f"The gain's interval counts {seeds}test samples. It takes the two tests as independent, because which "
            "samples were right never leaves a hospital; it is wider than it need be. A gain is in colour where its "
            "interval excludes zero."
        )
    return Markup(about)


def mean_rows(
    study: StudyResults, methods: Sequence[str], rare: Mapping[str, Rounds]
) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield the rows of means: over all silos and, if some silos missed many rounds, without these."""
    best = study.best
    base = study.base

    def row(means: Iterable[float], without: Collection[str]) -> list[str]:
        gain = [points(study.mean_gain(best, base, without).mean)] if best and base else []
        return [*map(percent, means), *gain]

    yield "Mean", row((study.mean_score(m)[0] for m in methods), ())
    if rare:
        yield f"without {MARK}", row((mean_without(study, m, rare) for m in methods), rare)


def gain_cell(gain: Gain) -> tuple[str, Markup]:
    """Return the class and the text of a gain's cell."""
    interval = between(gain, 0)
    below = markup("<small>{}</small>", interval) if interval else Markup()
    return {1: "up", 0: "", -1: "down"}[gain.shown], markup("{}", points(gain.mean)) + below


def losers(study: StudyResults) -> Markup:
    """Return a sentence on the silos that score lower with the best method."""
    best = study.best
    base = study.base
    if not best or not base:
        return markup(
            "The {} of every hospital's model on the hospital's own test data.",
            study.task.score_label,
        )
    each = {s: study.gain(best, base, s) for s in study.silos}
    lose = [
        markup('<span class="nb">{} ({})</span>', s, points(g.mean))
        for s, g in each.items()
        if g.sign < 0
    ]
    other = Markup()
    if study.personalised not in (None, best):
        other = markup(" The best personalised method was {}.", spell(study.personalised or ""))
    if not lose:
        return markup(
            "No hospital scores lower with {} than with {}.{}", spell(best), spell(base), other
        )
    if len(lose) > 6:
        lose = [*lose[:5], markup("{}", count_noun(len(lose) - 5, "other"))]
    names = Markup(", ").join(lose)
    return markup("Lower with {} than with {}: {}.{}", spell(best), spell(base), names, other)


def _gain_column(a: Any, gain: Sequence[Gain]) -> None:
    """Write the gains beside the rows, the clear ones in bold."""
    for row, own in enumerate(gain):
        how = {"weight": "bold" if own.shown else "normal", "color": INK if own.sign else MUTED}
        a.annotate(points(own.mean), (1, row), (46, 0), **GAIN_AT, **how)
    above = {**GAIN_AT, "va": "bottom"}
    a.annotate("gain", (1, -0.5), (46, 6), **above, color=MUTED, fontsize=11)


@chart
def gains(study: StudyResults, width: float) -> str:
    """Draw each silo's scores with the baselines and the best method, joined by a line, with interval and gain.

    Silos that have withheld all scores are left out; at least one silo must remain.
    """
    look = styles(study)
    methods = study.columns
    best = study.best or study.methods[0]
    base = study.base
    order = [
        s for s in study.silos if any(not math.isnan(study.score(m, s).mean) for m in methods)
    ]
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
    a.set(
        xlim=(max(floor - 0.02, LOWEST if floor < 0 else -0.02), 1.02),
        ylim=(len(order) - 0.5, -0.5),
    )
    rare = seldom(study, methods)
    a.set_yticks(
        range(len(order)),
        [n + (MARK if s in rare else "") for n, s in zip(names, order, strict=True)],
    )
    a.grid(axis="x")
    percent_axis(a.xaxis)
    a.set_xlabel(f"test {study.task.score_label}, %")
    a.spines["left"].set_visible(False)
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
    low, high = scores[best].interval
    lows = [scores[method].mean for method in rows]
    if not math.isnan(low):
        a.plot(
            [low, high],
            [rows[best], rows[best]],
            color=look[best].colour,
            alpha=0.25,
            linewidth=6,
            zorder=1,
        )
        lows.append(low)
    if base is not None and base in rows and best in rows:
        a.plot(
            [scores[m].mean for m in (base, best)],
            [rows[base], rows[best]],
            color=INK,
            linewidth=1.4,
            zorder=2,
        )
    for method, row in rows.items():
        front = method == best
        size = (8.5 if front else 7) * (1 if row == round(row) else 0.8)
        mark = {**look[method].mark, "markersize": size, "zorder": 4 if front else 3}
        a.plot(scores[method].mean, row, look[method].marker, **mark)
    return lows


def lifts(scores: Mapping[str, Score], least: float) -> dict[str, float]:
    """Return how far each known score's mark is moved off its row: marks that are ``least`` apart hide no other."""
    known = sorted(
        (m for m, score in scores.items() if not math.isnan(score.mean)),
        key=lambda m: scores[m].mean,
    )
    groups: list[list[str]] = []
    for method in known:
        if groups and scores[method].mean - scores[groups[-1][-1]].mean < least:
            groups[-1].append(method)
        else:
            groups.append([method])
    step = {len(group): min(0.3, 0.8 / len(group)) for group in groups}
    return {m: (k - (len(g) - 1) / 2) * step[len(g)] for g in groups for k, m in enumerate(g)}


def _legend(
    c: Canvas, study: StudyResults, look: Mapping[str, Style], best: str, *, narrow: bool
) -> None:
    """Add the legend of the methods above the chart."""
    marks: list[Any] = [
        *(
            c.axes.plot([], [], look[m].marker, **look[m].mark, markersize=7.5, label=spell(m))[
                0
            ]
            for m in study.columns
        )
    ]
    if len(study.seeds) == 1:
        interval = "95 %" if narrow else "95 % interval"
        marks += c.axes.plot(
            [], [], color=look[best].colour, alpha=0.25, linewidth=6, label=interval
        )
    space: dict[str, Any] = {
        "handlelength": 1.2,
        "handletextpad": 0.4,
        "columnspacing": 0.9 if narrow else 1.6,
    }
    place: dict[str, Any] = {
        "loc": "upper left",
        "bbox_to_anchor": (0, 1),
        "borderpad": 0,
        "borderaxespad": 0.2,
    }
    c.figure.legend(handles=marks, ncols=len(marks), **place, **space)
