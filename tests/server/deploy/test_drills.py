"""Drills: processes that are killed, lines that are cut, clocks that are wrong, in the middle of a run, for real.

`make drills` runs them (an hour); `make test` leaves them out. What came of them:
docs/reliability.md. The drills that CI runs too are in ``test_deployed.py``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time

import pytest
from damage import flip
from faults import Gate, SetClock, SmallDisk, over_a_line, slowed
from trio import RUN, bring_up, end_silo, rows, start_run, supernode, text_of, wait_for

from client.protocol.keys import site_root
from client.protocol.launch import LOOPBACK, program
from client.protocol.policy import default_file, public_policy
from server.deploy import local, processes, submit
from server.deploy.bundle import Bundle, pins
from server.deploy.credentials import Credentials
from server.deploy.local import record, start
from server.results.history import History
from server.simulation.simulate import simulate

pytestmark = [pytest.mark.deployed, pytest.mark.drill]

LONG = {**RUN, "strategy": "apple", "rounds": 5, "local-epochs": 60, "round-timeout": 240.0}
GOES_ON = {"min-silos": 2, "lost-silo": "go-on"}
# Where a run is when something happens to it: a part of the federation, a file, the function that is about to run.
PHASES = {
    "before the message": "superlink server/run/exchange.py Exchange.run",
    "while training": "hospital-02 strategies/apple.py AppleClient.local_update",
    "while the silo saves": "hospital-02 strategies/base/state.py write_sealed.<locals>.write",
    "while replying": "hospital-02 client/site/release.py release_reply",
    "while sending": "hospital-02 client/flower/loop.py MessageLoop._send",
    "while aggregating": "superlink strategies/apple.py Apple.aggregate",
    "while the server saves": "superlink strategies/base/state.py write_sealed.<locals>.write",
}
IN_A_WORKER = ("while training", "while the silo saves")
SILOS = {"hospital-01", "hospital-02", "hospital-03"}
DAY = 86400
NAMED_WITHIN = 30.0  # seconds; what a drill waits for beside it has a minute


@pytest.fixture(scope="module", autouse=True)
def gate(folder):
    """All processes of the federation know the places of PHASES."""
    gate = Gate(folder / "gate")
    with pytest.MonkeyPatch.context() as patch:
        for key, value in gate.environment(PHASES).items():
            patch.setenv(key, value)
        yield gate
        gate.open()


def progress(out):
    return text_of(out / "progress.jsonl")


def reached(out, number):
    return lambda: f'"round": {number},' in progress(out)


def left_out(out):
    return {
        (r.round, r.silo) for r in History(out / "history.csv").rows if r.metric == "rejected"
    }


def without(out):
    """The silos that a round was without."""
    return {silo for _, silo in left_out(out)}


def silos_of(out, number):
    """The silos with numbers of a round."""
    return {r.silo for r in History(out / "history.csv").rows if r.round == number and r.split}


def named(out, line, since, times=1):
    """The line is on the operator's screen within half a minute."""
    wait_for(
        lambda: progress(out).count(line) >= times, since + NAMED_WITHIN - time.monotonic()
    )
    print(f"named after {time.monotonic() - since:.0f} s: {line}")


def begin(settings, out):
    """A run whose first round is over."""
    follower = start_run(settings, out)
    wait_for(reached(out, 1), 120)
    return follower


def finish(follower):
    follower.join(300)
    assert not follower.is_alive()


def same_as_here(settings, out, tmp_path):
    """The run's rows are those of the same run in this process."""
    simulate({**settings, "silos": 3, "out": str(tmp_path / "here")}, quiet=True)
    assert rows(out) == rows(tmp_path / "here")


