"""A local federation: one SuperLink and a SuperNode per silo as processes of this machine, over gRPC with TLS.

    $XDG_STATE_HOME/silofl/NAME/        (~/.local/state/silofl/NAME)
        credentials/                    CA, certificates, node keys; kept
        data/                           the demo data, one file per silo; kept, split anew when `demo` changes
        silos/SILO/                     what a silo keeps between rounds and runs; kept
        logs/PART.log                   kept, the one before as PART.log.1
        flower/PART/                    FLWR_HOME of each part
        federation.json  warm.sock ...  while it is up

`up` makes what is asked for true: it starts what does not run, ends what is no longer wanted, and leaves the
rest alone, so it also mends a federation that lost a part. It returns when every silo is online. Nothing
supervises the parts afterwards. The Control API listens on the loopback interface only.
"""

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from client.site.flower import REFUSED
from client.site.launch import (
    LOOPBACK,
    THIS_MACHINE,
    environment,
    free_ports,
    program,
    silo_environment,
    superexec_command,
    superlink_command,
    supernode_command,
)
from client.site.node import Site
from client.site.warm.install import install_shim, parent_command
from client.site.warm.sockets import parent_pid
from partitions.disk import locked, write_atomically
from server.deploy import processes
from server.deploy.control import Connection, Control, remove_connection, write_connection
from server.deploy.credentials import Credentials, ensure_credentials
from server.deploy.federation import NAME, Federation
from server.deploy.processes import Process
from server.deploy.superlink import in_place_of

SUPERLINK, WARM = "superlink", "warm-parent"  # parts; the others are silos
# In the command line of a part's own process; a SuperNode is first a shell script, then client/site/private.py.
MAIN_PROCESSES = ("server.deploy.superlink", "flower-supernode", "private.py supernode")
START_SECONDS = 300.0  # 12 silos need about 25 s on 2 cores; a silo killed a moment ago has to wait a minute
GRACE_SECONDS = 6.0  # Flower forces its own exit 5 s after SIGTERM


class PartFailedError(RuntimeError):
    """A part of the federation did not start, or ended by itself."""


@dataclass(frozen=True)
class LocalSilo:
    """A silo of a local federation: what its SuperNode was started with."""

    name: str
    device: str
    data: str
    state_dir: str
    port: int
    policy: str = ""


@dataclass(frozen=True)
class LocalFederation:
    """A local federation that is up: what `federation.json` holds."""

    name: str
    file: str
    address: str
    fleet_port: int
    control_port: int
    demo: dict[str, Any] | None
    silos: tuple[LocalSilo, ...]
    connection: Connection

    @property
    def directory(self) -> Path:
        return state_root() / self.name


# --- where things are -------------------------------------------------------------------------------------


def state_root() -> Path:
    """The directory that holds one state directory per federation."""
    home = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(home).absolute() / "silofl"


def state_directory(name: str) -> Path:
    """The federation's own directory, made for this user alone. Raises ValueError where it cannot be."""
    directory = state_root() / name
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ValueError(
            f"cannot make {directory}: {error.strerror}; XDG_STATE_HOME names another folder for it"
        ) from None
    return directory


def find_local(name: str = "") -> LocalFederation:
    """The federation of that name, or the only one, that is up. ValueError where there is none or a choice."""
    names = sorted(path.parent.name for path in state_root().glob("*/federation.json"))
    if name and name not in names:
        raise ValueError(
            f"federation {name!r} is not up (up are: {', '.join(names) or 'none'}); `silofl up` starts one"
        )
    if not names:
        raise ValueError("no federation is up; `silofl up` starts one")
    if not name and len(names) > 1:
        raise ValueError(f"several federations are up: {', '.join(names)}; say which with --name")
    return _read(state_root() / (name or names[0]))


def leftover() -> str:
    """The one federation of which anything is left, be it a record or a process; empty if there is none."""
    found = sorted(
        path.name
        for path in state_root().glob("*")
        if path.is_dir() and ((path / "federation.json").exists() or processes.find(path))
    )
    if len(found) > 1:
        raise ValueError(f"several federations are up: {', '.join(found)}; say which with --name")
    return found[0] if found else ""


def _read(directory: Path) -> LocalFederation:
    path = directory / "federation.json"
    try:
        content = json.loads(path.read_text())
        silos = tuple(LocalSilo(**silo) for silo in content.pop("silos"))
        return LocalFederation(**(content | {"silos": silos, "connection": Connection(**content["connection"])}))
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is damaged; `silofl down --name {directory.name}` clears it away") from None


