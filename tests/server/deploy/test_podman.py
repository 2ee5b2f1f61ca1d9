"""A hospital without Docker and without root: the silo's image under rootless Podman, by a bundle's units, and under
Charliecloud, on a Debian 13 of its own. It joins a federation of this machine, and trains.
"""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from archives import untar
from debian13 import IMAGE, Machine, build_image, debian13
from trio import RUN, wait_for

from server.cli.main import main
from server.deploy import submit
from server.deploy.local import LocalFederation
from server.results.history import History

pytestmark = [pytest.mark.network, pytest.mark.deployed, pytest.mark.timeout(1800)]

NAME = "clinic-13"
UNITS = ".config/containers/systemd"
# The tests' part of the cgroups has no controllers; the federation is on this machine's loopback interface.
HERE = "[Container]\nCgroupsMode=disabled\n"
UNIT = Path(__file__).parents[3] / "docs/systemd/silofl@.service"
# What docs/containers.md says of Charliecloud
EXPORT = f"""
rm -rf silofl.image; mkdir silofl.image
podman create --name export {IMAGE} && podman export export | tar -xf - -C silofl.image && podman rm export
mkdir silofl.image/ch
podman image inspect --format '{{{{join .Config.Env "\\n"}}}}' {IMAGE} >silofl.image/ch/environment
"""
IN_CHARLIECLOUD = """\
#!/bin/sh
exec ch-run --set-env --set-env=XDG_STATE_HOME="$HOME/.local/state" --home "$HOME/silofl.image" -- silofl "$@"
"""
QUADLET = "quadlet -user -dryrun"


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with debian13(tmp_path_factory.mktemp("srv")) as made:
        yield made


@pytest.fixture(scope="module")
def built(machine: Machine) -> Machine:
    build_image(machine)
    return machine


@pytest.fixture(scope="module")
def clinic(machine: Machine, federation: LocalFederation, folder: Path) -> Path:
    """A bundle's folder where Podman finds its units, with data and a policy that asks for no study."""
    tar, units = folder / f"{NAME}.tar", machine.home / UNITS
    file = str(folder / "federation.yaml")
    assert main(["add-silo", NAME, "--federation", file, "--out", str(tar)]) == 0
    shutil.rmtree(units, ignore_errors=True)
    units.mkdir(parents=True)
    untar(tar, units)
    policy = units / NAME / "policy.toml"
    policy.write_text(
        policy.read_text().replace('studies = "required"', 'studies = "optional"')
    )
    shutil.copy(federation.silos[1].data, units / NAME / "data.npz")
    for unit, own in ((NAME, HERE + "Network=host\n"), (f"{NAME}-install", HERE)):
        (units / f"{unit}.container.d").mkdir()
        (units / f"{unit}.container.d/test.conf").write_text(own)
    # This machine tells nobody that its network is there
    waits = machine.home / ".config/systemd/user/podman-user-wait-network-online.service"
    waits.parent.mkdir(parents=True, exist_ok=True)
    waits.unlink(missing_ok=True)
    waits.symlink_to("/dev/null")
    machine.own(machine.home / ".config")
    return units / NAME


@pytest.fixture
def systemd(machine: Machine) -> Iterator[None]:
    """The user's systemd, as after a login."""
    machine.run(f"podman volume rm --force {NAME}-site {NAME}-state")
    process = machine.start("/usr/lib/systemd/systemd --user")
    answers = "systemctl --user is-system-running"
    wait_for(lambda: machine.run(answers, check=False).split()[-1:] == ["running"], 60)
    yield
    machine.run("systemctl --user exit")
    process.wait(60)


def trains(federation: LocalFederation, out: Path) -> bool:
    """Whether the hospital takes part in both rounds of a run."""
    wait_for(lambda: is_elsewhere(federation), 120)
    directory = submit.run(
        {**RUN, "strategy": "fedavg", "rounds": 2, "silos": 4, "out": str(out)}
    )
    rows = History(directory / "history.csv").rows
    return {row.round for row in rows if row.silo == NAME and row.snapshot == "personal"} >= {
        1,
        2,
    }


def is_elsewhere(federation: LocalFederation) -> bool:
    from server.deploy.local import status

    silos = status(federation)["elsewhere"]
    return any(silo["name"] == NAME and silo["state"] == "online" for silo in silos)


def test_quadlet_takes_a_bundles_units_and_refuses_a_wrong_key(
    machine: Machine, clinic: Path
) -> None:
    said = machine.run(QUADLET)
    assert f"---{NAME}.service---" in said and f"---{NAME}-install.service---" in said
    odd = clinic.parent / f"{NAME}.container.d/odd.conf"
    odd.write_text("[Container]\nReadOnyl=true\n")
    try:
        assert "unsupported key 'ReadOnyl'" in machine.run(QUADLET, check=False)
    finally:
        odd.unlink()


def test_a_silo_under_rootless_podman_joins_trains_and_leaves(
    built: Machine, clinic: Path, systemd: None, federation: LocalFederation, tmp_path: Path
) -> None:
    built.run(f"systemctl --user start {NAME}")
    assert trains(federation, tmp_path / "run")
    seen = built.run(
        f"podman exec {NAME} sh -c 'id -u; touch /opt/x /site/x /data/x 2>&1 | grep -c Read-only;"
        " grep CapEff /proc/self/status; ls /state | head -1'"
    ).split()
    assert seen[:4] == ["10001", "3", "CapEff:", "0" * 16]
    assert f"{UNITS}/{NAME}" in built.run(f"systemctl --user show --property SourcePath {NAME}")
    built.run(f"systemctl --user stop {NAME}")
    assert not built.run("podman ps --all --quiet")
    wait_for(lambda: not is_elsewhere(federation), 60)
    kept = built.run("podman volume ls --quiet").split()
    assert sorted(kept) == [f"{NAME}-site", f"{NAME}-state"]


def test_join_under_charliecloud_is_a_service_of_its_user(
    built: Machine, clinic: Path, systemd: None, federation: LocalFederation, tmp_path: Path
) -> None:
    """The image's export, as a plain user and without a daemon, in place of an installed silofl."""
    built.run(EXPORT)
    home = built.home
    silofl, unit = (
        home / "silofl/.venv/bin/silofl",
        home / ".config/systemd/user/silofl@.service",
    )
    for file, text in ((silofl, IN_CHARLIECLOUD), (unit, UNIT.read_text())):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    silofl.chmod(0o755)
    shutil.copy(clinic / "data.npz", home / f"{NAME}.npz")
    with tarfile.open(home / f"{NAME}.tar", "w") as archive:
        archive.add(clinic, NAME, filter=lambda m: None if "data.npz" in m.name else m)
    built.own(home / "silofl")
    built.own(home / ".config")
    built.run(f"systemctl --user daemon-reload; systemctl --user start silofl@{NAME}")
    assert trains(federation, tmp_path / "run")
    built.run(f"systemctl --user stop silofl@{NAME}")
    asked = f"systemctl --user show --property=ActiveState,Result silofl@{NAME}"
    assert {*built.run(asked).split()} == {"ActiveState=inactive", "Result=success"}
    assert (home / f".local/state/silofl-site/{NAME}/state").is_dir()
