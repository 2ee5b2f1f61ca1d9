"""Sections on the cost of the runs and on what left the silos."""

# ruff: noqa: E501  (templates)
from __future__ import annotations

import statistics

import numpy as np
import pandas as pd
from markupsafe import Markup

from server.report.canvas import BLUE, CARD, ORANGE, Canvas, chart, room_for, styles
from server.report.html import render, size_text, typical
from server.report.methods import info_of, spell
from server.report.sections.evidence import evidence_that_left, own_models_that_left
from server.report.study import StudyResults

ROUND = ["strategy", "seed", "round"]
COST = """<h2>What it cost</h2><p class='lead'>Bytes of model vectors over all hospitals, and wall time{% if study.seeds|length > 1 %} of one run, mean over seeds{% endif %}.</p>
{% call table(["Method"] + "Down<br>per round,Up<br>per round,Bytes<br>in all,Median<br>round,Slowest<br>round,Run,of it<br>training,of it<br>exchange,of it<br>aggregation".split(",")|map("safe")|list) %}<tbody>{% for method in study.methods %}{% set bytes, seconds = study.cost(method) %}{% set each = study.training_seconds(method) %}<tr><th scope="row">{{ method|spell }}</th>
{% for size in (typical(study.per_round(method, "bytes_down")), typical(study.per_round(method, "bytes_up")), bytes) %}<td>{{ size|size }}</td>{% endfor %}
{% for time in (typical(each), each.values()|max|default(0.0), seconds) %}<td>{{ time|duration }}</td>{% endfor %}
{% for part in ("train", "communicate", "aggregate") %}{% set mean = mean_seconds(study, method, part) %}<td>{{ "–" if mean is none else mean|duration }}</td>{% endfor %}</tr>{% endfor %}</tbody>{% endcall %}
<div class='panels two' style='margin-top:20px'><figure><h3>Bytes per round</h3>{{ charts.bytes }}</figure><figure><h3>Seconds per round</h3>{{ charts.seconds }}</figure></div>"""
LEFT = """<h2>What left each hospital</h2><p class='lead'>Everything that leaves a hospital passes one gate, is on its list, and is logged there.</p><ul>
<li><b>Once, the data summary</b>: name, numbers of training, validation and test samples, task, input shape, number of classes, names of columns and labels with declared units and ranges, number format, device, software versions; for tables and measurements, each column's sum and sum of squares where all hospitals agree on one standardisation (<code>normalization = "agreed"</code>).</li>
<li><b>Every round, model vectors</b> and the method's own numbers, as below (and BatchNorm averages where the model has them and <code>buffers = "shared"</code>).</li>
<li><b>Every evaluated round, metrics</b>: {{ values.metric|unique(true)|sort(case_sensitive=true)|join(", ") or "none" }} (allowed: {{ study.task.metrics|join(", ") }}), over at least the set number of patients; seconds; sample counts.</li>
{% if evidence %}<li><b>Once, at the end, evidence</b>: {{ evidence|join(", ") }}, over at least the set number of patients. Of two classes it tells how many test samples are of each.</li>
{% endif %}{% for method, silos in own.items() %}<li><b>Once, at the end, a hospital's own model</b> with all its layers (<code>keep-models = "reported"</code>; {{ method|spell }}): {{ silos|join(", ") or "of none so far" }}.</li>
{% endfor %}<li><b>Never</b>: samples, labels, {% if evidence %}other {% endif %}label counts, predictions, {% for method in study.methods if method not in own %}{% for what in info_of(method).keeps %}{{ method|spell }}: {{ what }}, {% endfor %}{% endfor %}personal layers and personal models that a method does not name below{% if own %}, but for the models above{% endif %}.</li></ul>
{% call table(["Method", "Vectors", "per hospital<br>and round"|safe, "Other numbers"], "wordy") %}<tbody>{% for method in study.methods %}{% set size = sizes.get(method, 0.0) %}<tr><th scope="row">{{ method|spell }}</th><td class="text"><code>{{ info_of(method).uploads|join(", ") or "none" }}</code></td><td>{% if size %}{{ size|size }}<small>{{ "{:,.0f}".format(size / 4) }} numbers</small>{% else %}–{% endif %}</td><td class="text"><code>{{ info_of(method).sends_numbers|join(", ") or "none" }}</code></td></tr>{% endfor %}</tbody>{% endcall %}
<h3>Per hospital</h3>
{% call table(["Hospital", "Replies with<br>metrics"|safe, "Model<br>vectors"|safe, "Metric<br>values"|safe], "dense") %}<tbody>{% for silo in study.silos %}<tr><th scope="row">{{ silo }}</th><td>{{ replies.get(silo, 0) }}</td><td>{{ sums.get(silo, 0)|size }}</td><td>{{ "{:,}".format(counts.get(silo, 0)) }}</td></tr>{% endfor %}</tbody>{% endcall %}"""


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
    values, shares = study.silo_rows.dropna(subset="value"), bytes_up(study)
    return render(
        LEFT,
        study=study,
        values=values,
        evidence=evidence_that_left(study),
        own=own_models_that_left(study),
        info_of=info_of,
        sizes=shares.groupby("strategy").share.quantile(interpolation="higher"),
        counts=values.silo.value_counts(),
        replies=values.drop_duplicates(["silo", *ROUND]).silo.value_counts(),
        sums=shares.groupby("silo").share.sum(),
    )


def bytes_up(study: StudyResults) -> pd.DataFrame:
    """Return the bytes of vectors that silos sent in each round: an equal ``share`` of each one that trained.

    All that replied count if training reports no metrics.
    """
    rows = study.silo_rows.assign(trained=study.silo_rows.split == "train")
    senders = rows[rows.trained | ~rows.groupby(ROUND).trained.transform("any")]
    sent = study.rows.query("metric == 'bytes_up' and value > 0")[[*ROUND, "value"]]
    found = senders[["silo", *ROUND]].drop_duplicates().merge(sent, on=ROUND)
    return found.assign(share=found.value / found.groupby(ROUND).silo.transform("size"))
