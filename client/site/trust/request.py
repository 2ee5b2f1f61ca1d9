"""A hospital's own key, and its request to join a federation: `silofl request NAME`.

The private key is made here and stays here. The server's operator gets a small JSON file: name, public key, and a
signature over both by that key, which proves that the requester has it. `silofl add-silo --request FILE` checks the
file, registers the key under the name, and makes a bundle without a private key; `silofl join` finds the key.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from pydantic import Field

from client.site.errors import SiteError
from client.site.trust.chain import utc_now
from client.site.trust.envelope import REQUEST, fingerprint, public_pem, sign, verify
from client.site.trust.keys import load_key, new_key, own_key, site_root, write_key
from partitions.common.errors import DataError
from partitions.common.files import write_atomically
from partitions.common.names import check_silo_name
from partitions.common.parsed import Frozen, parse_json

LARGEST = 1 << 16  # bytes; a request is a few hundred


@dataclass(frozen=True)
class JoinRequest:
    """A hospital's request: its name, and its public key in PEM."""

    name: str
    public_key: bytes

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.public_key)

    def text(self, made: str) -> str:
        """Return the text that is signed; it begins with its kind."""
        fields = {
            "kind": REQUEST,
            "made": made,
            "name": self.name,
            "public-key": self.public_key.decode(),
        }
        return json.dumps(fields, sort_keys=True)


class RequestFile(Frozen):
    """A request as its file has it."""

    kind: Literal["silofl request 1"]
    made: str
    name: str
    public_key: str = Field(alias="public-key")
    signature: str


def make_request(
    name: str, folder: Path | None, out: Path | None
) -> tuple[Path, Path, JoinRequest]:
    """Make this site's key, unless it exists, and the request; return both paths and the request.

    The key goes to the folder where `silofl join` searches, or as `node.key` into `folder`, for Docker.
    """
    check_silo_name(name)
    file = folder / "node.key" if folder else own_key(site_root() / name)
    out = out or (folder or Path()) / f"{name}.request"
    if not out.absolute().parent.is_dir() and out.parent != folder:
        raise DataError(f"there is no folder {out.parent} to write {out.name} to")
    if not file.exists():
        write_key(file, new_key())
    key, made = load_key(file), utc_now()
    request = JoinRequest(name, public_pem(key))
    content = json.loads(request.text(made)) | sign(request.text(made), key)
    write_atomically(out, json.dumps(content, indent=1) + "\n", mode=0o600)
    return file, out, request


def read_request(path: Path) -> JoinRequest:
    """Return a request signed by its own key. Raises DataError, one line, if the file is none."""
    hint = "`silofl request NAME` at the hospital makes one"
    try:
        content = path.read_bytes() if path.stat().st_size <= LARGEST else b""
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}: {hint}") from None
    found = parse_json(RequestFile, content, path, hint)
    request = JoinRequest(found.name, found.public_key.encode())
    check_silo_name(request.name)
    try:
        verify(
            request.text(found.made),
            {"public-key": found.public_key, "signature": found.signature},
        )
        if not isinstance(load_pem_public_key(request.public_key), ec.EllipticCurvePublicKey):
            raise SiteError("its key is of another kind")
    except ValueError as error:
        raise DataError(
            f"{path} was changed, or its maker does not have its key: {error}; {hint}"
        ) from None
    return request
