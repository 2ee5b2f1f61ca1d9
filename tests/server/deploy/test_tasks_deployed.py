"""Tasks besides classes, and several inputs, in real federations: three hospitals' own files, over gRPC."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hospitals import MADE, NETWORKS, hospital_files
from tiny import federate
from trio import bring_up, rows

from client.site.runtime.launch import FLOWER
from server.deploy import local, submit

pytestmark = [
    pytest.mark.deployed,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="`silofl up` needs Linux"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A federation of three hospitals, whose files lie in this folder: each task's in the place of the one before."""
    folder = tmp_path_factory.mktemp("tasks")
    with pytest.MonkeyPatch.context() as patch:
        for key, value in {"XDG_STATE_HOME": "state", "FLWR_HOME": "flower"}.items():
            patch.setenv(key, str(folder / value))
        for key, value in FLOWER.items():
            patch.setenv(key, value)
        files = hospital_files(folder, "ordinal")
        silos = "".join(f"\n  - {{name: {name}, data: {file}, policy: public}}" for name, file in files.items())
        (folder / "federation.yaml").write_text(f"name: tasks\nsilos:{silos}\n")
        bring_up(folder)
        yield folder
        local.down("tasks")


@pytest.mark.parametrize("task", [*MADE, "balls", "stays"])
def test_deployed_and_in_process_are_the_same(folder: Path, tmp_path: Path, task: str) -> None:
    files = hospital_files(folder, task)
    run = {"strategy": "fedala", "rounds": 2, "threads": 1, "batch-size": 16, "learning-rate": 0.05, "seed": 42}
    run |= {key.replace("__", ".").replace("_", "-"): value for key, value in NETWORKS[task].items()}
    run |= {"normalization": "silo", "min-metric-samples": 0}
    if task in ("segmentation", "balls"):  # masks move with their pictures
        run["augment"] = "flip,rotate:20"
    submit.run({**run, "out": str(tmp_path / "there")})
    federate(files, policy="public", directory=tmp_path / "here", **run)
    assert rows(tmp_path / "there") == rows(tmp_path / "here")
