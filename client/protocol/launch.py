"""The command lines and environments of Flower's processes, for every place where they run.

Used by containers (`server/deploy/compose.py`, `bundle.py`), local federations (`server/deploy/local`), hospitals and
the tests; a test compares the images' `ENV` with it. Flower's options change between releases: they are defined only
here, and tests parse them with Flower's own parsers.
"""

import contextlib
import ctypes
import fcntl
import os
import random
import shutil
import signal
import socket
import sys
from collections.abc import MutableMapping
from importlib.util import find_spec
from pathlib import Path

from .ours import errors

LOOPBACK = "127.0.0.1"
PR_SET_PDEATHSIG = 1
THIS_MACHINE = (LOOPBACK, "localhost", "::1")
# For every Flower process: no telemetry is sent to Flower's makers, and nothing is installed when a run starts.
FLOWER = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
# Between a SuperNode and the process of its app: in an environment, that the site's own process counts and logs the
# app's messages, and takes its record of what it withheld; in a node configuration, the terms of a message.
BY_SITE, TAKEN = "SILOFL_SITE_AUDITS", "withheld"
BY_SITE_VALUE = f"1 {TAKEN}"
TERMS = "terms"
# In the environment of a process of an app with several devices: which one it is, and the folder where they meet
GROUP = "SILOFL_GROUP"
# gloo and NCCL would listen at the address of this machine's name
LOOPBACK_ONLY = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
NODE_KEY = "SILOFL_NODE_KEY"  # in a SuperNode's environment: the file of its key, with which the gate signs
# The starting process's environment overrides these. The interval at which the server's SuperExec polls for a run; and
# gRPC finds names as other programs do, since its own resolver waits for a DNS even for a name in /etc/hosts.
DEFAULTS = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25", "GRPC_DNS_RESOLVER": "native"}


# --- command lines ----------------------------------------------------------------------------------------


def program(name: str) -> str:
    """Return the path of a command of the flwr package, preferring the one beside this Python."""
    beside = Path(sys.executable).parent / name
    path = str(beside) if beside.exists() else shutil.which(name)
    if path is None:
        raise errors.UserError(
            f"there is no {name}: install silofl with its dependencies (flwr 1.42)"
        )
    return path


def own_supernode() -> list[str]:
    """Return the command of our SuperNode, which stands in place of `flower-supernode` (`supernode.py`)."""
    return site_process("site.runtime.supernode")


def template_command(path: Path) -> list[str]:
    """Return the command line that runs the template process at a socket."""
    return site_process("site.runtime.template", str(path))


def site_process(module: str, *arguments: str) -> list[str]:
    """Return the command line of a process of the site: a module of `client`, loaded as no app's is (`private.py`)."""
    private = Path(__file__).resolve().with_name("private.py")
    return [sys.executable, "-P", str(private), module, *arguments]


def die_with_parent() -> None:
    """Request SIGTERM for this process when its parent dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def superlink_command(credentials: Path, *, fleet: str, host: str, port: int) -> list[str]:
    """Return the command line of a server. Silos connect to `fleet`; Control and Runtime API listen at `host`, `port`.

    ``credentials``: the folder with ca.crt, server.crt, server.key. There is no `--database`; docs/decisions.md has the
    reason.
    """
    return [
        "flower-superlink",
        *("--ssl-ca-certfile", str(credentials / "ca.crt")),
        *("--ssl-certfile", str(credentials / "server.crt")),
        *("--ssl-keyfile", str(credentials / "server.key")),
        "--enable-supernode-auth",
        *("--fleet-api-address", fleet),
        *("--host", host),
        *("--port", str(port)),
        "--disable-runtime-dependency-installation",
    ]


def superexec_command(
    path: str, *, ca_certificate: Path, host: str, port: int, superlink: int
) -> list[str]:
    """Return the command line of a server's SuperExec, as the SuperLink with this process number starts it itself."""
    return [
        path,
        *("--root-certificates", str(ca_certificate)),
        *("--runtime-api-address", f"{host}:{port}"),
        *("--parent-pid", str(superlink)),
    ]


