"""Finding, downloading and caching the files of public data sets."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from partitions.common.errors import DataError
from partitions.splits import Array

TIMEOUT = 30  # seconds without a byte before a download fails


@dataclass(frozen=True)
class RemoteFile:
    """A public file: its name, its address, and its published MD5."""

    name: str
    url: str
    md5: str


def cache_dir() -> Path:
    """Return ``$XDG_CACHE_HOME/silofl``, by default ``~/.cache/silofl``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "silofl"


def named_folder(folder: str) -> Path:
    """Return the folder of data-dir or SILOFL_DATA. Raises DataError where it is missing; no other is used instead."""
    path = Path(folder).expanduser()
    if not path.is_dir():
        what = "SILOFL_DATA" if folder == os.environ.get("SILOFL_DATA") else "data-dir"
        raise DataError(
            f"{what} = {folder}: there is no such folder; make it, or name the one where data sets lie"
        )
    return path


def places(data_dir: str, sub_folders: Sequence[str]) -> list[Path]:
    """Return the folders to search: of data-dir, SILOFL_DATA and our cache the sub-folders, then the folder itself."""
    bases = [
        named_folder(folder)
        for folder in (data_dir, os.environ.get("SILOFL_DATA", ""))
        if folder
    ]
    return [
        folder
        for base in (*bases, cache_dir())
        for folder in (*(base / sub for sub in sub_folders), base)
    ]


def find(names: Sequence[str], folders: Sequence[Path]) -> Path | None:
    """Return the first of these files (in order of folders, then of names) that exists, or None."""
    return next(
        (folder / name for folder in folders for name in names if (folder / name).is_file()),
        None,
    )


def found_or_downloaded(
    dataset: str, file: RemoteFile, data_dir: str, sub_folders: Sequence[str]
) -> Path:
    """Return the file from the folders of :func:`places`, or else download it into the first of ``sub_folders``."""
    return find([file.name], places(data_dir, sub_folders)) or download(
        dataset, file, data_dir, sub_folders[0]
    )


def md5_of(path: Path) -> str:
    """Return a file's MD5 in hexadecimal; it identifies published files, and is no protection."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def download(dataset: str, file: RemoteFile, data_dir: str, sub_folder: str) -> Path:
    """Download a file with a progress bar into data-dir (or our cache) and check its MD5.

    It is written under a temporary name and renamed, so that an interrupted download leaves nothing behind.

    Raises DataError, naming the file and its folder, where it cannot be downloaded or is not the published one.
    """
    folder = (Path(data_dir).expanduser() if data_dir else cache_dir()) / sub_folder
    advice = f"put {file.name} into {folder}, or name its folder with data-dir or SILOFL_DATA"
    temporary: str | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (
            urllib.request.urlopen(file.url, timeout=TIMEOUT) as reply,
            tempfile.NamedTemporaryFile(dir=folder, suffix=".part", delete=False) as out,
        ):
            temporary = out.name
            total = int(reply.headers.get("Content-Length") or 0) or None
            with tqdm.wrapattr(reply, "read", total=total, desc=file.name, unit="B") as source:
                shutil.copyfileobj(source, out, 1 << 20)
        found = md5_of(Path(temporary))
        if found != file.md5:
            raise DataError(
                f"{dataset}: {file.url} gave a file with MD5 {found} instead of {file.md5}; try again, or {advice}"
            )
        Path(temporary).chmod(0o644)
        os.replace(temporary, folder / file.name)
        return folder / file.name
    except OSError as error:  # URLError, timeouts and an unwritable folder alike
        reason = getattr(error, "reason", error)
        raise DataError(
            f"{dataset}: {file.name} is not on this machine and could not be downloaded from {file.url} "
            f"({reason}); {advice}"
        ) from error
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def decode_once(
    name: str, sources: Sequence[Path], decode: Callable[[], Mapping[str, Array]]
) -> dict[str, Array]:
    """Decode slow files once; later calls map the decoded arrays from our cache, shared between processes.

    Where the cache cannot be written, the arrays stay in memory.
    """
    arrays: dict[str, Array] = {}

    def fill(folder: Path) -> None:
        for array_name, array in arrays.items():
            np.save(folder / f"{array_name}.npy", array, allow_pickle=False)

    if not cache_entry(name, sources).is_dir():
        arrays.update(decode())
    folder = cached_folder(name, sources, fill)
    if folder is None:
        return arrays
    return {
        path.stem: np.load(path, mmap_mode="r", allow_pickle=False)
        for path in folder.glob("*.npy")
    }


def cache_entry(name: str, sources: Sequence[Path]) -> Path:
    """Return the cache folder for the arrays decoded from these files; its key is their names and sizes."""
    key = hashlib.sha256(
        "\n".join(f"{p.name} {p.stat().st_size}" for p in sources).encode()
    ).hexdigest()[:16]
    return cache_dir() / "decoded" / f"{name}-{key}"


def cached_folder(
    name: str, sources: Sequence[Path], fill: Callable[[Path], object]
) -> Path | None:
    """Return :func:`cache_entry`, written by ``fill`` where it does not exist; None where it cannot be written."""
    folder = cache_entry(name, sources)
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=folder.parent))
    except OSError:
        return None
    try:
        fill(temporary)
        temporary.rename(folder)
    except OSError:  # no space, or another process was first
        return folder if folder.is_dir() else None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def require(
    dataset: str, names: Sequence[str], sub_folders: Sequence[str], data_dir: str, whence: str
) -> Path:
    """Return the first of these files or folders that exists; none is downloaded. ``whence``: its source, for messages.

    Raises DataError, one line, where none exists.
    """
    folders = places(data_dir, sub_folders)
    for folder in folders:
        for name in names:
            if (folder / name).exists():
                return folder / name
    raise DataError(
        f"{dataset}: there is no {' or '.join(names)}; {whence}, and put it into {folders[0]}, or name its folder with "
        "data-dir or SILOFL_DATA"
    )


def remark(dataset: str, line: str) -> None:
    """Log a warning in Flower's log that readers of results need for this data set."""
    logging.getLogger("flwr").warning("%s: %s", dataset, line)
