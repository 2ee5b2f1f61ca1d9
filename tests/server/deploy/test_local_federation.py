"""A local federation of real processes: up, run, failures, stop, mend, down.

The app is a tiny one that computes nothing, so that what is waited for is the machinery alone. Two silos;
the tests of the module share one federation and run in their order.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import textwrap
import threading
import time
from pathlib import Path

import pytest
from failing import fails
from probe import CLIENT, SERVER, make_app, write_file
from tiny import events_of
from trio import bring_up, wait_for

from client.faults import explain
from client.flower.apps import build
from client.protocol.launch import LOOPBACK, free_ports, own_supernode
from partitions.common.errors import NoAnswerError
from server.cli.main import main
from server.deploy import following, local, processes, submit
from server.deploy.control import (
    Connection,
    Control,
    flower_config,
    read_connection,
    write_connection,
)
from server.deploy.credentials import Credentials, ensure_credentials
from server.deploy.federation import read_federation
from server.deploy.local import parts, record, start

pytestmark = pytest.mark.deployed

OWN_CONFIG = """\
# mine
[superlink]
default = "elsewhere" # a comment

[superlink.elsewhere]
address = "fl.example.org:443"

[other.table]
key = 1
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Everything that is written, state and Flower's configuration too, lies here; all processes end with it."""
    folder = tmp_path_factory.mktemp("federation")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        patch.setenv("FLWR_HOME", str(folder / "flower"))
        (folder / "flower").mkdir()
        (folder / "flower" / "config.toml").write_text(OWN_CONFIG)
        yield folder
        for name in ("trial", "broken"):
            processes.end(processes.find(record.state_root() / name), grace=1.0)


@pytest.fixture(scope="module")
def federation(folder):
    write_file(folder, "north", "south")
    return bring_up(folder)


@pytest.fixture(scope="module")
def app(folder):
    return make_app(folder / "app")


def run(federation, app, out, behaviour="", silos=2):
    out.mkdir(exist_ok=True)
    with Control(read_connection(federation.connection.name)) as control:
        settings = {"behaviour": behaviour, "silos": silos, "out": str(out)}
        submit.submit_and_follow(control, build(app), [settings], out)


def silo_pids(federation):
    return {silo["name"]: silo["pid"] for silo in local.status(federation)["silos"]}


def listening(pid):
    """Addresses and ports on which a process listens."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since
            target = os.readlink(fd)
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found = set()
    lines = [
        line
        for table in ("tcp", "tcp6")
        for line in Path("/proc/net", table).read_text().splitlines()[1:]
    ]
    for fields in map(str.split, lines):
        if fields[3] == "0A" and fields[9] in inodes:
            address, port = fields[1].split(":")
            # An IPv4 address in an IPv6 socket stands in the last four bytes; the kernel writes words in its own order.
            found.add((socket.inet_ntoa(bytes.fromhex(address[-8:])[::-1]), int(port, 16)))
    return found


def test_up_returns_when_all_are_online(federation):
    status = local.status(record.find_local())
    assert [(silo["name"], silo["state"]) for silo in status["silos"]] == [
        ("north", "online"),
        ("south", "online"),
    ]
    assert status["superlink"]["running"] and status["warm"]["running"] and status["runs"] == []


def test_ports_are_on_the_loopback_interface_and_a_silo_has_none(federation):
    superlink = local.status(federation)["superlink"]["pid"]
    control = int(federation.connection.address.rpartition(":")[2])
    assert listening(superlink) == {(LOOPBACK, control), (LOOPBACK, federation.fleet_port)}
    assert [listening(pid) for pid in silo_pids(federation).values()] == [set(), set()]


@pytest.mark.parametrize(
    "address, at, here",
    [
        ("127.0.0.1", "127.0.0.1:9092", "127.0.0.1:9092"),
        ("fl.example.org", "0.0.0.0:9092", "127.0.0.1:9092"),
        ("::1", "[::1]:9092", "[::1]:9092"),
        ("2001:db8::7", "[::]:9092", "127.0.0.1:9092"),
    ],
)
def test_where_the_server_listens(federation, address, at, here):
    """Beyond this machine only where its address is not of this machine; IPv6 where the address is one."""
    moved = federation.model_copy(update={"address": address, "fleet_port": 9092})
    assert at in " ".join(parts.superlink_part(moved)) and parts.fleet_here(moved) == here


def test_an_ipv6_server_is_up(tmp_path, monkeypatch):
    """Its certificate, its port and its silo are of ::1; a silo is online only through all of them."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flower"))
    file = write_file(tmp_path, "north")
    file.write_text(json.dumps({**json.loads(file.read_text()), "server": {"address": "::1"}}))
    try:
        up = bring_up(tmp_path)
        status = local.status(up)
        assert [silo["state"] for silo in status["silos"]] == ["online"]
        assert status["fleet"] == f"[::1]:{up.fleet_port}"
        socket.create_connection(("::1", up.fleet_port), 5).close()
    finally:
        processes.end(processes.find(record.state_root() / "trial"), grace=1.0)


