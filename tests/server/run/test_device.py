"""Silos on a device that is not the CPU (``phony``): the CPU's numbers, and what crosses between the two."""

from __future__ import annotations

import functools
import shutil
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from cases import TYPICAL, typical
from hospitals import ALL, NETWORKS, hospital_files
from phony import DEVICE, phony_device
from representatives import sampled, seldom, some
from resuming import Crash, crash_after
from sklearn.datasets import load_digits
from tiny import SIMULATED, federate, random_silos, simulated
from two_layers import DEEP

import client.app
import client.session
from partitions import npz, stored
from strategies import pfedfda, strategies
from strategies.base.settings import RULES

SILOS = 2
# Pooled: one silo trains; trees: XGBoost trains them on the CPU
METHODS = sorted(
    name
    for name, s in strategies().items()
    if not (s.info.role.pooled or s.info.training.trees == "only")
)
AS_TYPICAL = [name for name in METHODS if name in TYPICAL]


NEEDS: dict[str, dict[str, Any]] = {  # settings without which a method refuses to run
    "fedbn": {"model": "tiny-bn"},
    "fednova": {"optimizer": "sgd", "momentum": 0.5},
    "fedex-lora": {"lora_rank": 2},
    "fedsa-lora": {"lora_rank": 2},
}


@pytest.fixture(scope="module", autouse=True)
def _few(tmp_path_factory):
    """An eighth of the digits: enough for several batches of each silo."""
    file = tmp_path_factory.mktemp("data") / "digits.npz"
    x, y = load_digits(return_X_y=True)
    np.savez(file, x=x[:225].reshape(-1, 8, 8).astype(np.uint8) * 15, y=y[:225])
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SIMULATED, "dataset", str(file))
        patch.setattr(pfedfda, "STEPS", 3)  # of a search whose every step is a dozen operations
        yield


def run(**changes):
    changes |= NEEDS.get(changes["strategy"], {})
    few: dict[str, Any] = {
        "fedala.max-epochs": 2,
        "fedrep.head-epochs": 2,
        "pfedme.inner-steps": 2,
        "silos": SILOS,
        "optimizer": "adam",
        "optimizer_state": "keep",
    }
    return simulated(**{**few, **changes})


@pytest.fixture
def on_device(monkeypatch):
    monkeypatch.setattr(client.session, "device_of", lambda *_: DEVICE)


def figures(federation):
    return [row for row in federation.history.rows if "seconds" not in row.metric]


@functools.cache
def of_the_cpu(strategy):
    return figures(run(strategy=strategy, rounds=2))


# Another method's tensors of the CPU are refused in the next test but one; arithmetic is the same for all
@pytest.mark.parametrize("strategy", AS_TYPICAL)
def test_methods_give_the_numbers_of_the_cpu(strategy, tiny_bn, request):
    on_cpu = of_the_cpu(strategy)
    request.getfixturevalue("on_device")
    with phony_device():
        assert figures(run(strategy=strategy, rounds=2)) == on_cpu


@sampled("strategy", AS_TYPICAL, 3)
def test_samples_on_disk_give_the_numbers_of_the_cpu(strategy, tiny_bn, tmp_path, monkeypatch):
    on_cpu = of_the_cpu(strategy)
    copy = shutil.copy(SIMULATED["dataset"], tmp_path / "digits.npz")
    monkeypatch.setitem(SIMULATED, "dataset", str(copy))
    monkeypatch.setattr(npz, "MAPPED", 1)
    monkeypatch.setattr(stored, "IN_MEMORY", 0)
    monkeypatch.setattr(client.session, "device_of", lambda *_: DEVICE)
    with phony_device():
        assert figures(run(strategy=strategy, rounds=2)) == on_cpu


@typical(METHODS, "strategy")
def test_models_and_data_stay_on_the_device(strategy, tiny_bn, on_device):
    """A round moves the order of the samples, once per epoch, and reads a few numbers, however many its steps are."""
    crossings = []
    with phony_device():
        # The data stay on the device from run to run. What evaluates a method's models is on it, too
        run(strategy=strategy, rounds=1)
    for rounds, batch_size in ((1, 64), (2, 64), (2, 32)):
        with phony_device() as crossed:
            federation = run(
                strategy=strategy, rounds=rounds, batch_size=batch_size, evaluate_every=0
            )
        crossings.append(crossed)
    samples = max(summary["n_train"] for summary in federation.registration.summaries.values())
    second_round = crossings[1] - crossings[0]
    # Read at a time: at most a number for each pair of silos (FedAWA's inner products)
    pairs = SILOS**2
    assert all(scalars <= (samples if way == "in" else pairs) for way, scalars in second_round)
    # GH-OFL trains nothing, so it draws no order
    assert second_round["in", samples] or strategy == "gh-ofl"
    assert second_round["read", 1]
    times = [Counter(way for way, _ in crossed.elements()) for crossed in crossings]
    assert times[1] == times[2]


