"""Tasks: losses and metrics against definitions, by hand, and scikit-learn's; intervals against what they promise."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from failing import fails
from near import near
from sklearn.metrics import (
    cohen_kappa_score,
    mean_absolute_error,
    r2_score,
    roc_auc_score,
    root_mean_squared_error,
)
from torch.nn.functional import one_hot

from models.intervals import areas, of_area, of_few, of_pairs, of_share
from models.metrics import LOSSES, METRICS, RANGES, classification_metrics
from models.tasks import (
    ENDS,
    TASKS,
    VOID,
    binary_loss,
    concordance,
    cox_loss,
    pixel_losses,
    segmentation_loss,
    square_loss,
    task_of,
)

RNG = np.random.default_rng(5)


def tensor(values, dtype=torch.float64):
    return torch.tensor(np.asarray(values), dtype=dtype)


# What every task has

OUTPUTS = {
    "multiclass": (
        tensor(RNG.normal(size=(30, 3))),
        tensor(RNG.integers(0, 3, 30), torch.int64),
    ),
    "ordinal": (tensor(RNG.normal(size=(30, 4))), tensor(RNG.integers(0, 4, 30), torch.int64)),
    "multilabel": (tensor(RNG.normal(size=(30, 5))), tensor(RNG.integers(0, 2, (30, 5)))),
    "regression": (tensor(RNG.normal(size=(30, 2))), tensor(RNG.normal(size=(30, 2)))),
    "survival": (
        tensor(RNG.normal(size=(30, 1))),
        tensor(np.column_stack([RNG.integers(0, 20, 30), RNG.integers(0, 2, 30)])),
    ),
    "segmentation": (
        tensor(RNG.normal(size=(6, 3, 5, 4))),
        tensor(RNG.integers(0, 3, (6, 5, 4)), torch.int64),
    ),
}


TRUE_OUTPUTS = {
    "multiclass": one_hot,
    "ordinal": one_hot,
    "multilabel": lambda y: 2 * y - 1,
    "regression": lambda y: y,
    "survival": lambda y: -y[:, :1],
    "segmentation": lambda y: one_hot(y).movedim(-1, 1),
}


@pytest.mark.parametrize("name", TASKS)
def test_metrics_are_those_that_are_named_and_in_their_range(name):
    task = task_of(name)
    outputs, y = OUTPUTS[name]
    found = task.measure(outputs, y)
    assert (
        tuple(found) == task.metrics
        and task.score in found
        and set(task.secondary_metrics) <= set(found)
    )
    assert bool(task.secondary_text) == bool(task.secondary_metrics), (
        "the report says what they are"
    )
    for metric, value in found.items():
        low, high = RANGES.get(metric, (0.0, 1.0))
        assert low <= value <= high, (metric, value)
    if ENDS[0] in found:
        assert found["score_low"] < found[task.score] < found["score_high"]


@pytest.mark.parametrize("name", TASKS)
def test_less_of_a_loss_is_better_and_of_no_other_metric(name):
    """The true answers against their opposite: what is less for them is a loss."""
    _, y = OUTPUTS[name]
    task, answers = task_of(name), TRUE_OUTPUTS[name](y).double()
    true, opposite = task.measure(answers, y), task.measure(-answers, y)
    assert {m for m in true if true[m] < opposite[m]} == {*task.metrics} & {*LOSSES}


@pytest.mark.parametrize("name", TASKS)
def test_without_samples_nothing_is_known(name):
    outputs, y = OUTPUTS[name]
    found = task_of(name).measure(outputs[:0], y[:0])
    assert set(found) == set(task_of(name).metrics) and all(map(math.isnan, found.values()))


@pytest.mark.parametrize(
    "name", [name for name, task in TASKS.items() if not task.single_label]
)
def test_losses_have_the_gradient_of_differences(name):
    outputs, y = OUTPUTS[name]
    loss = task_of(name).loss("cross-entropy", 1.0)
    assert torch.autograd.gradcheck(lambda o: loss(o, y), outputs.clone().requires_grad_())
    with pytest.raises(ValueError, match=f"loss = focal: {name} has one loss of its own"):
        task_of(name).loss("focal", 1.0)


def test_classes_are_measured_as_ever():
    outputs, y = OUTPUTS["multiclass"]
    assert task_of("multiclass").measure(outputs, y) == classification_metrics(outputs, y)
    assert task_of("multiclass").metrics == METRICS


def test_unknown_tasks_and_too_few_outputs():
    fails(
        ValueError, "unknown task 'grading'; there are: multiclass, ordinal", task_of, "grading"
    )
    for name, outputs in (
        ("multiclass", 1),
        ("segmentation", 1),
        ("survival", 2),
        ("multilabel", 0),
    ):
        fails(ValueError, f"not {outputs}", task_of(name).check_outputs, outputs)


# Grades


def test_grades_against_scikit_learn():
    outputs, y = OUTPUTS["ordinal"]
    found = task_of("ordinal").measure(outputs, y)
    said = outputs.argmax(1).numpy()
    near(found["kappa"], cohen_kappa_score(y, said, weights="quadratic"), 1e-12)
    near(found["mae"], mean_absolute_error(y, said), 1e-12)
    assert found["accuracy"] == classification_metrics(outputs, y)["accuracy"]
    one = task_of("ordinal").measure(tensor([[1.0, 0.0]] * 3), tensor([0, 0, 0], torch.int64))
    assert math.isnan(one["kappa"]) and one["mae"] == 0


# Findings


def test_findings_by_hand():
    """Of the second finding nobody knows the first sample's, and the third has one kind only.

    AUC of the first: scores 2, 1, -1 with positives 2 and -1: of two pairs one is right, 1/2; of the second: 1 > 0: 1;
    of the third there is none. Accuracy at 0.5: 1/3, 1, 1. F1: positives {0, 2}, said {0, 1}: 2 / 4; second: 1; third:
    no positive, none said. Loss: mean of 8 known labels' softplus(z) - y z.
    """
    outputs = tensor([[2, 5, -1], [1, 1, -1], [-1, -1, -1]])
    y = tensor([[1, -1, 0], [0, 1, 0], [1, 0, 0]])
    found = task_of("multilabel").measure(outputs, y)
    assert found["auc"] == pytest.approx((1 / 2 + 1) / 2)
    assert found["accuracy"] == pytest.approx((1 / 3 + 1 + 1) / 3)
    assert found["macro_f1"] == pytest.approx((1 / 2 + 1) / 2)
    known = [(2, 1), (1, 0), (-1, 1), (1, 1), (-1, 0), (-1, 0), (-1, 0), (-1, 0)]
    loss = sum(math.log1p(math.exp(z)) - label * z for z, label in known) / 8
    assert found["loss"] == pytest.approx(loss) == float(binary_loss(outputs, y))


def test_findings_are_medmnists_official_auc():
    """Its evaluator takes the mean of the findings' `roc_auc_score`; `accuracy` its ACC, at a probability of 0.5."""
    outputs, y = OUTPUTS["multilabel"]
    found = task_of("multilabel").measure(outputs, y)
    each = [roc_auc_score(y[:, k], torch.sigmoid(outputs[:, k])) for k in range(5)]
    near(found["auc"], np.mean(each), 1e-12)
    right = (torch.sigmoid(outputs) > 0.5) == (y == 1)
    near(found["accuracy"], float(right.double().mean(0).mean()), 1e-12)


