"""Evidence of one measurement against scipy, scikit-learn and numpy, to 1e-9, and what leaves of it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from evidence import evidence
from failing import fails
from flwr.app import MetricRecord
from near import near
from scipy import stats
from sklearn.metrics import mean_absolute_error, root_mean_squared_error
from tiny import federate
from torch import nn

from models.evidence.calibration import groups_of
from models.evidence.measure import EVIDENCE, conformal_intervals
from models.evidence.subgroups import subgroup_scores
from models.evidence.values import (
    agreement,
    interval_shares,
    quantile,
    recalibration,
    value_bins,
)
from models.flat import FlatModel
from models.samples import Samples
from models.tasks import task_of
from partitions.common.errors import DataError
from strategies.base.evidence import read_evidence

TINY = 1e-9
MEAN, STD = 40.0, 8.0


def pairs(n=90):
    rng = np.random.default_rng(35)
    said = rng.normal(MEAN, STD, n)
    return said, 12 + 0.8 * said + rng.normal(0, 3, n)


def test_recalibration_is_scipys():
    said, truth = pairs()
    found = stats.linregress(said, truth)
    near(recalibration(said, truth), (found.intercept, found.slope), TINY)
    a, b = np.linalg.lstsq(np.column_stack([np.ones_like(said), said]), truth, rcond=None)[0]
    near(recalibration(said, truth), (a, b), 1e-8)
    near(recalibration(a + b * said, truth), (0, 1), 1e-8)
    assert all(math.isnan(v) for v in recalibration(np.full(9, 3.7), truth[:9]))


def test_limits_of_agreement():
    """As numpy has mean and standard deviation; about 95 % of normal differences lie between."""
    said, truth = pairs(4000)
    mean, low, high = agreement(said, truth)
    near(mean, np.mean(truth - said), TINY)
    near((high - low) / 2, 1.96 * np.std(truth - said, ddof=1), TINY)
    near(np.mean((low < truth - said) & (truth - said < high)), 0.95, 0.01)


@pytest.mark.parametrize("least", [1, 10, 40])
def test_bins_hold_equal_numbers(least):
    said, truth = pairs()
    rows = np.array(value_bins(said, truth, least)).reshape(-1, 4)
    own = groups_of(said, least)
    assert (
        rows[:, 0].sum() == 90
        and rows[:, 0].min() >= least
        and len(rows) == {1: 10, 10: 9, 40: 2}[least]
    )
    for k, (n, predicted, observed, error) in enumerate(rows):
        assert n == (own == k).sum() and error == pytest.approx(
            mean_absolute_error(truth[own == k], said[own == k])
        )
        near([predicted, observed], [said[own == k].mean(), truth[own == k].mean()], TINY)


@pytest.mark.parametrize("n", [9, 10, 37, 200])
def test_the_half_width_is_numpys_quantile(n):
    errors = np.abs(np.random.default_rng(n).normal(size=n))
    level = min(math.ceil((n + 1) * 0.9) / n, 1.0) - 1e-12
    near(quantile(errors), np.quantile(errors, level, method="inverted_cdf"), TINY)
    assert math.isnan(quantile(errors[:8]))  # no half width of eight errors holds 90 %


def test_intervals_cover_nine_in_ten():
    """Over many draws the own half width covers 90 % or more; between own and common lies the shrunk one."""
    rng = np.random.default_rng(5)
    each = np.array(
        [interval_shares(np.abs(rng.normal(size=40)), np.arange(40), 1.0) for _ in range(2000)]
    )
    assert set(each[:, 0]) == {20} and 0.9 <= each[:, 1].mean() < 0.93
    own, common, shrunk = each[:, 2], each[:, 4], each[:, 6]
    assert (common == 2).all() and shrunk == pytest.approx(
        (20 * own + 19 * common) / 39, abs=TINY
    )


def samples_of(said, truth):
    """The network's output is its input, in standard deviations."""
    layer = nn.Linear(1, 1, bias=False)
    layer.weight.data = torch.ones(1, 1)
    x = ((said - MEAN) / STD).astype(np.float32)[:, None]
    y = ((truth - MEAN) / STD).astype(np.float32)[:, None]
    return task_of("regression", [MEAN], [STD]), FlatModel(nn.Sequential(layer)), Samples(x, y)


def test_evidence_is_in_the_measurements_unit():
    said, truth = pairs()
    task, model, samples = samples_of(said, truth)
    found = evidence(task, model, samples, least=10)
    line = stats.linregress(said, truth)
    near(found["calibration_slope"], line.slope, 1e-5)
    near(found["calibration_intercept"], line.intercept, 1e-3)
    near(found["calibration_in_the_large"], (truth - said).mean(), 1e-5)
    n, half = found["conformal_width"]
    assert (n, half) == (45, pytest.approx(quantile(np.abs(truth - said)[::2]), abs=1e-5))
    sets = conformal_intervals(task, model, samples, np.arange(90), [4.0])[
        "conformal_intervals"
    ]
    expected = interval_shares(np.abs(truth - said), np.arange(90), 4.0)
    near(sets, expected, 1e-4)
    read = read_evidence(MetricRecord({**found, "conformal_intervals": sets}))
    assert read.keys() == {*found, "conformal_intervals"}
    assert "conformal_width" not in evidence(task, model, samples, least=46)


