"""Encryption of a file with a passphrase, in the format age v1 (https://age-encryption.org/v1), recipient scrypt.

So `age --decrypt` opens a backup without silofl. The primitives are those of `cryptography`: scrypt, HKDF and HMAC with
SHA-256, ChaCha20-Poly1305 over chunks of 64 KiB, the last one marked.
"""

import os
from base64 import b64decode, b64encode
from collections.abc import Iterator
from itertools import count
from typing import IO

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.hmac import HMAC
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from partitions.common.errors import DataError

VERSION, MAC = b"age-encryption.org/v1\n", b"---"
CHUNK, TAG = 1 << 16, 16
WORK, MOST_WORK = 18, 20  # log2 of scrypt's N: 256 MiB of memory, and 1 GiB at most
WRONG = "the passphrase is another one, or the file was changed"


def encrypt(source: IO[bytes], target: IO[bytes], passphrase: str) -> None:
    """Write what is left of ``source``, encrypted, to ``target``."""
    file_key, salt, nonce = os.urandom(16), os.urandom(16), os.urandom(16)
    body = _wrapping(passphrase, salt, WORK).encrypt(bytes(12), file_key, None)
    header = VERSION + b"-> scrypt %b %d\n%b\n" % (_text(salt), WORK, _text(body)) + MAC
    target.write(header + b" %b\n" % _text(_mac(file_key, header).finalize()) + nonce)
    cipher = _payload(file_key, nonce)
    for number, chunk in _numbered(source, CHUNK):
        target.write(cipher.encrypt(number, chunk, None))


def decrypt(source: IO[bytes], passphrase: str) -> Iterator[bytes]:
    """Yield the text in chunks, each once it is authentic. Raises DataError: another passphrase, or another file."""
    try:
        yield from _decrypt(source, passphrase)
    except (InvalidTag, InvalidSignature):
        raise DataError(WRONG) from None


def _decrypt(source: IO[bytes], passphrase: str) -> Iterator[bytes]:
    header = b"".join(source.readline(200) for _ in range(3))
    end = source.readline(200)
    try:
        kind, text, work = header.removeprefix(VERSION).splitlines()[0].split()[1:]
        salt, body, mac = (
            _bytes(text),
            _bytes(header.splitlines()[2]),
            _bytes(end.removeprefix(MAC + b" ").strip()),
        )
        if (
            not header.startswith(VERSION)
            or kind != b"scrypt"
            or not 0 < int(work) <= MOST_WORK
        ):
            raise ValueError
    except (ValueError, IndexError):
        raise DataError("it is not encrypted with a passphrase, as age does it") from None
    file_key = _wrapping(passphrase, salt, int(work)).decrypt(bytes(12), body, None)
    _mac(file_key, header + MAC).verify(mac)
    cipher = _payload(file_key, source.read(16))
    for number, chunk in _numbered(source, CHUNK + TAG):
        yield cipher.decrypt(number, chunk, None)


def _wrapping(passphrase: str, salt: bytes, work: int) -> ChaCha20Poly1305:
    key = Scrypt(b"age-encryption.org/v1/scrypt" + salt, 32, n=1 << work, r=8, p=1)
    return ChaCha20Poly1305(key.derive(passphrase.encode()))


def _mac(file_key: bytes, header: bytes) -> HMAC:
    mac = HMAC(HKDF(SHA256(), 32, None, b"header").derive(file_key), SHA256())
    mac.update(header)
    return mac


def _payload(file_key: bytes, nonce: bytes) -> ChaCha20Poly1305:
    return ChaCha20Poly1305(HKDF(SHA256(), 32, nonce, b"payload").derive(file_key))


def _numbered(source: IO[bytes], size: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield the chunks of a file, at least one, each behind its nonce: its number, and whether it is the last."""
    chunk = source.read(size)
    for number in count():
        following = source.read(size)
        yield number.to_bytes(11, "big") + bytes([not following]), chunk
        if not following:
            return
        chunk = following


def _text(data: bytes) -> bytes:
    return b64encode(data).rstrip(b"=")


def _bytes(text: bytes) -> bytes:
    return b64decode(text + b"=" * (-len(text) % 4), validate=True)
