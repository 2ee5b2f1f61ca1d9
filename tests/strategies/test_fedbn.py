"""FedBN: rounds in torch, layers found by type inside of residual blocks, the special cases, the refusal (B30)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from near import near
from tiny import SHORT, comparable, federate, forget_models, initial, rows_of, same, write_silo
from torch import nn
from two_layers import replies_of

import strategies.base.silo
from models.flat import FlatModel, gather
from models.networks.registry import MODELS, ModelSpec, build
from models.training import generator
from partitions.common.errors import UserError

OPTIONS = {**SHORT, "momentum": 0.5, "learning_rate": 0.1}
BYTES = ("round_seconds", "bytes_down", "bytes_up")


class Residual(nn.Module):
    """fc1 (3 -> 4), a block that adds (linear, normalisation) to a shortcut of the same, fc2: Σ = 16 + 56 + 15."""

    block_names = ("fc1", "body", "fc2")

    def __init__(self, classes, affine):
        super().__init__()
        self.fc1 = nn.Linear(3, 4)
        self.body = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=affine)) for _ in range(2)
        )
        self.fc2 = nn.Linear(4, classes)

    def forward(self, x):
        x = self.fc1(x)
        x = (self.body[0](x) + self.body[1](x)).relu()
        return self.fc2(x)


NORMS = (slice(36, 44), slice(64, 72))  # γ and β of the two, each behind a linear layer of 20


@pytest.fixture(autouse=True)
def _networks(monkeypatch):
    for name, affine in (("residual", True), ("plain-norm", False)):
        spec = ModelSpec(
            "tiny",
            "tests",
            "tables",
            lambda s, classes, _, a=affine: Residual(classes, a),  # type: ignore[misc]
            ("table",),
        )
        monkeypatch.setitem(MODELS, name, spec)
    yield
    forget_models()


@pytest.mark.parametrize("average", ["silos", "samples"])
def test_rounds_of_several_steps_in_torch(two, average):
    """Three rounds with torch's own optimiser in float64: linear layers averaged, normalisation each silo's own."""
    run = federate(
        two,
        "fedbn",
        fedbn__average=average,
        model="residual",
        **{**OPTIONS, "batch_size": 1000},
    )
    start = FlatModel(Residual(3, True)).state_dict(initial(run.settings, 3, 3))
    nets = {silo: Residual(3, True).double() for silo in two}
    for net in nets.values():
        net.load_state_dict(start)
    shared = [
        n for n, _ in nets["a"].named_parameters() if not n.startswith(("body.0.1", "body.1.1"))
    ]
    for _ in range(3):
        for silo, file in two.items():
            x, y = rows_of(file)
            optimizer = torch.optim.SGD(nets[silo].parameters(), 0.1, momentum=0.5)
            for _ in range(2):
                optimizer.zero_grad()
                nn.functional.cross_entropy(
                    nets[silo](torch.tensor(x)), torch.tensor(y)
                ).backward()
                optimizer.step()
        trained = {silo: net.state_dict() for silo, net in nets.items()}
        weights = {"a": 6 / 16, "b": 10 / 16} if average == "samples" else {"a": 0.5, "b": 0.5}
        personal = {
            silo: {k: v.clone() for k, v in state.items()} for silo, state in trained.items()
        }
        for name in shared:
            mean = sum(weights[silo] * personal[silo][name] for silo in two)
            for state in trained.values():
                state[name].copy_(mean)
    for silo in two:
        arrays = run.kept(silo)
        found = FlatModel(Residual(3, True)).state_dict(
            arrays["personal"], arrays["personal.buffers"]
        )
        for name, tensor in personal[silo].items():
            if "batches" not in name:
                near(found[name], tensor)


def test_normalisation_never_leaves_the_silo(three):
    """Σ = 87, of which 16 are γ and β inside of the block ``body``; neither they nor the statistics travel."""
    run = federate(three, "fedbn", model="residual", **OPTIONS)
    assert len(initial(run.settings, 3, 3)) == 87
    assert run.values("bytes_up") == [3 * 4 * 71] * 3 + [0]
    assert run.values("bytes_down") == [3 * 4 * 71] * 4
    for server_round, silo, payload, _ in replies_of(run):
        assert list(payload.models) == ["shared"]
        if server_round == 3:
            rest = (slice(0, 36), slice(44, 64), slice(72, 87))
            assert same(payload.models["shared"].vector, gather(run.personal(silo), rest))
    for own in (
        [gather(run.personal(silo), NORMS) for silo in three],
        [run.kept(silo)["personal.buffers"] for silo in three],
    ):
        assert not any(same(own[i], own[j]) for i, j in ((0, 1), (0, 2), (1, 2)))


@pytest.mark.parametrize("name", ["resnet8", "resnet18"])
def test_a_residual_networks_normalisation_is_found(name):
    """Also in its shortcuts, where the names do not say so; Σ_bn counts two numbers per channel."""
    module = build(name, (3, 32, 32), 10)
    layout = FlatModel(module).layout
    assert "layer2.0.downsample.1" in layout.norms
    channels = sum(m.num_features for m in module.modules() if isinstance(m, nn.BatchNorm2d))
    assert sum(p.stop - p.start for p in layout.norm_parts()) == 2 * channels
    assert (
        sum(p.stop - p.start for p in layout.norm_buffers())
        == 2 * channels
        == layout.buffer_size
    )


def test_without_weights_of_its_own_it_is_silobn(three):
    """Normalisation without γ and β: FedAvg with local statistics, bit for bit, in every metric and byte."""
    options = {**OPTIONS, "model": "plain-norm"}
    plain = federate(three, "fedavg", buffers="local", **options)
    run = federate(three, "fedbn", fedbn__average="samples", **options)
    assert comparable(plain.rows) == comparable(run.rows)
    assert same(plain.shared, run.shared)


def test_two_silos_with_the_same_data_and_batches_are_fedavg(tmp_path, monkeypatch):
    """0.5 a + 0.5 a is a: normalisation stays equal by itself, and every metric is FedAvg's bit for bit."""
    rng = np.random.default_rng(5)
    x, y = rng.normal(size=(9, 3)), [0, 1, 2] * 3
    files = {name: write_silo(tmp_path / f"{name}.npz", x, y, 3) for name in ("a", "b")}
    monkeypatch.setattr(
        strategies.base.silo, "generator", lambda seed, *of: generator(seed, "a", *of[1:])
    )
    plain = federate(files, "fedavg", model="residual", **OPTIONS)
    run = federate(files, "fedbn", model="residual", **OPTIONS)
    assert comparable(plain.rows, without=BYTES) == comparable(run.rows, without=BYTES)
    assert same(plain.personal("a"), run.personal("b"))