def test_always_no_is_accurate_and_worth_nothing():
    y = (torch.rand(400, 14, generator=torch.Generator().manual_seed(1)) < 0.05).double()
    found = task_of("multilabel").measure(torch.full((400, 14), -3.0, dtype=torch.float64), y)
    assert found["accuracy"] > 0.93 and found["auc"] == 0.5 and found["macro_f1"] == 0


def test_one_kind_only_has_no_area():
    found = task_of("multilabel").measure(tensor([[1.0], [2.0]]), tensor([[1.0], [1.0]]))
    assert (
        all(math.isnan(found[metric]) for metric in ("auc", *ENDS)) and found["accuracy"] == 1
    )


def test_labels_that_nobody_knows_have_no_gradient():
    outputs = torch.zeros(2, 2, requires_grad=True)
    binary_loss(outputs, torch.tensor([[1.0, -1.0], [-1.0, -1.0]])).backward()
    assert outputs.grad is not None and torch.equal(
        outputs.grad, torch.tensor([[-0.5, 0.0], [0.0, 0.0]])
    )
    assert float(binary_loss(torch.zeros(1, 2), torch.full((1, 2), -1.0))) == 0


# Measurements


def test_measurements_against_scikit_learn_in_their_own_units():
    outputs, y = OUTPUTS["regression"]
    mean, std = (100.0, -3.0), (20.0, 0.5)
    found = task_of("regression", mean, std).measure(outputs, y)
    said, truth = outputs.numpy() * std + mean, y.numpy() * std + mean
    near(found["r2"], r2_score(truth, said), 1e-9)
    near(found["mae"], mean_absolute_error(truth, said), 1e-9)
    near(found["rmse"], root_mean_squared_error(truth, said), 1e-9)
    assert found["loss"] == pytest.approx(float((outputs - y).square().mean()))
    names, rows = task_of("regression", mean, std).answers(outputs.float())
    assert names == ["y_0", "y_1"] and np.allclose(rows, said, rtol=1e-5)