def _write(local: LocalFederation) -> None:
    write_atomically(local.directory / "federation.json", json.dumps(asdict(local), indent=1) + "\n")


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """One `up` or `down` of a federation at a time."""
    with locked(
        directory / "lock", f"another `silofl up` or `silofl down` of {directory.name!r} is at work; wait for it"
    ):
        yield


# --- up ---------------------------------------------------------------------------------------------------


def up(federation: Federation, *, say: Callable[[str], None] = print) -> LocalFederation:
    """Bring a federation up, or mend it; returns when every silo is online.

    Raises ValueError: the federation file asks for what this machine cannot do (a port in use, no such GPU).
    Raises PartFailedError: a part ended by itself; says which, with its exit code and its last log lines. What this
    call had started is ended again.
    """
    if not sys.platform.startswith("linux"):
        raise ValueError("`silofl up` needs Linux; use the containers of `silofl compose` elsewhere")
    _check_devices(federation)
    directory = state_directory(federation.name)
    with _locked(directory):
        before = set(processes.find(directory))
        try:
            return _bring_up(federation, directory, say)
        except BaseException:
            _sweep(directory, keep=before)
            if not before:
                _forget(directory)
            raise


def _bring_up(federation: Federation, directory: Path, say: Callable[[str], None]) -> LocalFederation:
    running = _main_processes(directory)
    if SUPERLINK not in running:  # a new one knows neither the SuperNodes nor the runs that the old one left behind
        _sweep(directory, keep={process for process in processes.find(directory) if process.part == WARM})
        running = {part: process for part, process in running.items() if part == WARM}
    old = _read(directory) if SUPERLINK in running else None
    data = split_demo(federation, directory, say)
    names = [silo.name for silo in federation.silos]
    hosts = {*THIS_MACHINE, federation.server.address}
    credentials = ensure_credentials(directory / "credentials", silos=names, hosts=hosts)
    local = _plan(federation, directory, old, data, credentials)
    write_connection(local.connection)
    _write(local)

    install_shim(directory / "bin")
    if WARM not in running:
        command = parent_command(directory / "warm.sock")
        running[WARM] = _start(local, WARM, command, _environment(directory, WARM))
    if SUPERLINK not in running:
        command = _superlink_command(local, credentials)
        running[SUPERLINK] = _start(local, SUPERLINK, command, _environment(directory, SUPERLINK))
    with Control(local.connection) as control:
        _wait_for_superlink(local, control, running[SUPERLINK])
        _register(local, control, credentials)
        if old and not _starts_runs(processes.find(directory)):
            _start_superexec(local, running[SUPERLINK], credentials)
        unchanged = {silo.name for silo in set(local.silos) & set(old.silos if old else ())}
        outdated = running.keys() - unchanged - {SUPERLINK, WARM}
        processes.end([running.pop(part) for part in outdated], grace=GRACE_SECONDS)
        missing = [silo for silo in local.silos if silo.name not in running]
        say(f"starting {len(missing)} silos" if missing else "all silos are running")
        started = {silo.name: time.time() for silo in missing}
        running |= {silo.name: _start_silo(local, silo, credentials) for silo in missing}
        _wait_for_silos(local, control, credentials, running, started, say)
    return local


def _check_devices(federation: Federation) -> None:
    wanted = [silo for silo in federation.silos if silo.device != "cpu"]
    if not wanted:
        return
    import torch

    count = torch.cuda.device_count()
    for silo in wanted:
        if int(silo.device.removeprefix("cuda:")) >= count:
            raise ValueError(
                f"{federation.path}: silo {silo.name}: device {silo.device} is not there; "
                f"this machine has {count} GPUs that PyTorch can use"
            )


