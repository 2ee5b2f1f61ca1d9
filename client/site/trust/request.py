"""A hospital's own key, and its request to join a federation: `silofl request NAME`.

The private key is made here and stays here. The server's operator gets a small JSON file: name, public key, and a
signature over both by that key, which proves that the requester has it. `silofl add-silo --request FILE` checks the
file, registers the key under the name, and makes a bundle without a private key; `silofl join` finds the key.
"""

import base64
import json
import time
from binascii import Error as NoBase64
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from client.site.trust.keys import fingerprint, load_key, new_key, own_key, private_bytes, public_bytes, site_root
from partitions.common.errors import DataError
from partitions.common.files import write_atomically
from partitions.common.names import check_silo_name

KIND = "silofl request 1"
ALGORITHM = ec.ECDSA(hashes.SHA384())
LARGEST = 1 << 16  # bytes; a request is a few hundred


@dataclass(frozen=True)
class Request:
    """A hospital's request: its name, and its public key in PEM."""

    name: str
    public_key: bytes

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.public_key)

    def signed(self, made: str) -> bytes:
        """Return the bytes that are signed."""
        fields = {"kind": KIND, "made": made, "name": self.name, "public-key": self.public_key.decode()}
        return json.dumps(fields, sort_keys=True).encode()


def make_request(name: str, folder: Path | None, out: Path | None) -> tuple[Path, Path, Request]:
    """Make this site's key, unless it exists, and the request; return both paths and the request.

    The key goes to the folder where `silofl join` searches, or as `node.key` into `folder`, for Docker.
    """
    check_silo_name(name)
    file = folder / "node.key" if folder else own_key(site_root() / name)
    out = out or (folder or Path()) / f"{name}.request"
    if not out.absolute().parent.is_dir() and out.parent != folder:
        raise DataError(f"there is no folder {out.parent} to write {out.name} to")
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not file.exists():
        write_atomically(file, private_bytes(new_key()), mode=0o600)
    key = load_key(file)
    request = Request(name, public_bytes(key))
    made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    content = json.loads(request.signed(made))
    content["signature"] = base64.b64encode(key.sign(request.signed(made), ALGORITHM)).decode()
    write_atomically(out, json.dumps(content, indent=1) + "\n", mode=0o600)
    return file, out, request


def read_request(path: Path) -> Request:
    """Return a request signed by its own key. Raises DataError, one line, if the file is none."""
    hint = "`silofl request NAME` at the hospital makes one"
    try:
        if path.stat().st_size > LARGEST:
            raise DataError("too large")
        content = json.loads(path.read_text(encoding="utf-8"))
        request = Request(content["name"], content["public-key"].encode())
        made, signature = str(content["made"]), base64.b64decode(content["signature"], validate=True)
        key = load_pem_public_key(request.public_key)
        if content["kind"] != KIND or not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != "secp384r1":
            raise DataError("another kind")
    except FileNotFoundError:
        raise DataError(f"there is no request {path}: {hint}") from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, NoBase64):
        raise DataError(f"{path} is no request, or is damaged: {hint}") from None
    check_silo_name(request.name)
    try:
        key.verify(signature, request.signed(made), ALGORITHM)
    except InvalidSignature:
        raise DataError(
            f"{path} was changed, or its maker does not have its key: its signature is wrong; {hint}"
        ) from None
    return request
