"""A hospital without Docker and without root: the silo's image under rootless Podman, by a bundle's units, and under
Charliecloud, on a Debian 13 of its own. It joins a federation of this machine, and trains.
"""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

import pytest
from archives import untar
from debian13 import IMAGE, build_image, debian13
from tiny import json_of
from trio import RUN, bring_up, wait_for

from client.protocol.launch import LOOPBACK, free_ports
from server.cli.main import main
from server.deploy import submit
from server.deploy.local import status
from server.results.history import History

pytestmark = [pytest.mark.network, pytest.mark.deployed, pytest.mark.timeout(1800)]

NAME = "clinic-13"
UNITS = ".config/containers/systemd"
# The tests' part of the cgroups has no controllers
HERE = "[Container]\nCgroupsMode=disabled\n"
# By which Podman's default network reaches the federation on this machine's loopback interface
HOST = "192.0.2.1"
PASTA = f'[network]\npasta_options = ["--map-host-loopback", "{HOST}"]\n'
NEXT = "silofl-silo:next"
UNIT = Path(__file__).parents[3] / "docs/systemd/silofl@.service"
# What docs/containers.md says of Charliecloud
EXPORT = f"""
rm -rf silofl.image silofl.next; mkdir silofl.image
podman create --replace --name export {IMAGE} && podman export export | tar -xf - -C silofl.image && podman rm export
mkdir silofl.image/ch
podman image inspect --format '{{{{join .Config.Env "\\n"}}}}' {IMAGE} >silofl.image/ch/environment
"""
IN_CHARLIECLOUD = """\
#!/bin/sh
exec ch-run --set-env --set-env=XDG_STATE_HOME="$HOME/.local/state" --home "$HOME/silofl.image" -- silofl "$@"
"""
QUADLET = "quadlet -user -dryrun"


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    with debian13(tmp_path_factory.mktemp("srv")) as made:
        yield made


@pytest.fixture(scope="module")
def built(machine):
    build_image(machine)
    return machine


@pytest.fixture(scope="module")
def federation(folder):
    path, (port,) = folder / "federation.yaml", free_ports(1)
    server = f"server: {{public: '{HOST}:{port}', fleet-port: {port}}}\n"
    path.write_text(path.read_text() + server)
    return bring_up(folder)


@pytest.fixture
def clinic(machine, federation):
    """A bundle's folder where Podman finds its units, with data."""
    units = machine.home / UNITS
    shutil.rmtree(units, ignore_errors=True)
    units.mkdir(parents=True)
    unpack(federation, units)
    shutil.copy(federation.silos[1].data, units / NAME / "data.npz")
    for unit in (NAME, f"{NAME}-install"):
        (units / f"{unit}.container.d").mkdir()
        (units / f"{unit}.container.d/test.conf").write_text(HERE)
    (machine.home / ".config/containers/containers.conf").write_text(PASTA)
    machine.own(machine.home / ".config")
    yield units / NAME
    shutil.rmtree(units, ignore_errors=True)


def unpack(federation, folder, image=IMAGE):
    """Unpack a new bundle for the hospital's own key, with a policy that asks for no study."""
    file = Path(federation.file)
    own, tar = file.parent / NAME, file.parent / f"{NAME}.tar"
    assert main(["request", NAME, "--folder", str(own)]) == 0
    tar.unlink(missing_ok=True)
    asked = f"--request {own}/{NAME}.request --image {image} --out {tar}".split()
    assert main(["add-silo", *asked, "--federation", str(file)]) == 0
    untar(tar, folder)
    shutil.copy(own / "node.key", folder / NAME)
    policy = folder / NAME / "policy.toml"
    policy.write_text(
        policy.read_text().replace('studies = "required"', 'studies = "optional"')
    )


@pytest.fixture
def systemd(machine):
    """The user's systemd, as after a login: it starts the units that it finds."""
    machine.run(f"podman volume rm --force {NAME}-site {NAME}-state {NAME}-head")
    # This machine tells nobody that its network is there
    waits = machine.home / ".config/systemd/user/podman-user-wait-network-online.service"
    waits.parent.mkdir(parents=True, exist_ok=True)
    waits.unlink(missing_ok=True)
    waits.symlink_to("/dev/null")
    machine.own(machine.home / ".config")
    process = machine.start("/usr/lib/systemd/systemd --user")
    answers = "systemctl --user is-system-running"
    wait_for(lambda: machine.run(answers, check=False).split()[-1:] == ["running"], 60)
    yield
    machine.run("systemctl --user exit")
    process.wait(60)


def trains(federation, out):
    """Whether the hospital takes part in a run."""
    wait_for(lambda: is_elsewhere(federation), 120)
    directory = submit.run(
        {**RUN, "strategy": "fedavg", "rounds": 1, "silos": 4, "out": str(out)}
    )
    rows = History(directory / "history.csv").rows
    return any(row.silo == NAME and row.snapshot == "personal" for row in rows)


def is_elsewhere(federation):
    silos = status(federation)["elsewhere"]
    return any(silo["name"] == NAME and silo["state"] == "online" for silo in silos)


def kept(state):
    """The record's identity, and how many replies it has counted."""
    record = json_of(state / "audit/head.json")["record"]
    return record["id"], record["replies"]


