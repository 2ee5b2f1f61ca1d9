"""Typed fields read files of version 0.2 (``states/``), and leave their keys as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import same
from torch import Tensor

from strategies import strategies
from strategies.apple import Apple, AppleClient
from strategies.base.state import Array, Arrays, ClientState, Item, RequiredArray, State
from strategies.fedala import AlaClientState
from strategies.fedapm import FedAPM, FedAPMClient
from strategies.fedcac import FedCAC, FedCACClient
from strategies.fedfomo import FedFomo
from strategies.fedphp import FedPHPClient
from strategies.scaffold import Scaffold, ScaffoldClient

FILES = sorted((Path(__file__).parent / "states").glob("*.safetensors"))


def silo(version, method):
    state = State.load(
        Path(__file__).parent / "states" / f"{version}-{method}-silo.safetensors"
    )
    return strategies()[method].client.state_type(state.arrays, state.numbers)


def server(version, method):
    """As the loop resumes it: the method's numbers are among those of the checkpoint."""
    state = State.load(
        Path(__file__).parent / "states" / f"{version}-{method}-server.safetensors"
    )
    return strategies()[method].state_type(state.arrays, state.numbers["strategy"])


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_old_files_open_and_are_written_with_the_same_keys(file, tmp_path):
    method, side = file.stem.split("-", 1)[1].rsplit("-", 1)
    kind = (
        strategies()[method].client.state_type
        if side == "silo"
        else strategies()[method].state_type
    )
    state = kind.load(file)
    # Every field that the file has is read, and written where it was
    for owner in kind.__mro__:
        for name, field in vars(owner).items():
            if isinstance(field, Array | RequiredArray) and field.key in state.arrays:
                assert getattr(state, name) is state.arrays[field.key]
                setattr(state, name, getattr(state, name))
            elif isinstance(field, Item) and field.key in state.numbers:
                assert getattr(state, name) == state.numbers[field.key]
                setattr(state, name, getattr(state, name))
    state.save(tmp_path / "again.safetensors")
    before, after = State.load(file), State.load(tmp_path / "again.safetensors")
    assert before.numbers == after.numbers and before.arrays.keys() == after.arrays.keys()
    assert all(same(vector, after.arrays[name]) for name, vector in before.arrays.items())


def test_what_old_files_say():
    apple = silo("v02", "apple")
    assert isinstance(apple, AppleClient.state_type)
    assert (
        apple.dr is not None
        and apple.dr.shape == (3,)
        and sorted(apple.cores) == ["a", "b", "c"]
    )
    assert apple.dr_rounds == [0, 1, 2] and apple.downloaded == ["b"]
    assert apple.dr_history is not None and same(apple.dr_history[-1], apple.dr)
    served = server("v02", "apple")
    assert isinstance(served, Apple.state_type)
    assert dict(served.rounds) == {"a": 2, "b": 2, "c": 2} and set(served.wanted) == {
        "a",
        "b",
        "c",
    }
    assert len(served.models) == 3 and served.missed == []

    ala = silo("v02", "fedala")
    assert isinstance(ala, AlaClientState)
    assert ala.weights is not None and ala.settled and ala.local is None

    apm, z = silo("v02", "fedapm"), server("v02", "fedapm")
    assert isinstance(apm, FedAPMClient.state_type) and isinstance(z, FedAPM.state_type)
    assert (
        apm.dual is not None
        and apm.epsilon is None
        and list(z.z) == ["a", "b", "c"]
        and z.model.shape == (16,)
    )

    fomo = server("v02", "fedfomo")
    assert isinstance(fomo, FedFomo.state_type)
    assert fomo.last_rounds == {"a": 2, "b": 2, "c": 2} and fomo.affinity["a"]["a"] >= 1.0


def test_what_files_of_02_say_of_later_methods():
    scaffold, c = silo("v02", "scaffold"), server("v02", "scaffold")
    assert isinstance(scaffold, ScaffoldClient.state_type) and isinstance(
        c, Scaffold.state_type
    )
    assert "proposed.control" in scaffold.arrays and scaffold.numbers["proposed"] == 2
    assert c.counted == {"a": 2, "b": 2, "c": 2} and c.control.shape == c.model.shape == (12,)
    cac, masks = silo("v02", "fedcac"), server("v02", "fedcac")
    assert isinstance(cac, FedCACClient.state_type) and isinstance(masks, FedCAC.state_type)
    assert cac.critical is not None and list(masks.critical) == list(masks.models) == [
        "a",
        "b",
        "c",
    ]
    php = silo("v02", "fedphp")
    assert isinstance(php, FedPHPClient.state_type) and php.visits == 2


FIELDS = {  # of a tiny run of two rounds by 0.2: what its files hold, by the names that the method reads
    "apfl": ("private alpha shared shared_buffers", ""),  # mix = "logits"
    "fedadmm": ("primal dual", ""),
    "fedbabu": ("head local", ""),
    "feddbe": ("bias", "mean"),
    "feddyn": ("dual", "h"),
    "fedlama": ("", "intervals averaged heard"),
    "fedpac": ("", "prototypes heads"),
    "fedproto": ("model prototypes", "prototypes"),
    "fedrod": ("head", ""),
    "lg-fedavg": ("", "adapted"),
    "pfedla": ("", "hyper models"),
    "player-fl": ("", "cut"),
}


@pytest.mark.parametrize("method", FIELDS)
def test_fields_that_files_of_02_hold(method):
    for state, names in zip(
        (silo("v02", method), server("v02", method)), FIELDS[method], strict=True
    ):
        for name in names.split():
            value = getattr(state, name)
            assert isinstance(value, Tensor) or value, name


def test_fields():
    class Kept(ClientState):
        dual = Array()
        cores = Arrays("core.")
        rounds = Item[list[int]](list)

    state = Kept()
    assert state.dual is None and state.rounds == [] and not state.cores
    state.dual, state.rounds = torch.ones(2), [1]
    state.cores["a"] = torch.zeros(1)
    assert state.arrays.keys() == {"dual", "core.a"} and state.numbers == {"rounds": [1]}
    assert type(state.copy()) is Kept and state.copy().rounds == [1]
    state.dual = None
    state.cores.clear()
    assert not state.arrays and len(state.cores) == 0
