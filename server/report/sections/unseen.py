"""Section on held-out hospitals: zero-shot, personalised, alone and all in."""

# ruff: noqa: E501  (template)
from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

from markupsafe import Markup

from server.report.html import render
from server.report.inference import HOSPITALS_NEEDED, Gain, finite_or_nan, over_hospitals
from server.report.study import StudyResults
from server.results.hold_out import results_in

KINDS = {
    "zero_shot": "Zero-shot",
    "personalised": "Personalised",
    "local": "Alone",
    "all_in": "All in",
}
Scores = Mapping[str, float]  # kind -> score; nan if unknown
TEMPLATE = """{% macro difference(silos, kind, methods) %}{% set gain, count = gain_over_alone(silos, kind, methods) %}
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
        TEMPLATE if found else "",
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
