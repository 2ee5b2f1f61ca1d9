"""Bundles of remote silos: `silofl add-silo` and `remove-silo`, while all other silos go on.

The hospital makes its own key and sends a request (`silofl request`); for machines of the same operator the key is made
here. The key is registered through the Control API; the CA does not change. The hospital receives one tar, readable
only by its owner. A tar with a private key must be delivered over a secure channel.
"""

import importlib.metadata
import io
import socket
import ssl
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from client.flower.apps import list_builds
from client.link.connection import split_address
from client.protocol.bundle_files import VALUES, BundleValues, render
from client.protocol.envelope import fingerprint, public_pem
from client.protocol.keys import JoinRequest, new_key, private_bytes
from client.protocol.manifest import SIGNED, image_digests, sign_bundle
from partitions.common.errors import UserError
from partitions.common.files import write_atomically
from partitions.common.names import check_silo_name, unknown_name
from partitions.common.parsed import parse_values
from partitions.schema import NO_SCHEMA, Schema
from server.deploy.compose import FLEET_PORT, image
from server.deploy.control import Control
from server.deploy.federation import Federation
from server.deploy.local.record import find_local, remote_keys, state_root


@dataclass(frozen=True)
class Bundle:
    """Content of a bundle."""

    name: str
    federation: str
    server: str
    ca_certificate: bytes
    node_key: bytes  # empty: only the hospital has it
    allowed_apps: str
    device: str = "cpu"
    image: str = ""
    fingerprint: str = ""  # of the hospital's own key
    signing_key: Ed25519PrivateKey | None = None  # the consortium's
    schema: Schema = NO_SCHEMA  # the federation's, if it declares one

    @property
    def image_name(self) -> str:
        """The image of the hospital's containers."""
        return self.image or image("silo", self.device)

    @property
    def images(self) -> set[str]:
        """The digests of that image, from its name or from Docker on this machine; may be empty."""
        named = self.image_name.partition("@")[2]
        return {named} if named else image_digests(self.image_name)

    def files(self) -> dict[str, str | bytes]:
        """Return the bundle's files by name."""
        values = parse_values(
            BundleValues,
            {
                "silofl": importlib.metadata.version("silofl"),
                "name": self.name,
                "federation": self.federation,
                "server": self.server,
                "device": self.device,
                "image": self.image_name,
                "flwr": importlib.metadata.version("flwr"),
                "fingerprint": self.fingerprint,
            },
            Path(f"the bundle of {self.name}"),
            "give it another value",
        )
        files: dict[str, str | bytes] = {
            **render(values),
            VALUES: values.text,
            "allowed-apps": self.allowed_apps,
            "ca.crt": self.ca_certificate,
        }
        files |= {"node.key": self.node_key} if self.node_key else {}
        files |= {"schema.json": self.schema.text} if self.schema.content else {}
        if self.signing_key:
            content = {name: as_bytes(text) for name, text in files.items()}
            files[SIGNED] = sign_bundle(content, self.signing_key, self.images)
        return files

    def write(self, path: Path) -> None:
        """Write the tar atomically with mode 0600. Raises UserError if the file exists."""
        if path.exists():
            raise UserError(f"{path} is there already: remove it, or give --out another name")
        if not path.absolute().parent.is_dir():
            raise UserError(f"there is no folder {path.parent} to write {path.name} to")
        write_atomically(path, self._archive, mode=0o600)

    def _archive(self, path: Path) -> None:
        with tarfile.open(path, mode="w") as archive:
            folder = tarfile.TarInfo(self.name)
            folder.type = tarfile.DIRTYPE
            folder.mode = 0o700
            folder.mtime = int(time.time())
            archive.addfile(folder)
            for name, content in self.files().items():
                data = as_bytes(content)
                member = tarfile.TarInfo(f"{self.name}/{name}")
                member.size = len(data)
                member.mode = 0o600
                member.mtime = int(time.time())
                archive.addfile(member, io.BytesIO(data))


