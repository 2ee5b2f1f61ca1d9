"""Masks of one slot (run, round, attempt): streams of ChaCha20 that cancel in the sum.

A seed depends on all that the silos of a slot must agree on (:func:`context`). If the server sends one of them another
model, list, weight or setting, its masks do not cancel: the sum is noise, and nothing leaks.
"""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from ..chain import canonical, digest
from ..receipts import ASKED
from . import COUNTED, OWN, SHARE
from .statements import Statement, agree, digest_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# NumPy is imported with the first mask: the gate of other runs needs none
Vector: TypeAlias = "NDArray[np.uint32]"
# In a message's config, what may differ between silos: the weight is compared with the list, others change no step
PER_SILO = {ASKED, SHARE, "reported", "state_lost"}
# These the gate takes out; those of its own record it puts in
NOT_FOR_APP = {OWN, COUNTED, "attended"}
PART = 1 << 18  # bytes of a stream made at once


# --- what the silos of a slot must agree on ---------------------------------------------------------------------------


def received_sha256(arrays: Iterable[tuple[Any, ...]], config: Mapping[str, Any]) -> str:
    """Return two sums of a train message: of its arrays, and after a colon of its config.

    ``arrays``: record, key, type, shape, form and SHA-256 of each, as `client/flower/messages.py` has them. All numbers
    count with which a method trains: a server could make all steps but one small by them.
    """
    sums = [(*array[:4], array[5]) for array in sorted(arrays)]
    common = {key: config[key] for key in config.keys() - PER_SILO - NOT_FOR_APP}
    return f"{digest(canonical({'arrays': sums}))}:{digest(canonical(common))}"


def context(
    received: str,
    run_config: Mapping[str, Any],
    weights: Mapping[str, int],
    listed: Mapping[str, Statement],
    sums: Sequence[str] = (),
) -> bytes:
    """Return the SHA-256 of all that a slot's silos agree on. ``weights``: of its list, whose statements have the slot.

    ``sums``: the run's sums so far, each its own SHA-256 of this kind and the silos in it.
    """
    agreed = {"received": received, "settings": {**run_config}, "weights": weights}
    agreed |= {"list": digest_of(listed), "sums": [*sums]}
    return bytes.fromhex(digest(canonical(agreed)))


# --- seeds and streams ------------------------------------------------------------------------------------------------


def derive(secret: bytes, info: bytes) -> bytes:
    """Return 32 bytes that HKDF derives from a secret for one purpose."""
    return HKDF(SHA256(), 32, None, info).derive(secret)


def public_of(private: bytes) -> str:
    """Return the public half of an X25519 key, in hexadecimal."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw().hex()


def self_seed(secret: bytes, context: bytes) -> bytes:
    """Return the seed of a silo's self mask."""
    return derive(secret, b"silofl self mask 1" + context)


def pair_seed(private: bytes, public: str, context: bytes) -> bytes:
    """Return the seed of the mask that two silos share, one adds and the other subtracts."""
    return derive(agree(private, public), b"silofl pair mask 1" + context)


def pair_seeds(
    silo: str, private: bytes, statements: Iterable[Statement], context: bytes
) -> list[tuple[int, bytes]]:
    """Return the seeds of the masks that a silo shares with others, each with 1 where it adds the mask, else -1."""
    return [
        (1 if silo < statement.silo else -1, pair_seed(private, statement.mask, context))
        for statement in statements
        if statement.silo != silo
    ]


def add(vector: Vector, seeds: Iterable[tuple[int, bytes]]) -> None:
    """Add (1) or subtract (-1) the streams of seeds, modulo 2^32, to the vector itself."""
    import numpy as np

    zeros = memoryview(bytes(PART))
    # A part of a stream stays in the processor's cache
    buffer = bytearray(PART)
    stream = np.frombuffer(buffer, "<u4")
    for sign, seed in seeds:
        change = np.add if sign > 0 else np.subtract
        cipher = Cipher(ChaCha20(seed, bytes(16)), None).encryptor()
        for part in np.split(vector, range(PART // 4, vector.size, PART // 4)):
            cipher.update_into(zeros[: part.nbytes], buffer)
            change(part, stream[: part.size], out=part)


# --- shares under way -------------------------------------------------------------------------------------------------


def sealing_key(shared: bytes, slot: str, sender: str, holder: str) -> bytes:
    """Return the key that seals the shares of one silo for another, once. ``slot``: of the secrets."""
    return derive(shared, f"silofl share 1\0{slot}\0{sender}\0{holder}".encode())


def new_secrets() -> dict[str, Any]:
    """Return what a slot begins with: the self mask's secret, the key of pair masks, the key to seal shares with."""
    return {of: secrets.token_bytes(32) for of in ("b", "s", "seal")}
