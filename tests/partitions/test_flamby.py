"""FLamby's federations: their own centres, columns and test parts."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from partitions import heart
from partitions.datasets import load_dataset
from partitions.partition import partition

DATA = Path(os.environ.get("SILOFL_DATA", "/nowhere"))

# Heart disease


@pytest.mark.skipif(not (DATA / "heart_disease").is_dir(), reason="heart disease is not in SILOFL_DATA")
def test_heart_as_flamby_has_it():
    """What FLamby states (its README and dataset.py): sizes, the 13 columns, and counts rebuilt with its own code."""
    data = load_dataset("heart-flamby")
    assert (data.classes, data.task, data.input_shape, data.own_test) == (2, "multiclass", (13,), True)
    silos = partition(data, "natural", silos=4, seed=0, validation=0.0)
    assert [silo.origin for silo in silos] == ["cleveland", "hungarian", "switzerland", "va"]
    assert [(len(silo.train), len(silo.test)) for silo in silos] == [(199, 104), (172, 89), (30, 16), (85, 45)]
    ill = [(data.labels[silo.train].sum(), data.labels[silo.test].sum()) for silo in silos]
    assert ill == [(91, 48), (65, 33), (30, 15), (66, 35)]


def rows(hospital: int) -> list[str]:
    """Nine patients of each hospital; chest pain 1 to 4 and ECG 0 to 2, but no hospital has all of them."""
    one = "{age},1,{pain},120,230,0,{ecg},150,0,1.5,?,?,?,{label}"
    return [
        one.format(age=50 + i, pain=1 + (hospital + i) % 3, ecg=(hospital + i) % 2 + hospital // 3, label=i % 3)
        for i in range(9)
    ]


def test_columns_of_chest_pain_and_ecg_are_those_of_all_hospitals(tmp_path):
    """Patient 50 of the second hospital: pain 2, ECG 1. Pains 2, 3 and ECGs 1, 2 have a column each, 1 and 0 none."""
    for i, hospital in enumerate(heart.MD5):
        (tmp_path / f"processed.{hospital}.data").write_text("\n".join(rows(i)) + "\n")
    data = load_dataset("heart-flamby", str(tmp_path))
    x = np.concatenate([data.train.x, data.test.x])
    assert x.shape == (36, 8 + 2 + 2) and data.groups is not None
    hungarian = x[data.groups["hungarian"]]
    first = hungarian[hungarian[:, 0] == 50][0]
    np.testing.assert_allclose(first, [50, 1, 120, 230, 0, 150, 0, 1.5, 1, 0, 1, 0])
    # 34 % of 9 is 3.06, rounded up; 3 of 9 patients are well: 4/3 of the 4 tested ones, so one of them.
    tested = {name: data.labels[group[group >= len(data.train)]].tolist() for name, group in data.groups.items()}
    assert [sorted(labels) for labels in tested.values()] == [[0, 1, 1, 1]] * 4


def test_a_hospital_of_one_class_is_split_without_classes(tmp_path):
    for i, hospital in enumerate(heart.MD5):
        lines = rows(i) if i else [line[:-1] + "2" for line in rows(i)]
        (tmp_path / f"processed.{hospital}.data").write_text("\n".join(lines) + "\n")
    data = load_dataset("heart-flamby", str(tmp_path))
    assert data.groups is not None and (data.labels[data.groups["cleveland"]] == 1).all()
    assert (data.groups["cleveland"] >= len(data.train)).sum() == 4