def victims(who, standing):
    """The process numbers of who is to die; ``standing``: that of the process that the gate holds."""
    running = record.find_local()
    found = processes.find(running.directory)
    silo, server = (
        [p for p in found if p.part == part] for part in ("hospital-02", "superlink")
    )
    return {
        "worker": [standing],
        "template process": [local.status(running)["warm"]["pid"]],
        "SuperNode": [p.pid for p in silo if "private.py site.runtime.supernode" in p.command],
        "ServerApp": [p.pid for p in server if "flwr-serverapp" in p.command],
        "SuperLink": [p.pid for p in server if "server.deploy.superlink" in p.command],
        "server's SuperExec": [p.pid for p in server if "flower-superexec" in p.command],
        "server's host": [p.pid for p in server],
        "all hosts": [p.pid for p in found],
    }[who]


def kill(pids):
    assert pids and all(pids)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("who", ["worker", "template process", "SuperNode"])
def test_a_silos_process_is_killed_in_each_phase(
    gate, federation, folder, tmp_path, monkeypatch, who
):
    """A kill -9 in each of several rounds: who takes the worker with it costs the silo its round, nobody else does.

    A template process that died is started again when a message needs one: here each does, as no worker is kept.
    """
    phases = {
        name: place for name, place in PHASES.items() if who != "worker" or name in IN_A_WORKER
    }
    settings = {**LONG, "rounds": len(phases) + 2, "lost-silo": "resend"}
    if who == "template process":
        local.down("trio")
        monkeypatch.setenv("SILOFL_RESIDENT_MINUTES", "0")
    bring_up(folder)
    out = tmp_path / "there"
    follower = begin(settings, out)
    for number, (phase, place) in enumerate(phases.items(), 1):
        standing = gate.wait_at(place)
        now = max(n for n in range(1, settings["rounds"]) if reached(out, n)()) + 1
        kill(victims(who, standing))
        since = time.monotonic()
        gate.open()
        if who == "SuperNode":
            named(out, "hospital-02 is gone; waits for it", since, times=number)
            bring_up(folder)
        wait_for(reached(out, now), 180)
        print(f"{who} {phase}: round {now} ended after {time.monotonic() - since:.0f} s")
    finish(follower)
    if who == "template process":
        local.down("trio")
    print(f"rounds lost: {sorted(left_out(out))}")
    if who == "worker":
        assert without(out) == {"hospital-02"} and len(left_out(out)) == len(IN_A_WORKER)
        assert progress(out).count("SIGKILL") == len(IN_A_WORKER)
        assert silos_of(out, settings["rounds"]) == SILOS
    else:
        same_as_here(settings, out, tmp_path)


def silofl_run(settings, out):
    options = [
        word
        for key, value in settings.items()
        for word in ("--set", f"{key}={str(value).lower()}")
    ]
    return subprocess.Popen([program("silofl"), "run", *options, "--set", f"out={out}"])


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("who", ["ServerApp", "SuperLink", "server's host", "all hosts"])
def test_the_server_is_killed_in_each_phase(gate, federation, folder, tmp_path, who):
    """Again and again, and resumed every time: the numbers are those of a run to which nothing happened.

    A host takes `silofl run` with it. (Silos that outlive their server: ``test_docker.py``.)
    """
    settings = {**LONG, "rounds": len(PHASES) + 2}
    bring_up(folder)
    out = tmp_path / "there"
    for number, (phase, place) in enumerate(PHASES.items(), 1):
        follower = silofl_run({**settings, "resume": number > 1}, out)
        wait_for(reached(out, number), 180)
        standing = gate.wait_at(place)
        kill(victims(who, standing))
        since = time.monotonic()
        # `silofl run` waits for a SuperLink for ten minutes
        if who != "ServerApp":
            follower.kill()
        gate.open()
        assert follower.wait(120) == (1 if who == "ServerApp" else -signal.SIGKILL)
        print(f"{who} {phase}: the run ended after {time.monotonic() - since:.0f} s")
        bring_up(folder)
    submit.run({**settings, "out": str(out), "resume": True})
    same_as_here(settings, out, tmp_path)


