"""Texts of a bundle's files, with the silo's values to be put in (server/deploy/bundle.py)."""

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
    volumes: ["./:/bundle:ro", "site:/site", "state:/state"]

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
      - type: bind
        source: ${{SILOFL_DATA}}
        target: /data/data.npz
        read_only: true
        bind: {{create_host_path: false}}
{deploy}
volumes:
  site:
  state:
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