def as_bytes(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content


def add_silo(
    federation: Federation,
    control: Control,
    name: str,
    out: Path,
    *,
    fleet_port: int,
    app: Path,
    device: str = "cpu",
    image: str = "",
    request: JoinRequest | None = None,
    signing_key: Ed25519PrivateKey | None = None,
) -> Bundle:
    """Register a new silo with the key of its request, or a key made here, and write its bundle to `out`.

    A silo that is registered with its request's key gets a new bundle.

    Raises UserError if the name is taken or invalid, the file exists, or the server's certificate is not valid for the
    address in the bundle.
    """
    known = is_registered(federation, control, name, request)
    if out.exists():
        raise UserError(f"{out} is there already: remove it, or give --out another name")
    ca = Path(control.connection.root_certificates)
    check_address(federation, control.connection.address, ca)
    key = None if request else new_key()
    bundle = Bundle(
        name=name,
        federation=federation.name,
        server=federation.server.reached_at(fleet_port),
        ca_certificate=ca.read_bytes(),
        node_key=private_bytes(key) if key else b"",
        allowed_apps=pins(app),
        device=device,
        image=image,
        fingerprint=request.fingerprint if request else "",
        signing_key=signing_key,
        schema=federation.declared,
    )
    public = public_pem(key) if key else cast(JoinRequest, request).public_key.encode()
    node = None if known else control.register(name, public)
    try:
        bundle.write(out)
        write_atomically(remote_key(federation, name), public)
    except BaseException:
        if node is not None:
            control.unregister(node)
        raise
    return bundle


def is_registered(
    federation: Federation, control: Control, name: str, request: JoinRequest | None
) -> bool:
    """Return whether the silo is registered with its request's key. Raises UserError if another one has name or key."""
    check_silo_name(name)
    if any(silo.name == name for silo in federation.silos):
        raise UserError(
            f"{name} is a silo of {federation.path} already; a bundle is for another one"
        )
    for node in control.nodes():
        same_key = request and fingerprint(node.public_key) == request.fingerprint
        if node.name == name and same_key:
            return True
        if node.name == name:
            raise UserError(
                f"{name} is registered already, with another key: choose another name, or `silofl remove-silo {name}` "
                "first"
            )
        if same_key:
            raise UserError(
                f"this key is registered already, as {node.name}: one key per silo, so ask with a new one"
            )
    return False


def signing_key_file(federation: Federation) -> Path:
    """Return the default path of the consortium's signing key."""
    return state_root() / federation.name / "signing.key"


def remote_key(federation: Federation, name: str) -> Path:
    """Return the path of a bundled silo's public key, which `silofl up` registers again after a restart."""
    return remote_keys(state_root() / federation.name) / f"{name}.pem"


def fleet_port(federation: Federation) -> int:
    """Return the port for silos: from the file, from the running processes, or the containers' default."""
    if federation.server.fleet_port:
        return federation.server.fleet_port
    try:
        return find_local(federation.name).fleet_port
    except ValueError:
        return FLEET_PORT


def check_address(federation: Federation, control_address: str, ca_certificate: Path) -> None:
    """Raise UserError if the running server's certificate is not valid for the host in bundles."""
    host, port, _ = split_address(control_address)
    address = federation.server.public_host
    key = "public" if federation.server.public else "address"
    context = ssl.create_default_context(cafile=str(ca_certificate))
    try:
        with (
            socket.create_connection((host, port), timeout=5.0) as plain,
            context.wrap_socket(plain, server_hostname=address),
        ):
            pass
    except ssl.SSLCertVerificationError:
        raise UserError(
            f"the server's certificate is not for {address} (server.{key} in {federation.path}): "
            "bring the federation up again with this file, then add the silo"
        ) from None


def pins(app: Path) -> str:
    """Return the bundle's `allowed-apps`: the SHA-256 of the app that `flwr run` would send now."""
    return list_builds(app, f"silofl {importlib.metadata.version('silofl')}")


def remove_silo(federation: Federation, control: Control, name: str) -> str:
    """Unregister a silo: its key is refused from its next call on. Return what remains to be done, or "".

    Raises UserError if no such silo is registered.
    """
    nodes = [node for node in control.nodes() if node.name == name]
    if not nodes:
        raise unknown_name("silo", name, (node.name for node in control.nodes()))
    for node in nodes:
        control.unregister(node.node_id)
    remote_key(federation, name).unlink(missing_ok=True)
    if any(silo.name == name for silo in federation.silos):
        return f"{name} still stands in {federation.path} and would be registered again: remove it there too"
    return ""
