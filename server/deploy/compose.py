"""Compose file of a federation, generated from `federation.yaml` (`silofl compose`).

    setup        one-shot: makes missing CA, certificates and keys, splits the demo data, registers the silos
                 (server/deploy/setup.py)
    superlink    the server; on two networks
    relay        off by default: `silofl relay`, for hospitals behind proxies that open TLS
    SILO         one per silo, on the internal network `fleet`: only the server's Fleet port is reachable

The Control API, through which code is shipped, listens only on the network `control`; its port is published on the
host's loopback interface. Volumes: `setup` (the CA's key and the demo data; not mounted by server or silos),
`server` (its certificate and the registrations), and per silo `SILO-site` (its key), `SILO-data`, `SILO-state`,
`SILO-head` (how far the state had come: an older copy of it is refused).

Below it are the containers as the host sees them: their record, their CA's certificate, their `flwr` connection.
"""

import importlib.metadata
import os
import shutil
import subprocess
from functools import partial
from pathlib import Path

import yaml

from client.protocol.bundle_files import device_inside, gpu_reservation
from client.protocol.launch import LOOPBACK, THIS_MACHINE, superlink_command
from client.protocol.node import Site, gpu_environment, on_cpu, supernode_command
from client.protocol.policy import PUBLIC
from partitions.common.errors import UserError
from partitions.common.files import write_atomically
from server.deploy.control import Connection, write_connection
from server.deploy.federation import Federation, SiloEntry
from server.deploy.local.record import Deployed, state_directory, write_record
from server.rendering import fill

# Inside the containers; on the host the default without ports in the file
FLEET_PORT, CONTROL_PORT = 9092, 8000
DOCKER_SECONDS = 60.0
SERVER = "superlink"  # the server's name on the network `fleet`
CONTROL = "control"  # the server's name on the network `control`
POLICY = "/policy.toml"  # a silo's own policy in its container
OWN_WORDS = ("", PUBLIC)  # policies that are not files


def compose_file(federation: Federation, directory: Path, source: Path) -> str:
    """Return the text of the compose file.

    ``directory``: the file's directory; paths on this machine are written relative to it.
    ``source``: silofl's checkout, from which the images are built. Raises UserError for a silo with a service's name.
    """
    if taken := [
        silo.name for silo in federation.silos if silo.name in ("setup", "relay", SERVER)
    ]:
        raise UserError(
            f"{federation.path}: silo {taken[0]}: a service of ours has that name; choose another name"
        )
    server, context = federation.server, os.path.relpath(source, directory)
    reached_at = f"{SERVER}:{FLEET_PORT}"
    silos = [
        (
            silo,
            environment := environment_of(silo),
            Site.from_environment({**environment, "SILOFL_SERVER": reached_at}),
        )
        for silo in federation.silos
    ]
    return fill(
        "deploy/compose.yaml.j2",
        federation=federation,
        silos=silos,
        first={image("silo", silo.device): silo.name for silo in reversed(federation.silos)},
        this_machine=THIS_MACHINE,
        ports=(server.fleet_port or FLEET_PORT, server.control_port or CONTROL_PORT),
        reached_at=reached_at,
        fleet_port=FLEET_PORT,
        control_port=CONTROL_PORT,
        hosts=" ".join(
            sorted({*THIS_MACHINE, server.address, server.public_host, SERVER, CONTROL})
        ),
        superlink=superlink_command(
            Path("/server"), fleet=f"0.0.0.0:{FLEET_PORT}", host=CONTROL, port=CONTROL_PORT
        ),
        context=context,
        wheels=os.path.join(context, "docker/wheels"),
        flwr=importlib.metadata.version("flwr"),
        summary=summary(federation),
        policy=POLICY,
        image=image,
        command=supernode_command,
        on_cpu=on_cpu,
        gpu_reservation=gpu_reservation,
    )


def image(part: str, device: str = "cpu") -> str:
    """Return the name of an image of this version: `silofl-silo:0.1.0`, `silofl-silo:0.1.0-gpu`."""
    variant = "" if on_cpu(device) else "-gpu"
    return f"silofl-{part}:{importlib.metadata.version('silofl')}{variant}"


def environment_of(silo: SiloEntry) -> dict[str, str]:
    """Return a silo's variables beside those that all silos have."""
    environment = {
        "SILOFL_NAME": silo.name,
        "SILOFL_DEVICE": device_inside(silo.device),
        "SILOFL_POLICY": silo.policy if silo.policy in OWN_WORDS else POLICY,
    }
    return environment | gpu_environment("", silo.gpu_share)


def summary(federation: Federation) -> str:
    """Return the federation file that `setup` reads."""
    content: dict[str, object] = {"name": federation.name}
    if federation.demo:
        content["demo"] = federation.demo.model_dump(exclude_unset=True)
    content["silos"] = [
        {"name": silo.name, "data": "demo" if silo.data is None else str(silo.data)}
        for silo in federation.silos
    ]
    if federation.operators:
        content["operators"] = [operator.model_dump() for operator in federation.operators]
    text = yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=1000)
    return text.replace("$", "$$").rstrip()


# --- the containers, seen from the host -----------------------------------------------------------------------


def connect(federation: Federation, compose: Path) -> Deployed:
    """Fetch the CA's certificate from the server's container, and write the connection.

    Raises UserError if Docker is missing or the containers are not up.
    """
    folder = state_directory(federation.name)
    certificate = folder / "containers-ca.crt"
    fetch = partial(docker_compose, compose, "cp", "superlink:/server/ca.crt")
    write_atomically(certificate, lambda temporary: fetch(str(temporary)), mode=0o600)
    port = docker_compose(compose, "port", SERVER, str(CONTROL_PORT)).strip().rpartition(":")[2]
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
