"""The example trainers, with the real libraries: each trains as the built-in loop does."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import federate, random_silos
from torchvision_here import whole_or_skip
from two_layers import DEEP

EXAMPLES = Path(__file__).parents[3] / "examples"
BASE = {**DEEP, "batch_size": 4, "local_epochs": 2, "learning_rate": 0.1}


@pytest.fixture(autouse=True)
def examples(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)


def importable(trainer):
    """Import a trainer, or skip it where a library is missing; Lightning imports torchvision."""
    if trainer == "lightning_loop":
        whole_or_skip()
    try:
        importlib.import_module(f"trainers.{trainer}")
    except ModuleNotFoundError as error:
        pytest.skip(f"a library cannot be imported: {error}")


def go(files, trainer, **changes):
    name = f"trainers.{trainer}:train" if trainer else ""
    return federate(files, **{**BASE, "rounds": 2, **changes}, trainer=name)


@pytest.mark.exhaustive  # the libraries take long to import
@pytest.mark.parametrize("trainer", ["lightning_loop", "monai_engine", "huggingface"])
@pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)
def test_a_library_trains_as_the_built_in_loop_does(trainer, tmp_path):
    """SCAFFOLD's control variates and FedRep's frozen layers are in it: the models are equal bit for bit."""
    importable(trainer)
    files = random_silos(tmp_path, [13, 9])
    for method in ("scaffold", "fedrep"):
        built_in, by_library = (go(files, t, strategy=method) for t in ("", trainer))
        for silo in files:
            assert torch.equal(built_in.personal(silo), by_library.personal(silo))


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("trainers/*.py")), ids=lambda f: f.stem)
def test_a_trainer_is_short(file):
    lines = [
        line
        for line in file.read_text().split("class LoraText")[0].splitlines()
        if line.strip()
    ]
    assert len(lines) <= 30


@pytest.mark.exhaustive
@pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)
def test_lora_of_peft_sends_its_own_layers_alone(tmp_path):
    """Texts of 6 tokens of 20; the body's weights stay those of the seed, and 2 x 2 adapters and the head travel."""
    importable("huggingface")
    rng, files = np.random.default_rng(0), {}
    for name in "ab":
        x, y = rng.integers(1, 20, (12, 6)).astype(np.int32), rng.integers(0, 2, 12)
        splits: Any = {
            f"{k}_{s}": v for s in ("train", "val", "test") for k, v in (("x", x), ("y", y))
        }
        files[name] = tmp_path / f"{name}.npz"
        np.savez(files[name], vocabulary=np.array(20), classes=np.array(2), **splits)
    own = {"model": "trainers.huggingface:network", "trainable": "*lora_*,*score*"}
    before = federate(files, **own, rounds=1, local_epochs=0)
    run = go(files, "huggingface", **own)
    assert len(run.personal("a")) == 4 * 2 * 4 * 32 + 33 * 2
    assert not torch.equal(before.personal("a"), run.personal("a"))
