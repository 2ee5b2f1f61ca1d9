"""Scores by subgroup: what is suppressed, so that no cell and no difference is of fewer patients than allowed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from models.evidence.subgroups import releasable_subgroups, subgroup_scores
from models.flat import FlatModel
from models.metrics import wilson_interval
from models.samples import Samples
from models.tasks import task_of


def of_counts(**counts):
    return np.array([name.replace("_", "") for name, n in counts.items() for _ in range(n)])


@pytest.mark.parametrize(
    "counts, kept",
    [
        ({"a": 50, "b": 50}, ["a", "b"]),
        ({"a": 95, "b": 5}, []),  # a alone would give b by subtraction
        # C and b are suppressed; a alone tells no more than all, and is left out
        ({"a": 50, "b": 40, "c": 5}, []),
        ({"a": 50, "b": 40, "c": 20, "d": 5}, ["a", "b"]),  # d and c together are 25
        ({"a": 50, "b": 40, "c": 6, "d": 5}, ["a", "b"]),  # c and d together are 11
        ({"a": 50, "b": 40, "_": 12}, ["a", "b"]),  # unknown ones count as suppressed
        ({"a": 50, "b": 40, "c": 30, "_": 3}, ["a", "b"]),
        ({"a": 100}, ["a"]),
        ({"a": 9}, []),
    ],
)
def test_small_cells_and_their_neighbours_are_suppressed(counts, kept):
    assert releasable_subgroups(of_counts(**counts), None, 10) == kept


@given(st.lists(st.integers(1, 60), min_size=1, max_size=8), st.integers(1, 30))
def test_nothing_small_follows_by_subtraction(sizes, least):
    groups = np.array([f"g{k}" for k, n in enumerate(sizes) for _ in range(n)])
    kept = releasable_subgroups(groups, None, least)
    shown = [int((groups == name).sum()) for name in kept]
    assert all(n >= least for n in shown)
    assert not kept or len(groups) - sum(shown) == 0 or len(groups) - sum(shown) >= least


def test_patients_are_counted_and_not_samples():
    """b has 20 samples of 2 patients."""
    groups = of_counts(a=40, b=20, c=20)
    patients = np.concatenate([np.arange(40), np.repeat([100, 101], 10), np.arange(200, 220)])
    assert releasable_subgroups(groups, patients, 10) == []
    assert releasable_subgroups(groups, patients, 2) == ["a", "b", "c"]


def test_scores_are_the_tasks_own():
    """The model says class 1 always: right for 3 of 4 of a, and for 1 of 2 of b."""
    layer = nn.Linear(1, 2)
    layer.weight.data.zero_()
    layer.bias.data = torch.tensor([0.0, 1.0])
    samples = Samples(np.zeros((6, 1), np.float32), np.array([1, 1, 1, 0, 1, 0]))
    groups = of_counts(a=4, b=2)
    found = subgroup_scores(
        task_of("multiclass"), FlatModel(nn.Sequential(layer)), samples, groups, None, 1
    )
    assert found == {
        "subgroup.a": [4.0, 0.75, *wilson_interval(3, 4)],
        "subgroup.b": [2.0, 0.5, *wilson_interval(1, 2)],
    }
    assert (
        subgroup_scores(
            task_of("multiclass"), FlatModel(nn.Sequential(layer)), samples, groups, None, 3
        )
        == {}
    )


def test_a_subgroup_without_a_score_leaves_none():
    """AUC needs both kinds: b has one, so that nothing is shown of a either."""
    layer = nn.Linear(1, 1)
    samples = Samples(
        np.arange(6, dtype=np.float32)[:, None],
        np.array([[1], [1], [1], [0], [1], [1]], np.float32),
    )
    found = subgroup_scores(
        task_of("multilabel"),
        FlatModel(nn.Sequential(layer)),
        samples,
        of_counts(a=4, b=2),
        None,
        1,
    )
    assert found == {}
