"""Section on the evidence per hospital: calibration, reliability, net benefit, conformal sets, subgroups."""

from __future__ import annotations

import itertools
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


def values_by_seed(study: StudyResults, method: str, silo: str, key: str) -> dict[int, float]:
    """Return a value of a silo's evidence by seed, for the seeds that have it."""
    each = {r["seed"]: r["per_silo"].get(silo, {}) for r in study.of(method)}
    values = {
        seed: finite_or_nan(of.get(key, of.get("evidence", {}).get(key)))
        for seed, of in each.items()
    }
    return {seed: v for seed, v in values.items() if not math.isnan(v)}


def value(
    study: StudyResults, method: str, silo: str, key: str, beside: Sequence[str] = ()
) -> float:
    """Return a value of a silo's evidence, mean over seeds; ``nan`` if no seed has it.

    The seeds are those that the methods ``beside`` it have, too; all of its own if they share none.
    """
    mine = values_by_seed(study, method, silo, key)
    others = (values_by_seed(study, other, silo, key) for other in beside)
    seeds = set(mine).intersection(*(theirs for theirs in others if theirs)) or mine
    return statistics.fmean(mine[seed] for seed in seeds) if seeds else NAN


def lists(study: StudyResults, method: str, silo: str) -> Mapping[str, Any]:
    """Return a silo's lists (bins, net benefit, sets) from the first seed that has any."""
    each = (r["per_silo"].get(silo, {}).get("evidence") for r in study.of(method))
    return next((evidence for evidence in each if evidence), {})


def measurements_of(study: StudyResults) -> list[str]:
    """Return the key prefix of each measurement's values; ``[""]`` for a single measurement."""
    names = dict.fromkeys(split_name(key)[0] for key in keys_of(study))
    return [f"{MEASUREMENT}{name}." for name in names if name] or [""]


def keys_of(study: StudyResults) -> list[str]:
    """Return the keys of the lists of all silos' evidence."""
    return [
        key for r in study.runs for v in r["per_silo"].values() for key in v.get("evidence", {})
    ]


def evidence_that_left(study: StudyResults) -> list[str]:
    """Return the names of the evidence that silos have sent; subgroups, which silos name, are one entry."""
    names = {
        *keys_of(study),
        *(
            key
            for key, m, silo in itertools.product(CALIBRATION, study.methods, study.silos)
            if values_by_seed(study, m, silo, key)
        ),
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
    methods = [m for m in dict.fromkeys([study.headed, study.base]) if m is not None]
    measured = measurements_of(study)
    pairs = [(silo, prefix) for silo in study.silos for prefix in measured]
    drawn = [pair for pair in pairs if has_bins(study, methods, *pair)]
    columns = HEADS.get(
        study.task.name, [*(name for _, name, _ in COLUMNS), "Sets: coverage, size"]
    )
    tested = study.count_tested(study.silos)
    return render(
        "evidence",
        study=study,
        methods=methods,
        head=["Hospital", *(["Measurement"] if measured[0] else []), *columns],
        rows=[
            (
                *pair,
                list(zip(*(texts_of(study, m, *pair, methods) for m in methods), strict=True)),
            )
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
        for key in sorted(
            {key for evidence in each for key in evidence if key.startswith(PREFIX)}
        ):
            scores = [evidence.get(key) for evidence in each]
            n = next(f"{score[0]:.0f}" for score in scores if score)
            yield silo, key.removeprefix(PREFIX), n, scores


def name_of(prefix: str) -> str:
    """Return a measurement's name from the key prefix of its values."""
    return prefix.removeprefix(MEASUREMENT).removesuffix(".")


def texts_of(
    study: StudyResults, method: str, silo: str, prefix: str, beside: Sequence[str]
) -> list[str]:
    """Return a method's values in a silo's row (:func:`value`); measurements in the label's unit."""
    evidence, task = lists(study, method, silo), study.task.name

    def mean(key: str) -> float:
        return value(study, method, silo, key, beside)

    if task == "segmentation":
        return [percent(mean("dice_worst_decile"))]
    if task != "regression":
        sets = evidence.get("conformal_sets")
        texts = [number(mean(key), digits) for key, _, digits in COLUMNS]
        return [*texts, "–" if sets is None else f"{percent(sets[5], 0)} %, {sets[6]:.2f}"]
    between = evidence.get(f"{prefix}agreement")
    sets = evidence.get(f"{prefix}conformal_intervals")
    slope, intercept, difference = (
        mean(f"{prefix}calibration_{key}") for key in ("slope", "intercept", "in_the_large")
    )
    return [
        number(slope, 2),
        short(intercept),
        short(difference),
        "–" if between is None else f"{short(between[2])} to {short(between[3])}",
        "–" if sets is None else f"{percent(sets[5], 0)} %, {short(sets[6])}",
    ]


def short(quantity: float | None) -> str:
    """Return a number in the label's unit with three digits."""
    return (
        "–"
        if math.isnan(finite_or_nan(quantity))
        else format_number(float(quantity or 0), 3, zeros=False)
    )


def diagrams(
    study: StudyResults, methods: Sequence[str], silo: str, prefix: str
) -> list[Markup]:
    """Return the charts of one silo (for one measurement, with ``prefix``)."""
    each = {m: lists(study, m, silo) for m in methods}
    place = study.silos.index(silo)
    bins, values, benefits = (
        {m: evidence[key] for m, evidence in each.items() if key in evidence}
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
        line = {"color": look[method].colour, "linestyle": look[method].dash}
        a.plot(THRESHOLDS, values[:n], linewidth=1.8, zorder=3, **line)
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
