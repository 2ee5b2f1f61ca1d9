"""``silofl export --conformal``: sets and intervals that hold as often as they say, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from predictions import read_rows
from tiny import federate, json_of, random_silos, write_silo

from client.export import card_file, export_model
from client.exporting.calibration import one_per_patient
from client.prediction.predict import predict_file
from partitions.common.errors import UserError
from partitions.npz import write_npz
from partitions.splits import Split
from server.cli.main import main


def noisy(path, rng, n, task):
    """One column, and labels that follow it with much noise; train, val and test are other samples."""
    named: dict[str, Any] = {}
    for split in ("train", "val", "test"):
        x = rng.normal(size=(n, 1)).astype(np.float32)
        noise = rng.normal(size=(n, 1))
        y = (
            (x + 0.8 * noise > 0)[:, 0].astype(np.int64)
            if task == "multiclass"
            else 5 + 3 * x + noise
        )
        named |= {
            f"x_{split}": x,
            f"y_{split}": y if task == "multiclass" else y.astype(np.float32),
        }
    named |= {"classes": np.array(2)} if task == "multiclass" else {}
    write_npz(path, named)
    return path


@pytest.fixture(scope="module", params=["multiclass", "regression"])
def exported(request, tmp_path_factory):
    """Task, run, the file of its silo and a file of 2,000 patients whom no model has seen."""
    folder, rng = tmp_path_factory.mktemp("conformal"), np.random.default_rng(11)
    files = {
        name: noisy(folder / f"{name}.npz", rng, 300, request.param) for name in ("a", "b")
    }
    federate(files, directory=folder / "run", rounds=3, learning_rate=0.3)
    return (
        request.param,
        folder / "run",
        files["a"],
        noisy(folder / "new.npz", rng, 2000, request.param),
    )


def test_new_patients_are_covered(tmp_path, exported, capsys):
    """Of 2,000 new ones 90 % within four standard deviations, Beta(271, 30) of the threshold and binomial of these.

    The threshold by hand: the 271st smallest of 300 scores, by the probabilities that predict writes without it.
    """
    task, run, file, new = exported
    plain, model = tmp_path / "plain.safetensors", tmp_path / "m.safetensors"
    export_model(run, "a", "last", plain)
    command = f"export {run} --silo a --which last --conformal {file} --out {model}".split()
    assert main(command) == 0
    said = capsys.readouterr().out
    assert (
        "of 90% of new patients like these, as computed on 300 test records" in said
        and "note" not in said
    )
    card = json_of(card_file(model))["conformal"]
    assert (card["coverage"], card["records"], card["as_trained"]) == (0.9, 300, True)
    answers, without = read_rows(predict_file(model, new)), read_rows(predict_file(plain, new))
    y = np.load(new)["y_test"]
    assert [{k: v for k, v in row.items() if k in without[0]} for row in answers] == without
    own = read_rows(predict_file(plain, file))
    truth = np.load(file)["y_test"]
    if task == "multiclass":
        assert list(answers[0]) == ["index", "label", "p_0", "p_1", "set_0", "set_1"]
        scores = [1 - float(row[f"p_{label}"]) for row, label in zip(own, truth, strict=True)]
        assert card["threshold"] == pytest.approx(sorted(scores)[270], abs=1e-5)
        held = [row[f"set_{label}"] == "1" for row, label in zip(answers, y, strict=True)]
        sizes = {row["set_0"] + row["set_1"] for row in answers}
        assert "11" in sizes and sizes & {"10", "01"}  # the sets say something
    else:
        assert list(answers[0]) == ["index", "y_0", "low_0", "high_0"]
        scores = [
            abs(float(row["y_0"]) - label) for row, label in zip(own, truth[:, 0], strict=True)
        ]
        assert card["half_widths"] == [pytest.approx(sorted(scores)[270], abs=1e-4)]
        held = [
            float(row["low_0"]) <= label <= float(row["high_0"])
            for row, label in zip(answers, y[:, 0], strict=True)
        ]
    spread = math.sqrt(0.9 * 0.1 / 302 + 0.9 * 0.1 / 2000)
    assert abs(np.mean(held) - 0.9) < 4 * spread


def test_predict_says_what_a_card_lacks(tmp_path, exported, capsys):
    task, run, file, _ = exported
    bare, full = tmp_path / "bare.safetensors", tmp_path / "full.safetensors"
    export_model(run, "a", "last", bare)
    export_model(
        run,
        "a",
        "last",
        full,
        temperature=file if task == "multiclass" else None,
        conformal=file,
    )
    assert main(f"predict --model {bare} --data {file}".split()) == 0
    said = capsys.readouterr().err
    assert ("has no temperature" in said) == (task == "multiclass")
    assert (
        f"no conformal threshold, so there are no {'sets' if task == 'multiclass' else 'intervals'}"
        in said
    )
    assert main(f"predict --model {full} --data {file}".split()) == 0
    out, said = capsys.readouterr()
    found = read_rows(out)
    assert "no " not in said and "computed on 300 test records" in said
    if task == "multiclass":  # the threshold is of the scaled probabilities
        scores = [
            1 - float(row[f"p_{label}"])
            for row, label in zip(found, np.load(file)["y_test"], strict=True)
        ]
        card = json_of(card_file(full))
        assert card["temperature"]["T"] != 1
        assert card["conformal"]["threshold"] == pytest.approx(sorted(scores)[270], abs=1e-5)


def test_a_patient_counts_once():
    """Three patients of 5, 1 and 2 samples: one sample of each, the same in every call."""
    patient = np.array([4, 4, 4, 4, 4, 7, 9, 9])
    split = Split(np.arange(8.0, dtype=np.float32)[:, None], np.arange(8), patient)
    one, named = one_per_patient(split)
    assert named and list(one.patient if one.patient is not None else ()) == [4, 7, 9]
    assert (one.y == one.x[:, 0]).all() and (one.y == one_per_patient(split)[0].y).all()


def test_what_it_refuses(tmp_path):
    """Nothing is written. Ten per cent need nine samples: ceil(10 * 0.9) = 9."""
    files = random_silos(tmp_path, {"a": 20, "b": 20}, classes=2)
    federate(files, directory=tmp_path / "run", rounds=1)
    rng, out = np.random.default_rng(0), tmp_path / "m"
    eight = write_silo(tmp_path / "8.npz", rng.normal(size=(8, 3)), [0, 1] * 4)
    nine = write_silo(tmp_path / "9.npz", rng.normal(size=(9, 3)), [0, 1] * 4 + [0])
    for data, coverage, reason in (
        (eight, 0.9, "has 8 test samples, at least 9 are needed for a coverage of 0.9"),
        (nine, 0.95, "at least 19 are needed"),
        (nine, 1.0, r"--coverage 1: from 0.5 to 0.99"),
        (tmp_path / "none.npz", 0.9, "--conformal: .*there is no such file"),
    ):
        with pytest.raises(UserError, match=reason):
            export_model(tmp_path / "run", "a", "last", out, conformal=data, coverage=coverage)
    assert not out.exists()
    known = export_model(tmp_path / "run", "a", "last", out, conformal=nine).conformal
    assert known and known.as_trained is False
    shared = f"export {tmp_path}/run --which shared --conformal {nine} --out {out}".split()
    assert main(shared) == 2
