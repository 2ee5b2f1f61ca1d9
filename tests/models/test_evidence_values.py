"""Evidence of one measurement against scipy, scikit-learn and numpy, to 1e-9, and what leaves of it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import MetricRecord
from scipy import stats
from sklearn.metrics import mean_absolute_error, root_mean_squared_error
from tiny import federate
from torch import nn

from models.evidence.calibration import groups_of
from models.evidence.measure import EVIDENCE, Ask, conformal_intervals, evidence_of
from models.evidence.subgroups import subgroup_scores
from models.evidence.values import agreement, half_width, interval_shares, recalibration, value_bins
from models.flat import FlatModel
from models.samples import Samples
from models.tasks import task_of
from partitions.common.errors import DataError
from strategies.base.schema.evidence import read_evidence

TINY = 1e-9
MEAN, STD = 40.0, 8.0


def pairs(n: int = 90) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(35)
    said = rng.normal(MEAN, STD, n)
    return said, 12 + 0.8 * said + rng.normal(0, 3, n)


def test_recalibration_is_scipys() -> None:
    said, truth = pairs()
    found = stats.linregress(said, truth)
    assert recalibration(said, truth) == pytest.approx((found.intercept, found.slope), abs=TINY)
    a, b = np.linalg.lstsq(np.column_stack([np.ones_like(said), said]), truth, rcond=None)[0]
    assert recalibration(said, truth) == pytest.approx((a, b), abs=1e-8)
    assert recalibration(a + b * said, truth) == pytest.approx((0, 1), abs=1e-8)
    assert all(math.isnan(v) for v in recalibration(np.full(9, 3.7), truth[:9]))


def test_limits_of_agreement() -> None:
    """As numpy has mean and standard deviation; about 95 % of normal differences lie between."""
    said, truth = pairs(4000)
    mean, low, high = agreement(said, truth)
    assert mean == pytest.approx(np.mean(truth - said), abs=TINY)
    assert (high - low) / 2 == pytest.approx(1.96 * np.std(truth - said, ddof=1), abs=TINY)
    assert np.mean((low < truth - said) & (truth - said < high)) == pytest.approx(0.95, abs=0.01)


@pytest.mark.parametrize("least", [1, 10, 40])
def test_bins_hold_equal_numbers(least: int) -> None:
    said, truth = pairs()
    rows = np.array(value_bins(said, truth, least)).reshape(-1, 4)
    own = groups_of(said, least)
    assert rows[:, 0].sum() == 90 and rows[:, 0].min() >= least and len(rows) == {1: 10, 10: 9, 40: 2}[least]
    for k, (n, predicted, observed, error) in enumerate(rows):
        assert n == (own == k).sum() and error == pytest.approx(mean_absolute_error(truth[own == k], said[own == k]))
        assert [predicted, observed] == pytest.approx([said[own == k].mean(), truth[own == k].mean()], abs=TINY)


@pytest.mark.parametrize("n", [9, 10, 37, 200])
def test_the_half_width_is_numpys_quantile(n: int) -> None:
    errors = np.abs(np.random.default_rng(n).normal(size=n))
    level = min(math.ceil((n + 1) * 0.9) / n, 1.0) - 1e-12
    assert half_width(errors) == pytest.approx(np.quantile(errors, level, method="inverted_cdf"), abs=TINY)
    assert math.isnan(half_width(errors[:8]))  # no half width of eight errors holds 90 %


def test_intervals_cover_nine_in_ten() -> None:
    """Over many draws the own half width covers 90 % or more; between own and common lies the shrunk one."""
    rng = np.random.default_rng(5)
    each = np.array([interval_shares(np.abs(rng.normal(size=40)), np.arange(40), 1.0) for _ in range(2000)])
    assert set(each[:, 0]) == {20} and 0.9 <= each[:, 1].mean() < 0.93
    own, common, shrunk = each[:, 2], each[:, 4], each[:, 6]
    assert (common == 2).all() and shrunk == pytest.approx((20 * own + 19 * common) / 39, abs=TINY)


def samples_of(said: np.ndarray, truth: np.ndarray) -> tuple[Any, FlatModel, Samples]:
    """The network's output is its input, in standard deviations."""
    layer = nn.Linear(1, 1, bias=False)
    layer.weight.data = torch.ones(1, 1)
    x = ((said - MEAN) / STD).astype(np.float32)[:, None]
    y = ((truth - MEAN) / STD).astype(np.float32)[:, None]
    return task_of("regression", [MEAN], [STD]), FlatModel(nn.Sequential(layer)), Samples(x, y)