def split_demo(federation: Federation, directory: Path, say: Callable[[str], None]) -> dict[str, Path]:
    """Each silo's data file; the demo data are split first where they are not there yet as asked for."""
    data = {silo.name: silo.data for silo in federation.silos if silo.data is not None}
    demo, users = federation.demo, federation.demo_silos
    if demo is None or not users:
        return data
    folder = directory / "data"
    wanted = {"dataset": demo.dataset, "partition": demo.partition, "seed": demo.seed}
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
    except (OSError, ValueError):
        manifest = {}
    if any(manifest.get(key) != value for key, value in wanted.items()) or len(manifest["silos"]) != len(users):
        from partitions import load_dataset, write_partition

        say(f"splitting {demo.dataset} ({demo.partition}, seed {demo.seed}) over {len(users)} silos")
        dataset = load_dataset(demo.dataset, os.environ.get("SILOFL_DATA", ""))
        manifest = write_partition(dataset, demo.partition, folder, silos=len(users), seed=demo.seed)
    if len(manifest["silos"]) != len(users):
        raise ValueError(
            f"{federation.path}: the partition {demo.partition!r} makes {len(manifest['silos'])} silos, "
            f"but {len(users)} have `data: demo`"
        )
    return data | {silo.name: folder / part["file"] for silo, part in zip(users, manifest["silos"], strict=True)}


def _plan(
    federation: Federation,
    directory: Path,
    old: LocalFederation | None,
    data: Mapping[str, Path],
    credentials: Credentials,
) -> LocalFederation:
    """Ports and paths. A SuperLink that runs keeps its ports, and so does every silo that was there before."""
    server = federation.server
    asked = {"fleet-port": server.fleet_port, "control-port": server.control_port}
    if old is None:
        for key, port in asked.items():
            if port and not _is_free(port):
                raise ValueError(
                    f"{federation.path}: server.{key}: port {port} is in use; choose another, or 0 for a free one"
                )
    ports = iter(free_ports(2 + len(federation.silos)))
    fleet_port = old.fleet_port if old else server.fleet_port or next(ports)
    control_port = old.control_port if old else server.control_port or next(ports)
    if old and any(port and port != now for port, now in zip(asked.values(), (fleet_port, control_port), strict=True)):
        raise ValueError(f"{federation.path}: server: the federation is up on other ports; `silofl down` first")
    old_ports = {silo.name: silo.port for silo in old.silos} if old else {}
    silos = tuple(
        LocalSilo(
            name=silo.name,
            device=silo.device,
            data=str(data[silo.name]),
            state_dir=str(directory / "silos" / silo.name),
            port=old_ports.get(silo.name) or next(ports),
            policy=silo.policy,
        )
        for silo in federation.silos
    )
    connection = Connection(federation.name, f"{LOOPBACK}:{control_port}", str(credentials.ca_certificate))
    return LocalFederation(
        name=federation.name,
        file=str(federation.path.absolute()),
        address=server.address,
        fleet_port=fleet_port,
        control_port=control_port,
        demo=asdict(federation.demo) if federation.demo and federation.demo_silos else None,
        silos=silos,
        connection=connection,
    )


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def _environment(directory: Path, part: str, sharing: int = 0) -> dict[str, str]:
    """What a part inherits; `sharing`: how many silos share this machine, if the part is one of them."""
    flower = directory / "flower" / part
    flower.mkdir(parents=True, exist_ok=True)
    made = environment(flower)
    if sharing:
        made = silo_environment(flower, scripts=directory / "bin", warm_socket=directory / "warm.sock", sharing=sharing)
    return made | {"SILOFL_WARM_LOG": str(_log(directory, WARM))}


def _superlink_command(local: LocalFederation, credentials: Credentials) -> list[str]:
    inside = local.address in THIS_MACHINE
    command = superlink_command(
        "flower-superlink",
        ca_certificate=credentials.ca_certificate,
        certificate=credentials.server_certificate,
        key=credentials.server_key,
        fleet=f"{LOOPBACK if inside else '0.0.0.0'}:{local.fleet_port}",
        host=LOOPBACK,  # Control and Runtime API: never further than this machine
        port=local.control_port,
    )
    return in_place_of(command)


def _start_superexec(local: LocalFederation, superlink: Process, credentials: Credentials) -> None:
    """Of a SuperLink that has lost its own: it starts none again, and without one every run waits for ever."""
    command = superexec_command(
        program("flower-superexec"),
        ca_certificate=credentials.ca_certificate,
        host=LOOPBACK,
        port=local.control_port,
        superlink=superlink.pid,
    )
    log, inherited = _log(local.directory, SUPERLINK), _environment(local.directory, SUPERLINK)
    processes.start(SUPERLINK, command, directory=local.directory, log=log, environment=inherited)


def _supernode_command(local: LocalFederation, silo: LocalSilo, credentials: Credentials) -> list[str]:
    site = Site(
        name=silo.name,
        server=f"{LOOPBACK}:{local.fleet_port}",
        ca_certificate=credentials.ca_certificate,
        node_key=credentials.node_key(silo.name),
        data=Path(silo.data),
        state=Path(silo.state_dir),
        device=silo.device,
    )
    return supernode_command(site, path=str(local.directory / "bin" / "flower-supernode"), port=silo.port)


