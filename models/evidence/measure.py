"""Measure one model's evidence on one hospital's test samples, as named numbers and lists of numbers.

| name | value |
|---|---|
| ``brier``, ``calibration_slope``, ``calibration_in_the_large``, ``ece`` | one number each |
| ``reliability`` | samples, mean probability, share of events of each bin, one bin after the other |
| ``net_benefit`` | of the model at each of ``THRESHOLDS``, then of treating everybody; for two classes only |
| ``conformal`` | calibration samples, and their threshold; for classes only |
| ``conformal_sets`` | test samples, then coverage and mean size of sets: own, common and shrunk threshold |
| ``calibration_intercept`` | a of observed = a + b predicted, with b the slope; this and the next six: measurements |
| ``calibration_in_the_large`` | mean of observed - predicted |
| ``agreement`` | test samples, mean difference, its limits of agreement |
| ``value_bins`` | samples, mean prediction, mean measurement, mean absolute error of each bin |
| ``conformal_width`` | calibration samples, and their half width |
| ``conformal_intervals`` | test samples, then coverage and width of intervals: own, common and shrunk half width |
| ``measurement.NAME.VALUE`` | for several measurements: the slope and the six values above of each, by its name |
| ``dice_worst_decile`` | mean Dice of the tenth of the cases with the lowest |
| ``subgroup.NAME`` | samples, score and its 95 % interval's ends (``subgroups.py``) |

A value that needs more patients than there are, or is not finite, is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from models.evidence.calibration import (
    Array,
    Bins,
    Units,
    brier_score,
    calibration_in_the_large,
    calibration_slope,
    expected_calibration_error,
    fewest_units,
    net_benefit,
    reliability,
    treat_all,
)
from models.evidence.survival import (
    baseline_hazard,
    brier_of_survival,
    cox_slope,
    kinds_until,
    observed_risk,
    predicted_risk,
    risk_bins,
)
from models.evidence.values import (
    agreement,
    enough,
    halves,
    interval_shares,
    own_width,
    quantile,
    recalibration,
    sets_of,
    shrunk,
    true_scores,
    value_bins,
)
from models.samples import Samples
from models.tasks import Regression, Segmentation, Survival, Task, probabilities
from models.training import Network, predict

CALIBRATION = ("brier", "calibration_slope", "calibration_in_the_large", "ece")
# The names by which a hospital's policy allows each kind of evidence.
EVIDENCE = (
    *(
        *CALIBRATION,
        "calibration_intercept",
        "agreement",
        "reliability",
        "net_benefit",
        "conformal",
    ),
    *("dice_worst_decile", "subgroups"),
)
PREFIX = "subgroup."  # of the name of a subgroup's value, which `subgroups` allows
MEASUREMENT = "measurement."  # of the name of a value of one of several measurements
Evidence = dict[str, float | list[float]]


@dataclass(frozen=True)
class Ask:
    """Options of the evidence.

    * ``least``: the fewest patients behind a number.
    * ``horizon``: the time of survival's evidence; 0: none.
    * ``labels``: the labels' names in the schema.
    """

    least: int = 1
    horizon: float = 0.0
    labels: tuple[str, ...] = ()


def evidence_of(
    task: Task, model: Network, test: Samples, train: Samples, units: Units, ask: Ask
) -> Evidence:
    """Return the evidence of the model in its present state.

    ``units`` (n,): the patient of each test sample; without patients, the sample.
    """
    if not len(test):
        return {}
    evidence: Mapping[str, float | list[float]]
    if isinstance(task, Segmentation):
        evidence = _of_cases(task.dice_by_case(model, test), units, ask)
    elif isinstance(task, Survival):
        evidence = _of_survival(model, test, train, units, ask) if ask.horizon else {}
    elif isinstance(task, Regression):
        each = _measure_each(task, model, test, ask.labels)
        evidence = {
            prefix + k: v
            for prefix, output, truth in each
            for k, v in _of_values(output, truth, units, ask).items()
        }
    else:
        evidence = _of_outputs(task, predict(model, test), test.labels(), units, ask)
    return {name: value for name, value in evidence.items() if _finite(value)}


def conformal_sets(model: Network, test: Samples, units: Units, common: float) -> Evidence:
    """Return coverage and size of the sets with the hospital's own threshold, the common one, and the shrunk one."""
    p = probabilities(predict(model, test))
    y = test.labels().cpu().numpy()
    fits, held = halves(units)
    limit = quantile(true_scores(p[fits], y[fits]), too_few=1.0)
    values = [float(len(y[held]))]
    for threshold in (limit, common, shrunk(limit, len(y[fits]), common)):
        values += sets_of(p[held], y[held], threshold)
    if not _finite(values):
        return {}
    return {"conformal_sets": values}


def measurements(labels: Sequence[str], outputs: int) -> list[str]:
    """Return the names of several measurements, from the schema or else ``predict``; for a single one, no name."""
    return list(labels or (f"y_{k}" for k in range(outputs))) if outputs > 1 else []