# Below the kernel's range for outgoing connections: one of these could take a port before its server does.
PORTS = range(20_000, 32_000)


def free_ports(count: int) -> list[int]:
    """Return different free ports, drawn at random. Raises OSError if there are too few."""
    ports: dict[int, None] = {}
    for port in random.sample(PORTS, min(100 * count, len(PORTS))):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((LOOPBACK, port))
            ports[port] = None
        if len(ports) == count:
            return list(ports)
    raise OSError(f"no {count} free ports between {PORTS.start} and {PORTS.stop}")


# --- environments -----------------------------------------------------------------------------------------


def flower_home() -> Path:
    """Return the folder of Flower's in this process's environment; a test compares it with Flower's own."""
    return Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr")


def environment(home: Path | None = None) -> dict[str, str]:
    """Return the environment of a Flower process and its children. ``home``: its FLWR_HOME; None: this one's."""
    variables = {**DEFAULTS, **os.environ, **FLOWER}
    variables["PATH"] = os.pathsep.join(
        [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    )
    if home is not None:
        variables["FLWR_HOME"] = str(home)
    reach_without_proxy(variables)
    return variables


def reach_without_proxy(variables: MutableMapping[str, str], *names: str) -> str:
    """Have processes with these variables reach this machine, and hosts of these names, without a site's proxy.

    httpx, which Flower uses, takes proxies from ``*_proxy`` in small and large letters, gRPC also from ``grpc_proxy``.
    A proxy that httpx has no support for makes every connection fail, even where no proxy is used. Its variable is
    removed. Returns the names of such variables.
    """
    direct = variables.get("no_proxy") or variables.get("NO_PROXY", "")
    wanted = {"no_proxy": direct, "NO_PROXY": direct}
    # gRPC reads it in place of no_proxy
    if (for_grpc := variables.get("no_grpc_proxy")) is not None:
        wanted["no_grpc_proxy"] = for_grpc
    for key, hosts in wanted.items():
        parts = [*map(str.strip, hosts.split(",")), *THIS_MACHINE, *names]
        variables[key] = ",".join(dict.fromkeys(filter(None, parts)))
    allowed = ("http", "https", *(("socks5", "socks5h") if find_spec("socksio") else ()))
    removed = []
    for key in [f"{kind}_proxy" for kind in ("http", "https", "all")]:
        for name in (key, key.upper()):
            scheme, mark, _ = variables.get(name, "").partition("://")
            if mark and scheme.lower() not in allowed:
                del variables[name]
                removed.append(name)
    return ", ".join(removed)


def silo_environment(home: Path, *, template_socket: Path, sharing: int = 1) -> dict[str, str]:
    """Return the environment of a SuperNode and its children: the template's socket, this silo's share of the cores.

    OMP_NUM_THREADS of the starting process takes precedence.
    """
    variables = {"OMP_NUM_THREADS": threads(sharing), **environment(home)}
    return variables | {"SILOFL_WARM_SOCKET": str(template_socket)}


def threads(sharing: int) -> str:
    """Return OMP_NUM_THREADS for one of `sharing` silos on this machine; with all cores each, silos would wait."""
    return str(max(1, (os.cpu_count() or 1) // sharing))


# --- the template process -----------------------------------------------------------------------------------


def lock_path(socket_path: Path) -> Path:
    """Return the file that the template process at `socket_path` locks while it lives; its content is the pid."""
    return socket_path.with_name(socket_path.name + ".lock")


def template_pid(socket_path: Path) -> int | None:
    """Return the process number of the template process at `socket_path`; None if none runs."""
    try:
        with lock_path(socket_path).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return None
    except BlockingIOError:
        return int(lock_path(socket_path).read_text() or 0) or None
    return None
