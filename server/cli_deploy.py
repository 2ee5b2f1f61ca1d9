"""Commands of a deployment: ``compose``, ``credentials``, ``add-silo``, ``remove-silo``, ``doctor``."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

FEDERATION = "federation.yaml"


def add_commands(commands: Any) -> None:
    """Add this group to ``silofl``."""
    p = commands.add_parser(
        "compose",
        help="write the compose file of a federation",
        description="Write the compose file of a federation: one container per silo and a server, with TLS and keys.",
    )
    add_federation(p)
    p.add_argument("--out", metavar="FILE", type=Path, help="where to write it (default: standard output)")
    p.set_defaults(run=compose)

    p = commands.add_parser(
        "credentials",
        help="make missing keys and certificates, and write the flwr connection",
        description="With the containers of docker-compose.yml: fetch the CA's certificate from the server and write "
        "the flwr connection named after the federation. Without: make the CA, certificates and keys "
        "that are missing, for silofl up. What is there is kept.",
    )
    add_federation(p)
    p.set_defaults(run=credentials)

    p = commands.add_parser(
        "add-silo",
        help="make the bundle of one more hospital",
        description="Register one more silo and write its bundle NAME.tar (mode 0600): its key, the CA's certificate, "
        "a compose file, the server's address and the apps it may run. Nobody else is touched.",
    )
    p.add_argument("name", metavar="NAME", help="the silo's name")
    p.add_argument("--out", metavar="FILE", type=Path, help="the bundle to write (default: NAME.tar)")
    p.add_argument("--device", metavar="DEVICE", default="cpu", help="cpu or cuda:N, at the hospital")
    p.add_argument("--image", metavar="IMAGE", default="", help="image that the hospital takes")
    add_operator(p)
    p.set_defaults(run=add_silo)

    p = commands.add_parser(
        "remove-silo",
        help="shut a silo out at once",
        description="Unregister a silo: the server refuses its key from its next call on.",
    )
    p.add_argument("name", metavar="NAME", help="the silo's name")
    add_operator(p)
    p.set_defaults(run=remove_silo)

    p = commands.add_parser(
        "doctor",
        help="check a site, or the server, and say what to mend",
        description="A site: name, port, certificate, key, versions, clock, data, state, GPU. A server: ports, "
        "certificates, who is registered, who is online. Exit code 0, or 2 where something fails.",
    )
    p.add_argument("what", metavar="BUNDLE|FEDERATION.yaml", nargs="?", type=Path,
                   help="a site's bundle, or a federation's file for its server (default: in a silo's container that "
                   f"silo, else {FEDERATION})")  # fmt: skip
    p.add_argument("--data", metavar="FILE", type=Path, help="the site's data file")
    p.add_argument(
        "--connection", metavar="NAME", default="", help="flwr connection (default: the federation's)"
    )
    p.set_defaults(run=doctor)


def add_federation(p: argparse.ArgumentParser) -> None:
    p.add_argument("file", metavar="FEDERATION.yaml", nargs="?", default=Path(FEDERATION), type=Path,
                   help=f"which silos, devices and data (default: {FEDERATION})")  # fmt: skip


def add_operator(p: argparse.ArgumentParser) -> None:
    p.add_argument("--federation", metavar="FEDERATION.yaml", default=Path(FEDERATION), type=Path,
                   help=f"the federation's file (default: {FEDERATION})")  # fmt: skip
    p.add_argument(
        "--connection", metavar="NAME", default="", help="flwr connection (default: the federation's)"
    )


def compose(given: argparse.Namespace) -> None:
    from server.compose import compose_file
    from server.federation import read_federation
    from server.submit import app_directory

    out = given.out or Path("docker-compose.yml")
    text = compose_file(read_federation(given.file), out.absolute().parent, app_directory())
    if given.out:
        given.out.write_text(text, encoding="utf-8")
        print(given.out)
    else:
        print(text, end="")


def credentials(given: argparse.Namespace) -> None:
    from server import deployed
    from server.credentials import check_certificates, ensure_credentials
    from server.federation import read_federation
    from server.local import LOOPBACK, state_root

    federation = read_federation(given.file, check_data=False)
    compose = given.file.absolute().parent / "docker-compose.yml"
    if deployed.containers_exist(compose):
        found = deployed.connect(federation, compose)
        print(f"connection {found.connection.name} ({found.connection.address}); runs land in {found.runs}")
        return
    made = ensure_credentials(
        state_root() / federation.name / "credentials",
        silos=[silo.name for silo in federation.silos],
        hosts={"localhost", LOOPBACK, "::1", federation.server.address},
    )
    for check in check_certificates(made.server_certificate, made.ca_certificate):
        print(f"{check.name}: {check.detail}")
    print(f"keys of {len(federation.silos)} silos in {made.directory}; `silofl up` writes the connection")


def add_silo(given: argparse.Namespace) -> None:
    from server import bundle
    from server.compose import LOOPBACK
    from server.control import Control, read_connection
    from server.federation import DEVICE, read_federation
    from server.submit import app_directory

    if not DEVICE.fullmatch(given.device):
        raise ValueError(f"--device {given.device}: no device; use cpu, or cuda:0 and so on")
    federation = read_federation(given.federation, check_data=False)
    out = given.out or Path(f"{given.name}.tar")
    with Control(read_connection(given.connection or federation.name)) as control:
        bundle.add_silo(
            federation,
            control,
            given.name,
            out,
            fleet_port=bundle.fleet_port(federation),
            app=app_directory(),
            device=given.device,
            image=given.image,
        )
    address = federation.server.address
    if address in LOOPBACK:
        hint = f"server.address in {federation.path} is {address}: this bundle works on this machine only"
        print(hint, file=sys.stderr)
    print(f"{out}: hand it to {given.name} as the secret it is")


def remove_silo(given: argparse.Namespace) -> None:
    from server import bundle
    from server.control import Control, read_connection
    from server.federation import read_federation

    federation = read_federation(given.federation, check_data=False)
    with Control(read_connection(given.connection or federation.name)) as control:
        left = bundle.remove_silo(federation, control, given.name)
    print(f"{given.name} is shut out")
    if left:
        print(left, file=sys.stderr)


def doctor(given: argparse.Namespace) -> None:
    from client.doctor import table

    what = given.what
    if what is None and not os.environ.get("SILOFL_SERVER"):
        what = Path(FEDERATION)
    if what is not None and what.suffix in (".yaml", ".yml"):
        from server.doctor import server_checks
        from server.federation import read_federation

        federation = read_federation(what, check_data=False)
        subject, checks = federation.name, server_checks(federation, given.connection or federation.name)
    else:
        subject, checks = site_doctor(what, given.data)
    print(table(checks))
    failed = [check.name for check in checks if not check.ok]
    if failed:
        raise ValueError(f"{subject}: {len(failed)} of {len(checks)} checks failed: {', '.join(failed)}")


def site_doctor(what: Path | None, data: Path | None) -> tuple[str, list[Any]]:
    """The checks of a site: of this container, or of a bundle."""
    from client.bundle import read_bundle, site_of, unpack
    from client.doctor import site_checks
    from client.site import Site

    if what is None:
        site = Site.from_environment(os.environ)
        return site.name, site_checks(replace(site, data=data) if data else site)
    files = read_bundle(what)
    with tempfile.TemporaryDirectory(prefix="silofl-") as folder:  # mode 0700; the key is gone afterwards
        unpack(files, Path(folder))
        site = site_of(files, Path(folder), data)
        return site.name, site_checks(site)