def test_quadlet_takes_a_bundles_units_and_refuses_a_wrong_key(machine, clinic):
    said = machine.run(QUADLET)
    assert f"---{NAME}.service---" in said and f"---{NAME}-install.service---" in said
    own = clinic.parent / f"{NAME}.container.d/own.conf"
    own.write_text("[Container]\nEnvironment=SILOFL_VIA=https://a.example/link\n")
    assert "--env SILOFL_VIA=https://a.example/link" in machine.run(QUADLET)
    own.write_text("[Container]\nReadOnyl=true\n")
    assert "unsupported key 'ReadOnyl'" in machine.run(QUADLET, check=False)


def test_a_silo_under_rootless_podman_joins_trains_and_leaves(
    built, clinic, systemd, federation, tmp_path
):
    built.run(f"systemctl --user start {NAME}")
    assert trains(federation, tmp_path / "run")
    inspect = (
        f"podman inspect {NAME} --format '{{{{.HostConfig.NetworkMode}}}} {{{{.ImageName}}}}'"
    )
    assert built.run(inspect).split() == ["pasta", f"localhost/{IMAGE}"]
    seen = built.run(
        f"podman exec {NAME} sh -c 'id -u; touch /opt/x /site/x /data/x 2>&1 | grep -c Read-only;"
        " grep CapEff /proc/self/status'"
    ).split()
    assert seen == ["10001", "3", "CapEff:", "0" * 16]
    assert f"{UNITS}/{NAME}" in built.run(f"systemctl --user show --property SourcePath {NAME}")
    site, state = (
        built.home / f".local/share/containers/storage/volumes/{NAME}-{of}/_data"
        for of in ("site", "state")
    )
    key, (record, replies) = (site / "node.key").read_bytes(), kept(state)

    built.run(f"podman tag {IMAGE} {NEXT}")
    unpack(federation, clinic.parent, NEXT)
    built.own(clinic)
    built.run(f"systemctl --user daemon-reload; systemctl --user restart {NAME}")
    assert trains(federation, tmp_path / "next")
    assert built.run(inspect).split() == ["pasta", f"localhost/{NEXT}"]
    assert (site / "node.key").read_bytes() == key and kept(state) == (record, 2 * replies)

    built.run(f"systemctl --user stop {NAME}")
    assert not built.run(f"podman ps --all --quiet --filter name={NAME}")
    wait_for(lambda: not is_elsewhere(federation), 60)
    shutil.rmtree(clinic)
    built.run("systemctl --user daemon-reload")
    assert "not found" in built.run(f"systemctl --user start {NAME}", check=False)
    volumes = [f"{NAME}-head", f"{NAME}-site", f"{NAME}-state"]
    assert sorted(built.run("podman volume ls --quiet").split()) == volumes
    built.run(f"podman volume rm {' '.join(volumes)}")
    assert not state.exists()


def test_join_under_charliecloud_is_a_service_of_its_user(built, systemd, federation, tmp_path):
    """The image's export, as a plain user and without a daemon, in place of an installed silofl."""
    built.run(EXPORT)
    home = built.home
    silofl, unit = (
        home / "silofl/.venv/bin/silofl",
        home / ".config/systemd/user/silofl@.service",
    )
    own = UNIT.read_text().replace(
        "--data %h/%i.npz", "--data %h/%i.npz --policy %h/policy.toml"
    )
    for file, text in ((silofl, IN_CHARLIECLOUD), (unit, own)):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    silofl.chmod(0o755)
    shutil.copy(federation.silos[1].data, home / f"{NAME}.npz")
    state = home / f".local/state/silofl-site/{NAME}"
    shutil.rmtree(state, ignore_errors=True)
    bundle(federation, tmp_path, home)
    for folder in (home / "silofl", home / ".config"):
        built.own(folder)
    built.run(f"systemctl --user daemon-reload; systemctl --user enable --now silofl@{NAME}")
    assert trains(federation, tmp_path / "run")
    key, (record, replies) = (state / "node.key").read_bytes(), kept(state / "state")

    stops(built, federation, "stop")
    (home / "silofl.image").rename(home / "silofl.next")
    silofl.write_text(IN_CHARLIECLOUD.replace("silofl.image", "silofl.next"))
    bundle(federation, tmp_path, home)
    built.run(f"systemctl --user start silofl@{NAME}")
    assert trains(federation, tmp_path / "next")
    assert (state / "node.key").read_bytes() == key
    assert kept(state / "state") == (record, 2 * replies)

    stops(built, federation, "disable --now")
    asked = f"systemctl --user is-enabled silofl@{NAME}"
    assert built.run(asked, check=False).split() == ["disabled"]
    assert (state / "node.key").exists() and (state / "state/audit").is_dir()


def bundle(federation, folder, home):
    """The bundle with the hospital's key, of a server that this machine's network reaches, and its policy."""
    shutil.rmtree(folder / NAME, ignore_errors=True)
    file, tar = Path(federation.file), home / f"{NAME}.tar"
    text = file.read_text()
    file.write_text(text.replace(HOST, LOOPBACK))
    unpack(federation, folder)
    file.write_text(text)
    shutil.copy(file.parent / f"{NAME}.tar", tar)
    with tarfile.open(tar, "a") as archive:
        archive.add(folder / NAME / "node.key", f"{NAME}/node.key")
    tar.chmod(0o644)  # for the hospital's user
    (home / "policy.toml").write_text((folder / NAME / "policy.toml").read_text())


def stops(machine, federation, how):
    """SIGTERM reaches the SuperNode, which tells its server that it leaves."""
    machine.run(f"systemctl --user {how} silofl@{NAME}")
    asked = f"systemctl --user show --property=ActiveState,Result silofl@{NAME}"
    assert {*machine.run(asked).split()} == {"ActiveState=inactive", "Result=success"}
    wait_for(lambda: not is_elsewhere(federation), 60)
