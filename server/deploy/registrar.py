"""Keep the silos' registrations over a restart of the SuperLink, beside it in its container.

The SuperLink's state is in memory. Its own alternative is a SQLite file:

* it also stores every model that is sent;
* it costs 2 s of CPU a round with twelve silos;
* on a busy machine it answers silos with "database is locked", and their message is lost.

Only the registered keys have to last. This module records them whenever they change, and registers them again when a
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
    """Register again who stands in `record`, make the file `ready`, and note every change; does not return.

    Raises RunFailedError where the SuperLink does not answer in two minutes.
    """
    with Control(connection) as control:
        noted = restore(control, record)
        ready.touch()
        while True:
            time.sleep(LOOK_SECONDS)
            try:
                now = keys(control.nodes())
                if now != noted:
                    write(record, now)
                    noted = now
            except ConnectionError:
                continue  # it is stopping, or too busy; the next look will tell
            except OSError as error:  # the disk is full, for example; registering goes on, and so does trying
                print(f"silofl: registrations cannot be noted in {record}: {error}", file=sys.stderr)


def restore(control: Control, record: Path) -> dict[str, str]:
    """Wait for the SuperLink and register whom it does not know; the names of all by their keys."""
    noted = read(record)
    return {**register(control, noted), **noted}


def register(control: Control, wanted: dict[str, str]) -> dict[str, str]:
    """Register the keys that are not registered yet; the names by their keys of those that are.

    Waits for a SuperLink that is starting. `setup` and the registrar may both be at it: a key that is refused because
    the other one was faster is registered, and that is all that is wanted.
    """

    def once() -> dict[str, str]:
        known = keys(control.nodes())
        for key, name in wanted.items():
            if key not in known:
                control.register(name, key.encode())
        return known

    return answered(once)


def renew_shut_out(control: Control, credentials: Credentials, silos: Iterable[str]) -> list[str]:
    """Give a new key to each of these silos whose key was unregistered, and return their names.

    A SuperLink does not take an unregistered key again.
    """
    shut_out = control.shut_out()
    renewed = [name for name in silos if credentials.node_public_pem(name).strip() in shut_out]
    for name in renewed:
        credentials.renew(name)
    return renewed


def answered(call: Callable[[], T]) -> T:
    """Return what a call of the Control API gives, once the SuperLink answers.

    Raises RunFailedError where it does not in two minutes.
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
    """Names by public key (PEM)."""
    return {node.public_key.decode().strip() + "\n": node.name for node in nodes}


def read(record: Path) -> dict[str, str]:
    """Read the record; nothing where there is no record yet. Raises UserError where it is damaged."""
    try:
        content = json.loads(record.read_text())
    except FileNotFoundError:
        return {}
    except ValueError:
        raise UserError(f"{record} is damaged: restore it from a backup, or remove it and register anew") from None
    return {str(key): str(name) for key, name in content.items()}


def write(record: Path, names: dict[str, str]) -> None:
    write_atomically(record, json.dumps(names, indent=1) + "\n")
