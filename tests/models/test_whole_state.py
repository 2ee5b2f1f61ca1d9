"""A module's whole state: what a file keeps of a network is all that training changes, or one line refuses it."""

from __future__ import annotations

import numpy as np
import pytest
import safetensors.torch
import torch
from failing import fails
from near import near
from tiny import federate
from torch import nn

from client.export import export_model, read_model
from client.prediction.predict import predict_file
from models.flat import FlatModel
from models.lora import adapt
from models.networks.blocks import with_head
from models.networks.custom import factory_of
from models.networks.registry import MODELS, ModelSpec, build
from models.trainable import Part, freeze
from models.weights import start_from, weights_of
from partitions.common.errors import UserError

SOURCE = """
import torch
from torch import nn
from torch.nn.utils import parametrizations

class Net(nn.Module):
    def __init__(self, columns, outputs):
        super().__init__()
        self.a, self.b = nn.Linear(columns, columns, bias=False), nn.Linear(columns, columns)
        self.norm, self.h = nn.BatchNorm1d(columns), nn.Linear(columns, outputs)
    def forward(self, x):
        return self.h(torch.relu(self.norm(self.b(torch.relu(self.a(x))))))

def made(change):
    def factory(shape, outputs):
        network = Net(shape[0], outputs)
        change(network)
        return network
    factory.__module__ = __name__
    return factory

def tie(n): n.b.weight = n.a.weight
tied = made(tie)
def under_two(n): n.again = n.b; n.b = n.again
two_names = made(under_two)
def two_norms(n):
    n.other = nn.BatchNorm1d(n.norm.num_features)
    n.other.running_mean = n.norm.running_mean
shared_buffer = made(two_norms)
cumulative = made(lambda n: setattr(n.norm, "momentum", None))
weight_norm = made(lambda n: parametrizations.weight_norm(n.b))
spectral = made(lambda n: parametrizations.spectral_norm(n.b))
old_spectral = made(lambda n: nn.utils.spectral_norm(n.b))
listed = made(lambda n: setattr(n, "ps", nn.ParameterList([nn.Parameter(torch.ones(2))])))
position = made(lambda n: n.b.register_buffer("position", torch.ones(3), persistent=False))
fixed_tensor = made(lambda n: setattr(n.b, "scale", torch.ones(3)))
statistics_in_a_list = made(lambda n: setattr(n, "means", [n.norm.running_mean]))

# What cannot be kept.
lazy = made(lambda n: setattr(n, "h", nn.LazyLinear(n.h.out_features)))
class Extra(nn.Linear):
    def get_extra_state(self): return {"n": 1}
    def set_extra_state(self, value): pass
extra = made(lambda n: setattr(n, "b", Extra(n.a.in_features, n.a.in_features)))
double_buffer = made(lambda n: n.b.register_buffer("scale", torch.ones(3).double()))
complex_parameter = made(lambda n: setattr(n.b, "phase", nn.Parameter(torch.ones(3, dtype=torch.complex64))))
sparse = made(lambda n: n.b.register_buffer("mask", torch.eye(3).to_sparse()))
def memory(n): n.b.weight = nn.Parameter(n.a.weight)
same_memory = made(memory)
buffer_of_a_parameter = made(lambda n: n.b.register_buffer("copy", n.a.weight))
buffer_in_a_parameter = made(lambda n: n.b.register_buffer("copy", n.a.weight.data[0]))
random_integers = made(lambda n: n.b.register_buffer("order", torch.randint(9, (20,))))

class Wrapped(nn.Module):
    def __init__(self, columns, outputs):
        super().__init__()
        self.h = nn.Linear(columns, outputs)
        self.h.register_buffer("mean", torch.zeros(columns))
        self.h.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.h.register_buffer("passing", torch.zeros(columns), persistent=False)
        self.steps, self.rng = 0, torch.Generator().manual_seed(1)

def wrapped(forward):
    class Made(Wrapped):
        def forward(self, x): return forward(self, self.h, x)
    def factory(shape, outputs): return Made(shape[0], outputs)
    factory.__module__ = __name__
    return factory

def anew(n, h, x):
    if n.training: h.mean = 0.9 * h.mean + 0.1 * x.mean(0)
    return h(x - h.mean)
assigned = wrapped(anew)
def in_place(n, h, x):
    if n.training:
        h.mean.lerp_(x.detach().mean(0), 0.1); h.count.add_(1)
    return h(x - h.mean) * (2 if n.training and h.count > 1 else 1)
well = wrapped(in_place)
def in_evaluation(n, h, x):
    h.count.add_(1)
    return h(x)
counts_always = wrapped(in_evaluation)
def steps(n, h, x):
    n.steps += n.training
    return h(x) * (1 + n.steps)
counter = wrapped(steps)
def not_kept(n, h, x):
    if n.training: h.passing.add_(1)
    return h(x + h.passing)
passing = wrapped(not_kept)
def random_shift(n, h, x):
    if not hasattr(n, "shift"): n.shift = torch.randn(x.shape[1])
    return h(x + n.shift)
random_tensor = wrapped(random_shift)
class First(Wrapped):
    def __init__(self, columns, outputs):
        super().__init__(columns, outputs)
        self.first = self.h.weight.data
    def forward(self, x): return self.h(x) + (x @ self.first.T)
def attribute(shape, outputs): return First(shape[0], outputs)
def own_numbers(n, h, x):
    return h(x) + (torch.rand(1, generator=n.rng) if n.training else 0)
generator = wrapped(own_numbers)
def by_count(n, h, x):
    if n.training: h.count.add_(1)
    return h(x) * (1 + h.count)
answers = wrapped(by_count)
def grows(n, h, x):
    if not hasattr(h, "late"): h.late = nn.Parameter(torch.ones(()))
    return h(x) * h.late
growing = wrapped(grows)
detached = wrapped(lambda n, h, x: h(x).detach())
scripted = made(lambda n: setattr(n, "b", torch.jit.script(n.b)))
def unregistered_layer(n, h, x):
    return n.layers[0](x) + h(x)
class Unregistered(Wrapped):
    def __init__(self, columns, outputs):
        super().__init__(columns, outputs)
        self.layers = [nn.Linear(columns, outputs)]
    def forward(self, x): return unregistered_layer(self, self.h, x)
def unregistered(shape, outputs): return Unregistered(shape[0], outputs)
pair = wrapped(lambda n, h, x: (h(x), x))
"""


