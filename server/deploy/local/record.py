"""Records of the federations that are up, on this machine or in containers, and the paths of their files."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from partitions.common.errors import UserError
from partitions.common.files import hold_lock, make_folder, state_home, write_atomically
from partitions.common.parsed import Frozen, parse_values
from server.deploy import processes
from server.deploy.control import Connection, read_connection
from server.deploy.credentials import Credentials

SUPERLINK, TEMPLATE = "superlink", "warm-parent"  # names of parts; all other parts are silos
SERVER_RUNS = Path("/runs")  # in the server's container


class UpFederation(Frozen):
    """A federation that was brought up from this machine. ``file``: its federation file."""

    name: str
    file: str
    demo: dict[str, Any] | None
    connection: Connection

    def on_host(self, directory: Path) -> Path:
        """Return the path on this machine of a run directory of the server's."""
        return directory


class LocalSilo(Frozen):
    """A silo of a local federation, with the values that its SuperNode was started with."""

    name: str
    device: str
    data: str
    state_dir: str
    policy: str = ""
    gpu_share: float | None = None  # of its GPU's memory


class LocalFederation(UpFederation):
    """A federation of processes on this machine: the content of `federation.json`."""

    address: str
    fleet_port: int
    control_port: int
    silos: list[LocalSilo]

    @property
    def directory(self) -> Path:
        return state_root() / self.name

    @property
    def credentials(self) -> Credentials:
        return Credentials(self.directory / "credentials")


class Deployed(UpFederation):
    """A federation in containers: the content of `deployed.json`. ``runs``: their folder on the host."""

    runs: str

    def in_container(self, directory: Path) -> Path:
        """Return the server's path of a host's run directory. Raises UserError if it is not in `runs`."""
        try:
            return SERVER_RUNS / directory.relative_to(self.runs)
        except ValueError:
            raise UserError(
                f"--out {directory}: the runs of {self.name} land in {self.runs}, which its server writes to; "
                "name a directory there, or leave --out away"
            ) from None

    def on_host(self, directory: Path) -> Path:
        if directory.is_relative_to(SERVER_RUNS):
            return Path(self.runs) / directory.relative_to(SERVER_RUNS)
        return directory


def state_root() -> Path:
    """Return the directory that holds one state directory per federation."""
    return state_home() / "silofl"


def state_directory(name: str) -> Path:
    """Return the federation's directory, created with mode 0700. Raises UserError if that fails."""
    directory = state_root() / name
    try:
        make_folder(directory, 0o700)
    except OSError as error:
        raise UserError(
            f"cannot make {directory}: {error.strerror}; XDG_STATE_HOME names another folder for it"
        ) from None
    return directory


def find_local(name: str = "") -> LocalFederation:
    """Return the federation of that name, or the only one that is up. Raises UserError for none or several."""
    names = sorted(path.parent.name for path in state_root().glob("*/federation.json"))
    matching = [federation for federation in names if name in ("", federation)]
    if not matching and (deployed := find_deployed(name)):
        raise UserError(
            f"{deployed.name} is up in containers: see docker compose ps, silofl doctor {deployed.file}"
        )
    if not matching and name:
        raise UserError(
            f"federation {name!r} is not up (up are: {', '.join(names) or 'none'}); `silofl up` starts one"
        )
    if not matching:
        raise UserError("no federation is up; `silofl up` starts one")
    return read_record(state_root() / only_name(matching))


def only_name(names: list[str]) -> str:
    """Return the name of the only federation. Raises UserError for several."""
    if len(names) > 1:
        raise UserError(
            f"several federations are up: {', '.join(names)}; say which with --federation"
        )
    return names[0]


def leftover() -> str:
    """Return the name of the only federation with a record or a process left; empty if there is none."""
    remaining = sorted(
        path.name
        for path in state_root().glob("*")
        if path.is_dir() and ((path / "federation.json").exists() or processes.find(path))
    )
    return only_name(remaining) if remaining else ""


def find_deployed(name: str = "") -> Deployed | None:
    """Return the federation in containers with the connection `name`, or the only one; else None."""
    connected = []
    for path in sorted(state_root().glob(f"{name or '*'}/deployed.json")):
        with contextlib.suppress(OSError, ValueError):
            deployed = parse_values(
                Deployed, path.read_bytes(), path, "`silofl credentials` writes it anew"
            )
            # Else it was overwritten by another federation
            if read_connection(deployed.name) == deployed.connection:
                connected.append(deployed)
    return connected[0] if len(connected) == 1 else None


def find_federation(name: str = "") -> UpFederation | None:
    """Return the federation with the connection `name`, or the only one that is up; None for none or several."""
    try:
        return find_local(name)
    except ValueError:
        return find_deployed(name)


def read_record(directory: Path) -> LocalFederation:
    path = directory / "federation.json"
    mend = f"`silofl down --federation {directory.name}` clears it away"
    try:
        return parse_values(LocalFederation, path.read_bytes(), path, f"it is damaged; {mend}")
    except FileNotFoundError:
        raise UserError(f"{directory} has no {path.name}; {mend}") from None


def write_record(folder: Path, up: UpFederation) -> None:
    file = "federation.json" if isinstance(up, LocalFederation) else "deployed.json"
    write_atomically(folder / file, up.model_dump_json(indent=1) + "\n")


@contextlib.contextmanager
def only_one(directory: Path) -> Iterator[None]:
    """Allow one `up`, `down` or `add-silo` of a federation at a time. Raises DataError if another is in progress."""
    with hold_lock(
        directory / "lock",
        f"a `silofl up`, `down` or `add-silo` of {directory.name!r} is at work; wait for it",
    ):
        yield


def remote_keys(directory: Path) -> Path:
    """Return the folder with the public keys, NAME.pem, of silos that joined with a bundle."""
    return directory / "remote"
