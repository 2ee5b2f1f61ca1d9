"""A network of one's own: what methods rely on is found out at once, in one line; the site's policy is asked first."""

from __future__ import annotations

import gc
import sys
import weakref

import pytest
import torch
from failing import fails
from memory import bytes_alone
from tiny import federate, simulated
from torch import nn

import models
from client.export import export_model
from client.prediction.predict import predict_file
from client.protocol.policy import Policy, parse_policy, read_policy
from client.site.trust.message_rules import network_fault
from models.flat import FlatModel
from models.networks.custom import CustomSettings, check_network
from models.networks.registry import build
from partitions.common.errors import UserError
from strategies.base.run_settings import parse_settings

SOURCE = """
import math, random, torch
from math import prod
from torch import nn

def plain(shape, outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 5), nn.ReLU(), nn.Linear(5, outputs))

class Dropping(nn.Module):
    def __init__(self, columns, outputs):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(columns, 5), nn.BatchNorm1d(5), nn.Linear(5, outputs)
        self.block_names = ("first", "norm", "last")
    def forward(self, x):
        return self.last(nn.functional.dropout(self.norm(self.first(x)), 0.5, self.training))

def dropping(shape, outputs):
    return Dropping(shape[0], outputs)

def pixels(shape, outputs):
    return nn.Sequential(nn.Conv2d(shape[0], outputs, 1))

def nothing(shape, outputs):
    return [shape, outputs]

def breaks(shape, outputs):
    raise RuntimeError("too\\nbad")

def takes_none():
    return nn.Linear(2, 2)

def other_shape(shape, outputs):
    return nn.Sequential(nn.Linear(shape[0], outputs + 1))

def empty(shape, outputs):
    return nn.Sequential(nn.Flatten())

def double(shape, outputs):
    return nn.Sequential(nn.Linear(shape[0], outputs)).double()

def frozen(shape, outputs):
    return nn.Sequential(nn.Linear(shape[0], 4).requires_grad_(False), nn.Linear(4, outputs))

def random_start(shape, outputs):
    network = nn.Sequential(nn.Linear(shape[0], outputs))
    nn.init.constant_(network[0].bias, random.random())
    return network

KEPT = nn.Sequential(nn.Linear(3, 3))

def kept(shape, outputs):
    return KEPT

def always_drops(shape, outputs):
    class Always(nn.Sequential):
        def forward(self, x):
            return nn.functional.dropout(super().forward(x), 0.5, True)
    return Always(nn.Linear(shape[0], outputs))

def undefined(shape, outputs):
    class Undefined(nn.Sequential):
        def forward(self, x):
            return (super().forward(x) - 1e9).log()
    return Undefined(nn.Linear(shape[0], outputs))

def probable(shape, outputs):
    return nn.Sequential(nn.Linear(shape[0], outputs), nn.Softmax(1))

def deaf(shape, outputs):
    class Deaf(nn.Sequential):
        def forward(self, x):
            return x[:, :1].expand(-1, outputs)
    return Deaf(nn.Linear(shape[0], outputs))

def bare(shape, outputs):
    return nn.Linear(shape[0], outputs)

def compiled(shape, outputs):
    return torch.compile(plain(shape, outputs), backend="eager")

def compiled_inside(shape, outputs):
    return nn.Sequential(nn.Flatten(), torch.compile(nn.Linear(shape[0], outputs), backend="eager"))

def misnamed(shape, outputs):
    network = nn.Sequential(nn.Linear(shape[0], outputs))
    network.block_names = ("fc",)
    return network

def incomplete(shape, outputs):
    network = nn.Sequential(nn.Linear(shape[0], 4), nn.Linear(4, outputs))
    network.block_names = ("1",)
    return network

number = 3
"""


@pytest.fixture(autouse=True)
def mine(tmp_path, monkeypatch):
    """A module ``mine`` that can be imported, and the same in the app's folder ``models``."""
    for folder in ("path", "models"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"mine_{folder}.py").write_text(SOURCE)
    (tmp_path / "path/broken_module.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path / "path")
    monkeypatch.setattr(models, "__path__", [*models.__path__, str(tmp_path / "models")])


def test_blocks_are_the_children_and_weights_the_seeds():
    torch.manual_seed(3)
    network = build("mine_path:plain", (3,), 2)
    torch.manual_seed(3)
    by_hand = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(3, 5), torch.nn.ReLU(), torch.nn.Linear(5, 2)
    )
    assert [(b.name, b.start, b.stop) for b in FlatModel(network).layout.blocks] == [
        ("1", 0, 20),
        ("3", 20, 32),
    ]
    assert all(
        torch.equal(p, q)
        for p, q in zip(network.parameters(), by_hand.parameters(), strict=True)
    )
    assert not FlatModel(network).has_dropout


