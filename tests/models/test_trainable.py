"""A part of a network is trained: it is the model, for every method; the rest stays as the seed made it."""

from __future__ import annotations

import numpy as np
import pytest
import safetensors.torch
import torch
from cases import typical
from failing import fails
from near import near
from tiny import federate, gradient, one_block, rows_of

from client.export import export_model
from client.prediction.predict import predict_file
from models.flat import FlatModel
from models.initialisation import flat_model, initial_model
from models.networks.mlp import MlpSettings
from models.networks.registry import build
from models.trainable import Part, freeze
from strategies import strategies

DEEP = MlpSettings("4,5")  # 3 columns, 3 classes: fc1 16, fc2 25, fc3 18 scalars


def deep(trainable="head", seed=7, head=None):
    return flat_model("mlp", (3,), 3, DEEP, "cpu", head, Part(trainable, seed))


def seeded(purpose="", part=None):
    options = {} if part is None else {"part": part}
    return initial_model("mlp", (3,), 3, DEEP, 7, None, **options)(purpose)


# ---- The layout ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "trainable, blocks",
    [
        ("all", {"fc1": (0, 16), "fc2": (16, 41), "fc3": (41, 59)}),
        ("head", {"fc3": (0, 18)}),
        (" head , ", {"fc3": (0, 18)}),
        ("head,fc1.*", {"fc1": (0, 16), "fc3": (16, 34)}),
        ("head,*.bias", {"fc1": (0, 4), "fc2": (4, 9), "fc3": (9, 27)}),
        ("fc3.weight,fc3.b*", {"fc3": (0, 18)}),
        ("*", {"fc1": (0, 16), "fc2": (16, 41), "fc3": (41, 59)}),
    ],
)
def test_the_vector_is_what_is_trained(trainable, blocks):
    layout = deep(trainable).layout
    assert {b.name: (b.start, b.stop) for b in layout.blocks} == blocks
    assert layout.size == layout.blocks[-1].stop == len(deep(trainable).vector)


def test_the_rest_is_the_runs_first_model_whatever_the_purpose():
    """APPLE starts silos from models of their own: their heads differ, the body below is one."""
    whole, part = seeded(), Part("head", 7)
    assert torch.equal(seeded("", part), whole[41:]) and torch.equal(
        seeded("b", part), seeded("b")[41:]
    )
    assert not torch.equal(seeded("b", part), seeded("", part))
    model = deep()
    assert torch.equal(model.vector, whole[41:])
    model.load(seeded("b", part))
    own = model.state_dict()
    frozen = torch.cat(
        [own[f"fc{i}.{kind}"].flatten() for i in (1, 2) for kind in ("weight", "bias")]
    )
    assert torch.equal(frozen, whole[:41])
    assert torch.equal(
        torch.cat([own["fc3.weight"].flatten(), own["fc3.bias"]]), seeded("b")[41:]
    )
    assert not torch.equal(deep(seed=8).state_dict()["fc1.weight"], own["fc1.weight"])


@pytest.mark.parametrize(
    "trainable, message",
    [
        (
            "fc4.*",
            r"no parameter is called like 'fc4.\*'; they are called fc1.weight, ..., fc3.bias, in .* fc1, fc2, fc3$",
        ),
        ("head,layer", r"no parameter is called like 'layer'"),
        ("fc1.*", r"leaves out fc3.weight, fc3.bias: add head"),
        ("fc3.weight", r"leaves out fc3.bias: add head"),
        ("", r"leaves out fc3.weight, fc3.bias"),
    ],
)
def test_what_cannot_be_meant_is_one_line(trainable, message, three):
    fails(
        ValueError,
        f"^trainable = '{trainable.replace('*', '[*]')}'.*{message}",
        deep,
        trainable,
    )
    fails(ValueError, r"^trainable = ", federate, three, mlp__hidden="4,5", trainable=trainable)


# ---- Batch normalisation ---------------------------------------------------------------------------------------------


def test_frozen_statistics_are_used_in_training_and_kept(tiny_bn):
    """Linear, BatchNorm, linear with the head trained: no buffer is the method's, and training is evaluation."""
    torch.manual_seed(1)
    network = build("tiny-bn", (3,), 2)
    torch.nn.init.uniform_(network.get_buffer("norm.running_mean"), 0.5, 1.0)
    model = FlatModel(freeze(network, Part("head")))
    x = torch.randn(6, 3) + 2
    before = {name: buffer.clone() for name, buffer in network.named_buffers()}
    expected = model.module.eval()(x)
    assert torch.equal(model.module.train()(x), expected)
    assert all(torch.equal(buffer, before[name]) for name, buffer in network.named_buffers())
    assert (
        not model.has_batch_norm and model.layout.norms == () and model.layout.buffer_size == 0
    )
    assert set(model.state_dict()) == set(network.state_dict())
    assert torch.equal(model.state_dict()["norm.running_mean"], before["norm.running_mean"])


def test_trained_normalisation_follows_its_batches(tiny_bn):
    torch.manual_seed(1)
    network = build("tiny-bn", (3,), 2)
    model = FlatModel(freeze(network, Part("head,norm.*")))
    assert (
        model.has_batch_norm
        and model.layout.norms == ("norm",)
        and model.layout.buffer_size == 8
    )
    network.train()(torch.randn(6, 3) + 2)
    assert network.get_buffer("norm.running_mean").any()


