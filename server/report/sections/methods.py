"""Sections that compare the methods (a row each, and all per silo), and on their tuning."""

# ruff: noqa: E501  (templates)
from __future__ import annotations

import math
import statistics
from collections import Counter

import pandas as pd
from markupsafe import Markup

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
DIGITS = {"auc": 3, "kappa": 3, "mae": 3, "rmse": 3}
TEMPLATE = """{% set several, task, base = study.seeds|length > 1, study.task, study.base %}{% set word, secondary = task.score_label, task.secondary_metrics %}
{% macro final(method, key, digits=0) %}{{ spread(study.final(method, key), "number" if digits else "percent", digits) }}{% endmacro %}
{% macro rounds(method, key) %}{% set text = rounds_text(study, method, key) %}{% if text %}<small>{{ text }}</small>{% endif %}{% endmacro %}
<h2>How the methods compare</h2><p class='lead'>Each hospital counts alike, however large it is.
{%- if several %} Means over {{ study.seeds|length }} seeds, ± standard deviation; each seed splits the data anew.{% endif %}</p>
{% call table(["Method", ("<b>Final</b><br>%s"|safe)|format("by validation" if study.chosen_on == "val" else "last round"), "weighted by<br>test samples"|safe, "Worst<br>hospital"|safe] + secondary.values()|list + ["Fairness<br>variance"|safe, "Incentivised<br>rate"|safe, "Mean<br>rank"|safe, "<b>BMCTA</b><br>best on test"|safe], "methods") %}<tbody>
{% for method in study.methods %}{% set few, silo = seldom(study, [method]), worst(study, method) %}
<tr><th scope="row">{{ method|spell }}<small>{{ method }}<span class="desk">, {{ "model before" if info_of(method).reports == "received" else "model after" }} local training</span></small></th>
<td>{{ final(method, task.score ~ "_mean") }}{% if few %}<small>without {{ mark }} {{ mean_without(study, method, few)|percent }}</small>{% endif %}{{ rounds(method, "final") }}</td>
<td>{{ final(method, task.score ~ "_weighted") }}</td>
<td>{% if silo is none %}–{% else %}{{ study.score(method, silo).mean|percent }}<small>{{ silo }}{{ mark if silo in few }}</small>{% endif %}</td>
{% for metric in secondary %}<td>{{ final(method, metric ~ "_mean", digits.get(metric, 0)) }}</td>{% endfor %}
<td>{{ final(method, "fairness_variance", 4) }}</td>
{% set rate = study.final(method, "incentivized_rate")[0] %}
<td>{% if method in baselines or rate is not known %}–{% else %}{{ rate|percent(0) }}&#8239;%{% endif %}</td>
<td>{{ study.ranks.get(method, nan)|number(2) }}</td><td>{{ final(method, "bmcta") }}{{ rounds(method, "bmcta") }}</td></tr>{% endfor %}</tbody>{% endcall %}
{% call explained() %}<dl class='terms'><dt>Final</dt><dd>{% if study.chosen_on == "val" %}Mean over hospitals at the round with the best mean validation {{ word }}. This is the number to expect.{% else %}Mean over hospitals at the last round, because no hospital has validation data.{% endif %}</dd>
<dt>BMCTA</dt><dd>Best mean test {{ word }} over all rounds: the statistic that papers report. It picks the round by looking at the test data, so it is never below what a user would get and usually above.</dd>
<dt>Fairness variance</dt><dd>How much {{ word }} differs between hospitals. Smaller is more even; 0 means that all have the same.</dd>
<dt>Incentivised rate</dt><dd>Share of hospitals whose score is above that of {{ baselines|map("baseline")|join(" and that of ") }}. Single hospitals' scores are uncertain, and so is this share.</dd>
<dt>Mean rank</dt><dd>Place of the method among those of the study, averaged over hospitals; 1 would be first everywhere.</dd>
{% if secondary %}<dt>{{ secondary.values()|join(", ") }}</dt><dd>{{ task.secondary_text }}</dd>{% endif %}</dl>{% endcall %}
{{ rare(rare_text) }}
{% if compared %}<figure>{{ widths(compared) }}<figcaption>Gain over {{ base|spell }}: mean over hospitals with its 95&#8239;% interval, from {{ needed }} hospitals on; each circle below is a hospital, a larger one several with equal gains.</figcaption></figure>{% endif %}
{% if gains %}<h3>Gain over {{ base|spell }}</h3>
{% call table(["Method", "Mean gain,<br>points"|safe, "95&#8239;%<br>interval"|safe, "p"]) %}<tbody>{% for method, silos, gain in gains %}<tr><th scope="row">{{ method|spell }}</th><td>{{ gain.mean|points }}<small>{{ silos|hospitals }}</small></td><td>{{ gain|between or "–" }}</td><td>{{ "< 0.001" if gain.p < 0.001 else gain.p|number(3) }}</td></tr>{% endfor %}</tbody>{% endcall %}
{% call explained() %}<p>Student's t over the hospitals' gains in {{ word }}, each a mean over its seeds, from {{ needed }} hospitals on. The spread between hospitals contains the error of their test patients. The hospitals count as drawn independently from hospitals like these, and the interval holds for these seeds. Intervals and p values are corrected for the number of methods (Bonferroni){% if study.best and study.count_compared(study.best, base or "") == 1 %}; {{ study.best|spell }}, which validation data chose, comes first and has its 5&#8239;% to itself{% endif %}. The headline is decided by the same interval.</p>{% endcall %}{% endif %}
{% if study.methods|length > study.columns|length or study.methods|length > 3 %}<h3>All methods per hospital</h3><p class='note'>Test {{ word }} in per cent{% if base %}, and the paired difference to {{ base|spell }}{% endif %}; the best of each hospital in bold.</p>
{% call table(["Hospital"] + study.methods|map("spell")|list) %}<tbody>{% for silo in study.silos %}{% set top = top_score(study, silo) %}<tr><th scope="row">{{ silo }}</th>{% for method in study.methods %}{% set score = study.score(method, silo) %}<td class="{{ "best" if score.mean >= top - 1e-9 }}">{{ spread((score.mean, score.spread)) }}{% if base and method != base %}<small>{{ study.gain(method, base, silo).mean|points }}</small>{% endif %}</td>{% endfor %}</tr>{% endfor %}</tbody>{% endcall %}{% endif %}"""


