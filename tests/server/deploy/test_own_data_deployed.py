"""Data sets of hospitals' own code in a real federation: found by PYTHONPATH, and the numbers of a run in process."""

from __future__ import annotations

import sys

import pytest
from tiny import PLAIN, federate
from trio import bring_up, rows

from client.site.runtime.launch import FLOWER
from partitions.own.dataset import open_own
from server.deploy import local, submit

pytestmark = [
    pytest.mark.deployed,
    pytest.mark.exhaustive,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="`silofl up` needs Linux"),
]
SOURCE = """
import torch
from torch.utils.data import TensorDataset

class Shifted(TensorDataset):
    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return x + torch.rand(()), y

def ours(seed):
    made = {}
    for split, n in (("train", 24), ("val", 8), ("test", 12)):
        y = torch.arange(n) % 2
        x = torch.randn(n, 1, 8, 8, generator=torch.Generator().manual_seed(seed)) + y.view(-1, 1, 1, 1)
        made[split] = Shifted(x, y), {"label": y.numpy(), "patient": [f"{split}-{i}" for i in range(n)]}
    return made

def north():
    return ours(1)

def south():
    return ours(2)
"""
RUN = {
    **PLAIN,
    "strategy": "fedavg",
    "model": "small-cnn",
    "rounds": 2,
    "batch-size": 8,
    "learning-rate": 0.05,
}


def test_deployed_and_in_process_are_the_same(tmp_path, monkeypatch):
    """What samples draw is that of a run in process, too."""
    for key, value in {"XDG_STATE_HOME": "state", "FLWR_HOME": "flower"}.items():
        monkeypatch.setenv(key, str(tmp_path / value))
    for key, value in FLOWER.items():
        monkeypatch.setenv(key, value)
    (tmp_path / "code").mkdir()
    module = tmp_path / "code" / "ward_deployed.py"
    module.write_text(SOURCE)
    monkeypatch.setenv("PYTHONPATH", str(module.parent))
    monkeypatch.syspath_prepend(module.parent)
    open_own.cache_clear()
    silos = "".join(
        f"\n  - {{name: {name}, data: {{dataset: 'ward_deployed:{name}'}}, policy: public}}"
        for name in ("north", "south")
    )
    (tmp_path / "federation.yaml").write_text(f"name: ward\nsilos:{silos}\n")
    bring_up(tmp_path)
    try:
        submit.run({**RUN, "out": str(tmp_path / "there")})
    finally:
        local.down("ward")
    files = {name: tmp_path / f"ward_deployed.{name}.index.npz" for name in ("north", "south")}
    federate(files, policy="public", directory=tmp_path / "here", **RUN)
    assert rows(tmp_path / "there") == rows(tmp_path / "here")
    open_own.cache_clear()
    sys.modules.pop("ward_deployed")
