"""``silofl export --temperature``: T against statsmodels, and the probabilities that ``predict`` then writes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from failing import fails
from predictions import read_csv
from taken import silofl
from tiny import federate, json_of, random_silos, rows_of, write_silo

from client.export import export_model
from client.exporting.calibration import T_RANGE, fit_temperature
from client.prediction.predict import predict_file
from partitions.common.errors import UserError
from server.cli.main import main


def test_it_is_statsmodels():
    """``1 / Logit(event, log(p/(1-p))).fit(method="newton", tol=1e-14).params[0]`` of statsmodels 0.15.0."""
    rng = np.random.default_rng(31)
    z = rng.normal(0, 1.5, 80)
    event = rng.random(80) < 1 / (1 + np.exp(-(0.4 + 0.7 * z)))
    x = torch.tensor(np.log((p := 1 / (1 + np.exp(-z))) / (1 - p)))
    labels = torch.tensor(event).long()
    two = torch.stack([torch.zeros(80, dtype=torch.float64), x], 1)
    assert fit_temperature("multiclass", two, labels) == pytest.approx(
        3.7572759060378447, abs=1e-9
    )
    assert fit_temperature("multilabel", x[:, None], labels[:, None].float()) == pytest.approx(
        3.7572759060378447, abs=1e-9
    )
    # What it would be is beyond
    assert fit_temperature("multiclass", 1e3 * two, labels) == pytest.approx(T_RANGE[1])
    assert fit_temperature(
        "multiclass", two * 0 + torch.eye(2)[labels].double(), labels
    ) == pytest.approx(T_RANGE[0])


def test_parts_that_the_run_did_not_have_are_pointed_out(tmp_path, finished, capsys):
    """A simulation draws validation parts anew: those of the file may have trained the model."""
    run, file = finished
    with np.load(file) as npz:
        arrays = dict(npz)
    np.savez(
        tmp_path / "other.npz",
        **{key: own[:-1] if key.endswith("_val") else own for key, own in arrays.items()},
    )
    out = ["--out", str(tmp_path / "m.safetensors")]
    assert (
        silofl(*f"export {run} --silo a --temperature {tmp_path}/other.npz".split(), *out) == 0
    )
    assert (
        "note: the run divided the samples otherwise than this file" in capsys.readouterr().out
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run with steps so long that its models are far too sure, and a hospital's file."""
    folder = tmp_path_factory.mktemp("temperature")
    files = random_silos(folder, {"a": 90, "b": 60}, classes=3)
    federate(files, directory=folder / "run", strategy="ditto", rounds=2, learning_rate=20.0)
    return folder / "run", files["a"]


def test_the_model_predicts_with_it(tmp_path, finished, capsys):
    """The order of the classes stays; the loss on the validation part falls to what the card says."""
    run, file = finished
    plain, scaled = tmp_path / "plain.safetensors", tmp_path / "scaled.safetensors"
    export_model(run, "a", "best", plain)
    arguments = f"export {run} --silo a --temperature {file} --out {scaled}".split()
    assert main(arguments) == 0
    card = json_of(scaled.with_name("scaled.safetensors.json"))["temperature"]
    assert card["T"] > 1 and card["samples"] == 90
    said = capsys.readouterr().out
    assert (
        f"temperature {card['T']:.3f} from 90 validation samples" in said
        and "divided the samples" not in said
    )
    assert scaled.read_bytes()[200:] != b"" and card["loss_after"] < card["loss_before"]
    (_, labels, p), (_, same, q) = (
        read_csv(predict_file(model, file)) for model in (plain, scaled)
    )
    y = torch.tensor(rows_of(file)[1])  # its test part is its validation part
    assert labels == same
    losses = [
        float(F.nll_loss(torch.tensor(each).clamp(min=1e-12).log(), y)) for each in (p, q)
    ]
    assert losses[1] == pytest.approx(card["loss_after"], rel=1e-3) and losses[1] < losses[0]


def test_it_is_fitted_on_the_validation_part(tmp_path, finished):
    """Other rows for training and test change nothing; other rows for validation do."""
    run, file = finished
    with np.load(file) as npz:
        whole = dict(npz)
    found = []
    for changed in ((), ("train", "test"), ("val",)):
        arrays = {
            key: value[::-1] if key[2:] in changed and key[0] == "y" else value
            for key, value in whole.items()
        }
        np.savez(tmp_path / "other.npz", **arrays)
        card = export_model(
            run, "a", "best", tmp_path / "m", temperature=tmp_path / "other.npz"
        )
        assert card.temperature
        found.append(card.temperature)
    assert found[0] == found[1] and found[0].T != found[2].T


def test_what_it_refuses(tmp_path, finished):
    """Nothing is written: too few samples, other columns, more classes, no file."""
    run, file = finished
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 3)), np.arange(40) % 3
    few = write_silo(tmp_path / "few.npz", x[:20], y[:20].tolist(), 3)
    wide = tmp_path / "wide.npz"
    write_silo(wide, rng.normal(size=(40, 4)), y.tolist(), 3)
    more = write_silo(tmp_path / "more.npz", x, (np.arange(40) % 4).tolist(), 4)
    faults = {
        few: "has 20 validation samples, at least 30 are needed",
        wide: r"holds float32 samples of shape \(4,\); the model takes float32 of shape \(3,\)",
        more: "is for multiclass with 4 outputs",
        tmp_path / "none.npz": "there is no such file",
    }
    for data, reason in faults.items():
        fails(
            UserError, reason, export_model, run, "a", "best", tmp_path / "m", temperature=data
        )
    assert not (tmp_path / "m").exists()
    assert (
        main(f"export {run} --which shared --temperature {file} --out {tmp_path}/m".split())
        == 2
    )