def test_names_of_blocks_statistics_and_dropout_in_the_forward_pass():
    flat = FlatModel(build("mine_path:dropping", (3,), 2))
    assert [b.name for b in flat.layout.blocks] == ["first", "norm", "last"]
    assert flat.has_dropout and flat.has_batch_norm
    # Two statistics of five units; what counts batches is not among them
    assert flat.layout.buffer_size == 10


def test_an_answer_for_every_pixel():
    network = build("mine_path:pixels", (3, 4, 5), 2, CustomSettings(per_pixel=True))
    assert network(torch.zeros(1, 3, 4, 5)).shape == (1, 2, 4, 5)
    with pytest.raises(
        ValueError, match=r"it makes \(2, 2, 4, 5\), where outputs of shape \(2, 2\) are wanted"
    ):
        build("mine_path:pixels", (3, 4, 5), 2)


@pytest.mark.parametrize(
    "name, message",
    [
        (
            "no_such_module:f",
            r"no_such_module cannot be imported: ModuleNotFoundError: .*PYTHONPATH says where it is",
        ),
        (
            "broken_module:f",
            r"broken_module cannot be imported: ZeroDivisionError: division by zero$",
        ),
        ("mine_path:absent", r"mine_path defines no function absent\(input_shape, outputs\)"),
        ("mine_path:number", r"mine_path defines no function number"),
        # Which it imports from another
        ("mine_path:prod", r"mine_path defines no function prod"),
        ("mine_path:nothing", r"for inputs of shape \(3,\): it gives list, not an nn.Module"),
        ("mine_path:breaks", r"RuntimeError: too bad$"),
        ("mine_path:takes_none", r"TypeError: takes_none\(\) takes 0 positional arguments"),
        (
            "mine_path:other_shape",
            r"of two inputs it makes \(2, 4\), where outputs of shape \(2, 3\) are wanted",
        ),
        ("mine_path:empty", r"it has no parameters"),
        ("mine_path:double", r"its parameter 0.weight is torch.float64, not float32"),
        (
            "mine_path:frozen",
            r"its parameter 0.weight is frozen, which is the setting trainable's",
        ),
        ("mine_path:random_start", r"made twice under one seed it differs"),
        ("mine_path:kept", r"it gives the same module twice"),
        ("mine_path:always_drops", r"in evaluation it says two things of the same input"),
        ("mine_path:undefined", r"its outputs of finite inputs are no finite numbers"),
        (
            "mine_path:probable",
            r"its outputs are probabilities, which add up to 1: end it without",
        ),
        ("mine_path:deaf", r"its outputs stay the same whatever its parameters are"),
        (
            "mine_path:compiled",
            r"renames its weights \(_orig_mod.\): compile in place, network.compile",
        ),
        ("mine_path:compiled_inside", r"renames its weights \(_orig_mod.\)"),
        ("mine_path:bare", r"its parameter weight is in no child module"),
        ("mine_path:misnamed", r"its layer blocks cannot be used"),
        (
            "mine_path:incomplete",
            r"its layer blocks cannot be used: UserError: layer blocks \['1'\] do not cover",
        ),
        ("mine_path:plain:more", r"package.module:factory is needed here"),
        ("../mine:plain", r"package.module:factory is needed here"),
    ],
)
def test_what_is_wrong_is_one_line(name, message):
    fails(ValueError, rf"^model = '{name}'.*{message}", build, name, (3,), 3)
    with pytest.raises(ValueError, match=rf"^model = '{name}'"):
        simulated(dataset="breast-cancer", model=name, rounds=1)


def test_a_name_that_is_none_is_the_users_error():
    fails(
        UserError, r"package\.module:factory is needed here", parse_settings, {"model": "a.b:"}
    )


@pytest.mark.parametrize("method", ["fedavg", "apple", "fedrep"])
def test_a_run_with_the_same_layers_has_the_same_numbers(three, method):
    """Linear, ReLU, linear: an mlp of five hidden units, under another name."""
    settings = {"strategy": method, "rounds": 2, "learning_rate": 0.1}
    own = federate(three, model="mine_path:plain", **settings)
    mlp = federate(three, model="mlp", mlp__hidden="5", **settings)
    for silo in three:
        assert torch.equal(own.personal(silo), mlp.personal(silo))