def test_the_servers_superexec_is_killed(gate, federation, folder, tmp_path):
    """The run goes on to its end. No other one would begin: `silofl status` says so, `silofl up` mends it."""
    bring_up(folder)
    follower = silofl_run(LONG, tmp_path / "there")
    gate.wait_at(PHASES["while aggregating"])
    kill(victims("server's SuperExec", 0))
    gate.open()
    assert follower.wait(300) == 0
    assert not local.status(federation)["superlink"]["executor"]
    bring_up(folder)
    submit.run({**LONG, "out": str(tmp_path / "after")})
    assert rows(tmp_path / "there") == rows(tmp_path / "after")
    same_as_here(LONG, tmp_path / "there", tmp_path)


def test_a_silo_dies_and_comes_back_three_rounds_later(gate, federation, folder, tmp_path):
    bring_up(folder)
    out = tmp_path / "out"
    follower = begin({**LONG, "rounds": 12, **GOES_ON}, out)
    (pid,) = supernode(record.find_local())
    os.kill(pid, signal.SIGKILL)
    since = time.monotonic()
    named(out, "hospital-02 is gone; the round goes on without it", since)
    gone = max(number for number in range(1, 13) if reached(out, number)())
    wait_for(reached(out, gone + 3), 120)
    gate.wait_at(PHASES["before the message"])
    bring_up(folder)
    gate.open()
    finish(follower)
    assert without(out) == {"hospital-02"} and len(left_out(out)) >= 3
    assert silos_of(out, 12) == SILOS


def test_who_follows_a_run_is_killed(gate, federation, folder, tmp_path):
    """`silofl run` dies; the run goes on to its end, with the same numbers."""
    bring_up(folder)
    out = tmp_path / "there"
    follower = silofl_run(LONG, out)
    gate.wait_at(PHASES["while aggregating"])
    follower.kill()
    follower.wait()
    gate.open()
    wait_for(lambda: (out / "summary.json").exists(), 240)
    same_as_here(LONG, out, tmp_path)


@pytest.fixture
def line(federation, folder):
    """hospital-02 reaches its server over a line that can be cut."""
    with over_a_line(folder) as line:
        yield line


@pytest.mark.parametrize(("seconds", "lost"), [(10.0, "go-on"), (120.0, "resend")])
def test_the_line_is_cut_in_the_middle_of_an_upload(
    gate, line, federation, tmp_path, seconds, lost
):
    """For ten seconds: nobody notices. Two minutes: the silo is named, and asked again. No number differs."""
    settings = {**LONG, "lost-silo": lost}
    out = tmp_path / "there"
    follower = begin(settings, out)
    cut(gate, line)
    since = time.monotonic()
    if lost == "resend":
        named(out, "hospital-02 is gone; waits for it", since)
    time.sleep(max(0.0, since + seconds - time.monotonic()))
    line.whole.set()
    finish(follower)
    assert ("is gone" in progress(out)) == (lost == "resend")
    same_as_here(settings, out, tmp_path)


def test_the_line_is_cut_for_good(gate, line, federation, tmp_path):
    """In the middle of an upload: the silo is named, and misses that round and all that follow; the run goes on."""
    out = tmp_path / "out"
    follower = begin({**LONG, **GOES_ON}, out)
    cut(gate, line)
    named(out, "hospital-02 is gone; the round goes on without it", time.monotonic())
    finish(follower)
    missed = {number for number, silo in left_out(out) if silo == "hospital-02"}
    assert (
        missed == set(range(min(missed), 7))
        and min(missed) in (2, 3)
        and len(missed) == len(left_out(out))
    )


def cut(gate, line):
    """Of hospital-02's next reply some thousand bytes get through."""
    gate.wait_at(PHASES["while sending"])
    line.left = 12_000
    gate.open()
    wait_for(lambda: not line.whole.is_set(), 30)


