"""Data sets by name: four that are built in, and public ones whose files are found, downloaded, read and cached.

Files are searched in data-dir, then in the folder of the environment variable SILOFL_DATA, then in our cache; in each
also in the data set's usual sub-folders. A missing file is downloaded into data-dir, or into the cache without a
data-dir, and its published checksum is checked. The user must download some data sets; the error names the source. An
existing file is checked for its structure only.

``sets.toml`` describes each. Pictures stay uint8, tables float32 in their own units: the code that trains scales them.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from partitions.common.errors import DataError
from partitions.common.names import unknown_name
from partitions.labels import ONE_CLASS
from partitions.site_split import select_rows
from partitions.splits import Array, Arrays, Dataset, Split

TABLE_SEED = 42  # for the train/test split of data sets without one
TABLE_TEST = 0.2
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

    def check_there(self, pictures: Sequence[Path]) -> None:
        """Raise DataError where some of the pictures are missing."""
        if missing := [path for path in pictures if not path.is_file()]:
            count = f"{len(missing)} of {len(pictures)}"
            raise self.fault(f"{count} pictures are missing, first {missing[0]}")

    def find(self, *names: str) -> Path | None:
        """Return the first of these files or folders (in order of folders, then of names) that exists, or None."""
        paths = (folder / name for folder in self.folders for name in names)
        return next((path for path in paths if path.exists()), None)

    def fetch(self, file: str, *others: str) -> Path:
        """Return the file, or the first of ``others`` beside it; where none exists, it is downloaded."""
        name = file.rpartition("/")[2]
        return self.find(name, *others) or self.download(file)

    def download(self, file: str, key: str = "") -> Path:
        """Download one of its files; ``key``: its name among ``files``, if it has another one there."""
        known = self.described
        url, md5 = known.url + file, known.files[key or file]
        return download(self.name, url, md5, self.data_dir, known.folders[0])

    def require(self, *names: str) -> Path:
        """Return :meth:`find`; none is downloaded. Raises DataError, one line, where none exists."""
        if path := self.find(*names):
            return path
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
        """Decode slow files once; later calls map the decoded arrays from our cache, shared between processes.

        Where the cache cannot be written, the arrays stay in memory.
        """
        arrays: dict[str, Array] = {}

        def fill(folder: Path) -> None:
            arrays.update(decode())
            for key, array in arrays.items():
                np.save(folder / f"{key}.npy", array, allow_pickle=False)

        folder = cached_folder(self.name, files, fill)
        if folder is None:
            return arrays or decode()
        return {path.stem: np.load(path, mmap_mode="r") for path in folder.glob("*.npy")}

    def in_parts(self, train: Split, test: Split, **more: Any) -> Dataset:
        """Return a data set with its own training and test samples."""
        described = self.described
        return Dataset(self.name, train, test, described.classes, task=described.task, **more)

    def divide_table(
        self,
        x: Any,
        y: Array,
        groups: Array | None = None,
        vocabulary: int = 0,
        patient: Array | None = None,
    ) -> Dataset:
        """Return a data set without parts, split 80 / 20 into train and test with a fixed seed.

        It is divided class by class where its task has classes. Where ``patient``, int64 (n,), is given, patients are
        divided, each by the class of its first sample. ``groups``: text (n,), the silo of each row, or None;
        ``vocabulary``: of texts.
        """
        rng = np.random.default_rng(TABLE_SEED)
        units = np.arange(len(y)) if patient is None else patient
        people, first = np.unique(units, return_index=True)
        by_class = self.described.task in ONE_CLASS
        labels = y[first] if by_class else np.zeros(len(people), np.int64)
        chosen = []
        for label in range(self.described.classes):
            rows = rng.permutation(np.flatnonzero(labels == label))
            chosen.append(rows[: round(TABLE_TEST * len(rows))])
        in_test = np.isin(units, people[np.concatenate(chosen)])
        silos = None
        if groups is not None:
            pooled = np.concatenate([groups[~in_test], groups[in_test]])
            silos = {
                str(group): np.flatnonzero(pooled == group) for group in dict.fromkeys(groups)
            }
        train, test = (select_rows(Split(x, y, patient), part) for part in (~in_test, in_test))
        return self.in_parts(train, test, groups=silos, vocabulary=vocabulary)

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
    base = Path(data_dir).expanduser() if data_dir else cache_dir()
    folder = base / sub_folder
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
        digest = md5_of(Path(temporary))
        if digest != md5:
            raise DataError(
                f"{dataset}: {url} gave a file with MD5 {digest} instead of {md5}; try again, or {advice}"
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


def cached_folder(
    name: str, sources: Sequence[Path], fill: Callable[[Path], object]
) -> Path | None:
    """Return the cache folder for what is decoded from these files, written by ``fill`` where it does not exist.

    Its key is the files' names and sizes. None where it cannot be written.
    """
    key = hashlib.sha256(
        "\n".join(f"{p.name} {p.stat().st_size}" for p in sources).encode()
    ).hexdigest()[:16]
    folder = cache_dir() / "decoded" / f"{name}-{key}"
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


# By name

# Pixels of a side of MedMNIST's pictures; of its volumes the first two
SIZES = (28, 64, 128, 224)


def load_dataset(name: str, data_dir: str = "", task: str = "auto") -> Dataset:
    """Load a data set by name; the last few stay in memory, with read-only arrays.

    ``task``: another one than the data set's own: ``ordinal`` for classes that are grades, ``multiclass`` for several
    findings, as any of them (1) or none (0).

    Raises UserError for an unknown name. Raises DataError for a missing data-dir, a file that cannot be found or
    downloaded, a damaged file, and a task that does not fit the labels.
    """
    if data_dir:
        named_folder(data_dir)  # also for a built-in set, which does not use it
    dataset = _load(name, data_dir, os.environ.get("SILOFL_DATA", ""), str(cache_dir()))
    if task in ("auto", dataset.task):
        return dataset
    if {task, dataset.task} <= set(ONE_CLASS):
        return replace(dataset, task=task)
    if (task, dataset.task) == ("multiclass", "multilabel"):
        train, test = (
            Split(s.x, (s.y == 1).any(axis=1).astype(np.int64))
            for s in (dataset.train, dataset.test)
        )
        return Dataset(name, train, test, 2, dataset.groups)
    raise DataError(
        f"task = {task}: the labels of {name} are for {dataset.task}; leave task = auto"
    )


@lru_cache(maxsize=4)
def _load(name: str, data_dir: str, environment: str, cache: str) -> Dataset:
    # `environment` and `cache` are part of the cache's key only, because they determine where files are found.
    if name not in DATASETS:
        raise unknown_name("data set", name, DATASETS)
    described = DATASETS[name]
    module, function = described.load.split(":")
    load = getattr(import_module(f"partitions.datasets.{module}"), function)
    dataset: Dataset = load(Source(name, data_dir, described))
    for split in (dataset.train, dataset.test):
        split.x.flags.writeable = split.y.flags.writeable = False
    return dataset


def read_descriptions() -> Iterator[tuple[str, Description]]:
    """Yield the names and descriptions in ``sets.toml``; MedMNIST's (``pathmnist``, ``pathmnist-64``) last."""
    path = Path(__file__).with_name("sets.toml")
    content = tomllib.loads(path.read_text("utf-8"))
    medmnist = content.pop("medmnist")
    for name, entry in content.items():
        base = content.get(entry.pop("like", ""), {})
        entry["about"] = base.get("about", {}) | entry.get("about", {})
        yield name, Description(**{**base, **entry})
    for size in SIZES:
        for flag, (title, classes, *task) in medmnist.items():
            sides = 3 if flag.endswith("3d") else 2
            if sides == 3 and size > 64:
                continue
            shape = "x".join([str(size)] * sides)
            kind = "medmnist:load_medmnist", task[0] if task else "multiclass"
            name = flag if size == SIZES[0] else f"{flag}-{size}"
            folders = ("medmnist", "MedMNIST")
            yield name, Description(f"{title}, {shape}", classes, *kind, folders)


DATASETS = dict(read_descriptions())
