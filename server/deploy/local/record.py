"""Record of a local federation that is up, and the paths of its files."""

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

SUPERLINK, TEMPLATE = "superlink", "warm-parent"  # names of parts; all other parts are silos


@dataclass(frozen=True)
class LocalSilo:
    """A silo of a local federation, with the values that its SuperNode was started with."""

    name: str
    device: str
    data: str
    state_dir: str
    port: int
    policy: str = ""


@dataclass(frozen=True)
class LocalFederation:
    """A local federation that is up: the content of `federation.json`."""

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
    """Return the directory that holds one state directory per federation."""
    home = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(home).absolute() / "silofl"


def state_directory(name: str) -> Path:
    """Return the federation's directory, created with mode 0700. Raises UserError if that fails."""
    directory = state_root() / name
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise UserError(
            f"cannot make {directory}: {error.strerror}; XDG_STATE_HOME names another folder for it"
        ) from None
    return directory


def find_local(name: str = "") -> LocalFederation:
    """Return the federation of that name, or the only one that is up. Raises UserError for none or several."""
    names = sorted(path.parent.name for path in state_root().glob("*/federation.json"))
    if name and name not in names:
        raise UserError(f"federation {name!r} is not up (up are: {', '.join(names) or 'none'}); `silofl up` starts one")
    if not names:
        raise UserError("no federation is up; `silofl up` starts one")
    if not name and len(names) > 1:
        raise UserError(f"several federations are up: {', '.join(names)}; say which with --name")
    return read_record(state_root() / (name or names[0]))


def leftover() -> str:
    """Return the name of the only federation with a record or a process left; empty if there is none."""
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
    """Allow one `up` or `down` of a federation at a time. Raises DataError if another one is in progress."""
    with locked(
        directory / "lock", f"another `silofl up` or `silofl down` of {directory.name!r} is at work; wait for it"
    ):
        yield


def remote_keys(directory: Path) -> Path:
    """Return the folder with the public keys, NAME.pem, of silos that joined with a bundle."""
    return directory / "remote"