@pytest.mark.parametrize(("factor", "waited"), [(1.5, False), (40.0, True)])
def test_a_silo_is_slow(gate, federation, folder, tmp_path, factor, waited):
    """With a tenth of its time it is waited for; held, it is named when its time is up, and left out meanwhile."""
    bring_up(folder)
    settings = {
        **LONG,
        "rounds": 6,
        "local-epochs": 300,
        "straggler-factor": factor,
        "straggler-floor": 5.0,
    }
    out = tmp_path / "there"
    follower = begin(settings, out)
    if waited:
        since = time.monotonic()
        with slowed(federation.directory / "logs" / "hospital-02.log"):
            wait_for(reached(out, 2), 240)
        assert time.monotonic() - since > 5.0
        finish(follower)
        same_as_here(settings, out, tmp_path)
    else:
        gate.wait_at(PHASES["while training"])
        named(out, "(straggler-factor, straggler-floor)", time.monotonic())
        gate.open()
        finish(follower)
        print(f"rounds lost: {sorted(left_out(out))}")
        assert without(out) == {"hospital-02"}
        assert silos_of(out, 6) == SILOS


class Hospital:
    """hospital-02 as hospitals run theirs: `silofl join`, with a supervisor, in place of the SuperNode of `up`."""

    def __init__(self, running, folder):
        end_silo(running)
        own = Credentials(running.directory / "credentials")
        self.bundle = folder / "hospital-02.tar"
        self.policy = folder / "policy.toml"
        self.log = folder / "join.log"
        self.data = next(silo.data for silo in running.silos if silo.name == "hospital-02")
        ca, key = own.ca_certificate.read_bytes(), own.node_key("hospital-02").read_bytes()
        address = f"{LOOPBACK}:{running.fleet_port}"
        Bundle("hospital-02", "trio", address, ca, key, pins(submit.app_directory())).write(
            self.bundle
        )
        self.policy.write_text(default_file(**dict(public_policy())))
        self.process: subprocess.Popen[bytes] | None = None

    def join(self, **environment):
        command = [
            program("silofl"),
            "join",
            str(self.bundle),
            "--data",
            self.data,
            "--policy",
            str(self.policy),
        ]
        with self.log.open("ab") as log:
            inherited = {**os.environ, processes.PART: "join", **environment}
            self.process = subprocess.Popen(command, env=inherited, stdout=log, stderr=log)

    def wait(self):
        """Until the silo is online."""
        wait_for((site_root() / "hospital-02" / "online").exists, 120)

    def said(self, words):
        """The lines of its screen with these words."""
        return [line for line in text_of(self.log).splitlines() if words in line]

    def leave(self):
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(30)


@pytest.fixture
def hospital(federation, folder, tmp_path):
    hospital = Hospital(bring_up(folder), tmp_path)
    yield hospital
    hospital.leave()


def test_a_supervisor_is_killed(gate, hospital, tmp_path):
    """As its silo trains, and as it replies: the silo goes with it, and joins again; nothing is lost."""
    settings = {**LONG, "lost-silo": "resend"}
    out = tmp_path / "there"
    hospital.join()
    hospital.wait()
    follower = start_run(settings, out)
    for number, phase in enumerate(("while training", "while sending"), 1):
        wait_for(reached(out, number), 120)
        gate.wait_at(PHASES[phase].replace("hospital-02", "join"))
        assert hospital.process is not None
        hospital.process.kill()
        since = time.monotonic()
        gate.open()
        named(out, "hospital-02 is gone; waits for it", since, times=number)
        (site_root() / "hospital-02" / "online").unlink()
        hospital.join()
        hospital.wait()
    finish(follower)
    same_as_here(settings, out, tmp_path)


@pytest.mark.parametrize("off", [DAY, -DAY], ids=["ahead", "behind"])
def test_a_silos_clock_is_off_by_a_day(gate, hospital, federation, tmp_path, off):
    """It cannot join; where it has joined before it is out until the clock is set. Each time one line says why."""
    clock, out = SetClock(tmp_path), tmp_path / "out"
    clock.set(off)
    hospital.join(**clock.environment)
    assert hospital.process is not None and hospital.process.wait(120) == 2
    (line,) = hospital.said("silofl join: hospital-02 cannot join: clock: ")
    print(line)
    clock.set(0)
    hospital.join(**clock.environment)
    hospital.wait()
    follower = begin({**LONG, "rounds": 12, **GOES_ON}, out)
    clock.set(off)
    since = time.monotonic()
    named(out, "hospital-02 is gone; the round goes on without it", since)
    gate.wait_at(PHASES["before the message"])
    wait_for(lambda: bool(hospital.said("trying again")), 30)
    clock.set(0)
    hospital.wait()
    print(f"back after {time.monotonic() - since:.0f} s")
    gate.open()
    finish(follower)
    print(f"rounds lost: {sorted(left_out(out))}")
    assert "hospital-02 is back" in progress(out)
    (again,) = hospital.said("trying again")
    assert "hospital-02: clock: " in again and "set it (NTP)" in again
    assert without(out) == {"hospital-02"}
    assert (12, "hospital-02") not in left_out(out)