# Mean, deviation
UNITS = {"pressure, mmHg": (120.0, 15.0), "glucose v1.2": (5.5, 0.8), "weight": (70.0, 12.0)}


def several(n=90):
    """Predictions and measurements (n, 3), and a network whose outputs these predictions are."""
    rng, mean, std = np.random.default_rng(36), *np.array([*UNITS.values()]).T
    x = rng.normal(size=(n, 3)).astype(np.float32)
    y = (0.8 * x + rng.normal(0, 0.4, (n, 3))).astype(np.float32)
    layer = nn.Linear(3, 3, bias=False)
    layer.weight.data = torch.eye(3)
    task = task_of("regression", mean.tolist(), std.tolist())
    said, truth = (v.astype(float) * std + mean for v in (x, y))
    return said, truth, task, FlatModel(nn.Sequential(layer)), Samples(x, y)


def test_each_of_several_measurements_has_the_oracles_numbers():
    """In its own unit, under the schema's name, which may have dots and blanks."""
    said, truth, task, model, samples = several()
    found = evidence(task, model, samples, least=10, labels=tuple(UNITS))
    assert len(found) == 6 * 3
    halves = [float(found[f"measurement.{name}.conformal_width"][1]) for name in UNITS]
    sets = conformal_intervals(
        task, model, samples, np.arange(90), [2 * v for v in halves], tuple(UNITS)
    )
    for k, name in enumerate(UNITS):
        own = {
            key.removeprefix(f"measurement.{name}."): value
            for key, value in (found | sets).items()
            if name in key
        }
        a, b, error = said[:, k], truth[:, k], np.abs(truth - said)[:, k]
        line, deviation = stats.linregress(a, b), np.std(b - a, ddof=1)
        near(own["calibration_slope"], line.slope, TINY)
        near(own["calibration_intercept"], line.intercept, TINY)
        mean = own["calibration_in_the_large"]
        near(mean, np.mean(b - a), TINY)
        limits = [90, mean, mean - 1.96 * deviation, mean + 1.96 * deviation]
        near(own["agreement"], limits, TINY)
        near(own["value_bins"], value_bins(a, b, 10), TINY)
        level = math.ceil(46 * 0.9) / 45 - 1e-12
        quantile = np.quantile(error[::2], level, method="inverted_cdf")
        assert own["conformal_width"] == [45, pytest.approx(quantile, abs=TINY)]
        assert own["conformal_intervals"] == pytest.approx(
            interval_shares(error, np.arange(90), 2 * halves[k])
        )
        rows = np.array(own["value_bins"]).reshape(-1, 4)
        lowest = np.argsort(a)[:10]
        expected = [
            10,
            a[lowest].mean(),
            b[lowest].mean(),
            mean_absolute_error(b[lowest], a[lowest]),
        ]
        near(rows[0], expected, TINY)


def test_measurements_without_names_have_those_of_predict():
    _, _, task, model, samples = several()
    found = evidence(task, model, samples)
    assert (
        {name.split(".")[1] for name in found}
        == {"y_0", "y_1", "y_2"}
        == set(task.answers(samples.y)[0])
    )


def test_the_server_takes_measurements_by_the_schemas_names():
    """And of each what measurements have: no Brier score, and no name that a silo makes up."""
    _, _, task, model, samples = several()
    found = evidence(task, model, samples, labels=tuple(UNITS))
    assert read_evidence(MetricRecord({**found}), tuple(UNITS)) == found
    spoilt: list[dict[str, Any]] = [
        {"measurement.<b>.calibration_slope": 1.0},
        {"measurement.weight.brier": 0.1},
        {"measurement.calibration_slope": 1.0},
        {"measurement.weight.subgroups": 1.0},
    ]
    for values in spoilt:
        with pytest.raises(DataError, match="no evidence that is known here"):
            read_evidence(MetricRecord(values), tuple(UNITS))
    for key, value in {"calibration_slope": [1.0], "agreement": [10.0, 2.0, 3.0, 4.0]}.items():
        with pytest.raises(DataError, match=f"'measurement.weight.{key}' is"):
            read_evidence(MetricRecord({f"measurement.weight.{key}": value}), tuple(UNITS))


def test_subgroups_have_errors_in_units():
    said, truth = pairs()
    groups = np.repeat(["f", "m"], (50, 40))
    task, model, samples = samples_of(said, truth)
    found = subgroup_scores(task, model, samples, groups, None, 10)
    for name in ("f", "m"):
        rows, (n, mae, low, high, rmse) = groups == name, found[f"subgroup.{name}"]  # type: ignore[misc]
        assert (n, mae) == (
            rows.sum(),
            pytest.approx(mean_absolute_error(truth[rows], said[rows]), abs=1e-5),
        )
        assert low < mae < high and rmse == pytest.approx(
            root_mean_squared_error(truth[rows], said[rows]), abs=1e-5
        )
    assert subgroup_scores(task, model, samples, np.repeat(["f", "m"], (85, 5)), None, 10) == {}


