"""A federation of three real silos on this machine, over gRPC with TLS and node keys, and what drills do to it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tiny import comparable

from client.protocol.launch import LOOPBACK
from server.deploy import local, processes, submit
from server.deploy.credentials import Credentials
from server.deploy.federation import read_federation
from server.deploy.local import LocalFederation, parts
from server.results.history import History

RUN: dict[str, Any] = {
    "dataset": "digits",
    "partition": "dirichlet",
    "rounds": 3,
    "threads": 1,
    "model": "mlp",
}
FEDERATION = """\
name: {name}
demo: {{dataset: digits, partition: dirichlet, seed: 42}}
silos:
  - {{name: hospital-01, data: demo}}
  - {{name: hospital-02, data: demo}}
  - {{name: hospital-03, data: demo}}
"""


def bring_up(folder: Path) -> LocalFederation:
    return local.up(read_federation(folder / "federation.yaml"), echo=lambda line: None)


def rows(directory: Path) -> list[list[str]]:
    """Everything of the history but how long rounds took."""
    return comparable(History(directory / "history.csv").rows)


def supernode(federation: LocalFederation, name: str = "hospital-02") -> list[int]:
    return [s["pid"] for s in local.status(federation)["silos"] if s["name"] == name]


def reach_over(
    running: LocalFederation,
    port: int,
    name: str = "hospital-02",
    host: str = LOOPBACK,
    environment: Mapping[str, str] | None = None,
) -> None:
    """A silo is started anew, and reaches its server by another address: over a line, or a proxy."""
    start_over(running, port, name, host, environment)
    wait_for(lambda: is_online(running, name), 90)


def start_over(
    running: LocalFederation,
    port: int,
    name: str,
    host: str = LOOPBACK,
    environment: Mapping[str, str] | None = None,
) -> None:
    silo = next(s for s in running.silos if s.name == name)
    command = parts.supernode_part(
        running, silo, Credentials(running.directory / "credentials")
    )
    direct = f"{LOOPBACK}:{running.fleet_port}"
    command = [f"{host}:{port}" if word == direct else word for word in command]
    end_silo(running, name)
    variables = parts.part_environment(running.directory, name, 3)
    variables |= {"SILOFL_POLICY": "public", **(environment or {})}
    log = running.directory / "logs" / f"{name}.log"
    processes.start_process(
        name, command, directory=running.directory, log=log, environment=variables
    )


def end_silo(running: LocalFederation, name: str = "hospital-02") -> None:
    processes.end([p for p in processes.find(running.directory) if p.part == name], grace=5.0)


def is_online(running: LocalFederation, name: str) -> bool:
    silos = local.status(running)["silos"]
    return any(silo["name"] == name and silo["state"] == "online" for silo in silos)


def text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def start_run(settings: dict[str, Any], out: Path, **words: Any) -> threading.Thread:
    follower = threading.Thread(
        target=lambda: submit.run({**settings, "out": str(out)}, **words)
    )
    follower.start()
    return follower
