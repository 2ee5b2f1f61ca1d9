"""Tasks besides classes, and several inputs, in real federations: three hospitals' own files, over gRPC."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hospitals import MADE, NETWORKS, hospital_files
from tiny import federate
from trio import bring_up, rows

from client.site.launch import FLOWER
from server.deploy import local, submit

pytestmark = [
    pytest.mark.deployed,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="`silofl up` needs Linux"),
]


@pytest.mark.parametrize("task", [*MADE, "balls", "stays"])
def test_deployed_and_in_process_are_the_same(tmp_path: Path, task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in {"XDG_STATE_HOME": "state", "FLWR_HOME": "flower"}.items():
        monkeypatch.setenv(key, str(tmp_path / value))
    for key, value in FLOWER.items():
        monkeypatch.setenv(key, value)
    files = hospital_files(tmp_path, task)
    silos = "".join(f"\n  - {{name: {name}, data: {file}}}" for name, file in files.items())
    (tmp_path / "federation.yaml").write_text(f"name: {task}\nsilos:{silos}\n")
    run = {"strategy": "fedala", "rounds": 2, "threads": 1, "batch-size": 16, "learning-rate": 0.05, "seed": 42}
    run |= {key.replace("__", ".").replace("_", "-"): value for key, value in NETWORKS[task].items()}
    run |= {"normalization": "silo", "min-metric-samples": 0}
    if task in ("segmentation", "balls"):  # masks move with their pictures
        run["augment"] = "flip,rotate:20"
    bring_up(tmp_path)
    try:
        submit.run({**run, "out": str(tmp_path / "there")})
    finally:
        local.down(task)
    federate(files, policy="public", directory=tmp_path / "here", **run)
    assert rows(tmp_path / "there") == rows(tmp_path / "here")
