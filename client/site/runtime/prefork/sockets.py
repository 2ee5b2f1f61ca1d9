"""The Unix sockets between a silo's processes, accessible to its user only, and the lock of the template process."""

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path


def lock_path(socket_path: Path) -> Path:
    """Return the file that the template process at `socket_path` locks while it lives; its content is the pid."""
    return socket_path.with_name(socket_path.name + ".lock")


def template_pid(socket_path: Path) -> int | None:
    """Return the process number of the template process at `socket_path`; None if none runs."""
    try:
        with lock_path(socket_path).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return None
    except BlockingIOError:
        return int(lock_path(socket_path).read_text() or 0) or None
    return None


def listen(path: Path) -> socket.socket:
    """Return the socket for shims, accessible to this user only."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    with address(path) as short:
        mask = os.umask(0o177)
        listener.bind(short)
        os.umask(mask)
    # Shims that connect during the imports wait in the backlog: no slower than importing by themselves.
    listener.listen(1024)
    return listener


def connect_to(path: Path) -> socket.socket:
    """Return a connection to the process that listens at a socket. Raises OSError if there is none."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with address(path) as short:
            connection.connect(short)
    except OSError:
        connection.close()
        raise
    return connection


@contextlib.contextmanager
def address(path: Path) -> Iterator[str]:
    """Yield a short path to a socket by its folder's descriptor: an address has at most 107 bytes, a path more."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