def test_statistics_without_weights_go_with_the_module_around_them():
    def network():
        inner = torch.nn.Sequential(
            torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4, affine=False)
        )
        return torch.nn.Sequential(inner, torch.nn.Linear(4, 2))

    assert FlatModel(freeze(network(), Part("0.*,head"))).layout.norms == ("0.1",)
    assert FlatModel(freeze(network(), Part("head"))).layout.norms == ()


def test_large_networks_freeze_their_stages():
    """ResNet-18 with its last stage: 20 layers of normalisation, of which the last stage has five."""
    torch.manual_seed(2)
    network = build("resnet18", (3, 16, 16), 5)
    model = FlatModel(freeze(network, Part("head,layer4.*")))
    assert [b.name for b in model.layout.blocks] == ["layer4", "fc"]
    assert len(model.layout.norms) == 5 and all(
        name.startswith("layer4.") for name in model.layout.norms
    )
    assert model.layout.buffer_size == 5 * 2 * 512
    before = network.get_buffer("stem.bn1.running_mean").clone()
    model.module.train()(torch.randn(4, 3, 16, 16)).square().mean().backward()
    assert torch.equal(network.get_buffer("stem.bn1.running_mean"), before)
    assert network.get_parameter("stem.conv1.weight").grad is None and model.gradient.any()


# ---- Runs ------------------------------------------------------------------------------------------------------------


def features(x, state):
    w = {name: tensor.double().numpy() for name, tensor in state.items()}
    hidden = np.maximum(x @ w["fc1.weight"].T + w["fc1.bias"], 0)
    return np.asarray(np.maximum(hidden @ w["fc2.weight"].T + w["fc2.bias"], 0))


def test_a_trained_head_is_regression_on_fixed_features(three):
    """Three full batches: w <- w - g(w) by numpy, on what the frozen layers make of the columns."""
    run = federate(
        three, "local", mlp__hidden="4,5", trainable="head", rounds=3, learning_rate=0.5
    )
    body = deep().state_dict()
    for silo, file in three.items():
        x, y = rows_of(file)
        w = seeded()[41:].double().numpy()
        for _ in range(3):
            w = w - 0.5 * gradient(w, features(x, body), y)
        near(run.personal(silo), w, 1e-5)


def test_what_is_sent_is_what_is_trained(three):
    """Four bytes a scalar, three silos; an APPLE silo gets the two others' models."""
    settings = {"mlp__hidden": "4,5", "rounds": 2}
    for trainable, size in (("all", 59), ("head", 18), ("head,fc1.*", 34)):
        for method, down in (("fedavg", 1), ("scaffold", 2), ("apple", 2)):
            run = federate(three, method, trainable=trainable, **settings)
            up = 2 if method == "scaffold" else 1
            assert run.values("bytes_up")[:2] == [4 * 3 * up * size] * 2
            assert run.values("bytes_down")[1] == 4 * 3 * down * size
            for silo in three:  # nothing else is kept, either
                arrays = run.kept(silo)
                assert all(
                    len(tensor) in (size, 1, 3) or tensor.dim() > 1
                    for tensor in arrays.values()
                ), arrays.keys()


@pytest.mark.parametrize("trainable", ["head", "head,fc1.*"])
@typical(
    [
        name
        for name, s in strategies().items()
        if not s.info.role.pooled
        and name not in ("fedbn", "fedex-lora", "fedsa-lora", "fedxgb")
    ],
    "method",
)
def test_every_method_runs_on_a_part(three, method, trainable):
    """Two rounds; all models have the part's size, and the frozen layers are what they were."""
    changes = one_block(method) if trainable == "head" else {}
    settings = {"mlp__hidden": "4,5", "trainable": trainable, "rounds": 2, "learning_rate": 0.1}
    run = federate(three, method, **settings, **changes)
    size = run.strategy.layout.size
    assert all(len(run.personal(silo)) == size for silo in three)
    assert all(torch.isfinite(run.personal(silo)).all() for silo in three)
    after = deep(trainable, head=run.settings.head).state_dict()
    fresh = build_seeded()
    frozen = [tensor for name, tensor in after.items() if name.endswith("fc2.weight")]
    assert torch.equal(frozen[0], fresh["fc2.weight"])


def build_seeded():
    model = flat_model("mlp", (3,), 3, DEEP, "cpu")
    return model.state_dict(seeded())


def test_an_exported_model_is_whole(two, tmp_path):
    """It has every tensor, the frozen ones from the seed, and says what the silo's own model said."""
    run = federate(
        two, "fedavg", mlp__hidden="4,5", trainable="head", rounds=3, directory=tmp_path / "run"
    )
    card = export_model(tmp_path / "run", "a", "last", tmp_path / "a.safetensors")
    assert card.model.part == {
        "trainable": "head",
        "seed": 7,
        "weights": None,
        "lora_rank": 0,
        "lora_alpha": 0.0,
        "lora_residual": False,
    }
    tensors = safetensors.torch.load_file(tmp_path / "a.safetensors")
    whole = seeded()
    assert torch.equal(tensors["fc1.weight"].flatten(), whole[:12])
    assert torch.equal(
        torch.cat([tensors["fc3.weight"].flatten(), tensors["fc3.bias"]]), run.personal("a")
    )
    module = build("mlp", (3,), 3, DEEP)
    module.load_state_dict(tensors)
    x, y = rows_of(two["a"])
    with torch.no_grad():
        label = module(torch.from_numpy(x).float()).argmax(1).numpy()
    assert card.metrics["test.accuracy"] == np.mean(label == y)
    lines = predict_file(tmp_path / "a.safetensors", two["a"]).splitlines()[1:]
    assert [int(line.split(",")[1]) for line in lines] == label.tolist()
