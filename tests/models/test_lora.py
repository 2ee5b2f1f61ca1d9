"""LoRA: the change W + (α / r) B A by hand, an exact start, an exact merge, and what it costs."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch
from near import near
from representatives import sampled
from tiny import federate, rows_of
from torch import nn

from client.export import export_model
from models.flat import FlatModel
from models.initialisation import flat_model, initial_model
from models.lora import LowRank, adapt
from models.networks.mlp import MlpSettings
from models.networks.registry import build
from models.networks.vit import VitSettings
from models.trainable import Part, freeze

DEEP = MlpSettings("4,5")  # 3 columns, 3 classes: fc1 4x3, fc2 5x4, fc3 3x5
# Of rank 2: 2 (3 + 4) + 2 (4 + 5) = 32 scalars, and the head's 18
LORA = Part("head", 7, None, 2, 8.0)


def lora(part=LORA):
    flat_model.cache_clear()
    return flat_model("mlp", (3,), 3, DEEP, "cpu", None, part)


def test_the_change_by_hand():
    """W = identity, A = (1 2), B = (3 0)ᵀ, α = 2, r = 1: W + 2 B A = ((7 12) (0 1)), and (1 1) becomes (19 1).

    With dL/dW = D: dL/dB = 2 D Aᵀ and dL/dA = 2 Bᵀ D. For L = the sum of the outputs D has rows (1 1): dL/dB = (6 6)ᵀ,
    dL/dA = (6 6).
    """
    layer = nn.Linear(2, 2, bias=False).requires_grad_(False)
    layer.weight.copy_(torch.eye(2))
    network = adapt(nn.Sequential(layer), 1, 2.0)
    change = network.get_submodule("0.parametrizations.weight.0")
    assert isinstance(change, LowRank)
    with torch.no_grad():
        change.lora_a.copy_(torch.tensor([[1.0, 2.0]]))
        change.lora_b.copy_(torch.tensor([[3.0], [0.0]]))
    out = network(torch.ones(1, 2))
    assert out.tolist() == [[19.0, 1.0]]
    out.sum().backward()
    assert change.lora_b.grad is not None and change.lora_b.grad.tolist() == [[6.0], [6.0]]
    assert change.lora_a.grad is not None and change.lora_a.grad.tolist() == [[6.0, 6.0]]


def test_what_is_trained():
    """The factors of each frozen linear layer, in the layer's block, and the head; the layers' biases are frozen."""
    layout = lora().layout
    assert {b.name: b.stop - b.start for b in layout.blocks} == {
        "fc1": 14,
        "fc2": 18,
        "fc3": 18,
    }
    # What is trained needs no change of low rank
    more = lora(Part("head,fc2.*", 7, None, 2, 8.0)).layout
    assert {b.name: b.stop - b.start for b in more.blocks} == {"fc1": 14, "fc2": 25, "fc3": 18}
    half = lora(Part("head,fc2.bias", 7, None, 2, 8.0)).layout
    assert {b.name: b.stop - b.start for b in half.blocks} == {"fc1": 14, "fc2": 23, "fc3": 18}


@pytest.mark.parametrize(
    "name, shape, settings",
    [("mlp", (3,), DEEP), ("vit-s", (3, 8, 8), VitSettings(4))],
    ids=["mlp", "vit-s"],
)
def test_it_starts_as_the_network_without(name, shape, settings):
    """To the bit. A is Kaiming-uniform, within 1 / sqrt(inputs), other for other purposes; B is zero."""
    part = Part("head", 7, None, 4, 8.0)
    adapted = flat_model(name, shape, 3, settings, "cpu", None, part)
    adapted.load(initial_model(name, shape, 3, settings, 7, None, part)(""))
    plain = flat_model(name, shape, 3, settings, "cpu")
    plain.load(initial_model(name, shape, 3, settings, 7)(""))
    x = torch.randn(4, *shape)
    assert torch.equal(adapted.module.eval()(x), plain.module.eval()(x))
    other = adapted.layout.unflatten(
        initial_model(name, shape, 3, settings, 7, None, part)("b")
    )
    factors = 0
    for entry, tensor in adapted.layout.unflatten(adapted.vector).items():
        if entry.endswith("lora_b"):
            assert not tensor.any() and not other[entry].any()
        elif entry.endswith("lora_a"):
            assert 0.5 < tensor.abs().max().item() * tensor.shape[1] ** 0.5 <= 1
            assert not torch.equal(tensor, other[entry])
            factors += 1
    assert factors == {"mlp": 2, "vit-s": 48}[name]


def test_a_transformers_size():
    """4 layers a block: r (384 + 1152), r (384 + 384), twice r (384 + 1536); 12 blocks, r = 4: 294,912; a head."""
    layout = flat_model(
        "vit-s", (3, 32, 32), 10, None, "cpu", None, Part("head", 7, None, 4, 8.0)
    ).layout
    assert layout.size == 12 * 4 * (384 + 1152 + 2 * 384 + 2 * (384 + 1536)) + 3850 == 298_762


def test_the_merge_says_the_same(two, tmp_path):
    """After three rounds of training, without us: an ordinary state_dict, whose predictions are the silo's own."""
    run = federate(
        two,
        "fedavg",
        mlp__hidden="4,5",
        lora_rank=2,
        rounds=3,
        learning_rate=0.5,
        directory=tmp_path / "run",
    )
    model = lora()
    assert torch.equal(initial_model("mlp", (3,), 3, DEEP, 7, None, LORA)(""), model.vector)
    model.load(run.personal("a"))
    assert not torch.allclose(run.personal("a")[:32], lora().vector[:32], atol=1e-3)
    card = export_model(tmp_path / "run", "a", "last", tmp_path / "a.safetensors")
    part = card.model.part or {}
    assert (part["trainable"], part["lora_rank"]) == ("head", 2)
    tensors = safetensors.torch.load_file(tmp_path / "a.safetensors")
    plain = build("mlp", (3,), 3, DEEP)
    plain.load_state_dict(tensors)  # strict: its own names
    x = torch.from_numpy(rows_of(two["a"])[0]).float()
    near(plain(x), lora_of(run.personal("a")).module(x), 1e-5)
    assert plain(x).argmax(1).eq(
        torch.from_numpy(rows_of(two["a"])[1])
    ).float().mean() == pytest.approx(card.metrics["test.accuracy"])


