"""Sections on the cost of the runs and on what left the silos."""

# ruff: noqa: E501  (templates)
from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict

import numpy as np
from markupsafe import Markup

from server.report.canvas import BLUE, CARD, ORANGE, Canvas, chart, room_for, styles
from server.report.html import render, size_text, typical
from server.report.methods import info_of, spell
from server.report.sections.evidence import evidence_that_left, own_models_that_left
from server.report.study import StudyResults

COST = """<h2>What it cost</h2><p class='lead'>Bytes of model vectors over all hospitals, and wall time{% if study.seeds|length > 1 %} of one run, mean over seeds{% endif %}.</p>
{% call table(["Method"] + "Down<br>per round,Up<br>per round,Bytes<br>in all,Median<br>round,Slowest<br>round,Run,of it<br>training,of it<br>exchange,of it<br>aggregation".split(",")|map("safe")|list) %}<tbody>{% for method in study.methods %}{% set bytes, seconds = study.cost(method) %}{% set each = study.training_seconds(method) %}<tr><th scope="row">{{ method|spell }}</th>
{% for size in (typical(study.per_round(method, "bytes_down")), typical(study.per_round(method, "bytes_up")), bytes) %}<td>{{ size|size }}</td>{% endfor %}
{% for time in (typical(each), each.values()|max|default(0.0), seconds) %}<td>{{ time|duration }}</td>{% endfor %}
{% for part in ("train", "communicate", "aggregate") %}{% set mean = mean_seconds(study, method, part) %}<td>{{ "–" if mean is none else mean|duration }}</td>{% endfor %}</tr>{% endfor %}</tbody>{% endcall %}
<div class='panels two' style='margin-top:20px'><figure><h3>Bytes per round</h3>{{ charts.bytes }}</figure><figure><h3>Seconds per round</h3>{{ charts.seconds }}</figure></div>"""
LEFT = """<h2>What left each hospital</h2><p class='lead'>Everything that leaves a hospital passes one gate, is on its list, and is logged there.</p><ul>
<li><b>Once, the data summary</b>: name, numbers of training, validation and test samples, task, input shape, number of classes, names of columns and labels with declared units and ranges, number format, device, software versions; for tables and measurements, each column's sum and sum of squares where all hospitals agree on one standardisation (<code>normalization = "agreed"</code>).</li>
<li><b>Every round, model vectors</b> and the method's own numbers, as below (and BatchNorm averages where the model has them and <code>buffers = "shared"</code>).</li>
<li><b>Every evaluated round, metrics</b>: {{ values|map(attribute="metric")|unique(true)|sort(case_sensitive=true)|join(", ") or "none" }} (allowed: {{ study.task.metrics|join(", ") }}), over at least the set number of patients; seconds; sample counts.</li>
{% if evidence %}<li><b>Once, at the end, evidence</b>: {{ evidence|join(", ") }}, over at least the set number of patients. Of two classes it tells how many test samples are of each.</li>
{% endif %}{% for method, silos in own.items() %}<li><b>Once, at the end, a hospital's own model</b> with all its layers (<code>keep-models = "reported"</code>; {{ method|spell }}): {{ silos|join(", ") or "of none so far" }}.</li>
{% endfor %}<li><b>Never</b>: samples, labels, {% if evidence %}other {% endif %}label counts, predictions, {% for method in study.methods if method not in own %}{% for what in info_of(method).keeps %}{{ method|spell }}: {{ what }}, {% endfor %}{% endfor %}personal layers and personal models that a method does not name below{% if own %}, but for the models above{% endif %}.</li></ul>
{% call table(["Method", "Vectors", "per hospital<br>and round"|safe, "Other numbers"], "wordy") %}<tbody>{% for method in study.methods %}{% set size = sizes[method] %}<tr><th scope="row">{{ method|spell }}</th><td class="text"><code>{{ info_of(method).uploads|join(", ") or "none" }}</code></td><td>{% if size %}{{ size|size }}<small>{{ "{:,.0f}".format(size / 4) }} numbers</small>{% else %}–{% endif %}</td><td class="text"><code>{{ info_of(method).sends_numbers|join(", ") or "none" }}</code></td></tr>{% endfor %}</tbody>{% endcall %}
<h3>Per hospital</h3>
{% call table(["Hospital", "Replies with<br>metrics"|safe, "Model<br>vectors"|safe, "Metric<br>values"|safe], "dense") %}<tbody>{% for silo in study.silos %}{% set own = values|selectattr("silo", "equalto", silo)|list %}<tr><th scope="row">{{ silo }}</th><td>{{ replies[silo] }}</td><td>{{ sums[silo]|size }}</td><td>{{ "{:,}".format(own|length) }}</td></tr>{% endfor %}</tbody>{% endcall %}"""


