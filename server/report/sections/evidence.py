"""Section on the evidence per hospital: calibration, reliability, net benefit, conformal sets, subgroups."""

# ruff: noqa: E501  (template)
from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from models.evidence.calibration import THRESHOLDS
from models.evidence.measure import CALIBRATION, MEASUREMENT, PREFIX
from server.report.canvas import MUTED, Canvas, chart, percent_axis, styles
from server.report.html import format_number, number, percent, render
from server.report.inference import NAN, finite_or_nan
from server.report.methods import spell
from server.report.study import StudyResults
from strategies import strategies
from strategies.base.evaluation import sends_own_model
from strategies.base.evidence import split_name

BINS_OF = {"reliability", "value_bins"}  # of probabilities, of measurements
BY_CHANCE = 0.05  # share of 95 % intervals that miss the true value
PANELS = 6  # silos whose diagrams are drawn
SIZE = (290, 232)
# The look of the line that a model is compared with
ORDINARY: dict[str, Any] = {"color": MUTED, "linewidth": 1, "linestyle": (0, (4, 3))}
LOWEST = -0.1  # lower end of the net benefit axis: treating everybody has no lower bound
COLUMNS = (
    ("brier", "Brier", 3),
    ("calibration_slope", "Slope", 2),
    ("calibration_in_the_large", "In the large", 2),
    ("ece", "ECE", 3),
)
HEADS = {
    "segmentation": ["Dice of the worst tenth"],
    "regression": [
        "Slope",
        "Intercept",
        "Difference",
        "Limits of agreement",
        "Intervals: coverage, width",
    ],
}
TEMPLATE = """{% from "macros" import table, cells, explained with context %}
<h2>Evidence per hospital</h2><p class='lead'>{{ methods|map("spell")|join(", and small below it ") }}: each hospital measures its reported model once, on its own test samples ({{ tested|join(" to ") or "few" }}).{% if study.seeds|length > 1 %} Numbers are means over {{ study.seeds|length }} seeds; {% if task == "regression" %}limits, intervals, charts and {% elif task != "segmentation" %}sets, charts and {% endif %}subgroups are of the first seed that has them.{% endif %} The numbers of the table have no intervals: with few samples they can be far from the ideal, or differ between methods, by chance alone.</p>
{% call table(head) %}<tbody>{% for silo, prefix, texts in rows %}<tr><th scope="row">{{ silo }}</th>{% if prefix %}<td>{{ name_of(prefix) }}</td>{% endif %}{% for of in texts %}<td>{{ of[0] }}{% for text in of[1:] %}<small>{{ text }}</small>{% endfor %}</td>{% endfor %}</tr>{% endfor %}</tbody>{% endcall %}
{% if task == "regression" %}{% call explained() %}<dl class='terms'>
<dt>Unit</dt><dd>The measurement's own.{% if measured[0] %} Subgroups have means over the measurements, each in its own unit.{% endif %}</dd>
<dt>Slope, intercept</dt><dd>Of the line through measurements by predictions (least squares); ideal 1 and 0. Below 1 high predictions are too high and low ones too low.</dd>
<dt>Difference</dt><dd>Mean of measured less predicted; ideal 0.</dd>
<dt>Limits of agreement</dt><dd>The mean difference and 1.96 standard deviations to either side. About 95&#8239;% of differences lie between, where they are normal.</dd>
<dt>Intervals</dt><dd>Prediction intervals that are to hold 90&#8239;% of measurements, which no theorem promises of shrunk widths: the share of test samples where they did, and their width. They reach as far as the hospital's own half width, shrunk towards the hospitals' common one; half of the test samples make it, the others count.</dd></dl>{% endcall %}{% elif task != "segmentation" %}{% call explained() %}<dl class='terms'>
<dt>Probability</dt><dd>{{ {"multilabel": "that a finding is present", "survival": "of the event until the chosen time"}.get(task, "of class 1 of two classes; of more classes, that the predicted class is right") }}.</dd>
<dt>Brier</dt><dd>Mean squared distance of probability and event; lower is better.</dd>
<dt>Slope</dt><dd>Ideal 1. Below 1 the model is too sure, above 1 not sure enough.</dd>
<dt>In the large</dt><dd>Ideal 0. Above 0 there are more events than predicted.</dd>
<dt>ECE</dt><dd>Mean distance of predicted and observed share over bins. It is too large where test parts are small: never read it alone.</dd>
<dt>Sets</dt><dd>Classes that are to hold the true one with a probability of 90&#8239;%, which no theorem promises of shrunk thresholds: the share of test samples where they did, and their mean number. The threshold is the hospital's own, shrunk towards the hospitals' common one; half of the test samples make it, the others count.</dd>
<dt>Net benefit</dt><dd>True positives per sample, less false positives at the odds of the threshold. The dashed line treats everybody, the line at 0 no one.</dd></dl>{% endcall %}{% endif %}
{% if groups %}<h3>Subgroups</h3><p class='note'>{% if task == "regression" %}Mean absolute error with its 95&#8239;% interval, and root of the mean squared one, in the label's unit{% else %}Test {{ study.task.score_label }} in per cent with its 95&#8239;% interval{% endif %}, by a column that the hospital chose. Small subgroups are suppressed in the hospital, and with them others, where they would follow by subtraction. Each interval is of one subgroup by itself: chance alone lets about {{ "%.2g"|format(by_chance * groups|length * methods|length) }} of those below miss.</p>
{% call table(["Hospital", "Subgroup", "Test"] + methods|map("spell")|list) %}<tbody>{% for silo, name, n, each in groups %}<tr><th scope="row">{{ silo }}</th><td>{{ name }}</td><td>{{ n }}</td>{% for found in each %}<td>{% if not found %}–{% elif found|length == 5 %}{{ "%.3g<small>%.3g–%.3g; %.3g</small>"|safe|format(*found[1:]) }}{% else %}{{ found[1]|percent }}<small>{{ found[2]|percent(0) }}–{{ found[3]|percent(0) }}</small>{% endif %}</td>{% endfor %}</tr>{% endfor %}</tbody>{% endcall %}{% endif %}
{% set left = drawn|length - panels|length %}
{% if panels %}<h3>Reliability{% if panels[0][1]|length > 1 %} and net benefit{% endif %}</h3>
<p class='note'>{% if task == "regression" %}Predicted against measured, means of groups{% else %}Predicted against observed share{% endif %}; larger points stand for more samples; on the dashed diagonal predictions are right.{% if left > 0 %} {{ left }} more {{ "is" if left == 1 else "are" }} in summary.json.{% endif %}</p>
<div class='panels'>{% for silo, charts in panels %}<figure><h3>{{ silo }}</h3>{% for chart in charts %}{{ chart }}{% endfor %}</figure>{% endfor %}</div>{% endif %}"""


