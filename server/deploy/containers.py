"""Federation in containers, seen from the host: its `flwr` connection, and the folder of its runs.

    STATE_ROOT/NAME/deployed.json, containers-ca.crt

`connect` writes both files and the connection, which `silofl run` and `silofl stop` read.
"""

import json
import os
import shutil
import subprocess
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from client.site.runtime.launch import LOOPBACK
from partitions.common.errors import UserError
from partitions.common.files import write_atomically
from server.deploy.control import Connection, read_connection, write_connection
from server.deploy.federation import Federation
from server.deploy.local.record import state_directory, state_root

DOCKER_SECONDS = 60.0
SERVER_RUNS = Path("/runs")  # in the server's container


@dataclass(frozen=True)
class Deployed:
    """Federation in containers, seen from the host."""

    name: str
    file: str  # the federation file
    runs: str  # the host folder to which the server writes its runs
    demo: dict[str, Any] | None
    connection: Connection

    def in_container(self, directory: Path) -> Path:
        """Return the server's path of a host's run directory. Raises UserError if it is not in `runs`."""
        try:
            return SERVER_RUNS / directory.relative_to(self.runs)
        except ValueError:
            raise UserError(
                f"--out {directory}: the runs of {self.name} land in {self.runs}, which its server writes to; "
                "name a directory there, or leave --out away"
            ) from None


def connect(federation: Federation, compose: Path) -> Deployed:
    """Fetch the CA's certificate from the server's container, and write the connection.

    Raises UserError if Docker is missing or the containers are not up.
    """
    folder = state_directory(federation.name)
    certificate = folder / "containers-ca.crt"
    fetch = partial(docker_compose, compose, "cp", "superlink:/server/ca.crt")
    write_atomically(certificate, lambda temporary: fetch(str(temporary)), mode=0o600)
    port = docker_compose(compose, "port", "superlink", "8000").strip().rpartition(":")[2]
    demo = federation.demo.model_dump() if federation.demo else None
    deployed = Deployed(
        name=federation.name,
        file=str(federation.path.absolute()),
        runs=str(compose.absolute().parent / "runs" / federation.name),
        demo=demo,
        connection=Connection(federation.name, f"{LOOPBACK}:{port}", str(certificate)),
    )
    write_connection(deployed.connection)
    write_atomically(folder / "deployed.json", json.dumps(asdict(deployed), indent=1) + "\n")
    return deployed


def docker_compose(compose: Path, *arguments: str) -> str:
    """Run `docker compose` and return its output. Raises UserError with its last line if it fails."""
    if shutil.which("docker") is None:
        raise UserError("there is no docker command on this machine; `silofl up` needs none")
    done = subprocess.run(
        ["docker", "compose", "--file", str(compose), *arguments],
        capture_output=True,
        text=True,
        timeout=DOCKER_SECONDS,
        check=False,
        env={**os.environ, "COMPOSE_ANSI": "never"},
    )
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        reason = lines[-1].strip() if lines else f"exit code {done.returncode}"
        raise UserError(f"{compose}: docker compose {arguments[0]}: {reason}; is it up (docker compose up --wait)?")
    return done.stdout


def containers_exist(compose: Path) -> bool:
    """Return whether the compose file's server has a container, running or not."""
    if not compose.is_file() or shutil.which("docker") is None:
        return False
    try:
        return bool(docker_compose(compose, "ps", "--all", "--quiet", "superlink").strip())
    except (ValueError, subprocess.TimeoutExpired):
        return False


def find_deployed(name: str = "") -> Deployed | None:
    """Return the federation in containers with the connection `name`, or the only one; else None."""
    found = []
    for path in sorted(state_root().glob(f"{name or '*'}/deployed.json")):
        try:
            content = json.loads(path.read_text())
            deployed = Deployed(**(content | {"connection": Connection(**content["connection"])}))
            if read_connection(deployed.name) == deployed.connection:  # else it was overwritten by another federation
                found.append(deployed)
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found[0] if len(found) == 1 else None
