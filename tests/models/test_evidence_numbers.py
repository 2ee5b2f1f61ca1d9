"""Evidence against independent implementations, to 1e-9.

scikit-learn runs here. statsmodels 0.15.0, dcurves 1.1.7 and MAPIE 1.6.0 do not fit the project's frozen set: their
numbers stand below, from the same data, each with the call that gave it (``pip install statsmodels dcurves mapie``).
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from evidence import evidence
from near import near
from sklearn.calibration import calibration_curve
from sklearn.metrics import brier_score_loss
from torch import nn

from models.evidence.calibration import (
    brier_score,
    calibration_in_the_large,
    calibration_slope,
    expected_calibration_error,
    fewest_units,
    net_benefit,
    reliability,
    treat_all,
)
from models.evidence.measure import conformal_sets
from models.evidence.survival import (
    baseline_hazard,
    brier_of_survival,
    cox_slope,
    kinds_until,
    observed_risk,
    predicted_risk,
    risk_bins,
)
from models.evidence.values import halves, quantile, sets_of, shrunk, true_scores
from models.flat import FlatModel
from models.samples import Samples
from models.tasks import task_of

TINY = 1e-9


def binary():
    rng = np.random.default_rng(31)
    z = rng.normal(0, 1.5, 80)
    event = (rng.random(80) < 1 / (1 + np.exp(-(0.4 + 0.7 * z)))).astype(float)
    return 1 / (1 + np.exp(-z)), event


def classes():
    rng = np.random.default_rng(32)
    logits = rng.normal(0, 1, (60, 3))
    y = (logits + rng.normal(0, 1, (60, 3))).argmax(1)
    e = np.exp(logits - logits.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True), y


def survival():
    rng = np.random.default_rng(33)
    s = rng.normal(0, 1, 70)
    t = np.round(rng.exponential(np.exp(-0.8 * s)) * 10) + 1
    c = np.round(rng.exponential(12, 70)) + 1
    return s, np.minimum(t, c), (t <= c).astype(float)


# ---------------------------------------------------------------------------------------------------------------------
# Calibration


def test_brier_is_scikit_learns():
    p, event = binary()
    near(brier_score(p, event), brier_score_loss(event, p), TINY)


def test_slope_and_in_the_large_are_statsmodels():
    """``x = log(p/(1-p))``; ``Logit(event, add_constant(x)).fit(method="newton", tol=1e-14).params[1]``;
    ``GLM(event, ones((80, 1)), family=Binomial(), offset=x).fit(tol=1e-14).params[0]``.
    """
    p, event = binary()
    near(calibration_slope(p, event), 0.28199799558051397, TINY)
    near(calibration_in_the_large(p, event), 0.37387241860912157, TINY)


def test_recalibrated_probabilities_have_slope_1_and_0_in_the_large():
    p, event = binary()
    x, slope = np.log(p / (1 - p)), calibration_slope(p, event)
    steep = 1 / (1 + np.exp(-slope * x))
    better = 1 / (1 + np.exp(-slope * x - calibration_in_the_large(steep, event)))
    near(calibration_slope(better, event), 1, TINY)
    near(calibration_in_the_large(better, event), 0, TINY)


@pytest.mark.parametrize(
    "p, event",
    [
        ([0.1, 0.2, 0.8, 0.9], [0, 0, 1, 1]),
        ([0.1, 0.2, 0.8, 0.9], [1, 1, 1, 1]),
        ([0.5] * 4, [0, 1, 0, 1]),
        ([], []),
    ],
    ids=["separated", "one kind", "one probability", "nothing"],
)
def test_what_has_no_slope(p, event):
    assert math.isnan(calibration_slope(np.array(p), np.array(event)))


def test_certain_and_wrong_has_finite_values():
    """p = 0 and 1 have no logit: they count as 1e-12 from there."""
    p, event = np.array([0.0, 1.0, 0.3, 0.6, 1.0]), np.array([1.0, 0.0, 0.0, 1.0, 1.0])
    assert math.isfinite(calibration_in_the_large(p, event))
    assert brier_score(p, event) == pytest.approx((1 + 1 + 0.09 + 0.16) / 5)


def test_bins_are_scikit_learns_quantiles():
    p, event = binary()
    bins = reliability(p, event)
    observed, predicted = calibration_curve(event, p, n_bins=10, strategy="quantile")
    assert bins.observed == pytest.approx(
        observed, abs=TINY
    ) and bins.predicted == pytest.approx(predicted, abs=TINY)
    weights = bins.counts / 80
    near(expected_calibration_error(bins), (weights * abs(observed - predicted)).sum(), TINY)


@pytest.mark.parametrize("least", [1, 7, 20, 41, 200])
def test_no_bin_has_fewer_samples_than_asked(least):
    """Also with ties, which stay in one bin; with fewer samples than asked for, one bin is left, which egress keeps."""
    p, event = binary()
    tied = np.where(p > 0.6, 0.75, p)
    for values in (p, tied):
        bins = reliability(values, event, least)
        assert bins.counts.sum() == 80 and bins.counts.min() >= min(least, 80)
        assert (bins.counts * bins.observed).sum() == pytest.approx(event.sum())


# ---------------------------------------------------------------------------------------------------------------------
# Decisions, sets


def test_net_benefit_is_that_of_dcurves():
    """``dca(frame, "e", ["p"], thresholds=[.05, .25, .5, .75, .95])``."""
    p, event = binary()
    at = (0.05, 0.25, 0.5, 0.75, 0.95)
    model = [
        0.5144736842105264,
        0.35833333333333345,
        0.11249999999999999,
        -0.012499999999999956,
        0.0125,
    ]
    everybody = [0.5263157894736843, 0.4, 0.1, -0.8, -8.0]
    near(net_benefit(p, event, at), model, TINY)
    near(treat_all(event, at), everybody, TINY)


def test_sets_are_those_of_mapie():
    """``SplitConformalClassifier(confidence_level=.9, conformity_score="lac", prefit=True)``, conformalised with every
    second sample, ``predict_set`` of the others.
    """
    p, y = classes()
    fits, held = halves(np.arange(60))
    threshold = quantile(true_scores(p[fits], y[fits]), too_few=1.0)
    near(threshold, 0.7911307675294623, TINY)
    near(sets_of(p[held], y[held], threshold), (0.8333333333333334, 1.9), TINY)


def test_too_few_calibration_samples_make_the_full_set():
    """alpha = .1 needs n >= 9: ceil(9 * .9) = 9 > 8, ceil(10 * .9) = 9."""
    assert quantile(np.linspace(0, 0.5, 8), too_few=1.0) == 1.0
    assert quantile(np.linspace(0, 0.5, 9)) == 0.5


def test_shrinkage_of_a_threshold():
    """19 own samples count as much as the common one; none leave the common one."""
    assert shrunk(0.4, 19, 0.8) == pytest.approx(0.6) and shrunk(1.0, 0, 0.8) == 0.8


def test_a_patients_samples_are_in_one_half():
    fits, held = halves(np.array([7, 7, 3, 3, 9, 9]))
    assert fits.tolist() == [False, False, True, True, True, True] and held.tolist() == [
        not v for v in fits
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Survival


def test_survival_is_statsmodels():
    """``PHReg(t, s, status=event, ties="breslow").fit().params[0]``; ``1 - SurvfuncRight(t, event)`` at 8;
    ``PHReg(...).baseline_cumulative_hazard([1.0])`` at 9, the next event's time, whose own event it leaves out
    (``cumsum(h0) - h0``).
    """
    s, time, event = survival()
    near(cox_slope(s, time, event), 0.5224760572676023, TINY)
    near(observed_risk(time, event, 8.0), 0.6456690664070506, TINY)
    near(baseline_hazard(s, time, event, 8.0), 0.7322725916657231, TINY)
    risk = predicted_risk(np.array([0.0]), 0.7322725916657231)
    assert risk == pytest.approx(1 - math.exp(-0.7322725916657231))


def test_brier_of_survival_by_hand():
    """The derivation is in the docstring; a risk of a sample censored before the time changes nothing."""
    time, event = np.array([3.0, 2, 6, 1, 5, 2]), np.array([1.0, 0, 1, 1, 0, 1])
    for of_censored in (0.5, 0.1):
        risk = np.array([0.6, of_censored, 0.0, 0.9, 0.3, 0.5])
        near(brier_of_survival(risk, time, event, 4.0), 0.89 / 9, TINY)


@pytest.mark.parametrize("at", [0.5, 1.0, 3.0, 8.0, 8.5])
def test_brier_weights_are_those_of_kaplan_meier(at):
    """Risk 0 has the observed risk as its score, risk 1 the rest: with ties of events and censored samples, too."""
    s, time, event = survival()
    observed = observed_risk(time, event, at)
    near(brier_of_survival(np.zeros_like(s), time, event, at), observed, TINY)
    near(brier_of_survival(np.ones_like(s), time, event, at), 1 - observed, TINY)


def test_brier_of_survival_without_censoring_is_the_plain_one():
    s, time, _ = survival()
    risk, event = predicted_risk(s, 0.7), np.ones_like(s)
    for at in (8.0, time.max(), time.max() + 1):
        plain = brier_score(risk, (time <= at).astype(float))
        near(brier_of_survival(risk, time, event, at), plain, TINY)


@pytest.mark.parametrize("at", [3.0, 4.0])
def test_no_brier_where_the_last_sample_is_censored_until_then(at):
    time, event = np.array([1.0, 2.0, 3.0]), np.array([1.0, 1.0, 0.0])
    assert math.isnan(brier_of_survival(np.full(3, 0.5), time, event, at))
    assert math.isnan(brier_of_survival(np.empty(0), np.empty(0), np.empty(0), at))


def test_a_time_after_the_last_censored_sample_has_no_observed_risk():
    time, event = np.array([1.0, 2.0, 3.0]), np.array([1.0, 0.0, 0.0])
    assert math.isnan(observed_risk(time, event, 4.0))
    assert observed_risk(time, event, 2.5) == pytest.approx(1 / 3)


# ---------------------------------------------------------------------------------------------------------------------
# All of it, of a network


def linear(weight):
    """A network whose outputs are its inputs times this (outputs, inputs)."""
    layer = nn.Linear(len(weight[0]), len(weight), bias=False)
    layer.weight.data = torch.tensor(weight)
    return FlatModel(nn.Sequential(layer))


def test_evidence_of_two_classes():
    """The outputs are (0, x): P(class 1) is the logistic function of x."""
    p, event = binary()
    x = np.log(p / (1 - p)).astype(np.float32)[:, None]
    samples = Samples(x, event.astype(np.int64))
    found = evidence(task_of("multiclass"), linear([[0.0], [1.0]]), samples)
    near(found["brier"], brier_score_loss(event, p))
    near(found["calibration_slope"], 0.28199799558051397, 1e-5)
    assert set(found) == {
        "brier",
        "calibration_slope",
        "calibration_in_the_large",
        "ece",
        "reliability",
    } | {"net_benefit", "conformal"}
    assert np.reshape(found["reliability"], (-1, 3)).shape == (10, 3)


def test_evidence_of_more_classes_is_of_the_models_confidence():
    """Brier: mean of (max p - right)^2. Net benefit needs one event to treat."""
    p, y = classes()
    samples = Samples(np.log(p).astype(np.float32), y)
    found = evidence(task_of("multiclass"), linear(np.eye(3).tolist()), samples)
    right = (p.argmax(1) == y).astype(float)
    near(found["brier"], ((p.max(1) - right) ** 2).mean())
    assert "net_benefit" not in found and found["conformal"] == pytest.approx(
        [30, 0.7911307675294623], abs=1e-6
    )
    sets = conformal_sets(linear(np.eye(3).tolist()), samples, np.arange(60), 1.0)[
        "conformal_sets"
    ]
    own, common = 0.8333333333333334, (1.0, 3.0)  # of threshold 1 every class is in the set
    near(sets[:5], [30, own, 1.9, *common])  # type: ignore[index]


def test_evidence_of_findings_counts_known_labels():
    """Three labels are known: sigmoid(0) = .5 each, so Brier = .25."""
    samples = Samples(np.zeros((2, 1), np.float32), np.array([[1, -1], [0, 1]], np.float32))
    found = evidence(task_of("multilabel"), linear([[1.0], [1.0]]), samples)
    assert (
        found["brier"] == pytest.approx(0.25)
        and np.reshape(found["reliability"], (-1, 3))[:, 0].sum() == 3
    )


def test_evidence_of_survival_needs_a_time():
    s, time, event = survival()
    samples = Samples(
        s.astype(np.float32)[:, None], np.stack([time, event], 1).astype(np.float32)
    )
    task, model = task_of("survival"), linear([[1.0]])
    assert evidence(task, model, samples) == {}
    found = evidence(task, model, samples, horizon=8.0)
    near(found["calibration_slope"], 0.5224760572676023, 1e-5)
    expected = predicted_risk(s, 0.7322725916657231).mean()
    near(found["calibration_in_the_large"], math.log(0.6456690664070506 / expected), 1e-5)
    risk = predicted_risk(s, 0.7322725916657231)
    near(found["brier"], brier_of_survival(risk, time, event, 8.0), 1e-5)
    # Events, or followed beyond without one
    fewer = int(min(((time <= 8) & (event > 0)).sum(), (time > 8).sum()))
    for least in (fewer, fewer + 1):
        limited = evidence(task, model, samples, least=least, horizon=8.0)
        assert bool(limited) == (least == fewer) and (
            not limited or limited.keys() == found.keys()
        )


@pytest.mark.parametrize("when", [3, 17, 35])
def test_a_group_of_one_event_does_not_tell_when_it_was(when):
    """A server that knows some patients' inputs makes a model whose highest risks are those of one with the event and
    of nineteen without. The group's risk is 1 / (number at risk as it happened), so with the times of the nineteen,
    censored at 2, 4, ..., the server knows the patient's time to two units.
    """
    # Forty events, forty followed to the end
    others = np.concatenate([np.arange(1.0, 41.0), np.full(40, 99.0)])
    group = np.concatenate([[when], np.arange(2.0, 38.0, 2.0), [60.0]])
    time = np.concatenate([others, group])
    event = np.concatenate([np.arange(80) < 40, np.arange(20) < 1]).astype(float)
    risk = np.where(np.arange(100) < 80, 0.1, 0.9)
    at_risk = round(1 / observed_risk(group, event[80:], 50.0))
    assert 2 * (20 - at_risk) < when <= 2 * (21 - at_risk)  # what the group alone would tell
    for least in (2, 5, 10):
        bins = risk_bins(risk, time, event, 50.0, least, np.arange(100))
        ends = np.cumsum(bins.counts).astype(int)
        rows = np.split(np.argsort(risk, kind="stable"), ends[:-1])
        assert ends[-1] == 100 and all(
            fewest_units([kinds_until(time[r], event[r], 50.0, r)]) >= least for r in rows
        )
        assert [observed_risk(time[r], event[r], 50.0) for r in rows] == pytest.approx(
            list(bins.observed)
        )


def test_the_worst_decile_of_cases():
    """Twenty pictures of one pixel row; the network draws the left pixel, which two do not have: their Dice is 0."""
    masks = np.zeros((20, 1, 2), np.uint8)
    masks[:18, 0, 0] = 1
    masks[18:, 0, 1] = 1
    pictures = np.zeros((20, 1, 2, 1), np.float32)
    pictures[:, 0, 0, 0] = 1
    conv = nn.Conv2d(1, 2, 1, bias=False)
    conv.weight.data = torch.tensor([0.0, 1.0]).reshape(2, 1, 1, 1)
    model, samples = FlatModel(nn.Sequential(conv)), Samples(pictures, masks)
    task = task_of("segmentation")
    assert evidence(task, model, samples) == {"dice_worst_decile": 0.0}
    # The tenth is two cases
    assert evidence(task, model, samples, least=3) == {}


def test_nothing_of_a_diverged_model():
    samples = Samples(np.ones((20, 1), np.float32), np.arange(20) % 2)
    task, model = task_of("multiclass"), linear([[0.0], [math.nan]])
    assert evidence(task, model, samples) == {}
