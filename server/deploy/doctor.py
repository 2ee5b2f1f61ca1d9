"""The server's half of `silofl doctor`: checks of ports, certificates, registered and online silos."""

import socket
from dataclasses import replace
from pathlib import Path

from client.link.connection import certificate_checks, split_address
from client.link.route import TIMEOUT_SECONDS, Way, bracket_host, port_check, resolve_check
from client.protocol.launch import THIS_MACHINE
from partitions.silo_file import Check
from server.deploy.bundle import fleet_port
from server.deploy.control import Control, read_connection
from server.deploy.credentials import expiries
from server.deploy.federation import Federation

UP = "bring it up: silofl up, or docker compose up --wait and silofl credentials"


def server_checks(federation: Federation, connection_name: str) -> list[Check]:
    """Return all checks of a running server; if it does not answer, checks that need an answer are left out."""
    try:
        connection = read_connection(connection_name)
    except ValueError as error:
        return [Check("connection", False, str(error), UP)]
    host, port, _ = split_address(connection.address)
    address = federation.server.public_host
    checks = [Check("connection", True, f"{connection_name} is {connection.address}")]
    checks += rename_check("control port", port_check(host, port), UP)
    if not checks[-1].ok:
        return checks
    checks += exposure_checks(address, port)
    ca = Path(connection.root_certificates)
    checks += [*(end.check for end in expiries(connection)), *fleet_checks(federation, ca)]
    try:
        with Control(connection) as control:
            nodes, runs = control.nodes(), control.runs()
    except (ConnectionError, ValueError) as error:
        return [*checks, Check("registrations", False, str(error), UP)]
    names = {node.name for node in nodes}
    missing = [silo.name for silo in federation.silos if silo.name not in names]
    fix = "the federation is up with another file: bring it up again with this one"
    detail = (
        f"not registered: {', '.join(missing)}"
        if missing
        else f"{len(names)} silos: {', '.join(sorted(names))}"
    )
    checks.append(Check("registrations", not missing, detail, fix if missing else ""))
    offline = sorted(node.name for node in nodes if node.status != "online")
    fix = "ask these sites for the end of their log and for `silofl doctor`; a run waits for --set silos=N silos only"
    detail = f"not online: {', '.join(offline)}" if offline else f"all {len(nodes)} silos"
    checks.append(Check("online", not offline, detail, fix if offline else ""))
    active = [run for run in runs if not run.finished]
    checks.append(
        Check("runs", True, f"{len(active)} under way, {len(runs) - len(active)} ended")
    )
    return checks


def rename_check(name: str, check: Check, fix: str) -> list[Check]:
    """Return the check with another name and another fix."""
    return [replace(check, name=name, fix="" if check.ok else fix)]


def exposure_checks(address: str, control_port: int) -> list[Check]:
    """Check that the Control port does not answer on the server's public address: it accepts code for every silo."""
    if address in THIS_MACHINE:
        return []
    where = f"{bracket_host(address)}:{control_port}"
    try:
        socket.create_connection((address, control_port), timeout=TIMEOUT_SECONDS).close()
    except OSError:
        return [Check("control port's reach", True, f"{where} is closed to others")]
    detail = f"{where} answers: every caller that reaches it can ship code to every silo"
    return [Check("control port's reach", False, detail, "publish it on 127.0.0.1 only")]


def fleet_checks(federation: Federation, ca_certificate: Path) -> list[Check]:
    """Check that the silos' server address resolves, and its port answers with the server's certificate."""
    host, port, _ = split_address(federation.server.reached_at(fleet_port(federation)))
    checks = [resolve_check(host)]
    if not checks[-1].ok:
        return checks
    name, before = "fleet port", ""
    fix = "bring the federation up again with this file, and open the port in the firewall"
    if federation.server.public:
        name, before = "public address", "public "
        fix = (
            "start the proxy in front of the server (docs/proxies); where this machine cannot reach its own "
            "public address, run doctor at a hospital"
        )
    checks += rename_check(name, port_check(host, port), fix)
    if checks[-1].ok:
        shown = certificate_checks(Way(host, port), ca_certificate)
        checks += [replace(check, name=f"{before}{check.name}") for check in shown]
    return checks
