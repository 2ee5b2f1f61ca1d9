"""Private keys in files: a silo's node key, and the key that signs for a consortium or a server.

A hospital makes its own key, and asks to join a federation, by `silofl request NAME`. The private key stays there. The
server's operator gets a small JSON file: name, public key, and a signature over both by that key, which proves that the
requester has it. `silofl add-silo --request FILE` checks the file, registers the key under the name, and makes a bundle
without a private key; `silofl join` finds the key.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
    load_pem_public_key,
)
from pydantic import Field

from .chain import utc_now
from .envelope import REQUEST, PrivateKey, fingerprint, load_node_key, public_pem, sign, verify
from .ours import errors, files, names, parsed
from .parsed import Frozen, SiteError


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
    files.make_folder(path.parent, 0o700)
    files.write_atomically(path, private_bytes(key), mode=0o600)


def make_key(path: Path, new: Callable[[], PrivateKey]) -> None:
    """Write a new private key, unless the file is there, or another process makes it meanwhile."""
    if not path.exists():
        files.make_folder(path.parent, 0o700)
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        write_key(beside, new())
        try:
            os.link(beside, path)
        except FileExistsError:
            pass
        except OSError:  # a file system without second names, such as a stick's
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)


def load_key(path: Path, anew: str = "ask anew") -> ec.EllipticCurvePrivateKey:
    """Return a private key in Flower's form. Raises UserError, one line, if the file is none.

    ``anew``: what gives another key, once the file is removed.
    """
    try:
        return load_node_key(path)
    except SiteError as error:
        anew = f"remove it and {anew}" if path.exists() else anew
        raise errors.UserError(f"{error}: restore it from a backup, or {anew}") from None


def load_signing_key(path: Path) -> Ed25519PrivateKey:
    """Return the private key that signs. Raises DataError, one line, if the file is none."""
    try:
        key = load_pem_private_key(path.read_bytes(), None)
    except OSError as error:
        raise errors.DataError(
            f"{path}: {error.strerror}; `silofl signing-key` makes one"
        ) from None
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise errors.DataError(
            f"{path} is no signing key: name another file, restore it from a backup, or move it away, and then "
            "`silofl signing-key` makes one"
        )
    return key


def make_signing_key(path: Path) -> Ed25519PrivateKey:
    """Return the key of this file; a missing one is made."""
    make_key(path, Ed25519PrivateKey.generate)
    return load_signing_key(path)


def site_root() -> Path:
    """Return the directory with one directory per silo that joined from this machine without Docker."""
    return files.state_home() / "silofl-site"


def own_key(folder: Path) -> Path:
    """Return the file of the site's own key, in the silo's folder below `site_root()`."""
    return folder / "own.key"


# --- the request to join ---


LARGEST = 1 << 16  # bytes; a request is a few hundred


class JoinRequest(Frozen):
    """A hospital's request as its file has it: name and public key, in PEM, signed with that key."""

    kind: Literal["silofl request 1"]
    made: str
    name: str
    public_key: str = Field(alias="public-key")
    signature: str

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.public_key)

    @property
    def signed_text(self) -> str:
        """The text that is signed; it begins with its kind."""
        return json.dumps(self.model_dump(by_alias=True, exclude={"signature"}), sort_keys=True)


def make_request(
    name: str, folder: Path | None, out: Path | None
) -> tuple[Path, Path, JoinRequest]:
    """Make this site's key, unless it exists, and the request; return both paths and the request.

    The key goes to the folder where `silofl join` searches, or as `node.key` into `folder`, for Docker.
    """
    names.check_silo_name(name)
    file = folder / "node.key" if folder else own_key(site_root() / name)
    out = out or (folder or Path()) / f"{name}.request"
    if not out.absolute().parent.is_dir() and out.parent != folder:
        raise errors.DataError(f"there is no folder {out.parent} to write {out.name} to")
    make_key(file, new_key)
    key = load_key(file)
    fields = {"kind": REQUEST, "made": utc_now(), "name": name}
    fields["public-key"] = public_pem(key).decode()
    content = fields | sign(json.dumps(fields, sort_keys=True), key)
    files.write_atomically(out, json.dumps(content, indent=1) + "\n", mode=0o600)
    return file, out, JoinRequest.model_validate(content)


def read_request(path: Path) -> JoinRequest:
    """Return a request signed by its own key. Raises DataError, one line, if the file is none."""
    hint = "`silofl request NAME` at the hospital makes one"
    try:
        content = path.read_bytes() if path.stat().st_size <= LARGEST else b""
    except OSError as error:
        raise errors.DataError(f"{path}: {error.strerror}: {hint}") from None
    request = parsed.parse_values(JoinRequest, content, path, hint)
    names.check_silo_name(request.name)
    try:
        verify(request.signed_text, request.model_dump(by_alias=True))
        key = load_pem_public_key(request.public_key.encode())
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise SiteError("its key is of another kind")
    except ValueError as error:
        raise errors.DataError(
            f"{path} was changed, or its maker does not have its key: {error}; {hint}"
        ) from None
    return request
