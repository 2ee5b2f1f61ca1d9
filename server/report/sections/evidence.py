"""Section on the evidence per hospital: calibration, reliability, net benefit, conformal sets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from models.evidence.measure import MEASUREMENT, PREFIX
from server.report.charts.evidence import net_benefit_chart, reliability_diagram, value_diagram
from server.report.evidence import has_evidence, lists, measurements_of, value
from server.report.html import markup, number, percent, plain
from server.report.methods import spelled
from server.report.study import Study
from server.report.templates import render

BINS_OF = {"reliability", "value_bins"}  # of probabilities, of measurements
BY_CHANCE = 0.05  # share of 95 % intervals that miss the true value
PANELS = 6  # silos whose diagrams are drawn
COLUMNS = (
    ("brier", "Brier", 3),
    ("calibration_slope", "Slope", 2),
    ("calibration_in_the_large", "In the large", 2),
    ("ece", "ECE", 3),
)


def evidence_section(study: Study) -> Markup:
    """Render the section; empty if no silo has sent evidence."""
    if not study.runs or not has_evidence(study):
        return Markup()
    methods = compared(study)
    groups = group_rows(study, methods)
    sizes = sorted({n for silo in study.silos for n in study.sizes(silo, "n_test")} - {0})
    head = ["Hospital", *(name for _, name, _ in COLUMNS), "Sets: coverage, size"]
    if study.task.name == "segmentation":
        head = ["Hospital", "Dice of the worst tenth"]
    if study.task.name == "regression":
        head = ["Hospital", "Slope", "Intercept", "Difference", "Limits of agreement", "Intervals: coverage, width"]
    measured = measurements_of(study)
    if measured[0]:
        head.insert(1, "Measurement")
    rows = [(silo, cells(study, methods, silo, prefix)) for silo in study.silos for prefix in measured]
    drawn = [
        (silo, prefix)
        for silo in study.silos
        for prefix in measured
        if any({prefix + key for key in BINS_OF} & lists(study, m, silo).keys() for m in methods)
    ]
    return render(
        "evidence",
        head=head,
        rows=rows,
        first=spelled(methods[0]),
        second=spelled(methods[1]) if len(methods) > 1 else "",
        panels=[
            (f"{silo}: {name_of(prefix)}" if prefix else silo, diagrams(study, methods, silo, prefix))
            for silo, prefix in drawn[:PANELS]
        ],
        several=bool(measured[0]),
        left=max(len(drawn) - PANELS, 0),
        event=event_of(study),
        task=study.task.name,
        seeds=len(study.seeds),
        groups=groups,
        chance=f"{BY_CHANCE * len(groups) * len(methods):.2g}",
        tested=f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}" if sizes else "few",
        group_head=["Hospital", "Subgroup", "Test", *map(spelled, methods)],
        score=study.task.score_label,
    )


def group_rows(study: Study, methods: Sequence[str]) -> list[tuple[str, list[str | Markup]]]:
    """Return a row for each silo's subgroup: name, samples, and the methods' scores with their intervals."""
    rows: list[tuple[str, list[str | Markup]]] = []
    for silo in study.silos:
        each = [lists(study, m, silo) for m in methods]
        for key in sorted({key for found in each for key in found if key.startswith(PREFIX)}):
            n = next(f"{found[key][0]:.0f}" for found in each if key in found)
            rows.append((silo, [key.removeprefix(PREFIX), n, *(scored(found.get(key)) for found in each)]))
    return rows


def scored(values: Sequence[float] | None) -> Markup:
    """Return a score in per cent, or an error in the label's unit, with its interval below."""
    if values is None:
        return Markup("–")
    if len(values) == 5:  # measurements: n, MAE, the two ends of its interval, RMSE
        mae, low, high, rmse = (f"{v:.3g}" for v in values[1:])
        return markup("{}<small>{}–{}; {}</small>", mae, low, high, rmse)
    return markup("{}<small>{}–{}</small>", percent(values[1]), percent(values[2], 0), percent(values[3], 0))


