"""How a silo proves to the relay that it has a registered key, before the relay opens anything.

The relay sends 32 random bytes. The silo answers with them in a text that it has signed, as all that is signed
(`client/protocol/envelope.py`): the signature is valid for this purpose and this connection only.
"""

import json
import secrets
from collections.abc import Container

from client.protocol.envelope import LINK, PrivateKey, seal, unseal
from client.protocol.parsed import SiteError

NONCE_BYTES = 32
LARGEST_ANSWER = 2048
FRAME_BYTES = 1 << 16  # of gRPC's bytes in one message
POST_BYTES = 1 << 19  # and in one POST
# Close codes of the relay; the last one only of POSTs
UNKNOWN_KEY, TOO_MANY, NO_SERVER, NO_LINK = 4401, 4429, 4502, 4410
READY = b"ready"
# POSTs: the length of a session's token, the directions, the code of an open session
TOKEN_BYTES = 32
UP, DOWN = b"U", b"D"
HEAD_BYTES = TOKEN_BYTES + 9
OPEN = 0


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def prove(key: PrivateKey, nonce: bytes) -> bytes:
    """Return the silo's answer to a nonce."""
    return seal(LINK, "proof", {"nonce": nonce.hex()}, key).encode()


def proven_key(proof: object, nonce: bytes, registered: Container[bytes]) -> bytes | None:
    """Return the registered key (PEM) that an answer to the nonce proves; None if it proves none."""
    if not isinstance(proof, bytes) or len(proof) > LARGEST_ANSWER:
        return None
    try:
        text = proof.decode()
        pem: bytes = json.loads(text)["public-key"].strip().encode()
        if pem not in registered:
            return None
        fields, _ = unseal(LINK, "proof", text)
    except (SiteError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return pem if fields.get("nonce") == nonce.hex() else None


# --- POSTs ------------------------------------------------------------------------------------------------


def write_post(token: bytes, direction: bytes, number: int, data: bytes) -> bytes:
    """Return the body of a POST."""
    return token + direction + number.to_bytes(8) + data


def read_post(body: bytes) -> tuple[bytes, bytes, int, bytes]:
    """Return token, direction, number and data of a body; what is missing is empty, or 0."""
    token, direction = body[:TOKEN_BYTES], body[TOKEN_BYTES : TOKEN_BYTES + 1]
    return (
        token,
        direction,
        int.from_bytes(body[TOKEN_BYTES + 1 : HEAD_BYTES]),
        body[HEAD_BYTES:],
    )


def answer_of(code: int, data: bytes) -> bytes:
    """Return the body of the answer to a POST."""
    return code.to_bytes(2) + data


def read_posted_answer(body: bytes) -> tuple[int, bytes]:
    """Return code and data of an answer. Raises OSError if it is no relay's."""
    if not 2 <= len(body) <= POST_BYTES + 2:
        raise OSError("the answer is none of a relay")
    return int.from_bytes(body[:2]), body[2:]
