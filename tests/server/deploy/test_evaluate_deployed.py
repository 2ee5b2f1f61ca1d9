"""``silofl evaluate`` and held-out hospitals: the same bits in process, under Ray and deployed.

Three real silos on this machine, over gRPC with TLS and node keys; the tests share one federation.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from ray_runs import run_under_ray
from trio import RUN, rows

from server.cli.main import main
from server.deploy import submit
from server.deploy.local import LocalFederation
from server.results.study import study_config, study_runs
from server.run.evaluation.models import read_models, run_values
from server.simulation.evaluate import evaluate, gather_models
from server.simulation.simulate import simulate

pytestmark = [
    pytest.mark.deployed,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="`silofl up` needs Linux"),
]
SIMULATED: dict[str, Any] = {**RUN, "silos": 3, "rounds": 2, "strategy": "ditto"}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in this process, one hospital held out."""
    out = tmp_path_factory.mktemp("runs") / "here"
    return simulate({**SIMULATED, "hold-out": "hospital-02", "out": str(out)}, quiet=True)


def test_a_hospital_is_held_out(federation: LocalFederation, here: Path, tmp_path: Path) -> None:
    submit.run({**RUN, "rounds": 2, "strategy": "ditto", "hold-out": "hospital-02", "out": str(tmp_path / "there")})
    assert rows(tmp_path / "there") == rows(here)
    assert any("zero_shot" in row for row in rows(here))


def test_a_matrix_deployed(federation: LocalFederation, here: Path, tmp_path: Path) -> None:
    matrix = evaluate(here, tmp_path / "a", "all")
    there = tmp_path / "b"
    given = ["--models", "all", "--connection", federation.connection.name, "--out", str(there)]
    # The run in process has its silos' states on this machine.
    assert main(["evaluate", str(here), *given]) == 0
    assert (there / "matrix.csv").read_text() == matrix.read_text()


def test_a_matrix_under_ray(folder: Path, here: Path, tmp_path: Path) -> None:
    matrix, out = evaluate(here, tmp_path / "a"), tmp_path / "b"
    files = gather_models(here, tmp_path / "models", "shared")
    data = {key: SIMULATED[key] for key in ("dataset", "partition", "silos", "threads")}
    values = {**data, **run_values(read_models(files)), "out": str(out)}
    directory = submit.open_directory(out, study_config(study_runs(values)), "", resume=False)
    (tmp_path / "models").rename(directory.path / "models")
    run_under_ray({k: v for k, v in values.items() if k not in ("out", "ala")}, out, "matrix.csv")
    assert (out / "matrix.csv").read_text() == matrix.read_text()
