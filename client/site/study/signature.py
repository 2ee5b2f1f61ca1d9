"""The consortium's signature of a study: a table after the protocol, which covers it byte for byte."""

import json

from .. import parsed
from ..parsed import SiteError
from ..trust.envelope import SIGNATURE, STUDY, PrivateKey, add_prefix, body_of, sign, verify


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
