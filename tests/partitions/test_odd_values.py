"""Values of a table and of labels that need a second look: what float32 makes one, and what may mean "unknown"."""

from __future__ import annotations

import shlex

import numpy as np
import pytest
from taken import imported, silofl

from partitions.common.errors import DataError
from partitions.importing.options import Take
from partitions.recipes.recipe import load_recipe
from partitions.recipes.values import far_values
from partitions.silo_file import check_silo_file

N = 120
LABELS = ("0", "1")


def table(path, **columns):
    """Write a csv of N patients, a label and these columns, each a list that is repeated or a function of the row."""
    rows = ["pid,ill," + ",".join(columns)]
    for i in range(N):
        cells = (own(i) if callable(own) else own[i % len(own)] for own in columns.values())
        rows.append(",".join([f"P{i}", str(i % 2), *map(str, cells)]))
    path.write_text("\n".join(rows) + "\n")
    return path


def take_in(source, out="t.npz", label="ill", take=None, **options):
    take = take or Take(patient="pid")
    return imported(source, source.parent / out, label=label, take=take, **options)


@pytest.mark.parametrize(
    "column, text",
    [
        (lambda i: 1_700_000_000_000 + 61 * i % 60_000, "120 different numbers of t are 1 in float32"),
        (lambda i: 1_073_741_824 + i, "120 different numbers of t are 2 in float32"),
        (lambda i: f"{1_700_000_000.25 + i / 4}", "different numbers of t are 1 in float32"),
    ],
)  # fmt: skip
def test_numbers_that_float32_makes_one_are_refused(tmp_path, column, text):
    source = table(tmp_path / "t.csv", t=column, age=lambda i: 20 + i % 60)
    with pytest.raises(DataError, match=text):
        take_in(source, labels=LABELS)
    assert not (tmp_path / "t.npz").exists()
    take_in(source, labels=LABELS, take=Take(patient="pid", columns=("age",)))


def test_a_label_that_float32_makes_one_is_refused(tmp_path):
    source = table(tmp_path / "t.csv", age=[40, 50, 61], stay=lambda i: 1.7e12 + i + 0.5)
    take = Take(patient="pid", columns=("age",))
    with pytest.raises(DataError, match="120 different numbers of the label are 1 in float32"):
        take_in(source, label="stay", take=take)
    x = np.random.default_rng(0).normal(size=(60, 2)).astype(np.float32)
    times = 1.7e12 + np.arange(60)
    np.savez(tmp_path / "n.npz", x=x, time=times, event=np.ones(60))
    assert (
        "60 different numbers of time are 1" in check_silo_file(tmp_path / "n.npz")[-1].detail
    )


def test_a_data_file_of_float64_is_checked_like_a_csv(tmp_path):
    x = np.random.default_rng(0).normal(size=(60, 2))
    np.savez(tmp_path / "fine.npz", x=x, y=np.arange(60) % 2)
    assert all(check.ok for check in check_silo_file(tmp_path / "fine.npz"))
    x[:, 1] = 1.7e12 + np.arange(60)
    np.savez(tmp_path / "t.npz", x=x, y=np.arange(60) % 2)
    fault = check_silo_file(tmp_path / "t.npz")[-1]
    assert not fault.ok
    assert "60 different numbers of column 2 of x are 1 in float32" in fault.detail