def methods_section(study: StudyResults) -> Markup:
    """Render the section; empty without results."""
    if not study.runs:
        return Markup()
    others = [method for method in study.methods if study.base not in (None, method)]
    base = study.base or ""
    return render(
        TEMPLATE,
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
    found = [
        (r["final"]["round"] if which == "final" else r["bmcta_round"], r["rounds"])
        for r in study.of(method)
    ]
    known = sorted({(number, rounds) for number, rounds in found if number is not None})
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


TUNING = """{% macro value(one) %}{{ "%.3g"|format(one) if one is float else one }}{% endmacro %}
{% macro most(spent) %}{% set found = spent.values()|sort(attribute="epsilon", reverse=true)|first %}{% if found %}{{ "%.2f"|format(found.epsilon) }}{% else %}–{% endif %}{% endmacro %}
{% set asked, first = searches[0].asked, searches[0].seed %}{% set rounds, here = asked.settings.rounds|default(""), study.config.rounds %}
<h2>How the methods were tuned</h2><p class='lead'>{{ asked.trials }} trials of each method{% if searches|length > 1 %} in each of {{ searches|length }} searches, one per seed{% endif %} ({{ asked.sampler }}{% if rounds %}, {{ rounds }} rounds{% endif %}). Validation data chose, by the {{ {"mean": "mean over hospitals", "worst": "worst hospital"}[asked.objective] }} of {{ study.task.score_label }}; the search read no test score.</p>
{% call table(["Method", "Trials<br>complete, pruned, failed"|safe, "Rounds", "Bytes", "Time", "Best validation<br>score"|safe, "Chosen settings"] + (["Epsilon<br>of all trials"|safe] if private else []), "wordy") %}<tbody>{% for method in methods %}{% set total = totals[method] %}<tr><th scope="row">{{ method|spell }}</th>
<td>{{ total.complete }}, {{ total.pruned }}, {{ total.failed }}</td><td>{{ "{:,}".format(total.rounds) }}</td><td>{{ total.bytes|size }}</td><td>{{ total.seconds|duration }}</td><td>{{ spread(scores[method]) }}</td>
<td class="text">{% for search in searches %}{{ "; " if not loop.first }}{% for key, one in search.best[method]["values"].items() %}{{ ", " if not loop.first }}{{ key }} {{ value(one) }}{% endfor %}{% endfor %}</td>
{% if private %}<td>{% for search in searches %}{{ ", " if not loop.first }}{{ most(search.privacy[method]|default({})) }}{% endfor %}</td>{% endif %}</tr>{% endfor %}</tbody>{% endcall %}
<p class='note'>{% if equal %}Every method had the same number of trials and of rounds.{% else %}Every method had the same number of trials. Their rounds differ, where trials were pruned, failed or stopped early.{% endif %}
{%- if rounds and rounds|string != here|string %} The runs of this page have {{ here }} round{{ "" if here == 1 else "s" }}.{% endif %}
{%- if study.unsearched %} Seeds {{ study.unsearched|join(", ") }} have the settings of seed {{ searches|map(attribute="seed")|join(", ") }}. Where the seed draws the split, their test samples may have been training or validation samples of the search, so their scores may be too high.{% endif %} A method with more settings has the same trials for a larger space.</p>
{% if private %}<p class='note'>Each trial trains on the same patients, so the trials' privacy costs add up. All trials together: {% for search in searches %}{% set found = search.privacy.all|default({}) %}{% set largest = found.values()|sort(attribute="epsilon", reverse=true)|first %}epsilon {{ most(found) }} at delta {% if largest %}{{ "%.1g"|format(largest.delta) }}{% else %}–{% endif %} (seed {{ search.seed }}){% if not loop.last %}, {% endif %}{% endfor %}, at the hospital that spent most. The runs of this page come on top. Validation scores chose the settings and have no noise: this epsilon does not cover the patients of the validation parts.</p>{% endif %}
<details><summary>The space</summary><pre>{% for key, form in asked.space.items() %}{{ key }} = {{ form }}
{% endfor %}</pre></details>"""


def tuning_section(study: StudyResults) -> Markup:
    """Render the section; empty if the study does not use a search (``silofl simulate --tuned``)."""
    if not (searches := study.searches):
        return Markup()
    methods = [m for m in study.methods if m in searches[0]["asked"]["strategies"]]
    scores = {m: [search["best"][m]["score"] for search in searches] for m in methods}
    costs = {m: pd.DataFrame([search["cost"][m] for search in searches]) for m in methods}
    return render(
        TUNING,
        study=study,
        searches=searches,
        methods=methods,
        private=any(search["privacy"] for search in searches),
        equal=len({frozenset(cost["rounds"]) for cost in costs.values()}) == 1,
        totals={m: {key: each.sum() for key, each in costs[m].items()} for m in methods},
        scores={m: (statistics.fmean(each), spread(each)) for m, each in scores.items()},
    )
