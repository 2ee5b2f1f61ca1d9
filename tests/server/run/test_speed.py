"""What makes rounds fast, as counts (no test measures time): what is read, built, copied and kept over many rounds."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from flwr.app import Array, Message
from tiny import Files, forget_models, simulated

import client.app
import client.silo
import models.initial
import partitions.silo_file
from models.training import Samples
from partitions import simulated as simulation
from server.run.loop import Progress
from strategies.base.payload import TensorArray

METHODS = ["fedavg", "apple", "fedfomo", "fedala", "ditto", "fedapm"]


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each of these was done."""
    done: Counter[str] = Counter()

    def count(owner: Any, name: str, what: Callable[..., str]) -> None:
        original = getattr(owner, name)

        def counted(*given: Any, **named: Any) -> Any:
            done[what(*given)] += 1
            return original(*given, **named)

        monkeypatch.setattr(owner, name, counted)

    count(partitions.silo_file, "read_arrays", lambda file: f"open {file}")
    count(simulation, "load_dataset", lambda name, *_: f"load {name}")
    count(simulation, "partition", lambda *_: "partition")
    count(models.initial, "build", lambda *_: "build")
    count(client.app, "parse_settings", lambda *_: "parse")
    count(Samples, "__init__", lambda *_: "samples")
    count(TensorArray, "_array", lambda *_: "serialise")
    for cached in (client.silo._own_file, simulation.divide, simulation.part_of, client.app.settings_of):
        cached.cache_clear()
    forget_models()
    return done


@pytest.mark.parametrize("vectorize", [False, True])
@pytest.mark.parametrize("strategy", METHODS)
def test_everything_is_read_and_built_once(counts: Counter[str], strategy: str, vectorize: bool) -> None:
    """Over four rounds, a closing exchange and six silos; and between silos of one process nothing is serialised."""
    simulated(strategy=strategy, rounds=4, vectorize=vectorize)
    purposes = 7 if strategy == "apple" else 1  # initial models: of every silo's core, or the common one
    assert counts.pop("build") <= 1 + purposes
    assert counts == {"load digits": 1, "partition": 1, "parse": 1, "samples": 3 * 6}
    many = counts.copy()
    simulated(strategy=strategy, rounds=4, vectorize=vectorize)
    assert counts["load digits"] == 1
    assert many == counts - Counter({"build": counts["build"]})


def test_a_silos_own_file_is_opened_once(counts: Counter[str], three: Files) -> None:
    simulated(strategy="fedavg", rounds=4, silos=3, files=three)
    opened = {name: number for name, number in counts.items() if name.startswith("open")}
    assert opened == {f"open {file}": 1 for file in three.values()}


class Alive:
    """After rounds 4 and 7: how many tensors, arrays and messages there are, and the tensors' bytes."""

    def __init__(self) -> None:
        self.numbers: dict[int, tuple[int, ...]] = {}

    def __call__(self, progress: Progress) -> None:
        if progress.round not in (4, 7):
            return
        gc.collect()
        objects = gc.get_objects()
        tensors = [o for o in objects if issubclass(type(o), torch.Tensor)]
        counted = [sum(issubclass(type(o), kind) for o in objects) for kind in (Message, Array)]
        # What a stand-in device of an earlier test has left has no storage to ask for.
        owned = [t.untyped_storage() for t in tensors if type(t) in (torch.Tensor, torch.nn.Parameter)]
        storages = {storage.data_ptr(): storage.nbytes() for storage in owned}
        self.numbers[progress.round] = (len(tensors), *counted, sum(storages.values()))


@pytest.mark.parametrize(("vectorize", "evaluate_every"), [(False, 1), (False, 0), (True, 0)])
@pytest.mark.parametrize("strategy", METHODS)
def test_memory_does_not_grow_with_the_rounds(strategy: str, vectorize: bool, evaluate_every: int) -> None:
    """As many objects after round 7 as after round 4. Only APPLE's history grows, by N numbers a round in each silo."""
    alive = Alive()
    simulated(watch=alive, strategy=strategy, rounds=7, vectorize=vectorize, evaluate_every=evaluate_every)
    early, late = alive.numbers[4], alive.numbers[7]
    assert early[:3] == late[:3]
    assert early[0] > 20
    if evaluate_every == 0:  # else the best personal model is the last one in some silos, and one storage with it
        assert late[3] - early[3] == (3 * 6 * 6 * 4 if strategy == "apple" else 0)
