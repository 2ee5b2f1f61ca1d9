"""Flower's Control API and the `flwr` connections: list nodes and runs, register nodes, start and stop runs.

It uses the client class of `flwr run`, `flwr list`, `flwr stop` and `flwr supernode` (protobuf over HTTPS).
It does not run these commands, because each start of one costs more than a second.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import tomli_w

from client.flower.control import ControlCalls, default_config
from client.flower.runs import settings_of_run
from client.protocol.launch import flower_home, reach_without_proxy
from partitions.common.errors import UserError
from partitions.common.files import hold_lock, make_folder, write_atomically
from partitions.common.parsed import parse_toml, read_text
from server.deploy.access.operators import SERVICE, key_file, load_operator_key

RUNS_A_PAGE = 100


@dataclass(frozen=True)
class Connection:
    """A `[superlink.NAME]` entry of Flower's configuration."""

    name: str
    address: str
    root_certificates: str = ""
    insecure: bool = False


@dataclass(frozen=True)
class Node:
    """A SuperNode. `status`: registered, online, offline or unregistered; `activated`: Unix time (0: never)."""

    node_id: int
    name: str
    status: str
    public_key: bytes
    activated: float


@dataclass(frozen=True)
class FlowerRun:
    """A Flower run on the SuperLink. `status`: for example `running` or `finished:failed`.

    `name`: of the run that it is a part of (`room/queue.py`).
    """

    run_id: int
    status: str
    details: str
    fab_hash: str
    name: str
    owner: str
    settings: Mapping[str, Any]

    @property
    def finished(self) -> bool:
        return self.status.startswith("finished")


# --- the entries of Flower's configuration ----------------------------------------------------------------


def flower_config() -> Path:
    """Return the path of Flower's configuration file, `FLWR_HOME/config.toml`."""
    return flower_home() / "config.toml"


def read_connection(name: str) -> Connection:
    """Return the connection of that name. Raises UserError if there is none, or if it has no address."""
    entries = _entries(flower_config())
    entry = entries.get(name)
    if not isinstance(entry, dict):
        known = (
            ", ".join(sorted(key for key, value in entries.items() if isinstance(value, dict)))
            or "none"
        )
        raise UserError(
            f"there is no connection {name!r} in {flower_config()} (there are: {known}); `silofl up` writes one"
        )
    if not entry.get("address") or str(entry["address"]).startswith(":"):
        raise UserError(
            f"connection {name!r} in {flower_config()} is a simulation on this machine; use `flwr run . {name}`"
        )
    return Connection(
        name,
        str(entry["address"]),
        str(entry.get("root-certificates", "")),
        bool(entry.get("insecure")),
    )


@contextlib.contextmanager
def one_change() -> Iterator[None]:
    """Allow one change of Flower's configuration at a time: another federation's `silofl up` keeps its entry."""
    path = flower_config()
    make_folder(path.parent)
    with hold_lock(path.with_name(f".{path.name}.lock"), f"{path} is being changed", 10.0):
        yield


@one_change()
def write_connection(connection: Connection) -> None:
    """Write or replace one connection; the rest of the file, including comments, does not change.

    Raises UserError if an entry of that name trusts another CA: it belongs to another federation.
    """
    path = flower_config()
    before = _entries(path).get(connection.name)
    if (
        isinstance(before, dict)
        and before.get("root-certificates") != connection.root_certificates
    ):
        raise UserError(
            f"{path} already has a connection {connection.name!r} that is not this federation's; "
            "rename the federation, or remove that entry"
        )
    entry: dict[str, Any] = {"address": connection.address, "insecure": connection.insecure}
    entry |= {"root-certificates": connection.root_certificates}
    lines = tomli_w.dumps(
        {"superlink": {connection.name: {k: v for k, v in entry.items() if v}}}
    ).splitlines()
    _replace_entry(path, connection.name, lines)


@one_change()
def remove_connection(connection: Connection) -> None:
    """Remove the connection if the entry still trusts the same CA."""
    before = _entries(flower_config()).get(connection.name)
    if (
        isinstance(before, dict)
        and before.get("root-certificates") == connection.root_certificates
    ):
        _replace_entry(flower_config(), connection.name, [])


def _entries(path: Path) -> dict[str, Any]:
    try:
        content = parse_toml(read_text(path))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UserError(
            f"cannot read Flower's configuration {path}: {error.strerror}; FLWR_HOME names another folder for it"
        ) from None
    except ValueError as error:
        raise UserError(f"cannot read Flower's configuration {path}: {error}") from None
    entries = content.get("superlink", {})
    return entries if isinstance(entries, dict) else {}


def _replace_entry(path: Path, name: str, new: list[str]) -> None:
    """Replace the table `[superlink.NAME]` in the text of the file, or append it."""
    # A new configuration starts with Flower's default content, which has a `local` entry.
    text = path.read_text(encoding="utf-8") if path.exists() else default_config()
    kept, comments = list[str](), list[str]()
    inside = False
    for line in text.splitlines():
        if line.lstrip().startswith("["):
            with contextlib.suppress(ValueError):  # a part of a value is no header
                inside = name in parse_toml(line).get("superlink", {})
        if not inside:
            kept += [*comments, line]
        # In this table, those above the next header are the next one's
        comments = [*comments, line] if inside and line.lstrip().startswith("#") else []
    while kept and not kept[-1].strip():
        kept.pop()
    if new:
        kept += ["", *new] if kept else new
    result = "\n".join(kept) + "\n"
    others = [parse_toml(text), {"": ""}]
    with contextlib.suppress(ValueError):
        others[1] = parse_toml(result)
    for content in others:
        content.get("superlink", {}).pop(name, None)
    if others[0] != others[1]:
        raise UserError(
            f"cannot change the connection {name!r} in {path} without touching others; edit it by hand"
        )
    try:
        write_atomically(path, result)
    except OSError as error:
        raise UserError(
            f"cannot write Flower's configuration {path}: {error.strerror}; FLWR_HOME names another folder for it"
        ) from None