@pytest.fixture(autouse=True)
def source(tmp_path, monkeypatch):
    (tmp_path / "kept_state").with_suffix(".py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    "name",
    (
        "tied",
        "two_names",
        "shared_buffer",
        "cumulative",
        "weight_norm",
        "spectral",
        "old_spectral",
        "listed",
        "position",
        "fixed_tensor",
        "statistics_in_a_list",
        "well",
    ),
)
def test_what_is_exported_answers_as_what_was_trained(two, tmp_path, name):
    """The file fits the plain network, without a flat vector, and gives the model's own accuracy."""
    settings = {
        "model": f"kept_state:{name}",
        "rounds": 2,
        "learning_rate": 0.3,
        "local_epochs": 3,
    }
    federate(two, **settings, state_dir=tmp_path / "state", directory=tmp_path / "run")
    card = export_model(tmp_path / "state", "a", "last", tmp_path / "a.safetensors")
    _, net = read_model(tmp_path / "a.safetensors", f"kept_state:{name}")
    plain = build(f"kept_state:{name}", (3,), card.classes)
    plain.load_state_dict(net.state_dict())
    x = torch.randn(50, 3)
    near(plain.eval()(x), net.module.eval()(x))
    rows = predict_file(
        tmp_path / "a.safetensors", two["a"], network=f"kept_state:{name}"
    ).splitlines()[1:]
    with np.load(two["a"]) as arrays:
        right = np.mean(
            [row.split(",")[1] == str(y) for row, y in zip(rows, arrays["y_test"], strict=True)]
        )
    assert right == pytest.approx(card.metrics["test.accuracy"])


