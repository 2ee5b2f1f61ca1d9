"""What makes rounds fast, as counts (no test measures time): what is read, built, copied and kept over many rounds."""

from __future__ import annotations

import gc
from collections import Counter

import numpy as np
import pytest
import torch
from flwr.app import Array, Message
from representatives import sampled
from tiny import comparable, forget_models, simulated

import client.app
import client.local_data
import client.session
import models.initialisation
import models.tasks.base
import partitions.silo_file
from models.samples import Samples
from partitions import simulated as simulation
from strategies.base.state import ClientState
from strategies.base.transport.payload import TensorArray

METHODS = ["fedavg", "apple", "fedfomo", "fedala", "ditto", "fedapm"]


@pytest.fixture
def counts(monkeypatch):
    """How often each of these was done."""
    done: Counter[str] = Counter()

    def count(owner, name, what):
        original = getattr(owner, name)

        def counted(*given, **named):
            done[what(*given)] += 1
            return original(*given, **named)

        monkeypatch.setattr(owner, name, counted)

    count(partitions.silo_file, "arrays_at", lambda file, *_: f"open {file}")
    count(simulation, "load_dataset", lambda name, *_: f"load {name}")
    count(simulation, "partition", lambda *_: "partition")
    count(models.initialisation, "build", lambda *_: "build")
    count(client.app, "parse_settings", lambda *_: "parse")
    count(Samples, "__init__", lambda *_: "samples")

    def serialise(array, pieces=TensorArray.pieces):
        done["serialise"] += 1
        return pieces.fget(array)

    monkeypatch.setattr(TensorArray, "pieces", property(serialise))
    parsed = client.app.settings_of
    for cached in (client.local_data._own_file, simulation.divide, simulation.part_of, parsed):
        cached.cache_clear()
    forget_models()
    return done


@sampled("strategy", METHODS, 3)
def test_everything_is_read_and_built_once(counts, strategy):
    """Over four rounds, a closing exchange and six silos; and between silos of one process nothing is serialised."""
    simulated(strategy=strategy, rounds=4)
    # Initial models: of every silo's core, or the common one
    purposes = 7 if strategy == "apple" else 1
    # The server, which keeps the layout alone, and the silos build one each
    assert counts.pop("build") <= 2 + purposes
    assert counts == {"load digits": 1, "partition": 1, "parse": 1, "samples": 3 * 6}
    many = counts.copy()
    simulated(strategy=strategy, rounds=4)
    assert counts["load digits"] == 1
    assert many == counts - Counter({"build": counts["build"]})


def test_a_message_opens_what_it_needs_once(counts, monkeypatch):
    """Six silos: a query, four train messages, a closing one and two for evidence each."""
    names = ("open_data", "device_of", "columns_in")

    def count(name, original):
        def counted(*given):
            counts[name] += 1
            return original(*given)

        return counted

    for name in names:
        counted = count(name, getattr(client.session, name))
        monkeypatch.setattr(client.session, name, counted)
        monkeypatch.setattr(client.app, name, counted, raising=False)
    simulated(strategy="fedavg", rounds=4)
    assert {name: counts[name] for name in names} == dict.fromkeys(names, 6 * (1 + 4 + 1 + 2))


def test_a_silos_own_file_is_opened_once(counts, three):
    simulated(strategy="fedavg", rounds=4, silos=3, files=three)
    opened = {name: number for name, number in counts.items() if name.startswith("open")}
    assert opened == {f"open {file}": 1 for file in three.values()}


def predictions(monkeypatch, run):
    """How many times a network was evaluated on a split, and what the run returns."""
    done: list[int] = []
    ordinary = models.tasks.base.predict

    def counted(model, samples):
        done.append(len(samples))
        return ordinary(model, samples)

    with monkeypatch.context() as patch:
        patch.setattr(models.tasks.base, "predict", counted)
        result = run()
    return len(done), result


