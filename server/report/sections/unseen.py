"""Section on held-out hospitals: zero-shot, personalised, alone and all in."""

# ruff: noqa: E501  (template)
from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from server.report.html import between, hospitals_of, percent, points, render
from server.report.inference import HOSPITALS_NEEDED, finite_or_nan, over_hospitals
from server.report.methods import alone, spell
from server.report.study import StudyResults
from server.results.hold_out import results_in

KINDS = {
    "zero_shot": "Zero-shot",
    "personalised": "Personalised",
    "local": "Alone",
    "all_in": "All in",
}
Scores = Mapping[str, float]  # kind -> score; nan if unknown
TEMPLATE = """{% from "macros" import table, cells, explained with context %}
<h2>Hospitals that did not train</h2><p class='lead'>{{ silos }} held out of the training, by the {{ word }} on their own test samples in per cent{% if seeds > 1 %}, means over {{ seeds }} seeds{% endif %}.</p>
{% call table(head) %}<tbody>{% for name, values in rows %}<tr><th scope="row">{{ name }}</th>{{ cells(values) }}</tr>{% endfor %}</tbody>{% endcall %}
<p class='note'>{{ about }}</p>
{% call explained() %}<dl class='terms'><dt>Zero-shot</dt><dd>The model that the hospital gets as a newcomer, before it trains.</dd><dt>Personalised</dt><dd>Its own model after some epochs (hold-out-epochs) on what is its own; all that is shared stays as it was received.</dd><dt>Alone</dt><dd>Trained on its own samples only.</dd><dt>All in</dt><dd>The same method with the hospital in the training.</dd></dl>{% endcall %}
<h3>Each of them</h3>
{% call table(each_head) %}<tbody>{% for name, values in each %}<tr><th scope="row">{{ name }}</th>{{ cells(values) }}</tr>{% endfor %}</tbody>{% endcall %}"""


def held_out(study: StudyResults) -> dict[str, dict[str, Scores]]:
    """Return the scores of each held-out silo by method, from ``summary.json``."""
    found = results_in(study.summary)
    return {
        silo: {method: scores_of(values) for method, values in of.items()}
        for silo, of in found.items()
    }


def scores_of(values: Mapping[str, Any]) -> Scores:
    return {kind: finite_or_nan(values.get(kind)) for kind in KINDS}


def unseen_section(study: StudyResults) -> Markup:
    """Render the section; empty if no silo was held out."""
    found = held_out(study)
    if not found:
        return Markup()
    methods = list(
        dict.fromkeys(method for of in found.values() for method in of if method != "local")
    )
    return render(
        TEMPLATE,
        silos=hospitals_of(len(found)),
        word=study.task.score_label,
        seeds=len(study.seeds),
        head=[
            "Method",
            *KINDS.values(),
            "Zero-shot − alone",
            "Personalised − alone",
            "Worst zero-shot",
        ],
        rows=[
            (
                spell(method),
                mean_row(
                    [of[method] for of in found.values() if method in of],
                    study.count_compared(method, alone()),
                ),
            )
            for method in methods
        ],
        about=about(len(found)),
        each_head=["Hospital", "Method", *KINDS.values()],
        each=list(each_rows(found, methods)),
    )


def about(silos: int) -> str:
    """Return the note on the method of the intervals, or the reason why there are none."""
    held = "Their models come of mostly the same data, or are one model: the differences are not independent"
    if silos < HOSPITALS_NEEDED:
        return f"No interval is shown: {hospitals_of(silos)} held out, at least {HOSPITALS_NEEDED} needed."
    return f"Below a difference is its 95 % interval over hospitals, as in the table of the methods. {held}."


def mean_row(silos: Sequence[Scores], methods: int) -> list[Markup]:
    """Return a method's means over silos, its differences to training alone, and the lowest zero-shot score."""
    cells = [Markup(percent(mean([scores[kind] for scores in silos]))) for kind in KINDS]
    for kind in ("zero_shot", "personalised"):
        pairs = [scores[kind] - scores["local"] for scores in silos]
        cells.append(
            difference([value for value in pairs if not math.isnan(value)], len(silos), methods)
        )
    scores = [scores["zero_shot"] for scores in silos]
    return [*cells, Markup(percent(math.nan if any(map(math.isnan, scores)) else min(scores)))]


def difference(values: Sequence[float], silos: int, methods: int) -> Markup:
    """Return the mean with its interval (if there are enough values), and the count if not all ``silos`` have one."""
    if not values:
        return Markup("–")
    gain = over_hospitals(values, methods)
    interval = between(gain) or "not shown"
    interval += f", {len(values)} of {silos} hospitals" if len(values) < silos else ""
    return Markup("{}<small>{}</small>").format(points(gain.mean), interval)


def each_rows(
    found: Mapping[str, Mapping[str, Scores]], methods: Sequence[str]
) -> Iterator[tuple[str, list[str]]]:
    for silo, of in sorted(found.items()):
        for method in methods:
            if method in of:
                yield silo, [spell(method), *(percent(of[method][kind]) for kind in KINDS)]


def mean(values: Sequence[float]) -> float:
    """Return the mean over silos; nan if a value is nan, or if there is none."""
    return statistics.fmean(values) if values else math.nan