SPOILT: dict[str, dict[str, Any]] = {
    "'agreement' is out of range": {"agreement": [10.0, 2.0, 3.0, 4.0]},
    "'value_bins' is out of range": {"value_bins": [10.0, 2.0, 3.0]},
    "'conformal_width' is out of range": {"conformal_width": [10.0, -1.0]},
    "'conformal_intervals' is out of range": {
        "conformal_intervals": [10.0, 1.1, 1.0, 1.0, 1.0, 1.0, 1.0]
    },
    "'subgroup.f' is out of range": {"subgroup.f": [10.0, 1.0, 0.5, -2.0, 3.0]},
}


@pytest.mark.parametrize("reason", SPOILT)
def test_the_server_takes_no_nonsense(reason):
    fails(DataError, reason, read_evidence, MetricRecord(SPOILT[reason]))


def measuring(folder, sizes, names=()):
    rng, files = np.random.default_rng(3), {}
    for name, tested in sizes.items():
        arrays: dict[str, Any] = {"label_names": np.array(names)} if names else {}
        for part in ("train", "val", "test"):
            n = tested if part == "test" else 60
            arrays[f"x_{part}"] = rng.normal(size=(n, 3)).astype(np.float32)
            y = 60 + 9 * arrays[f"x_{part}"][:, : len(names) or 1] + rng.normal(0, 3, (n, 1))
            arrays[f"y_{part}"] = (y * 10.0 ** np.arange(y.shape[1])).astype(np.float32)
        np.savez(folder / f"{name}.npz", **arrays)
        files[name] = folder / f"{name}.npz"
    return files


def test_hospitals_send_it_as_their_policy_says(tmp_path):
    """By default nothing; then the words listed; c has too few test samples for anything."""
    files = measuring(tmp_path, {"a": 60, "b": 50, "c": 8})
    policy = tmp_path / "policy.toml"
    given = {"strategy": "fedavg", "rounds": 3, "evidence": "on"}
    own = {"calibration_slope", "calibration_intercept", "agreement", "value_bins"}
    for i, (words, expected) in enumerate(
        {
            "": set(),
            ', "calibration_slope", "agreement"': {"calibration_slope", "agreement"},
            "".join(f', "{w}"' for w in EVIDENCE): own
            | {"calibration_in_the_large", "conformal_width", "conformal_intervals"},
        }.items()
    ):
        policy.write_text(f'metrics = ["loss", "score"{words}]\n')
        changes = {
            "state_dir": tmp_path / f"state{i}",
            "policy": str(policy),
            "learning_rate": 0.1,
        }
        found = federate(files, **given, **changes).federation.closing.evidence
        assert [set(found[name]) for name in files] == [expected, expected, set()]
    widths = [found[name]["conformal_intervals"] for name in "ab"]
    assert widths[0][4] == widths[1][4] > 0  # type: ignore[index]


def test_hospitals_send_that_of_each_measurement(tmp_path):
    """By its name in the schema, in its unit; also where a hospital's file has them in another order."""
    files = measuring(tmp_path, {"a": 60, "b": 50, "c": 8}, ("sbp", "dbp"))
    names = ("sbp", "dbp")
    other = dict(np.load(files["b"]))
    np.savez(
        files["b"],
        **other
        | {"label_names": np.array(names[::-1])}
        | {k: v[:, ::-1] for k, v in other.items() if k[0] == "y"},
    )
    policy = tmp_path / "policy.toml"
    given: dict[str, Any] = {
        "strategy": "fedavg",
        "rounds": 3,
        "evidence": "on",
        "learning_rate": 0.1,
    }
    for i, (words, expected) in enumerate(
        {"calibration_slope": 1, '", "'.join(EVIDENCE): 7}.items()
    ):
        policy.write_text(f'metrics = ["loss", "score", "{words}"]\n')
        run = federate(files, **given, state_dir=tmp_path / f"state{i}", policy=str(policy))
        found = run.federation.closing.evidence
        assert [len(found[name]) for name in files] == [2 * expected, 2 * expected, 0]
        assert {key.split(".")[1] for key in found["b"]} == set(names)
    for k, name in enumerate(names):
        key = f"measurement.{name}.conformal_"
        (n, a), (m, b) = (found[silo][f"{key}width"] for silo in "ab")  # type: ignore[misc]
        for silo in "ab":
            assert found[silo][f"{key}intervals"][4] == pytest.approx(  # type: ignore[index]
                2 * (n * a + m * b) / (n + m)
            )
            bins = np.array(found[silo][f"measurement.{name}.value_bins"]).reshape(-1, 4)
            own = np.load(files[silo])["y_test"][:, k if silo == "a" else 1 - k]
            assert bins[:, 0] @ bins[:, 2] / len(own) == pytest.approx(own.mean(), rel=1e-6)
    asked = [m for m, _ in run.grid.traffic if m.metadata.message_type == "evaluate.evidence"]
    sets: Any = asked[-1].content["config"]
    assert len(sets["number.common_threshold"]) == 2