@pytest.mark.parametrize(
    ("strategy", "changes", "count"),
    [
        # Six silos, four rounds, two models on two splits, one of them again at the end.
        ("fedavg", {}, 6 * (4 * 4 + 2)),
        # The model of before a round is the one after the round before: two models in the first round, then one.
        ("local", {}, 6 * (4 + 3 * 2)),
        ("diversifed", {}, 6 * (4 + 3 * 2)),
        ("lp-proj", {}, 6 * (4 + 3 * 2)),
        ("local", {"model": "tiny-bn"}, 6 * (4 + 3 * 2)),
        # What rounds 1 and 3 left is not known when it is received in rounds 2 and 4; the end knows it of round 4.
        ("local", {"evaluate-every": 2}, 6 * (4 + 4)),
        # The same vector throughout, but the personal predictor is two networks: it is not what was received.
        ("apfl", {"apfl.mix": "logits", "local-epochs": 0}, 6 * (4 * 4 + 2)),
        # Fewer than all, None: where others' models help nobody, or a silo is left out of a round.
        ("fedfomo", {}, None),
        ("fedavg", {"participation": 0.5}, None),
    ],
)
def test_no_model_is_evaluated_twice(strategy, changes, count, tiny_bn, monkeypatch):
    """The personal model that a silo had before; and no number is another one for it."""
    settings = {"strategy": strategy, "rounds": 4, **changes}
    known, run = predictions(monkeypatch, lambda: simulated(**settings))
    monkeypatch.setattr(ClientState, "is_previous", lambda self, model: False)
    every, evaluated = predictions(monkeypatch, lambda: simulated(**settings))
    assert comparable(run.history.rows) == comparable(evaluated.history.rows)
    assert known == (count or known) and (known < every or count == every)


def test_a_model_is_evaluated_again_on_other_data(three):
    """A hospital replaces its file after round 2; nothing is trained, so the model is the same throughout."""

    def replace(progress):
        if progress.round == 2:
            with np.load(three["a"]) as data:
                arrays = dict(data)
            np.savez(three["a"], **{**arrays, "y_test": (arrays["y_test"] + 1) % 3})

    settings = {
        "strategy": "local",
        "rounds": 4,
        "silos": 3,
        "local-epochs": 0,
        "min-metric-samples": 1,
    }
    run = simulated(three, watch=replace, **settings)
    losses = [
        r.value
        for r in run.history.rows
        if (r.silo, r.split, r.metric) == ("a", "test", "loss")
    ]
    # Of two models in rounds 1 and 2, and of those since
    before, after = set(losses[:4]), set(losses[4:])
    assert len(losses) == 4 + 5 and len(before) == len(after) == 1 and before != after


class Alive:
    """After rounds 4 and 7: how many tensors, arrays and messages there are, and the tensors' bytes."""

    def __init__(self):
        self.numbers: dict[int, tuple[int, ...]] = {}

    def __call__(self, progress):
        if progress.round not in (4, 7):
            return
        gc.collect()
        objects = gc.get_objects()
        tensors = [o for o in objects if issubclass(type(o), torch.Tensor)]
        counted = [sum(issubclass(type(o), kind) for o in objects) for kind in (Message, Array)]
        # What a stand-in device of an earlier test has left has no storage to ask for.
        owned = [
            t.untyped_storage()
            for t in tensors
            if type(t) in (torch.Tensor, torch.nn.Parameter)
        ]
        storages = {storage.data_ptr(): storage.nbytes() for storage in owned}
        self.numbers[progress.round] = (len(tensors), *counted, sum(storages.values()))


@pytest.mark.parametrize("evaluate_every", [1, 0])
@sampled("strategy", METHODS, 3)
def test_memory_does_not_grow_with_the_rounds(strategy, evaluate_every):
    """As many objects after round 7 as after round 4. Only APPLE's history grows, by N numbers a round in each silo."""
    alive = Alive()
    gc.collect()
    gc.freeze()  # what was there before is not counted
    simulated(watch=alive, strategy=strategy, rounds=7, evaluate_every=evaluate_every)
    early, late = alive.numbers[4], alive.numbers[7]
    assert early[:3] == late[:3]
    assert early[0] > 20
    # Else the best personal model is the last one in some silos, and one storage with it
    if evaluate_every == 0:
        assert late[3] - early[3] == (3 * 6 * 6 * 4 if strategy == "apple" else 0)
