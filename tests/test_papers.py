"""``python -m benchmarks.papers``: the papers' statistics of a history that can be worked out in the head."""

from __future__ import annotations

import math

import pytest
from failing import fails

from benchmarks.papers import (
    best_by_samples,
    best_of_each,
    best_round,
    main,
    median_interval,
    read_runs,
    selected,
    silo_medians,
    weighted,
)
from server.results.history import History, Row

# Round -> silo -> (validation loss, test F1) of two silos with 30 and 10 test samples.
ONE = {
    1: {"a": (0.9, 0.2), "b": (0.5, 0.8)},
    2: {"a": (0.4, 0.6), "b": (0.5, 0.9)},
    3: {"a": (0.7, 1.0), "b": (0.6, 1.0)},
}
TESTED = {"a": 30, "b": 10}


def write(folder, method, shift=0.0, seeds=(1,)):
    rows = []
    for seed in seeds:
        for number, silos in ONE.items():
            for silo, (loss, f1) in silos.items():
                given = (
                    ("val", "loss", loss),
                    ("test", "macro_f1", f1 + shift),
                    ("test", "accuracy", f1 / 2),
                )
                rows += [
                    Row(
                        method,
                        seed,
                        number,
                        silo,
                        split,
                        "personal",
                        metric,
                        value,
                        TESTED[silo],
                    )
                    for split, metric, value in given
                ]
    rows.append(Row(method, seeds[0], 4, "a", "test", "personal", "accuracy", math.nan, 3))
    History(folder / "history.csv").add(rows)
    return folder


def test_by_hand(tmp_path):
    """Best round: (1 + 1) / 4 in round 3; a withheld value is no round of its own.

    Least validation loss: a in round 2 (F1 0.6), b in round 1, the earlier of two equal ones (0.8). Weighted by test
    samples: (30 · 0.6 + 10 · 0.8) / 40 = 0.65.
    """
    rows = read_runs([write(tmp_path, "fedavg")])["fedavg"][1]
    assert best_round(rows, "personal") == (3, 0.5)
    assert best_round(rows, "received")[0] == 0
    chosen = selected(rows)
    assert {silo: (r.round, r.value) for silo, r in chosen.items()} == {
        "a": (2, 0.6),
        "b": (1, 0.8),
    }
    assert weighted(chosen) == pytest.approx(0.65)


def test_fedalas_and_fedapms_statistics():
    """Silos of 30 and 10 samples. Round 1: 0.6 and 0.8, mean 0.7, by samples 0.65; round 2: 0.7 and 0.4: 0.55, 0.625.

    AUC is best in round 2, and counts from there, though accuracy is not.
    """
    table = {
        "accuracy": [(0.6, 0.8), (0.7, 0.4)],
        "weighted_f1": [(0.5, 0.5), (0.4, 0.4)],
        "auc": [(0.1, 0.3), (0.9, 0.7)],
    }
    rows = [
        Row("x", 1, number, silo, "test", "received", metric, value, n)
        for metric, rounds in table.items()
        for number, values in enumerate(rounds, start=1)
        for silo, value, n in zip("ab", values, (30, 10), strict=True)
    ]
    assert best_by_samples(rows, "received") == pytest.approx(0.65)
    assert best_of_each(rows, "received") == pytest.approx([0.7, 0.5, 0.8])


def test_the_tables(tmp_path, capsys):
    """apple is 0.05 above local and fedavg in both silos: IPR 100. Fairness: F1 0.6 and 0.8 have variance 0.01."""
    folders = [
        write(tmp_path / name, name, shift)
        for name, shift in (("local", 0.0), ("fedavg", 0.0), ("apple", 0.05))
    ]
    main([str(folder) for folder in folders])
    lines = capsys.readouterr().out.splitlines()
    assert "| local | personal | 50.00 | 3 | 50.00 | 50.0 nan nan | 1 |" in lines
    assert "| local | 65.0 | 32.5 | 0.010 |  |" in lines
    assert "| apple | 70.0 | 32.5 | 0.010 | 100 |" in lines


def test_several_seeds(tmp_path):
    """The median over seeds; its bootstrap interval lies inside the range and holds the median."""
    one = write(tmp_path / "one", "fedavg", seeds=(1, 2))
    two = write(tmp_path / "two", "fedavg", 0.1, seeds=(3,))
    runs = read_runs([one, two])
    assert sorted(runs["fedavg"]) == [1, 2, 3]
    assert silo_medians(runs["fedavg"]) == pytest.approx({"a": 0.6, "b": 0.8})
    low, high = median_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert 1 <= low < 3 < high <= 5
    fails(ValueError, "fedavg with seed 1 is in", read_runs, [one, one])


def test_no_run(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main([str(tmp_path)])
    assert "has no history.csv" in capsys.readouterr().err
