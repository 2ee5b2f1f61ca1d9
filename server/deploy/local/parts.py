"""Parts of a local federation: their command lines, environments, logs and processes."""

import contextlib
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from client.site.node import Site, gpu_environment
from client.site.runtime.launch import (
    LOOPBACK,
    THIS_MACHINE,
    environment,
    own_supernode,
    program,
    silo_environment,
    superexec_command,
    superlink_command,
    supernode_command,
)
from client.site.runtime.template import template_pid
from client.site.trust.receipts import KEY as RECEIPT_KEY
from partitions.common.errors import RunFailedError
from server.deploy import processes
from server.deploy.credentials import Credentials
from server.deploy.local.record import SUPERLINK, TEMPLATE, LocalFederation, LocalSilo
from server.deploy.processes import Process
from server.deploy.superlink import in_place_of

# Text in a part's command line
MAIN_PROCESSES = ("server.deploy.superlink", "private.py runtime.supernode")

GRACE_SECONDS = 6.0  # Flower forces its own exit 5 s after SIGTERM


class PartFailedError(RunFailedError):
    """Error: a part of the federation did not start, or ended by itself."""


def part_environment(directory: Path, part: str, sharing: int = 0) -> dict[str, str]:
    """Return the environment of a part. `sharing`: for a silo, the number of silos on this machine."""
    flower = directory / "flower" / part
    flower.mkdir(parents=True, exist_ok=True)
    made = environment(flower)
    if part == SUPERLINK:
        made |= {RECEIPT_KEY: str(Credentials(directory / "credentials").receipt_key)}
    if sharing:
        made = silo_environment(
            flower, template_socket=directory / "warm.sock", sharing=sharing
        )
    return made


def superlink_part(local: LocalFederation) -> list[str]:
    inside = local.address in THIS_MACHINE
    credentials = local.credentials
    command = superlink_command(
        "flower-superlink",
        ca_certificate=credentials.ca_certificate,
        certificate=credentials.server_certificate,
        key=credentials.server_key,
        fleet=f"{LOOPBACK if inside else '0.0.0.0'}:{local.fleet_port}",
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
    log = log_file(local.directory, SUPERLINK)
    inherited = part_environment(local.directory, SUPERLINK)
    processes.start(
        SUPERLINK, command, directory=local.directory, log=log, environment=inherited
    )


def supernode_part(
    local: LocalFederation, silo: LocalSilo, credentials: Credentials
) -> list[str]:
    site = Site(
        name=silo.name,
        server=f"{LOOPBACK}:{local.fleet_port}",
        ca_certificate=credentials.ca_certificate,
        node_key=credentials.node_key(silo.name),
        data=Path(silo.data),
        state=Path(silo.state_dir),
        device=silo.device,
    )
    return supernode_command(site, program=own_supernode(), port=silo.port)


def log_file(directory: Path, part: str) -> Path:
    return directory / "logs" / f"{part}.log"


def start_part(
    local: LocalFederation,
    part: str,
    command: list[str],
    inherited: Mapping[str, str] | None = None,
) -> Process:
    log = log_file(local.directory, part)
    if log.exists():
        log.rename(log.with_name(log.name + ".1"))
    inherited = inherited or part_environment(local.directory, part)
    return processes.start(
        part, command, directory=local.directory, log=log, environment=inherited
    )


def start_silo(local: LocalFederation, silo: LocalSilo) -> Process:
    Path(silo.state_dir).mkdir(parents=True, exist_ok=True)
    command = supernode_part(local, silo, local.credentials)
    environment = part_environment(local.directory, silo.name, len(local.silos)) | {
        "SILOFL_POLICY": silo.policy
    }
    # The server's name in the audit log
    environment |= {"SILOFL_SERVER": f"{LOOPBACK}:{local.fleet_port}"}
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


def starts_runs(found: Sequence[Process]) -> bool:
    """Return whether one of these processes is the server's SuperExec; without one, no run starts."""
    return any(
        process.part == SUPERLINK and "flower-superexec" in process.command for process in found
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
