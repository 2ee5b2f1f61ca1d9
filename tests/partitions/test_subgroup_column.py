"""The subgroup of each sample: from a csv, in a data file, through every division."""

from __future__ import annotations

import numpy as np
import pytest
from failing import fails
from PIL import Image

from partitions.common.errors import DataError, UserError
from partitions.importing.options import ImportOptions, Take
from partitions.importing.source import import_source
from partitions.patients import parse_column, subgroup_name
from partitions.silo_file import (
    check_silo_file,
    read_dataset_file,
    read_silo_file,
    write_silo_file,
)

CSV = "age,sex,pressure,label,split\n" + "".join(
    f"{20 + 5 * k},{'f' if k % 2 else 'm'},{k},{k % 2},{('train', 'train', 'test')[k % 3]}\n"
    for k in range(15)
)


def imported(folder, subgroup):
    (folder / "t.csv").write_text(CSV)
    options = ImportOptions(take=Take(patient=None), overwrite=True, subgroup=subgroup)
    import_source(folder / "t.csv", folder / "t.npz", options)
    return folder / "t.npz"


def test_a_column_of_a_csv(tmp_path):
    """By its values, or in bands; what is an input is the recipe's to say."""
    data = read_silo_file(imported(tmp_path, "sex"))
    assert set(data.train.subgroup.tolist()) == {"sex f", "sex m"}  # type: ignore[union-attr]
    assert len(data.test.subgroup) == len(data.test) == 5  # type: ignore[arg-type]
    data = read_silo_file(imported(tmp_path, "age:40,60"))
    # 30, 45, 60, 75, 90
    of_test = ["age under 40", "age 40 to 60", "age from 60", "age from 60", "age from 60"]
    assert data.test.subgroup.tolist() == of_test  # type: ignore[union-attr]


def test_a_list_of_pictures_has_them_too(tmp_path):
    lines = ["file,label,scanner,split"]
    for k in range(6):
        Image.new("L", (4, 4), 40 * k).save(tmp_path / f"{k}.png")
        lines.append(f"{k}.png,{k % 2},{'A' if k < 3 else 'B'},{('train', 'test')[k % 2]}")
    (tmp_path / "list.csv").write_text("\n".join(lines) + "\n")
    options = ImportOptions(take=Take(patient=None), subgroup="scanner", labels=("0", "1"))
    import_source(tmp_path / "list.csv", tmp_path / "p.npz", options)
    assert read_silo_file(tmp_path / "p.npz").test.subgroup.tolist() == [  # type: ignore[union-attr]
        "scanner A",
        "scanner B",
        "scanner B",
    ]


def test_what_an_import_refuses(tmp_path):
    fails(UserError, "colour", imported, tmp_path, "colour")
    fails(DataError, "ascending numbers", imported, tmp_path, "age:60,40")
    with pytest.raises(DataError, match=r"sex is 'm', no number, and --subgroup has bands"):
        imported(tmp_path, "sex:1,2")
    fails(DataError, r"names 15 subgroups.*make bands", imported, tmp_path, "pressure")
    assert not (tmp_path / "t.npz").exists()


def test_bands():
    column, limits = parse_column("age:40,60")
    assert [
        subgroup_name(cell, column, limits, "") for cell in ("39.9", "40", "59", "60", "")
    ] == ["age under 40", "age 40 to 60", "age 40 to 60", "age from 60", ""]


def test_they_stay_with_their_samples(tmp_path):
    """A file of x, y is divided by its samples; as a data set by seed; and written again as it was."""
    x = np.arange(60, dtype=np.float32)[:, None]
    np.savez(
        tmp_path / "a.npz",
        x=x,
        y=np.arange(60) % 2,
        subgroup=np.array([f"g{k % 3}" for k in range(60)]),
    )
    data = read_silo_file(tmp_path / "a.npz")
    whole = read_dataset_file(tmp_path / "a.npz")
    for split in (data.train, data.val, data.test, whole.train, whole.test):
        assert [f"g{int(v) % 3}" for v in split.x[:, 0]] == split.subgroup.tolist()  # type: ignore[union-attr]
    write_silo_file(tmp_path / "b.npz", data)
    assert (
        read_silo_file(tmp_path / "b.npz").test.subgroup.tolist() == data.test.subgroup.tolist()  # type: ignore[union-attr]
    )
    assert any(
        check.name == "subgroups" and "g0" in check.detail
        for check in check_silo_file(tmp_path / "a.npz")
    )


@pytest.mark.parametrize(
    "subgroup, reason",
    [
        (np.arange(6), "save texts"),
        (np.array(["a"] * 5), "has 5 subgroups, all 6 samples"),
        (np.array(["a\x1b[31m"] + ["b"] * 5), "has a subgroup"),
        (np.array(["a" * 41] + ["b"] * 5), "has a subgroup"),
    ],
)
def test_what_a_file_may_not_say(tmp_path, subgroup, reason):
    np.savez(
        tmp_path / "a.npz",
        x=np.arange(6, dtype=np.float32)[:, None],
        y=np.arange(6) % 2,
        subgroup=subgroup,
    )
    fails(DataError, reason, read_silo_file, tmp_path / "a.npz")
    np.savez(
        tmp_path / "b.npz",
        x=np.ones((6, 1), np.float32),
        y=np.arange(6) % 2,
        subgroup_train=np.array(["a"] * 6),
    )
    fails(DataError, "has subgroup_train, but no subgroup", read_silo_file, tmp_path / "b.npz")
