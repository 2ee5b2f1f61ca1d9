"""The papers' experiments: every file is a study that ``silofl simulate --config`` takes, with no setting in vain."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.rundir import read_toml
from server.simulate import study_runs

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "experiments").rglob("*.toml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT / "experiments")))
def test_every_experiment_parses(file: Path) -> None:
    """Each names its command, and sets nothing that none of its runs reads (another method's or partition's key)."""
    values = read_toml(file)
    used = set().union(*(run.flat() for run in study_runs(values)))
    assert set(values) <= used
    assert f"silofl simulate --config {file.relative_to(ROOT).as_posix()}\n" in file.read_text()


def test_there_are_experiments_of_each_paper() -> None:
    assert {file.parent.name for file in FILES} == {
        "apple",
        "diversifed",
        "fedapm",
        "foundation",
        "playerfl",
    }