@pytest.mark.parametrize(
    "name, message",
    [
        ("lazy", "its parameter h.weight has no shape yet: give its layer all sizes"),
        ("extra", "its module b has get_extra_state"),
        ("double_buffer", "its buffer b.scale is torch.float64, not float32"),
        ("complex_parameter", "its parameter b.phase is torch.complex64, not float32"),
        ("sparse", "its buffer b.mask is no dense tensor"),
        ("same_memory", "its tensors a.weight and b.weight share memory"),
        ("buffer_of_a_parameter", "its buffer b.copy is a parameter, too"),
        ("buffer_in_a_parameter", "its tensors .* share memory"),
        ("attribute", "a copy that has loaded its saved state gives other outputs"),
        ("unregistered", "a copy that has loaded its saved state gives other outputs"),
        ("random_tensor", "a copy that has loaded its saved state gives other outputs"),
        ("random_integers", "its integer buffer b.order is drawn at random"),
        ("assigned", "its forward sets h.mean anew: change it in place"),
        ("counts_always", "in evaluation its forward changes its buffers"),
        ("counter", "a step of training from the same state is another the second time"),
        ("passing", "a step of training from the same state is another the second time"),
        ("generator", "a step of training from the same state is another the second time"),
        ("answers", "its answers depend on an integer buffer that training changes"),
        ("growing", "its forward sets h.late anew"),
        ("detached", "it cannot be trained: RuntimeError"),
        ("pair", "of two inputs it makes tuple"),
    ],
)
def test_what_cannot_be_kept_is_refused_in_one_line(name, message):
    fails(
        UserError,
        rf"^model = 'kept_state:{name}' .*{message}",
        build,
        f"kept_state:{name}",
        (3,),
        3,
    )


def test_a_network_of_an_installed_package_is_tried_too(monkeypatch):
    def spec(name):
        return ModelSpec(
            "a",
            "b",
            "tables",
            lambda s, n, _: factory_of(f"kept_state:{name}")(s, n),
            ("table",),
        )

    for name in ("tied", "counter"):
        monkeypatch.setitem(MODELS, name, spec(name))
    assert build("tied", (3,), 2)
    with pytest.raises(
        UserError,
        match=r"^model = 'counter' .*: a step of training from the same state is another",
    ):
        build("counter", (3,), 2)


@pytest.mark.parametrize("name", ["tied", "two_names"])
def test_an_alias_has_the_same_values_in_the_file(name):
    """Also of an older value than the model has now, and of the integer buffers."""
    flat = FlatModel(build(f"kept_state:{name}", (3,), 2))
    flat.vector.add_(1.0)
    kept = [flat.vector.clone(), flat.buffers.clone(), flat.integers.clone()]
    flat.module(torch.randn(4, 3))
    flat.vector.add_(1.0)
    tensors = flat.state_dict(*kept)
    one, other = {"tied": ("a.weight", "b.weight"), "two_names": ("b.bias", "again.bias")}[name]
    now = dict(flat.module.named_parameters())[one]
    assert torch.equal(tensors[one], tensors[other]) and torch.allclose(tensors[one], now - 1)
    assert (
        int(tensors["norm.num_batches_tracked"]) == 0
        and int(flat.state_dict()["norm.num_batches_tracked"]) == 1
    )


def test_integers_are_bytes_of_one_vector():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.h = nn.Linear(2, 2)
            self.h.register_buffer("on", torch.tensor([True, False, True]))
            self.h.register_buffer("count", torch.tensor(5))
            self.h.register_buffer("small", torch.tensor([[1, -2]], dtype=torch.int16))

    flat = FlatModel(net := Counting())
    held = [net.h.get_buffer(name) for name in ("on", "count", "small")]
    assert [t.tolist() for t in held] == [[True, False, True], 5, [[1, -2]]]
    before = flat.integers.clone()
    with flat.kept_buffers():
        held[1].add_(2)
        held[0].logical_not_()
        assert flat.state_dict()["h.count"] == 7 and not torch.equal(flat.integers, before)
    assert torch.equal(flat.integers, before) and held[1] == 5
    held[2].add_(1)
    flat.reset_buffers()
    assert held[2].tolist() == [[1, -2]]


