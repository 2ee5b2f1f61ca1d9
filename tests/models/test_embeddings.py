"""Embeddings of a frozen network: what the head trains on, once for all epochs and rounds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hospitals import hospital_files
from near import near
from tiny import federate

import client.local_data
import models.features as embeddings_
from models.features import FILES, accept_embeddings, all_features, embedded, embeds
from models.flat import FlatModel
from models.initialisation import flat_model
from models.samples import Samples
from models.trainable import Part

PICTURES = (1, 12, 12)


def pictures(n=30, seed=0):
    x = np.random.default_rng(seed).integers(0, 255, (n, 12, 12, 1)).astype(np.uint8)
    return Samples(x, np.arange(n) % 3)


def network(trainable="head", seed=3, rank=0):
    part = Part(trainable, seed, None, rank, 8.0) if rank else Part(trainable, seed)
    return flat_model("small-cnn", PICTURES, 3, None, "cpu", None, part)


def test_the_head_of_embeddings_is_the_network_of_pictures():
    model, samples = network(), pictures()
    assert embeds(model, samples)
    plain = model.module(samples.take(slice(0, 8))[0])
    accept_embeddings(model)
    z = embedded(model, samples, None)
    assert torch.equal(z.take(slice(None))[0], all_features(model, samples))
    near(model.module(z.take(slice(0, 8))[0]), plain)
    assert torch.equal(model.module(samples.take(slice(0, 8))[0]), plain), "pictures go in, too"
    assert torch.equal(z.labels(), samples.labels())


@pytest.mark.parametrize(
    "changes",
    [{"trainable": "all"}, {"rank": 2}, {"trainable": "head,conv2.*"}],
    ids=["all", "lora", "more"],
)
def test_not_where_anything_before_the_head_changes(changes):
    assert not embeds(network(**changes), pictures())


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_dropout_of_nothing_is_none(p):
    """Libraries' encoders have such layers."""
    module = torch.nn.Sequential(torch.nn.Dropout(p), torch.nn.Linear(2, 2))
    assert FlatModel(module).has_dropout == (p > 0)


def test_a_file_is_of_these_weights_and_inputs_alone(tmp_path):
    model, samples = network(), pictures()
    first = embedded(model, samples, tmp_path)
    (file,) = tmp_path.glob("*.npy")
    calls, real = [], embeddings_.all_features

    def counted(*args):
        calls.append(args)
        return real(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embeddings_, "all_features", counted)
        again = embedded(model, pictures(), tmp_path)
        assert not calls and torch.equal(again.take(slice(None))[0], first.take(slice(None))[0])
        embedded(network(seed=4), samples, tmp_path)
        embedded(model, pictures(seed=1), tmp_path)
        assert len(calls) == 2 and len([*tmp_path.glob("*.npy")]) == 3
        file.write_bytes(file.read_bytes()[:99])
        mended = embedded(model, samples, tmp_path)
        assert len(calls) == 3 and torch.equal(
            mended.take(slice(None))[0], first.take(slice(None))[0]
        )
    for seed in range(10, 20):
        embedded(model, pictures(seed=seed), tmp_path)
    assert len([*tmp_path.glob("*.npy")]) == FILES


RUN = {
    "model": "small-cnn",
    "trainable": "head",
    "rounds": 3,
    "batch_size": 8,
    "local_epochs": 2,
}


@pytest.mark.parametrize("strategy", ["fedavg", "apple", "ditto", "scaffold", "fedala"])
def test_any_method_trains_the_same_head(strategy, tmp_path, monkeypatch):
    """With embeddings, without them, and with a state directory whose files a second run reads: up to rounding."""
    files = hospital_files(tmp_path, "multilabel")
    runs = [federate(files, strategy, **RUN)]
    for _ in range(2):
        client.local_data._EMBEDDED.clear()  # as in a new process
        runs.append(federate(files, strategy, state_dir=tmp_path / "states", **RUN))
    assert [*(tmp_path / "states").rglob(".embeddings/*.npy")]
    monkeypatch.setattr(client.local_data, "embeds", lambda *_: False)
    client.local_data._EMBEDDED.clear()
    plain = federate(files, strategy, **RUN)
    for silo in files:
        near(runs[0].personal(silo), plain.personal(silo), 1e-5)
    assert not any(kept for _, kept in client.local_data._EMBEDDED.values())
    first, *others = ([row for row in run.rows if "seconds" not in row.metric] for run in runs)
    assert all(rows == first for rows in others) and len({row.value for row in first}) > 20


def test_a_network_is_asked_once_whether_it_can(tmp_path, monkeypatch):
    """Three forward passes are more than a linear probe's epoch: not in each message."""
    files = hospital_files(tmp_path, "multilabel")
    asked, real = [], client.local_data.embeds

    def counted(*args):
        asked.append(args)
        return real(*args)

    monkeypatch.setattr(client.local_data, "embeds", counted)
    federate(files, "fedavg", **RUN)
    assert len(asked) == len(files)