def value(study: StudyResults, method: str, silo: str, key: str) -> float:
    """Return a value of a silo's evidence, mean over seeds; ``nan`` if no seed has it."""
    each = [r["per_silo"].get(silo, {}) for r in study.of(method)]
    found = [
        finite_or_nan(values.get(key, values.get("evidence", {}).get(key))) for values in each
    ]
    return statistics.fmean(v) if (v := [v for v in found if not math.isnan(v)]) else NAN


def lists(study: StudyResults, method: str, silo: str) -> Mapping[str, Any]:
    """Return a silo's lists (bins, net benefit, sets) from the first seed that has any."""
    each = (r["per_silo"].get(silo, {}).get("evidence") for r in study.of(method))
    return next((found for found in each if found), {})


def measurements_of(study: StudyResults) -> list[str]:
    """Return the key prefix of each measurement's values; ``[""]`` for a single measurement."""
    names = dict.fromkeys(split_name(key)[0] for key in keys_of(study))
    return [f"{MEASUREMENT}{name}." for name in names if name] or [""]


def keys_of(study: StudyResults) -> list[str]:
    """Return the keys of the lists of all silos' evidence."""
    return [
        key for r in study.runs for v in r["per_silo"].values() for key in v.get("evidence", {})
    ]


def over_silos(study: StudyResults, method: str, key: str) -> dict[str, float]:
    """Return a value of the evidence by silo, for the silos that have it."""
    found = {silo: value(study, method, silo, key) for silo in study.silos}
    return {silo: v for silo, v in found.items() if not math.isnan(v)}


def evidence_that_left(study: StudyResults) -> list[str]:
    """Return the names of the evidence that silos have sent; subgroups, which silos name, are one entry."""
    names = {
        *keys_of(study),
        *(key for key in CALIBRATION for m in study.methods if over_silos(study, m, key)),
    }
    return sorted(
        {"subgroups" if name.startswith(PREFIX) else split_name(name)[1] for name in names}
    )


