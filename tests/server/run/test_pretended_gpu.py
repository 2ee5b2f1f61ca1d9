"""Every method, network, task and rule on a device of its own: as on the CPU, and without waiting in each batch.

No GPU is needed: :class:`pretended_gpu.PretendedGpu` refuses what CUDA refuses. So a tensor that was made on the CPU
and meets one of the device, and a number that is read from the device in each step, are found in every method's round.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from cases import CASES, OPTIONS
from hospitals import ALL, NETWORKS, hospital_files
from pretended_gpu import PretendedGpu
from tiny import Files, Run, comparable, federate, random_silos
from two_layers import DEEP

from strategies.base.settings import RULES

GPU = PretendedGpu()  # one for all tests, as caches of the process keep what is on it
# Methods that need a number of each batch: ∂f_i/∂α decides on the next step's α.
READS_PER_BATCH = {"apfl": "strategies/apfl.py", "apfl, logits": "strategies/apfl.py"}


OFTEN = {"apple", "fedala", "fedavg", "scaffold"}  # the others: `make test-all`


@pytest.fixture(scope="module")
def three(tmp_path_factory) -> Files:
    folder = tmp_path_factory.mktemp("three")
    return random_silos(folder, {"a": 9, "b": 12, "c": 8}, columns=4)


def on_gpu(files: Files, **options: Any) -> tuple[Run, Counter[str]]:
    """A run whose silos are on ``cuda:0``, and how often each place read from it."""
    GPU.reads.clear()
    with GPU:
        run = federate(files, **{**options, "device": "cuda"})
    return run, GPU.reads.copy()


def test_it_refuses_what_cuda_refuses():
    with GPU:
        there, here = torch.ones(3, device="cuda"), torch.ones(3)
        assert (there + 1).device == torch.device("cuda:0") and here.device.type == "cpu"
        with pytest.raises(RuntimeError, match="all tensors must be on one device"):
            there + here
        with pytest.raises(TypeError, match="can't convert a tensor on cuda:0 to numpy"):
            there.numpy()
        assert there.cpu().numpy().sum() == 3
        GPU.reads.clear()
        assert there.sum().item() == 3 and GPU.reads.total() == 1


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in OFTEN else pytest.mark.exhaustive)
        for name in CASES
    ],
)
def test_every_method_trains_there(three, tiny_bn, name):
    """The history is the CPU's, and more batches in a round bring no more reads."""
    options = {**DEEP, **OPTIONS, **CASES[name][0], "rounds": 2}
    small = {**options, "batch_size": 3}
    run, reads = on_gpu(three, **small)
    assert comparable(run.rows) == comparable(federate(three, **small).rows)
    _, fewer = on_gpu(three, **{**options, "batch_size": 1000})
    more = {place.partition(":")[0] for place in reads - fewer}
    assert more <= {READS_PER_BATCH.get(name, "")}


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(made, marks=() if made == "notes" else pytest.mark.exhaustive)
        for made in ALL
    ],
)
def test_every_task_is_there(tmp_path, made):
    files = hospital_files(tmp_path, made)
    options = {
        "strategy": "fedavg",
        "rounds": 1,
        "batch_size": 16,
        "normalization": "agreed",
        **NETWORKS[made],
    }
    run, _ = on_gpu(files, **options)
    assert comparable(run.rows) == comparable(federate(files, **options).rows)


SETTINGS: dict[str, dict[str, Any]] = {
    "adam": {"optimizer": "adam"},
    "focal": {"loss": "focal"},
    "int8": {"wire_dtype": "int8"},
    "topk": {"wire_dtype": "topk", "wire_topk": 0.2},
    **{rule: {"robust": rule, "robust_attackers": 0} for rule in ("screen", "clip", *RULES)},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_is_there(three, name):
    options = {**DEEP, "strategy": "fedavg", "rounds": 2, "batch_size": 4, **SETTINGS[name]}
    run, _ = on_gpu(three, **options)
    assert comparable(run.rows) == comparable(federate(three, **options).rows)


def test_private_training_is_there(three, tmp_path, monkeypatch):
    """Its noise is drawn on the CPU, by the silo's key. Two runs have two keys, so they are not compared."""
    fork = torch.random.fork_rng  # of a GPU that is there it keeps the generator's state, too
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: fork(devices=[]))
    options: dict[str, Any] = {"dp": True, "dp__noise_multiplier": 1.0, "dp__clip_norm": 1.0}
    options |= {**DEEP, "strategy": "fedavg", "rounds": 2, "batch_size": 4}
    run, _ = on_gpu(three, state_dir=tmp_path / "state", directory=tmp_path / "run", **options)
    assert {row.silo for row in run.rows} >= set(three)


@pytest.mark.parametrize(
    ("model", "extra"), [("resnet8", {}), ("small-cnn", {}), ("vit-s", {"vit_s__patch": 4})]
)
def test_networks_of_pictures_are_there(tmp_path, model, extra):
    """Batch normalisation, whose integer buffer counts batches, attention, and layers that are concatenated."""
    files = hospital_files(tmp_path, "multilabel")
    options = {"strategy": "fedavg", "rounds": 1, "batch_size": 32, "model": model, **extra}
    run, _ = on_gpu(files, **options)
    assert comparable(run.rows) == comparable(federate(files, **options).rows)
