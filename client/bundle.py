"""A site bundle at the hospital: read, unpacked, and run without Docker (`silofl join`).

    NAME/.env  allowed-apps  ca.crt  docker-compose.yml  node.key  README.md

`silofl add-silo NAME` makes it (server/bundle.py). It holds the silo's private key: whoever has it is the silo.
"""

import fcntl
import os
import socket
import sys
import tarfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from client.site import Site

FILES = (".env", "README.md", "allowed-apps", "ca.crt", "docker-compose.yml", "node.key")
LARGEST = 1 << 20  # bytes; every file of a bundle is a few hundred


def read_bundle(path: Path) -> dict[str, bytes]:
    """The files of a bundle, be it the tar or the folder that was unpacked from it.

    Raises ValueError where it is no bundle; nothing outside the known names is looked at, so no path of the
    archive is ever used.
    """
    hint = "name the NAME.tar that `silofl add-silo` made, or the folder unpacked from it"
    try:
        if path.is_dir():
            files = {name: (path / name).read_bytes() for name in FILES if (path / name).is_file()}
        else:
            with tarfile.open(path) as archive:
                files = dict(_members(archive))
    except FileNotFoundError:
        raise ValueError(f"there is no bundle {path}: {hint}") from None
    except PermissionError:
        raise ValueError(f"{path} cannot be read by this user: a bundle is its owner's alone") from None
    except (OSError, EOFError, tarfile.TarError):
        raise ValueError(f"{path} is no bundle, or is damaged: {hint}") from None
    missing = [
        name for name in FILES if name not in files and name not in ("README.md", "docker-compose.yml")
    ]
    if missing:
        raise ValueError(f"{path} is no bundle: it has no {missing[0]}; {hint}")
    return files


def _members(archive: tarfile.TarFile) -> Iterator[tuple[str, bytes]]:
    for member in archive:
        name = member.name.rpartition("/")[2]
        if member.isfile() and name in FILES and member.size <= LARGEST:
            file = archive.extractfile(member)
            assert file is not None
            yield name, file.read()


def read_variables(text: str) -> dict[str, str]:
    """The `KEY=value` lines of an `.env` file."""
    pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#"))
    return {key.strip(): value.strip().strip("'\"") for key, value in pairs}


def site_root() -> Path:
    """The directory that holds one directory per silo that joined from this machine without Docker."""
    home = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(home).absolute() / "silofl-site"


def site_of(files: Mapping[str, bytes], folder: Path, data: Path | None = None, device: str = "") -> Site:
    """The silo of a bundle whose files lie, or will lie, in `folder`.

    Raises ValueError where the bundle's `.env` lacks a name or an address.
    """
    variables = read_variables(files[".env"].decode(errors="replace"))
    site = Site.from_environment(variables)
    if "/" in site.name or site.name.startswith("."):
        raise ValueError(f"SILOFL_NAME={site.name} in the bundle's .env is no name of a silo")
    named = variables.get("SILOFL_DATA", "")
    return replace(
        site,
        ca_certificate=folder / "ca.crt",
        node_key=folder / "node.key",
        data=(data or Path(named or "data.npz")).expanduser().absolute(),
        state=site_root() / site.name / "state",
        device=device or site.device,
        allowed_apps=str(folder / "allowed-apps"),
    )


def unpack(files: Mapping[str, bytes], folder: Path) -> None:
    """Write the files that a silo needs, readable for their owner alone."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name in ("ca.crt", "node.key", "allowed-apps"):
        temporary = folder / f".{name}.new"
        temporary.unlink(missing_ok=True)
        temporary.touch(mode=0o600)
        temporary.write_bytes(files[name])
        temporary.replace(folder / name)


def join(bundle: Path, data: Path, *, device: str = "", say: Callable[[str], None]) -> int:
    """Run the silo of a bundle in the foreground until SIGTERM or SIGINT; everything is checked first.

    State, models and logs stay under `site_root()/NAME`.

    Raises
    ------
    ValueError : the bundle, the data, the address, the certificate or the key; or this silo runs already.
    """
    from client.doctor import first_failure, one_line, site_checks, table
    from client.site import supernode_command
    from client.supervisor import run
    from client.warm import install_shim

    files = read_bundle(bundle)
    name = site_of(files, Path()).name
    folder = site_root() / name
    with only_one(folder, name):
        unpack(files, folder)
        site = site_of(files, folder, data, device)
        checks = site_checks(site)
        say(table(checks))
        if fault := first_failure(checks):
            raise ValueError(f"{name} cannot join: {one_line(fault)}")
        shim = install_shim(folder / "bin")
        say(f"{name} joins {site.server}; Ctrl-C leaves")
        command = supernode_command(site, port=free_port())
        command[0] = str(shim.with_name(command[0]))
        environment = site_environment(site, folder, shim.parent)
        return run(site, command, environment, online=folder / "online", say=say)


def site_environment(site: Site, folder: Path, shim: Path) -> dict[str, str]:
    """What the SuperNode and its children inherit: a FLWR_HOME of its own, warm starts, no installing."""
    path = [str(shim), str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    return {
        **os.environ,
        "PATH": os.pathsep.join(path),
        "FLWR_HOME": str(folder / "flower"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": os.environ.get("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", "0.25"),
        "SILOFL_WARM_SOCKET": str(folder / "warm.sock"),
        "SILOFL_ALLOWED_APPS": site.allowed_apps,
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def only_one(folder: Path, name: str) -> Iterator[None]:
    """One `join` of a silo on this machine at a time."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (folder / "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{name} runs on this machine already: a bundle runs in one place at a time"
            ) from None
        yield
