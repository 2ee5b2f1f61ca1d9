"""Start or repair of a local federation."""

import contextlib
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from client.flower.fleet import REFUSED
from client.protocol.launch import LOOPBACK, THIS_MACHINE, free_ports, template_command
from client.protocol.node import MIG, on_cpu
from partitions.common.errors import UserError
from server.deploy import processes
from server.deploy.access.operators import write_operators
from server.deploy.control import Connection, Control, write_connection
from server.deploy.credentials import Credentials, ensure_credentials, warnings
from server.deploy.federation import Federation
from server.deploy.local.demo_data import split_demo
from server.deploy.local.parts import (
    GRACE_SECONDS,
    PartFailedError,
    failure,
    forget,
    last_lines,
    log_file,
    main_processes,
    start_part,
    start_silo,
    start_superexec,
    starts_runs,
    superlink_part,
    sweep,
)
from server.deploy.local.record import (
    SUPERLINK,
    TEMPLATE,
    LocalFederation,
    LocalSilo,
    only_one,
    read_record,
    remote_keys,
    state_directory,
    write_record,
)
from server.deploy.processes import Process
from server.deploy.registrar import register, renew_shut_out

START_SECONDS = 300.0  # 12 silos need about 25 s on 2 cores; a silo that was just killed has to wait a minute


def up(
    federation: Federation, *, echo: Callable[[str], None] = print, resume: bool = False
) -> LocalFederation:
    """Start or repair a federation; return when every silo is online. ``resume``: interrupted runs go on.

    Raises UserError if this machine cannot run the federation file (a port in use, no such GPU). Raises PartFailedError
    if a part ended by itself, with its name, exit code and last log lines. The processes that this call has started are
    then ended again.
    """
    if not sys.platform.startswith("linux"):
        raise UserError(
            "`silofl up` needs Linux; use the containers of `silofl compose` elsewhere"
        )
    check_devices(federation)
    directory = state_directory(federation.name)
    with only_one(directory):
        before = set(processes.find(directory))
        try:
            local = bring_up(federation, directory, echo)
        except BaseException:
            # What a part of before has started meanwhile, such as a run, goes on
            parts = {part for part, of in main_processes(directory).items() if of in before}
            others = {process for process in processes.find(directory) if process.part in parts}
            sweep(directory, keep=before | others)
            if not before:
                forget(directory)
            raise
    with Control(local.connection, service=True) as control:
        if names := control.change_queue(federation.runs, resume=resume):
            went = (
                "goes on"
                if resume
                else "was interrupted: `silofl up --resume` goes on with it, `silofl stop RUN` ends it"
            )
            echo(f"{', '.join(names)} {went}")
    return local


def bring_up(
    federation: Federation, directory: Path, echo: Callable[[str], None]
) -> LocalFederation:
    running = main_processes(directory)
    # A new SuperLink has no record of the old one's SuperNodes and runs
    if SUPERLINK not in running:
        sweep(
            directory,
            keep={process for process in processes.find(directory) if process.part == TEMPLATE},
        )
        running = {part: process for part, process in running.items() if part == TEMPLATE}
    old = read_record(directory) if SUPERLINK in running else None
    data = split_demo(federation, directory, echo)
    names = [silo.name for silo in federation.silos]
    hosts = {*THIS_MACHINE, federation.server.address, federation.server.public_host}
    credentials = ensure_credentials(directory / "credentials", silos=names, hosts=hosts)
    write_operators(directory, credentials.directory, federation.operators)
    local = plan(federation, directory, old, data, credentials)
    write_connection(local.connection)
    write_record(directory, local)

    if TEMPLATE not in running:
        running[TEMPLATE] = start_part(
            local, TEMPLATE, template_command(directory / "warm.sock")
        )
    if SUPERLINK not in running:
        running[SUPERLINK] = start_part(local, SUPERLINK, superlink_part(local))
    with Control(local.connection, service=True) as control:
        wait_for_superlink(local, control, running[SUPERLINK])
        register_keys(local, control)
        if old and not starts_runs(processes.find(directory)):
            start_superexec(local, running[SUPERLINK])
        unchanged = {silo.name for silo in local.silos if old and silo in old.silos}
        outdated = running.keys() - unchanged - {SUPERLINK, TEMPLATE}
        processes.end([running.pop(part) for part in outdated], grace=GRACE_SECONDS)
        missing = [silo for silo in local.silos if silo.name not in running]
        echo(f"starting {len(missing)} silos" if missing else "all silos are running")
        started = {silo.name: time.time() for silo in missing}
        running |= {silo.name: start_silo(local, silo) for silo in missing}
        wait_for_silos(local, control, running, started, echo)
    for line in warnings(local.connection):
        echo(line)
    return local


def check_devices(federation: Federation) -> None:
    wanted = [silo for silo in federation.silos if not on_cpu(silo.device)]
    if not wanted:
        return
    import torch

    count = torch.cuda.device_count()
    for silo in wanted:
        if silo.device[0].isdigit():
            raise UserError(
                f"{federation.path}: silo {silo.name}: device {silo.device} is a container's name of a MIG device; "
                "here it is MIG-UUID, as nvidia-smi -L lists it"
            )
        # PyTorch counts no MIG devices
        mig = silo.device.startswith(MIG)
        if mig and count:
            continue
        numbers = silo.device.replace("cuda:", "").split(",")
        if mig or max(map(int, numbers)) >= count:
            raise UserError(
                f"{federation.path}: silo {silo.name}: device {silo.device} is not there; "
                f"this machine has {count} GPUs that PyTorch can use"
            )


