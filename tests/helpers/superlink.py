"""A real SuperLink for tests: TLS, node keys, in memory, on free ports of the loopback interface."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from client.flower.mail import WAIT_SECONDS
from client.protocol.launch import (
    LOOPBACK,
    THIS_MACHINE,
    environment,
    free_ports,
    superlink_command,
)
from client.protocol.node import Site
from server.deploy.control import Connection, Control
from server.deploy.credentials import Credentials, ensure_credentials


@dataclass
class SuperLink:
    """A SuperLink that runs; `north` is a key of its credentials that is not registered unless a test does so."""

    credentials: Credentials
    fleet: int
    port: int
    process: subprocess.Popen[bytes]

    @property
    def connection(self) -> Connection:
        return Connection(
            "test", f"{LOOPBACK}:{self.port}", str(self.credentials.ca_certificate)
        )

    def site(self, folder: Path, name: str = "north") -> Site:
        """The silo `name` of the credentials, with an address that leads here."""
        return Site(
            name=name,
            server=f"{LOOPBACK}:{self.fleet}",
            ca_certificate=self.credentials.ca_certificate,
            node_key=self.credentials.node_key(name),
            data=folder / "data.npz",
            state=folder / "state",
        )


@contextlib.contextmanager
def superlink(
    folder: Path,
    silos: tuple[str, ...] = ("north", "south"),
    hosts: tuple[str, ...] = THIS_MACHINE,
    wait: float = WAIT_SECONDS,
) -> Iterator[SuperLink]:
    """Start one, and end it again. ``wait``: seconds until a silo has an empty answer."""
    credentials = ensure_credentials(folder / "credentials", silos=silos, hosts=hosts)
    fleet, port = free_ports(2)
    command = superlink_command(
        credentials.directory, fleet=f"{LOOPBACK}:{fleet}", host=LOOPBACK, port=port
    )
    code = (
        f"import client.flower.mail as mail; mail.WAIT_SECONDS = {wait}\n"
        "import server.deploy.superlink as ours; ours.start_superlink()"
    )
    inherited = environment(folder / "flower")
    log = folder / "superlink.log"
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [sys.executable, "-c", code, *command[1:]],
            env=inherited,
            stdout=output,
            stderr=output,
        ) as process,
    ):
        try:
            found = SuperLink(credentials, fleet, port, process)
            deadline = time.monotonic() + 120
            with Control(found.connection) as control:
                while True:
                    try:
                        control.nodes()
                        break
                    except ConnectionError:
                        assert process.poll() is None and time.monotonic() < deadline, (
                            log.read_text()[-3000:]
                        )
                        time.sleep(0.2)
            yield found
        finally:
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
