"""Finding, downloading, reading and caching the files of public data sets."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from partitions.common.errors import DataError
from partitions.splits import Array, Arrays, Dataset, Split, split_table

TIMEOUT = 30  # seconds without a byte before a download fails


@dataclass(frozen=True)
class Description:
    """One entry of ``sets.toml``, which explains its keys."""

    title: str
    classes: int
    load: str
    task: str = "multiclass"
    folders: Sequence[str] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    url: str = ""
    whence: str = ""
    mend: str = "replace or delete it"
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Source:
    """A public data set that is to be loaded: its name, data-dir and description."""

    name: str
    data_dir: str
    described: Description

    @property
    def about(self) -> Mapping[str, Any]:
        """What only this set's loader knows."""
        return self.described.about

    @property
    def folders(self) -> list[Path]:
        """The folders in which its files are looked for."""
        return places(self.data_dir, self.described.folders)

    def fault(self, text: str) -> DataError:
        """Return an error that names the data set."""
        return DataError(f"{self.name}: {text}")

    def find(self, *names: str) -> Path | None:
        """Return the first of these files or folders (in order of folders, then of names) that exists, or None."""
        paths = (folder / name for folder in self.folders for name in names)
        return next((path for path in paths if path.exists()), None)

    def fetch(self, file: str, *others: str) -> Path:
        """Return the file, or the first of ``others`` beside it; where none exists, it is downloaded."""
        return self.find(file.rpartition("/")[2], *others) or self.download(file)

    def download(self, file: str, key: str = "") -> Path:
        """Download one of its files; ``key``: its name among ``files``, if it has another one there."""
        own = self.described
        return download(
            self.name, own.url + file, own.files[key or file], self.data_dir, own.folders[0]
        )

    def require(self, *names: str) -> Path:
        """Return :meth:`find`; none is downloaded. Raises DataError, one line, where none exists."""
        if found := self.find(*names):
            return found
        raise self.fault(
            f"there is no {' or '.join(names)}; {self.described.whence}, and put it into {self.folders[0]}, or name "
            "its folder with data-dir or SILOFL_DATA"
        )

    @contextmanager
    def reading(self, place: object) -> Iterator[None]:
        """Context that names the file, or a line in it, in errors of reading. Raises DataError."""
        try:
            yield
        except MemoryError:
            raise
        except Exception as error:  # whatever the reader of a damaged file raises
            raise self.fault(
                f"{place} cannot be read ({error}); {self.described.mend}"
            ) from error

    def once(self, files: Sequence[Path], decode: Callable[[], Arrays]) -> Arrays:
        """Decode files once (:func:`decode_once`)."""
        return decode_once(self.name, files, decode)

    def in_parts(self, train: Split, test: Split, **more: Any) -> Dataset:
        """Return a data set with its own training and test samples."""
        own = self.described
        return Dataset(self.name, train, test, own.classes, task=own.task, **more)

    def divided(self, x: Any, y: Array, groups: Array | None = None, **more: Any) -> Dataset:
        """Return a data set without parts, divided by a fixed seed (``splits.split_table``)."""
        own = self.described
        return split_table(self.name, x, y, own.classes, groups, task=own.task, **more)

    def remark(self, line: str) -> None:
        """Log a warning in Flower's log that readers of results need for this data set."""
        logging.getLogger("flwr").warning("%s: %s", self.name, line)


def read_rgb(path: Path) -> Array:
    """Read a picture, uint8 (h, w, 3); grey ones become colour."""
    from PIL import Image

    with Image.open(path) as opened:
        return np.asarray(opened.convert("RGB"))


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


def md5_of(path: Path) -> str:
    """Return a file's MD5 in hexadecimal; it identifies published files, and is no protection."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def download(
    dataset: str, url: str, md5: str, data_dir: str, sub_folder: str, name: str = ""
) -> Path:
    """Download a file with a progress bar into data-dir (or our cache) and check its published MD5.

    It is written under a temporary name and renamed, so that an interrupted download leaves nothing behind.

    Raises DataError, naming the file and its folder, where it cannot be downloaded or is not the published one.
    """
    folder = (Path(data_dir).expanduser() if data_dir else cache_dir()) / sub_folder
    name = name or url.rpartition("/")[2]
    advice = f"put {name} into {folder}, or name its folder with data-dir or SILOFL_DATA"
    temporary: str | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (
            urllib.request.urlopen(url, timeout=TIMEOUT) as reply,
            tempfile.NamedTemporaryFile(dir=folder, suffix=".part", delete=False) as out,
        ):
            temporary = out.name
            total = int(reply.headers.get("Content-Length") or 0) or None
            with tqdm.wrapattr(reply, "read", total=total, desc=name, unit="B") as source:
                shutil.copyfileobj(source, out, 1 << 20)
        found = md5_of(Path(temporary))
        if found != md5:
            raise DataError(
                f"{dataset}: {url} gave a file with MD5 {found} instead of {md5}; try again, or {advice}"
            )
        Path(temporary).chmod(0o644)
        os.replace(temporary, folder / name)
        return folder / name
    except OSError as error:  # URLError, timeouts and an unwritable folder alike
        reason = getattr(error, "reason", error)
        raise DataError(
            f"{dataset}: {name} is not on this machine and could not be downloaded from {url} "
            f"({reason}); {advice}"
        ) from error
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def decode_once(name: str, sources: Sequence[Path], decode: Callable[[], Arrays]) -> Arrays:
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
