"""Registrar: keeps the silos' registrations over a restart of the SuperLink, in the same container.

The SuperLink's state is in memory. Its own alternative is a SQLite file:

* it also stores every sent model;
* it costs 2 s of CPU a round with twelve silos;
* on a busy machine it answers silos with "database is locked", and their messages are lost.

Only the registered keys must be kept. This module records them whenever they change, and registers them again when a
new SuperLink starts.
"""

import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from partitions.common.errors import RunFailedError, UserError
from partitions.common.files import write_atomically
from server.deploy.control import Connection, Control, Node
from server.deploy.credentials import Credentials

LOOK_SECONDS = 3.0
START_SECONDS = 120.0
T = TypeVar("T")


def keep_registrations(connection: Connection, record: Path, ready: Path) -> None:
    """Register the keys in `record`, create the file `ready`, and record every change; does not return.

    Raises RunFailedError if the SuperLink does not answer within two minutes.
    """
    with Control(connection, service=True) as control:
        noted = restore_nodes(control, record)
        ready.touch()
        while True:
            time.sleep(LOOK_SECONDS)
            try:
                now = keys(control.nodes())
                if now != noted:
                    write(record, now)
                    noted = now
            except ConnectionError:
                continue  # it is stopping, or too busy: try again
            except OSError as error:  # for example a full disk: the next attempt may succeed
                print(
                    f"silofl: registrations cannot be noted in {record}: {error}",
                    file=sys.stderr,
                )


def restore_nodes(control: Control, record: Path) -> dict[str, str]:
    """Wait for the SuperLink and register the missing keys of the record; return all names by key."""
    noted = read(record)
    return {**register(control, noted), **noted}


def register(control: Control, wanted: dict[str, str]) -> dict[str, str]:
    """Register the keys that are not registered yet; return the names by key of those that are.

    Waits for a SuperLink that is starting. `setup` and the registrar may do this at the same time. A key that is
    refused because the other was faster is registered, so the call is repeated and succeeds.
    """

    def once() -> dict[str, str]:
        known = keys(control.nodes())
        for key, name in wanted.items():
            if key not in known:
                control.register(name, key.encode())
        return known

    return repeat_call(once)


def renew_shut_out(
    control: Control, credentials: Credentials, silos: Iterable[str]
) -> list[str]:
    """Make a new key for each of these silos whose key was unregistered; return their names.

    A SuperLink does not accept an unregistered key again.
    """
    shut_out = control.shut_out()
    renewed = [name for name in silos if credentials.node_public_pem(name).strip() in shut_out]
    for name in renewed:
        credentials.renew(name)
    return renewed


def repeat_call(call: Callable[[], T]) -> T:
    """Return the result of a Control API call, repeated until the SuperLink answers.

    Raises RunFailedError if it does not answer within two minutes.
    """
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            return call()
        except ConnectionError as error:
            if time.monotonic() > deadline:
                raise RunFailedError(f"the silos cannot be registered: {error}") from None
            time.sleep(0.3)


def keys(nodes: list[Node]) -> dict[str, str]:
    """Return the names by public key (PEM)."""
    return {node.public_key.decode().strip() + "\n": node.name for node in nodes}


def read(record: Path) -> dict[str, str]:
    """Return the record, empty if there is none yet. Raises UserError if it is damaged."""
    try:
        content = json.loads(record.read_text())
    except FileNotFoundError:
        return {}
    except ValueError:
        raise UserError(
            f"{record} is damaged: restore it from a backup, or remove it and register anew"
        ) from None
    return {str(key): str(name) for key, name in content.items()}


def write(record: Path, names: dict[str, str]) -> None:
    write_atomically(record, json.dumps(names, indent=1) + "\n")
