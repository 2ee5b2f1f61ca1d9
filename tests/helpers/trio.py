"""A federation of three real silos on this machine, over gRPC with TLS and node keys, and what drills do to it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiny import comparable

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


def reach_over(running: LocalFederation, port: int) -> None:
    """hospital-02 is started anew, and reaches its server by another port: over a line."""
    silo = next(s for s in running.silos if s.name == "hospital-02")
    over = running.model_copy(update={"fleet_port": port})
    command = parts.supernode_part(over, silo, Credentials(running.directory / "credentials"))
    processes.end(
        [p for p in processes.find(running.directory) if p.part == silo.name], grace=5.0
    )
    environment = parts.part_environment(running.directory, silo.name, 3) | {
        "SILOFL_POLICY": "public"
    }
    log = running.directory / "logs" / "hospital-02.log"
    processes.start(
        silo.name, command, directory=running.directory, log=log, environment=environment
    )
    wait_for(lambda: local.status(running)["silos"][1]["state"] == "online", 90)


def text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def start_run(settings: dict[str, Any], out: Path) -> threading.Thread:
    follower = threading.Thread(target=lambda: submit.run({**settings, "out": str(out)}))
    follower.start()
    return follower
