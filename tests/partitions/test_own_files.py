"""A researcher's own hospitals: a folder of files, a csv by a column, and fewer samples of anything."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from failing import fails
from numpy.testing import assert_array_equal
from taken import all_x, imported, splits_of

from partitions.common.names import silo_names
from partitions.recipes.pictures import read_any
from partitions.recipes.recipe import load_recipe
from partitions.schemes.registry import partition, silo_data
from partitions.silo_file import read_silo_file
from partitions.simulated import (
    DatasetSource,
    Division,
    divide,
    names_of,
    open_dataset,
    parse_source,
    part_of,
    subsample_dataset,
)
from server.simulation.simulate import simulate


def write_file(path, n, **changes):
    """A hospital's file with parts of its own: the first column counts, the second says which hospital."""
    counted = np.arange(n, dtype=np.float32) + 1000 * ord(path.stem[0])
    x = np.stack([counted, np.full(n, ord(path.stem[0]), np.float32)], 1)
    y = np.arange(n) % 2
    cut, end = n - 8, n - 4
    arrays = {
        "feature_names": np.array(["count", "place"]),
        "label_names": np.array(["well", "ill"]),
    }
    for part, rows in (
        ("train", slice(0, cut)),
        ("val", slice(cut, end)),
        ("test", slice(end, n)),
    ):
        arrays |= {f"x_{part}": x[rows], f"y_{part}": y[rows]}
    np.savez(path, **(arrays | changes))
    return path


def centres(folder):
    folder.mkdir()
    for name, n in (("a", 40), ("b", 24), ("c", 60)):
        write_file(folder / f"{name}.npz", n)
    return folder


def division(source, silos=3):
    return Division(str(source), "", "natural", silos, 7, -1.0)


def test_each_file_is_a_silo_with_its_own_test_part(tmp_path):
    folder = centres(tmp_path / "centres")
    whole, silos = divide(division(folder))
    assert [(silo.name, silo.origin) for silo in silos] == [
        ("hospital-01", "a"),
        ("hospital-02", "b"),
        ("hospital-03", "c"),
    ]
    for i, name in enumerate("abc"):
        made, own = part_of(division(folder), i), read_silo_file(folder / f"{name}.npz")
        assert_array_equal(made.test.x, own.test.x)
        rows = np.concatenate([made.train.x, made.val.x])
        assert sorted(rows[:, 0]) == sorted(np.concatenate([own.train.x, own.val.x])[:, 0])
        assert len(made.val) and made.schema == own.schema
    assert whole.name == "centres"


def test_files_that_change_between_two_runs_of_a_notebook_are_read_again(tmp_path):
    folder = centres(tmp_path / "centres")
    run = {"dataset": str(folder), "partition": "natural", "strategy": "local", "rounds": 1}

    def patients(silos, out):
        values = {**run, "silos": silos, "model": "mlp", "out": str(tmp_path / out)}
        directory = simulate(values, quiet=True)
        described = json.loads((directory / "manifest.json").read_text())
        return [silo["n_train"] + silo["n_val"] for silo in described["silos"]]

    assert patients(3, "one") == [36, 20, 56]
    write_file(folder / "b.npz", 30)
    assert patients(3, "two") == [36, 26, 56]
    write_file(folder / "d.npz", 40)
    assert patients(4, "three") == [36, 26, 56, 36]


def test_other_orders_are_mapped_and_other_names_are_refused(tmp_path):
    folder = centres(tmp_path / "centres")
    with np.load(folder / "b.npz") as npz:
        arrays = dict(npz)
    swapped = {
        key: value[:, ::-1] if key.startswith("x_") else value for key, value in arrays.items()
    }
    flipped = {
        key: 1 - value if key.startswith("y_") else value for key, value in swapped.items()
    }
    names = {
        "feature_names": np.array(["place", "count"]),
        "label_names": np.array(["ill", "well"]),
    }
    before = [part_of(division(folder), i) for i in range(3)]
    np.savez(folder / "b.npz", **(flipped | names))
    divide.cache_clear()
    part_of.cache_clear()
    for i, data in enumerate(before):
        made = part_of(division(folder), i)
        assert_array_equal(made.train.x, data.train.x)
        assert_array_equal(made.train.y, data.train.y)
    np.savez(folder / "b.npz", **(arrays | {"feature_names": np.array(["count", "ward"])}))
    with pytest.raises(
        ValueError, match=r"^b: columns named ward, most hospitals have place: rename"
    ):
        open_dataset(str(folder), "", 7)
    wide: dict[str, Any] = {
        key: np.hstack([v, v]) if key[0] == "x" else v for key, v in arrays.items()
    }
    np.savez(folder / "b.npz", **{key: wide[key] for key in wide if key[0] in "xy"})
    with pytest.raises(
        ValueError,
        match=r"b has samples of shape \(4,\), and a \(2,\): hospitals need the same",
    ):
        open_dataset(str(folder), "", 7)


def test_patients_stay_in_one_part_and_in_one_hospital(tmp_path):
    """Files number their patients from 0, each: two hospitals' patients 0 are two people. One file names none."""
    folder = centres(tmp_path / "centres")
    for name, n in (("a", 40), ("b", 24)):
        parts = {"train": n - 8, "val": 4, "test": 4}
        starts = {"train": 0, "val": 100, "test": 200}
        numbers = {
            f"patient_{part}": np.arange(size) // 2 + starts[part]
            for part, size in parts.items()
        }
        write_file(folder / f"{name}.npz", n, **numbers)
    whole, silos = divide(division(folder))
    assert whole.train.patient is not None and whole.test.patient is not None
    pooled = np.concatenate([whole.train.patient, whole.test.patient])
    seen = []
    for silo in silos:
        train, val, test = (set(pooled[rows].tolist()) for rows in splits_of(silo))
        assert not (train & val or train & test or val & test) and val
        seen.append(train | val | test)
    assert not (seen[0] & seen[1] or seen[1] & seen[2] or seen[0] & seen[2])
    for i, name in enumerate("abc"):
        own = read_silo_file(folder / f"{name}.npz")
        assert (
            len(silos[i].test) == len(own.test)
            and len(silos[i].train) + len(silos[i].val) == len(own.train) + 4
        )


