"""The large networks under methods of each kind: whole models, layers, other silos' models, normalisation at home."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny import federate, one_block

from models.flat import gather

SIDE, CLASSES = 8, 3
NETWORKS: dict[str, dict[str, Any]] = {
    "linear": {},
    "resnet50": {"resnet50__stem": "3x3"},
    "densenet121": {"densenet121__stem": "3x3"},
    "vit-s": {"vit-s__patch": 4},
}
LARGEST = ("resnet50", "densenet121", "vit-s")
METHODS = ("local", "fedavg", "fedala", "apple", "ditto", "fedbn", "fedrep")


@pytest.fixture
def pictures(tmp_path):
    """Two silos of five and four pictures of 8x8 with two channels, which are brighter for higher classes."""
    rng = np.random.default_rng(5)
    files = {}
    for name, n in (("a", 5), ("b", 4)):
        y = np.arange(n) % CLASSES
        x = (rng.integers(0, 80, (n, SIDE, SIDE, 2)) + 60 * y[:, None, None, None]).astype(
            np.uint8
        )
        named: dict[str, Any] = {"x_train": x, "y_train": y, "x_test": x, "y_test": y}
        np.savez(tmp_path / f"{name}.npz", classes=np.array(CLASSES), **named)
        files[name] = tmp_path / f"{name}.npz"
    return files


@pytest.mark.parametrize(
    "network",
    [
        pytest.param(name, marks=pytest.mark.exhaustive if name in LARGEST else ())
        for name in NETWORKS
    ],
)
def test_methods_of_each_kind_run(pictures, network):
    """Two rounds each: every silo answers, what is sent has the stated size, and models move and stay finite.

    (What they say is not looked at: running statistics of four pictures are good for nothing.)
    """
    for method in METHODS:
        settings = {
            "strategy": method,
            "model": network,
            "learning_rate": 0.01,
            "apple__common_init": True,
            "fedala__max_epochs": 1,
        }
        settings |= {"rounds": 2, "batch_size": 8, "evaluate_every": 0, **NETWORKS[network]}
        settings |= one_block(method) if network == "linear" else {}
        if method == "fedbn" and network in ("linear", "vit-s"):
            with pytest.raises(
                ValueError,
                match="fedbn keeps batch normalisation in the silo, and this network has",
            ):
                federate(pictures, **settings)
            continue
        run = federate(pictures, **settings)
        layout = run.strategy.layout
        sent = {
            "local": 0,
            "fedrep": layout.blocks[-1].start,
            "fedbn": sum(part.stop - part.start for part in layout.norm_parts(False)),
        }.get(method, layout.size)
        shared = {"local": 0, "fedbn": 0}.get(method, layout.buffer_size)
        assert run.values("bytes_up") == [4 * 2 * (sent + shared)] * 2, method
        for silo in pictures:
            assert torch.isfinite(run.personal(silo)).all()
        moved = run.personal("a") != run.personal("b")
        assert gather(moved, [layout.blocks[-1].slice]).any(), method
