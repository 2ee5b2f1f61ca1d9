"""Compose file of a federation, generated from `federation.yaml` (`silofl compose`).

    setup        one-shot: makes missing CA, certificates and keys, splits the demo data, registers the silos
                 (server/deploy/setup.py)
    superlink    the server; on two networks
    relay        off by default: `silofl relay`, for hospitals behind proxies that open TLS
    SILO         one per silo, on the internal network `fleet`: only the server's Fleet port is reachable

The Control API, through which code is shipped, listens only on the network `control`; its port is published on the
host's loopback interface. Volumes: `setup` (the CA's key and the demo data; not mounted by server or silos),
`server` (its certificate and the registrations), and per silo `SILO-site` (its key), `SILO-data`, `SILO-state`.

Below it are the containers as the host sees them: their record, their CA's certificate, their `flwr` connection.
"""

import importlib.metadata
import json
import os
import shutil
import subprocess
from functools import partial
from pathlib import Path
from textwrap import indent

import yaml

from client.site.node import FIRST_GPU, Site, gpu_environment
from client.site.runtime.launch import (
    LOOPBACK,
    THIS_MACHINE,
    superlink_command,
    supernode_command,
)
from client.site.trust.policy import PUBLIC
from partitions.common.errors import UserError
from partitions.common.files import write_atomically
from server.deploy.control import Connection, write_connection
from server.deploy.federation import Federation, Server, SiloEntry
from server.deploy.local.record import Deployed, state_directory, write_record

# Inside the containers; on the host the default without ports in the file
FLEET_PORT, CONTROL_PORT = 9092, 8000
DOCKER_SECONDS = 60.0
SERVER = "superlink"  # the server's name on the network `fleet`
CONTROL = "control"  # the server's name on the network `control`
PINNED = "/opt/silofl/allowed-apps"  # the app of the checkout that the image was built from (docker/Dockerfile)
POLICY = "/policy.toml"  # a silo's own policy in its container
OWN_WORDS = ("", PUBLIC)  # policies that are not files

RELAY = """
  relay:  # docker compose --profile relay up --detach
    <<: *container
    image: {image}
    pull_policy: never
    profiles: [relay]
    restart: unless-stopped
    command: [relay]
    healthcheck: {{disable: true}}
    networks: [fleet, control]
    # SILOFL_RELAY=443, with a folder of chain.pem and key.pem, speaks TLS itself; else a web server in front of it does
    ports: ["${{SILOFL_RELAY:-127.0.0.1:8082}}:8082"]
    depends_on: {{superlink: {{condition: service_healthy}}}}
    volumes: ["server:/server:ro", "${{SILOFL_RELAY_TLS:-relay}}:/relay:ro"]
"""

TAIL = """
networks:
  fleet: {internal: true}  # no way out, and none to the Control port
  control: {}

volumes:
"""


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
    runs = f"./runs/{federation.name}"
    context = os.path.relpath(source, directory)
    volumes = ["setup", "server", "relay"]
    mounted = ["setup:/setup", "server:/server", f"{runs}:/runs"]
    if federation.demo:
        # A name means a volume, a path means a host folder: SILOFL_DATA=/srv/datasets docker compose up
        mounted.append("${SILOFL_DATA:-datasets}:/datasets")
        volumes.append("datasets")
    for silo in federation.silos:
        parts = ["site", *(["data"] if silo.data is None else [])]
        mounted += [f"{silo.name}-{part}:/volumes/{part}/{silo.name}" for part in parts]
        volumes += [f"{silo.name}-{part}" for part in (*parts, "state")]
    text = head(federation, runs) + server_services(federation, runs, context, mounted)
    text += RELAY.format(image=image("server"))
    built = set[str]()
    for silo in federation.silos:
        text += silo_service(silo, context, built)
    return text + TAIL + "".join(f"  {volume}:\n" for volume in volumes)


def ports_of(server: Server) -> tuple[int, int]:
    """Return the ports on the host: for silos, and for the operator."""
    return server.fleet_port or FLEET_PORT, server.control_port or CONTROL_PORT