def test_measurements_that_do_not_vary_have_no_r2():
    found = task_of("regression").measure(tensor([[1.0], [2.0]]), tensor([[1.0], [1.0]]))
    assert all(math.isnan(found[metric]) for metric in ("r2", *ENDS)) and found["mae"] == 0.5
    both = task_of("regression").measure(
        tensor([[1.0, 0], [2.0, 1]]), tensor([[1.0, 0], [1.0, 1]])
    )
    assert both["r2"] == 1  # of the one that varies
    with pytest.raises(ValueError, match=r"outputs \(2, 1\) for labels \(2,\)"):
        square_loss(torch.zeros(2, 1), torch.zeros(2))


# Survival


def cox_by_definition(s, time, event):
    terms = [
        s[i] - math.log(sum(math.exp(s[j]) for j in range(len(s)) if time[j] >= time[i]))
        for i in range(len(s))
        if event[i]
    ]
    return -sum(terms) / max(len(terms), 1)


def test_cox_loss_by_definition_with_ties():
    outputs, y = OUTPUTS["survival"]
    wanted = cox_by_definition(outputs[:, 0].tolist(), y[:, 0].tolist(), y[:, 1].int().tolist())
    assert len(set(y[:, 0].tolist())) < 25  # there are ties
    near(float(cox_loss(outputs, y)), wanted, 1e-12)
    turned = torch.randperm(30, generator=torch.Generator().manual_seed(3))
    near(float(cox_loss(outputs[turned], y[turned])), wanted, 1e-12)


def test_cox_loss_without_an_event_has_no_gradient():
    outputs = torch.randn(5, 1, requires_grad=True)
    loss = cox_loss(outputs, torch.tensor([[float(t), 0.0] for t in range(5)]))
    loss.backward()
    assert loss.detach().item() == 0 and outputs.grad is not None and not outputs.grad.any()


def test_where_the_order_is_certain_rounding_leaves_no_gradient():
    """One event is alone in its risk set, the other ahead by 58. Adam makes whole steps of gradients over 1e-8."""
    outputs = torch.tensor([[-20.3], [61.7], [3.0]], requires_grad=True)
    loss = cox_loss(outputs, torch.tensor([[3.0, 1.0], [2.0, 1.0], [1.0, 0.0]]))
    assert torch.autograd.grad(loss, outputs)[0].abs().max() < 1e-12


