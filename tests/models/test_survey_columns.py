"""What leaves of a column: cells by the hospital's own schema, small ones and their neighbours suppressed, rounded."""

from __future__ import annotations

import json

import numpy as np
import pytest
from near import near
from surveyed import RECIPE

from models.evidence.survey import (
    BINS,
    DIGITS,
    MISSING,
    STEP,
    ReleaseLimits,
    TableColumn,
    columns_of,
    of_column,
    survey,
)
from partitions.recipes.recipe import parse_recipe
from partitions.schema import Feature, Schema
from partitions.splits import Split

LIMITS = ReleaseLimits(cell=10, sums=50, classes=True)
AGE = TableColumn("age", "number", (0,), "years", (0.0, 100.0))


def told(values, gone=None, limits=LIMITS, column=AGE):
    n = len(values)
    none = np.zeros(n, bool) if gone is None else np.array(gone)
    return of_column(column, np.array(values, np.float32)[:, None], none, np.arange(n), limits)


def test_a_small_cell_takes_another_with_it():
    """30, 3 and 12 patients in three tenths: 3 are few, and 45 - 30 - 12 would give them; so 12 stay too."""
    item = told([5.0] * 30 + [15.0] * 3 + [25.0] * 12)
    assert item["cells"] == [None] * BINS  # one cell alone would be the rest of all
    item = told([5.0] * 30 + [15.0] * 3 + [25.0] * 12 + [35.0] * 21)
    assert item["cells"] == [30, None, None, 20, *[None] * 6]
    assert "mean" in item and item[MISSING] == 0


def test_values_at_and_beyond_the_range_are_in_its_ends():
    item = told([0.0] * 20 + [100.0] * 20 + [1000.0] * 20, limits=ReleaseLimits(10, 50))
    assert item["cells"] == [20, *[None] * 8, 40]
    assert item["mean"] == pytest.approx(200 / 3, rel=0.1)  # 1000 counts as 100


def test_the_missing_are_one_of_the_cells():
    values, gone = [5.0] * 40 + [15.0] * 40, [True] * 4 + [False] * 76
    assert told(values, gone) == {
        "kind": "number",
        "unit": "years",
        "range": [0.0, 100.0],
        MISSING: None,
    } | {"cells": [None] * BINS, **moments(told(values, gone))}
    assert told(values, [True] * 20 + [False] * 60)[MISSING] == 20
    assert told([0.0] * 80, [True] * 80)[MISSING] == 80


def moments(item):
    return {key: item[key] for key in ("mean", "sd")}


def test_filled_values_are_in_no_mean():
    values, gone = [90.0] * 40 + [10.0, 20.0] * 40, [True] * 40 + [False] * 80
    exact = told(values, gone, ReleaseLimits(1, 1, True, True))
    assert (exact["mean"], exact["sd"], exact[MISSING]) == (15.0, 5.0, 40) and exact["cells"][
        9
    ] == 0


def test_counts_are_of_patients():
    """Thirty samples of nine patients are few."""
    patients = np.arange(60) % 9
    item = of_column(AGE, np.full((60, 1), 5, np.float32), np.zeros(60, bool), patients, LIMITS)
    assert item["cells"] == [None] * BINS and "mean" not in item


def test_a_patient_in_several_small_cells_is_one_patient():
    """Two patients with 150 visits in five tenths: the three large cells alone would leave them as the rest."""
    values = (
        [5.0] * 200 + [15.0] * 200 + [25.0] * 200 + [35.0 + 10 * (i % 5) for i in range(150)]
    )
    patients = np.concatenate([np.arange(600), np.repeat([600, 601], 75)])
    item = of_column(
        AGE, np.array(values, np.float32)[:, None], np.zeros(750, bool), patients, LIMITS
    )
    # One of the large ones stays with the two
    assert item["cells"] == [None, 200, 200, *[None] * 7]


def test_a_patient_with_many_records_moves_a_mean_as_any_other():
    """Sixty visits of one patient at 99 among 200 patients at 5: by records the mean would be 26.7."""
    values = [5.0] * 200 + [99.0] * 60
    patients = np.concatenate([np.arange(200), np.full(60, 200)])
    table, none = np.array(values, np.float32)[:, None], np.zeros(260, bool)
    exact = of_column(AGE, table, none, patients, ReleaseLimits(1, 1, True, True))
    near(exact["mean"], (200 * 5 + 99) / 201, 1e-3)
    assert exact["cells"][:1] + exact["cells"][-1:] == [200, 1]
    once = of_column(AGE, table[:201], none[:201], np.arange(201), LIMITS)
    assert of_column(AGE, table, none, patients, LIMITS) == once