def cost_section(study: StudyResults) -> Markup:
    """Render bytes and seconds of each method; empty without results."""
    if not study.runs:
        return Markup()
    charts = {"bytes": bytes_per_round(study), "seconds": seconds_per_round(study)}
    return render(COST, study=study, typical=typical, mean_seconds=mean_seconds, charts=charts)


def mean_seconds(study: StudyResults, method: str, part: str) -> float | None:
    """Return the seconds of one part of a method's runs, mean over seeds; None if unknown."""
    found = [s for r in study.of(method) if (s := r["seconds"].get(part)) is not None]
    return statistics.fmean(found) if found else None


@chart
def bytes_per_round(study: StudyResults) -> str:
    """Draw each method's bytes per round, one bar for down and one for up."""
    names = list(map(spell, study.methods))
    c = Canvas(340, 46 * len(names) + 40, (8 + room_for(names), 66, 4, 36))
    a, rows, most = c.axes, np.arange(len(names)), 1.0
    for key, arrow, shift, look in (
        ("bytes_down", "↓", -0.17, {"color": BLUE}),
        (
            "bytes_up",
            "↑",
            0.17,
            {"color": CARD, "edgecolor": ORANGE, "linewidth": 1.2, "hatch": "////"},
        ),
    ):
        sizes = [typical(study.per_round(method, key)) for method in study.methods]
        bars = a.barh(rows + shift, sizes, 0.3, **look)
        a.bar_label(
            bars, [f"{arrow} {size_text(size)}" for size in sizes], padding=5, fontsize=11
        )
        most = max(most, *sizes)
    a.set(ylim=(len(names) - 0.5, -0.5), xlim=(0, most), xticks=[])
    a.set_yticks(rows, names)
    a.set_xlabel("all hospitals together: ↓ to them, ↑ from them")
    a.spines["bottom"].set_visible(False)
    return c.svg("bytes", "Bytes per round of each method, to the hospitals and from them.")


@chart
def seconds_per_round(study: StudyResults) -> str:
    """Draw the wall time of every round, one line per method."""
    c = Canvas(340, 230, (40, 26 + room_for(map(spell, study.methods)), 8, 42))
    look = styles(study)
    for method in study.methods:
        if found := study.training_seconds(method):
            c.line(list(found), list(found.values()), look[method], spell(method))
    c.axes.set_ylim(bottom=0)
    c.axes.set_ylabel("seconds")
    c.finish_lines("round", percent=False)
    return c.svg("seconds", "Seconds per round of each method.")


def left_section(study: StudyResults) -> Markup:
    """Render what left the silos, by method and by silo; empty without results."""
    if not study.runs:
        return Markup()
    values = [row for row in study.silo_rows if not math.isnan(row.value)]
    replies = {(row.silo, row.strategy, row.seed, row.round) for row in values}
    shares, sums = defaultdict[str, list[float]](list), Counter[str]()
    for (method, silo), each in bytes_up(study).items():
        shares[method] += each
        sums[silo] += sum(each)  # type: ignore[assignment]
    return render(
        LEFT,
        study=study,
        values=values,
        evidence=evidence_that_left(study),
        own=own_models_that_left(study),
        info_of=info_of,
        sizes={
            m: sorted(each)[len(each) // 2]
            for m in study.methods
            if (each := shares[m] or [0.0])
        },
        replies=Counter(silo for silo, *_ in replies),
        sums=sums,
    )


def bytes_up(study: StudyResults) -> dict[tuple[str, str], list[float]]:
    """Return by method and silo the bytes of vectors sent: in each round an equal share of those that trained.

    All that replied count if training reports no metrics.
    """
    trained: dict[tuple[tuple[str, int], int], set[str]] = defaultdict(set)
    replied: dict[tuple[tuple[str, int], int], set[str]] = defaultdict(set)
    for r in study.silo_rows:
        (trained if r.split == "train" else replied)[r.which, r.round].add(r.silo)
    senders = {**replied, **trained}
    found = defaultdict[tuple[str, str], list[float]](list)
    for r in study.history.rows:
        if r.metric == "bytes_up" and r.value:
            here = senders.get((r.which, r.round), ())
            for silo in here:
                found[r.strategy, silo].append(r.value / len(here))
    return found
