"""What the code that may run at a site is known by: the sums of apps, and of what a run names as MODULE:FUNCTION.

A sum of an app is over its content (`content_sum`), because two machines may compress the same app differently. The
source of MODULE:FUNCTION is found without running it.
"""

import functools
import hashlib
import io
import zipfile
import zlib
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from .ours import source_sum

LARGEST = 1 << 26  # bytes of an unpacked app; ours has a hundredth of that


@functools.lru_cache(maxsize=2)
def sha256_of(app: bytes) -> str:
    """Return the SHA-256 of an app, 3 MB that each message of its run has."""
    return hashlib.sha256(app).hexdigest()


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


def file_of(name: str) -> Path | None:
    """Return the file that defines MODULE of MODULE:FUNCTION; None where this machine has none."""
    file: Path | None = None
    search: Sequence[str] | None = None
    parts = name.partition(":")[0].split(".")
    for i in range(len(parts)):
        spec = PathFinder.find_spec(".".join(parts[: i + 1]), search)
        if spec is None:
            return None
        search = spec.submodule_search_locations
        file = None
        if spec.origin:
            file = Path(spec.origin)
    return file


def digest_of_code(name: str) -> str:
    """Return the SHA-256 of the source of MODULE (`partitions/common/source_sum.py`); empty where there is none."""
    file = file_of(name)
    if file is None:
        return ""
    return source_sum.source_sum(name.partition(":")[0], file)


def code_of_data(path: Path) -> str:
    """Return the SHA-256 of an own data set's source, as its index file has it (`partitions/own`); empty: no index."""
    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as file:
            return str(file["code"].item())
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile):
        return ""