def _log(directory: Path, part: str) -> Path:
    return directory / "logs" / f"{part}.log"


def _start(local: LocalFederation, part: str, command: list[str], inherited: Mapping[str, str]) -> Process:
    log = _log(local.directory, part)
    if log.exists():
        log.rename(log.with_name(log.name + ".1"))
    return processes.start(part, command, directory=local.directory, log=log, environment=inherited)


def _start_silo(local: LocalFederation, silo: LocalSilo, credentials: Credentials) -> Process:
    Path(silo.state_dir).mkdir(parents=True, exist_ok=True)
    command = _supernode_command(local, silo, credentials)
    environment = _environment(local.directory, silo.name, len(local.silos)) | {"SILOFL_POLICY": silo.policy}
    environment |= {"SILOFL_SERVER": f"{LOOPBACK}:{local.fleet_port}"}  # who asks, in the audit log
    return _start(local, silo.name, command, environment)


def _main_processes(directory: Path) -> dict[str, Process]:
    """Of each part that runs, the process that was started for it."""
    main: dict[str, Process] = {}
    warm = parent_pid(directory / "warm.sock")
    for process in processes.find(directory):
        if process.pid == warm:  # perhaps started by a silo's shim, in place of one that died
            main[WARM] = process
        elif any(name in process.command for name in MAIN_PROCESSES):
            main.setdefault(process.part, process)
    return main


def _starts_runs(found: Sequence[Process]) -> bool:
    """Whether the server, of these processes, has a SuperExec: without one it starts no run."""
    return any(process.part == SUPERLINK and "flower-superexec" in process.command for process in found)


def _fail(local: LocalFederation, process: Process) -> PartFailedError:
    """The error for a part that ended by itself, with its exit code and the last lines of its log."""
    log = _log(local.directory, process.part)
    code = processes.exit_code(process)
    how = "" if code is None else f" with exit code {code}" if code >= 0 else f", killed by signal {-code}"
    lines = "\n".join(f"  {line}" for line in last_lines(log, 12))
    return PartFailedError(f"{process.part} ended{how}; the end of {log}:\n{lines}")


def last_lines(path: Path, count: int) -> list[str]:
    """The last lines of a log that are not empty."""
    with contextlib.suppress(OSError):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 65536))
            text = file.read().decode(errors="replace")
        return [line.rstrip() for line in text.splitlines() if line.strip()][-count:]
    return []


def _wait_for_superlink(local: LocalFederation, control: Control, process: Process) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        with contextlib.suppress(ConnectionError):
            control.nodes()
            return
        if not process.runs():
            raise _fail(local, process)
        if time.monotonic() > deadline:
            raise PartFailedError(f"{SUPERLINK} does not answer; see {_log(local.directory, SUPERLINK)}")
        time.sleep(0.2)


def _register(local: LocalFederation, control: Control, credentials: Credentials) -> None:
    """Register the keys of all silos, and unregister those of silos that are no longer in the file.

    Silos that joined with a bundle (`silofl add-silo`) are in no file: they stay.
    """
    registered = {node.public_key.strip(): node for node in control.nodes()}
    keys = {silo.name: credentials.node_public_pem(silo.name) for silo in local.silos}
    remote = {path.stem: path.read_bytes() for path in remote_keys(local.directory).glob("*.pem")}
    for name, key in (remote | keys).items():
        if registered.pop(key.strip(), None) is None:
            control.register(name, key)
    for node in registered.values():
        control.unregister(node.node_id)


def remote_keys(directory: Path) -> Path:
    """The folder with the public keys, NAME.pem, of silos that joined with a bundle."""
    return directory / "remote"