def head(federation: Federation, runs: str) -> str:
    fleet, control = ports_of(federation.server)
    where = " on this machine" if federation.server.address in THIS_MACHINE else ""
    file, count = federation.path.name, len(federation.silos)
    return f"""\
# {federation.name}: a server and {count} hospital silos, by `silofl compose {file}`: change that file, not this one.
#
# docker compose up --detach --wait: builds the images, makes keys and demo data, starts.
# silofl credentials {file}: writes the connection {federation.name!r} of `flwr`.
# flwr run . {federation.name} --stream: trains; history and report come to {runs}, models stay in the silos' volumes.
# docker compose down: stops; with --volumes it forgets keys, data and models too.
#
# Ports: {fleet} for the silos{where}; {control} for the operator, on this machine's loopback interface only.

name: {federation.name}

x-container: &container
  init: true
  read_only: true
  cap_drop: [ALL]
  security_opt: ["no-new-privileges:true"]
  tmpfs: ["/tmp:size=256m"]
  stop_grace_period: 15s
  logging: {{driver: json-file, options: {{max-size: 10m, max-file: "3"}}}}

x-silo: &silo
  <<: *container
  restart: unless-stopped
  networks: [fleet]
  depends_on: {{setup: {{condition: service_completed_successfully}}}}

x-silo-environment: &silo-environment
  SILOFL_SERVER: {SERVER}:{FLEET_PORT}
  SILOFL_FLWR: {flow(importlib.metadata.version("flwr"))}
  SILOFL_SHARING: {count}  # silos that share this machine's cores
  # How long a silo's process stays for a run's next message, with data, network and state in place; 0: none stays
  SILOFL_RESIDENT_MINUTES: ${{SILOFL_RESIDENT_MINUTES:-10}}
  # SHA-256 sums of the apps that silos may run; unset: the one of the images' checkout; empty: all
  SILOFL_ALLOWED_APPS: ${{SILOFL_ALLOWED_APPS-{PINNED}}}

"""


def server_services(federation: Federation, runs: str, context: str, mounted: list[str]) -> str:
    """Return the services `setup` and `superlink`. ``mounted``: the volumes of `setup`."""
    address, (fleet, control) = federation.server.address, ports_of(federation.server)
    named = {address, federation.server.public_host, SERVER, CONTROL}
    hosts = " ".join(sorted({*THIS_MACHINE, *named}))
    published = (
        f"127.0.0.1:{fleet}:{FLEET_PORT}"
        if address in THIS_MACHINE
        else f"{fleet}:{FLEET_PORT}"
    )
    return f"""\
services:
  setup:
    <<: *container
    image: {image("server")}
    {build(context, "server")}
    command: [setup]
    user: "0:0"  # gives new volumes to the image's user, then becomes that user
    cap_add: [CHOWN, SETGID, SETUID]
    restart: "no"
    networks: [control]
    environment:
      SILOFL_HOSTS: {flow(hosts)}
      SILOFL_DATA: /datasets
      SILOFL_FEDERATION: |
{indent(summary(federation), " " * 8)}
    volumes: {json.dumps(mounted)}

  superlink:
    <<: *container
    image: {image("server")}
    pull_policy: never  # `setup` builds it
    restart: unless-stopped
    command: {flow(container_superlink())}
    environment: {{SILOFL_HOSTS: {flow(hosts)}, SILOFL_RECEIPT_KEY: /server/receipt.key}}
    networks: {{fleet: {{}}, control: {{aliases: [{CONTROL}]}}}}
    ports: [{flow(published)}, {flow(f"127.0.0.1:{control}:{CONTROL_PORT}")}]
    depends_on: {{setup: {{condition: service_started}}}}
    volumes: ["server:/server", "{runs}:/runs"]
"""


def image(part: str, device: str = "cpu") -> str:
    """Return the name of an image of this version: `silofl-silo:0.1.0`, `silofl-silo:0.1.0-gpu`."""
    variant = "" if device == "cpu" else "-gpu"
    return f"silofl-{part}:{importlib.metadata.version('silofl')}{variant}"


