"""Federation in containers, seen from the host: its record, its CA's certificate and its `flwr` connection."""

import os
import shutil
import subprocess
from functools import partial
from pathlib import Path

from client.site.runtime.launch import LOOPBACK
from partitions.common.errors import UserError
from partitions.common.files import write_atomically
from server.deploy.control import Connection, write_connection
from server.deploy.federation import Federation
from server.deploy.local.record import Deployed, state_directory, write_record

DOCKER_SECONDS = 60.0


def connect(federation: Federation, compose: Path) -> Deployed:
    """Fetch the CA's certificate from the server's container, and write the connection.

    Raises UserError if Docker is missing or the containers are not up.
    """
    folder = state_directory(federation.name)
    certificate = folder / "containers-ca.crt"
    fetch = partial(docker_compose, compose, "cp", "superlink:/server/ca.crt")
    write_atomically(certificate, lambda temporary: fetch(str(temporary)), mode=0o600)
    port = docker_compose(compose, "port", "superlink", "8000").strip().rpartition(":")[2]
    deployed = Deployed(
        name=federation.name,
        file=str(federation.path.absolute()),
        runs=str(compose.absolute().parent / "runs" / federation.name),
        demo=federation.demo.model_dump() if federation.demo else None,
        connection=Connection(federation.name, f"{LOOPBACK}:{port}", str(certificate)),
    )
    write_connection(deployed.connection)
    write_record(folder, deployed)
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
        raise UserError(
            f"{compose}: docker compose {arguments[0]}: {reason}; is it up (docker compose up --wait)?"
        )
    return done.stdout


def containers_exist(compose: Path) -> bool:
    """Return whether the compose file's server has a container, running or not."""
    if not compose.is_file() or shutil.which("docker") is None:
        return False
    try:
        return bool(docker_compose(compose, "ps", "--all", "--quiet", "superlink").strip())
    except (ValueError, subprocess.TimeoutExpired):
        return False