def test_evidence_is_in_the_measurements_unit() -> None:
    said, truth = pairs()
    task, model, samples = samples_of(said, truth)
    found = evidence_of(task, model, samples, samples, np.arange(len(samples)), Ask(least=10))
    line = stats.linregress(said, truth)
    assert found["calibration_slope"] == pytest.approx(line.slope, abs=1e-5)
    assert found["calibration_intercept"] == pytest.approx(line.intercept, abs=1e-3)
    assert found["calibration_in_the_large"] == pytest.approx((truth - said).mean(), abs=1e-5)
    n, half = found["conformal_width"]  # type: ignore[misc]
    assert (n, half) == (45, pytest.approx(half_width(np.abs(truth - said)[::2]), abs=1e-5))
    sets = conformal_intervals(task, model, samples, np.arange(90), 4.0)["conformal_intervals"]
    expected = interval_shares(np.abs(truth - said), np.arange(90), 4.0)
    assert sets == pytest.approx(expected, abs=1e-4)
    read = read_evidence(MetricRecord({**found, "conformal_intervals": sets}))
    assert read.keys() == {*found, "conformal_intervals"}
    assert "conformal_width" not in evidence_of(task, model, samples, samples, np.arange(len(samples)), Ask(least=46))


def test_several_measurements_have_none() -> None:
    task = task_of("regression", [0.0, 0.0], [1.0, 1.0])
    samples = Samples(np.zeros((30, 2), np.float32), np.zeros((30, 2), np.float32))
    model = FlatModel(nn.Sequential(nn.Linear(2, 2)))
    assert evidence_of(task, model, samples, samples, np.arange(len(samples)), Ask()) == {}


def test_subgroups_have_errors_in_units() -> None:
    said, truth = pairs()
    groups = np.repeat(["f", "m"], (50, 40))
    task, model, samples = samples_of(said, truth)
    found = subgroup_scores(task, model, samples, groups, None, 10)
    for name in ("f", "m"):
        rows, (n, mae, low, high, rmse) = groups == name, found[f"subgroup.{name}"]  # type: ignore[misc]
        assert (n, mae) == (rows.sum(), pytest.approx(mean_absolute_error(truth[rows], said[rows]), abs=1e-5))
        assert low < mae < high and rmse == pytest.approx(root_mean_squared_error(truth[rows], said[rows]), abs=1e-5)
    assert subgroup_scores(task, model, samples, np.repeat(["f", "m"], (85, 5)), None, 10) == {}


SPOILT: dict[str, dict[str, Any]] = {
    "'agreement' is out of range": {"agreement": [10.0, 2.0, 3.0, 4.0]},
    "'value_bins' is out of range": {"value_bins": [10.0, 2.0, 3.0]},
    "'conformal_width' is out of range": {"conformal_width": [10.0, -1.0]},
    "'conformal_intervals' is out of range": {"conformal_intervals": [10.0, 1.1, 1.0, 1.0, 1.0, 1.0, 1.0]},
    "'subgroup.f' is out of range": {"subgroup.f": [10.0, 1.0, 0.5, -2.0, 3.0]},
}


@pytest.mark.parametrize("reason", SPOILT)
def test_the_server_takes_no_nonsense(reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        read_evidence(MetricRecord(SPOILT[reason]))


def measuring(folder: Path, sizes: dict[str, int]) -> dict[str, Path]:
    rng, files = np.random.default_rng(3), {}
    for name, tested in sizes.items():
        arrays: dict[str, Any] = {}
        for part in ("train", "val", "test"):
            n = tested if part == "test" else 60
            arrays[f"x_{part}"] = rng.normal(size=(n, 3)).astype(np.float32)
            arrays[f"y_{part}"] = (60 + 9 * arrays[f"x_{part}"][:, 0] + rng.normal(0, 3, n)).astype(np.float32)
        np.savez(folder / f"{name}.npz", **arrays)
        files[name] = folder / f"{name}.npz"
    return files


def test_hospitals_send_it_as_their_policy_says(tmp_path: Path) -> None:
    """By default nothing; then the words listed; c has too few test samples for anything."""
    files = measuring(tmp_path, {"a": 60, "b": 50, "c": 8})
    policy, given = tmp_path / "policy.toml", {"strategy": "fedavg", "rounds": 3, "evidence": "on"}
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
        changes: dict[str, Any] = {"state_dir": tmp_path / f"state{i}", "policy": str(policy), "learning_rate": 0.1}
        found = federate(files, **given, **changes).federation.evidence
        assert [set(found[name]) for name in files] == [expected, expected, set()]
    widths = [found[name]["conformal_intervals"] for name in "ab"]
    assert widths[0][4] == widths[1][4] > 0  # type: ignore[index]
