"""A hospital's policy over the wire: the site's own process refuses, before the app is there, and the others go on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from server.deploy import local, processes, submit
from server.deploy.federation import read_federation
from server.deploy.local import record
from server.results.history import History

pytestmark = [
    pytest.mark.deployed,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="`silofl up` needs Linux"),
]

FEDERATION = """\
name: strict
demo: {dataset: digits, partition: dirichlet, seed: 42}
silos:
  - {name: hospital-01, data: demo}
  - {name: hospital-02, data: demo}
  - {name: hospital-03, data: demo, policy: policy.toml}
"""

KINDS = ("query", "train", "train", "evaluate")


def test_a_server_that_weakens_every_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing of hospital-03 leaves but one line that names rule and setting; the same line is in its own log."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flower"))
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "0")
    (tmp_path / "policy.toml").write_text("")  # the defaults
    (tmp_path / "federation.yaml").write_text(FEDERATION)
    weak = {"strategy": "fedavg", "rounds": 1, "threads": 1, "model": "mlp", "batch-size": 1, "min-metric-samples": 1}
    try:
        up = local.up(read_federation(tmp_path / "federation.yaml"), echo=lambda line: None)
        submit.run({**weak, "out": str(tmp_path / "run")})
        before = (up.directory / "logs" / "hospital-03.log").read_text()
        submit.run({**weak, "batch-size": 8, "rounds": 2, "out": str(tmp_path / "allowed")})
        (counted,) = (up.directory / "silos" / "hospital-03" / "messages").iterdir()
        logs = {silo.name: (up.directory / "logs" / f"{silo.name}.log").read_text() for silo in up.silos}
    finally:
        processes.end(processes.find(record.state_root() / "strict"), grace=1.0)
    line = "hospital-03 refuses: its policy has min-batch-size = 8, the run batch-size = 1"
    assert f"ERROR: {line}" in logs["hospital-03"].splitlines()
    assert f"cannot take part: {line}\n" in capfd.readouterr().err
    assert line in (tmp_path / "run" / "report.html").read_text()
    assert "sent its data card" in logs["hospital-01"] and "hospital-03 sent" not in before
    silos = {row.silo for row in History(tmp_path / "run" / "history.csv").rows if row.silo}
    assert silos == {"hospital-01", "hospital-02"}
    # Of the run that it allows each message counts once, in the process that stays and in the one that does not.
    assert counted.read_text().split("\n") == [f"{kind} hospital-03" for kind in KINDS] + [""]