def test_the_connection_is_written_and_nothing_else_of_the_configuration_touched(federation):
    ca = str(federation.directory / "credentials" / "ca.crt")
    assert read_connection("trial") == Connection("trial", federation.connection.address, ca)
    assert flower_config().read_text().startswith(OWN_CONFIG)


def test_an_unregistered_key_is_refused(federation, tmp_path):
    stranger = ensure_credentials(
        tmp_path / "stranger", silos=["stranger"], hosts=["localhost"]
    )
    command = [
        *(*own_supernode(), "--superlink", f"{LOOPBACK}:{federation.fleet_port}"),
        *("--root-certificates", federation.connection.root_certificates),
        *("--auth-supernode-private-key", str(stranger.node_key("stranger"))),
    ]
    environment = parts.part_environment(tmp_path, "stranger")
    # A file: a SuperExec that outlives its SuperNode for a while keeps a pipe open
    log = tmp_path / "log"
    with log.open("w") as output:
        done = subprocess.run(
            command, env=environment, stdout=output, stderr=output, timeout=60
        )
    assert done.returncode == 1 and "Failed to activate SuperNode" in log.read_text()
    assert len(local.status(federation)["silos"]) == 2


def test_a_run_reaches_every_silo(federation, app, tmp_path, capsys):
    run(federation, app, tmp_path / "out")
    assert (
        "probe seed 1  round 1/1  2 silos  accuracy 0.5000  1.0 s  2.0 MB"
        in capsys.readouterr().err
    )
    (event,) = events_of(tmp_path / "out")
    assert event["names"] == ["north", "south"]


def test_a_silo_opens_its_own_file_whatever_its_name(federation, app, tmp_path):
    run(federation, app, tmp_path / "out", "data")


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("server", "no such column"),
        (
            "killed",
            "a silo failed: ClientApp process was ended by SIGKILL (out of memory: lower batch-size;",
        ),
    ],
)
def test_a_failed_run_says_why(federation, app, tmp_path, behaviour, reason):
    with pytest.raises(submit.RunFailedError) as caught:
        run(federation, app, tmp_path / "out", behaviour)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("part", "reason"),
    [("server", "No module named 'not_there'"), ("client", "No module named 'not_there'")],
)
def test_a_run_that_fails_at_import_says_why(federation, tmp_path, part, reason):
    broken = {
        part: "import not_there\n" + textwrap.dedent(SERVER if part == "server" else CLIENT)
    }
    with pytest.raises(submit.RunFailedError) as caught:
        run(federation, make_app(tmp_path / "app", **broken), tmp_path / "out")
    assert reason in str(caught.value)


def test_a_run_that_is_refused_says_why(federation, app, tmp_path):
    with (
        pytest.raises(
            submit.RunFailedError, match=r"was not submitted: .*Invalid run configuration"
        ),
        Control(federation.connection) as control,
    ):
        submit.submit_and_follow(control, build(app), [{"no-such-key": 1}], tmp_path)


def test_ctrl_c_while_a_run_is_submitted_stops_it(federation, app, tmp_path, monkeypatch):
    begin = Control.start

    def start(control, *words):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)
        return begin(control, *words)

    monkeypatch.setattr(Control, "start", start)
    with pytest.raises(
        KeyboardInterrupt,
        match=f"silofl run --config .*config.toml --out {tmp_path / 'out'} --set res",
    ):
        run(federation, app, tmp_path / "out", "waits")
    assert local.status(federation)["runs"][0].state == "stopped"