def test_an_absent_silo_keeps_its_normalisation(three):
    """c is away after round 1: what it would start round 4 from is the new average around its γ, β and statistics."""
    run = federate(
        three,
        "fedbn",
        model="residual",
        **OPTIONS,
        prepare=lambda grid: setattr(grid, "absent", {("c", 2), ("c", 3)}),
    )
    assert [r for r, _, _, _ in replies_of(run, "c")] == [1]
    arrays = run.kept("c")
    net = FlatModel(Residual(3, True))
    w = net.vector.clone()
    for part in NORMS:
        w[part] = arrays["personal"][part]
    last = run.received("c", 4)
    start = 0
    for part in (slice(0, 36), slice(44, 64), slice(72, 87)):
        w[part] = last[start : start + part.stop - part.start]
        start += part.stop - part.start
    net.load(w, arrays["personal.buffers"])
    net.module.eval()
    x, y = rows_of(three["c"])
    loss = nn.functional.cross_entropy(net.module(torch.tensor(x).float()), torch.tensor(y))
    near(run.values("loss", "c", "received")[-1], loss.item())


def test_partialfed_with_normalisation_kept_is_its_loading(three):
    """The same models in the silos bit for bit, where the mean is the same; only what travels differs."""
    options = {**OPTIONS, "model": "residual"}
    run = federate(three, "fedbn", fedbn__average="samples", **options)
    other = federate(three, "partialfed", partialfed__personal="norm", **options)
    assert comparable(run.rows, without=BYTES) == comparable(other.rows, without=BYTES)


def test_a_network_without_normalisation_is_refused(three):
    with pytest.raises(
        UserError, match=r"^fedbn keeps.*this network has none.*fc1, fc2.*resnet8$"
    ):
        federate(three, "fedbn", mlp__hidden="4", **OPTIONS)