def concordance_by_definition(risk, time, event):
    right, pairs = 0.0, 0
    for i, j in itertools.permutations(range(len(risk)), 2):
        if event[i] and (time[i] < time[j] or (time[i] == time[j] and not event[j])):
            pairs += 1
            right += 1.0 if risk[i] > risk[j] else 0.5 if risk[i] == risk[j] else 0.0
    return right, pairs


def test_concordance_by_definition():
    for _ in range(20):
        risk = RNG.integers(0, 6, 12).astype(float)
        time = RNG.integers(0, 8, 12)
        event = RNG.random(12) < 0.6
        concordant, comparable = concordance(risk, time, event)
        right, pairs = concordance_by_definition(risk, time, event)
        assert concordant.sum() == pytest.approx(2 * right) and comparable.sum() == 2 * pairs


def test_survival_by_hand():
    """Events at 1 and 3, censored at 2 and 4: comparable are (1,2), (1,3), (1,4), (3,4). Risks 2, 5, 1, 0: 2 < 5 is
    wrong, the others are right: 3/4. Without an event before somebody's time there is nothing to compare.
    """
    y = tensor([[1, 1], [2, 0], [3, 1], [4, 0]])
    assert (
        task_of("survival").measure(tensor([[2.0], [5.0], [1.0], [0.0]]), y)["c_index"] == 0.75
    )
    nobody = task_of("survival").measure(tensor([[2.0], [5.0]]), tensor([[1, 0], [2, 0]]))
    assert (
        all(math.isnan(nobody[metric]) for metric in ("c_index", *ENDS)) and nobody["loss"] == 0
    )


# Outlines


def masks(said, truth, classes=3):
    """Pictures of one row of pixels: outputs that say so, and labels."""
    chosen, y = (tensor(rows, torch.int64).unsqueeze(1) for rows in (said, truth))
    return 10 * torch.nn.functional.one_hot(chosen, classes).movedim(-1, 1).double(), y


def test_dice_by_hand():
    """First picture: class 1 has 2 pixels, said 3, 2 in common: 4/5; class 2 nobody has: 4/5. Second: class 1 is
    missed: 0; class 2 is right: 1; 1/2. Third: nothing there, nothing said: it does not count. Fourth: the pixel that
    does not count would have been wrong: 1.
    """
    outputs, y = masks(
        [[1, 1, 1, 0], [0, 0, 2, 2], [0, 0, 0, 0], [1, 1, 0, 0]],
        [[1, 1, 0, 0], [1, 0, 2, 2], [0, 0, 0, 0], [1, VOID, 0, 0]],
    )
    found = task_of("segmentation").measure(outputs, y)
    assert found["dice"] == pytest.approx((0.8 + 0.5 + 1) / 3)
    alone = task_of("segmentation").measure(outputs[2:3], y[2:3])
    assert math.isnan(alone["dice"]) and alone["loss"] < 0.01


def test_pixel_losses_by_hand():
    """Two pixels, two classes, p of class 1: 1/2 and 3/4, labels 1 and 0: cross-entropy (ln 2 + ln 4) / 2, soft Dice
    (2 * 1/2 + 1) / (5/4 + 1 + 1) = 8/13. Where the second does not count: ln 2, and (1 + 1) / (1/2 + 1 + 1) = 4/5.
    """
    outputs = tensor([[[[0.0, 0.0]], [[0.0, math.log(3)]]]])
    both = pixel_losses(outputs, torch.tensor([[[1, 0]]]))
    assert both.tolist() == pytest.approx([(math.log(2) + math.log(4)) / 2 + 5 / 13])
    one = pixel_losses(outputs, torch.tensor([[[1, VOID]]]))
    assert one.tolist() == pytest.approx([math.log(2) + 1 / 5])
    two = segmentation_loss(outputs.repeat(2, 1, 1, 1), torch.tensor([[[1, 0]], [[1, VOID]]]))
    assert float(two) == pytest.approx(float(both + one) / 2)