def compared(study: Study) -> list[str]:
    """Return the headline's method (or the first one) and, if there is one, the baseline that it is compared with."""
    wanted = [study.best or study.methods[0], study.base]
    return [m for m in dict.fromkeys(wanted) if m is not None]


def event_of(study: Study) -> str:
    """Return the description of the predicted event."""
    return {"multilabel": "that a finding is present", "survival": "of the event until the chosen time"}.get(
        study.task.name, "of class 1 of two classes; of more classes, that the predicted class is right"
    )


def name_of(prefix: str) -> str:
    """Return a measurement's name from the key prefix of its values."""
    return prefix.removeprefix(MEASUREMENT).removesuffix(".")


def cells(study: Study, methods: Sequence[str], silo: str, prefix: str) -> list[str | Markup]:
    """Return a silo's row (for one measurement, with ``prefix``): the first method's values, the second's below."""
    if study.task.name == "segmentation":
        return [both([percent(value(study, m, silo, "dice_worst_decile")) for m in methods])]
    if study.task.name == "regression":
        columns = zip(*(of_values(study, m, silo, prefix) for m in methods), strict=True)
        return [*([name_of(prefix)] if prefix else []), *(both(list(texts)) for texts in columns)]
    found = [both([number(value(study, m, silo, key), digits) for m in methods]) for key, _, digits in COLUMNS]
    return [*found, both([sets_of(study, m, silo) for m in methods])]


def of_values(study: Study, method: str, silo: str, prefix: str) -> list[str]:
    """Return a method's values in a regression's row, in the label's unit."""
    found = lists(study, method, silo)
    between, sets = found.get(f"{prefix}agreement"), found.get(f"{prefix}conformal_intervals")
    slope, intercept, difference = (
        value(study, method, silo, f"{prefix}calibration_{key}") for key in ("slope", "intercept", "in_the_large")
    )
    return [
        number(slope, 2),
        short(intercept),
        short(difference),
        "–" if between is None else f"{short(between[2])} to {short(between[3])}",
        "–" if sets is None else f"{percent(sets[5], 0)} %, {short(sets[6])}",
    ]


def short(found: Any) -> str:
    """Return a number in the label's unit with three digits."""
    return "–" if math.isnan(known(found)) else plain(float(found), 3, zeros=False)


def known(found: Any) -> float:
    return math.nan if found is None else float(found)


def both(texts: Sequence[str]) -> Markup:
    """Return the first text, with the second one in small type below it."""
    below = markup("<small>{}</small>", texts[1]) if len(texts) > 1 else Markup()
    return markup("{}", texts[0]) + below


def sets_of(study: Study, method: str, silo: str) -> str:
    """Return coverage and size of the sets with the shrunk threshold."""
    found = lists(study, method, silo).get("conformal_sets")
    return "–" if found is None else f"{percent(found[5], 0)} %, {found[6]:.2f}"


def diagrams(study: Study, methods: Sequence[str], silo: str, prefix: str) -> list[Markup]:
    """Return the charts of one silo (for one measurement, with ``prefix``)."""
    each = {m: lists(study, m, silo) for m in methods}
    bins = {m: found["reliability"] for m, found in each.items() if "reliability" in found}
    values = {m: found[key] for m, found in each.items() if (key := f"{prefix}value_bins") in found}
    if values:
        key = f"{study.silos.index(silo)}-{measurements_of(study).index(prefix)}"
        return [Markup(value_diagram(study, f"{silo}, {name_of(prefix)}" if prefix else silo, values, key))]
    benefits = {m: found["net_benefit"] for m, found in each.items() if "net_benefit" in found}
    charts = [Markup(reliability_diagram(study, silo, bins))] if bins else []
    return charts + ([Markup(net_benefit_chart(study, silo, benefits))] if benefits else [])
