"""The Unix sockets at which a silo's processes meet, for its user alone, and who holds the parent's."""

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path


def lock_path(socket_path: Path) -> Path:
    """The file that the parent at `socket_path` holds locked for as long as it lives; its content is its pid."""
    return socket_path.with_name(socket_path.name + ".lock")


def template_pid(socket_path: Path) -> int | None:
    """The process number of the parent at `socket_path`; None where none runs."""
    try:
        with lock_path(socket_path).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return None
    except BlockingIOError:
        return int(lock_path(socket_path).read_text() or 0) or None
    return None


def listen(path: Path) -> socket.socket:
    """The socket at which shims call, for this user alone."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    with address(path) as short:
        mask = os.umask(0o177)
        listener.bind(short)
        os.umask(mask)
    # Shims that come while the imports run wait in the backlog: no slower than a start of their own.
    listener.listen(1024)
    return listener


def connect_to(path: Path) -> socket.socket:
    """Return a connection to the process that listens at a socket. Raises OSError where none does."""
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
    """A way to a socket's file by its folder's descriptor: it may have 107 bytes, and a path may be longer."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