def _wait_for_silos(
    local: LocalFederation,
    control: Control,
    credentials: Credentials,
    running: dict[str, Process],
    started: Mapping[str, float],
    say: Callable[[str], None],
) -> None:
    """Wait until every silo is online; start those again that were refused because of an old heartbeat.

    `started`: when those silos were started that were not running before, as Unix times. One that was killed
    still counts as online for a while, so what is waited for is that it was activated since.
    """
    keys = {silo.name: credentials.node_public_pem(silo.name).strip() for silo in local.silos}
    deadline = time.monotonic() + START_SECONDS
    told: set[str] = set()
    while True:
        nodes = {node.public_key.strip(): node for node in control.nodes()}
        missing = []
        for silo in local.silos:
            node = nodes[keys[silo.name]]
            if node.status != "online" or node.activated < started.get(silo.name, 0.0):
                missing.append(silo.name)
            if running[silo.name].runs():
                continue
            log = _log(local.directory, silo.name)
            if not any(REFUSED in line for line in last_lines(log, 20)):
                raise _fail(local, running[silo.name])
            if silo.name not in told:
                say(f"{silo.name} was killed a moment ago: waiting until the server takes it for gone")
            told.add(silo.name)
            time.sleep(2.0)
            running[silo.name] = _start_silo(local, silo, credentials)
        if not missing:
            return
        if time.monotonic() > deadline:
            logs = local.directory / "logs"
            raise PartFailedError(f"not online after {START_SECONDS:.0f} s: {', '.join(missing)}; see {logs}")
        time.sleep(0.3)


def _sweep(directory: Path, *, keep: Set[Process]) -> list[Process]:
    """End every process of the federation but `keep`; those that were ended."""
    ended: list[Process] = []
    quiet = 0
    while quiet < 2:  # a process that is being started is not seen for a moment
        left = [process for process in processes.find(directory) if process not in keep]
        processes.end(left, grace=GRACE_SECONDS)
        ended += left
        quiet = 0 if left else quiet + 1
        time.sleep(0.05)
    return ended


def _forget(directory: Path) -> None:
    """Remove what says that the federation is up."""
    with contextlib.suppress(ValueError):
        remove_connection(_read(directory).connection)
    (directory / "federation.json").unlink(missing_ok=True)


# --- status and down --------------------------------------------------------------------------------------


def status(local: LocalFederation) -> dict[str, Any]:
    """What runs and what is online, as `silofl status --json` prints it."""
    running = _main_processes(local.directory)
    nodes: dict[str, str] = {}
    runs: list[dict[str, Any]] = []
    with contextlib.suppress(ConnectionError), Control(local.connection) as control:
        nodes = {node.name: node.status for node in control.nodes()}
        runs = [{"run_id": str(run.run_id), "status": run.status, "details": run.details} for run in control.runs()]
    silos = []
    for silo in local.silos:
        state = nodes.get(silo.name, "unknown") if silo.name in running else "stopped"
        pid = running[silo.name].pid if silo.name in running else None
        silos.append({"name": silo.name, "state": state, "device": silo.device, "data": silo.data, "pid": pid})
    return {
        "name": local.name,
        "file": local.file,
        "connection": local.connection.name,
        "fleet": f"{local.address}:{local.fleet_port}",
        "control": local.connection.address,
        "superlink": {
            "running": SUPERLINK in running,
            "pid": running[SUPERLINK].pid if SUPERLINK in running else None,
            "executor": _starts_runs(processes.find(local.directory)),
        },
        "warm": {"running": WARM in running, "pid": running[WARM].pid if WARM in running else None},
        "silos": silos,
        "runs": runs,
        "logs": str(local.directory / "logs"),
    }


def down(name: str) -> int:
    """End every process of the federation, whatever is left of it; the number of processes ended.

    Silo state, keys, data and logs stay. The `flwr` connection goes. Raises ValueError for a name that this machine
    has never known.
    """
    if not (NAME.fullmatch(name) and (state_root() / name).is_dir()):
        known = sorted(p.name for p in state_root().glob("*") if p.is_dir())
        raise ValueError(f"there is no federation {name!r} on this machine; there are: {', '.join(known) or 'none'}")
    return clear(name)


def clear(name: str) -> int:
    """As :func:`down`, and finds nothing to do, without complaint, where there is no such federation."""
    directory = state_root() / name
    if not directory.is_dir():
        return 0
    with _locked(directory):
        everything = processes.find(directory)
        # Silos first: while the SuperLink is there they can say goodbye and need not try again and again.
        silos = [process for part, process in _main_processes(directory).items() if part not in (SUPERLINK, WARM)]
        processes.end(silos, grace=GRACE_SECONDS)
        everything += [process for process in _sweep(directory, keep=set()) if process not in everything]
        for leftover in directory.glob("warm.sock*"):  # the parent's, its lock, and those of processes that stay
            if not leftover.name.endswith(".log"):
                leftover.unlink(missing_ok=True)
        _forget(directory)
    return len(everything)
