"""Section on the tuning of the methods: budgets, chosen settings, and the search space."""

# ruff: noqa: E501  (template)
from __future__ import annotations

import statistics

import pandas as pd
from markupsafe import Markup

from server.report.html import render
from server.report.inference import spread
from server.report.study import StudyResults

TEMPLATE = """{% macro value(one) %}{{ "%.3g"|format(one) if one is float else one }}{% endmacro %}
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
        TEMPLATE,
        study=study,
        searches=searches,
        methods=methods,
        private=any(search["privacy"] for search in searches),
        equal=len({frozenset(cost["rounds"]) for cost in costs.values()}) == 1,
        totals={m: {key: each.sum() for key, each in costs[m].items()} for m in methods},
        scores={m: (statistics.fmean(each), spread(each)) for m, each in scores.items()},
    )
