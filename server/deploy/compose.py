"""Compose file of a federation, generated from `federation.yaml` (`silofl compose`).

    setup        one-shot: makes missing CA, certificates and keys, splits the demo data, registers the silos
                 (server/deploy/setup.py)
    superlink    the server; on two networks
    SILO         one per silo, on the internal network `fleet`: only the server's Fleet port is reachable

The Control API, through which code is shipped, listens only on the network `control`; its port is published on the
host's loopback interface. Volumes: `setup` (the CA's key and the demo data; not mounted by server or silos),
`server` (its certificate and the registrations), and per silo `SILO-site` (its key), `SILO-data`, `SILO-state`.
"""

import importlib.metadata
import json
import os
from collections.abc import Iterable
from pathlib import Path

import yaml

from client.site.node import Site
from client.site.runtime.launch import THIS_MACHINE, superlink_command, supernode_command
from client.site.trust.policy import PUBLIC
from partitions.common.errors import UserError
from server.deploy.federation import Federation, SiloEntry

FLEET_PORT, CONTROL_PORT = 9092, 8000  # inside the containers; on the host the default without ports in the file
SERVER = "superlink"  # the server's name on the network `fleet`
CONTROL = "control"  # the server's name on the network `control`
CPU, GPU = "", "-gpu"
PINNED = "/opt/silofl/allowed-apps"  # the app of the checkout that the image was built from (docker/Dockerfile)
POLICY = "/policy.toml"  # a silo's own policy in its container
OWN_WORDS = ("", PUBLIC)  # policies that are not files

HEAD = """\
# {name}: a server and {count} hospital silos. Made by `silofl compose {file}`: change that file, not this one.
#
# docker compose up --detach --wait: builds the images, makes keys and demo data, starts.
# silofl credentials {file}: writes the connection {name!r} of `flwr`.
# flwr run . {name} --stream: trains; history and report come to {runs}, models stay in the silos' volumes.
# docker compose down: stops; with --volumes it forgets keys, data and models too.
#
# Ports: {fleet} for the silos{where}; {control} for the operator, on this machine's loopback interface only.

name: {name}

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
  SILOFL_SERVER: {silo_server}
  SILOFL_FLWR: {flwr}
  SILOFL_SHARING: {count}  # silos that share this machine's cores
  # How long a silo's process stays for a run's next message, with data, network and state in place; 0: none stays
  SILOFL_RESIDENT_MINUTES: ${{SILOFL_RESIDENT_MINUTES:-10}}
  # SHA-256 sums of the apps that silos may run; unset: the one of the images' checkout; empty: all
  SILOFL_ALLOWED_APPS: ${{SILOFL_ALLOWED_APPS-{pinned}}}

services:
  setup:
    <<: *container
    image: {server_image}
{server_build}
    command: [setup]
    user: "0:0"  # gives new volumes to the image's user, then becomes that user
    cap_add: [CHOWN, SETGID, SETUID]
    restart: "no"
    networks: [control]
    environment:
      SILOFL_HOSTS: {hosts}
      SILOFL_DATA: /datasets
      SILOFL_FEDERATION: |
{federation}
    volumes:
{setup_volumes}

  superlink:
    <<: *container
    image: {server_image}
    pull_policy: never  # `setup` builds it
    restart: unless-stopped
    command: {superlink_command}
    environment: {{SILOFL_HOSTS: {hosts}, SILOFL_RECEIPT_KEY: /server/receipt.key}}
    networks: {{fleet: {{}}, control: {{aliases: [{alias}]}}}}
    ports: [{fleet_publish}, {control_publish}]
    depends_on: {{setup: {{condition: service_started}}}}
    volumes: ["server:/server", "{runs}:/runs"]
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
    ``source``: silofl's checkout, from which the images are built.
    """
    server = federation.server
    fleet, control = server.fleet_port or FLEET_PORT, server.control_port or CONTROL_PORT
    check_service_names(federation)
    local_only = server.address in THIS_MACHINE
    runs = f"./runs/{federation.name}"
    volumes, setup_volumes = named_volumes(federation, runs)
    hosts = sorted({*THIS_MACHINE, server.address, SERVER, CONTROL})
    context = os.path.relpath(source, directory)
    text = HEAD.format(
        name=federation.name,
        count=len(federation.silos),
        file=federation.path.name,
        runs=runs,
        fleet=fleet,
        control=control,
        where=" on this machine" if local_only else "",
        silo_server=f"{SERVER}:{FLEET_PORT}",
        pinned=PINNED,
        flwr=_quoted(importlib.metadata.version("flwr")),
        server_image=image("server"),
        server_build=_build(context, "server", CPU),
        hosts=_quoted(" ".join(hosts)),
        federation=_indented(_summary(federation), 8),
        setup_volumes=_indented("\n".join(f"- {_quoted(volume, keep='$')}" for volume in setup_volumes), 6),
        superlink_command=_listed(container_superlink()),
        alias=CONTROL,
        fleet_publish=_quoted(f"127.0.0.1:{fleet}:{FLEET_PORT}" if local_only else f"{fleet}:{FLEET_PORT}"),
        control_publish=_quoted(f"127.0.0.1:{control}:{CONTROL_PORT}"),
    )
    built: set[str] = set()
    for silo in federation.silos:
        text += "\n" + _silo(silo, context, built)
    return text + TAIL + "".join(f"  {volume}:\n" for volume in volumes)


def check_service_names(federation: Federation) -> None:
    """Raise UserError if a silo has the name of one of the other services."""
    for silo in federation.silos:
        if silo.name in ("setup", SERVER):
            raise UserError(
                f"{federation.path}: silo {silo.name}: a service of ours has that name; choose another name"
            )


