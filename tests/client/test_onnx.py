"""``silofl export --onnx``, and an exported model without silofl: files that say the same as ``silofl predict``."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from failing import fails
from hospitals import MADE, NETWORKS, hospital_files
from predictions import read_csv, read_rows
from representatives import sampled
from taken import silofl
from tiny import federate, json_of, random_silos
from typical_inputs import TYPICAL

from client.export import card_file, export_model
from client.exporting.model_card import Architecture, Card, Input, Temperature
from client.exporting.onnx import Answering, onnx_of
from client.prediction.predict import predict_file
from models.flat import FlatModel
from models.networks.registry import build, spec_of
from models.shapes import write_shape
from partitions.common.errors import UserError
from server.cli.main import main

DOCS = Path(__file__).resolve().parents[2] / "docs/own-model.md"
# By PyTorch's exporter
REFUSED = ("vit-s", "player-transformer", "fedapm-image-text", "fedapm-signals")


def bare(name, shape):
    """A card and a network with random weights."""
    torch.manual_seed(0)
    own = spec_of(name).settings
    card = Card.model_construct(
        model=Architecture(name=name, settings={}),
        input=Input(shape=write_shape(shape), dtype="float32"),
        task="segmentation" if name == "unet" else "multiclass",
        normalisation=None,
    )
    return card, FlatModel(build(name, shape, 2, own() if own else None))


@sampled("name", [name for name in TYPICAL if name not in REFUSED], 2)
def test_networks_as_onnx(name):
    """What onnxruntime gives is compared here again, on other inputs."""
    card, net = bare(name, shape := TYPICAL[name])
    halved = Temperature(T=2.0, samples=30, loss_before=1.0, loss_after=1.0, as_trained=True)
    content, apart = onnx_of(card.model_copy(update={"temperature": halved}), net)
    onnx.checker.check_model(onnx.load_from_string(content))
    rng = np.random.default_rng(9)
    tokens = shape[0] == "tokens"
    x = (
        rng.integers(0, 30, (3, 9), np.int32)
        if tokens
        else rng.normal(size=(3, *shape)).astype(np.float32)
    )
    found = onnxruntime.InferenceSession(content).run(["probabilities"], {"x": x})[0]
    with torch.no_grad():
        ours = (net.module.eval()(torch.from_numpy(x)) / 2).softmax(1).numpy()
    assert apart < 1e-4 and np.allclose(found, ours, atol=1e-4) and found.std() > 0


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_translated_is_refused_in_one_line(name):
    with pytest.raises(UserError, match=f"--onnx: {name} .*leave --onnx out") as caught:
        onnx_of(*bare(name, TYPICAL[name]))
    assert "\n" not in str(caught.value)


def test_several_inputs_are_refused():
    card, net = bare("mlp", (3,))
    card = card.model_copy(
        update={"input": Input(shape=write_shape((("a", (3,)), ("b", (4,)))), dtype="float32")}
    )
    fails(UserError, "takes several inputs", onnx_of, card, net)


def test_a_difference_is_found(monkeypatch):
    """A network that says something else when it is traced than when it is used."""
    card, net = bare("mlp", (3,))
    forward = Answering.forward

    def odd(self, x):
        return forward(self, x) + (0 if torch.onnx.is_in_onnx_export() else 1e-3)

    monkeypatch.setattr(Answering, "forward", odd)
    fails(UserError, "gives other answers in onnxruntime than in PyTorch", onnx_of, card, net)


# A class, or the pixels of each, is no column of the file.
@pytest.mark.parametrize(
    "task", [task for task in MADE if task not in ("ordinal", "segmentation")]
)
def test_the_file_predicts_as_silofl(tmp_path, task):
    """With standardised columns and labels, and bytes: raw values in, the numbers of ``silofl predict`` out."""
    files = hospital_files(tmp_path, task)
    federate(
        files,
        directory=tmp_path / "run",
        rounds=1,
        **{**NETWORKS[task], "normalization": "silo"},
    )
    card = export_model(
        tmp_path / "run", "north", "last", model := tmp_path / "m.safetensors", onnx=True
    )
    with np.load(files["north"]) as data:
        x = data["x"].astype(np.float32)  # no parts: predict takes all of it
    x = x[:, None] if card.input.dtype == "uint8" else x
    answers = onnxruntime.InferenceSession(tmp_path / "m.onnx").run(None, {"x": x})[0]
    ours = [
        [float(v) for k, v in row.items() if k != "index"]
        for row in read_rows(predict_file(model, files["north"]))
    ]
    assert np.allclose(answers, ours, rtol=1e-4, atol=1e-4)


def test_nothing_is_written_without_the_package(tmp_path, monkeypatch, capsys):
    files = random_silos(tmp_path, {"a": 40, "b": 40})
    federate(files, directory=tmp_path / "run", rounds=1)
    out = tmp_path / "m.safetensors"
    command = f"export {tmp_path}/run --silo a --onnx --out".split()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "onnxruntime", None)
        assert silofl(*command, out) == 2
    assert "pip install 'silofl[onnx]'" in capsys.readouterr().err and not out.exists()
    assert silofl(*command, tmp_path / "m.onnx") == 2 and not (tmp_path / "m.onnx").exists()
    assert silofl(*command, out) == 0
    assert "m.onnx: onnxruntime gives PyTorch's answers" in capsys.readouterr().out
    card = json_of(card_file(out))["onnx"]
    assert card["file"] == "m.onnx" and (tmp_path / "m.onnx").is_file()


def test_an_older_file_beside_a_new_model_is_named(tmp_path, capsys):
    """It is another model's, and stays: nothing is removed unasked."""
    federate(random_silos(tmp_path, {"a": 40, "b": 40}), directory=tmp_path / "run", rounds=1)
    command = f"export {tmp_path}/run --silo a --out {tmp_path}/m.safetensors".split()
    said = f"note: {tmp_path / 'm.onnx'} was there before and is not of this model: remove it"
    assert main(command) == 0 and said not in capsys.readouterr().out
    (tmp_path / "m.onnx").write_bytes(older := b"\x08\x08\x12\x07pytorch")
    assert main(command) == 0 and said in capsys.readouterr().out
    assert (tmp_path / "m.onnx").read_bytes() == older
    assert silofl(*command, "--onnx") == 0 and said not in capsys.readouterr().out


def test_the_lines_of_the_page(tmp_path, monkeypatch):
    """docs/own-model.md: a model in plain PyTorch, and in onnxruntime, as printed; silofl cannot be imported."""
    files = random_silos(tmp_path, {"a": 40, "b": 40})
    federate(files, directory=tmp_path / "run", rounds=2, normalization="silo", mlp__hidden="5")
    export_model(
        tmp_path / "run",
        "a",
        "last",
        model := tmp_path / "ours.safetensors",
        temperature=files["a"],
        onnx=True,
    )
    _, _, ours = read_csv(predict_file(model, files["a"]))
    code = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.S)
    blocks = [block for block in code if "ours.onnx" in block or "ours.safetensors" in block]
    assert len(blocks) == 2
    monkeypatch.chdir(tmp_path)
    for name in [
        name for name in sys.modules if name.split(".")[0] in ("client", "models", "silofl")
    ]:
        monkeypatch.setitem(sys.modules, name, None)
    with np.load(files["a"]) as data:
        x = data["x_test"]
    for block in blocks:
        names = {"x": x}
        exec(block, names)
        assert np.allclose(np.asarray(names["p"]), ours, atol=1e-5)
