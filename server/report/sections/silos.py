"""Sections on the silos (scores, gains, missed rounds) and on held-out hospitals (zero-shot, personalised, alone)."""

# ruff: noqa: E501  (templates)
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
from server.report.methods import spell
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

# The look of an interval
BAND: dict[str, Any] = {"alpha": 0.25, "linewidth": 6}
SMALL = 30  # a test set with fewer samples is marked as small
MOST_LOSERS = 6  # with more, the lead names five
TEMPLATE = """{% macro span(values) %}{{ [values[0], values[-1]]|unique|join("–") if values else "–" }}{% endmacro %}
{% set several, word, base = study.seeds|length > 1, study.task.score_label, study.base %}
<h2>What each hospital gained</h2><p class='lead'>
{%- if not gained %}The {{ word }} of every hospital's model on the hospital's own test data.
{%- else %}
{%- if lose %}Lower with {{ best|spell }} than with {{ base|spell }}: {% for silo, gain in (lose.items()|list)[:few if lose|length <= few else few - 1] %}
{{ ", " if not loop.first }}<span class="nb">{{ silo }} ({{ gain.mean|points }})</span>{% endfor %}
{%- if lose|length > few %}, {{ (lose|length - few + 1)|noun("other") }}{% endif %}.
{%- else %}No hospital scores lower with {{ best|spell }} than with {{ base|spell }}.{% endif %}
{%- if study.personalised not in (none, best) %} The best personalised method was {{ study.personalised|spell }}.{% endif %}{% endif %}</p>
<figure>{% if figure %}{{ widths(figure) }}{% endif %}</figure>
{% call table(['Hospital<small class="phone">train + test</small>'|safe, "Train", "Test"] + study.columns|map("spell")|list + ([("Gain of %s<br>over %s"|safe)|format(best|spell, base|spell)] if base else []), "silos") %}<tbody>
{% for silo in study.silos %}{% set train, test = span(study.sizes(silo, "n_train")), study.sizes(silo, "n_test") %}
<tr><th scope="row">{{ silo }}{{ mark if silo in rare_silos }}<small class="phone">{{ train }} + {{ span(test) }}</small></th><td class="desk">{{ train }}</td><td class="desk">{{ span(test) }}{% if test and 0 < test[0] < small %}<small>small</small>{% endif %}</td>
{%- for method in study.columns %}{% set score = study.score(method, silo) %}<td class="{{ "main" if method == best and study.columns|length > 1 }}">
{%- if score.mean is not known and silo in study.withheld %}<small>withheld</small>{% else %}{{ score.mean|percent }}{% endif %}
{%- if score.interval[0] is known %}<small>{{ score.interval[0]|percent(0) }}–{{ score.interval[1]|percent(0) }}</small>{% endif %}
{%- if score.spread is known %}<small>±&#8202;{{ score.spread|percent }}</small>{% endif %}</td>{% endfor %}
{% if base %}{{ gain_cell(gained[silo]) }}{% endif %}</tr>{% endfor %}
</tbody><tfoot><tr><th scope="row">Mean</th><td class="desk"></td><td class="desk"></td>
{%- for method in study.columns %}<td>{{ study.mean_score(method)[0]|percent }}</td>{% endfor %}
{%- if base %}<td>{{ study.mean_gain(best, base).mean|points }}</td>{% endif %}</tr>
{% if rare_silos %}<tr><th scope="row">without {{ mark }}</th><td class="desk"></td><td class="desk"></td>
{%- for mean in without %}<td>{{ mean|percent }}</td>{% endfor %}
{%- if base %}<td>{{ study.mean_gain(best, base, rare_silos).mean|points }}</td>{% endif %}</tr>{% endif %}</tfoot>{% endcall %}
<p class='note' style='margin-top:12px'>{{ study|capital }} in per cent on the hospital's own test samples, {% if several %}mean and standard deviation over seeds{% else %}with {{ "Wilson's" if study.task.score == "accuracy" else "its" }} 95&#8239;% interval below{% endif %}. {% if base %}The gain's interval counts {% if several %}seeds (from {{ seeds_needed }} on) and {% endif %}test samples. It takes the two tests as independent, because which samples were right never leaves a hospital; it is wider than it need be. A gain is in colour where its interval excludes zero.{% endif %}</p>
{% if study.withheld %}<p class="note">Withheld by the hospital because too few test samples stand behind them: {{ study.withheld|join(", ") }}.</p>{% endif %}
{{ rare(rare_text) }}
{% if study.joined %}<p class="note">{% set semicolon = joiner("; ") %}{% for silo, by_round in study.joined.items() %}{% for first, own in by_round.items() %}{{ semicolon() }}{{ silo }} joined late: it took part from round {{ first }} on ({{ own|map("spell")|join(", ") }}){% endfor %}{% endfor %}. Its gain compares runs in which it trained for fewer rounds than the others; training alone counts from the round in which it joined that run.</p>{% endif %}
{% if sums %}<p class="note">Secure aggregation: {% if study.simulated %}hospitals' updates were added as integers; in a simulation nothing is masked.{% else %}hospitals masked their updates, and the server opened their sums alone.{% endif %} {{ sums|join(". ") }}. Each hospital cut its own step. {{ still|join(" ") }}</p>{% endif %}
{% for title, found in absences if found %}<h3>{{ title }}</h3>
{% call table(["Hospital", "Method, seed", "Rounds", "Last reason"], "reasons") %}<tbody>{% for method, seed, silo, n, reason in found %}<tr><th scope="row">{{ silo }}</th><td>{{ method }}, {{ seed }}</td><td>{{ n }}</td><td class="text">{{ reason }}</td></tr>{% endfor %}</tbody>{% endcall %}
{% endfor %}"""


