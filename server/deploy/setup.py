"""One-shot service `setup` of a compose file: credentials, demo data, registration.

    /setup/credentials      CA, certificates, every silo's key pair; mounted by this service only
    /setup/data             the split demo data
    /server                 ca.crt server.crt server.key receipt.key ready: for the SuperLink
    /volumes/site/NAME      ca.crt node.key: for silo NAME
    /volumes/data/NAME      data.npz

It runs at every `docker compose up`. Existing files are kept, so every silo keeps its access. A silo of the federation
file that was removed (`silofl remove-silo`) gets a new key, as the SuperLink does not accept the old one.
"""

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from partitions.common.files import write_atomically
from server.deploy.access.operators import SERVICE, write_operators
from server.deploy.compose import CONTROL, CONTROL_PORT
from server.deploy.control import Connection, Control
from server.deploy.credentials import Credentials, ensure_credentials
from server.deploy.federation import Federation, read_federation
from server.deploy.local.demo_data import split_demo
from server.deploy.registrar import register, renew_shut_out, repeat_call


def set_up(environment: Mapping[str, str], root: Path = Path("/")) -> None:
    """Make credentials and demo data, copy them to the volumes, and register the silos. `root` is for tests.

    Raises UserError if the federation or the volumes' content cannot be used, RunFailedError if the SuperLink does not
    answer.
    """
    federation = _federation(environment)
    hosts = environment["SILOFL_HOSTS"]
    credentials = ensure_credentials(
        root / "setup/credentials",
        silos=[silo.name for silo in federation.silos],
        hosts=hosts.split(),
    )
    for source, name in (
        (credentials.ca_certificate, "ca.crt"),
        (credentials.server_certificate, "server.crt"),
        (credentials.server_key, "server.key"),
        (credentials.receipt_key, "receipt.key"),
    ):
        copy(source, root / "server" / name)
    write_operators(root / "server", credentials.directory, federation.operators)
    if federation.operators:
        copy(credentials.directory / SERVICE, root / "server" / SERVICE)
    write_atomically(root / "server/ready", hosts, mode=0o600)
    for silo in federation.silos:
        copy(credentials.ca_certificate, root / "volumes/site" / silo.name / "ca.crt")
        copy(credentials.node_key(silo.name), root / "volumes/site" / silo.name / "node.key")
    parts = split_demo(federation, root / "setup", print)
    for silo in federation.demo_silos:
        copy(parts[silo.name], root / "volumes/data" / silo.name / "data.npz")
    # In a pod the server starts after `setup`, and every hospital has a bundle
    if not federation.silos and not any(credentials.directory.glob("nodes/*.pub")):
        return
    connection = Connection(
        "setup", f"{CONTROL}:{CONTROL_PORT}", str(credentials.ca_certificate)
    )
    with Control(connection, service=True) as control:
        names = [silo.name for silo in federation.silos]
        for name in repeat_call(lambda: renew_shut_out(control, credentials, names)):
            copy(credentials.node_key(name), root / "volumes/site" / name / "node.key")
            print(
                f"{name} was removed and is in the federation file: it has a new key",
                flush=True,
            )
        register_silos(federation, credentials, control)
    print(f"{federation.name}: {len(federation.silos)} silos are registered", flush=True)


def _federation(environment: Mapping[str, str]) -> Federation:
    with tempfile.TemporaryDirectory(prefix="silofl-") as folder:
        path = Path(folder, "federation.yaml")
        path.write_text(environment["SILOFL_FEDERATION"], encoding="utf-8")
        return read_federation(path, check_data=False)


def copy(source: Path, target: Path) -> None:
    """Copy a file atomically with mode 0600, unless the target already has the same content."""
    if target.exists() and target.read_bytes() == source.read_bytes():
        return
    write_atomically(target, lambda temporary: shutil.copyfile(source, temporary), mode=0o600)


def register_silos(federation: Federation, credentials: Credentials, control: Control) -> None:
    """Register every silo's key; unregister and delete the keys of silos that are no longer in the file.

    Silos that joined with a bundle are not affected: their keys are not stored here.
    """
    wanted = {silo.name for silo in federation.silos}
    ours = {
        path.stem: credentials.node_public_pem(path.stem)
        for path in credentials.directory.glob("nodes/*.pub")
    }
    register(control, {key.decode(): name for name, key in ours.items() if name in wanted})
    nodes = {node.public_key: node for node in control.nodes()}
    for name in sorted(ours.keys() - wanted):
        if node := nodes.get(ours[name].strip()):
            control.unregister(node.node_id)
            print(f"{name} is no longer in the federation", flush=True)
        credentials.node_key(name).unlink(missing_ok=True)
        credentials.node_public_key(name).unlink()
