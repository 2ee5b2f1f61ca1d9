"""A certificate that ends: announced 30 days before, renewed in a run, loaded without a restart; keys that rotate.

Real silos, over gRPC with TLS; the silo that restarts has to shake hands anew.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import time
from pathlib import Path

import anyio
import httpx
import pytest
from trio import RUN, bring_up, end_silo, rows, start_run, supernode, text_of, wait_for

from client.protocol.keys import site_root
from client.protocol.launch import LOOPBACK, program
from server.cli.main import main
from server.deploy import credentials, local, processes
from server.deploy import credentials as expiry
from server.deploy.control import Control
from server.deploy.credentials import expiries
from server.deploy.federation import read_federation
from server.deploy.local import parts
from server.simulation.simulate import simulate
from server.watch.serve import watch_app
from server.watch.source import find_source

pytestmark = pytest.mark.deployed

DAY = datetime.timedelta(days=1)


def issue(federation, left):
    """Give the server a certificate that ends so soon, as time would have."""
    files = federation.credentials
    ends = credentials._now() + left
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            credentials, "SERVER_DAYS", (ends - credentials._now()).total_seconds() / 86400
        )
        ca = credentials.load_certificate(files.ca_certificate)
        names = credentials._names_of(credentials.load_certificate(files.server_certificate))
        credentials._issue_server_certificate(files, ca, names)


def shown(federation):
    return {end.certificate: end for end in expiries(federation.connection)}


def says(capsys, *words):
    capsys.readouterr()
    code = main([*words, "--federation", "trio"] if words[0] == "status" else [*words])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def metric(name):
    """The end of a certificate as Prometheus reads it from `silofl watch`."""

    async def read():
        transport = httpx.ASGITransport(watch_app(find_source("trio")))
        async with httpx.AsyncClient(
            transport=transport, base_url=f"http://{LOOPBACK}"
        ) as client:
            return (await client.get("/metrics")).text

    start = f'silofl_certificate_expiry_timestamp_seconds{{certificate="{name}"}} '
    (line,) = (line for line in anyio.run(read).splitlines() if line.startswith(start))
    return float(line.removeprefix(start))


def test_an_end_is_announced_30_days_before_and_renewed_without_a_restart(
    federation, folder, capsys
):
    pids = [local.status(federation)["superlink"]["pid"], *supernode(federation)]
    file = str(folder / "federation.yaml")
    issue(federation, 31 * DAY)
    assert "certificate's dates" not in says(capsys, "status")[1]

    issue(federation, 29 * DAY)
    line = "server certificate's dates: valid until "
    assert shown(federation)["server"].check.detail.endswith("(28 days)")
    assert line in says(capsys, "status")[1] and "silofl up" in says(capsys, "status")[1]
    assert line in says(capsys, "watch", "trio", "--text", "--once")[1]
    code, doctor = says(capsys, "doctor", file)
    assert code == 2 and "server certificate's dates" in doctor
    assert metric("server") == pytest.approx(time.time() + 29 * 86400, abs=120)
    assert metric("ca") > time.time() + 3000 * 86400

    assert main(["up", file]) == 0
    assert "certificate" not in capsys.readouterr().err
    assert metric("server") == pytest.approx(time.time() + 825 * 86400, abs=120)
    assert [local.status(federation)["superlink"]["pid"], *supernode(federation)] == pids
    state = json.loads(says(capsys, "status", "--json")[1])
    assert [end["check"]["ok"] for end in state["certificates"]] == [True, True]


def test_a_key_that_does_not_fit_yet_changes_nothing(federation):
    """Key and certificate are replaced one after the other; in between the pair before is shown."""
    files = federation.credentials
    before, key = shown(federation)["server"], files.server_key.read_bytes()
    certificate = files.server_certificate.read_bytes()
    issue(federation, 100 * DAY)
    new = files.server_certificate.read_bytes()
    files.server_certificate.write_bytes(certificate)
    # A server that shows what is not in its folder says so: here it is the other way round
    assert shown(federation)["server"].ends == before.ends
    files.server_certificate.write_bytes(new)
    assert shown(federation)["server"].ends == pytest.approx(time.time() + 100 * 86400, abs=120)
    assert key != files.server_key.read_bytes()


def test_a_server_that_did_not_load_it_is_named(federation, monkeypatch, capsys):
    """One of an earlier silofl: it still shows the certificate of its start."""
    old = expiry.shown_certificate(expiry.Way(LOOPBACK, federation.control_port))
    issue(federation, 200 * DAY)
    monkeypatch.setattr(expiry, "shown_certificate", lambda way: old)
    assert "restart the server between two runs" in says(capsys, "status")[1]
    local.up(read_federation(Path(federation.file)), echo=print)
    assert "restart the server between two runs" in capsys.readouterr().out


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_a_certificate_that_ends_in_a_run(federation, folder, tmp_path):
    """Silos that are connected train on; one that restarts waits, and takes part when it is renewed.

    The numbers are those of a run to which nothing happened.
    """
    bring_up(folder)
    settings = {**RUN, "rounds": 150, "local-epochs": 10, "lost-silo": "resend"}
    out = tmp_path / "there"
    follower = start_run({**settings, "round-timeout": 240.0}, out)
    wait_for(lambda: '"round": 1,' in text_of(out / "progress.jsonl"), 120)
    issue(federation, datetime.timedelta(seconds=10))
    wait_for(lambda: "expired" in shown(federation)["server"].check.detail, 30)
    end_silo(federation)
    silo = next(s for s in federation.silos if s.name == "hospital-02")
    parts.start_silo(federation, silo)
    log = federation.directory / "logs" / "hospital-02.log"
    wait_for(lambda: "certificate has expired" in text_of(log), 60)
    rounds = text_of(out / "progress.jsonl").count('"event": "round"')
    bring_up(folder)
    follower.join(300)
    print(f"renewed in round {rounds + 1}")
    assert 1 < rounds < 150 and not follower.is_alive()
    simulate({**settings, "silos": 3, "out": str(tmp_path / "here")}, quiet=True)
    assert rows(out) == rows(tmp_path / "here")


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_keys_rotate(federation, folder, tmp_path, monkeypatch, capsys):
    """A hospital's key, and the key that signs bundles, as docs/security.md has it: with the commands of that page."""
    bring_up(folder)
    monkeypatch.chdir(folder)
    data = next(silo.data for silo in federation.silos if silo.name == "hospital-02")
    place = site_root() / "clinic"
    joined: list[subprocess.Popen[bytes]] = []

    def join(bundle, *words):
        (place / "online").unlink(missing_ok=True)
        command = [program("silofl"), "join", bundle, "--data", data, *words]
        environment = {**os.environ, processes.PART: "join"}
        with (tmp_path / "join.log").open("ab") as log:
            joined.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        return joined[-1]

    def online(process):
        wait_for(lambda: (place / "online").exists() or process.poll() is not None, 120)
        return process.poll() is None

    def leave(process):
        process.terminate()
        process.wait(60)

    def run(*words):
        assert main([*words]) == 0, capsys.readouterr().err
        return capsys.readouterr().out.splitlines()

    def bundle(name, *words):
        run("add-silo", "--request", "clinic.request", "--out", name, *words)
        return name

    capsys.readouterr()
    try:
        first = run("signing-key")[-1]
        run("request", "clinic")
        process = join(bundle("first.tar"), "--signed-by", first)
        assert online(process)
        leave(process)

        # The consortium's key: a site takes the new one once it was told
        second = run("signing-key", "--out", str(tmp_path / "new.key"))[-1]
        bundle("second.tar", "--sign-with", str(tmp_path / "new.key"))
        assert main(["check-bundle", "second.tar"]) == 2
        assert f"signed by {second}, not by {first}" in capsys.readouterr().err
        process = join("second.tar", "--signed-by", second)
        assert online(process)
        assert main(["check-bundle", "first.tar"]) == 2  # from then on nobody else's

        # The hospital's key, while it takes part: its next call is refused
        (place / "own.key").rename(tmp_path / "old.key")
        run("request", "clinic")
        run("remove-silo", "clinic")
        third = bundle("third.tar", "--sign-with", str(tmp_path / "new.key"))
        leave(process)
        process = join(third)
        assert online(process)
        assert {node.name: node.status for node in nodes(federation)}["clinic"] == "online"
        leave(process)
        (tmp_path / "old.key").replace(place / "own.key")
        process = join(third)
        assert not online(process) and "own.key" in text_of(tmp_path / "join.log")
    finally:
        for process in joined:
            leave(process)


def nodes(federation):
    with Control(federation.connection) as control:
        return control.nodes()
