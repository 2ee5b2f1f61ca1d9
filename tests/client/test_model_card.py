"""A model card is data that somebody else may have written: never code, and never a wrong answer."""

from __future__ import annotations

import hashlib
import json
import math

import numpy as np
import pytest
import torch
from tiny import federate, json_of, random_silos

from client.export import CARD, card_file, export_model, read_model
from client.exporting.model_card import Card
from client.prediction.predict import predict_file
from partitions.common.errors import DataError, UserError
from partitions.common.names import guard_formula, is_formula, unguard_formula
from partitions.common.parsed import parse_values
from partitions.schema import parse_schema
from server.cli.main import main
from strategies.base.state import read_sealed, write_sealed

TEMPERATURE = {
    "T": 1.0,
    "samples": 30,
    "loss_before": 0.5,
    "loss_after": 0.4,
    "as_trained": True,
}
CONFORMAL = {
    "coverage": 0.9,
    "records": 30,
    "patients": False,
    "as_trained": True,
    "threshold": 0.7,
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A model with its card, and a data file that it fits."""
    folder = tmp_path_factory.mktemp("card")
    files = random_silos(folder, {"a": 6, "b": 10})
    federate(files, directory=folder / "run", state_dir=folder / "state", rounds=1)
    export_model(folder / "state", "a", "last", folder / "m.safetensors")
    return folder / "m.safetensors", files["a"]


@pytest.fixture
def changed(exported, tmp_path):
    """Write the model with another card, which the model's header is sealed with, as an attacker can."""

    def write(path, value):
        tensors, _ = read_sealed(exported[0])
        card = json_of(card_file(exported[0]))
        scale = {"mean": [0, 0, 0], "std": [1, 1, 1]}
        card |= {"temperature": TEMPERATURE, "conformal": CONFORMAL, "normalisation": scale}
        *parents, last = path.split(".")
        place = card
        for key in parents:
            place[key] = place = dict(place[key])
        place[last] = value
        text = json.dumps(card).encode()
        file = tmp_path / "m.safetensors"
        write_sealed(file, tensors, {"format": "pt", CARD: hashlib.sha256(text).hexdigest()})
        card_file(file).write_bytes(text)
        return file

    return write


LEAST, DEVIATIONS = "must be greater than or equal to", "must have deviations above 0"
NONE, NUMBERS = "must be a valid number", "must be numbers, or lists of them"
CARDS = (
    ("temperature.T", 0, f"temperature.T = 0: {LEAST} 0.05"),
    ("temperature.T", math.nan, "must be a finite number"),
    ("temperature.T", "1", NONE),
    ("temperature.T", True, NONE),
    ("normalisation", {"mean": [0, 0, 0], "std": [1, 0, 1]}, DEVIATIONS),
    ("normalisation", {"mean": [0, 0, 0], "std": [1, -1, 1]}, DEVIATIONS),
    ("normalisation.mean", [0], "must have as many finite means as deviations"),
    ("normalisation", {"mean": [10**400], "std": [1]}, NUMBERS),
    ("normalisation", {"mean": [[0, "a"]], "std": [1, 1]}, NUMBERS),
    ("labels", {"mean": [0.0], "std": [0.0]}, DEVIATIONS),
    ("conformal.threshold", 1.5, "conformal.threshold = 1.5: must be less than"),
    ("conformal.coverage", -1, "conformal.coverage = -1: must be greater than"),
    ("conformal.half_widths", [1.0], "must have either threshold or half_widths"),
    ("classes", 10**9, "classes = 1000000000: must be less than or equal to"),
    ("task", "telling", "task = 'telling': must be 'multiclass'"),
    ("temprature", 1, r"'temprature' is no key of it \(did you mean 'temperature'\?\)"),
    ("schema", {"labels": ["well", "=cmd()"]}, r"the label '=cmd\(\)' begins with '='"),
    ("model.settings", {"hidden": "4", "dropout": 7.0}, "mlp.dropout = 7.0 is out of range"),
    ("model.name", "os:system", "is of the network os:system, code of its own"),
)


@pytest.mark.parametrize(("path", "value", "line"), CARDS)
def test_bad_cards_are_one_line(changed, path, value, line):
    with pytest.raises(UserError, match=line) as caught:
        read_model(changed(path, value))
    assert "\n" not in str(caught.value)


def test_a_card_that_names_code_runs_none(changed, exported, tmp_path, monkeypatch, capsys):
    """In Python's path, as files beside a model often are; also with another network named."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "planted.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\ndef f(shape, outputs): ...\n"
    )
    model = changed("model.name", "planted:f")
    for more in ([], ["--network", "planted:g"], ["--serve", "--port", "0"]):
        data = [] if "--serve" in more else ["--data", str(exported[1])]
        assert main(["predict", "--model", str(model), *data, *more]) == 2
    assert main(f"evaluate {model} --data {exported[1]} --out {tmp_path}/out".split()) == 2
    assert not (tmp_path / "ran").exists() and not (tmp_path / "out").exists()
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 4 and all("planted:f, code of its own" in line for line in errors)


def test_answers_that_are_no_numbers_are_refused(exported, tmp_path):
    tensors, _ = read_sealed(exported[0])
    name = next(iter(tensors))
    text = card_file(exported[0]).read_bytes()
    card_file(tmp_path / "m.safetensors").write_bytes(text)
    damaged = {**tensors, name: torch.full_like(tensors[name], torch.nan)}
    write_sealed(
        tmp_path / "m.safetensors",
        damaged,
        {"format": "pt", CARD: hashlib.sha256(text).hexdigest()},
    )
    with pytest.raises(UserError, match="answers with no number for a sample of"):
        predict_file(tmp_path / "m.safetensors", exported[1])


def test_deep_and_long_cards_are_refused(tmp_path):
    for text in (b'{"model": ' + b"[" * 100_000, b"[]", b'{"method": "a', b"\xff\xfe"):
        with pytest.raises(DataError, match="export it") as caught:
            parse_values(Card, text, tmp_path / "card.json", "export it")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["=1+1", "+x", "-x", "@a", "-"])
def test_labels_that_a_spreadsheet_computes_are_refused(name):
    with pytest.raises(DataError, match=r"begins with .*, which a spreadsheet computes"):
        parse_schema({"labels": ["well", name]})
    assert guard_formula(name) == f"'{name}" and unguard_formula(guard_formula(name)) == name


@pytest.mark.parametrize("name", ["-1", "+2.5", "well", "1-2", "a@b"])
def test_numbers_and_names_are_no_formulas(name):
    assert parse_schema({"labels": [name]}).labels == (name,) and not is_formula(name)


def test_patients_keys_of_a_data_file_are_guarded(exported):
    from client.prediction.new_samples import NewSamples, answers_csv

    asked = NewSamples(np.zeros((2, 3)), 0, parse_schema({}), ["=HYPERLINK()", "-7"], "patient")
    assert (
        answers_csv(asked, ["label"], [["ill"], ["well"]])
        == "patient,label\n'=HYPERLINK(),ill\n-7,well\n"
    )
