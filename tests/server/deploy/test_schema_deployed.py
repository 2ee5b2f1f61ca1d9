"""A declared schema over gRPC: files in other orders give the numbers of files in the declared order."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from schemas import COLUMNS, LABELS, PERMUTED, hospitals
from tiny import PLAIN, federate
from trio import bring_up, rows

from client.site.runtime.launch import FLOWER
from server.deploy import local, submit

pytestmark = [
    pytest.mark.deployed,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="`silofl up` needs Linux"),
]
RUN: dict[str, Any] = {**PLAIN, "strategy": "fedala", "rounds": 2, "normalization": "agreed"}


def test_over_the_wire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One hospital's file is permuted, one has a foreign column and is left out; the other two train."""
    for key, value in {
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "FLWR_HOME": str(tmp_path / "flower"),
        **FLOWER,
    }.items():
        monkeypatch.setenv(key, value)
    files = hospitals(tmp_path / "files", b=PERMUTED, c={"feature_names": ("age", "sex", "bmi")})
    (tmp_path / "schema.toml").write_text(f"features = {list(COLUMNS)}\nlabels = {list(LABELS)}\n")
    silos = "".join(f"\n  - {{name: {name}, data: {file}, policy: public}}" for name, file in files.items())
    (tmp_path / "federation.yaml").write_text(f"name: schemas\nschema: schema.toml\nsilos:{silos}\n")
    bring_up(tmp_path)
    try:
        submit.run({**RUN, "out": str(tmp_path / "there")})
    finally:
        local.down("schemas")
    fitting = {name: file for name, file in hospitals(tmp_path / "agreed").items() if name != "c"}
    federate(fitting, directory=tmp_path / "here", **RUN)
    assert rows(tmp_path / "there") == rows(tmp_path / "here")
    notes = (tmp_path / "there" / "progress.jsonl").read_text()
    assert "b has its columns and labels in another order: it maps them by name" in notes
    assert "c is left out: it has columns named bmi, the federation file has chol" in notes