def silos_section(study: StudyResults) -> Markup:
    """Render the section; empty without results."""
    if not study.runs:
        return Markup()
    methods, base = study.columns, study.base
    rare = seldom(study, methods)
    known = any(not math.isnan(study.score(m, s).mean) for m in methods for s in study.silos)
    gained = {s: study.gain(study.headed, base, s) for s in study.silos} if base else {}
    return render(
        TEMPLATE,
        study=study,
        best=study.headed,
        figure=in_widths(gains, study) if known else None,
        gained=gained,
        lose={silo: gain for silo, gain in gained.items() if gain.sign < 0},
        few=MOST_LOSERS,
        small=SMALL,
        seeds_needed=SEEDS_NEEDED,
        rare_silos=rare,
        rare_text=rounds_missed(rare),
        without=[mean_without(study, m, rare) for m in methods],
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
    best, base = study.headed, study.base
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
UNSEEN = """{% macro difference(silos, kind, methods) %}{% set gain, count = gain_over_alone(silos, kind, methods) %}
<td>{% if not count %}–{% else %}{{ gain.mean|points }}<small>{{ gain|between or "not shown" }}{% if count < silos|length %}, {{ count }} of {{ silos|length }} hospitals{% endif %}</small>{% endif %}</td>{% endmacro %}
<h2>Hospitals that did not train</h2><p class='lead'>{{ found|length|hospitals }} held out of the training, by the {{ study.task.score_label }} on their own test samples in per cent{% if study.seeds|length > 1 %}, means over {{ study.seeds|length }} seeds{% endif %}.</p>
{% call table(["Method"] + kinds.values()|list + ["Zero-shot − alone", "Personalised − alone", "Worst zero-shot"]) %}<tbody>{% for method, silos in methods.items() %}<tr><th scope="row">{{ method|spell }}</th>
{% for kind in kinds %}<td>{{ mean(silos|map(attribute=kind)|list)|percent }}</td>{% endfor %}
{% for kind in ("zero_shot", "personalised") %}{{ difference(silos, kind, study.count_compared(method, alone())) }}{% endfor %}<td>{{ lowest(silos)|percent }}</td></tr>{% endfor %}</tbody>{% endcall %}
<p class='note'>{% if found|length < needed %}No interval is shown: {{ found|length|hospitals }} held out, at least {{ needed }} needed.{% else %}Below a difference is its 95 % interval over hospitals, as in the table of the methods. Their models come of mostly the same data, or are one model: the differences are not independent.{% endif %}</p>
{% call explained() %}<dl class='terms'><dt>Zero-shot</dt><dd>The model that the hospital gets as a newcomer, before it trains.</dd><dt>Personalised</dt><dd>Its own model after some epochs (hold-out-epochs) on what is its own; all that is shared stays as it was received.</dd><dt>Alone</dt><dd>Trained on its own samples only.</dd><dt>All in</dt><dd>The same method with the hospital in the training.</dd></dl>{% endcall %}
<h3>Each of them</h3>
{% call table(["Hospital", "Method"] + kinds.values()|list) %}<tbody>{% for silo, of in found|dictsort %}{% for method in methods if method in of %}<tr><th scope="row">{{ silo }}</th><td>{{ method|spell }}</td>{% for kind in kinds %}<td>{{ of[method][kind]|percent }}</td>{% endfor %}</tr>{% endfor %}{% endfor %}</tbody>{% endcall %}"""


def held_out(study: StudyResults) -> dict[str, dict[str, Scores]]:
    """Return the scores of each held-out silo by method, from ``summary.json``."""
    return {
        silo: {
            method: {kind: finite_or_nan(values.get(kind)) for kind in KINDS}
            for method, values in of.items()
        }
        for silo, of in results_in(study.summary).items()
    }


def unseen_section(study: StudyResults) -> Markup:
    """Render the section; empty if no silo was held out."""
    found = held_out(study)
    methods = defaultdict[str, list[Scores]](list)
    for method, scores in (pair for of in found.values() for pair in of.items()):
        if method != "local":
            methods[method].append(scores)
    return render(
        UNSEEN if found else "",
        study=study,
        found=found,
        methods=methods,
        kinds=KINDS,
        needed=HOSPITALS_NEEDED,
        mean=lambda values: statistics.fmean(values) if values else math.nan,
        lowest=lowest,
        gain_over_alone=gain_over_alone,
    )


def lowest(silos: Sequence[Scores]) -> float:
    """Return the lowest zero-shot score; ``nan`` if one is not known."""
    scores = [scores["zero_shot"] for scores in silos]
    return math.nan if any(map(math.isnan, scores)) else min(scores)


def gain_over_alone(silos: Sequence[Scores], kind: str, methods: int) -> tuple[Gain, int]:
    """Return the mean difference to training alone, and the number of silos that have one."""
    differences = [scores[kind] - scores["local"] for scores in silos]
    known = [value for value in differences if not math.isnan(value)]
    return over_hospitals(known, methods), len(known)
