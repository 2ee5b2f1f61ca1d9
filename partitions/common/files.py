"""Atomic files, locks that end with their process, and permissions of new files.

Only its user can read what silofl writes (data, models, runs): files are 0600, folders 0700. With ``SILOFL_SHARED=1``
the umask applies instead. (The server's container sets it, because the host's user works in its ``runs/`` too.)

A hospital's own process loads this file, too (`client/protocol/chain.py`): its imports are relative.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, TypeGuard

from .errors import DataError, UserError

LOOK_SECONDS = 0.1  # between two attempts to take a lock


def keep_private() -> int:
    """Make new files and folders of this process private to its user from now on; return the previous umask."""
    before = os.umask(0o077)
    os.umask(before if os.environ.get("SILOFL_SHARED") else before | 0o077)
    return before


def state_home() -> Path:
    """Return the folder of what silofl keeps between its commands, of this user."""
    home = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(home).absolute()


@contextlib.contextmanager
def private() -> Iterator[None]:
    """Context with the umask of :func:`keep_private`."""
    before = keep_private()
    try:
        yield
    finally:
        os.umask(before)


@contextlib.contextmanager
def share_new_files() -> Iterator[None]:
    """Context in which every user may read and write new files and folders."""
    before = os.umask(0)
    try:
        yield
    finally:
        os.umask(before)


def fresh_folder(beside: Path) -> Path:
    """Create a folder beside a path, with an unpredictable name, for renaming to the path."""
    folder = Path(tempfile.mkdtemp(prefix=".", suffix=f".{beside.name}.tmp", dir=beside.parent))
    folder.chmod(_usual_mode() | (_usual_mode() & 0o444) >> 2)
    return folder


def write_atomically(
    path: Path,
    content: bytes | str | Callable[[Path], object],
    *,
    mode: int | None = None,
    keep: Path | None = None,
    sync_name: bool = True,
) -> None:
    """Write to a temporary name beside ``path``, flush it, rename it: a reader sees the old file or the new one.

    * ``content``: the content, or a function that writes to a given path.
    * ``mode``: the file's permissions, from its first byte on (None: by the umask).
    * ``keep``: the path to which the old file is moved, once the new one is written; None: it is replaced.
    * ``sync_name``: whether to wait for the folder's list of names; if not, a power cut may leave the old file.
    """
    make_folder(path.parent)
    try:  # permissions 0600
        descriptor, name = tempfile.mkstemp(
            prefix=".", suffix=f".{path.name}.tmp", dir=path.parent
        )
    except OSError as error:
        raise name_file(error, path) from None
    temporary = Path(name)
    try:
        os.close(descriptor)
        if callable(content):
            content(temporary)
        else:
            temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        temporary.chmod(_usual_mode() if mode is None else mode)
        sync(temporary)
        if keep is not None and path.exists():
            os.replace(path, keep)
        os.replace(temporary, path)
        if sync_name:
            sync(path.parent)
    except OSError as error:
        raise name_file(error, path) from None
    finally:
        temporary.unlink(missing_ok=True)


def append(
    path: Path,
    text: str | bytes,
    *,
    durable: bool = True,
    mode: int = 0o666,
    whole: bool = False,
) -> None:
    """Append text to a file: all of it, or nothing where the disk is full.

    ``durable``: it must survive a power cut; ``mode``: of a new file; ``whole``: a line that a crash has torn is left
    as it is, on its own.
    """
    data, new = text.encode() if isinstance(text, str) else text, not path.exists()
    with open(path, "a+b", buffering=0, opener=partial(os.open, mode=mode)) as file:
        before = file.seek(0, os.SEEK_END)
        torn = whole and before and os.pread(file.fileno(), 1, before - 1) != b"\n"
        left = memoryview(b"\n" + data if torn else data)
        try:
            while left:
                left = left[os.write(file.fileno(), left) :]
            if durable:
                os.fsync(file.fileno())
        except OSError as error:
            file.truncate(before)
            raise name_file(error, path) from None
    if durable and new:
        sync(path.parent)


def name_file(error: OSError, path: Path) -> OSError:
    """Return the error with the name of what is to be written, which Python adds only when opening a file.

    A system that lets nothing be made in a folder, such as /proc, says of the new file that it does not exist.
    """
    if not error.errno:
        return error
    unmade = error.errno == errno.ENOENT and path.parent.is_dir()
    reason = f"nothing can be made in {path.parent}" if unmade else error.strerror
    return OSError(error.errno, reason, str(path))


def file_fault(path: Path) -> str:
    """Return why a path is no file that can be read, with the system's reason; empty if it is one."""
    try:
        with path.open("rb"):
            return ""
    except FileNotFoundError:
        return f"there is no file {path}"
    except OSError as error:
        return f"{path}: {error.strerror}"


def check_replaced(path: Path, kind: str, is_kind: Callable[[IO[bytes]], bool]) -> None:
    """Raise UserError if a file is there that is not of this kind, and writing would replace it."""
    if path.exists():
        with path.open("rb") as file:
            if not is_kind(file):
                raise UserError(f"{path} is there already, and is no {kind}: name another file")


def file_sum(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Make a folder and those above it, unless it is there. Raises OSError with the folder that cannot be made."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=mode)
    except OSError as error:
        raise name_file(error, Path(error.filename or path)) from None


def is_full(error: BaseException) -> TypeGuard[OSError]:
    """Return whether a file could not be written because the disk, or its user's quota, is full."""
    return isinstance(error, OSError) and error.errno in (
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EFBIG,
    )


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
def hold_lock(path: Path, busy: str, patience: float = 0.0) -> Iterator[None]:
    """Hold the lock ``path`` until the block, or the process, ends.

    Raises DataError with the text ``busy`` where another process still holds it after ``patience`` seconds.
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
