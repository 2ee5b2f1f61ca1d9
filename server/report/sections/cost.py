"""Sections on the cost of the runs and on what left the silos."""

# ruff: noqa: E501  (templates)
from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from markupsafe import Markup

from server.report.canvas import (
    BLUE,
    CARD,
    ORANGE,
    Canvas,
    chart,
    finish_lines,
    line,
    room_for,
    styles,
)
from server.report.html import duration, lines, markup, render, size_text, typical
from server.report.methods import keeps, sends_numbers, spell, uploads
from server.report.sections.evidence import evidence_that_left, own_models_that_left
from server.report.study import StudyResults
from server.results.history import Row

COST = """{% from "macros" import table, cells with context %}
<h2>What it cost</h2><p class='lead'>Bytes of model vectors over all hospitals, and wall time{% if seeds > 1 %} of one run, mean over seeds{% endif %}.</p>
{% call table(head) %}<tbody>{% for name, values in rows %}<tr><th scope="row">{{ name }}</th>{{ cells(values) }}</tr>{% endfor %}</tbody>{% endcall %}
<div class='panels two' style='margin-top:20px'><figure><h3>Bytes per round</h3>{{ bytes }}</figure><figure><h3>Seconds per round</h3>{{ seconds }}</figure></div>"""
LEFT = """{% from "macros" import table, cells with context %}
<h2>What left each hospital</h2><p class='lead'>Everything that leaves a hospital passes one gate, is on its list, and is logged there.</p><ul>
<li><b>Once, the data summary</b>: name, numbers of training, validation and test samples, task, input shape, number of classes, names of columns and labels with declared units and ranges, number format, device, software versions; for tables and measurements, each column's sum and sum of squares where all hospitals agree on one standardisation (<code>normalization = "agreed"</code>).</li>
<li><b>Every round, model vectors</b> and the method's own numbers, as below (and BatchNorm averages where the model has them and <code>buffers = "shared"</code>).</li>
<li><b>Every evaluated round, metrics</b>: {{ metrics }} (allowed: {{ allowed }}), over at least the set number of patients; seconds; sample counts.</li>
{% if evidence %}<li><b>Once, at the end, evidence</b>: {{ evidence }}, over at least the set number of patients. Of two classes it tells how many test samples are of each.</li>
{% endif %}{% for method, silos in own %}<li><b>Once, at the end, a hospital's own model</b> with all its layers (<code>keep-models = "reported"</code>; {{ method }}): {{ silos or "of none so far" }}.</li>
{% endfor %}<li><b>Never</b>: samples, labels, {% if evidence %}other {% endif %}label counts, predictions, {% for method, what in kept %}{{ method }}: {{ what }}, {% endfor %}personal layers and personal models that a method does not name below{% if own %}, but for the models above{% endif %}.</li></ul>
{% call table(head, "wordy") %}<tbody>{% for row in rows %}<tr><th scope="row">{{ row.name }}</th><td class="text"><code>{{ row.vectors }}</code></td><td>{{ row.size }}</td><td class="text"><code>{{ row.numbers }}</code></td></tr>{% endfor %}</tbody>{% endcall %}
<h3>Per hospital</h3>
{% call table(silo_head, "dense") %}<tbody>{% for silo, values in silos %}<tr><th scope="row">{{ silo }}</th>{{ cells(values) }}</tr>{% endfor %}</tbody>{% endcall %}"""
HEAD = "Down|per round,Up|per round,Bytes|in all,Median|round,Slowest|round,Run,of it|training,of it|exchange,of it|aggregation"


def cost_section(study: StudyResults) -> Markup:
    """Render bytes and seconds of each method; empty without results."""
    if not study.runs:
        return Markup()
    return render(
        COST,
        seeds=len(study.seeds),
        head=["Method", *map(lines, HEAD.split(","))],
        rows=[(spell(method), cost_row(study, method)) for method in study.methods],
        bytes=bytes_per_round(study),
        seconds=seconds_per_round(study),
    )