def test_silos_have_the_names_of_their_files(tmp_path):
    """A name that a silo may have stays; others are made one, and two that would be the same are refused."""
    folder = centres(tmp_path / "centres")
    write_file(folder / "Nörd Clinic_2.npz", 20)
    write_file(folder / "07.npz", 20)
    names = names_of(str(folder), "natural", 5)
    assert names == ("hospital-07", "nord-clinic-2", "a", "b", "c")  # as the files: 0, N, a
    assert [silo.origin for silo in divide(division(folder, 5))[1]] == [
        "07",
        "Nörd Clinic_2",
        "a",
        "b",
        "c",
    ]
    # Mixed, they are no hospitals
    assert names_of(str(folder), "iid", 2) == ("hospital-01", "hospital-02")
    write_file(folder / "A.npz", 20)
    with pytest.raises(
        ValueError, match="'a' and 'A' would both be the silo a; rename one of them"
    ):
        names_of(str(folder), "natural", 6)
    fails(ValueError, "'北京' is no name: use 1 to 63 lower-case letters", silo_names, ["北京"])


# A csv by a column


def table(path):
    """Ages of centre A are about 40, those of B about 70; every fifth is a gap; each patient comes twice."""
    rows = ["pid;age;sex;centre;state"]
    for i in range(120):
        age = "" if i % 5 == 0 else f"{(40 if i % 2 else 70) + i % 7},5"
        rows.append(
            f"{'AB'[i % 2]}{i // 4};{age};{'fm'[i // 2 % 2]};{'South' if i % 2 else 'North'};{i // 2 % 2}"
        )
    path.write_text("\n".join(rows) + "\n")
    return path


@pytest.fixture
def by_centre(tmp_path):
    path = table(tmp_path / "all.csv")
    made = imported(path, label="state", patient="pid")
    (tmp_path / "r.toml").write_text(made.recipe.toml())
    return DatasetSource(str(path), str(tmp_path / "r.toml"), "centre")


def test_a_csv_by_a_column(by_centre):
    """The column itself is no input. Each centre's gaps become the median of its own training part."""
    whole, silos = divide(division(by_centre, 2))
    assert [silo.origin for silo in silos] == ["North", "South"]
    assert names_of(str(by_centre), "natural", 2) == ("north", "south")
    assert whole.schema.names == ("age", "sex=f", "sex=m")
    for silo, around in zip(silos, (70, 40), strict=True):
        data = silo_data(whole, silo)
        ages = all_x(data)[:, 0]
        assert len(ages) == 60 and around <= ages.min() <= ages.max() <= around + 7.5
        used: Any = read_any(data.recipe)
        fill = used.columns[0].fill_value
        assert (
            around <= fill <= around + 7.5
            and fill != load_recipe(Path(by_centre.recipe)).columns[0].fill_value
        )
        assert data.train.patient is not None and data.test.patient is not None
        assert not set(data.train.patient.tolist()) & set(data.test.patient.tolist())


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"by": "center"}, "--by center: .* has the columns pid, age, sex, centre, state"),
        ({"by": "pid"}, "--by pid: name the column of hospitals; this one has 60 values"),
        ({"by": "age"}, "line 2 has no age, which says whose the row is"),
    ],
)
def test_a_column_that_does_not_say_whose_a_row_is(by_centre, changes, words):
    fails(ValueError, words, open_dataset, str(replace(by_centre, **changes)), "", 7)


# Names and fewer samples


@pytest.mark.parametrize(
    "source",
    [
        DatasetSource("digits"),
        DatasetSource("digits", subsample=50),
        DatasetSource("/data/a b.npz"),
        DatasetSource("/data/x#1.npz"),
        DatasetSource("/data/all.csv", "/data/r&d.toml", "centre #1", 9),
    ],
)
def test_a_source_is_read_as_it_is_written(source):
    assert parse_source(str(source)) == source


@pytest.mark.parametrize(
    "text", ["digits#subsample=0", "digits#subsample=x", "/a.csv#by=x", "digits#by=x&recipe=r"]
)
def test_bad_sources(text):
    with pytest.raises(
        ValueError, match=r"subsample is|a csv needs --recipe and --by, and nothing else"
    ):
        parse_source(text)


def test_fewer_samples_of_each_hospital_and_part(tmp_path):
    """62 of 124: half of 36 + 4, of 20 + 4 and of 56 + 4; by the same seed the same ones."""
    whole = open_dataset(str(centres(tmp_path / "centres")), "", 7)
    half = subsample_dataset(whole, 62, 3)
    silos = partition(half, "natural", silos=3, seed=1, validation=0.0)
    assert [(len(s.train), len(s.test)) for s in silos] == [(18, 2), (10, 2), (28, 2)]
    for silo, name in zip(silos, "abc", strict=True):
        assert set(silo_data(half, silo).train.x[:, 1].tolist()) == {ord(name)}
    again, other = subsample_dataset(whole, 62, 3), subsample_dataset(whole, 62, 4)
    assert_array_equal(half.train.x, again.train.x)
    assert not np.array_equal(half.train.x, other.train.x)
    assert (
        subsample_dataset(whole, 124, 3) is whole
        and len(open_dataset("digits#subsample=100", "", 1).labels) == 100
    )