def test_stop_ends_a_run_and_who_follows_it(federation, app, tmp_path):
    waits = Path(federation.silos[0].state_dir) / "waits"
    failures = []

    def follow():
        try:
            run(federation, app, tmp_path / "out", "waits")
        except submit.RunFailedError as error:
            failures.append(str(error))

    follower = threading.Thread(target=follow)
    follower.start()
    deadline = time.monotonic() + 60
    while not waits.exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert submit.stop().startswith("run-")
    follower.join(timeout=60)
    again = (
        f"silofl run --config {tmp_path}/out/config.toml --out {tmp_path}/out --set resume=true"
    )
    assert failures[0].endswith(f"was stopped after round 0; continue with {again}")
    assert submit.stop() == ""


@pytest.mark.exhaustive
def test_a_federation_that_lost_its_server_is_mended_by_up(federation, app, folder, tmp_path):
    """SuperLink, a SuperNode and the template process killed together; the keys stay."""
    before = local.status(federation)
    killed = (before["superlink"]["pid"], before["warm"]["pid"], silo_pids(federation)["north"])
    processes.end(
        [p for p in processes.find(federation.directory) if p.pid in killed], grace=0.0
    )
    lost = local.status(federation)
    assert not lost["superlink"]["running"] and not lost["warm"]["running"]
    assert lost["silos"][0]["state"] == "stopped"
    keys = Credentials(federation.directory / "credentials").node_key("north").read_bytes()
    again = bring_up(folder)
    # Who follows a run finds the server again
    assert (again.connection, again.fleet_port) == (
        federation.connection,
        federation.fleet_port,
    )
    assert (
        Credentials(federation.directory / "credentials").node_key("north").read_bytes() == keys
    )
    assert [silo["state"] for silo in local.status(again)["silos"]] == ["online", "online"]
    run(again, app, tmp_path / "out")


def test_up_starts_a_silo_that_was_about_to_end(federation, folder, monkeypatch):
    """As after the server's clock was wrong: its process was there when `up` looked, and left by itself."""
    wait, left = start.wait_for_silos, silo_pids(federation)["north"]

    def leave(local, control, running, *given):
        processes.end([running["north"]], grace=30.0)
        wait(local, control, running, *given)

    monkeypatch.setattr(start, "wait_for_silos", leave)
    again = bring_up(folder)
    assert silo_pids(again)["north"] not in (left, None)
    assert [silo["state"] for silo in local.status(again)["silos"]] == ["online", "online"]


def test_a_server_that_lost_its_superexec_is_mended_by_up(federation, folder, capsys):
    """The SuperLink starts none again, and a run would wait for ever."""

    def superexecs():
        return [
            p
            for p in processes.find(federation.directory)
            if p.part == "superlink" and "flower-superexec" in p.command
        ]

    # The SuperLink starts it a moment after it answers
    wait_for(lambda: bool(superexecs()), 30)
    (before,) = superexecs()
    processes.end([before], grace=0.0)
    assert main(["status", "--federation", "trial"]) == 0
    assert "server runs, but starts no run" in capsys.readouterr().out
    bring_up(folder)
    assert [process.command for process in superexecs()] == [before.command]
    assert (
        main(["status", "--federation", "trial"]) == 0
        and "server running" in capsys.readouterr().out
    )


def test_a_server_that_is_silent_is_named_at_once(tmp_path, monkeypatch, capsys):
    """Once, while `silofl run` still waits; nobody listens at the port."""
    assert following.SILENCE_SECONDS >= 300
    monkeypatch.setattr(following, "SILENCE_SECONDS", 1.0)
    silent = pytest.raises(NoAnswerError)
    with (
        Control(Connection("gone", f"{LOOPBACK}:{free_ports(1)[0]}")) as control,
        silent as error,
    ):
        following.follow(control, 7, following.RunFollower(tmp_path / "progress.jsonl"))
    code, line = explain(error.value)
    assert code == 3 and "run 7 is not followed any more, after round 0: no answer from" in line
    assert line.endswith(
        f"it may go on: `silofl runs` lists it, and `silofl watch {tmp_path}` follows it"
    )
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "no answer from" in said
    assert said.endswith("; waiting for it, up to 1 s: the run may go on\n")


