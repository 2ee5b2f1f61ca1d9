"""A server, and a silo, that are lost and restored elsewhere: other folders stand for other machines.

Two hospitals joined with bundles. A run is stopped half-way, the server's machine is lost, and another one resumes it:
no hospital needs a new bundle. Then a hospital's machine is lost.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
from tiny import write_silo
from trio import text_of, wait_for

from client.protocol.launch import FLOWER, LOOPBACK, free_ports, program
from client.protocol.policy import default_file, public_policy
from server.deploy import processes
from server.deploy.submit import app_directory

pytestmark = pytest.mark.deployed

SILOS = ("north", "south")
PASSPHRASE = "correct horse battery staple"


class Machine:
    """The folders of one machine, and what is run there."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir()
        self.environment = {
            **os.environ,
            **FLOWER,
            "XDG_STATE_HOME": str(folder / "state"),
            "FLWR_HOME": str(folder / "flower"),
        }
        self.joined: list[subprocess.Popen[bytes]] = []

    def silofl(self, *words, code=0):
        done = subprocess.run(
            [program("silofl"), *map(str, words)],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def join(self, bundle, data, policy):
        command = [program("silofl"), "join", bundle, "--data", data, "--policy", policy]
        with (self.folder / "join.log").open("ab") as log:
            self.joined.append(
                subprocess.Popen(
                    [*map(str, command)],
                    cwd=self.folder,
                    env={**self.environment, processes.PART: "join"},
                    stdout=log,
                    stderr=log,
                )
            )

    def online(self, name):
        return (self.folder / "state/silofl-site" / name / "online").exists()

    def leave(self):
        for process in self.joined:
            if process.poll() is None:
                process.terminate()
                process.wait(60)


@pytest.mark.exhaustive
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="`silofl up` needs Linux")
@pytest.mark.timeout(900)
def test_a_server_and_a_silo_are_restored_elsewhere(tmp_path):
    server, other = Machine(tmp_path / "server"), Machine(tmp_path / "other")
    sites = {name: Machine(tmp_path / name) for name in (*SILOS, "elsewhere")}
    fleet, control = free_ports(2)
    (server.folder / "federation.yaml").write_text(
        f"name: drill\nserver: {{address: {LOOPBACK}, fleet-port: {fleet}, control-port: {control}}}\nsilos: []\n"
    )
    (other.folder / "passphrase").write_text(PASSPHRASE + "\n")
    policy = tmp_path / "policy.toml"
    policy.write_text(default_file(**dict(public_policy())))
    for number, name in enumerate(SILOS):
        x = np.random.default_rng(number).normal(size=(200, 5))
        write_silo(tmp_path / f"{name}.npz", x, [*map(int, x[:, 0] > 0)])
    out = server.folder / "runs" / "first"
    try:
        server.silofl("up")
        for name in SILOS:
            sites[name].silofl("request", name)
            request = sites[name].folder / f"{name}.request"
            server.silofl("add-silo", "--request", request, "--out", tmp_path / f"{name}.tar")
            sites[name].join(tmp_path / f"{name}.tar", tmp_path / f"{name}.npz", policy)
        for name in SILOS:
            wait_for(partial(sites[name].online, name), 120)
        settings = ("--strategy", "fedavg", "--rounds", "60", "--set", "model=mlp", "threads=1")
        run = subprocess.Popen(
            [program("silofl"), "run", *settings, "--out", str(out)],
            cwd=server.folder,
            env=server.environment,
        )
        wait_for(lambda: '"round": 3,' in text_of(out / "progress.jsonl"), 180)
        server.silofl("stop")
        assert run.wait(60) == 1
        shutil.copy(other.folder / "passphrase", server.folder)
        said = server.silofl(
            *("backup", "--include", out, "--out", tmp_path / "server.backup"),
            *("--passphrase-file", "passphrase"),
        )
        assert "the server drill" in said and ", encrypted" in said

        # The server's machine is lost
        server.silofl("down")
        shutil.rmtree(server.folder)
        content = (tmp_path / "server.backup").read_bytes()
        assert b"PRIVATE KEY" not in content and b"ca.key" not in content
        assert "is encrypted" in other.silofl("restore", tmp_path / "server.backup", code=2)
        restore = ("restore", tmp_path / "server.backup", "--passphrase-file", "passphrase")
        other.silofl(*restore)
        assert "is there already" in other.silofl(*restore, code=2)
        other.silofl("up")
        online = lambda: other.silofl("status").count("online") == 2  # noqa: E731
        wait_for(online, 120)
        resumed = other.folder / "runs" / "first"
        other.silofl(
            *("run", "--config", resumed / "config.toml", "--out", resumed),
            *("--set", "resume=true"),
        )
        events = text_of(resumed / "progress.jsonl")
        assert all(f'"round": {number},' in events for number in range(1, 61))

        # A hospital's machine is lost, and what it had kept apart from its backup is not
        state = sites["north"].folder / "state/silofl-site/north/state"
        sites["north"].silofl("backup", "--silo", "--out", tmp_path / "north.backup")
        other.silofl("run", *settings[:2], "--rounds", "2", *settings[4:], "--out", "second")
        sites["north"].leave()
        elsewhere = sites["elsewhere"]
        elsewhere.silofl("restore", tmp_path / "north.backup")
        elsewhere.join(tmp_path / "north.tar", tmp_path / "north.npz", policy)
        wait_for(
            lambda: elsewhere.joined[0].poll() is not None or elsewhere.online("north"), 180
        )
        accept = ("approve", "--restored", "--by", "Dr. D")
        assert "no head is kept here" in elsewhere.silofl(*accept, code=2)
        there = elsewhere.folder / "state/silofl-site/north/state.head"
        shutil.copytree(state.with_name("state.head"), there, dirs_exist_ok=True)
        run_without = other.silofl(
            "run", *settings[:2], "--rounds", "2", *settings[4:], "--out", "third"
        )
        assert "1 silos" in run_without and "2 silos" not in run_without
        assert "accepted: " in elsewhere.silofl(*accept)
        if elsewhere.joined[0].poll() is not None:
            elsewhere.join(tmp_path / "north.tar", tmp_path / "north.npz", policy)
        wait_for(lambda: elsewhere.online("north"), 180)
        other.silofl("run", *settings[:2], "--rounds", "2", *settings[4:], "--out", "fourth")
        assert '"north"' in text_of(other.folder / "fourth" / "progress.jsonl")
        assert "state restored" in elsewhere.silofl("audit")

        # A model of the last run: where it comes from
        state = elsewhere.folder / "state/silofl-site/north/state"
        export = (
            "export",
            state / "fourth",
            "--silo",
            "north",
            "--which",
            "last",
            "--out",
            "m.safetensors",
        )
        elsewhere.silofl(*export)
        links = ("lineage", "m.safetensors", "--state-dir", state, "--app", app_directory())
        said = elsewhere.silofl(*links, "--data", tmp_path / "north.npz")
        assert (
            said.count("ok ") == 4
            and "run fourth, round 2" in said
            and "not checked" not in said
        )
        said = elsewhere.silofl(*links, "--data", tmp_path / "south.npz", code=2)
        assert "FAIL  data" in said and "1 links do not hold: data" in said
        log = next((state / "audit").glob("audit-*.jsonl"))
        log.write_text(log.read_text().replace('"round":2', '"round":3'))
        assert "FAIL  audit log" in elsewhere.silofl(*links, code=2)
        card = elsewhere.folder / "m.safetensors.json"
        card.write_text(card.read_text().replace("fourth", "third"))
        assert "is damaged, or not the one" in elsewhere.silofl(*links, code=2)
    finally:
        for site in sites.values():
            site.leave()
        for machine in (server, other):
            processes.end(processes.find(machine.folder / "state/silofl/drill"), grace=1.0)
