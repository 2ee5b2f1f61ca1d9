"""The record of a local federation that is up, and where its files lie."""

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from partitions.common.errors import UserError
from partitions.common.files import locked, write_atomically
from server.deploy import processes
from server.deploy.control import Connection

SUPERLINK, TEMPLATE = "superlink", "warm-parent"  # parts; the others are silos


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


def state_root() -> Path:
    """The directory that holds one state directory per federation."""
    home = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(home).absolute() / "silofl"


def state_directory(name: str) -> Path:
    """The federation's own directory, made for this user alone. Raises UserError where it cannot be."""
    directory = state_root() / name
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise UserError(
            f"cannot make {directory}: {error.strerror}; XDG_STATE_HOME names another folder for it"
        ) from None
    return directory


def find_local(name: str = "") -> LocalFederation:
    """The federation of that name, or the only one, that is up. ValueError where there is none or a choice."""
    names = sorted(path.parent.name for path in state_root().glob("*/federation.json"))
    if name and name not in names:
        raise UserError(f"federation {name!r} is not up (up are: {', '.join(names) or 'none'}); `silofl up` starts one")
    if not names:
        raise UserError("no federation is up; `silofl up` starts one")
    if not name and len(names) > 1:
        raise UserError(f"several federations are up: {', '.join(names)}; say which with --name")
    return read_record(state_root() / (name or names[0]))


def leftover() -> str:
    """The one federation of which anything is left, be it a record or a process; empty if there is none."""
    found = sorted(
        path.name
        for path in state_root().glob("*")
        if path.is_dir() and ((path / "federation.json").exists() or processes.find(path))
    )
    if len(found) > 1:
        raise UserError(f"several federations are up: {', '.join(found)}; say which with --name")
    return found[0] if found else ""


def read_record(directory: Path) -> LocalFederation:
    path = directory / "federation.json"
    try:
        content = json.loads(path.read_text())
        silos = tuple(LocalSilo(**silo) for silo in content.pop("silos"))
        return LocalFederation(**(content | {"silos": silos, "connection": Connection(**content["connection"])}))
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{path} is damaged; `silofl down --name {directory.name}` clears it away") from None


def write_record(local: LocalFederation) -> None:
    write_atomically(local.directory / "federation.json", json.dumps(asdict(local), indent=1) + "\n")


@contextlib.contextmanager
def only_one(directory: Path) -> Iterator[None]:
    """One `up` or `down` of a federation at a time."""
    with locked(
        directory / "lock", f"another `silofl up` or `silofl down` of {directory.name!r} is at work; wait for it"
    ):
        yield


def remote_keys(directory: Path) -> Path:
    """The folder with the public keys, NAME.pem, of silos that joined with a bundle."""
    return directory / "remote"
