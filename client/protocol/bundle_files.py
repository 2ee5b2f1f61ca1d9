"""The files of a bundle that follow from its values (`bundle.json`): compose file, units for Podman, settings, texts.

The server renders them to make a bundle (`server/deploy/bundle.py`). The hospital renders them again, and compares the
bytes: nothing else in a bundle may say how its containers start. Where the bytes differ because another version of
silofl made the bundle, the error says so.
"""

import json
import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

from .node import Site, on_cpu, read_variables, supernode_command, variables_of
from .ours import errors, names, parsed
from .parsed import Frozen, match_pattern
from .policy import default_file

VALUES = "bundle.json"
# Files that the hospital may change, once unpacked
OWN_FILES = (".env", "allowed-apps", "policy.toml", "node.key")
# Variables of `.env` that it may not change
FIXED = ("SILOFL_NAME", "SILOFL_SERVER", "SILOFL_KEY", "SILOFL_FLWR")
# Not rendered: a key, a certificate, lists
GIVEN = ("allowed-apps", "ca.crt", "node.key", "schema.json", "signed.json", VALUES)
SERVER = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}")
DEVICE = r"cpu(,cpu)*|cuda:[0-9]{1,3}(,cuda:[0-9]{1,3})*|MIG-[0-9A-Za-z/-]{1,100}|[0-9]{1,3}:[0-9]{1,3}"
# None of a value's characters ends a line, a quote or a word of a unit
PLAIN_VALUE = "no bundle has such a value"
GPU = """\
    deploy: {"resources": {"reservations": {"devices": [\
{"driver": "nvidia", "device_ids": ["%s"], "capabilities": ["gpu"]}]}}}
"""


def device_inside(device: str) -> str:
    """Return a silo's devices in its container, where its GPUs are numbered from 0."""
    if on_cpu(device):
        return device
    return ",".join(f"cuda:{number}" for number, _ in enumerate(device.split(",")))


def gpu_reservation(device: str) -> str:
    """Return the `deploy` section that reserves the host's GPU N of `cuda:N` for a service; empty for a CPU."""
    if on_cpu(device):
        return ""
    return GPU % device.replace("cuda:", "").replace(",", '", "')


