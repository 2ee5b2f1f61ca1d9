"""The consortium's signature over a study's protocol: Ed25519, with the key that signs its bundles.

    [signature]
    public-key = "PEM"
    signature = "BASE64"

It follows the protocol in the same file, and covers the protocol byte for byte, up to the empty line before it.
"""

import base64
import json
import tomllib
from binascii import Error as NoBase64

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from client.site.study.protocol import KIND, SIGNATURE, body_of
from client.site.trust.keys import fingerprint
from client.site.trust.signing import public_pem
from partitions.common.errors import DataError


def signed(text: str, key: Ed25519PrivateKey) -> str:
    """Return a protocol's file with this key's signature; an existing signature is replaced."""
    body = body_of(text)
    signature = base64.b64encode(key.sign(_message(body))).decode()
    table = {"public-key": public_pem(key).decode(), "signature": signature}
    return body + SIGNATURE + "".join(f"{name} = {json.dumps(value)}\n" for name, value in table.items())


def signer_of(text: str) -> str:
    """Return the fingerprint of a study's signer; empty if unsigned. Raises DataError if the signature is wrong."""
    if SIGNATURE not in text:
        return ""
    try:
        table = tomllib.loads(text.rpartition(SIGNATURE)[2])
        pem = str(table["public-key"]).encode()
        key = load_pem_public_key(pem)
        if not isinstance(key, Ed25519PublicKey):
            raise DataError("the study's signature is by another kind of key; ask for the file again")
        key.verify(base64.b64decode(str(table["signature"]), validate=True), _message(body_of(text)))
    except InvalidSignature:
        raise DataError("the study was changed after it was signed; ask for the file again") from None
    except (KeyError, TypeError, NoBase64) as error:
        raise DataError(f"the study's signature is damaged ({type(error).__name__}); ask for the file again") from None
    except ValueError as error:
        if isinstance(error, DataError):
            raise
        raise DataError("the study's signature is damaged; ask for the file again") from None
    return fingerprint(pem)


def _message(body: str) -> bytes:
    """Return the bytes to sign; their prefix keeps other kinds of text from passing as a study."""
    return f"{KIND}\0{body}".encode()
