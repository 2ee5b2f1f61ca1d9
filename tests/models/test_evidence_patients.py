"""Evidence counts patients: a server that chooses the model puts one patient's records into a bin of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from evidence import evidence
from hypothesis import given
from hypothesis import strategies as st
from tiny import federate
from torch import nn

from models.evidence.calibration import groups_of, reliability
from models.evidence.measure import EVIDENCE
from models.evidence.subgroups import subgroup_scores
from models.evidence.survival import risk_bins
from models.evidence.values import enough, value_bins
from models.flat import FlatModel
from models.samples import Samples
from models.tasks import task_of

LEAST = 10
RECORDS = 12  # of the patient whom the server is after
OTHERS = 108
UNITS = np.concatenate([np.arange(OTHERS), np.full(RECORDS, OTHERS)])
# The crafted model's predictions
SAID = np.concatenate([np.linspace(0.1, 0.6, OTHERS), np.full(RECORDS, 0.9)])


def test_a_bin_of_one_patients_records_joins_its_neighbour():
    """Counted as samples, the last bin has the patient's records alone, and so the label."""
    for label in (0.0, 1.0):
        event = np.concatenate([np.arange(OTHERS) % 2, np.full(RECORDS, label)]).astype(float)
        alone = reliability(SAID, event, LEAST)
        assert (alone.counts[-1], alone.observed[-1]) == (RECORDS, label)
        bins = reliability(SAID, event, LEAST, UNITS)
        assert bins.counts[-1] == 24 and bins.observed[-1] == pytest.approx(
            (6 + RECORDS * label) / 24
        )
        assert bins.counts[:-1].tolist() == alone.counts[:-2].tolist()
    rows = np.array(value_bins(SAID, SAID, LEAST, UNITS)).reshape(-1, 4)
    assert (
        rows[-1, 0] == 24
        and np.array(value_bins(SAID, SAID, LEAST)).reshape(-1, 4)[-1, 0] == RECORDS
    )


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=60),
    st.integers(1, 25),
    st.integers(0, 2**32 - 1),
)
def test_no_bin_is_of_fewer_patients(records, least, seed):
    """However many records each patient has; with too few patients one bin is left, which egress keeps."""
    units = np.repeat(np.arange(len(records)), records)
    own = groups_of(np.random.default_rng(seed).random(len(units)).round(1), least, units)
    counts = [len(np.unique(units[own == k])) for k in range(own.max() + 1)]
    assert min(counts) >= min(least, len(records)) and (
        len(records) >= least or len(counts) == 1
    )


def test_events_of_survival_are_counted_by_patient():
    """The group with the highest risk has twelve events of one patient, and those without one are of many."""
    time = np.concatenate([np.tile([1.0, 99.0], 54), np.full(12, 5.0), np.full(12, 99.0)])
    event = (time < 99).astype(float)
    risk = np.concatenate([np.linspace(0.1, 0.6, 108), np.full(24, 0.9)])
    units = np.concatenate([np.arange(108), np.full(12, 200), np.arange(300, 312)])
    assert risk_bins(risk, time, event, 50.0, LEAST, np.arange(132)).counts[-1] == 22
    of_patients = risk_bins(risk, time, event, 50.0, LEAST, units).counts
    assert of_patients[-1] == 44 and of_patients.sum() == 132


def test_findings_of_one_sample_are_one():
    """Twenty findings of one sample have the highest probabilities: as labels they would be a bin of their own."""
    x = np.concatenate([np.linspace(-2, 0, 19), [4.0]]).astype(np.float32)[:, None]
    layer = nn.Linear(1, 20, bias=False)
    layer.weight.data.fill_(1.0)
    samples = Samples(x, np.tile([0.0, 1.0], (20, 10)).astype(np.float32))
    found = evidence(
        task_of("multilabel"), FlatModel(nn.Sequential(layer)), samples, least=LEAST
    )
    assert np.reshape(found["reliability"], (-1, 3))[:, 0].tolist() == [200, 200]


def pictures(masked, n=120):
    """Pictures of two pixels, outlined in the first ``masked`` ones; the network outlines nothing."""
    masks = np.zeros((n, 1, 2), np.uint8)
    masks[:masked, 0, 0] = 1
    conv = nn.Conv2d(1, 2, 1)
    conv.weight.data.zero_()
    conv.bias = nn.Parameter(torch.tensor([1.0, 0.0]))
    return FlatModel(nn.Sequential(conv)), Samples(np.zeros((n, 1, 2, 1), np.float32), masks)


def test_cases_are_counted_by_patient():
    """Twelve cases are the worst tenth; six of the cases of a subgroup have any Dice."""
    task, (model, samples) = task_of("segmentation"), pictures(120)
    for units, there in ((np.arange(120), True), (np.arange(120) // 12, False)):
        assert bool(evidence(task, model, samples, units, least=LEAST)) == there
    groups = np.repeat(["a", "b"], 60)
    assert set(subgroup_scores(task, model, samples, groups, None, LEAST)) == {
        "subgroup.a",
        "subgroup.b",
    }
    model, samples = pictures(66)
    assert subgroup_scores(task, model, samples, groups, None, LEAST) == {}


def test_both_halves_have_enough_patients():
    assert (
        enough(np.arange(20), 10)
        and not enough(np.arange(19), 10)
        and not enough(np.arange(100) // 10, 6)
    )


def of_patients(folder, records):
    """A hospital whose test part has 120 samples, so many of each patient, which are alike."""
    rng, arrays = np.random.default_rng(1), dict[str, Any]()
    for k, part in enumerate(("train", "val", "test")):
        x = rng.normal(size=(120, 1)).astype(np.float32)
        own = x[:, 0].argsort().argsort() // (records if part == "test" else 1)
        arrays |= {
            f"x_{part}": x,
            f"y_{part}": (x[:, 0] > 0).astype(int),
            f"patient_{part}": own + 1000 * k,
        }
    np.savez(folder / "a.npz", classes=np.array(2), **arrays)
    return {"a": folder / "a.npz"}


@pytest.mark.parametrize(
    "records, bins, lists",
    [
        (15, 0, set()),
        (7, 1, {"net_benefit", "reliability"}),
        (2, 5, {"net_benefit", "reliability", "conformal"}),
    ],
    ids=["8 patients", "18 patients", "60 patients"],
)
def test_what_leaves_a_hospital_is_over_patients(tmp_path, records, bins, lists):
    """Eight patients give nothing, no score either; of 18 one half is too small to calibrate."""
    policy = tmp_path / "policy.toml"
    words = ", ".join(f'"{word}"' for word in ("loss", "score", *EVIDENCE))
    policy.write_text(f"metrics = [{words}]\nmin-silos = 1\n")
    given = {"state_dir": tmp_path / "state", "policy": str(policy), "learning_rate": 1.0}
    run = federate(of_patients(tmp_path, records), "fedavg", rounds=2, evidence="on", **given)
    found = run.federation.closing.evidence["a"]
    assert {name for name, value in found.items() if isinstance(value, list)} == lists
    assert ("brier" in found) == bool(lists)
    rows = np.reshape(found.get("reliability", []), (-1, 3))
    assert len(rows) == bins and (rows[:, 0] >= records * (LEAST - 1)).all()
    scores = [row.value for row in run.rows if row.metric == "accuracy" and row.split == "test"]
    assert scores and np.isnan(scores).all() == (not lists)
