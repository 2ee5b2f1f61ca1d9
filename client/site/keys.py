"""A key's fingerprint, by which two people, or two runs, compare public keys."""

import base64
import binascii
import hashlib


def fingerprint(public_key: bytes) -> str:
    """`SHA256:` and the SHA-256 of a public key in PEM, whatever ends its lines."""
    body = [line for line in public_key.splitlines() if not line.startswith(b"-----")]
    try:
        content = base64.b64decode(b"".join(body), validate=True)
    except binascii.Error:
        content = public_key
    return f"SHA256:{hashlib.sha256(content).hexdigest()}"
