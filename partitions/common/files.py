"""Files that are there whole or not at all, locks that end with their process, and who may read what we write.

What silofl writes, data, models and runs, is its user's alone: files 0600, folders 0700. ``SILOFL_SHARED=1`` asks
otherwise: then the umask decides. (The server's container does, because the host's user works in its ``runs/`` too.)
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeGuard

from partitions.common.errors import DataError

LOOK_SECONDS = 0.1  # between two looks whether a lock is free


def keep_private() -> int:
    """New files and folders of this process are for its user alone from now on; returns the umask of before."""
    before = os.umask(0o077)
    os.umask(before if os.environ.get("SILOFL_SHARED") else before | 0o077)
    return before


@contextlib.contextmanager
def private() -> Iterator[None]:
    """:func:`keep_private` until the block ends."""
    before = keep_private()
    try:
        yield
    finally:
        os.umask(before)


@contextlib.contextmanager
def shared() -> Iterator[None]:
    """New files and folders are everybody's, to read and to write, until the block ends."""
    before = os.umask(0)
    try:
        yield
    finally:
        os.umask(before)


def fresh_folder(beside: Path) -> Path:
    """Create a folder beside a path, with an unpredictable name, to be renamed to it."""
    folder = Path(tempfile.mkdtemp(prefix=".", suffix=f".{beside.name}.tmp", dir=beside.parent))
    folder.chmod(_usual_mode() | (_usual_mode() & 0o444) >> 2)
    return folder


def write_atomically(
    path: Path,
    content: bytes | str | Callable[[Path], object],
    *,
    mode: int | None = None,
    durable: bool = True,
    keep: Path | None = None,
) -> None:
    """Write to a temporary name beside ``path``, flush it, rename it: a reader sees the old file or the new one.

    ``content`` is what to write, or a function that writes to the path that it is given. ``mode`` are the file's
    permissions, from its first byte on (None: as the umask has them). ``durable``: what is there outlives a power cut.
    ``keep``: where the file of before goes, once the new one is written; else it is gone.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=".", suffix=f".{path.name}.tmp", dir=path.parent)  # for its owner alone
    temporary = Path(name)
    try:
        os.close(descriptor)
        if callable(content):
            content(temporary)
        else:
            temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        temporary.chmod(_usual_mode() if mode is None else mode)
        if durable:
            sync(temporary)
        if keep is not None and path.exists():
            os.replace(path, keep)
        os.replace(temporary, path)
        if durable:
            sync(path.parent)
    except OSError as error:
        raise named(error, path) from None
    finally:
        temporary.unlink(missing_ok=True)


def append(path: Path, text: str, *, durable: bool = True) -> None:
    """Add text to the end of a file: all of it, or nothing where the disk is full. ``durable``: as above."""
    with path.open("ab", buffering=0) as file:
        before, left = file.tell(), memoryview(text.encode())
        try:
            while left:
                left = left[file.write(left) :]
            if durable:
                os.fsync(file.fileno())
        except OSError as error:
            file.truncate(before)
            raise named(error, path) from None


def named(error: OSError, path: Path) -> OSError:
    """The error with the name of the file that was to be written; Python's says it of opening a file only."""
    return OSError(error.errno, error.strerror, str(path)) if error.errno else error


def is_full(error: BaseException) -> TypeGuard[OSError]:
    """Return whether a file could not be written because the disk, or what its user may have of it, is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def sync(path: Path) -> None:
    """Wait until a file, or a directory's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _usual_mode() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return 0o666 & ~mask


@contextlib.contextmanager
def locked(path: Path, busy: str, patience: float = 0.0) -> Iterator[None]:
    """Hold the lock ``path`` until the block, or the process, ends. ValueError(``busy``) where another one holds it,
    and still does after ``patience`` seconds.
    """
    until = time.monotonic() + patience
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise DataError(busy) from None
                time.sleep(LOOK_SECONDS)
        yield
