"""Status and stop of a local federation."""

import contextlib
import time
from collections.abc import Set
from pathlib import Path
from typing import Any

from partitions.common.errors import UserError
from partitions.common.names import SILO
from server.deploy import processes
from server.deploy.control import Control, remove_connection
from server.deploy.local.parts import GRACE_SECONDS, main_processes, starts_runs
from server.deploy.local.record import (
    SUPERLINK,
    TEMPLATE,
    LocalFederation,
    only_one,
    read_record,
    state_root,
)
from server.deploy.processes import Process


def sweep(directory: Path, *, keep: Set[Process]) -> list[Process]:
    """End every process of the federation except `keep`; return the ended ones."""
    ended: list[Process] = []
    quiet = 0
    while quiet < 2:  # a process is not visible for a moment while it is being started
        left = [process for process in processes.find(directory) if process not in keep]
        processes.end(left, grace=GRACE_SECONDS)
        ended += left
        quiet = 0 if left else quiet + 1
        time.sleep(0.05)
    return ended


def forget(directory: Path) -> None:
    """Remove the record and the connection of the federation."""
    with contextlib.suppress(ValueError):
        remove_connection(read_record(directory).connection)
    (directory / "federation.json").unlink(missing_ok=True)


def status(local: LocalFederation) -> dict[str, Any]:
    """Return the running parts, the silos' states and the runs, as `silofl status --json` prints them."""
    pids = {part: process.pid for part, process in main_processes(local.directory).items()}
    nodes: dict[str, str] = {}
    runs: list[dict[str, Any]] = []
    with contextlib.suppress(ConnectionError), Control(local.connection) as control:
        nodes = {node.name: node.status for node in control.nodes()}
        runs = [
            {"run_id": str(run.run_id), "status": run.status, "details": run.details}
            for run in control.runs()
        ]
    silos = [
        {
            "name": silo.name,
            "state": nodes.get(silo.name, "unknown") if silo.name in pids else "stopped",
            "device": silo.device,
            "data": silo.data,
            "pid": pids.get(silo.name),
        }
        for silo in local.silos
    ]
    return {
        "name": local.name,
        "file": local.file,
        "connection": local.connection.name,
        "fleet": f"{local.address}:{local.fleet_port}",
        "control": local.connection.address,
        "superlink": {
            "running": SUPERLINK in pids,
            "pid": pids.get(SUPERLINK),
            "executor": starts_runs(processes.find(local.directory)),
        },
        "warm": {"running": TEMPLATE in pids, "pid": pids.get(TEMPLATE)},
        "silos": silos,
        "elsewhere": [
            {"name": name, "state": nodes[name]}
            for name in sorted(nodes.keys() - {s.name for s in local.silos})
        ],
        "runs": runs,
        "logs": str(local.directory / "logs"),
    }


def down(name: str) -> int:
    """End all remaining processes of the federation; return their number.

    Silo state, keys, data and logs are kept; the `flwr` connection is removed. Raises UserError for an unknown name.
    """
    if not (SILO.fullmatch(name) and (state_root() / name).is_dir()):
        known = sorted(p.name for p in state_root().glob("*") if p.is_dir())
        raise UserError(
            f"there is no federation {name!r} on this machine; there are: {', '.join(known) or 'none'}"
        )
    return clear(name)


def clear(name: str) -> int:
    """Stop a federation as :func:`down` does; return 0 without an error for an unknown name."""
    directory = state_root() / name
    if not directory.is_dir():
        return 0
    with only_one(directory):
        everything = processes.find(directory)
        # Silos first: while the SuperLink runs they can disconnect cleanly, without retries.
        silos = [
            process
            for part, process in main_processes(directory).items()
            if part not in (SUPERLINK, TEMPLATE)
        ]
        processes.end(silos, grace=GRACE_SECONDS)
        everything += [
            process for process in sweep(directory, keep=set()) if process not in everything
        ]
        # Of the template, its lock, and persistent workers
        for leftover in directory.glob("warm.sock*"):
            if not leftover.name.endswith(".log"):
                leftover.unlink(missing_ok=True)
        forget(directory)
    return len(everything)
