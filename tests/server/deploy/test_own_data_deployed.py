"""Data sets of hospitals' own code in a real federation: found by PYTHONPATH, and the numbers of a run in process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tiny import PLAIN, federate
from trio import bring_up, rows

from client.protocol.code import digest_of_code
from client.protocol.launch import FLOWER
from client.protocol.study import parse_study
from partitions.own.dataset import open_own
from server.cli.main import main
from server.deploy import local, submit
from server.results.history import History

pytestmark = [pytest.mark.deployed, pytest.mark.exhaustive]
ROOT = Path(__file__).parents[3]
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

def west():
    return ours(3)
"""
WORDS = [
    word
    for what in ("purpose", "contact", "results", "retention")
    for word in (f"--{what}", f"Of the {what}.")
]
RUN = {
    **PLAIN,
    "strategy": "fedavg",
    "model": "small-cnn",
    "rounds": 2,
    "batch-size": 8,
    "learning-rate": 0.05,
}


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The hospitals' module, which their processes import."""
    for key, value in {"XDG_STATE_HOME": "state", "FLWR_HOME": "flower"}.items():
        monkeypatch.setenv(key, str(tmp_path / value))
    for key, value in FLOWER.items():
        monkeypatch.setenv(key, value)
    (tmp_path / "code").mkdir()
    module = tmp_path / "code" / "ward_deployed.py"
    module.write_text(SOURCE)
    monkeypatch.setenv("PYTHONPATH", str(module.parent))
    monkeypatch.syspath_prepend(module.parent)
    monkeypatch.chdir(tmp_path)
    open_own.cache_clear()
    yield module
    open_own.cache_clear()
    sys.modules.pop("ward_deployed", None)


def write_federation(*names, policy="public"):
    silos = "".join(
        f"\n  - {{name: {name}, data: {{dataset: 'ward_deployed:{name}'}}, policy: {policy}}}"
        for name in names
    )
    Path("federation.yaml").write_text(f"name: ward\nsilos:{silos}\n")


def test_deployed_and_in_process_are_the_same(tmp_path, module):
    """What samples draw is that of a run in process, too."""
    write_federation("north", "south")
    bring_up(tmp_path)
    try:
        submit.run({**RUN, "out": str(tmp_path / "there")})
    finally:
        local.down("ward")
    files = {name: tmp_path / f"ward_deployed.{name}.index.npz" for name in ("north", "south")}
    federate(files, policy="public", directory=tmp_path / "here", **RUN)
    assert rows(tmp_path / "there") == rows(tmp_path / "here")


def test_an_approved_run(tmp_path, module):
    """`study new` writes the code's SHA-256, three hospitals approve, and the run trains with all of them."""
    names = ("north", "south", "west")
    Path("policy.toml").write_text('studies = "required"\nmin-silos = 3\n')
    write_federation(*names, policy="policy.toml")
    running = bring_up(tmp_path)
    approved = {**RUN, "study": "trial", "min-silos": 3}
    try:
        settings = [f"{key}={value}" for key, value in RUN.items() if key != "strategy"]
        new = f"study new study.toml --name trial --strategy fedavg --app {ROOT}".split()
        assert main([*new, *WORDS, "--set", *settings]) == 0
        code = digest_of_code("ward_deployed:north")
        study = parse_study(Path("study.toml").read_text(), "study.toml")
        assert study.datasets == dict.fromkeys(names, code)
        assert main(["study", "check", "study.toml"]) == 0
        for name in names:
            state = str(running.directory / "silos" / name)
            given = f"--state-dir {state} --yes --by B --signed-by nobody".split()
            assert main(["approve", "study.toml", *given]) == 0
        submit.run({**approved, "out": str(tmp_path / "run")})
        assert {
            row.silo for row in History(tmp_path / "run" / "history.csv").rows if row.n
        } == {*names}
    finally:
        local.down("ward")