def device_inside(device: str) -> str:
    """Return a silo's device in its container, where its GPU is always number 0."""
    return device if device == "cpu" else FIRST_GPU


def container_superlink() -> list[str]:
    """Return the server's command line in its container."""
    return superlink_command(
        Path("/server"),
        fleet=f"0.0.0.0:{FLEET_PORT}",
        host=CONTROL,  # a name that only the network `control` resolves
        port=CONTROL_PORT,
    )


def silo_service(silo: SiloEntry, context: str, built: set[str]) -> str:
    """Return the service of a silo, which builds its image unless it is among those already ``built``."""
    own_policy = silo.policy not in OWN_WORDS
    name = image("silo", silo.device)
    environment = {
        "SILOFL_NAME": silo.name,
        "SILOFL_DEVICE": device_inside(silo.device),
        "SILOFL_POLICY": POLICY if own_policy else silo.policy,
    }
    environment |= gpu_environment("", silo.gpu_share)
    site = Site.from_environment({**environment, "SILOFL_SERVER": f"{SERVER}:{FLEET_PORT}"})
    volumes: list[object] = [f"{silo.name}-site:/site:ro", f"{silo.name}-state:/state"]
    volumes.append(
        bind(silo.data, str(site.data)) if silo.data else f"{silo.name}-data:/data:ro"
    )
    volumes += [bind(silo.policy, POLICY)] if own_policy else []
    source = "pull_policy: never  # the first silo builds it"
    if name not in built:
        source = build(context, "silo", silo.device)
        built.add(name)
    memory = f"    mem_limit: {silo.memory}\n" if silo.memory else ""
    return f"""
  {silo.name}:
    <<: *silo
    image: {name}
    {source}
    command: {flow(supernode_command(site))}
    environment: {{<<: *silo-environment, {flow(environment)[1:]}
    volumes: {flow(volumes)}
{memory}{gpu_reservation(silo.device)}"""


def bind(file: Path | str, target: str) -> dict[str, object]:
    mount = {"type": "bind", "source": str(file), "target": target, "read_only": True}
    return {**mount, "bind": {"create_host_path": False}}


def gpu_reservation(device: str) -> str:
    """Return the `deploy` section that reserves the host's GPU N of `cuda:N` for a service; empty for a CPU."""
    if device == "cpu":
        return ""
    gpu = {
        "driver": "nvidia",
        "device_ids": [device.removeprefix("cuda:")],
        "capabilities": ["gpu"],
    }
    return f"    deploy: {flow({'resources': {'reservations': {'devices': [gpu]}}})}\n"


def build(context: str, part: str, device: str = "cpu") -> str:
    """Return the `build` section of an image.

    Local wheels take precedence over the index, for a server without a fast network. SILOFL_BASE comes from the build's
    environment if set. PyTorch from the package index is built for CUDA.
    """
    wheels = f"${{SILOFL_WHEELS:-{os.path.join(context, 'docker/wheels')}}}"
    content = {
        "context": context.replace("$", "$$"),
        "dockerfile": "docker/Dockerfile",
        "target": part,
        "additional_contexts": {"wheels": wheels},
        "args": ["SILOFL_BASE"] if device == "cpu" else ["SILOFL_BASE", "TORCH_INDEX="],
    }
    return f"build: {json.dumps(content, ensure_ascii=False)}"


def summary(federation: Federation) -> str:
    """Return the federation file that `setup` reads."""
    content: dict[str, object] = {"name": federation.name}
    if federation.demo:
        content["demo"] = federation.demo.model_dump(exclude_unset=True)
    content["silos"] = [
        {"name": silo.name, "data": "demo" if silo.data is None else str(silo.data)}
        for silo in federation.silos
    ]
    return (
        yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=1000)
        .replace("$", "$$")
        .rstrip()
    )


def flow(content: object) -> str:
    """Return YAML in one line; dollar signs are doubled, because compose would substitute variables."""
    return json.dumps(content, ensure_ascii=False).replace("$", "$$")


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