def conformal_intervals(
    task: Regression,
    model: Network,
    test: Samples,
    units: Units,
    common: Sequence[float],
    labels: Sequence[str] = (),
) -> Evidence:
    """Return coverage and width of the intervals with the hospital's own half width, the common and the shrunk one.

    ``common``: one for each measurement.
    """
    evidence: Evidence = {}
    for (prefix, output, truth), half in zip(
        _measure_each(task, model, test, labels), common, strict=True
    ):
        values = interval_shares(np.abs(truth - output), units, half)
        if _finite(values):
            evidence[f"{prefix}conformal_intervals"] = values
    return evidence


def _measure_each(
    task: Regression, model: Network, test: Samples, labels: Sequence[str]
) -> Iterator[tuple[str, Array, Array]]:
    """Yield for each measurement the prefix of its values' names, and predictions and true values (n,) in its unit."""
    pair = (predict(model, test), test.labels())
    scale = np.array(task.std or 1.0)
    shift = np.array(task.mean or 0.0)
    output, truth = (values.detach().double().cpu().numpy() * scale + shift for values in pair)
    names = measurements(labels, output.shape[1])
    for k in range(output.shape[1]):
        yield f"{MEASUREMENT}{names[k]}." if names else "", output[:, k], truth[:, k]


def _of_values(output: Array, truth: Array, units: Units, ask: Ask) -> Evidence:
    if not np.isfinite(output).all():
        return {}
    intercept, slope = recalibration(output, truth)
    between = agreement(output, truth)
    values: Evidence = {
        "calibration_slope": slope,
        "calibration_intercept": intercept,
        "calibration_in_the_large": between[0],
        "agreement": [float(len(output)), *between],
        "value_bins": value_bins(output, truth, ask.least, units),
    }
    residuals = np.abs(truth - output)
    n, half = own_width(residuals, units, ask.least)
    values["conformal_width"] = [float(n), half]
    return values


def _of_outputs(task: Task, outputs: Tensor, y: Tensor, units: Units, ask: Ask) -> Evidence:
    chances = task.chances(outputs, y)
    if chances is None or not np.isfinite(chances[0]).all():
        return {}
    p, event, whose = chances
    bins = reliability(p, event, ask.least, units[whose])
    values: Evidence = {
        "brier": brier_score(p, event),
        "calibration_slope": calibration_slope(p, event),
        "calibration_in_the_large": calibration_in_the_large(p, event),
        "ece": expected_calibration_error(bins),
        "reliability": flat(bins),
    }
    if not task.single_label:
        return values
    if outputs.shape[1] == 2:
        values["net_benefit"] = [*net_benefit(p, event).tolist(), *treat_all(event).tolist()]
    of_classes = probabilities(outputs)
    labels = y.cpu().numpy()
    if enough(units, ask.least):
        fits, _ = halves(units)
        scores = true_scores(of_classes[fits], labels[fits])
        values["conformal"] = [float(len(scores)), quantile(scores, too_few=1.0)]
    return values


def _of_survival(
    model: Network, test: Samples, train: Samples, units: Units, ask: Ask
) -> Evidence:
    def columns(samples: Samples) -> tuple[Array, Array, Array]:
        y = samples.labels().double().cpu().numpy()
        outputs = predict(model, samples).double().cpu().numpy()
        return outputs[:, 0], y[:, 0], y[:, 1]

    (s, time, event), risks = columns(test), columns(train)
    if (
        not np.isfinite(s).all()
        or fewest_units([kinds_until(time, event, ask.horizon, units)]) < ask.least
    ):
        return {}
    risk = predicted_risk(s, baseline_hazard(*risks, ask.horizon))
    observed = observed_risk(time, event, ask.horizon)
    expected = float(risk.mean())
    bins = risk_bins(risk, time, event, ask.horizon, ask.least, units)
    return {
        "brier": brier_of_survival(risk, time, event, ask.horizon),
        "calibration_slope": cox_slope(s, time, event),
        "calibration_in_the_large": math.log(observed / expected)
        if observed > 0 and expected > 0
        else math.nan,
        "ece": expected_calibration_error(bins),
        "reliability": flat(bins),
    }


def _of_cases(dice: Tensor, units: Units, ask: Ask) -> Evidence:
    values = dice.double().numpy()
    known = np.flatnonzero(~np.isnan(values))
    order = np.argsort(values[known], kind="stable")
    worst = known[order][: max(1, len(known) // 10)]
    if not len(known) or len(np.unique(units[worst])) < ask.least:
        return {}
    return {"dice_worst_decile": float(values[worst].mean())}


def flat(bins: Bins) -> list[float]:
    """Return bins as one list, bin after bin: samples, mean probability, share of events."""
    return [
        float(v)
        for row in zip(bins.counts, bins.predicted, bins.observed, strict=True)
        for v in row
    ]


def _finite(value: float | list[float]) -> bool:
    return bool(np.isfinite(value).all())