def own_models_that_left(study: StudyResults) -> dict[str, list[str]]:
    """Return for each method whose runs request silos' own models (keep-models) the silos that have sent theirs."""
    known = strategies()
    asks = study.config.get("keep-models") == "reported"
    methods = [
        m for m in study.methods if asks and m in known and sends_own_model(known[m].info)
    ]
    sent = [event for event in study.events if event.get("event") == "models"]
    return {
        m: sorted({silo for e in sent if e["strategy"] == m for silo in e["silos"]})
        for m in methods
    }


def has_bins(study: StudyResults, methods: Sequence[str], silo: str, prefix: str) -> bool:
    """Return whether a diagram of a measurement at a silo can be drawn."""
    keys = {prefix + key for key in BINS_OF}
    return any(keys & lists(study, method, silo).keys() for method in methods)


def evidence_section(study: StudyResults) -> Markup:
    """Render the section; empty if no silo has sent evidence."""
    if not study.runs or not evidence_that_left(study):
        return Markup()
    # The headline's method (or the first one) and, if there is one, the baseline that it is compared with.
    methods = [
        m for m in dict.fromkeys([study.best or study.methods[0], study.base]) if m is not None
    ]
    measured = measurements_of(study)
    pairs = [(silo, prefix) for silo in study.silos for prefix in measured]
    drawn = [pair for pair in pairs if has_bins(study, methods, *pair)]
    columns = HEADS.get(
        study.task.name, [*(name for _, name, _ in COLUMNS), "Sets: coverage, size"]
    )
    tested = study.count_tested(study.silos)
    return render(
        TEMPLATE,
        study=study,
        methods=methods,
        head=["Hospital", *(["Measurement"] if measured[0] else []), *columns],
        rows=[
            (*pair, list(zip(*(texts_of(study, m, *pair) for m in methods), strict=True)))
            for pair in pairs
        ],
        name_of=name_of,
        panels=[
            (
                f"{silo}: {name_of(prefix)}" if prefix else silo,
                diagrams(study, methods, silo, prefix),
            )
            for silo, prefix in drawn[:PANELS]
        ],
        drawn=drawn,
        measured=measured,
        task=study.task.name,
        groups=list(group_rows(study, methods)),
        by_chance=BY_CHANCE,
        tested=[*dict.fromkeys([tested[0], tested[-1]])] if tested else [],
    )


def group_rows(
    study: StudyResults, methods: Sequence[str]
) -> Iterator[tuple[str, str, str, list[Sequence[float] | None]]]:
    """Yield each silo's subgroups: silo, name, samples, and the methods' scores with their intervals.

    Of measurements: n, MAE, the two ends of its interval, RMSE.
    """
    for silo in study.silos:
        each = [lists(study, m, silo) for m in methods]
        for key in sorted({key for found in each for key in found if key.startswith(PREFIX)}):
            scores = [found.get(key) for found in each]
            n = next(f"{score[0]:.0f}" for score in scores if score)
            yield silo, key.removeprefix(PREFIX), n, scores


def name_of(prefix: str) -> str:
    """Return a measurement's name from the key prefix of its values."""
    return prefix.removeprefix(MEASUREMENT).removesuffix(".")


def texts_of(study: StudyResults, method: str, silo: str, prefix: str) -> list[str]:
    """Return a method's values in a silo's row; measurements in the label's unit."""
    found, task = lists(study, method, silo), study.task.name
    if task == "segmentation":
        return [percent(value(study, method, silo, "dice_worst_decile"))]
    if task != "regression":
        sets = found.get("conformal_sets")
        texts = [number(value(study, method, silo, key), digits) for key, _, digits in COLUMNS]
        return [*texts, "–" if sets is None else f"{percent(sets[5], 0)} %, {sets[6]:.2f}"]
    between = found.get(f"{prefix}agreement")
    sets = found.get(f"{prefix}conformal_intervals")
    slope, intercept, difference = (
        value(study, method, silo, f"{prefix}calibration_{key}")
        for key in ("slope", "intercept", "in_the_large")
    )
    return [
        number(slope, 2),
        short(intercept),
        short(difference),
        "–" if between is None else f"{short(between[2])} to {short(between[3])}",
        "–" if sets is None else f"{percent(sets[5], 0)} %, {short(sets[6])}",
    ]


def short(found: float | None) -> str:
    """Return a number in the label's unit with three digits."""
    return (
        "–"
        if math.isnan(finite_or_nan(found))
        else format_number(float(found or 0), 3, zeros=False)
    )


