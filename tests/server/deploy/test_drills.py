"""Drills: processes that are killed and lines that are cut in the middle of a run, with real processes.

`make drills` runs them (ten minutes); `make test` leaves them out. What came of them: docs/reliability.md. The drills
that CI runs too are in ``test_deployed.py``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trio import RUN, bring_up, rows, start_run, supernode, text_of, wait_for

from client.site.launch import LOOPBACK, program
from server.deploy import local, processes, submit
from server.deploy.credentials import Credentials
from server.deploy.local import LocalFederation
from server.run.history import History
from server.simulate import simulate

pytestmark = [
    pytest.mark.deployed,
    pytest.mark.drill,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="`silofl up` needs Linux"),
]

LONG: dict[str, Any] = {**RUN, "strategy": "apple", "rounds": 5, "local-epochs": 60, "round-timeout": 240.0}
NAMED_WITHIN = 30.0  # seconds; what a drill waits for beside it has a minute


def reached(out: Path, number: int) -> Callable[[], bool]:
    return lambda: f'"round": {number},' in text_of(out / "progress.jsonl")


def left_out(out: Path) -> set[tuple[int, str]]:
    return {(r.round, r.silo) for r in History(out / "history.csv").rows if r.metric == "rejected"}


def named(out: Path, line: str, since: float) -> None:
    """The line is on the operator's screen within half a minute."""
    wait_for(lambda: line in text_of(out / "progress.jsonl"), NAMED_WITHIN)
    print(f"named after {time.monotonic() - since:.0f} s: {line}")


def finish(follower: threading.Thread) -> None:
    follower.join(timeout=300)
    assert not follower.is_alive()