@pytest.mark.parametrize("method", ["fedavg", "ditto", "apfl", "fedala"])
def test_a_resumed_run_is_an_uninterrupted_one(three, tmp_path, method):
    """A BatchNorm layer whose mean divides by the count of batches; the silos share one network in this process."""
    settings = {"strategy": method, "model": "kept_state:cumulative", "learning_rate": 0.1}
    whole = federate(three, **settings, rounds=4, directory=tmp_path / "whole")
    federate(three, **settings, rounds=2, directory=tmp_path / "parts")
    parts = federate(three, **settings, rounds=4, directory=tmp_path / "parts", resume=True)
    for silo in three:
        assert torch.equal(whole.personal(silo), parts.personal(silo))
        one, other = (run.kept(silo) for run in (whole, parts))
        assert one.keys() == other.keys() and all(
            torch.equal(one[key], other[key]) for key in one
        )
        assert int(one["personal.integers"].view(torch.int64)) > 0


def test_each_silo_counts_its_own_batches(three):
    """In one process the silos take turns with one network: each has the numbers of a process of its own."""
    settings = {
        "strategy": "local",
        "model": "kept_state:cumulative",
        "rounds": 2,
        "learning_rate": 0.1,
    }
    together = federate(three, **settings)
    for silo, file in three.items():
        alone = federate({silo: file}, **settings, min_silos=1)
        assert torch.equal(together.personal(silo), alone.personal(silo))


def test_methods_that_divide_a_network_refuse_a_tensor_on_both_sides():
    class Autoencoding(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Linear(4, 3)
            self.middle = nn.Linear(3, 3)
            self.head = nn.Linear(4, 3)
            self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(x)

    layout = FlatModel(Autoencoding()).layout
    assert layout.ties == (("embed", "head", "embed.weight"),)
    assert layout.parts(["embed", "middle", "head"]) == (slice(0, layout.size),)
    assert layout.parts(["middle"]) and layout.parts(["embed", "head"])
    for part in (["embed"], ["embed", "middle"], ["head"]):
        fails(UserError, r"embed and head have embed.weight in common", layout.parts, part)
    with pytest.raises(
        UserError,
        match=r"replaces the last layer, and head.weight and embed.weight are one tensor",
    ):
        with_head(Autoencoding(), lambda layer: nn.Linear(3, 3))
    for words in ("head", "head.*"):
        network = freeze(Autoencoding(), Part(words))
        assert {n for n, p in network.named_parameters() if p.requires_grad} == {
            "embed.weight",
            "head.bias",
        }
    frozen = Autoencoding().requires_grad_(False)
    fails(UserError, "a frozen weight of this network is in two layers", adapt, frozen, 1, 1.0)


def test_a_last_layer_of_nothing_but_a_tied_weight():
    network = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3, bias=False))
    network[2].weight = network[0].weight
    network.block_names = ("0", "1", "2")  # type: ignore[assignment]
    layout = FlatModel(network).layout
    assert [b.name for b in layout.blocks] == ["0", "1"]
    fails(
        UserError, r"needs a last layer of its own, and 2 has 0.weight of 0", layout.linear_head
    )
    fails(UserError, r"0 and 2 have 0.weight in common", layout.parts, ["0"])


def test_initial_weights_of_a_tensor_with_two_names(tmp_path):
    tensors = FlatModel(build("kept_state:tied", (3,), 2)).state_dict()
    for left_out in ("a.weight", "b.weight"):
        file = tmp_path / f"{left_out}.safetensors"
        one = {n: t + 1 for n, t in tensors.items() if n != left_out and t.is_floating_point()}
        safetensors.torch.save_file(one, file)
        network = start_from(build("kept_state:tied", (3,), 2), weights_of(file), ())
        made = dict(network.named_parameters(remove_duplicate=False))
        assert (
            torch.equal(made["a.weight"], tensors["a.weight"] + 1)
            and made["a.weight"] is made["b.weight"]
        )
    file = tmp_path / "two.safetensors"
    safetensors.torch.save_file({**tensors, "b.weight": tensors["b.weight"] + 1}, file)
    with pytest.raises(
        ValueError, match=r"b.weight and a.weight are one tensor here, and two in the file"
    ):
        start_from(build("kept_state:tied", (3,), 2), weights_of(file), ())