@pytest.mark.parametrize("seed", range(60))
def test_nothing_of_fewer_than_the_minimum_follows(seed):
    """For data of any shape: each count is of 10 patients or more, and so is the rest, by the exact counts behind."""
    rng = np.random.default_rng(seed)
    values = (
        rng.choice([3, 20, 80]) * rng.normal(size=rng.integers(1, 300)) + rng.uniform(-50, 150)
    ).tolist()
    gone = rng.random(len(values)) < rng.choice([0, 0.02, 0.2])
    item = told(values, gone.tolist())
    place = np.minimum(
        (np.clip(np.array(values, np.float32).astype(float), 0, 100) / 10).astype(int), 9
    )
    kept = [
        int(((place == i) & ~gone).sum())
        for i, count in enumerate(item["cells"])
        if count is not None
    ]
    kept += [int(gone.sum())] if item[MISSING] is not None and gone.any() else []
    assert all(n >= 10 for n in kept)
    rest = len(values) - sum(kept)
    assert rest == 0 or rest >= 10 or not kept
    assert all(
        count % STEP == 0 for count in [*item["cells"], item[MISSING]] if count is not None
    )
    assert ("mean" in item) == ((~gone).sum() >= 50)
    assert (
        all(float(f"{v:.{DIGITS}g}") == v for v in moments(item).values())
        if "mean" in item
        else True
    )


def test_one_patient_more_moves_a_mean_by_one_step_at_most():
    """Means lie on a grid of four times what one patient can do, so most additions change nothing."""
    rng, changed = np.random.default_rng(0), 0
    for _ in range(50):
        values = rng.normal(50, 10, 101).tolist()
        changed += moments(told(values)) != moments(told(values[:-1]))
    assert changed <= 25


def test_without_a_declared_range_only_the_missing_are_told():
    column = TableColumn("crp", "number", (0,))
    assert told([1.0] * 60, column=column) == {"kind": "number", MISSING: 0}


def test_columns_are_those_of_the_recipe():
    recipe = parse_recipe(RECIPE)
    schema = Schema(recipe.features)
    found = {column.name: column for column in columns_of(schema, recipe, 8)}
    assert found["sex"].places == (2, 3) and found["sex"].levels == ("female", "male")
    assert found["kind"].places == (4,) and found["kind"].levels == ("a", "b", "c")
    assert found["since"].kind == "date" and found["crp"].places == (6,)  # 7 marks its gaps
    plain = Schema((Feature("a", "kg", (0, 1)), Feature("b")))
    assert [c.range for c in columns_of(plain, None, 2)] == [(0, 1), None]


def test_labels_and_other_inputs():
    """Pictures have no columns; class counts only where they may leave."""
    y = np.array([0] * 40 + [1] * 30 + [2] * 12, np.int64)
    split = Split(np.zeros((82, 4, 4, 1), np.uint8), y)
    given = split, None, Schema(labels=("a", "b", "c")), None, 3, "multiclass"
    found = survey(*given, LIMITS)
    assert found["columns"] == {} and found["n"] == 80
    assert found["labels"]["label"]["cells"] == [40, 30, 10]
    assert survey(*given, ReleaseLimits())["labels"] == {}
    findings = np.array([[1, 0], [0, -1]] * 30, np.float32)
    found = survey(
        Split(np.zeros((60, 2), np.float32), findings),
        None,
        Schema(),
        None,
        2,
        "multilabel",
        LIMITS,
    )
    assert found["labels"]["label 1"]["cells"] == [30, 30]
    assert found["labels"]["label 2"] == {
        "kind": "category",
        "levels": ["no", "yes"],
        MISSING: 30,
        "cells": [30, None],
    }
    times = Split(
        np.zeros((60, 2), np.float32), np.array([[1.0, 1.0], [2.0, 0.0]] * 30, np.float32)
    )
    assert survey(times, None, Schema(), None, 1, "survival", LIMITS)["labels"]["event"][
        "cells"
    ] == [30, 30]
    assert json.dumps(found)  # all of it is JSON