@pytest.mark.parametrize("off", [DAY, -DAY], ids=["ahead", "behind"])
def test_the_servers_clock_jumps_by_a_day(federation, folder, tmp_path, monkeypatch, off):
    """All silos are out at once and the run ends; with the clock set again, `up` and `resume` mend all of it."""
    clock, out = SetClock(tmp_path), tmp_path / "there"
    local.down("trio")
    command = start.superlink_part
    shifted = [f"{key}={value}" for key, value in clock.environment.items()]
    monkeypatch.setattr(
        start, "superlink_part", lambda *given: ["env", *shifted, *command(*given)]
    )
    bring_up(folder)
    settings = {**LONG, "rounds": 8, "round-timeout": 60.0}
    follower = silofl_run(settings, out)
    wait_for(reached(out, 2), 120)
    clock.set(off)
    since = time.monotonic()
    # Forward, the ServerApp's last sign of life is a day old: Flower ends it before it can say anything
    if off < 0:
        named(out, "this server's clock went back by 24.0 h", since)
    assert follower.wait(300) != 0
    print(
        f"the run ended after {time.monotonic() - since:.0f} s: {text_of(out / 'progress.jsonl').splitlines()[-1]}"
    )
    # Each SuperNode ends at its next call
    wait_for(lambda: not any(silo["pid"] for silo in local.status(federation)["silos"]), 60)
    clock.set(0)
    bring_up(folder)
    submit.run({**settings, "out": str(out), "resume": True})
    same_as_here(settings, out, tmp_path)
    local.down("trio")


def test_a_silos_disk_is_full(federation, folder, tmp_path):
    """Nothing leaves that cannot be written down: the silo is left out with the reason until there is space again."""
    running = bring_up(folder)
    out, disk = tmp_path / "out", SmallDisk(running.directory / "silos" / "hospital-02")
    try:
        follower = begin({**LONG, "rounds": 8}, out)
        disk.fill()
        since = time.monotonic()
        named(out, "No space left on device", since)
        disk.free()
        finish(follower)
    finally:
        disk.remove()
    assert without(out) == {"hospital-02"}
    assert silos_of(out, 8) == SILOS


@pytest.mark.timeout(900)
def test_a_silos_state_is_damaged(federation, folder, tmp_path):
    """Found as the run is resumed: all go back a round, and every number is what it would have been."""
    running = bring_up(folder)
    settings = {**RUN, "strategy": "fedala", "rounds": 2}
    submit.run({**settings, "out": str(tmp_path / "out")})
    (newest,) = (running.directory / "silos").rglob(
        "out/*/hospital-02/run-*/round-000002.safetensors"
    )
    flip(newest)
    submit.run({**settings, "rounds": 4, "out": str(tmp_path / "out"), "resume": True})
    same_as_here({**settings, "rounds": 4}, tmp_path / "out", tmp_path)
    assert "hospital-02's state of round 2 is damaged: the run goes back" in progress(
        tmp_path / "out"
    )


def test_the_servers_disk_is_full(federation, folder, tmp_path):
    """The run ends with the reason; once there is space it is resumed, and every number is what it would have been."""
    bring_up(folder)
    disk = SmallDisk(tmp_path / "disk")
    out = disk.path / "out"
    ended = []

    def run():
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
        same_as_here(LONG, out, tmp_path)
    finally:
        disk.remove()
