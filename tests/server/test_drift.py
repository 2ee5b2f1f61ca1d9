"""``silofl drift``: nothing where patients are alike, and by its name what differs where they are not."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from failing import fails
from scipy.stats import chi2_contingency
from taken import silofl
from tiny import federate, json_of

from client.export import export_model
from partitions.common.errors import UserError
from server.drift import (
    Counts,
    compare_counts,
    measure_drift,
    summary_file,
    write_training_summary,
)

COLUMNS = ("age", "sex", "crp")


def patients(rng, n, shift=0.0, more=0.0):
    """Old people with a high value are ill; ``shift``: of ages, ``more``: of the ill among all alike."""
    x = np.stack([rng.normal(shift, 1, n), rng.integers(0, 2, n), rng.normal(0, 1, n)], 1)
    ill = rng.random(n) < 1 / (1 + np.exp(-(2 * x[:, 0] + x[:, 2] + more)))
    return x.astype(np.float32), ill.astype(np.int64)


def write(path, rng, n=600, repeats=1, **how):
    x, y = patients(rng, n, **how)
    parts = {
        "train": slice(0, n // 2),
        "val": slice(n // 2, n * 3 // 5),
        "test": slice(n * 3 // 5, n),
    }
    arrays: dict[str, Any] = {"classes": np.array(2), "feature_names": np.array(COLUMNS)}
    for name, rows in parts.items():
        arrays[f"x_{name}"] = np.repeat(x[rows], repeats, 0)
        arrays[f"y_{name}"] = np.repeat(y[rows], repeats)
        if repeats > 1:
            arrays[f"patient_{name}"] = np.repeat(np.arange(n)[rows], repeats)
    np.savez(path, **arrays)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A hospital's own model, which fits, with its summary."""
    folder = tmp_path_factory.mktemp("drift")
    rng = np.random.default_rng(1)
    files = {name: write(folder / f"{name}.npz", rng) for name in ("a", "b")}
    federate(files, directory=folder / "run", strategy="fedavg", rounds=30, learning_rate=0.5)
    export_model(folder / "run", "a", "last", folder / "m.safetensors")
    write_training_summary(folder / "m.safetensors", files["a"])
    return folder / "m.safetensors"


def test_patients_of_the_same_kind_do_not_differ(model, tmp_path):
    """At most one false alarm in twenty reports: of forty, each with twelve tests, at most six."""
    alarms = 0
    for seed in range(40):
        report = measure_drift(
            model, write(tmp_path / f"{seed}.npz", np.random.default_rng(100 + seed), n=300)
        )
        alarms += bool(report["drifted"])
        assert len(report["tests"]) >= 9 and not report["not_tested"]
    assert alarms <= 6


@pytest.mark.parametrize(
    ("how", "names", "not_these"),
    [
        (
            {"shift": 1.0},
            {"input age", "prediction p_1", "label 1"},
            {"input sex", "input crp"},
        ),
        (
            {"more": 2.0},
            {"label 1", "calibration of class 1", "error 1"},
            {"input age", "prediction p_1"},
        ),
    ],
)
def test_what_differs_is_named(model, tmp_path, how, names, not_these):
    report = measure_drift(
        model, write(tmp_path / "new.npz", np.random.default_rng(7), n=900, **how)
    )
    assert names <= {*report["drifted"]} and not not_these & {*report["drifted"]}
    worst = report["tests"][0]
    assert worst["p"] <= report["tests"][-1]["p"] and worst["what"] in report["drifted"]
    index = {test["what"]: test["stability"] for test in report["tests"]}
    assert index["input sex"] < 0.1
    if "shift" in how:
        assert index["input age"] > 0.25


def test_without_labels_inputs_and_predictions_are_compared(model, tmp_path):
    x, _ = patients(np.random.default_rng(3), 300, shift=1.0)
    np.savez(tmp_path / "new.npz", x=x, feature_names=np.array(COLUMNS))
    report = measure_drift(model, tmp_path / "new.npz")
    assert {"input age", "prediction p_1"} <= {*report["drifted"]}
    assert not any(
        test["what"].startswith(("label", "error", "calibration")) for test in report["tests"]
    )


def test_a_patient_counts_once(model, tmp_path):
    """Twenty records of each of a few patients say no more than one of each."""
    rng = np.random.default_rng(11)
    report = measure_drift(model, write(tmp_path / "new.npz", rng, n=100, repeats=20))
    assert report["samples"]["new"] == 100 and not report["drifted"]


def test_the_test_is_pearsons():
    """Of ten cells, as scipy has it; a category that is new joins its neighbour, or is not tested."""
    rng = np.random.default_rng(2)
    old, new = rng.normal(0, 1, 1000), rng.normal(0.1, 1, 400)
    counts = Counts.of(old)
    assert counts.counts == [100] * 10
    table = [counts.counts, np.histogram(new, [-np.inf, *counts.edges, np.inf])[0]]
    expected = chi2_contingency(table, correction=False).pvalue
    assert compare_counts("x", counts, new).p == pytest.approx(expected, rel=1e-12)
    binary = Counts.of(np.array([0.0] * 90 + [1.0] * 10))
    assert binary.counts == [90, 10] and binary.edges == [0.5]
    assert compare_counts("x", binary, np.array([0.0, 1.0] * 100)).p < 1e-6
    assert np.isnan(compare_counts("x", binary, np.zeros(3)).p)
    constant = Counts.of(np.zeros(200))
    assert np.isnan(compare_counts("x", constant, np.zeros(200)).p)


def test_the_command(model, tmp_path, capsys):
    new = write(tmp_path / "new.npz", np.random.default_rng(5), n=900, shift=1.0)
    assert silofl("drift", model, "--data", new) == 0
    said = capsys.readouterr().out
    assert "900 new patients against 300 of training" in said and "DIFFERS" in said
    assert silofl("drift", model, "--data", new, "--json") == 0
    assert "input age" in json.loads(capsys.readouterr().out)["drifted"]
    assert summary_file(model).stat().st_mode & 0o777 == 0o600
    assert not {"values", "x"} & {*json_of(summary_file(model))}


def test_mistakes_have_one_line(model, tmp_path):
    rng = np.random.default_rng(9)
    small = write(tmp_path / "small.npz", rng, n=120)
    fails(
        UserError,
        "60 training and 48 test samples.*100 of each",
        write_training_summary,
        model,
        small,
    )
    other = tmp_path / "other.safetensors"
    other.write_bytes(model.read_bytes())
    other.with_name("other.safetensors.json").write_bytes(
        model.with_name("m.safetensors.json").read_bytes()
    )
    fails(UserError, "has no summary beside it: silofl drift", measure_drift, other, small)
    content = json_of(summary_file(model))
    summary_file(other).write_text(json.dumps({**content, "model": "0" * 64}))
    fails(UserError, "is of another model", measure_drift, other, small)
    summary_file(other).write_text("{}")
    fails(ValueError, "the key model is missing; silofl drift", measure_drift, other, small)
    np.savez(tmp_path / "wide.npz", x=np.zeros((200, 5), np.float32))
    fails(UserError, "samples of shape", measure_drift, model, tmp_path / "wide.npz")
