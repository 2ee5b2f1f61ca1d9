"""Patients in a data file: no division puts one into two parts or two silos, and their numbers decide nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from failing import fails
from flwr.app import Context, RecordDict
from numpy.testing import assert_array_equal
from scans import study_uid, write_dicom
from taken import imported, splits_of, write_lines
from tiny import session_of

from client.app import data_summary
from partitions.importing.options import ImportOptions
from partitions.importing.source import import_source
from partitions.patients import fewest_changed
from partitions.schemes.registry import PARTITIONS, partition
from partitions.silo_file import (
    check_silo_file,
    read_dataset_file,
    read_silo_file,
    write_silo_file,
)
from server.results.manifest import write_partition
from strategies.base.run_settings import parse_settings

PATIENTS = 120
# 1 to 4 samples each, 300 in all
OWNER = np.repeat(np.arange(PATIENTS), np.arange(PATIENTS) % 4 + 1)


def arrays(**changes):
    """A table of one column, whose values say whose each sample is: 100 * patient + number."""
    x = (100 * OWNER + np.arange(len(OWNER)) % 7)[:, np.newaxis].astype(np.float32)
    return {"x": x, "y": OWNER % 3, "patient": OWNER, **changes}


def in_parts(**changes):
    """The same with parts of its own: patients below 90 for training."""
    whole = arrays()
    train = OWNER < 90
    made = {f"{key}_train": value[train] for key, value in whole.items()}
    return {**made, **{f"{key}_test": value[~train] for key, value in whole.items()}, **changes}


@pytest.fixture
def file(tmp_path):
    return tmp_path / "ours.npz"


def save(path, content):
    kept: dict[str, Any] = {
        key: np.asarray(value) for key, value in content.items() if value is not None
    }
    np.savez(path, **kept)
    return path


def owners(split):
    """Whose samples these are, by their values."""
    return set((split.x[:, 0] // 100).astype(int).tolist())


def assert_apart(*parts):
    assert all(parts) and len(set().union(*parts)) == sum(map(len, parts))


@pytest.mark.parametrize("make", [arrays, in_parts])
def test_the_own_split_keeps_patients_whole(file, make):
    data = read_silo_file(save(file, make()))
    assert_apart(owners(data.train), owners(data.val), owners(data.test))
    if make is arrays:  # shares are of patients
        assert [len(owners(split)) for split in splits_of(data)] == [76, 20, 24]
    for split in splits_of(data):
        assert split.patient is not None
        pairs = {*zip(split.patient.tolist(), (split.x[:, 0] // 100).tolist(), strict=True)}
        assert len(pairs) == len(owners(split))


def test_the_own_split_depends_on_no_number_and_no_order(file):
    """Other numbers, and rows in another order, leave every patient in the same part."""
    before = read_silo_file(save(file, arrays()))
    turned = {
        key: value[::-1] for key, value in arrays(patient=(OWNER * 7919 + 5) % 1009).items()
    }
    after = read_silo_file(save(file, turned))
    for part in ("train", "val", "test"):
        assert owners(getattr(before, part)) == owners(getattr(after, part))


def test_single_samples_are_divided_as_without_patients(file):
    n = 50
    content = {"x": np.arange(n, dtype=np.float32)[:, np.newaxis], "y": np.arange(n) % 2}
    without = read_silo_file(save(file, content))
    named = read_silo_file(save(file, {**content, "patient": np.arange(n)}))
    for part in ("train", "val", "test"):
        assert_array_equal(getattr(without, part).x, getattr(named, part).x)


@pytest.mark.parametrize("make", [arrays, in_parts])
@pytest.mark.parametrize(
    "name",
    [name for name, entry in PARTITIONS.items() if not entry.shares and name != "natural"],
)
def test_partitions_keep_patients_whole(file, name, make):
    """Over all silos and their parts; what several silos hold together is nobody's twice."""
    data = read_dataset_file(save(file, make()))
    assert_apart(owners(data.train), owners(data.test))
    silos = partition(data, name, silos=3, seed=1)
    x = np.concatenate([data.train.x, data.test.x])[:, 0] // 100
    parts = [set(x[rows].tolist()) for silo in silos for rows in splits_of(silo)]
    assert_apart(*filter(None, parts))
    rows = np.concatenate([rows for silo in silos for rows in splits_of(silo)])
    assert len(np.unique(rows)) == len(rows)
    for patient in np.unique(x[rows]):  # a patient's samples stay together, or are all left out
        assert np.isin(np.flatnonzero(x == patient), rows).all()


@pytest.mark.parametrize("name", [name for name, entry in PARTITIONS.items() if entry.shares])
def test_partitions_that_share_samples_are_refused(file, name):
    data = read_dataset_file(save(file, arrays()))
    with pytest.raises(
        ValueError,
        match=f"partition = {name} may give a sample to several silos, and ours names pat",
    ):
        partition(data, name, silos=3, seed=1)


