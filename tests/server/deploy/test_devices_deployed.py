"""Silos with two devices in a real federation: the numbers of one process, and a process that dies."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from supernode import gone
from trio import RUN, bring_up, rows, start_run, supernode, wait_for

from client.protocol.launch import FLOWER
from partitions.common.errors import RunFailedError
from server.deploy import local, submit
from server.results.history import History
from server.simulation.simulate import simulate

pytestmark = [pytest.mark.deployed, pytest.mark.exhaustive]
FEDERATION = """\
name: wards
demo: {dataset: digits, partition: dirichlet, seed: 42}
silos:
  - {name: hospital-01, data: demo, device: [cpu, cpu]}
  - {name: hospital-02, data: demo, device: [cpu, cpu]}
  - {name: hospital-03, data: demo, device: [cpu, cpu]}
"""
DITTO = {**RUN, "strategy": "ditto", "rounds": 2}


def processes_of(log: Path, without: list[int]) -> list[int]:
    """The processes that write to a log, in the order of their start; without the SuperNode."""
    writers = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "fd/1").readlink() == log and int(folder.name) not in without:
                words = (folder / "stat").read_text().rpartition(")")[2].split()
                writers[int(folder.name)] = int(words[19])
        except OSError:
            continue
    return sorted(writers, key=lambda pid: (writers[pid], pid))


def test_two_devices_deployed(tmp_path, monkeypatch):
    """Bit for bit a run in process whose batches are computed in two parts; a dead process costs no round."""
    for key, value in {"XDG_STATE_HOME": "state", "FLWR_HOME": "flower"}.items():
        monkeypatch.setenv(key, str(tmp_path / value))
    for key, value in FLOWER.items():
        monkeypatch.setenv(key, value)
    (tmp_path / "federation.yaml").write_text(FEDERATION)
    simulate({**DITTO, "accumulate": 2, "silos": 3, "out": str(tmp_path / "here")}, quiet=True)
    running = bring_up(tmp_path)
    log = (running.directory / "logs/hospital-02.log").resolve()
    try:
        submit.run({**DITTO, "out": str(tmp_path / "there")})
        assert rows(tmp_path / "there") == rows(tmp_path / "here")

        refusal = "device = cpu,cpu: not for moon, whose loss depends on features"
        with pytest.raises(RunFailedError, match=refusal):
            submit.run({**RUN, "strategy": "moon", "out": str(tmp_path / "moon")})

        out, node = tmp_path / "long", supernode(running)
        run = start_run({**RUN, "rounds": 12, "local-epochs": 5}, out)
        file = out / "history.csv"
        wait_for(lambda: file.exists() and ",2," in file.read_text(), 120)
        victim = processes_of(log, node)[-1]
        os.kill(victim, signal.SIGKILL)
        run.join(240)
        assert gone(victim)
        rounds = {row.round for row in History(file).rows if row.silo == "hospital-02"}
        assert rounds == {*range(1, 14)}
    finally:
        local.down("wards")
