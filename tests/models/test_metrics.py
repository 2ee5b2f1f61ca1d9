"""Losses and metrics: numbers worked by hand, and scikit-learn where it computes the same."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from failing import fails
from near import near
from sklearn.metrics import (
    accuracy_score,
    balanced_accuracy_score,
    f1_score,
    log_loss,
    roc_auc_score,
)
from torch.testing import assert_close

from models.metrics import (
    METRICS,
    classification_metrics,
    fairness_variance,
    incentivised_rate,
    loss_function,
    mean_rank,
    wilson_interval,
)

# ---- Losses ------------------------------------------------------------------------------------------------


def test_focal_loss_by_hand():
    """Logits (log 3, 0) give p = (3/4, 1/4). Labels 0 and 1, gamma 2:

    (1/4)^2 * log(4/3) = 0.0625 * 0.287682 = 0.017980 and (3/4)^2 * log 4 = 0.5625 * 1.386294 = 0.779791;
    their mean is 0.398885.
    """
    logits = torch.tensor([[math.log(3), 0.0], [math.log(3), 0.0]])
    y = torch.tensor([0, 1])
    by_hand = (0.0625 * math.log(4 / 3) + 0.5625 * math.log(4)) / 2
    near(by_hand, 0.398885)
    assert loss_function("focal", gamma=2)(logits, y).item() == pytest.approx(by_hand, rel=1e-6)


def test_focal_without_focus_is_the_cross_entropy():
    logits, y = torch.randn(20, 5), torch.randint(5, (20,))
    expected = F.cross_entropy(logits, y)
    assert torch.equal(loss_function("cross-entropy", gamma=3.0)(logits, y), expected)
    assert torch.equal(loss_function("focal", gamma=0.0)(logits, y), expected)
    # The formula itself, not only the shortcut, tends to it.
    assert_close(loss_function("focal", gamma=1e-6)(logits, y), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("gamma", [0.5, 1.0, 3.0])
def test_focal_gradient(gamma):
    """With q = 1 - p_y, dL/dz_k = (p_k - [k = y]) (q^gamma - gamma q^(gamma-1) p_y log p_y), by chain rule:

    dL/dp_y = gamma q^(gamma-1) log p_y - q^gamma / p_y and dp_y/dz_k = p_y ([k = y] - p_k).
    """
    torch.manual_seed(1)
    logits = torch.randn(1, 4, dtype=torch.float64, requires_grad=True)
    loss_function("focal", gamma)(logits, torch.tensor([2])).backward()
    p = logits.detach().softmax(1)[0]
    q = 1 - p[2]
    factor = q**gamma - gamma * q ** (gamma - 1) * p[2] * p[2].log()
    assert logits.grad is not None
    near(logits.grad[0], (p - torch.tensor([0.0, 0.0, 1.0, 0.0])) * factor, 1e-5)


@pytest.mark.parametrize("gamma", [0.1, 0.5, 1.0, 2.0])
def test_focal_gradient_is_finite_for_a_certain_prediction(gamma):
    """p_y rounds to 1, where the grad of (1 - p_y)^gamma is infinite for gamma < 1."""
    logits = torch.tensor([[200.0, 0.0], [-200.0, 0.0]], requires_grad=True)
    loss = loss_function("focal", gamma)(logits, torch.tensor([0, 0]))
    loss.backward()
    assert loss.item() == pytest.approx(100.0)  # (0 + 200) / 2
    near(logits.grad, torch.tensor([[0.0, 0.0], [-0.5, 0.5]]), 1e-5)


# ---- One model, one silo -----------------------------------------------------------------------------------


def test_classification_metrics_by_hand():
    """Probabilities of three classes, one row per sample, label and prediction (class 2 never occurs):

        .6 .3 .1   label 0, predicted 0        .3 .6 .1   label 1, predicted 1
        .4 .5 .1   label 0, predicted 1        .5 .4 .1   label 1, predicted 0
        .6 .3 .1   label 1, predicted 0

    loss: -(log .6 + log .4 + log .3 + log .6 + log .4) / 5. accuracy: 2/5.
    Of class 0 one of two is recognised, of class 1 one of three: balanced 5/12.
    F1 of class 0: 2*1 / (2 labels + 3 predictions) = 2/5; of class 1: 2*1 / (3 + 2) = 2/5; mean 2/5, by labels too.
    AUC of class 0: positives .6 .4 against negatives .6 .3 .5: .6 ties one and beats two (2.5), .4 beats one
    (1): 3.5/6. Class 1: positives .3 .6 .4 against .3 .5: .5 (tie), 2, 1: 3.5/6.
    """
    p = torch.tensor(
        [[0.6, 0.3, 0.1], [0.4, 0.5, 0.1], [0.6, 0.3, 0.1], [0.3, 0.6, 0.1], [0.5, 0.4, 0.1]]
    )
    metrics = classification_metrics(p.log(), torch.tensor([0, 0, 1, 1, 1]))
    assert metrics == {
        "loss": pytest.approx(-math.log(0.6 * 0.4 * 0.3 * 0.6 * 0.4) / 5, rel=1e-6),
        "accuracy": 0.4,
        "balanced_accuracy": pytest.approx(5 / 12),
        "macro_f1": pytest.approx(0.4),
        "weighted_f1": pytest.approx(0.4),
        "auc": pytest.approx(3.5 / 6),
    }


def test_a_predicted_class_without_labels_counts_in_macro_f1():
    """Labels 0 0, predictions 0 2: F1 of class 0 is 2/3 and of class 2 is 0; class 1 is absent. Mean 1/3."""
    logits = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    assert classification_metrics(logits, torch.tensor([0, 0]))["macro_f1"] == pytest.approx(
        1 / 3
    )


def reference(logits, y):
    p, labels = logits.double().softmax(1).numpy(), y.numpy()
    predicted = p.argmax(1)
    present = np.unique(labels)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        areas = (
            [roc_auc_score(labels == c, p[:, c]) for c in present]
            if len(present) > 1
            else [math.nan]
        )
        return {
            "loss": log_loss(labels, p, labels=range(p.shape[1])),
            "accuracy": accuracy_score(labels, predicted),
            "macro_f1": f1_score(labels, predicted, average="macro", zero_division=0),
            "weighted_f1": f1_score(labels, predicted, average="weighted", zero_division=0),
            "balanced_accuracy": balanced_accuracy_score(labels, predicted),
            "auc": float(np.mean(areas)),
        }


@pytest.mark.parametrize("classes", [2, 3, 10])
@pytest.mark.parametrize("case", ["plain", "ties", "absent", "one class", "one sample"])
def test_scikit_learn_agrees(case, classes):
    for seed in range(20):
        torch.manual_seed(seed)
        n = 1 if case == "one sample" else int(torch.randint(2, 120, ()))
        logits = torch.randn(n, classes)
        # Labels that the logits partly foretell, so that areas are not all near one half.
        y = (logits + 1.5 * torch.randn(n, classes)).argmax(1)
        # Six distinct rows at most, the first of them without a single largest logit
        if case == "ties":
            rows = torch.cat([torch.zeros(1, classes), torch.randn(5, classes)])
            logits = rows[torch.randint(6, (n,))]
        elif case == "absent":
            y = torch.where(y == classes - 1, 0, y)
        elif case == "one class":
            y = torch.full((n,), seed % classes)
        ours, theirs = classification_metrics(logits, y), reference(logits, y)
        assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-12, nan_ok=True), seed
        assert math.isnan(ours["auc"]) == (len(y.unique()) == 1)


def test_auc_is_the_binary_and_the_one_vs_rest_auc():
    torch.manual_seed(2)
    y = torch.arange(90) % 2
    logits = torch.randn(90, 2) + F.one_hot(y)
    binary = roc_auc_score(y, logits.softmax(1)[:, 1])
    assert classification_metrics(logits, y)["auc"] == pytest.approx(binary, rel=1e-12)
    y = torch.arange(90) % 3
    logits = (torch.randn(90, 3) + F.one_hot(y)).double()
    macro = roc_auc_score(y, logits.softmax(1), multi_class="ovr", average="macro")
    assert classification_metrics(logits, y)["auc"] == pytest.approx(macro, rel=1e-12)


def test_no_samples_and_diverged_models():
    nothing = classification_metrics(torch.empty(0, 4), torch.empty(0, dtype=torch.int64))
    assert set(nothing) == set(METRICS)
    assert all(math.isnan(value) for value in nothing.values())
    broken = classification_metrics(
        torch.tensor([[math.nan, 0.0], [0.0, 1.0]]), torch.tensor([0, 1])
    )
    assert math.isnan(broken["loss"]) and math.isnan(broken["auc"])
    with pytest.raises(ValueError, match=r"labels must lie in 0\.\.1, found 0\.\.2"):
        classification_metrics(torch.zeros(2, 2), torch.tensor([0, 2]))
    with pytest.raises(ValueError, match=r"found -1\.\.1"):
        classification_metrics(torch.zeros(2, 2), torch.tensor([-1, 1]))


# ---- A group of silos --------------------------------------------------------------------------------------


def test_fairness_variance_by_hand():
    """0.5, 0.7, 0.9: mean 0.7, squared distances 0.04, 0, 0.04, divided by the number of silos: 0.08/3."""
    assert fairness_variance([0.5, 0.7, 0.9]) == pytest.approx(0.08 / 3)
    assert fairness_variance([0.5, math.nan, 0.7, 0.9]) == pytest.approx(0.08 / 3)
    assert fairness_variance([0.6]) == 0.0
    assert math.isnan(fairness_variance([])) and math.isnan(fairness_variance([math.nan]))


def test_incentivised_rate_by_hand():
    """Silo 1 gains over both, 2 only over FedAvg, 3 only over training alone, 4 draws: one in four."""
    personal, local, fedavg = [0.9, 0.8, 0.7, 0.6], [0.8, 0.85, 0.6, 0.6], [0.7, 0.7, 0.75, 0.5]
    assert incentivised_rate(personal, local, fedavg) == 0.25
    assert incentivised_rate([*personal, math.nan], [*local, 0.1], [*fedavg, 0.1]) == 0.25
    assert incentivised_rate([0.9, 0.9], [0.1, 0.1], [math.nan, 0.1]) == 1.0
    assert math.isnan(incentivised_rate([], [], []))
    with pytest.raises(ValueError, match="not the same silos: 2, 1 and 2 values"):
        incentivised_rate([0.1, 0.2], [0.1], [0.1, 0.2])


def test_wilson_interval_by_hand():
    """At 95 %, z^2 = 3.841459; for n = 10, z^2/2n = 0.192073, z^2/4n^2 = 0.009604 and z^2/n = 0.384146.

    8 of 10: (0.8 + 0.192073 -+ 1.959964 sqrt(0.016 + 0.009604)) / 1.384146
    = (0.992073 -+ 0.313613) / 1.384146.
    0 of 10: the centre equals the half width, 0.192073, so from 0 to 0.384146 / 1.384146 = z^2 / (n + z^2).
    """
    near(wilson_interval(8, 10), (0.490162, 0.943318))
    assert wilson_interval(0, 10) == pytest.approx(
        (0.0, 3.841459 / 13.841459), rel=1e-6, abs=1e-12
    )
    low, high = wilson_interval(10, 10)
    assert low == pytest.approx(10 / 13.841459) and high == 1.0
    assert all(
        0.0 <= end <= 1.0
        for n in range(1, 60)
        for k in range(n + 1)
        for end in wilson_interval(k, n)
    )
    assert all(math.isnan(end) for end in wilson_interval(0, 0))
    for correct, n in ((3, 2), (-1, 2)):
        with pytest.raises(ValueError):
            wilson_interval(correct, n)


def test_mean_rank_by_hand():
    """Ranks on the three data sets: a 1, 1.5, 3; b 2, 1.5, 1; c 3, 3, 2. Means 5.5/3, 4.5/3, 8/3."""
    table = {"a": [0.9, 0.8, 0.1], "b": [0.8, 0.8, 0.3], "c": [0.7, 0.5, 0.2]}
    expected = {"a": 5.5 / 3, "b": 4.5 / 3, "c": 8 / 3}
    assert mean_rank(table) == pytest.approx(expected)
    # A data set with a gap is left out for all, not only where the gap is.
    gap = {"a": [*table["a"], math.nan], "b": [*table["b"], 0.1], "c": [*table["c"], 0.9]}
    assert mean_rank(gap) == pytest.approx(expected)
    assert all(math.isnan(rank) for rank in mean_rank({"a": [math.nan], "b": [0.1]}).values())
    assert mean_rank({}) == {}
    fails(ValueError, r"lists of \[1, 2\] values", mean_rank, {"a": [0.1], "b": [0.1, 0.2]})