@pytest.mark.parametrize("strategy", ["apple", "fedala", "fedapm", "fedfomo"])
def test_a_run_goes_on_from_its_files(strategy, tmp_path, request):
    on_cpu = figures(run(strategy=strategy, rounds=4))
    request.getfixturevalue("on_device")
    with phony_device():
        with pytest.raises(Crash):
            run(directory=tmp_path, watch=crash_after(2), strategy=strategy, rounds=4)
        assert (
            figures(run(directory=tmp_path, strategy=strategy, rounds=4, resume=True)) == on_cpu
        )


def assert_same_there(request, files, **options):
    """A run of FedAvg has the CPU's losses; a convolution there is another kernel, with other last digits."""
    options = {"strategy": "fedavg", "rounds": 2, "batch_size": 16, **options}
    on_cpu = losses(federate(files, **options))
    request.getfixturevalue("on_device")
    with phony_device():
        assert losses(federate(files, **options)) == pytest.approx(on_cpu, rel=1e-3)


def losses(run):
    return [row.value for row in run.rows if row.metric == "loss" and row.value is not None]


# A GPU has a kernel of its own for recurrent layers; the phony device has none.
RECURRENT = {"pulses", "stays"}


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(made, marks=() if made == "notes" else pytest.mark.exhaustive)
        for made in ALL
        if made not in RECURRENT
    ],
)
def test_every_task_is_there(tmp_path, made, request):
    files = hospital_files(tmp_path, made)
    assert_same_there(request, files, rounds=1, normalization="agreed", **NETWORKS[made])


LARGE = {"vit_s__patch": 8, "batch_size": 1000}
SMALL_TRANSFORMER = {"player_transformer__width": 8, "player_transformer__feed_forward": 8}


@pytest.mark.parametrize(
    ("made", "model", "extra"),
    [
        ("multilabel", "resnet8", {}),
        ("multilabel", "small-cnn", {}),
        ("notes", "player-transformer", SMALL_TRANSFORMER),
        seldom("multilabel", "vit-s", LARGE),
    ],
)
def test_networks_are_there(tmp_path, made, model, extra, request):
    """Batch normalisation, whose integer buffer counts batches, and attention."""
    assert_same_there(request, hospital_files(tmp_path, made), rounds=1, model=model, **extra)


SETTINGS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.9, "weight_decay": 0.01},
    "focal": {"loss": "focal"},
    "int8": {"wire_dtype": "int8"},
    "topk": {"wire_dtype": "topk", "wire_topk": 0.2},
    **{rule: {"robust": rule, "robust_attackers": 0} for rule in ("screen", "clip", *RULES)},
}


@some("name", SETTINGS, lambda name: name not in RULES)
def test_every_setting_is_there(tmp_path, name, request):
    files = random_silos(tmp_path, {"a": 9, "b": 12, "c": 8}, columns=4)
    assert_same_there(request, files, **{**DEEP, "batch_size": 4, **SETTINGS[name]})


def test_private_training_is_there(tmp_path, monkeypatch, on_device):
    """Its noise is drawn by the silo's key, which differs from run to run, so figures are not compared."""
    fork = torch.random.fork_rng  # of a GPU that is there it keeps the generator's state, too
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: fork(devices=[]))
    files = random_silos(tmp_path, {"a": 9, "b": 12, "c": 8}, columns=4)
    options: dict[str, Any] = {"dp": True, "dp__noise_multiplier": 1.0, "dp__clip_norm": 1.0}
    options |= {**DEEP, "strategy": "fedavg", "rounds": 2, "batch_size": 4}
    with phony_device():
        run = federate(
            files, state_dir=tmp_path / "state", directory=tmp_path / "run", **options
        )
    assert {row.silo for row in run.rows} >= set(files)
