"""Fingerprints of public keys, for comparison by people and across runs, and a site's node key."""

import base64
import binascii
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_private_key,
)

from partitions.common.errors import UserError
from partitions.common.files import state_home

if TYPE_CHECKING:
    pass


def fingerprint(public_key: bytes) -> str:
    """Return `SHA256:` and the SHA-256 of a public key in PEM, independent of its line endings."""
    body = [line for line in public_key.splitlines() if not line.startswith(b"-----")]
    try:
        content = base64.b64decode(b"".join(body), validate=True)
    except binascii.Error:
        content = public_key
    return f"SHA256:{hashlib.sha256(content).hexdigest()}"


def new_key() -> ec.EllipticCurvePrivateKey:
    """Return a new node key of the kind that Flower accepts."""
    return ec.generate_private_key(ec.SECP384R1())


def private_bytes(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())


def public_bytes(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def load_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Return a node's private key; ValueError if the file is none."""
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}: restore it from a backup, or ask anew") from None
    except ValueError:
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UserError(f"{path} is no private key of a silo: restore it from a backup, or remove it and ask anew")
    return key


def site_root() -> Path:
    """Return the directory with one directory per silo that joined from this machine without Docker."""
    return state_home() / "silofl-site"


def own_key(folder: Path) -> Path:
    """Return the file of the site's own key, in the silo's folder below `site_root()`."""
    return folder / "own.key"