def test_long_whole_numbers_over_a_wide_range_are_noted(tmp_path):
    source = table(tmp_path / "t.csv", t=lambda i: 10**9 * (i // 2) + i % 2, age=[40, 50, 61])
    assert any(
        note.startswith("120 different numbers of t are 69 in float32")
        for note in take_in(source, labels=LABELS).notes
    )


YEARS = [f"19{year}-0{1 + year % 9}-1{year % 10}" for year in range(40, 100)]


@pytest.mark.parametrize(
    "cells, unknown",
    [
        (lambda i: "1900-01-01" if i % 10 == 0 else YEARS[i % 60], "12 cells are 1900-01-01, far below"),
        (lambda i: "9999-12-31" if i % 10 == 0 else YEARS[i % 60], "12 cells are 9999-12-31, far above"),
        (lambda i: "1850-06-15" if i % 10 == 0 else YEARS[i % 60], "12 cells are 1850-06-15, far below"),
        (lambda i: -999 if i % 10 == 0 else i % 60 - 5, "12 cells are -999, far below"),
        (lambda i: -1 if i % 10 == 0 else i % 60, "12 cells are -1 and no other is below 0"),
        (lambda i: 999 if i % 10 == 0 else 100 + 3 * i, "12 cells are 999, far above"),
        (lambda i: 9999 if i % 10 == 0 else i % 60, "12 cells are 9999, far above"),
        (lambda i: 777 if i % 10 == 0 else i % 60, "12 cells are 777, far above"),
    ],
)  # fmt: skip
def test_a_value_that_may_mean_unknown_is_named_by_the_draft_and_by_a_recipe(
    tmp_path, cells, unknown
):
    source = table(tmp_path / "t.csv", v=cells, age=lambda i: 20 + i % 60)
    first = take_in(source, labels=LABELS)
    assert unknown in first.recipe.columns[0].why
    gap = first.recipe.columns[0].why.rpartition("--gaps=")[2]
    (tmp_path / "r.toml").write_text(first.recipe.toml())
    again = imported(source, tmp_path / "again.npz", recipe=load_recipe(tmp_path / "r.toml"))
    assert any(note.startswith(f"v: {unknown[:20]}") for note in again.notes)
    take = Take(patient="pid", gaps=(gap.split(";")[0],))
    without = take_in(source, "w.npz", labels=LABELS, take=take)
    assert "cells are" not in without.recipe.columns[0].why


@pytest.mark.parametrize(
    "codes, remark",
    [
        ([777.0, 888.0], ", far above all others"),
        ([997.0, 998.0, 999.0], ", far above all others"),
        ([999.0, 9999.0], ", far above all others"),
        ([-9.0, -8.0], " and no other is below 0"),
        ([-999.0, -998.0], " and no other is below 0"),
    ],
)
def test_several_codes_at_one_end_hide_none_of_them(codes, remark):
    values = np.r_[np.arange(60.0), np.repeat(codes, 4)]
    assert [*far_values(values)] == [
        (60 + 4 * k, f"4 cells are {{}}{remark}") for k in range(len(codes))
    ]


@pytest.mark.parametrize(
    "values",
    [
        np.arange(100.0) % 5,  # a score
        np.r_[np.arange(60.0), -2.0, -2.0, -1.0, -1.0, -1.0, 60.0, 60.0, 61.0, 61.0],  # changes
        np.r_[np.arange(20.0, 99), 98.0, 98.0, 99.0, 99.0],  # ages
        np.exp(np.random.default_rng(0).normal(0, 2, 500)),
        np.r_[np.arange(60.0), 5000.0],  # once
        np.array([98.0, 98.0, 99.0, 99.0]),
        np.zeros(9),
    ],
)
def test_usual_values_are_not_taken_for_unknown(values):
    assert [*far_values(values)] == []


def test_a_measured_label_that_may_mean_unknown_is_named(tmp_path):
    source = table(tmp_path / "t.csv", age=[40, 50, 61], crp=lambda i: -999 if i < 9 else i / 2)
    made = take_in(source, label="crp", take=Take(patient="pid", columns=("age",)))
    assert any(note.startswith("crp: 9 cells are -999") for note in made.notes)


@pytest.mark.parametrize(
    "cell, form",
    [
        ("2024-01-{:02d}T10:00:00Z", "%Y-%m-%dT%H:%M:%S%z"),
        ("2024-01-{:02d}T10:00:00.250Z", "%Y-%m-%dT%H:%M:%S.%f%z"),
        ("2024-01-{:02d}T10:00:00+01:00", "%Y-%m-%dT%H:%M:%S%z"),
        ("{:02d} Jan 2024", "%d %b %Y"),
        ("{:02d}/02/2024 3:05 PM", "%d/%m/%Y %I:%M %p"),
    ],
)
def test_dates_that_stay_out_name_the_option_that_takes_them(tmp_path, cell, form):
    source = table(tmp_path / "t.csv", at=lambda i: cell.format(1 + i % 28), age=[40, 50, 61])
    made = take_in(source, labels=LABELS)
    assert f"dates; --dates {shlex.quote(form)} takes them" in made.recipe.columns[0].why
    made = take_in(source, "d.npz", labels=LABELS, take=Take(patient="pid", dates=form))
    assert made.recipe.columns[0].kind == "date"


def test_dates_that_may_be_read_in_two_ways_name_both(tmp_path):
    source = table(
        tmp_path / "t.csv", at=["01/02/2024 3:05 PM", "03/04/2024 3:05 AM"], age=[40, 50]
    )
    why = take_in(source, labels=LABELS).recipe.columns[0].why
    assert "--dates '%d/%m/%Y %I:%M %p' or --dates '%m/%d/%Y %I:%M %p' takes them" in why


def test_dates_of_digits_alone_are_refused_as_numbers_and_taken_as_dates(tmp_path):
    source = table(
        tmp_path / "t.csv",
        at=lambda i: f"2024{1 + i % 12:02d}{1 + i // 12:02d}",
        age=[20240101],
    )
    with pytest.raises(DataError, match=r"120 different numbers of at are \d+ in float32"):
        take_in(source, labels=LABELS)
    made = take_in(source, labels=LABELS, take=Take(patient="pid", dates="%Y%m%d"))
    assert made.recipe.columns[0].kind == "date"
    assert (
        len(np.unique(np.concatenate([made.data.train.x[:, 0], made.data.test.x[:, 0]]))) > 90
    )


def test_one_instant_in_another_form_is_named(tmp_path):
    source = table(
        tmp_path / "t.csv",
        at=lambda i: "unclear" if i == 7 else f"2024-01-{1 + i % 28:02d}T10:00:00Z",
        age=[40, 50, 61],
    )
    with pytest.raises(DataError, match="line 9: at is 'unclear', and other dates of it are"):
        take_in(source, labels=LABELS)


def test_lakhs_are_numbers(tmp_path):
    source = tmp_path / "t.csv"
    rows = (f"P{i};{i % 2};{('1,00,000', '99,500', '12,34,567.5')[i % 3]}" for i in range(60))
    source.write_text("\n".join(["pid;ill;cost", *rows]) + "\n")
    made = take_in(source, labels=LABELS)
    assert made.recipe.columns[0].thousands == ","
    values = {*made.data.train.x[:, 0].tolist()}
    assert values == {100_000.0, 99_500.0, 1_234_567.5}


def test_the_command_prints_the_remark(tmp_path, capsys):
    source = table(
        tmp_path / "t.csv",
        born=lambda i: YEARS[i % 60] if i % 9 else "1900-01-01",
        age=[40, 50],
    )
    silofl(
        "import",
        source,
        "--label",
        "ill",
        "--labels",
        "0,1",
        "--no-patient",
        "--columns",
        "born",
        "--out",
        tmp_path / "t.npz",
    )
    assert "14 cells are 1900-01-01, far below all others" in capsys.readouterr().out