def named_volumes(federation: Federation, runs: str) -> tuple[list[str], list[str]]:
    """Return the names of the federation's volumes, and the mounts of the service ``setup``."""
    volumes = ["setup", "server"]
    mounted = ["setup:/setup", "server:/server", f"{runs}:/runs"]
    if federation.demo_silos:
        # A name means a volume, a path means a host folder: SILOFL_DATA=/srv/datasets docker compose up
        mounted.append("${SILOFL_DATA:-datasets}:/datasets")
        volumes.append("datasets")
    for silo in federation.silos:
        mounted.append(f"{silo.name}-site:/volumes/site/{silo.name}")
        volumes.append(f"{silo.name}-site")
        if silo.data is None:
            mounted.append(f"{silo.name}-data:/volumes/data/{silo.name}")
            volumes.append(f"{silo.name}-data")
        volumes.append(f"{silo.name}-state")
    return volumes, mounted


def image(part: str, variant: str = CPU) -> str:
    """Return the name of an image of this version: `silofl-silo:0.1.0`, `silofl-silo:0.1.0-gpu`."""
    return f"silofl-{part}:{importlib.metadata.version('silofl')}{variant}"


def container_superlink() -> list[str]:
    """Return the server's command line in its container."""
    folder = Path("/server")
    return superlink_command(
        "flower-superlink",
        ca_certificate=folder / "ca.crt",
        certificate=folder / "server.crt",
        key=folder / "server.key",
        fleet=f"0.0.0.0:{FLEET_PORT}",
        host=CONTROL,  # a name that only the network `control` resolves
        port=CONTROL_PORT,
    )


def container_site(silo: SiloEntry) -> Site:
    """Return a silo's site in its container, where its GPU is always number 0."""
    device = "cpu" if silo.device == "cpu" else "cuda:0"
    environment = {"SILOFL_NAME": silo.name, "SILOFL_SERVER": f"{SERVER}:{FLEET_PORT}", "SILOFL_DEVICE": device}
    return Site.from_environment(environment)


def _silo(silo: SiloEntry, context: str, built: set[str]) -> str:
    site = container_site(silo)
    variant = CPU if silo.device == "cpu" else GPU
    name = image("silo", variant)
    lines = [f"{silo.name}:", "  <<: *silo", f"  image: {name}"]
    if name in built:
        lines.append("  pull_policy: never  # the first silo builds it")
    else:
        lines.append(_indented(_build(context, "silo", variant, indent=0), 2))
        built.add(name)
    lines += [
        f"  command: {_listed(supernode_command(site))}",
        f"  environment: {{<<: *silo-environment, SILOFL_NAME: {silo.name}, SILOFL_DEVICE: {_quoted(site.device)}, "
        f"SILOFL_POLICY: {_quoted(silo.policy if silo.policy in OWN_WORDS else POLICY)}}}",
        "  volumes:",
        f"    - {_quoted(f'{silo.name}-site:/site:ro')}",
        f"    - {_quoted(f'{silo.name}-state:/state')}",
    ]
    if silo.data is None:
        lines.append(f"    - {_quoted(f'{silo.name}-data:/data:ro')}")
    else:
        lines.append(_mounted(silo.data, str(site.data)))
    if silo.policy not in OWN_WORDS:
        lines.append(_mounted(Path(silo.policy), POLICY))
    if silo.memory:
        lines.append(f"  mem_limit: {silo.memory}")
    if variant == GPU:
        lines.append(gpu_reservation(silo.device))
    return _indented("\n".join(lines), 2) + "\n"


def _mounted(file: Path, target: str) -> str:
    return (
        f"    - {{type: bind, source: {_quoted(str(file))}, target: {target}, read_only: true, "
        "bind: {create_host_path: false}}"
    )


def gpu_reservation(device: str, indent: int = 2) -> str:
    """Return the `deploy` section that reserves the host's GPU N of `cuda:N` for a service."""
    number = device.removeprefix("cuda:")
    text = (
        "deploy:\n  resources:\n    reservations:\n"
        f'      devices: [{{driver: nvidia, device_ids: ["{number}"], capabilities: [gpu]}}]'
    )
    return _indented(text, indent)


def _build(context: str, part: str, variant: str, indent: int = 4) -> str:
    lines = [
        "build:",
        f"  context: {_quoted(context)}",
        "  dockerfile: docker/Dockerfile",
        f"  target: {part}",
        # Local wheels take precedence over the index, for a server without a fast network.
        f'  additional_contexts: {{wheels: "${{SILOFL_WHEELS:-{os.path.join(context, "docker/wheels")}}}"}}',
    ]
    # SILOFL_BASE comes from the build's environment if set. PyTorch from the package index is built for CUDA.
    lines.append('  args: [SILOFL_BASE, "TORCH_INDEX="]' if variant == GPU else "  args: [SILOFL_BASE]")
    return _indented("\n".join(lines), indent)


def _summary(federation: Federation) -> str:
    """Return the federation file that `setup` reads."""
    content: dict[str, object] = {"name": federation.name}
    if federation.demo:
        content["demo"] = federation.demo.model_dump(exclude_unset=True)
    content["silos"] = [
        {"name": silo.name, "data": "demo" if silo.data is None else str(silo.data)} for silo in federation.silos
    ]
    return yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=1000).replace("$", "$$")


def _listed(words: Iterable[str]) -> str:
    return "[" + ", ".join(_quoted(word) for word in words) + "]"


def _quoted(text: str, keep: str = "") -> str:
    """Return a YAML string; dollar signs are doubled, because compose would substitute variables."""
    return json.dumps(text if keep == "$" else text.replace("$", "$$"), ensure_ascii=False)


def _indented(text: str, spaces: int) -> str:
    return "\n".join(" " * spaces + line if line else line for line in text.rstrip("\n").split("\n"))
