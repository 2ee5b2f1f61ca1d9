"""Every method on every kind of input: texts, signals, several inputs of a sample, some of which are missing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from cases import TYPICAL
from failing import fails
from representatives import seldom
from tiny import federate, simulated

from models.networks.registry import resolve
from strategies import strategies

CLASSES, STEPS, WORDS = 3, 8, 30
SIZES = {"a": 7, "b": 6, "c": 5}
NETWORKS: dict[str, dict[str, Any]] = {  # what "auto" is for each kind, as small as can be
    "text": {"fasttext.width": 4},
    "signal": {
        "fedapm-signals.width": 4,
        "fedapm-signals.filters": 2,
        "fedapm-signals.heads": 2,
    },
    "several": {
        "fedapm-signals.width": 4,
        "fedapm-signals.filters": 2,
        "fedapm-signals.heads": 2,
    },
}
OPTIONS: dict[str, Any] = {
    "model": "auto",
    "rounds": 2,
    "batch_size": 8,
    "evaluate_every": 2,
    "learning_rate": 0.1,
    "fedala__max_epochs": 2,
    "fedrep__head_epochs": 2,
    "fedphp__lambda": 0.5,
    "normalization": "agreed",
}


def samples(kind, n, rng):
    """The inputs of n samples by the names they have in a file, and their classes, which every input tells."""
    y = np.arange(n) % CLASSES
    text = rng.integers(1, WORDS, (n, 6))
    text[:, 0] = 1 + y
    text[:, 4:] = 0  # shorter than could be
    signal = rng.normal(size=(n, 2, STEPS)).astype(np.float32) + y[:, None, None]
    if kind == "text":
        return {"x": text}, y
    if kind == "signal":
        return {"x": signal}, y
    table = rng.normal(size=(n, 2)) + y[:, None]
    signal[::3] = 0  # missing
    return {"x_notes": text, "x_ecg": signal, "x_age": table.astype(np.float32)}, y


@pytest.fixture(scope="module")
def kind(request):
    return str(request.param)


@pytest.fixture(scope="module")
def silos(kind, tmp_path_factory):
    folder, files = tmp_path_factory.mktemp(kind), {}
    for seed, (name, n) in enumerate(SIZES.items()):
        named: dict[str, Any] = {"classes": np.array(CLASSES)}
        for split in ("train", "val", "test"):
            inputs, y = samples(kind, n, np.random.default_rng(seed))
            named |= {f"{key}_{split}": x for key, x in inputs.items()} | {f"y_{split}": y}
        if kind != "signal":
            named["vocabulary"] = np.array(WORDS)
        files[name] = folder / f"{name}.npz"
        np.savez(files[name], **named)
    return files


REFUSED = {
    "fedbn": "keeps batch normalisation in the silo, and this network has none",
    "fedrdn": "fedrdn takes a table, picture, volume, not ",
    "fedxgb": "it takes tables",
}


METHODS = sorted(n for n, method in strategies().items() if not method.info.role.pooled)


# A signal is one of several inputs, and by itself numbers as those of a picture: other methods take it in both forms
@pytest.mark.parametrize(
    ("kind", "method"),
    [
        (kind, method) if method in TYPICAL else seldom(kind, method)
        for kind in NETWORKS
        for method in METHODS
        if kind != "signal" or method in TYPICAL
    ],
    indirect=["kind"],
)
def test_every_method_takes_every_input(silos, kind, method):
    """Two rounds: every silo answers, what it says is finite, and its own model is kept, is finite and has moved."""
    settings = {"strategy": method, **OPTIONS, **NETWORKS[kind]}
    if method.endswith("-lora"):
        settings["lora_rank"] = 2
    if method in REFUSED:
        fails(ValueError, REFUSED[method], federate, silos, **settings)
        return
    run = federate(silos, **settings)
    layout = run.strategy.layout
    assert layout.blocks[-1].name.removeprefix("networks.2.").startswith("fc2")
    for silo in silos:
        losses = run.values("loss", silo, "personal")
        assert losses and np.isfinite(losses).all()
        own = run.personal(silo)
        assert "best" in run.kept(silo)
        assert own.shape == (layout.size,) and torch.isfinite(own).all()
        alike = [torch.equal(own, run.personal(other)) for other in silos if other != silo]
        # kNN-Per's own part is what votes beside the shared network
        assert all(alike) if method == "knn-per" else not any(alike)


@pytest.mark.parametrize("kind", NETWORKS, indirect=True)
def test_pooled_takes_every_input(silos, kind):
    """Pooled takes one file that a simulation divides, and so do all."""
    options = {k.replace("__", "."): v for k, v in OPTIONS.items()} | NETWORKS[kind]
    loop = simulated(
        strategy="pooled",
        dataset=str(silos["a"]),
        **{**options, "silos": 2, "min-metric-samples": 1},
    )
    losses = [row.value for row in loop.history.rows if row.metric == "loss"]
    assert losses and np.isfinite(losses).all()


def test_the_networks_are_those_of_auto():
    text, signal = ("tokens", 6, WORDS), (2, STEPS)
    assert resolve("auto", text) == "fasttext"
    assert {resolve("auto", signal), resolve("auto", (("notes", text), ("ecg", signal)))} == {
        "fedapm-signals"
    }