def plan(
    federation: Federation,
    directory: Path,
    old: LocalFederation | None,
    data: Mapping[str, Path],
    credentials: Credentials,
) -> LocalFederation:
    """Return the federation with its ports and paths. A running SuperLink keeps its ports.

    A new one gets those of the last start where they are free, so that `silofl run` finds the server again.
    """
    server = federation.server
    ports = iter(free_ports(2))
    wanted = {"fleet-port": server.fleet_port, "control-port": server.control_port}
    now = ports_of(old) if old else last_ports(directory, wanted)
    for key, port in wanted.items():
        if port and old and port != now[key]:
            raise UserError(
                f"{federation.path}: server: the federation is up on other ports; `silofl down` first"
            )
        if port and not old and not is_free(port):
            raise UserError(
                f"{federation.path}: server.{key}: port {port} is in use; choose another, or 0 for a free one"
            )
    fleet_port, control_port = (
        now.get(key) or port or next(ports) for key, port in wanted.items()
    )
    silos = [
        LocalSilo(
            **silo.model_dump(include={"name", "device", "policy", "gpu_share"}),
            data=str(data[silo.name]),
            state_dir=str(directory / "silos" / silo.name),
        )
        for silo in federation.silos
    ]
    connection = Connection(
        federation.name, f"{LOOPBACK}:{control_port}", str(credentials.ca_certificate)
    )
    return LocalFederation(
        name=federation.name,
        file=str(federation.path.absolute()),
        address=server.address,
        fleet_port=fleet_port,
        control_port=control_port,
        demo=federation.demo.model_dump() if federation.demo else None,
        silos=silos,
        connection=connection,
    )


def ports_of(local: LocalFederation) -> dict[str, int]:
    return {"fleet-port": local.fleet_port, "control-port": local.control_port}


def last_ports(directory: Path, wanted: Mapping[str, int]) -> dict[str, int]:
    """Return those ports of the last start that are free, and that the federation file does not set."""
    with contextlib.suppress(ValueError):
        last = ports_of(read_record(directory))
        return {key: port for key, port in last.items() if not wanted[key] and is_free(port)}
    return {}


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def wait_for_superlink(local: LocalFederation, control: Control, process: Process) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        with contextlib.suppress(ConnectionError):
            control.nodes()
            return
        if not process.runs():
            raise failure(local, process)
        if time.monotonic() > deadline:
            raise PartFailedError(
                f"{SUPERLINK} does not answer; see {log_file(local.directory, SUPERLINK)}"
            )
        time.sleep(0.2)


def register_keys(local: LocalFederation, control: Control) -> None:
    """Register the keys of all silos, and unregister those of silos that are no longer in the file.

    Silos that joined with a bundle (`silofl add-silo`) are not in the file and stay registered. A silo of the file that
    was removed before gets a new key, because the SuperLink does not accept the old one again.
    """
    credentials = local.credentials
    renew_shut_out(control, credentials, [silo.name for silo in local.silos])
    listed = {credentials.node_public_pem(silo.name).strip(): silo.name for silo in local.silos}
    remote = {
        path.read_bytes().strip(): path.stem
        for path in remote_keys(local.directory).glob("*.pem")
    }
    wanted = remote | listed
    register(control, {key.decode() + "\n": name for key, name in wanted.items()})
    for node in control.nodes():
        if node.public_key not in wanted:
            control.unregister(node.node_id)


def wait_for_silos(
    local: LocalFederation,
    control: Control,
    running: dict[str, Process],
    started: dict[str, float],
    echo: Callable[[str], None],
) -> None:
    """Wait until every silo is online; restart silos that were refused because of an old heartbeat.

    `started`: start times (Unix) of silos that were not running before. A killed silo is listed as online for a while,
    so it must have been activated after that time. A silo that was running, but about to end, is started, too.
    """
    keys = {
        silo.name: local.credentials.node_public_pem(silo.name).strip() for silo in local.silos
    }
    deadline = time.monotonic() + START_SECONDS
    reported: set[str] = set()
    while True:
        nodes = {node.public_key: node for node in control.nodes()}
        missing = []
        for silo in local.silos:
            if silo.name not in started and not running[silo.name].runs():
                started[silo.name] = time.time()
                running[silo.name] = start_silo(local, silo)
            node = nodes[keys[silo.name]]
            if node.status != "online" or node.activated < started.get(silo.name, 0.0):
                missing.append(silo.name)
            if running[silo.name].runs():
                continue
            log = log_file(local.directory, silo.name)
            if not any(REFUSED in line for line in last_lines(log, 20)):
                raise failure(local, running[silo.name])
            if silo.name not in reported:
                echo(
                    f"{silo.name} was killed a moment ago: waiting until the server takes it for gone"
                )
            reported.add(silo.name)
            time.sleep(2.0)
            running[silo.name] = start_silo(local, silo)
        if not missing:
            return
        if time.monotonic() > deadline:
            logs = local.directory / "logs"
            raise PartFailedError(
                f"not online after {START_SECONDS:.0f} s: {', '.join(missing)}; see {logs}"
            )
        time.sleep(0.3)