def workers(federation: LocalFederation) -> list[int]:
    """The processes that train now: grandchildren of the warm parent."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    warm = local.status(federation)["warm"]["pid"]
    return [pid for pid, parent in parents.items() if parents.get(parent) == warm]


@pytest.mark.parametrize("moment", [0.1, 0.5, 1.0, 1.5, 2.0])
def test_a_worker_is_killed(federation: LocalFederation, folder: Path, tmp_path: Path, moment: float) -> None:
    """In each phase of a round: its silo misses the round, with the reason, and is back in the next."""
    bring_up(folder)
    out = tmp_path / "out"
    follower = start_run(LONG, out)
    wait_for(reached(out, 1), 120)
    time.sleep(moment)
    wait_for(lambda: bool(workers(federation)), 30)
    os.kill(workers(federation)[0], signal.SIGKILL)
    finish(follower)
    missed = left_out(out)
    assert len(missed) <= 1  # none where its reply was out already
    assert not missed or "SIGKILL" in text_of(out / "progress.jsonl")
    assert {r.silo for r in History(out / "history.csv").rows if r.round == 5 and r.split} == {
        f"hospital-0{i}" for i in (1, 2, 3)
    }


def test_a_superexec_is_killed(federation: LocalFederation, folder: Path, tmp_path: Path) -> None:
    """It is started again; its silo misses the round that it was in, at most."""
    bring_up(folder)
    out = tmp_path / "out"
    follower = start_run(LONG, out)
    wait_for(reached(out, 1), 120)
    found = [p for p in processes.find(federation.directory) if "flower-superexec" in p.command]
    (one,) = [p for p in found if p.part == "hospital-02"]
    os.kill(one.pid, signal.SIGKILL)
    finish(follower)
    assert {silo for _, silo in left_out(out)} <= {"hospital-02"} and len(left_out(out)) <= 1
    assert "it is started again" in text_of(federation.directory / "logs" / "hospital-02.log")


def test_a_silo_dies_and_comes_back_three_rounds_later(
    federation: LocalFederation, folder: Path, tmp_path: Path
) -> None:
    bring_up(folder)
    out = tmp_path / "out"
    follower = start_run({**LONG, "rounds": 12, "min-silos": 2}, out)
    wait_for(reached(out, 1), 120)
    (pid,) = supernode(local.find_local())
    os.kill(pid, signal.SIGKILL)
    since = time.monotonic()
    named(out, "hospital-02 is gone; the round goes on without it", since)
    gone = max(number for number in range(1, 13) if number == 1 or reached(out, number)())
    wait_for(reached(out, gone + 3), 120)
    bring_up(folder)
    finish(follower)
    assert {silo for _, silo in left_out(out)} == {"hospital-02"} and len(left_out(out)) >= 3
    last = {r.silo for r in History(out / "history.csv").rows if r.round == 12 and r.split}
    assert last == {"hospital-01", "hospital-02", "hospital-03"}


def test_who_follows_a_run_is_killed(federation: LocalFederation, folder: Path, tmp_path: Path) -> None:
    """`silofl run` dies; the run goes on to its end, with the same numbers."""
    bring_up(folder)
    simulate({**LONG, "silos": 3, "out": str(tmp_path / "here")}, quiet=True)
    out = tmp_path / "there"
    options = [word for key, value in LONG.items() for word in ("--set", f"{key}={value}")]
    follower = subprocess.Popen([program("silofl"), "run", *options, "--set", f"out={out}"])
    wait_for(reached(out, 2), 120)
    follower.kill()
    follower.wait()
    wait_for(lambda: (out / "summary.json").exists(), 240)
    assert rows(out) == rows(tmp_path / "here")


class Line:
    """A line between a silo and its server that can be cut: what is sent then arrives when it is mended, or never."""

    def __init__(self, port: int) -> None:
        self.server = port
        self.whole = threading.Event()
        self.whole.set()
        self.listener = socket.create_server((LOOPBACK, 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self.listener.accept()
                far = socket.create_connection((LOOPBACK, self.server))
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=(one, other), daemon=True).start()

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                self.whole.wait()
                other.sendall(data)
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def line(federation: LocalFederation, folder: Path) -> Iterator[Line]:
    """hospital-02 reaches its server over a line that can be cut."""
    running = bring_up(folder)
    line = Line(running.fleet_port)
    silo = next(s for s in running.silos if s.name == "hospital-02")
    credentials = Credentials(running.directory / "credentials")
    over = replace(running, fleet_port=line.port)
    command = local._supernode_command(over, silo, credentials)
    processes.end([p for p in processes.find(running.directory) if p.part == silo.name], grace=5.0)
    environment = local._environment(running.directory, silo.name, 3) | {"SILOFL_POLICY": "public"}
    log = running.directory / "logs" / "hospital-02.log"
    processes.start(silo.name, command, directory=running.directory, log=log, environment=environment)
    wait_for(lambda: local.status(running)["silos"][1]["state"] == "online", 90)
    yield line
    line.whole.set()
    line.listener.close()
    processes.end([p for p in processes.find(running.directory) if p.part == silo.name], grace=5.0)


@pytest.mark.parametrize(("seconds", "lost"), [(10.0, "go-on"), (60.0, "resend")])
def test_the_line_is_cut(line: Line, federation: LocalFederation, tmp_path: Path, seconds: float, lost: str) -> None:
    """For ten seconds: nobody notices. A minute: the silo is named and gets its message again. No number differs."""
    settings = {**LONG, "lost-silo": lost}
    simulate({**settings, "silos": 3, "out": str(tmp_path / "here")}, quiet=True)
    out = tmp_path / "there"
    follower = start_run(settings, out)
    wait_for(reached(out, 2), 120)
    since = time.monotonic()
    line.whole.clear()
    if lost == "resend":
        named(out, "hospital-02 is gone; waits for it", since)
    time.sleep(max(0.0, since + seconds - time.monotonic()))
    line.whole.set()
    finish(follower)
    assert ("is gone" in text_of(out / "progress.jsonl")) == (lost == "resend")
    assert rows(out) == rows(tmp_path / "here")


class SmallDisk:
    """A disk of some megabytes that can be full."""

    def __init__(self, path: Path) -> None:
        self.path, self.filler = path, path / "filler"
        path.mkdir(parents=True, exist_ok=True)
        mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(path)]
        if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
            pytest.skip("nobody but root makes a disk")

    def fill(self) -> None:
        with contextlib.suppress(OSError), self.filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 10))

    def free(self) -> None:
        self.filler.unlink()

    def remove(self) -> None:
        subprocess.run(["umount", "-l", str(self.path)], check=True)


def test_a_silos_disk_is_full(federation: LocalFederation, folder: Path, tmp_path: Path) -> None:
    """Nothing leaves that cannot be written down: the silo is left out with the reason until there is space again."""
    running = bring_up(folder)
    out, disk = tmp_path / "out", SmallDisk(running.directory / "silos" / "hospital-02")
    try:
        follower = start_run({**LONG, "rounds": 8}, out)
        wait_for(reached(out, 1), 120)
        disk.fill()
        since = time.monotonic()
        named(out, "No space left on device", since)
        disk.free()
        finish(follower)
    finally:
        disk.remove()
    assert {silo for _, silo in left_out(out)} == {"hospital-02"}
    assert "hospital-02" in {r.silo for r in History(out / "history.csv").rows if r.round == 8 and r.split}


def test_the_servers_disk_is_full(federation: LocalFederation, folder: Path, tmp_path: Path) -> None:
    """The run ends with the reason; once there is space it is resumed, and every number is what it would have been."""
    bring_up(folder)
    simulate({**LONG, "silos": 3, "out": str(tmp_path / "here")}, quiet=True)
    disk = SmallDisk(tmp_path / "disk")
    out = disk.path / "out"
    ended: list[str] = []

    def run() -> None:
        try:
            submit.run({**LONG, "out": str(out)})
        except RuntimeError as error:
            ended.append(str(error))

    try:
        follower = threading.Thread(target=run)
        follower.start()
        wait_for(reached(out, 2), 120)
        disk.fill()
        since = time.monotonic()
        finish(follower)
        print(f"ended after {time.monotonic() - since:.0f} s: {ended}")
        assert len(ended) == 1 and "No space left on device" in ended[0]
        disk.free()
        submit.run({**LONG, "out": str(out), "resume": True})
        assert rows(out) == rows(tmp_path / "here")
    finally:
        disk.remove()