def diagrams(
    study: StudyResults, methods: Sequence[str], silo: str, prefix: str
) -> list[Markup]:
    """Return the charts of one silo (for one measurement, with ``prefix``)."""
    each = {m: lists(study, m, silo) for m in methods}
    place = study.silos.index(silo)
    bins, values, benefits = (
        {m: found[key] for m, found in each.items() if key in found}
        for key in ("reliability", f"{prefix}value_bins", "net_benefit")
    )
    if values:
        whose = f"{silo}, {name_of(prefix)}" if prefix else silo
        return [
            value_diagram(
                study, whose, values, f"{place}-{measurements_of(study).index(prefix)}"
            )
        ]
    charts = [reliability_diagram(study, silo, bins, place)] if bins else []
    return charts + ([net_benefit_chart(study, silo, benefits, place)] if benefits else [])


Values = Mapping[str, Sequence[float]]  # method -> a list of its evidence


@chart
def reliability_diagram(study: StudyResults, silo: str, bins: Values, place: int) -> str:
    """Draw the share of events against the predicted probability, of the methods in ``bins``."""
    c = draw_bins(study, {m: np.reshape(v, (-1, 3)) for m, v in bins.items()}, (0, 1))
    c.axes.set_ylabel("observed, %")
    c.axes.set_xlabel("predicted, %")
    percent_axis(c.axes.xaxis)
    percent_axis(c.axes.yaxis)
    names = ", ".join(map(spell, bins))
    return c.svg(f"reliability-{place}", f"Reliability diagram of {silo} with {names}.")


@chart
def value_diagram(study: StudyResults, whose: str, bins: Values, key: str) -> str:
    """Draw mean measurement against mean prediction, in the label's unit, of the methods in ``bins``."""
    rows = {m: np.reshape(v, (-1, 4)) for m, v in bins.items()}
    ends = np.concatenate([of[:, 1:3].ravel() for of in rows.values()])
    margin = 0.05 * float(np.ptp(ends)) or 1.0
    c = draw_bins(study, rows, (ends.min() - margin, ends.max() + margin))
    c.axes.set(xlabel="predicted", ylabel="measured")
    names = ", ".join(map(spell, bins))
    return c.svg(f"values-{key}", f"Mean measurement by prediction in {whose} with {names}.")


def draw_bins(
    study: StudyResults, bins: Mapping[str, Any], limits: tuple[float, float]
) -> Canvas:
    """Draw each method's bins (count, x, y), larger marks for more samples, and the diagonal between the limits."""
    c = Canvas(*SIZE, (52, 12, 14, 40))
    c.axes.plot(limits, limits, **ORDINARY)
    for method, rows in bins.items():
        style, (n, x, y) = styles(study)[method], rows.T[:3]
        c.axes.plot(x, y, color=style.colour, linewidth=1.6, linestyle=style.dash, zorder=3)
        for size, *point in zip((4 + 4 * n / n.max()).tolist(), x, y, strict=True):
            look = {**style.mark, "markersize": size, "zorder": 4, "clip_on": False}
            c.axes.plot(*point, style.marker, **look)
    c.axes.set(xlim=limits, ylim=limits)
    c.axes.grid(axis="both")
    return c


@chart
def net_benefit_chart(study: StudyResults, silo: str, benefits: Values, place: int) -> str:
    """Draw the net benefit of the methods by threshold, with treating everybody and no one for comparison."""
    c = Canvas(*SIZE, (46, 12, 10, 40))
    look = styles(study)
    n = len(THRESHOLDS)
    a, everybody = c.axes, next(iter(benefits.values()))[n:]
    a.plot(THRESHOLDS, everybody, **ORDINARY)
    a.axhline(0, color=MUTED, linewidth=1)
    for method, values in benefits.items():
        own = {"color": look[method].colour, "linestyle": look[method].dash}
        a.plot(THRESHOLDS, values[:n], linewidth=1.8, zorder=3, **own)
    top = max([0.1, *everybody, *(v for values in benefits.values() for v in values[:n])])
    a.set(
        xlim=(0, 1),
        ylim=(LOWEST, top * 1.05),
        xlabel="treat from this probability on, %",
        ylabel="net benefit",
    )
    a.grid(axis="y")
    percent_axis(a.xaxis)
    return c.svg(
        f"benefit-{place}", f"Net benefit in {silo} with {', '.join(map(spell, benefits))}."
    )
