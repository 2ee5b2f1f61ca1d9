"""The apps that a site runs: the SHA-256 sums of `SILOFL_ALLOWED_APPS`, a file of them or a list.

A sum is over the app's content (`content_sum`), because two machines may compress the same app differently. A list may
also have the SHA-256 of a file as shipped.
"""

import functools
import hashlib
import io
import os
import sys
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path


class AppRefusedError(Exception):
    """The app's SHA-256 is not among those this site allows."""


LARGEST = 1 << 26  # bytes of an unpacked app; ours has a hundredth of that


def check_pin(digest: str, app: bytes = b"") -> None:
    """Raise AppRefusedError unless the app with SHA-256 `digest` is allowed at this site (`SILOFL_ALLOWED_APPS`)."""
    pins = os.environ.get("SILOFL_ALLOWED_APPS", "")
    if not pins:
        return
    try:
        allowed = set(read_pins(pins))
    except OSError as error:
        raise log_refusal(
            f"app {content_sum(app) or digest} refused: cannot read the allowed apps: {error}"
        ) from None
    if not any(one in allowed for one in sums_of(digest, app)):
        where = "SILOFL_ALLOWED_APPS" if is_sums(pins) else pins
        its = content_sum(app) or digest
        raise log_refusal(
            f"app {its} refused: its SHA-256 is not among the {len(allowed)} listed in {where}"
        )


@functools.lru_cache(maxsize=2)
def content_sum(app: bytes) -> str:
    """Return the SHA-256 over names and SHA-256 of all files in an app, ordered by name; empty if it is no app."""
    try:
        with zipfile.ZipFile(io.BytesIO(app)) as archive:
            infos = sorted(archive.infolist(), key=lambda info: info.filename)
            names = [info.filename for info in infos]
            if len({*names}) < len(names) or sum(info.file_size for info in infos) > LARGEST:
                return ""
            sums = [
                f"{hashlib.sha256(archive.read(info)).hexdigest()}  {info.filename!r}\n"
                for info in infos
            ]
    except (
        zipfile.BadZipFile,
        OSError,
        RuntimeError,
        NotImplementedError,
        EOFError,
        ValueError,
        zlib.error,
    ):
        return ""
    return hashlib.sha256("".join(sums).encode("utf-8", "surrogateescape")).hexdigest()


def sums_of(digest: str, app: bytes) -> Iterator[str]:
    """Yield the sums by which a list may identify an app; the second takes 10 ms and is computed on demand."""
    yield digest
    yield content_sum(app)


def log_refusal(line: str) -> AppRefusedError:
    """Log the line and return the error with it."""
    print(f"ERROR: {line}", file=sys.stderr, flush=True)
    return AppRefusedError(line)


def is_sums(pins: str) -> bool:
    """Return whether a value of `SILOFL_ALLOWED_APPS` is a list of sums, and not a file name."""
    return all(
        len(part) == 64 and not set(part) - set("0123456789abcdef") for part in split(pins)
    )


def split(text: str) -> list[str]:
    """Return the words of a text, in lower case, separated by commas or white space."""
    return text.replace(",", " ").lower().split()


def read_pins(pins: str) -> Iterator[str]:
    """Yield the SHA-256 sums of `SILOFL_ALLOWED_APPS`; a file has one per line, `#` starts a comment."""
    if is_sums(pins):
        yield from split(pins)
        return
    for line in Path(pins).expanduser().read_text(encoding="utf-8").splitlines():
        # `sha256sum` writes the file's name after the sum
        yield from split(line.partition("#")[0])[:1]