# Intervals


def test_delongs_variance_by_definition():
    """S10 / n+ + S01 / n-, from the placements of every sample (DeLong et al. 1988, equations 4 to 6)."""
    scores, positive = RNG.normal(size=40).round(1), RNG.random(40) < 0.4
    scores[positive] += 1
    area, effects, _ = areas(scores, positive)
    x, y = scores[positive], scores[~positive]
    wins = np.where(x[:, None] > y, 1.0, np.where(x[:, None] == y, 0.5, 0.0))
    assert area == pytest.approx(wins.mean())
    wanted = wins.mean(1).var(ddof=1) / len(x) + wins.mean(0).var(ddof=1) / len(y)
    assert (effects**2).sum() == pytest.approx(wanted)


def test_a_perfect_area_is_not_certain():
    """Wilson's interval of 8 out of 8: from 1 / (1 + 1.96^2 / 8) = 0.6756."""
    near(of_area(1.0, 0.0, 8, 30), (0.6756, 1), 1e-4)
    near(of_area(0.0, 0.0, 30, 8), (0, 1 - 0.6756), 1e-4)
    assert all(map(math.isnan, of_area(math.nan, 0.0, 0, 8)))


def test_leaving_out_one_after_the_other():
    """The jackknife's variance, from shares that are computed anew without each sample."""
    risk = RNG.normal(size=15)
    time = RNG.permutation(15).astype(float)
    event = RNG.random(15) < 0.7
    share, (low, high) = of_pairs(*concordance(risk, time, event))
    without = []
    for i in range(15):
        rest = np.arange(15) != i
        right, pairs = concordance_by_definition(risk[rest], time[rest], event[rest])
        without.append(right / pairs)
    variance = 14 / 15 * ((np.array(without) - np.mean(without)) ** 2).sum()
    pairs, most = (count(concordance(risk, time, event)[1]) for count in (np.sum, np.max))
    variance += of_few(share, variance, pairs / 2 / most)
    assert (low, high) == pytest.approx(of_share(share, variance, 15))


def test_a_single_positive_shows_no_variance():
    """Hanley and McNeil's a^2 (1 - a) / (1 + a), with a = .75 by symmetry; of two, V counts a third."""
    for area in (0.25, 0.75):
        assert of_few(area, 0.0, 1) == pytest.approx(0.75**2 * 0.25 / 1.75)
        assert of_few(area, 0.01, 2) == pytest.approx((0.75**2 * 0.25 / 1.75 - 0.02) / 3)
    near(of_few(1.0, 0.0, 1), 4 / 9 / 5)
    time, event = np.arange(50.0), np.arange(50) < 1
    for risk in (-np.abs(time - 40), -time):  # later risks below and above the single event's
        low, high = of_pairs(*concordance(risk, time, event))[1]
        assert high - low > 0.6


@pytest.mark.parametrize(
    "positives, negatives, true",
    [(1, 50, 0.76), (2, 50, 0.76), (20, 80, 0.76), (10, 30, 0.86), (8, 8, 0.96)],
)
def test_areas_intervals_hold_the_truth(positives, negatives, true):
    """Of 400 draws of normal scores whose area is ``true``, at least 93 in 100 intervals of 95 % hold it."""
    rng = np.random.default_rng(11)
    shift = {0.76: 0.999, 0.86: 1.528, 0.96: 2.476}[true]
    positive = np.arange(positives + negatives) < positives
    held = 0
    for _ in range(400):
        area, effects, few = areas(rng.normal(size=len(positive)) + shift * positive, positive)
        low, high = of_area(area, float((effects**2).sum()) + few, positives, negatives)
        held += low <= true <= high
    assert held >= 0.93 * 400
