"""Parts of a local federation: their command lines, environments, logs and processes."""

import contextlib
import signal
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict
from pathlib import Path
from typing import Any

from client.link.route import bracket_host
from client.protocol.launch import (
    LOOPBACK,
    THIS_MACHINE,
    environment,
    own_supernode,
    program,
    silo_environment,
    superexec_command,
    superlink_command,
    template_pid,
)
from client.protocol.node import Site, gpu_environment, supernode_command
from client.protocol.receipts import KEY as RECEIPT_KEY
from partitions.common.errors import RunFailedError, UserError
from partitions.common.names import SILO
from server.deploy import processes
from server.deploy.access.operators import FILE as OPERATORS
from server.deploy.access.operators import LOG
from server.deploy.control import Control, remove_connection
from server.deploy.credentials import Credentials, expiries
from server.deploy.local.record import (
    SUPERLINK,
    TEMPLATE,
    LocalFederation,
    LocalSilo,
    only_one,
    read_record,
    state_root,
)
from server.deploy.logs import FOLDER
from server.deploy.processes import Process
from server.deploy.room.listing import NamedRun, named_runs
from server.deploy.superlink import in_place_of

# Text in a part's command line
MAIN_PROCESSES = ("server.deploy.superlink", "private.py site.runtime.supernode")

GRACE_SECONDS = 6.0  # Flower forces its own exit 5 s after SIGTERM


class PartFailedError(RunFailedError):
    """Error: a part of the federation did not start, or ended by itself."""


def part_environment(directory: Path, part: str, sharing: int = 0) -> dict[str, str]:
    """Return the environment of a part. `sharing`: for a silo, the number of silos on this machine."""
    flower = directory / "flower" / part
    flower.mkdir(parents=True, exist_ok=True)
    variables = environment(flower)
    if part == SUPERLINK:
        variables |= {
            RECEIPT_KEY: str(Credentials(directory / "credentials").receipt_key),
            FOLDER: str(directory / "logs"),
            OPERATORS: str(directory / "operators.json"),
            LOG: str(directory / "actions"),
        }
    if sharing:
        variables = silo_environment(
            flower, template_socket=directory / "warm.sock", sharing=sharing
        )
    return variables


def listening_host(address: str) -> str:
    """Return where the Fleet port of this server listens: on loopback alone, or on all that the machine has."""
    if address in THIS_MACHINE:
        return bracket_host(address) if ":" in address else LOOPBACK
    return "[::]" if ":" in address else "0.0.0.0"  # gRPC's [::] takes IPv4, too


def fleet_here(local: LocalFederation) -> str:
    """Return HOST:PORT by which silos of this machine reach the server."""
    host = bracket_host(local.address) if local.address == "::1" else LOOPBACK
    return f"{host}:{local.fleet_port}"


def superlink_part(local: LocalFederation) -> list[str]:
    command = superlink_command(
        local.credentials.directory,
        fleet=f"{listening_host(local.address)}:{local.fleet_port}",
        host=LOOPBACK,  # Control and Runtime API: reachable from this machine only
        port=local.control_port,
    )
    return in_place_of(command)


def start_superexec(local: LocalFederation, superlink: Process) -> None:
    """Start a SuperExec for a SuperLink that has lost its own; without one, runs never start."""
    command = superexec_command(
        program("flower-superexec"),
        ca_certificate=local.credentials.ca_certificate,
        host=LOOPBACK,
        port=local.control_port,
        superlink=superlink.pid,
    )
    start_part(local, SUPERLINK, command, appends=True)


def supernode_part(
    local: LocalFederation, silo: LocalSilo, credentials: Credentials
) -> list[str]:
    site = Site(
        name=silo.name,
        server=fleet_here(local),
        ca_certificate=credentials.ca_certificate,
        node_key=credentials.node_key(silo.name),
        data=Path(silo.data),
        state=Path(silo.state_dir),
        device=silo.device,
    )
    return supernode_command(site, program=own_supernode())


def log_file(directory: Path, part: str) -> Path:
    return directory / "logs" / f"{part}.log"


def start_part(
    local: LocalFederation,
    part: str,
    command: list[str],
    inherited: Mapping[str, str] | None = None,
    *,
    appends: bool = False,
) -> Process:
    """Start a part. ``appends``: to its log, which else begins anew."""
    log = log_file(local.directory, part)
    if log.exists() and not appends:
        log.rename(log.with_name(log.name + ".1"))
    inherited = inherited or part_environment(local.directory, part)
    return processes.start_process(
        part, command, directory=local.directory, log=log, environment=inherited
    )


def start_silo(local: LocalFederation, silo: LocalSilo) -> Process:
    Path(silo.state_dir).mkdir(parents=True, exist_ok=True)
    command = supernode_part(local, silo, local.credentials)
    environment = part_environment(local.directory, silo.name, len(local.silos)) | {
        "SILOFL_POLICY": silo.policy
    }
    # The server's name in the audit log
    environment |= {"SILOFL_SERVER": fleet_here(local)}
    environment |= gpu_environment(silo.device, silo.gpu_share)
    return start_part(local, silo.name, command, environment)


def main_processes(directory: Path) -> dict[str, Process]:
    """Return the main process of each running part."""
    main: dict[str, Process] = {}
    template = template_pid(directory / "warm.sock")
    for process in processes.find(directory):
        if process.pid == template:  # a SuperNode may have started it to replace one that died
            main[TEMPLATE] = process
        elif any(name in process.command for name in MAIN_PROCESSES):
            main.setdefault(process.part, process)
    return main


def starts_runs(running: Sequence[Process]) -> bool:
    """Return whether one of these processes is the server's SuperExec; without one, no run starts."""
    return any(
        process.part == SUPERLINK and "flower-superexec" in process.command
        for process in running
    )


def failure(local: LocalFederation, process: Process) -> PartFailedError:
    """Return the error for a part that ended by itself, with its exit code and the last lines of its log."""
    log = log_file(local.directory, process.part)
    code = processes.exit_code(process)
    how = (
        ""
        if code is None
        else f" with exit code {code}"
        if code >= 0
        else f", killed by signal {-code}"
    )
    how += " (out of memory, or killed by hand)" if code == -signal.SIGKILL else ""
    lines = "\n".join(f"  {line}" for line in last_lines(log, 12))
    return PartFailedError(f"{process.part} ended{how}; the end of {log}:\n{lines}")


def last_lines(path: Path, count: int) -> list[str]:
    """Return the last non-empty lines of a log."""
    with contextlib.suppress(OSError):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 65536))
            text = file.read().decode(errors="replace")
        return [line.rstrip() for line in text.splitlines() if line.strip()][-count:]
    return []


# --- status and stop ---


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
    """Return the running parts, the silos' states and the runs."""
    pids = {part: process.pid for part, process in main_processes(local.directory).items()}
    nodes: dict[str, str] = {}
    runs: list[NamedRun] = []
    with contextlib.suppress(ConnectionError), Control(local.connection) as control:
        nodes = {node.name: node.status for node in control.nodes()}
        runs = named_runs(control)
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
        "fleet": f"{bracket_host(local.address)}:{local.fleet_port}",
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
        "certificates": [asdict(end) for end in expiries(local.connection)],
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