# --- the Control API --------------------------------------------------------------------------------------


class Control:
    """Control API of one SuperLink. Every call raises ConnectionError with one line if it fails."""

    def __init__(self, connection: Connection, *, service: bool = False) -> None:
        """``service``: of the server's own processes, which have a key of their own beside the CA's certificate."""
        self.connection = connection
        file = Path(connection.root_certificates).with_name(SERVICE) if service else key_file()
        certificates: bytes | None = None
        if connection.root_certificates:
            try:
                certificates = Path(connection.root_certificates).read_bytes()
            except OSError as error:
                raise UserError(
                    f"connection {connection.name!r}: {error.filename}: {error.strerror}"
                ) from None
        host = connection.address.rpartition(":")[0].strip("[]")
        unusable = reach_without_proxy(os.environ)
        if unusable and host not in os.environ["no_proxy"].split(","):
            raise UserError(
                f"{unusable}: silofl reaches {connection.address} directly or through an HTTP proxy "
                "(https_proxy=http://HOST:PORT), and this is another kind; set that, or unset it"
            )
        self._calls = ControlCalls(
            f"the SuperLink at {connection.address} (connection {connection.name!r})",
            connection.address,
            insecure=connection.insecure,
            certificates=certificates,
            key=load_operator_key(file) if file.exists() else None,
        )

    def __enter__(self) -> "Control":
        return self

    def __exit__(self, *_: object) -> None:
        self._calls.close()

    def nodes(self) -> list[Node]:
        """Return all registered SuperNodes."""
        return [node for node in self._every_node() if node.status != "unregistered"]

    def shut_out(self) -> set[bytes]:
        """Return the public keys that were unregistered; a SuperLink refuses to register them again."""
        return {node.public_key for node in self._every_node() if node.status == "unregistered"}

    def _every_node(self) -> list[Node]:
        return [
            Node(
                node_id=info.node_id,
                name=info.name,
                status=info.status,
                public_key=info.public_key.strip(),
                activated=datetime.fromisoformat(info.last_activated_at).timestamp()
                if info.last_activated_at
                else 0.0,
            )
            for info in self._calls.call("ListNodes").nodes_info
        ]

    def register(self, name: str, public_key: bytes) -> int:
        """Register a node key; return the node's number."""
        return int(self._calls.call("RegisterNode", public_key=public_key, name=name).node_id)

    def unregister(self, node_id: int) -> None:
        self._calls.call("UnregisterNode", node_id=node_id)

    def runs(self) -> list[FlowerRun]:
        """Return all runs, the latest first."""
        by_number = dict[int, Any]()
        while True:  # the newest first, a page at a time
            page = {"limit": RUNS_A_PAGE, "skip": len(by_number)}
            listed = self._calls.call("ListRuns", **page).run_dict
            by_number |= dict(listed)
            if len(by_number) - page["skip"] < RUNS_A_PAGE:
                break
        runs = sorted(by_number.values(), key=lambda run: str(run.pending_at), reverse=True)
        return [self._run(run) for run in runs]

    def run(self, run_id: int) -> FlowerRun:
        return self._run(self._calls.call("ListRuns", run_id=run_id).run_dict[run_id])

    @staticmethod
    def _run(run: Any) -> FlowerRun:
        status = f"{run.status.status}:{run.status.sub_status}".rstrip(":")
        owner, _, name = run.account_name.rpartition("/")
        settings = settings_of_run(run)
        return FlowerRun(
            run.run_id, status, run.status.details, run.fab_hash, name, owner, settings
        )

    def start(
        self, fab: bytes, settings: Mapping[str, Any], words: Mapping[str, object] = {}
    ) -> tuple[int, str]:
        """Start a run of an app bundle with these settings, as `flwr run` does; return its number and its name.

        ``words``: name, method, owner, now of the run; `of`: the name of the run that this one is a part of.
        """
        digest = hashlib.sha256(fab).hexdigest()
        return self._calls.start(fab, digest, dict(settings), json.dumps(words))

    def change_queue(self, limit: int, *, resume: bool) -> list[str]:
        """Set how many runs are on at a time; return the interrupted runs, which go on with ``resume``."""
        words = json.dumps({"limit": limit, "resume": resume})
        return str(self._calls.call("StartRun", user_prompt=words).note).split()

    def stop(self, run_id: int) -> bool:
        """Stop a run; return False if it had ended already."""
        return bool(self._calls.call("StopRun", run_id=run_id).success)

    def log(self, run_id: int) -> str:
        """Return the server app's log so far."""
        part = self._calls.call("StreamLogs", run_id=run_id, after_timestamp=0.0)
        return "" if part is None else str(part.log_output)
