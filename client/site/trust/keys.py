"""Private keys in files: a silo's node key, and the key that signs for a consortium or a server."""

from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
    load_ssh_private_key,
)

from client.site.trust.envelope import PrivateKey
from partitions.common.errors import DataError, UserError
from partitions.common.files import state_home, write_atomically


def new_key() -> ec.EllipticCurvePrivateKey:
    """Return a new node key of the kind that Flower accepts."""
    return ec.generate_private_key(ec.SECP384R1())


def private_bytes(key: PrivateKey) -> bytes:
    """Return a private key as its file has it: in Flower's form for a node key."""
    kind = (
        PrivateFormat.OpenSSH
        if isinstance(key, ec.EllipticCurvePrivateKey)
        else PrivateFormat.PKCS8
    )
    return key.private_bytes(Encoding.PEM, kind, NoEncryption())


def write_key(path: Path, key: PrivateKey) -> None:
    """Write a private key that other users cannot read, not even during the write."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_atomically(path, private_bytes(key), mode=0o600)


def load_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Return a node's private key. Raises UserError, one line, if the file is none."""
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror}: restore it from a backup, or ask anew"
        ) from None
    except ValueError:
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UserError(
            f"{path} is no private key of a silo: restore it from a backup, or remove it and ask anew"
        )
    return key


def load_signing_key(path: Path) -> Ed25519PrivateKey:
    """Return the private key that signs. Raises DataError, one line, if the file is none."""
    try:
        key = load_pem_private_key(path.read_bytes(), None)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; `silofl signing-key` makes one") from None
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise DataError(f"{path} is no signing key; `silofl signing-key` makes one")
    return key


def make_signing_key(path: Path) -> Ed25519PrivateKey:
    """Return the key of this file; a missing one is made."""
    if not path.exists():
        write_key(path, Ed25519PrivateKey.generate())
    return load_signing_key(path)


def site_root() -> Path:
    """Return the directory with one directory per silo that joined from this machine without Docker."""
    return state_home() / "silofl-site"


def own_key(folder: Path) -> Path:
    """Return the file of the site's own key, in the silo's folder below `site_root()`."""
    return folder / "own.key"
