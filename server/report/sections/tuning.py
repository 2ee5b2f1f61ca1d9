"""Section on the tuning of the methods: budgets, chosen settings, and the search space."""

# ruff: noqa: E501  (template)
from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from server.report.html import duration, lines, render, size_text, with_spread
from server.report.inference import spread
from server.report.methods import spell
from server.report.study import StudyResults
from server.results.tuned import STATES

Search = Mapping[str, Any]
OBJECTIVES = {"mean": "mean over hospitals", "worst": "worst hospital"}
TEMPLATE = """{% from "macros" import table, cells with context %}
<h2>How the methods were tuned</h2><p class='lead'>{{ trials }} trials of each method{% if searches > 1 %} in each of {{ searches }} searches, one per seed{% endif %} ({{ sampler }}{% if rounds %}, {{ rounds }} rounds{% endif %}). Validation data chose, by the {{ objective }} of {{ word }}; the search read no test score.</p>
{% call table(head, "wordy") %}<tbody>{% for name, values in rows %}<tr><th scope="row">{{ name }}</th>{% for value in values %}<td{% if loop.index == 6 %} class="text"{% endif %}>{{ value }}</td>{% endfor %}</tr>{% endfor %}</tbody>{% endcall %}
<p class='note'>{% if equal %}Every method had the same number of trials and of rounds.{% else %}Every method had the same number of trials. Their rounds differ, where trials were pruned, failed or stopped early.{% endif %}
{%- if rounds and rounds|string != here|string %} The runs of this page have {{ here }} round{{ "" if here == 1 else "s" }}.{% endif %}
{%- if unsearched %} Seeds {{ unsearched|join(", ") }} have the settings of seed {{ searched }}. Where the seed draws the split, their test samples may have been training or validation samples of the search, so their scores may be too high.{% endif %} A method with more settings has the same trials for a larger space.</p>
{% if spent %}<p class='note'>Each trial trains on the same patients, so the trials' privacy costs add up. All trials together: {% for seed, epsilon, delta in spent %}epsilon {{ epsilon }} at delta {{ delta }} (seed {{ seed }}){% if not loop.last %}, {% endif %}{% endfor %}, at the hospital that spent most. The runs of this page come on top. Validation scores chose the settings and have no noise: this epsilon does not cover the patients of the validation parts.</p>{% endif %}
<details><summary>The space</summary><pre>{{ space|join("\n") }}</pre></details>"""


def tuning_section(study: StudyResults) -> Markup:
    """Render the section; empty if the study does not use a search (``silofl simulate --tuned``)."""
    if not (searches := study.searches):
        return Markup()
    asked = searches[0]["asked"]
    methods = [method for method in study.methods if method in asked["strategies"]]
    rounds = {
        method: {search["cost"][method]["rounds"] for search in searches} for method in methods
    }
    private = any(search["privacy"] for search in searches)
    head = [
        "Trials|complete, pruned, failed",
        "Rounds",
        "Bytes",
        "Time",
        "Best validation|score",
        "Chosen settings",
    ]
    return render(
        TEMPLATE,
        trials=asked["trials"],
        searches=len(searches),
        sampler=asked["sampler"],
        rounds=asked["settings"].get("rounds"),
        here=study.config.get("rounds"),
        objective=OBJECTIVES[asked["objective"]],
        word=study.task.score_label,
        equal=len({frozenset(found) for found in rounds.values()}) == 1,
        head=[
            "Method",
            *map(lines, head),
            *([lines("Epsilon|of all trials")] if private else []),
        ],
        rows=[(spell(method), cells(searches, method, private=private)) for method in methods],
        unsearched=study.unsearched,
        searched=", ".join(str(search["seed"]) for search in searches),
        space=[f"{key} = {form}" for key, form in asked["space"].items()],
        spent=[
            (search["seed"], *largest(search["privacy"].get("all", {})))
            for search in searches
            if private
        ],
    )


def cells(searches: Sequence[Search], method: str, *, private: bool) -> list[str | Markup]:
    """Return a method's row: sums over the searches, and means of their best scores."""
    costs = [search["cost"][method] for search in searches]
    total = {
        key: sum(cost[key] for cost in costs) for key in (*STATES, "rounds", "bytes", "seconds")
    }
    best = [search["best"][method] for search in searches]
    scores = [one["score"] for one in best]
    return [
        ", ".join(str(total[state]) for state in STATES),
        f"{total['rounds']:,}",
        size_text(total["bytes"]),
        duration(total["seconds"]),
        with_spread(statistics.fmean(scores), spread(scores), "%"),
        "; ".join(
            ", ".join(f"{k} {format_value(v)}" for k, v in one["values"].items())
            for one in best
        ),
        *(
            [", ".join(largest(search["privacy"].get(method, {}))[0] for search in searches)]
            if private
            else []
        ),
    ]


def largest(spent: Mapping[str, Mapping[str, float]]) -> tuple[str, str]:
    """Return the largest epsilon over silos with its delta; dashes if there is none."""
    most = max(spent.values(), key=lambda one: one["epsilon"], default=None)
    return ("–", "–") if most is None else (f"{most['epsilon']:.2f}", f"{most['delta']:.1g}")


def format_value(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
