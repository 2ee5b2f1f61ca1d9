"""How a silo proves to the relay that it has a registered key, before the relay opens anything.

The relay sends 32 random bytes. The silo answers with its public key and a signature over them, which is valid for this
purpose and this connection only.
"""

import base64
import binascii
import json
import secrets
from collections.abc import Container

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ec import (
    ECDSA,
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
)
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_public_key,
)

PURPOSE = b"silofl link 1\n"  # no other signature of this key begins so
NONCE_BYTES = 32
LARGEST_ANSWER = 2048
FRAME_BYTES = 1 << 16  # of gRPC's bytes in one message
LARGEST_FRAME = FRAME_BYTES
# Close codes of the relay.
UNKNOWN_KEY, TOO_MANY, NO_SERVER = 4401, 4429, 4502
READY = "ready"


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def public_key(key: EllipticCurvePrivateKey) -> bytes:
    """Return the public key as it is registered at the server: PEM."""
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def answer(key: EllipticCurvePrivateKey, nonce: bytes) -> str:
    """Return the silo's answer to a nonce."""
    signature = key.sign(PURPOSE + nonce, ECDSA(SHA256()))
    return json.dumps(
        {"key": public_key(key).decode(), "signature": base64.b64encode(signature).decode()}
    )


def verified(text: object, nonce: bytes, registered: Container[bytes]) -> bytes | None:
    """Return the registered key that an answer to the nonce proves; None if it proves none."""
    if not isinstance(text, str) or len(text) > LARGEST_ANSWER:
        return None
    try:
        found = json.loads(text)
        pem: bytes = found["key"].strip().encode()
        signature = base64.b64decode(found["signature"], validate=True)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, binascii.Error):
        return None
    if pem not in registered:
        return None
    key = load_pem_public_key(pem)
    assert isinstance(key, EllipticCurvePublicKey)
    try:
        key.verify(signature, PURPOSE + nonce, ECDSA(SHA256()))
    except InvalidSignature:
        return None
    return pem