def cost_row(study: StudyResults, method: str) -> list[str]:
    """Return a method's sizes and durations."""
    seconds = study.training_seconds(method)
    total, time = study.cost(method)
    sizes = (
        *(typical(study.per_round(method, key)) for key in ("bytes_down", "bytes_up")),
        total,
    )
    times = (typical(seconds), max(seconds.values(), default=0.0), time)
    parts = (
        mean_seconds(study, method, part) for part in ("train", "communicate", "aggregate")
    )
    return [*map(size_text, sizes), *map(duration, times), *parts]


def mean_seconds(study: StudyResults, method: str, part: str) -> str:
    """Return the duration of one part of a method's runs, mean over seeds."""
    found = [r["seconds"][part] for r in study.of(method) if r["seconds"].get(part) is not None]
    return duration(statistics.fmean(found)) if found else "–"


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
    ends = []
    for method in study.methods:
        if found := study.training_seconds(method):
            line(c.axes, list(found), list(found.values()), look[method])
            ends.append((list(found.values())[-1], spell(method), look[method]))
    c.axes.set_ylim(bottom=0)
    c.axes.set_ylabel("seconds")
    finish_lines(c, ends, "round", percent=False)
    return c.svg("seconds", "Seconds per round of each method.")


def left_section(study: StudyResults) -> Markup:
    """Render what left the silos, by method and by silo; empty without results."""
    if not study.runs:
        return Markup()
    own, sent = own_models_that_left(study), bytes_up(study)
    return render(
        LEFT,
        metrics=", ".join(sorted({row.metric for row in values_that_left(study)})) or "none",
        allowed=", ".join(study.task.metrics),
        evidence=", ".join(evidence_that_left(study)),
        kept=[(spell(m), what) for m in study.methods if m not in own for what in keeps(m)],
        own=[(spell(m), ", ".join(silos)) for m, silos in own.items()],
        head=["Method", "Vectors", lines("per hospital|and round"), "Other numbers"],
        rows=[left_row(method, sent) for method in study.methods],
        silo_head=[
            "Hospital",
            lines("Replies with|metrics"),
            lines("Model|vectors"),
            lines("Metric|values"),
        ],
        silos=[(silo, silo_row(study, silo, sent)) for silo in study.silos],
    )


# (method, silo) -> bytes of each round and seed
Sent = Mapping[tuple[str, str], Sequence[float]]


def left_row(method: str, sent: Sent) -> dict[str, object]:
    """Return what a silo sends by a method: the vectors, their typical size, and other numbers."""
    shares = sorted(share for (m, _), each in sent.items() if m == method for share in each)
    size = shares[len(shares) // 2] if shares else 0.0
    text = (
        markup("{}<small>{} numbers</small>", size_text(size), f"{size / 4:,.0f}")
        if size
        else "–"
    )
    vectors, numbers = (
        ", ".join(names) or "none" for names in (uploads(method), sends_numbers(method))
    )
    return {"name": spell(method), "vectors": vectors, "size": text, "numbers": numbers}


def silo_row(study: StudyResults, silo: str, sent: Sent) -> list[object]:
    """Return what a silo sent with all methods: replies with metrics, bytes of vectors, metric values."""
    values = [row for row in values_that_left(study) if row.silo == silo]
    size = sum(sum(each) for (_, name), each in sent.items() if name == silo)
    return [
        len({(r.strategy, r.seed, r.round) for r in values}),
        size_text(size),
        f"{len(values):,}",
    ]


def values_that_left(study: StudyResults) -> list[Row]:
    """Return the rows of the silos' metrics that were not withheld."""
    return [row for row in study.silo_rows if not math.isnan(row.value)]


def bytes_up(study: StudyResults) -> Sent:
    """Return the bytes of vectors that each silo sent: in each round an equal share of those that trained.

    All that replied count if training reports no metrics.
    """
    trained: dict[tuple[str, int, int], set[str]] = defaultdict(set)
    replied: dict[tuple[str, int, int], set[str]] = defaultdict(set)
    for r in study.silo_rows:
        (trained if r.split == "train" else replied)[r.strategy, r.seed, r.round].add(r.silo)
    senders, found = {**replied, **trained}, defaultdict(list)
    for r in study.history.rows:
        if r.metric == "bytes_up" and r.value:
            here = senders.get((r.strategy, r.seed, r.round), ())
            for silo in here:
                found[r.strategy, silo].append(r.value / len(here))
    return found