def lora_of(vector):
    model = lora()
    model.load(vector)
    return model


@sampled(
    "method",
    ["local", "fedavg", "fedala", "apple", "ditto", "fedrep", "fedphp", "scaffold", "fedlama"],
    3,
)
def test_methods_train_it(three, method):
    """What is sent is four bytes for each factor's and the head's scalar; all of them move, but nothing frozen does."""
    settings = {"mlp__hidden": "4,5", "lora_rank": 2, "rounds": 3, "learning_rate": 0.3}
    run = federate(three, method, **settings)
    if method in ("fedavg", "apple"):
        assert run.values("bytes_up")[:3] == [4 * 3 * 50] * 3
    for silo in three:
        moved = run.personal(silo) != initial_model("mlp", (3,), 3, DEEP, 7, None, LORA)("")
        assert len(moved) == 50 and torch.isfinite(run.personal(silo)).all()
        assert all(moved[block.slice].any() for block in lora().layout.blocks)


def test_pytorchs_own_attention_sees_the_change():
    """Its output projection, and the fast path of its encoder layer in evaluation, read weights past ``forward``."""
    torch.manual_seed(3)
    network = nn.Sequential(
        nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True),
        nn.Flatten(),
        nn.Linear(24, 2),
    )
    model = FlatModel(adapt(freeze(network, Part("head")), 2, 2.0))
    x = torch.randn(5, 3, 8)
    with torch.no_grad():
        before = network.eval()(x)
        for name, tensor in model.layout.unflatten(model.vector).items():
            if "lora_b" in name:
                torch.nn.init.normal_(tensor)
        after, trained = network(x), network.train()(x)
    assert sum("lora_b" in entry.name for entry in model.layout.parameters) == 3
    near(after, trained, 1e-5)
    assert not torch.allclose(after, before, atol=1e-2)
    plain = nn.Sequential(
        nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True),
        nn.Flatten(),
        nn.Linear(24, 2),
    )
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        near(plain.eval()(x), after, 1e-5)


def test_a_network_without_a_layer_to_change(three):
    with pytest.raises(
        ValueError, match=r"^lora-rank = 2: this network has no frozen linear layer"
    ):
        federate(three, model="linear", lora_rank=2)