class BundleValues(Frozen):
    """What a bundle is rendered from."""

    silofl: Annotated[str, match_pattern(r"[0-9A-Za-z.+-]{1,40}", PLAIN_VALUE)]
    name: Annotated[str, match_pattern(names.SILO.pattern, PLAIN_VALUE)]
    federation: Annotated[str, match_pattern(r"[A-Za-z0-9._-]{1,100}", PLAIN_VALUE)]
    server: Annotated[str, match_pattern(SERVER.pattern, PLAIN_VALUE)]
    device: Annotated[str, match_pattern(DEVICE, PLAIN_VALUE)]
    image: Annotated[str, match_pattern(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,300}", PLAIN_VALUE)]
    flwr: Annotated[str, match_pattern(r"[0-9A-Za-z.+-]{1,40}", PLAIN_VALUE)]
    fingerprint: Annotated[str, match_pattern(r"(SHA256:[0-9a-f]{1,64})?", PLAIN_VALUE)] = (
        ""  # of the hospital's own key
    )

    @property
    def text(self) -> str:
        return json.dumps(self.model_dump(), indent=1) + "\n"


COMPOSE = """\
# One hospital silo; .env holds its settings. `docker compose up --detach` joins, `docker compose down` leaves.
name: ${{SILOFL_NAME}}

x-container: &container
  image: ${{SILOFL_IMAGE}}
  init: true
  read_only: true
  cap_drop: [ALL]
  security_opt: ["no-new-privileges:true"]
  tmpfs: ["/tmp:size=256m"]
  logging: {{driver: json-file, options: {{max-size: 10m, max-file: "3"}}}}

services:
  install:  # one-shot, without network: hands the key to the user that runs the silo
    <<: *container
    command: [install]
    user: "0:0"
    cap_add: [CHOWN, DAC_OVERRIDE]
    network_mode: none
    restart: "no"
    healthcheck: {{disable: true}}
    environment: {{SILOFL_USER: "${{SILOFL_USER}}"}}
    volumes: ["./:/bundle:ro", "site:/site", "state:/state", "head:/state.head"]

  silo:
    <<: *container
    user: ${{SILOFL_USER}}
    restart: unless-stopped
    stop_grace_period: 15s
    depends_on: {{install: {{condition: service_completed_successfully}}}}
    command: {command}
    environment:
      SILOFL_NAME: ${{SILOFL_NAME}}
      SILOFL_SERVER: ${{SILOFL_SERVER}}
      SILOFL_DEVICE: ${{SILOFL_DEVICE}}
      SILOFL_FLWR: ${{SILOFL_FLWR}}
      SILOFL_ALLOWED_APPS: /site/allowed-apps
      SILOFL_POLICY: /site/policy.toml
      SILOFL_RESIDENT_MINUTES: ${{SILOFL_RESIDENT_MINUTES}}
      SILOFL_VIA: "${{SILOFL_VIA}}"
      https_proxy:  # of the shell that starts it, if set there
      no_proxy:
    volumes:
      - site:/site:ro
      - state:/state
      - head:/state.head
      - type: bind
        source: ${{SILOFL_DATA}}
        target: /data/data.npz
        read_only: true
        bind: {{create_host_path: false}}
{deploy}
volumes:
  site:
  state:
  head:  # how far the state had come: an older copy of it is refused
"""

LOCKED = """\
Image={image}
UserNS=keep-id:uid=10001,gid=10001
User=10001
Group=10001
RunInit=true
ReadOnly=true
ReadOnlyTmpfs=false
Tmpfs=/tmp:size=256m
DropCapability=all
NoNewPrivileges=true
"""
INSTALL_UNIT = f"""\
# Before the silo {{name}} starts, without network: checks who signed the bundle, and keeps its files.
[Container]
{LOCKED}Network=none
Exec=install
Environment=SILOFL_USER=10001:10001
Volume=./:/bundle:ro
Volume={{name}}-site:/site
Volume={{name}}-state:/state
Volume={{name}}-head:/state.head

[Service]
Type=oneshot
"""
SILO_UNIT = f"""\
# The silo {{name}} under rootless Podman 5: this folder in ~/.config/containers/systemd, data.npz in it.
[Unit]
Requires={{name}}-install.service
After={{name}}-install.service

[Container]
ContainerName={{name}}
{LOCKED}Exec={{command}}
Environment={{environment}}
Volume={{name}}-site:/site:ro
Volume={{name}}-state:/state
Volume={{name}}-head:/state.head
Volume=./data.npz:/data/data.npz:ro
StopTimeout=15
{{gpu}}
[Service]
Restart=always
RestartSec=10
TimeoutStartSec=900

[Install]
WantedBy=default.target
"""

VARIABLES = """\
# The silo's name, and the address by which it reaches the server (one outbound TCP port).
SILOFL_NAME={name}
SILOFL_SERVER={server}
# The data file of this hospital (check it with `silofl check-data FILE`), and who may read it, as UID:GID.
SILOFL_DATA=./data.npz
SILOFL_USER=10001:10001
SILOFL_DEVICE={device}
# How long the app stays in memory for a run's next message; 0: not at all.
SILOFL_RESIDENT_MINUTES=10
# Where a proxy opens TLS: the server's relay, https://SERVER/link; the proxy's CA goes beside this file, as via-ca.crt.
SILOFL_VIA=
SILOFL_IMAGE={image}
SILOFL_FLWR={flwr}
"""

KEY = "This folder holds the silo's private key (node.key): keep it secret, run it in one place only."
OWN_KEY = "It holds no private key. With Docker, unpack it where `silofl request --folder` has put the node.key."
README = """\
# {name}: one silo of the federation {federation}
{key}
1. Get the image {image} (docker load, or your registry; another name goes into .env).
2. Write the path of your data file into .env: SILOFL_DATA=/path/to/data.npz (readable for SILOFL_USER).
3. Check: silofl check-bundle . (who signed this, and the image); docker compose run --rm silo silofl doctor
4. Join: docker compose up --detach; log: docker compose logs --follow silo; leave: docker compose down
5. Approve a study, or no run is answered. Read it: docker compose exec -T silo silofl study show /dev/stdin <study.toml
   Approve it: docker compose exec -T silo silofl approve /dev/stdin --yes --by "YOUR NAME" <study.toml
With Podman: this folder into ~/.config/containers/systemd, then systemctl --user daemon-reload, start {name}
Without both: silofl join {name}.tar --data /path/to/data.npz; silofl approve study.toml
Outbound TCP to {server} is all it needs. Data, and models of methods that keep them local, stay here.
allowed-apps lists the SHA-256 of the app builds this site runs, policy.toml says what may leave: read both first.
Models: docker compose run --rm silo silofl export /state --silo {name} --strategy METHOD --out /state/own.safetensors
"""


def quote_words(site: Site) -> list[str]:
    """Return the words of a silo's command line, for YAML and for systemd."""
    return [f'"{word}"' for word in supernode_command(site)]


def render(values: BundleValues) -> dict[str, str]:
    """Return the text of each rendered file of a bundle by its name."""
    words = {
        **values.model_dump(),
        "device": device_inside(values.device),
        "key": OWN_KEY if values.fingerprint else KEY,
    }
    names = ("SILOFL_NAME", "SILOFL_SERVER", "SILOFL_DEVICE")
    placeholder = Site.from_environment({name: f"${{{name}}}" for name in names})
    wanted = f"SILOFL_KEY={values.fingerprint}\n" if values.fingerprint else ""
    return {
        ".env": VARIABLES.format(**words) + wanted,
        "README.md": README.format(**words),
        "docker-compose.yml": COMPOSE.format(
            command="[" + ", ".join(quote_words(placeholder)) + "]",
            deploy=gpu_reservation(values.device),
        ),
        "policy.toml": default_file(studies="required"),
        f"{values.name}.container": _silo_unit(values),
        f"{values.name}-install.container": INSTALL_UNIT.format(**words),
    }


def _silo_unit(values: BundleValues) -> str:
    environment = {
        "SILOFL_NAME": values.name,
        "SILOFL_SERVER": values.server,
        "SILOFL_DEVICE": device_inside(values.device),
        "SILOFL_FLWR": values.flwr,
        "SILOFL_ALLOWED_APPS": "/site/allowed-apps",
        "SILOFL_POLICY": "/site/policy.toml",
        "SILOFL_RESIDENT_MINUTES": "10",
    }
    return SILO_UNIT.format(
        name=values.name,
        image=values.image,
        command=" ".join(quote_words(Site.from_environment(environment))),
        environment=" ".join(f"{key}={value}" for key, value in environment.items()),
        gpu=""
        if on_cpu(values.device)
        else "".join(
            f"AddDevice=nvidia.com/gpu={device.removeprefix('cuda:')}\n"
            for device in values.device.split(",")
        ),
    )


def check_rendered(files: Mapping[str, bytes], *, unpacked: bool) -> list[str]:
    """Render a bundle's files from its values, and compare them. Return the own files that differ, once unpacked.

    Raises DataError, one line, with the file that is not what this version of silofl makes of them.
    """
    here_version, anew = (
        version("silofl"),
        f"ask for a bundle that silofl {version('silofl')} makes",
    )
    if VALUES not in files:
        raise errors.DataError(
            f"this bundle has no {VALUES}, so an older silofl made it, and its files cannot be compared: {anew} "
            "(silofl add-silo --request)"
        )
    values = parsed.parse_values(
        BundleValues, files[VALUES], Path(f"the bundle's {VALUES}"), anew
    )
    wanted = {name: text.encode() for name, text in render(values).items()}
    here = {name: content for name, content in files.items() if name not in GIVEN}
    differ = sorted(name for name in {*wanted, *here} if wanted.get(name) != here.get(name))
    free = {*OWN_FILES, *(wanted.keys() - here.keys())} if unpacked else set[str]()
    expected = read_variables(wanted[".env"].decode())
    changed = variables_of(files)
    faulty = [name for name in differ if name not in free] + [
        f"{key} in its .env" for key in FIXED if changed.get(key) != expected.get(key)
    ]
    if not faulty:
        return [name for name in differ if name in here]
    if values.silofl != here_version:
        raise errors.DataError(
            f"silofl {values.silofl} made this bundle, this is {here_version}, and they write {faulty[0]} "
            f"differently: {anew}, "
            f"or use silofl {values.silofl} here"
        )
    raise errors.DataError(
        f"{faulty[0]} is not what silofl makes of this bundle's {VALUES}, so somebody changed or added it: ask for "
        "the bundle again; a change of your own to the containers goes into docker-compose.override.yml or a drop-in"
    )