def test_up_applies_what_changed_and_leaves_the_rest_running(federation, folder):
    before = silo_pids(local.find_local())
    write_file(folder, "north", "south", "west")
    more = bring_up(folder)
    after = silo_pids(more)
    assert {name: after[name] for name in before} == before and after["west"] is not None
    write_file(folder, "south", "west")
    fewer = bring_up(folder)
    assert silo_pids(fewer) == {name: after[name] for name in ("south", "west")}
    with Control(fewer.connection) as control:
        assert sorted(node.name for node in control.nodes()) == ["south", "west"]


def test_one_up_at_a_time(federation, folder):
    with (
        record.only_one(federation.directory),
        pytest.raises(ValueError, match="is at work; wait for it"),
    ):
        bring_up(folder)


def test_down_leaves_nothing_behind_also_after_a_crash(federation):
    """With the server killed before, silos cannot say goodbye; a run's processes would be found as well."""
    current = record.find_local()
    superlink = local.status(current)["superlink"]["pid"]
    processes.end(
        [p for p in processes.find(federation.directory) if p.pid == superlink], grace=0.0
    )
    assert record.leftover() == "trial"
    assert local.down("trial") >= 4
    assert processes.find(federation.directory) == [] and record.leftover() == ""
    assert flower_config().read_text() == OWN_CONFIG
    assert not (federation.directory / "federation.json").exists()
    assert (federation.directory / "credentials" / "ca.key").exists()
    assert start.is_free(current.fleet_port)
    fails(ValueError, "no federation is up; `silofl up` starts one", record.find_local)
    assert local.down("trial") == 0


@pytest.mark.parametrize("name", ["trail", "../trial", "..", "a/b", ""])
def test_down_of_what_is_no_federation(tmp_path, monkeypatch, name):
    """It says so, names those that there are, and makes no folder."""
    monkeypatch.setattr(parts, "state_root", lambda: tmp_path)
    (tmp_path / "trial").mkdir()
    fails(ValueError, r"there is no federation .* there are: trial", local.down, name)
    assert [p.name for p in tmp_path.iterdir()] == ["trial"]


def test_a_part_that_does_not_start_is_named_and_nothing_stays(folder):
    path = write_file(folder, "north")
    path.write_text(path.read_text().replace("trial", "broken"))
    directory = record.state_root() / "broken"
    made = ensure_credentials(directory / "credentials", silos=["north"], hosts=["localhost"])
    made.node_key("north").write_text("no key\n")
    with pytest.raises(
        local.PartFailedError, match=r"(?s)north ended.*is no private key in Flower's form"
    ):
        local.up(read_federation(path), echo=lambda line: None)
    assert processes.find(directory) == [] and local.leftover() == ""
    assert flower_config().read_text() == OWN_CONFIG


def test_a_port_in_use_is_one_clear_line(folder):
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))
        taken.listen()
        port = taken.getsockname()[1]
        path = write_file(folder, "north")
        path.write_text(
            path.read_text().replace('"trial"', f'"broken", "server": {{"fleet-port": {port}}}')
        )
        with pytest.raises(
            ValueError, match=rf"server.fleet-port: port {port} is in use; choose another"
        ):
            local.up(read_federation(path), echo=lambda line: None)


def test_a_new_server_has_the_ports_of_the_last_where_they_are_free(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    file = read_federation(write_file(tmp_path, "north"))
    directory = record.state_directory(file.name)

    def ports():
        credentials = ensure_credentials(directory / "credentials", silos=["north"], hosts=[])
        planned = start.plan(file, directory, None, {"north": tmp_path}, credentials)
        record.write_record(directory, planned)
        return planned.fleet_port, planned.control_port

    first = ports()
    assert ports() == first
    with socket.socket() as taken:
        taken.bind((LOOPBACK, first[0]))
        taken.listen()
        other = ports()
    assert other[0] != first[0] and other[1] == first[1] and ports() == other
    (directory / "federation.json").write_text("damaged")
    assert ports() != other


def test_someone_elses_connection_is_not_overwritten(folder):
    with pytest.raises(
        ValueError, match="already has a connection 'elsewhere' that is not this federation's"
    ):
        write_connection(Connection("elsewhere", f"{LOOPBACK}:1", "/a/ca.crt"))
    assert flower_config().read_text() == OWN_CONFIG
