"""How a silo proves to the relay that it has a registered key, before the relay opens anything.

The relay sends 32 random bytes. The silo answers with them in a text that it has signed, as all that is signed
(`client/site/trust/envelope.py`): the signature is valid for this purpose and this connection only.
"""

import json
import secrets
from collections.abc import Container

from client.site.errors import SiteError
from client.site.trust.envelope import LINK, PrivateKey, seal, unseal

NONCE_BYTES = 32
LARGEST_ANSWER = 2048
FRAME_BYTES = 1 << 16  # of gRPC's bytes in one message
# Close codes of the relay.
UNKNOWN_KEY, TOO_MANY, NO_SERVER = 4401, 4429, 4502
READY = "ready"


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def answer(key: PrivateKey, nonce: bytes) -> str:
    """Return the silo's answer to a nonce."""
    return seal(LINK, "proof", {"nonce": nonce.hex()}, key)


def verified(text: object, nonce: bytes, registered: Container[bytes]) -> bytes | None:
    """Return the registered key (PEM) that an answer to the nonce proves; None if it proves none."""
    if not isinstance(text, str) or len(text) > LARGEST_ANSWER:
        return None
    try:
        pem: bytes = json.loads(text)["public-key"].strip().encode()
        if pem not in registered:
            return None
        fields, _ = unseal(LINK, "proof", text)
    except (SiteError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return pem if fields.get("nonce") == nonce.hex() else None
