"""A method's own head: one vector and its blocks, the base network's start, gradients on features, export."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from near import near
from predictions import read_csv
from tiny import federate, rows_of, same
from torch import nn

from client.export import export_model
from client.prediction.predict import predict_file
from models.features import all_features
from models.flat import FlatModel
from models.initialisation import flat_model, initial_model
from models.networks.blocks import with_head
from models.networks.mlp import MlpSettings
from models.networks.registry import build
from models.samples import Samples
from models.training import feature_gradient, loss_gradient
from strategies.fedavg import FedAvg

OPTIONS = MlpSettings("4")


class Gate(nn.Module):
    """logits = last layer of (features times a gate)."""

    block_names = ("own", "gate")

    def __init__(self, layer):
        super().__init__()
        self.own, self.gate = layer, nn.Linear(layer.in_features, layer.in_features)

    def forward(self, z):
        return self.own(z * torch.sigmoid(self.gate(z)))


def test_a_head_stands_behind_the_body_in_one_vector():
    plain = flat_model("mlp", (3,), 3, OPTIONS, "cpu")
    model = flat_model("mlp", (3,), 3, OPTIONS, "cpu", Gate)
    assert [(b.name, b.start, b.stop) for b in model.layout.blocks] == [
        ("fc1", 0, 16),
        ("fc2.own", 16, 31),
        ("fc2.gate", 31, 51),
    ]
    assert model.head == slice(16, 51) and plain.head == slice(16, 31)
    assert model.last_block is model.module.get_submodule("fc2")
    start = initial_model("mlp", (3,), 3, OPTIONS, 7, Gate)("")
    assert same(start[:31], initial_model("mlp", (3,), 3, OPTIONS, 7)(""))


@pytest.mark.parametrize(
    "name, shape", [("small-cnn", (1, 8, 8)), ("resnet8", (3, 8, 8)), ("mlp", (5,))]
)
def test_every_kind_of_network_takes_one(name, shape):
    """The head gets the features of the last layer; parts, freezing and buffers go by its blocks."""
    model = FlatModel(with_head(build(name, shape, 4), Gate))
    x, y = torch.randn(6, *shape), torch.tensor([0, 1, 2, 3, 0, 1])
    gate = model.layout.parts([model.layout.blocks[-1].name])
    model.freeze(*model.layout.outside(gate))
    loss_gradient(model, x, y, nn.functional.cross_entropy)
    assert model.gradient[gate[0]].abs().sum() > 0
    assert model.gradient[: gate[0].start].abs().sum() == 0


def test_a_head_needs_a_linear_layer():
    network = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    with pytest.raises(
        ValueError, match="needs a linear last layer with a bias, which '1' is not"
    ):
        with_head(network, Gate)
    with pytest.raises(
        ValueError, match="needs a linear last layer with a bias, which '1' is not"
    ):
        FlatModel(network).layout.linear_head()


def test_gradients_of_losses_on_features():
    """A linear network and the loss sum z: every W1 entry's gradient is the sum of its column where z > 0."""
    model = flat_model("mlp", (3,), 3, OPTIONS, "cpu")
    x, y = torch.randn(5, 3), torch.tensor([0, 1, 2, 0, 1])
    loss = feature_gradient(model, x, y, lambda logits, z, y: z.sum())
    z = x @ model.vector[:12].view(4, 3).T + model.vector[12:16]
    near(loss, z.relu().sum(), 1e-5)
    expected = torch.cat(
        [((z > 0).float().T @ x).flatten(), (z > 0).float().sum(0), torch.zeros(15)]
    )
    near(model.gradient, expected, 1e-5)
    samples = Samples(x.numpy(), y.numpy())
    near(all_features(model, samples), z.relu(), 1e-5)
    assert model.module.training and not model.last_block._forward_pre_hooks

    loss_gradient(model, x, y, nn.functional.cross_entropy)
    plain = model.gradient.clone()
    feature_gradient(model, x, y, lambda logits, z, y: nn.functional.cross_entropy(logits, y))
    assert same(model.gradient, plain)


def test_federated_exported_and_used(two, tmp_path, monkeypatch):
    """FedAvg of the gated network: sent whole, kept whole; its export is evaluated by hand."""
    monkeypatch.setattr(FedAvg, "head", Gate)
    run = federate(two, "fedavg", rounds=2, mlp__hidden="4", directory=tmp_path / "run")
    assert run.values("bytes_up") == [2 * 4 * 51, 2 * 4 * 51, 0]
    card = export_model(tmp_path / "run", "b", "last", tmp_path / "b.safetensors")
    assert card.model.model_dump(exclude_unset=True) == {
        "name": "mlp",
        "settings": {"hidden": "4", "dropout": 0.0},
        "head": "fedavg",
    }
    x, y = rows_of(two["b"])
    w = run.personal("b").double().numpy()
    w1, b1, w2, b2, w3, b3 = (
        part.reshape(shape)
        for part, shape in zip(
            np.split(w, [12, 16, 28, 31, 47]), [(4, 3), 4, (3, 4), 3, (4, 4), 4], strict=True
        )
    )
    z = np.maximum(x @ w1.T + b1, 0)
    p = np.exp((z / (1 + np.exp(-(z @ w3.T + b3)))) @ w2.T + b2)
    p /= p.sum(1, keepdims=True)
    _, label, given = read_csv(predict_file(tmp_path / "b.safetensors", two["b"]))
    assert np.allclose(given, p, atol=1e-5) and label == p.argmax(1).tolist()
    assert card.metrics["test.accuracy"] == np.mean(p.argmax(1) == y)