def test_export_and_predict(two, tmp_path, monkeypatch):
    """Where it was exported without a word; on another machine only where the network is named."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "here"))
    federate(
        two,
        model="mine_path:plain",
        rounds=1,
        state_dir=tmp_path / "state",
        directory=tmp_path / "run",
    )
    card = export_model(tmp_path / "state", "a", "last", tmp_path / "a.safetensors")
    assert card.model.model_dump(exclude_unset=True) == {
        "name": "mine_path:plain",
        "settings": {"per_pixel": False},
    }
    text = predict_file(tmp_path / "a.safetensors", two["a"])
    assert len(text.splitlines()) == 7
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
    with pytest.raises(
        UserError,
        match="mine_path:plain, code of its own, and was not exported here: --network mine",
    ):
        predict_file(tmp_path / "a.safetensors", two["a"])
    assert predict_file(tmp_path / "a.safetensors", two["a"], network="mine_path:plain") == text


# ---- The site's policy -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rule, name, allowed",
    [
        (None, "models.mine:f", True),
        (None, "auto", True),
        ("[]", "vit-s", True),
        (None, "narrow", False),  # of an installed package
        ('["app"]', "vit", False),
        ('["app", "narrow"]', "narrow", True),
        ('["all"]', "narrow", True),
        (None, "mine:f", False),
        (None, "modelsx:f", False),
        (None, "app:f", False),  # a module that is called as the word is
        (None, "server.app:main", False),
        ('["app"]', "all:f", False),
        ('["mine"]', "mine:f", True),
        ('["mine"]', "mine.deeper:f", False),
        ('["mine"]', "models.mine:f", False),
        ('["app", "a.b"]', "a.b:f", True),
        ("[]", "models.mine:f", False),
        ('["all"]', "anything.there:is", True),
    ],
)
def test_whose_networks_may_run(rule, name, allowed):
    policy = parse_policy("" if rule is None else f"networks = {rule}", "f")
    fault = network_fault(policy, {"model": name})
    assert (fault == "") == allowed
    assert (
        allowed
        or fault
        == f"its policy has {policy.line('networks')}, the run model = {name}, which is not among them"
    )


@pytest.mark.parametrize("value", ['"mine"', "[1]", '["../mine"]', '["a b"]', "true"])
def test_what_is_no_list_of_modules(value):
    with pytest.raises(
        ValueError,
        match=r'networks.* = .*: must be (a list|a valid string|a module, "app" or "all");',
    ):
        parse_policy(f"networks = {value}", "f")


def test_public_data_take_any():
    assert not network_fault(
        read_policy("public"), {"model": "mine:f"}
    ) and Policy().networks == ("app",)


def test_a_silo_refuses_before_it_imports(three, tmp_path):
    """Two silos allow the module; the third has the default and is left out with its reason, which the run names."""
    files = {name: tmp_path / f"{name}.toml" for name in three}
    for name, file in files.items():
        networks = "" if name == "c" else 'networks = ["mine_path"]\n'
        file.write_text(
            f"{networks}min-silos = 1\nfloor = 1\nmin-batch-size = 1\nruns-per-day = 0\n"
        )

    def policies(grid):
        for context in grid.contexts.values():
            context.node_config["policy"] = str(files[str(context.node_config["name"])])

    run = federate(
        three,
        model="mine_path:plain",
        rounds=1,
        min_silos=2,
        prepare=policies,
        state_dir=tmp_path / "states",
    )
    assert sorted(run.strategy.silos) == ["a", "b"]
    refusals = [str(reply.error.reason) for _, reply in run.grid.traffic if reply.has_error()]
    assert refusals and all(
        "c refuses: its policy has networks = " in refusal for refusal in refusals
    )
    given = {"rounds": 1, "min_silos": 1, "state_dir": tmp_path / "other"}
    everyone = federate(three, model="models.mine_models:plain", prepare=policies, **given)
    assert sorted(everyone.strategy.silos) == ["c"]  # which alone takes what is in the app


def test_the_check_holds_two_networks_at_a_time():
    """A large one, of which each process of a machine makes three to compare them, would fill it."""
    made: list[weakref.ref[nn.Module]] = []

    def make():
        assert sum(one() is not None for one in made) < 2
        network = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 2))
        network.block_names = ("0", "2")  # type: ignore[assignment]
        made.append(weakref.ref(network))
        return network

    gc.disable()
    try:
        check_network("a:b", ("tokens", 3, 9), 2, False, make)
    finally:
        gc.enable()
    assert len(made) == 3 and not any(one() for one in made)


CHECKED = """
import torch
from memory import peak_memory
from torch import nn
from torch.nn.functional import cross_entropy
from models.flat import FlatModel
from models.networks.custom import check_network
from models.training import loss_gradient

def make():
    network = nn.Sequential(nn.Flatten(), nn.Linear(3000, 4000), nn.Linear(4000, 2))
    network.block_names = ("1", "2")
    return network

with peak_memory() as step:
    model, other = FlatModel(make()), FlatModel(make())
    other.release_training()
    loss_gradient(model, torch.ones(2, 3000), torch.tensor([0, 1]), cross_entropy)
size = model.vector.nbytes
del model, other
with peak_memory() as check:
    check_network("a:b", (3000,), 2, False, make)
print(size, *step, *check)
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux counts")
def test_the_check_holds_few_copies_of_a_large_network():
    """A vector more than a step beside another network: its start. What the machine takes for a step is in both."""
    size, step, check = bytes_alone(CHECKED)
    assert 3.5 * size < step and check - step < 1.5 * size