def test_parts_of_a_partition_name_their_patients(file, tmp_path):
    """The files that `silofl partition` writes keep the numbers, and read as they were written."""
    manifest = write_partition(
        read_dataset_file(save(file, arrays())), "iid", tmp_path / "parts", silos=3, seed=1
    )
    assert sum(
        silo[f"n_{part}"] for silo in manifest["silos"] for part in ("train", "val", "test")
    ) == len(OWNER)
    for silo in manifest["silos"]:
        data = read_silo_file(tmp_path / "parts" / silo["file"])
        assert data.train.patient is not None and len(data.train) == silo["n_train"]
        write_silo_file(file, data)
        again = read_silo_file(file)
        assert_array_equal(again.train.patient, data.train.patient)
    assert "patient" not in str(manifest)


def test_check_data_counts_patients(file):
    checks = {check.name: check for check in check_silo_file(save(file, in_parts()))}
    assert all(check.ok for check in checks.values())
    assert checks["patients"].detail == "train 90, test 30"
    assert (
        "val drawn from train, patient by patient, by the samples themselves"
        in checks["split"].detail
    )


BAD = {
    "identifiers": (
        arrays(patient=[f"MRN{i}" for i in OWNER]),
        "patient is <U6",
        "no identifiers",
    ),
    "fractions": (arrays(patient=OWNER / 2), "patient is float64", "whole numbers"),
    "too few": (
        arrays(patient=OWNER[1:]),
        "patient has 299 patients, all 300 samples",
        "one for each sample",
    ),
    "one part only": (
        in_parts(patient_test=None),
        "has patient_train, but no patient_test",
        "per sample and part",
    ),
    "of no part": (
        in_parts(patient=OWNER),
        "has patient, but no such samples",
        "patient_train, patient_test",
    ),
    "in two parts": (
        in_parts(patient_test=np.arange(87, 164)),
        "3 patients are in more than one part",
        "one part",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_patients_are_refused(file, case):
    content, detail, fix = BAD[case]
    *passed, last = check_silo_file(save(file, content))
    assert all(check.ok for check in passed) and not last.ok
    assert detail in last.detail and fix in last.fix
    said = fails(ValueError, None, read_silo_file, file)
    assert detail in said


def test_the_data_summary_is_the_same_with_and_without_patients(tmp_path):
    """What the server is told of a silo says nothing of patients, not even how many there are."""
    whole = in_parts(
        x_val=np.zeros((0, 1), np.float32), y_val=np.zeros(0, int), patient_val=np.zeros(0, int)
    )
    summaries = []
    for name, content in (
        ("a", {key: value for key, value in whole.items() if not key.startswith("patient")}),
        ("b", whole),
    ):
        config = {
            "name": "north",
            "data": str(save(tmp_path / f"{name}.npz", content)),
            "state-dir": str(tmp_path),
        }
        context = Context(
            run_id=1, node_id=1, node_config={**config}, state=RecordDict(), run_config={}
        )
        summaries.append(
            data_summary(
                session_of(parse_settings({"strategy": "fedavg", "model": "mlp"}), context)
            )
        )
    assert summaries[0] == summaries[1] and "sum" in summaries[0]


@pytest.mark.parametrize("dicom", [False, True])
def test_keys_decide_nothing_and_are_in_no_file(tmp_path, dicom):
    """With other identifiers the data file and its recipe are the same, byte for byte: there is no key, and no hash."""
    made = []
    for prefix in ("MRN-00471", "Zarathustra"):
        keys = [f"{prefix}{(7 * i) % 20:03}" for i in range(40)]
        out = tmp_path / prefix / "a.npz"
        out.parent.mkdir()
        if dicom:
            for i, key in enumerate(keys):
                pixels = np.full((2, 2), 10 * i, np.uint16)
                write_dicom(tmp_path / prefix / "x" / f"{i:02}", pixels, patient=key, study=i)
            lines = [f"{study_uid(i)},{i % 2}" for i in range(40)]
            write_lines(out.parent / "l.csv", "study,label", *lines)
            options = ImportOptions(labels_from=out.parent / "l.csv")
            import_source(tmp_path / prefix / "x", out, options)
        else:
            write_lines(
                out.parent / "l.csv",
                "patient,a,label",
                *(f"{k},{i},{i % 2}" for i, k in enumerate(keys)),
            )
            imported(out.parent / "l.csv", out)
        made.append(out.read_bytes())
        assert read_silo_file(out).train.patient is not None and prefix.encode() not in made[-1]
    assert made[0] == made[1]


@pytest.mark.parametrize(
    ("now", "before", "changed"),
    [
        (["a", "b"], ["b", "a"], 0),
        (["a+b", "c"], ["a", "b", "c"], 0),  # the file names its patients now
        (["a+b"], ["a", "b", "c"], 1),  # c left, and a and b were named
        (["a", "b", "d"], ["a", "b", "c"], 1),  # a corrected record
        (["a+b+c", "d+e"], ["d"], 2),  # two came: one of them had a sample
        (["a", "a", "a"], ["a"], 2),  # equal samples of three patients
        (["a+b", "a+c"], ["a", "b"], 1),  # c alone is new
    ],
)
def test_patients_by_whom_two_versions_differ(now, before, changed):
    assert fewest_changed(now, before) == fewest_changed(before, now) == changed
