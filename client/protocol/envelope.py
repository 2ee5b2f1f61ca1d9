"""The one signature of all that is signed: bundles, studies, requests, receipts, records of studies, keys of masks,
proofs of a link.

    {NAME: TEXT, "public-key": KEY, "signature": BASE64}

The text is signed byte for byte behind its kind, so a text of one kind cannot pass for another. It is JSON with its
kind and its time; a study's protocol is TOML. Keys: Ed25519 (consortium, server), ECDSA P-384 with SHA-384 (silos).

Standard library, `cryptography` and relative imports: the process that runs the app loads this file.
"""

import base64
import contextlib
import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_der_public_key,
    load_ssh_private_key,
)

from . import parsed
from .parsed import SiteError

BUNDLE = "silofl bundle 1"
RECEIPT = "silofl receipt 1"
RECORD = "silofl study record 1"
REQUEST = "silofl request 1"
STUDY = "silofl study 1"
SECURE = "silofl secure 1"
LINK = "silofl link 1"
SIGNATURE = "\n[signature]\n"  # start of the signature in a study, after the protocol
ECDSA = ec.ECDSA(hashes.SHA384())
LARGEST = 1 << 26  # bytes of a signed file; the longest are the records of studies
PrivateKey = Ed25519PrivateKey | ec.EllipticCurvePrivateKey


def fingerprint(public_key: bytes | str) -> str:
    """Return `SHA256:` and the SHA-256 of a public key in PEM, independent of its line endings."""
    text = public_key.encode() if isinstance(public_key, str) else public_key
    with contextlib.suppress(ValueError):
        text = _content(text)
    return f"SHA256:{hashlib.sha256(text).hexdigest()}"


# Once: it takes 1 ms of each message
@functools.lru_cache(maxsize=1)
def _parse_node_key(data: bytes) -> Any:
    with contextlib.suppress(ValueError, TypeError, UnsupportedAlgorithm):
        return load_ssh_private_key(data, None)


def load_node_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Return the private key of a silo, in Flower's form (OpenSSH). Raises SiteError, which begins with the path."""
    try:
        key = _parse_node_key(path.read_bytes())
    except OSError as error:
        raise SiteError(f"{path}: {error.strerror}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise SiteError(f"{path} is no private key in Flower's form")
    return key


def public_pem(key: PrivateKey) -> bytes:
    """Return the public half of a key in PEM."""
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def sign(text: str, key: PrivateKey) -> dict[str, str]:
    """Return public key and signature of a text."""
    data = text.encode()
    raw = key.sign(data) if isinstance(key, Ed25519PrivateKey) else key.sign(data, ECDSA)
    signature = base64.b64encode(raw).decode()
    return {"public-key": public_pem(key).decode(), "signature": signature}


def verify(text: str, signed: Mapping[str, Any]) -> str:
    """Return the fingerprint of the key that signed a text. Raises SiteError: "its signature ..."."""
    try:
        public = signed["public-key"].encode()
        key = load_der_public_key(_content(public))
        raw = _content(signed["signature"].encode())
        data = text.encode()
        if isinstance(key, Ed25519PublicKey):
            key.verify(raw, data)
        elif isinstance(key, ec.EllipticCurvePublicKey) and key.curve.name == "secp384r1":
            key.verify(raw, data, ECDSA)
        else:
            raise SiteError("its signature is by another kind of key")
    except InvalidSignature:
        raise SiteError("its signature is wrong") from None
    except SiteError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, UnsupportedAlgorithm) as error:
        raise SiteError(f"its signature is damaged ({type(error).__name__})") from None
    return fingerprint(public)


def seal(
    kind: str, name: str, fields: Mapping[str, Any], key: PrivateKey, indent: int | None = None
) -> str:
    """Return fields as a signed text in JSON; ``name``: of the text in it."""
    text = json.dumps({"kind": kind, **fields})
    return json.dumps({name: text, **sign(add_prefix(kind, text), key)}, indent=indent)


def unseal(kind: str, name: str, content: str | bytes) -> tuple[dict[str, Any], str]:
    """Return the fields of a signed text, and the fingerprint of its signer. Raises SiteError: "it is no NAME"."""
    try:
        if len(content) > LARGEST:
            raise SiteError("too long")
        outer = json.loads(content)
        text = outer[name]
        fields = json.loads(text)
        if fields["kind"] != kind:
            raise SiteError("another kind")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SiteError(f"it is no {name} ({type(error).__name__})") from None
    return fields, verify(add_prefix(kind, text), outer)


def body_of(text: str) -> str:
    """Return the protocol in a file's text, without the signature."""
    body = text.rpartition(SIGNATURE)[0] if SIGNATURE in text else text
    return body.rstrip("\n") + "\n"


def add_prefix(kind: str, text: str) -> str:
    """Return a text as it is signed."""
    return f"{kind}\0{text}"


def _content(text: bytes) -> bytes:
    """Return what a text in PEM, or in base64 alone, holds."""
    body = [line for line in text.splitlines() if not line.startswith(b"-----")]
    return base64.b64decode(b"".join(body), validate=True)


def sign_study(text: str, key: PrivateKey) -> str:
    """Return a protocol's file with this key's signature; an existing signature is replaced."""
    body = body_of(text)
    signed = sign(add_prefix(STUDY, body), key)
    return (
        body
        + SIGNATURE
        + "".join(f"{name} = {json.dumps(value)}\n" for name, value in signed.items())
    )


def signer_of(text: str) -> str:
    """Return the fingerprint of a study's signer; empty if unsigned. Raises SiteError if the signature is wrong."""
    if SIGNATURE not in text:
        return ""
    try:
        return verify(
            add_prefix(STUDY, body_of(text)), parsed.parse_toml(text.rpartition(SIGNATURE)[2])
        )
    except ValueError as error:
        what = error if isinstance(error, SiteError) else "its signature is damaged"
        raise SiteError(
            f"the study was changed after it was signed: {what}; ask for the file again"
        ) from None
